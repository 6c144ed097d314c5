"""What a health check of a container says of a device and its fleet."""

from __future__ import annotations

import pytest

from shoal.health import problem_of
from shoal.status import status_from_proto
from shoal.v1 import admin_pb2


def problem(state: str, *, is_ready: bool = True) -> str:
    devices = [admin_pb2.DeviceStatus(worker_id="phone-1", state=state)]
    message = admin_pb2.GetStatusResponse(ready=is_ready, waiting_for="1 of 5 devices has joined", devices=devices)
    return problem_of(status_from_proto(message), "phone-1")


@pytest.mark.parametrize("state", ["ready", "standby"])
def test_a_device_that_serves_or_stands_by_is_well(state: str) -> None:
    assert problem(state) == ""


@pytest.mark.parametrize("state", ["loading", "suspect", "draining"])
def test_a_device_that_is_of_no_use_now_is_not(state: str) -> None:
    assert problem(state) == f"phone-1 is {state}"


def test_nobody_is_well_in_a_fleet_that_does_not_serve() -> None:
    assert problem("standby", is_ready=False) == "the fleet is not ready: 1 of 5 devices has joined"


def test_a_device_that_the_fleet_does_not_know_is_not_well() -> None:
    assert (
        problem_of(status_from_proto(admin_pb2.GetStatusResponse(ready=True)), "phone-1") == "phone-1 is not a member"
    )
