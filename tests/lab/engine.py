"""A Docker engine for one command: `python -m tests.lab.engine COMMAND...` runs it with DOCKER_HOST and BASE_IMAGE set.

Needs root and Debian's docker.io. Engine, containers and command live in network, mount and process namespaces of their own,
which end with the command, however that ends: nothing of the machine's network is touched, and nothing stays but a cache
folder with images and what they are built from (SHOAL_LAB_CACHE). In there, nobody reaches the outside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from modelstore.file_lock import exclusive_lock
from tests.lab.supplies import base_tar, in_wheelhouse, run, wheels

BASE_IMAGE = "shoal-lab-base"
# Packages of Debian that the programs come from.
NEEDED = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "ip": "iproute2",
}
CGROUP = "shoal-lab"
INSIDE = "--inside"
START_S, STOP_S, LOOK_S = 60.0, 30.0, 0.1


def cache_folder() -> Path:
    return Path(os.environ.get("SHOAL_LAB_CACHE") or user_cache_path("shoal-lab"))


def check_machine() -> None:
    """End with what is missing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        sys.exit(
            "a private engine needs Linux and root; with an engine of yours, use `make lab-up` and `make lab-chaos`"
        )
    missing = sorted({package for program, package in NEEDED.items() if shutil.which(program) is None})
    if missing:
        sys.exit(f"missing: apt-get install --no-install-recommends {' '.join(missing)}")


def outside(command: Sequence[str]) -> int:
    """Fetch what images are built from, then run the command inside; its exit code."""
    check_machine()
    # Else wheels would stay in the checkout.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cache = cache_folder()
    with exclusive_lock(cache / "lock", lambda: sys.exit(f"another engine uses {cache}")):
        tar, folder = base_tar(cache), wheels(cache)
        namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=SIGTERM", "--mount-proc"]
        with in_wheelhouse(folder):
            inside_command = [sys.executable, "-m", "tests.lab.engine", INSIDE, str(cache), str(tar), *command]
            return subprocess.run([*namespaces, *inside_command], check=False).returncode


def inside(cache: Path, tar: Path, command: Sequence[str]) -> int:
    """As the first process of the namespaces: when it ends, the kernel ends all others."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run(["ip", "link", "set", "lo", "up"])
    # The engine keeps things there that must not meet those of another one, and writes a key of its own to /etc.
    run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
    run(["mkdir", "/run/etc", "/run/work"])
    run(["mount", "-t", "overlay", "overlay", "-o", "lowerdir=/etc,upperdir=/run/etc,workdir=/run/work", "/etc"])
    host = "unix:///run/engine.sock"
    with (cache / "engine.log").open("wb") as log:
        engine = subprocess.Popen(
            ["dockerd", "--host", host, "--data-root", str(cache / "engine"), "--exec-root", "/run/engine",
             "--pidfile", "/run/engine.pid", "--cgroup-parent", f"/{CGROUP}", "--log-level", "warn"],
            stdout=log, stderr=log,
        )  # fmt: skip
    environment = {**os.environ, "DOCKER_HOST": host, "BASE_IMAGE": f"{BASE_IMAGE}:{tar.stem}"}
    try:
        _wait(engine, environment, cache / "engine.log")
        _import(tar, environment)
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        engine.terminate()
        with suppress(subprocess.TimeoutExpired):
            engine.wait(STOP_S)
        _remove_cgroups()


def _wait(engine: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    ask = ["docker", "version", "--format", "{{.Server.Version}}"]
    while subprocess.run(ask, env=environment, capture_output=True, check=False).returncode:
        if engine.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the engine does not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)


def _import(tar: Path, environment: dict[str, str]) -> None:
    name = environment["BASE_IMAGE"]
    look = ["docker", "image", "inspect", name]
    if subprocess.run(look, env=environment, capture_output=True, check=False).returncode:
        subprocess.run(["docker", "import", str(tar), name], env=environment, stdout=subprocess.DEVNULL, check=True)


def _remove_cgroups() -> None:
    """The engine leaves the groups above its containers, empty."""
    for folder in (*Path("/sys/fs/cgroup").glob(f"*/{CGROUP}"), Path("/sys/fs/cgroup") / CGROUP):
        with suppress(OSError):
            folder.rmdir()


def main() -> None:
    match sys.argv[1:]:
        case [flag, cache, tar, *command] if flag == INSIDE and command:
            sys.exit(inside(Path(cache), Path(tar), command))
        case [_, *_] as command:
            sys.exit(outside(command))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
