"""What `shoal up` tells of its fleet between two looks: who came and went, which layers moved, and nothing twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cli import watching
from cli.changes import changes
from cli.watching import STATUS_S, StatusWatch
from launch.local import LocalFleet
from shoal.errors import LaunchFailed
from shoal.status import DepartedDevice, FleetStatus, status_from_proto
from shoal.v1 import admin_pb2, types_pb2

LAYERS = {"phone-1": types_pb2.LayerRange(start=0, stop=12), "tablet-1": types_pb2.LayerRange(start=12, stop=30)}
TWO = status_from_proto(
    admin_pb2.GetStatusResponse(
        ready=True,
        devices=[admin_pb2.DeviceStatus(worker_id=worker_id, layers=layers) for worker_id, layers in LAYERS.items()],
        pipelines=[admin_pb2.PipelineStatus(pipeline_id="p1", epoch=3, worker_ids=list(LAYERS))],
    )
)


def lost(worker_id: str, ago_s: float) -> DepartedDevice:
    return DepartedDevice(worker_id, "no heartbeat for 5 s", ago_s, has_left=False)


def told(before: FleetStatus, *names: str, **fields: Any) -> list[str]:
    """The lines between a status and the same with other fields, a second later."""
    return changes(before, replace(before, **fields), names, between_s=1.0)


def test_where_nothing_has_changed_nothing_is_told() -> None:
    assert told(TWO) == []


def test_who_has_joined_is_named() -> None:
    assert told(replace(TWO, devices=TWO.devices[:1]), devices=TWO.devices) == ["tablet-1 has joined"]


def test_who_was_lost_is_told_with_the_reason_and_who_left_without() -> None:
    left = DepartedDevice("phone-2", "", 0.5, has_left=True)

    lines = told(TWO, departed=(left, lost("phone-1", 0.9)))

    assert lines == ["phone-1 was lost (no heartbeat for 5 s)", "phone-2 left"]


def test_an_end_that_was_told_already_is_not_told_again() -> None:
    assert told(TWO, "phone-1", departed=(lost("phone-1", 0.9),)) == []


def test_a_departure_of_before_is_told_once_and_another_one_of_the_same_device_again() -> None:
    before = replace(TWO, departed=(lost("phone-1", 30.0),))

    assert told(before, departed=(lost("phone-1", 31.1),)) == []
    assert told(before, departed=(lost("phone-1", 0.2),)) == ["phone-1 was lost (no heartbeat for 5 s)"]


def test_a_pipeline_of_another_epoch_is_told_with_who_holds_what() -> None:
    moved = replace(TWO.pipelines[0], epoch=4)

    assert told(TWO, pipelines=(moved,)) == ["layers are placed anew, pipeline p1: phone-1 [0, 12), tablet-1 [12, 30)"]


def test_a_pipeline_that_comes_and_one_that_goes_are_told() -> None:
    other = replace(TWO.pipelines[0], pipeline_id="p2", worker_ids=("tablet-1",))

    assert told(TWO, pipelines=(other,)) == [
        "pipeline p2 serves: tablet-1 [12, 30)",
        "pipeline p1 serves no more",
    ]


def test_with_the_last_pipeline_it_is_told_what_is_waited_for() -> None:
    lines = told(TWO, pipelines=(), ready=False, waiting_for="300 MiB are missing")

    assert lines == ["pipeline p1 serves no more; answers wait until one does: 300 MiB are missing"]


class Look:
    """A watch with a clock and answers of the test's own; None: nobody answers."""

    def __init__(self, *answers: FleetStatus | None) -> None:
        self.now = 0.0
        self.answers = list(answers)
        self.watch = StatusWatch(TWO, lambda: self.answers.pop(0), lambda: self.now)

    def after(self, seconds: float) -> list[str]:
        self.now += seconds
        return self.watch.look(set())


def test_the_fleet_is_asked_once_a_second_at_most() -> None:
    look = Look(TWO, TWO)
    look.after(0.0)

    look.after(STATUS_S / 2)
    assert len(look.answers) == 1

    look.after(STATUS_S / 2)
    assert look.answers == []


def test_what_happened_while_nobody_answered_is_told_at_the_next_answer() -> None:
    look = Look(None, replace(TWO, departed=(lost("phone-1", 1.5),)))

    assert look.after(0.0) == []
    assert look.after(2.0) == ["phone-1 was lost (no heartbeat for 5 s)"]


def test_a_departure_ages_with_the_time_between_two_looks() -> None:
    look = Look(replace(TWO, departed=(lost("phone-1", 5.0),)), replace(TWO, departed=(lost("phone-1", 15.0),)))
    look.after(0.0)

    assert look.after(10.0) == []


def test_a_device_that_was_lost_again_while_nobody_looked_is_told_again() -> None:
    look = Look(replace(TWO, departed=(lost("phone-1", 5.0),)), replace(TWO, departed=(lost("phone-1", 8.0),)))
    look.after(0.0)

    assert look.after(10.0) == ["phone-1 was lost (no heartbeat for 5 s)"]


class Ended(Exception):
    """Time to look at what was told."""


def watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_ended: int, *seen: FleetStatus
) -> str:
    """What is told of a fleet of two, some of whose processes have ended, until all of this was seen."""
    children = [
        SimpleNamespace(
            name=name, profile="phone", process=SimpleNamespace(returncode=-9), log_path=Path("log"), last_log_lines=[]
        )
        for name in LAYERS
    ]
    fleet = SimpleNamespace(
        address="127.0.0.1:1", worker_ids=list(LAYERS), redis=None, ended=lambda: children[:num_ended], revive=str
    )
    answers = chain(seen, repeat(None))

    def ask(_: object) -> FleetStatus:
        answer = next(answers)
        if answer is None:
            raise Ended
        return answer

    monkeypatch.setattr("launch.local.try_status", ask)
    monkeypatch.setattr(watching, "STATUS_S", 0.0)
    monkeypatch.setattr(watching, "WATCH_S", 0.0)
    with pytest.raises(Ended):
        watching.watch(cast(LocalFleet, fleet), TWO, lambda: None)
    return capsys.readouterr().err


def test_devices_that_ended_are_told_while_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "phone-1 was ended by SIGKILL; the others go on without it" in watched(monkeypatch, capsys, 1, TWO)


def test_a_fleet_whose_own_devices_have_all_ended_goes_on_with_those_that_joined_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = watched(monkeypatch, capsys, 2, TWO, TWO)

    assert "tablet-1 was ended by SIGKILL (log: log)" in lines


def test_a_fleet_that_nobody_is_left_of_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchFailed, match="all 2 devices have ended"):
        watched(monkeypatch, capsys, 2, TWO, replace(TWO, devices=()), TWO)
