"""What goes is drained first, what comes is waited for, and a change that cannot be is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from launch import changes
from launch.changes import Change, let_in, let_in_after_others
from launch.desk import Desk, Wanted
from shoal.client import Client
from shoal.errors import ConfigError, InvalidRequest, NotReady, PlacementImpossible
from shoal.status import Drained

DEVICES = ("phone", "tablet", "tablet")
PORT = 50_070


class AttendedDesk(Desk):
    """A desk whose launcher comes now and then: after each look at it."""

    attend: Callable[[], None] = staticmethod(lambda: None)

    def look(self) -> Wanted:
        seen = super().look()
        self.attend()
        return seen


class FakeFleet:
    """A launcher and an orchestrator that do at once what they are told, and write down in which order."""

    def __init__(self, desk: AttendedDesk, pipelines: Iterable[tuple[str, ...]] = ()) -> None:
        self.desk = desk
        desk.attend = self.attend
        self.there = ["phone-1", "tablet-1", "tablet-2"]
        self.pipelines = [SimpleNamespace(worker_ids=ids) for ids in pipelines]
        # What the next looks see while workers are started anew: who is there, and whether all pipelines serve.
        self.coming: list[tuple[list[str], bool]] = []
        self.needed: set[str] = set()
        # How often each device is still found loading.
        self.loading: dict[str, int] = {}
        self.cut_short_at = ""
        self.cordoned: set[str] = set()
        self.looks_until_ready = 0
        self.happened: list[str] = []
        self._generations: dict[str, int] = {}

    def attend(self) -> None:
        """Do the launcher's part."""
        wanted = self.desk.take()
        if wanted is not None:
            self.desk.tell(wanted)
            anew = [name for name, number in wanted.generations.items() if self._generations.get(name) != number]
            self._generations = dict(wanted.generations)
            counts = {name: wanted.devices.count(name) for name in ("phone", "tablet")}
            self.there = [f"{name}-{number}" for name, count in counts.items() for number in range(1, count + 1)]
            if anew:
                self.happened += [f"start {name}" for name in anew]
                without = [one for one in self.there if one not in anew]
                self.coming = [(self.there, True), (without, False), *[(self.there, False)] * 3]

    def status(self) -> Any:
        return self._status(*(self.coming.pop(0) if self.coming else (self.there, True)))

    def _status(self, there: list[str], is_complete: bool) -> Any:
        self.looks_until_ready -= 1
        devices = [SimpleNamespace(worker_id=one, is_cordoned=one in self.cordoned) for one in there]
        return SimpleNamespace(
            devices=devices,
            pipelines=self.pipelines,
            is_complete=is_complete,
            ready=self.looks_until_ready < 0,
            waiting_for="2 of 3 devices have joined",
        )

    def drain(self, worker_id: str) -> Drained:
        assert not self.coming, "before all serve again"
        if worker_id in self.needed:
            raise PlacementImpossible("300 MiB are missing")
        if self.loading.get(worker_id, 0) > 0:
            self.loading[worker_id] -= 1
            raise NotReady(f"{worker_id} is loading; try again when that is over")
        self.cordoned.add(worker_id)
        self.happened.append(f"drain {worker_id}")
        if worker_id == self.cut_short_at:
            raise KeyboardInterrupt
        return Drained("", 0, 0.0)

    def cordon(self, worker_id: str, is_cordoned: bool) -> None:
        assert not is_cordoned
        assert all(worker_id in there for there, _ in self.coming), "before it has gone"
        if worker_id not in self.cordoned | set(self.there):
            raise InvalidRequest("worker_id", f"no device {worker_id!r} is attached")
        self.cordoned.discard(worker_id)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "POLL_S", 0.0)
    for name in ("JOIN_S", "GONE_S", "TAKEN_S"):
        monkeypatch.setattr(changes, name, 2.0)


@pytest.fixture
def desk(tmp_path: Path) -> AttendedDesk:
    desk = AttendedDesk(tmp_path, PORT)
    desk.tell(Wanted(DEVICES))
    return desk


