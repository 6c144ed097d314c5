"""Layers that move because of what devices report: told by hand, without waiting."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.core import conditions, replacement
from shoal import messages
from shoal.types import Telemetry
from shoal.v1 import fleet_pb2
from tests.support.desk import Desk, make_desk
from tests.support.shards import TinyModel

GIB = 1 << 30
WELL = Telemetry(rss_bytes=1, free_memory_bytes=GIB)
# More than the GiB that the devices of these tests may use.
OVER_BUDGET = Telemetry(rss_bytes=2 * GIB, free_memory_bytes=GIB)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "SHORT_S", 0.0)
    monkeypatch.setattr(replacement, "HOLD_S", 0.0)
    monkeypatch.setattr(conditions, "FIRST_STEP_S", 5.0)


def report(desk: Desk, worker_id: str, telemetry: Telemetry) -> None:
    desk.tell(worker_id, heartbeat=fleet_pb2.Heartbeat(telemetry=messages.telemetry_to_proto(telemetry)))


async def turns() -> None:
    """Let what has been begun in tasks go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def make_serving_desk(model: TinyModel) -> Desk:
    """w0 has all layers, w1 stands by."""
    desk = make_desk(model, split="4")
    desk.join("w0")
    desk.bring_up("w0")
    desk.join("w1")
    desk.commands("w1")
    assert desk.serving() == {"p1": ["w0"]}
    return desk


async def test_a_device_that_runs_out_of_memory_serves_until_another_one_has_its_layers(fleet_model: TinyModel) -> None:
    desk = make_serving_desk(fleet_model)

    report(desk, "w0", OVER_BUDGET)
    desk.control.tick(0.0)
    await turns()
    ahead = desk.load_command("w1")
    during = desk.serving()
    desk.tell("w1", shard_loaded=fleet_pb2.ShardLoaded(pipeline_id="p1", epoch=ahead.epoch))
    await turns()
    desk.bring_up("w1")

    assert (ahead.pipeline_id, during) == ("p1", {"p1": ["w0"]})
    assert desk.serving() == {"p1": ["w1"]}


async def test_a_device_that_cannot_take_over_leaves_all_as_it_was(fleet_model: TinyModel) -> None:
    desk = make_serving_desk(fleet_model)
    report(desk, "w0", OVER_BUDGET)
    desk.control.tick(0.0)
    await turns()
    ahead = desk.load_command("w1")

    failed = fleet_pb2.ShardFailed(pipeline_id="p1", epoch=ahead.epoch, reason="CORRUPT_BLOB", message="torn")
    desk.tell("w1", shard_failed=failed)
    await turns()

    assert desk.serving() == {"p1": ["w0"]}
    assert [one.WhichOneof("command") for one in desk.commands("w1")] == ["unload_shard"]


async def test_devices_that_are_all_short_of_memory_are_used_all_the_same(fleet_model: TinyModel) -> None:
    desk = make_serving_desk(fleet_model)
    report(desk, "w1", OVER_BUDGET)
    report(desk, "w0", OVER_BUDGET)
    desk.control.tick(0.0)
    await turns()
    assert desk.serving() == {"p1": ["w0"]}


async def test_a_worker_that_is_at_one_step_for_too_long_is_lost_and_another_takes_its_place(
    fleet_model: TinyModel,
) -> None:
    desk = make_serving_desk(fleet_model)

    report(desk, "w0", Telemetry(busy_s=4.9))
    patient = desk.serving()
    report(desk, "w0", Telemetry(busy_s=5.1))
    is_closed = desk.is_closed("w0")
    desk.bring_up("w1")

    assert (patient, is_closed) == ({"p1": ["w0"]}, True)
    assert desk.serving() == {"p1": ["w1"]}


async def test_a_worker_that_comes_back_while_it_is_stuck_is_given_no_layers(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, split="4", expect_workers=2)
    desk.join("w0")
    report(desk, "w0", Telemetry(busy_s=conditions.STUCK_S + 1))

    desk.join("w1")
    desk.control.tick(0.0)
    assert desk.hub.routes == {}

    report(desk, "w0", WELL)
    desk.control.tick(0.0)
    assert desk.hub.routes == {"p1": ("w0",)}
