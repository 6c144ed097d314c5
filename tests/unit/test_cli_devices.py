"""What the commands that take a device out of use send, and what they tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli import devices
from shoal.errors import PlacementImpossible
from shoal.v1 import admin_pb2, fleet_pb2, types_pb2
from tests.support.fake_server import FakeServer
from tests.unit.conftest import Run


@pytest.mark.parametrize(("num_sequences", "answers"), [(0, "no answers"), (1, "1 answer"), (3, "3 answers")])
def test_a_drain_says_where_the_layers_went_and_that_the_device_can_be_stopped(
    run: Run, server: FakeServer, num_sequences: int, answers: str
) -> None:
    server.orchestrator.drain = admin_pb2.DrainResponse(
        moved="layers [10, 20) to tablet-2", num_sequences=num_sequences, took_s=0.44
    )

    outcome = run("drain", "phone-2", "--server", server.address)

    assert server.orchestrator.drained == ["phone-2"]
    assert outcome.out.splitlines() == [
        f"phone-2 is drained after 0.4 s: layers [10, 20) to tablet-2, with {answers} under way",
        "it can be stopped; it is given no layers until `shoal uncordon phone-2`",
    ]


def test_a_device_that_held_nothing_can_be_stopped_too(run: Run, server: FakeServer) -> None:
    outcome = run("drain", "phone-2", "--server", server.address)
    assert outcome.out == "phone-2 holds no layers and is given none: it can be stopped\n"


def test_a_drain_with_nowhere_to_go_is_an_error_that_says_why(run: Run, server: FakeServer) -> None:
    server.orchestrator.drain = PlacementImpossible("layers [0, 30) of phone-1 need 200 bytes")

    outcome = run("drain", "phone-1", "--server", server.address)

    assert outcome.code == 1
    assert "layers [0, 30) of phone-1 need 200 bytes" in outcome.err


def holding(worker_id: str, start: int, stop: int, **fields: Any) -> admin_pb2.GetStatusResponse:
    """A fleet whose one device holds these layers of p1; none if both are 0."""
    device = admin_pb2.DeviceStatus(
        worker_id=worker_id,
        state="ready" if stop else "standby",
        layers=types_pb2.LayerRange(start=start, stop=stop) if stop else None,
        pipeline_id="p1" if stop else "",
        **fields,
    )
    return admin_pb2.GetStatusResponse(ready=True, devices=[device])


def test_a_device_that_is_cordoned_goes_on_with_what_it_holds_and_that_is_said(run: Run) -> None:
    with FakeServer(status=holding("phone-2", 10, 20)) as server:
        outcome = run("cordon", "phone-2", "--server", server.address)

    assert server.orchestrator.cordons == [("phone-2", True)]
    assert outcome.out.splitlines() == [
        "phone-2 is given no layers until `shoal uncordon phone-2`",
        "it goes on with layers [10, 20) of p1: `shoal drain phone-2` would move them",
    ]


def test_a_device_that_is_cordoned_while_it_holds_nothing_changes_nothing(run: Run) -> None:
    with FakeServer(status=holding("phone-2", 0, 0)) as server:
        outcome = run("cordon", "phone-2", "--server", server.address)
    assert outcome.out.splitlines()[1] == "it holds none: all goes on without it"


def test_a_device_that_is_given_layers_when_it_is_uncordoned_says_which(run: Run) -> None:
    with FakeServer(status=holding("phone-2", 0, 0)) as server:
        server.orchestrator.next_statuses = [holding("phone-2", 0, 0), holding("phone-2", 10, 20)]
        outcome = run("uncordon", "phone-2", "--server", server.address)

    assert server.orchestrator.cordons == [("phone-2", False)]
    assert outcome.out == "phone-2 may be given layers again, and is: layers [10, 20) of p1 (ready)\n"


def test_a_device_that_is_given_none_when_it_is_uncordoned_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SETTLE_S", 0.0)
    with FakeServer(status=holding("phone-2", 0, 0)) as server:
        outcome = run("uncordon", "phone-2", "--server", server.address)
    assert outcome.out == (
        "phone-2 may be given layers again; it stands by until that gains enough and disturbs nobody\n"
    )


def test_a_device_that_kept_its_layers_goes_on_with_them_when_it_is_uncordoned(run: Run) -> None:
    with FakeServer(status=holding("phone-2", 10, 20, is_cordoned=True)) as server:
        outcome = run("uncordon", "phone-2", "--server", server.address)
    assert outcome.out == "phone-2 may be given layers again; it goes on with layers [10, 20) of p1\n"


@pytest.mark.parametrize(("command", "is_cordoned"), [("cordon", True), ("uncordon", False)])
def test_what_came_of_a_cordon_can_be_had_as_json(run: Run, command: str, is_cordoned: bool) -> None:
    with FakeServer(status=holding("phone-2", 10, 20)) as server:
        outcome = run(command, "phone-2", "--json", "--server", server.address)
    assert json.loads(outcome.out) == {
        "worker_id": "phone-2",
        "is_cordoned": is_cordoned,
        "state": "ready",
        "pipeline_id": "p1",
        "layers": [10, 20],
    }


def test_what_came_of_a_drain_can_be_had_as_json(run: Run, server: FakeServer) -> None:
    server.orchestrator.drain = admin_pb2.DrainResponse(
        moved="layers [10, 20) to tablet-2", num_sequences=3, took_s=0.5
    )

    outcome = run("drain", "phone-2", "--json", "--server", server.address)

    assert json.loads(outcome.out) == {
        "worker_id": "phone-2",
        "moved": "layers [10, 20) to tablet-2",
        "num_sequences": 3,
        "took_s": 0.5,
    }


def test_the_status_shows_who_is_cordoned(run: Run) -> None:
    known = [
        admin_pb2.DeviceStatus(
            worker_id="phone-1", state="standby", profile=fleet_pb2.DeviceProfile(), is_cordoned=True
        ),
        admin_pb2.DeviceStatus(worker_id="phone-2", state="suspect", profile=fleet_pb2.DeviceProfile()),
    ]
    with FakeServer(status=admin_pb2.GetStatusResponse(ready=True, devices=known)) as server:
        outcome = run("status", "--server", server.address)

    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert any("phone-1" in line and "standby, cordoned" in line for line in lines)
    assert any("phone-2" in line and "suspect" in line and "cordoned" not in line for line in lines)