def change(fleet: FakeFleet) -> Change:
    return Change(cast(Client, fleet), fleet.desk, fleet.happened.append)


def test_a_device_that_is_wanted_comes(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)

    change(fleet).scale({"tablet": 3})

    assert fleet.there == ["phone-1", "tablet-1", "tablet-2", "tablet-3"]
    assert fleet.happened == ["tablet-3 has joined"]


def test_a_device_that_goes_is_drained_before_and_its_name_is_free_after(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)

    change(fleet).scale({"tablet": 1})

    assert fleet.there == ["phone-1", "tablet-1"]
    assert fleet.happened == ["drain tablet-2", "tablet-2 is drained", "tablet-2 has gone"]
    assert not fleet.cordoned


def test_several_names_are_one_change(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)

    change(fleet).scale({"tablet": 1, "phone": 2})

    assert fleet.there == ["phone-1", "phone-2", "tablet-1"]
    assert fleet.happened == ["drain tablet-2", "tablet-2 is drained", "tablet-2 has gone", "phone-2 has joined"]


def test_counts_that_together_leave_no_device_change_nothing(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)

    with pytest.raises(ConfigError, match="phone=0 would leave no device"):
        change(fleet).scale({"tablet": 0, "phone": 0})

    assert fleet.happened == []
    assert desk.look() == Wanted(DEVICES)


