"""What images are built from where there is no registry of images: a Debian base made here, and wheels for its Python.

Both are kept in a cache folder and made again only when they are no longer what is wanted. Goes to the package registries
that this machine has; SHOAL_LAB_MIRROR names another Debian mirror. Called by `tests.lab.engine` before it cuts itself off.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "docker" / "requirements.txt"
WHEELHOUSE = ROOT / "docker" / "wheelhouse"
SUITE = "bookworm"
# Of that suite.
PYTHON_VERSION = "3.11.2"
# What markers of requirements are about.
IMAGES = {
    "python_full_version": PYTHON_VERSION,
    "python_version": PYTHON_VERSION.rpartition(".")[0],
    "sys_platform": "linux",
    "platform_system": "Linux",
    "os_name": "posix",
}
BASE_PACKAGES = ("python3", "python3-venv", "iproute2", "iptables")
# Nothing that runs reads these.
LEFT_OUT = (
    "./usr/share/doc",
    "./usr/share/man",
    "./usr/share/locale",
    "./var/cache/apt",
    "./var/lib/apt/lists",
    "./var/log",
)
BUILD_BACKEND = "hatchling>=1.27"


def base_tar(cache: Path) -> Path:
    """The file system of the base image, made by debootstrap if it is not there: 130 MB, in two minutes."""
    what = hashlib.sha256(" ".join([SUITE, *BASE_PACKAGES, *LEFT_OUT]).encode()).hexdigest()[:12]
    path = cache / f"base-{SUITE}-{what}.tar"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache, prefix="base-") as folder:
            mirror = [named] if (named := os.environ.get("SHOAL_LAB_MIRROR")) else []
            include = f"--include={','.join(BASE_PACKAGES)}"
            run(["debootstrap", "--variant=minbase", include, SUITE, folder, *mirror])
            part = path.with_suffix(".part")
            with tarfile.open(part, "w") as archive:
                archive.add(folder, arcname=".", filter=lambda one: None if one.name.startswith(LEFT_OUT) else one)
            part.replace(path)
    return path


def wheels(cache: Path) -> Path:
    """A folder with every pinned wheel, and what Shoal itself is built by."""
    pins = requirements_of(REQUIREMENTS.read_text(encoding="utf-8"))
    what = hashlib.sha256("\n".join([PYTHON_VERSION, BUILD_BACKEND, *pins]).encode()).hexdigest()[:12]
    folder = cache / f"wheels-{what}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        version = PYTHON_VERSION.rpartition(".")[0]
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(part), "--only-binary=:all:"]
        run([*download, "--no-deps", "--python-version", version, *pins])
        run([*download, "--python-version", version, BUILD_BACKEND])
        part.rename(folder)
    return folder


def requirements_of(text: str) -> list[str]:
    """The pins of a lock that hold for the base's Python, on Linux."""
    lines = (line.removesuffix("\\").strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "--"))]
    wanted = [one for one in found if one.marker is None or one.marker.evaluate(IMAGES)]
    return [f"{one.name}{one.specifier}" for one in wanted]


@contextmanager
def in_wheelhouse(folder: Path) -> Iterator[None]:
    """Lay wheels where the Dockerfile looks for them; what was there before stays."""
    laid = [WHEELHOUSE / wheel.name for wheel in folder.glob("*.whl") if not (WHEELHOUSE / wheel.name).exists()]
    try:
        for path in laid:
            shutil.copy2(folder / path.name, path)
        yield
    finally:
        for path in laid:
            path.unlink(missing_ok=True)


def run(command: list[str]) -> None:
    """Run a command in silence; end with what it said if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} ... failed:\n{done.stdout[-2000:]}")
