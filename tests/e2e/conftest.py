"""Fleets of real processes with the real model: one that all tests share, and others to be broken.

Owns every process that is started and ends it by its id, also where a test fails. Tests that kill, stop or restart
something do it to a fleet of their own (`start_fleet`), never to the shared one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from launch.local import LocalFleet
from launch.profiles import load_profile
from modelstore.manifest import Manifest
from shoal import Client
from shoal.config import OrchestratorConfig
from shoal.types import DeviceProfile, ThermalModel
from tests.support.commands import WAIT_S, processes_of
from tests.support.real_model import real_store

StartFleet = Callable[..., LocalFleet]
DEVICES = ("phone", "phone", "tablet")
# All of them compute: measured on a busy machine, it is now three of them that are fastest and now two.
THIRDS = "10,10,10"


def swift(name: str) -> DeviceProfile:
    """A shipped device that computes as fast as this machine does and never warms up, so that no test waits for that."""
    return replace(load_profile(name), speed=1.0, thermal=ThermalModel())


@pytest.fixture(scope="package")
def device_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The devices' own copies of weights: fetched by the first fleet, found by the next ones."""
    folder = tmp_path_factory.mktemp("devices")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def make_home(
    tmp_path_factory: pytest.TempPathFactory, real_model: Manifest, device_folder: Path
) -> Iterator[Callable[[], Path]]:
    """Make home folders that have the real model in them; at the end no process of them may be left."""
    homes: list[Path] = []

    def make() -> Path:
        home = tmp_path_factory.mktemp("home")
        for name in ("models", "blobs"):
            (home / name).symlink_to(real_store().root / name)
        (home / "devices").symlink_to(device_folder)
        homes.append(home)
        return home

    yield make
    _end_left_over(homes)


def _end_left_over(homes: list[Path]) -> None:
    left = {process: process.info["cmdline"] for home in homes for process in processes_of(home)}
    for process in left:
        process.kill()
    assert not left, f"left running: {list(left.values())}"


@pytest.fixture
def home(make_home: Callable[[], Path]) -> Iterator[Path]:
    """A home folder with the real model, for processes of this test alone."""
    home = make_home()
    yield home
    _end_left_over([home])


@pytest.fixture(scope="package")
def fleet(make_home: Callable[[], Path]) -> Iterator[LocalFleet]:
    """The fleet that all tests share: a phone, another and a tablet."""
    config = OrchestratorConfig(home=make_home(), port=0, split=THIRDS)
    with LocalFleet(config, [swift(name) for name in DEVICES]) as fleet:
        fleet.wait_ready(WAIT_S)
        yield fleet


@pytest.fixture
def client(fleet: LocalFleet) -> Iterator[Client]:
    """A client of the shared fleet."""
    with Client(fleet.address, timeout_s=WAIT_S) as client:
        yield client


@pytest.fixture
def start_fleet(home: Path) -> Iterator[StartFleet]:
    """Start a fleet of this test's own, shipped devices by name as swift ones; options are those of OrchestratorConfig."""
    with ExitStack() as started:

        def start(*devices: str | DeviceProfile, **options: object) -> LocalFleet:
            config = OrchestratorConfig(home=home, port=0, **options)  # type: ignore[arg-type]
            swift_ones = [swift(device) if device in DEVICES else device for device in devices]
            fleet = started.enter_context(LocalFleet(config, swift_ones))
            fleet.wait_ready(WAIT_S)
            return fleet

        yield start
