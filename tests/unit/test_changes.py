"""What goes is drained first, what comes is waited for, and a change that cannot be is none."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.changes import Change
from launch.desk import Desk, Wanted
from shoal.client import Client
from shoal.errors import ConfigError, NotReady, PlacementImpossible
from shoal.status import Drained

DEVICES = ("phone", "tablet", "tablet")
PORT = 50_070


class FakeFleet:
    """A launcher and an orchestrator that do at once what they are told, and write down in which order."""

    def __init__(self, desk: Desk, pipelines: Iterable[tuple[str, ...]] = ()) -> None:
        self.desk = desk
        self.there = ["phone-1", "tablet-1", "tablet-2"]
        self.pipelines = [SimpleNamespace(worker_ids=ids) for ids in pipelines]
        self.needed: set[str] = set()
        self.cordoned: set[str] = set()
        self.is_ready = True
        self.happened: list[str] = []
        self._generations: dict[str, int] = {}

    def status(self) -> Any:
        wanted = self.desk.take()
        if wanted is not None:
            self.desk.tell(wanted)
            anew = [name for name, number in wanted.generations.items() if self._generations.get(name) != number]
            self._generations = dict(wanted.generations)
            counts = {name: wanted.devices.count(name) for name in ("phone", "tablet")}
            self.there = [f"{name}-{number}" for name, count in counts.items() for number in range(1, count + 1)]
            if anew:
                # Gone at this look, there at the next one.
                self.happened += [f"start {name}" for name in anew]
                return self._status([one for one in self.there if one not in anew])
        return self._status(self.there)

    def _status(self, there: list[str]) -> Any:
        devices = [SimpleNamespace(worker_id=worker_id) for worker_id in there]
        return SimpleNamespace(
            devices=devices,
            pipelines=self.pipelines,
            is_complete=True,
            ready=self.is_ready,
            waiting_for="2 of 3 devices have joined",
        )

    def drain(self, worker_id: str) -> Drained:
        if worker_id in self.needed:
            raise PlacementImpossible("300 MiB are missing")
        self.cordoned.add(worker_id)
        self.happened.append(f"drain {worker_id}")
        return Drained("", 0, 0.0)

    def cordon(self, worker_id: str, is_cordoned: bool) -> None:
        assert not is_cordoned
        self.cordoned.remove(worker_id)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path, PORT)
    desk.tell(Wanted(DEVICES))
    return desk


def change(fleet: FakeFleet) -> Change:
    return Change(cast(Client, fleet), fleet.desk, fleet.happened.append)


def test_a_device_that_is_wanted_comes(desk: Desk) -> None:
    fleet = FakeFleet(desk)

    change(fleet).scale("tablet", 3)

    assert fleet.there == ["phone-1", "tablet-1", "tablet-2", "tablet-3"]
    assert fleet.happened == ["tablet-3 has joined"]


def test_a_device_that_goes_is_drained_before_and_its_name_is_free_after(desk: Desk) -> None:
    fleet = FakeFleet(desk)

    change(fleet).scale("tablet", 1)

    assert fleet.there == ["phone-1", "tablet-1"]
    assert fleet.happened == ["drain tablet-2", "tablet-2 is drained", "tablet-2 has gone"]
    assert not fleet.cordoned


def test_a_device_that_was_wanted_and_never_came_is_no_longer_wanted(desk: Desk) -> None:
    fleet = FakeFleet(desk)
    fleet.there.remove("tablet-2")

    change(fleet).scale("tablet", 1)

    assert fleet.happened == ["tablet-2 has gone"]
    assert desk.look().devices == ("phone", "tablet")


def test_a_device_that_the_others_cannot_do_without_stays_and_so_do_all(desk: Desk) -> None:
    fleet = FakeFleet(desk)
    fleet.needed = {"tablet-2"}

    with pytest.raises(PlacementImpossible):
        change(fleet).scale("tablet", 0)

    assert fleet.there == ["phone-1", "tablet-1", "tablet-2"]
    assert not fleet.cordoned
    assert desk.look() == Wanted(DEVICES)


def test_all_are_started_anew_one_at_a_time_who_stands_by_first(desk: Desk) -> None:
    fleet = FakeFleet(desk, pipelines=[("tablet-1",), ("phone-1",)])

    change(fleet).roll()

    steps = [step for step in fleet.happened if step.startswith(("drain", "start"))]
    order = ["tablet-2", "tablet-1", "phone-1"]
    assert steps == [step for name in order for step in (f"drain {name}", f"start {name}")]
    assert not fleet.cordoned
    assert dict(desk.look().generations) == dict.fromkeys(order, 1)


def test_a_fleet_that_still_starts_is_not_changed(desk: Desk) -> None:
    fleet = FakeFleet(desk)
    fleet.is_ready = False

    with pytest.raises(NotReady, match="2 of 3 devices have joined"):
        change(fleet).scale("tablet", 1)

    assert desk.look() == Wanted(DEVICES)


def test_a_fleet_whose_launcher_is_gone_cannot_be_changed(desk: Desk, tmp_path: Path) -> None:
    desk.leave()

    with pytest.raises(ConfigError, match="shoal up --on ray"):
        change(FakeFleet(desk)).scale("tablet", 1)


def test_what_another_program_left_on_the_desk_is_thrown_away(tmp_path: Path, desk: Desk) -> None:
    (tmp_path / "logs" / str(PORT) / "wanted.json").write_text('{"devices": 3')

    assert desk.take() is None
    assert os.listdir(tmp_path / "logs" / str(PORT)) == ["devices.json"]
