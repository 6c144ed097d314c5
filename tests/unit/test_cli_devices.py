"""What the commands that take a device out of use send, and what they tell."""

from __future__ import annotations

import pytest

from shoal.errors import PlacementImpossible
from shoal.v1 import admin_pb2, fleet_pb2
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
        f"phone-2 is drained after 0.4 s: layers [10, 20) to tablet-2, with {answers} under way; it can be stopped",
        "it is given no layers until `shoal uncordon phone-2`",
    ]


def test_a_device_that_held_nothing_can_be_stopped_too(run: Run, server: FakeServer) -> None:
    outcome = run("drain", "phone-2", "--server", server.address)
    assert outcome.out == "phone-2 holds no layers and is given none: it can be stopped\n"


def test_a_drain_with_nowhere_to_go_is_an_error_that_says_why(run: Run, server: FakeServer) -> None:
    server.orchestrator.drain = PlacementImpossible("layers [0, 30) of phone-1 need 200 bytes")

    outcome = run("drain", "phone-1", "--server", server.address)

    assert outcome.code == 1
    assert "layers [0, 30) of phone-1 need 200 bytes" in outcome.err


@pytest.mark.parametrize(("command", "is_cordoned"), [("cordon", True), ("uncordon", False)])
def test_a_device_is_cordoned_and_uncordoned(run: Run, server: FakeServer, command: str, is_cordoned: bool) -> None:
    outcome = run(command, "phone-2", "--server", server.address)
    assert server.orchestrator.cordons == [("phone-2", is_cordoned)]
    assert outcome.out.startswith("phone-2 ")


def test_the_status_shows_who_is_cordoned(run: Run) -> None:
    devices = [
        admin_pb2.DeviceStatus(
            worker_id="phone-1", state="standby", profile=fleet_pb2.DeviceProfile(), is_cordoned=True
        ),
        admin_pb2.DeviceStatus(worker_id="phone-2", state="suspect", profile=fleet_pb2.DeviceProfile()),
    ]
    with FakeServer(status=admin_pb2.GetStatusResponse(ready=True, devices=devices)) as server:
        outcome = run("status", "--server", server.address)

    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert any("phone-1" in line and "standby, cordoned" in line for line in lines)
    assert any("phone-2" in line and "suspect" in line and "cordoned" not in line for line in lines)