def test_a_device_that_was_wanted_and_never_came_is_no_longer_wanted(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.there.remove("tablet-2")

    change(fleet).scale({"tablet": 1})

    assert fleet.happened == ["tablet-2 has gone"]
    assert desk.look().devices == ("phone", "tablet")


def test_a_second_change_builds_on_the_first_though_there_was_nothing_to_wait_for(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.there.remove("tablet-2")

    change(fleet).scale({"tablet": 1})
    change(fleet).scale({"phone": 2})

    assert desk.look().devices == ("phone", "tablet", "phone")


def test_a_device_that_the_others_cannot_do_without_stays_and_so_do_all(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.needed = {"tablet-2"}

    with pytest.raises(PlacementImpossible):
        change(fleet).scale({"tablet": 0})

    assert fleet.there == ["phone-1", "tablet-1", "tablet-2"]
    assert not fleet.cordoned
    assert desk.look() == Wanted(DEVICES)


def test_a_device_that_loads_just_then_is_drained_when_that_is_over(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.loading = {"tablet-2": 3}

    change(fleet).scale({"tablet": 1})

    assert fleet.happened == ["drain tablet-2", "tablet-2 is drained", "tablet-2 has gone"]


def test_a_device_that_loads_without_end_is_told(desk: AttendedDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "JOIN_S", 0.0)
    fleet = FakeFleet(desk)
    fleet.loading = {"tablet-2": 1_000_000}

    with pytest.raises(NotReady, match="tablet-2 is loading"):
        change(fleet).scale({"tablet": 1})

    assert fleet.there == ["phone-1", "tablet-1", "tablet-2"]


def test_all_are_started_anew_one_at_a_time_who_stands_by_first(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk, pipelines=[("tablet-1",), ("phone-1",)])

    change(fleet).roll()

    steps = [step for step in fleet.happened if step.startswith(("drain", "start"))]
    order = ["tablet-2", "tablet-1", "phone-1"]
    assert steps == [step for name in order for step in (f"drain {name}", f"start {name}")]
    assert not fleet.cordoned
    assert dict(desk.look().generations) == dict.fromkeys(order, 1)


def test_a_change_that_is_interrupted_leaves_nobody_cordoned(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.cut_short_at = "tablet-1"

    with pytest.raises(KeyboardInterrupt):
        change(fleet).roll()

    assert "drain tablet-1" in fleet.happened
    assert not fleet.cordoned
    assert not desk.cordoned


def test_a_device_that_an_operator_has_cordoned_is_still_cordoned_when_it_runs_anew(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.cordoned = {"tablet-1"}

    change(fleet).roll()

    assert fleet.cordoned == {"tablet-1"}


def test_the_name_of_a_device_that_went_is_free_whoever_had_cordoned_it(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.cordoned = {"tablet-2"}

    change(fleet).scale({"tablet": 1})

    assert not fleet.cordoned


def test_whom_a_killed_change_has_cordoned_is_let_in_again_but_for_those_that_still_have_to_go(
    desk: AttendedDesk,
) -> None:
    fleet = FakeFleet(desk)
    fleet.cordoned = {"phone-1", "tablet-2"}
    desk.cordoned = ("phone-1", "tablet-2", "tablet-3")
    desk.tell(Wanted(DEVICES[:2]))

    assert let_in(cast(Client, fleet), desk) == ["phone-1", "tablet-3"]
    assert (fleet.cordoned, sorted(desk.cordoned)) == ({"tablet-2"}, ["tablet-2"])

    fleet.there.remove("tablet-2")
    assert let_in(cast(Client, fleet), desk) == ["tablet-2"]
    assert (fleet.cordoned, sorted(desk.cordoned)) == (set(), [])


def test_while_a_change_is_under_way_nobody_else_lets_in_whom_it_has_cordoned(
    desk: AttendedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = FakeFleet(desk)
    fleet.cordoned = {"phone-1"}
    desk.cordoned = ("phone-1",)
    monkeypatch.setattr(changes, "Client", lambda *_, **__: nullcontext(fleet))

    with desk.changing():
        assert let_in_after_others("address", desk) == []
    assert fleet.cordoned == {"phone-1"}

    assert let_in_after_others("address", desk) == ["phone-1"]
    assert not fleet.cordoned


def test_a_fleet_that_loads_just_then_is_changed_when_it_serves(desk: AttendedDesk) -> None:
    fleet = FakeFleet(desk)
    fleet.looks_until_ready = 3

    change(fleet).scale({"tablet": 3})

    assert fleet.happened[0].endswith("at the moment: 2 of 3 devices have joined")
    assert fleet.happened[1:] == ["tablet-3 has joined"]


def test_a_fleet_that_never_starts_is_not_changed(desk: AttendedDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "JOIN_S", 0.0)
    fleet = FakeFleet(desk)
    fleet.looks_until_ready = 1_000_000

    with pytest.raises(NotReady, match="2 of 3 devices have joined"):
        change(fleet).scale({"tablet": 1})

    assert desk.look() == Wanted(DEVICES)


def test_a_launcher_that_was_killed_is_told_from_one_that_runs(
    desk: AttendedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: pid != os.getpid())

    with pytest.raises(ConfigError, match="shoal up --on ray"):
        desk.look()


def test_a_fleet_whose_launcher_is_gone_cannot_be_changed(desk: AttendedDesk, tmp_path: Path) -> None:
    desk.leave()

    with pytest.raises(ConfigError, match="shoal up --on ray"):
        change(FakeFleet(desk)).scale({"tablet": 1})


def test_two_changes_at_once_would_undo_each_other_so_the_second_is_refused(tmp_path: Path, desk: AttendedDesk) -> None:
    with desk.changing(), pytest.raises(NotReady, match="another `shoal scale`"), Desk(tmp_path, PORT).changing():
        pass

    with Desk(tmp_path, PORT).changing():
        pass


def test_where_there_is_no_fleet_a_change_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shoal up --on ray"), Desk(tmp_path / "home", PORT).changing():
        pass

    assert not (tmp_path / "home").exists()


def test_what_another_program_left_about_cordons_is_nobody(tmp_path: Path, desk: AttendedDesk) -> None:
    (tmp_path / "logs" / str(PORT) / "cordoned.json").write_text("5")

    assert desk.cordoned == ()


def test_what_another_program_left_on_the_desk_is_thrown_away(tmp_path: Path, desk: AttendedDesk) -> None:
    (tmp_path / "logs" / str(PORT) / "wanted.json").write_text('{"devices": 3')

    assert desk.take() is None
    assert os.listdir(tmp_path / "logs" / str(PORT)) == ["devices.json"]
