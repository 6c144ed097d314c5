"""Plans that are made beside the event loop: nobody waits for them, and none is for a fleet that has changed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from orchestrator import planner
from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import Plan
from orchestrator.core.placement import Placement
from shoal.types import DeviceMode, PipelineId
from shoal.v1 import fleet_pb2
from tests.support.desk import Desk, make_desk
from tests.support.executors import HeldExecutor
from tests.support.shards import TinyModel

P1 = PipelineId("p1")


def make_waiting_desk(model: TinyModel, **options: Any) -> tuple[Desk, HeldExecutor]:
    """Plans are there when the test lets them be made."""
    executor = HeldExecutor()
    return make_desk(model, executor=executor, **options), executor


async def make_plan(executor: HeldExecutor) -> None:
    """Let the plan that is being made be there, and whoever waits for it hear of it."""
    executor.do_next()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_devices_are_placed_once_there_is_a_plan_for_them(fleet_model: TinyModel) -> None:
    desk, executor = make_waiting_desk(fleet_model)

    desk.join("w0")
    desk.control.tick(0.0)
    before = dict(desk.hub.routes)
    await make_plan(executor)

    assert before == {}
    assert desk.hub.routes == {P1: ("w0",)}
    assert executor.num_held == 0


async def test_a_plan_for_a_fleet_that_has_changed_meanwhile_is_not_put_in_force(fleet_model: TinyModel) -> None:
    desk, executor = make_waiting_desk(fleet_model, split="2,2", expect_workers=2)
    desk.join("w0")
    desk.join("w1")

    desk.lose("w1")
    desk.join("w2")
    num_being_made = executor.num_held
    await make_plan(executor)
    after_the_first = dict(desk.hub.routes)
    await make_plan(executor)

    assert num_being_made == 1
    assert after_the_first == {}
    assert desk.hub.routes == {P1: ("w0", "w2")}


async def test_a_plan_is_made_while_all_wait_if_the_fleet_changes_faster_than_plans_are_made(
    fleet_model: TinyModel,
) -> None:
    desk, executor = make_waiting_desk(fleet_model)
    desk.join("w0", mode=DeviceMode.LATENCY)

    for number in range(1, planner.MAX_UNWANTED + 1):
        placed_before = dict(desk.hub.routes)
        desk.join(f"w{number}", mode=DeviceMode.LATENCY)
        await make_plan(executor)

    assert placed_before == {}
    assert executor.num_held == 0
    assert {worker_id for route in desk.hub.routes.values() for worker_id in route} == set(desk.sessions)


async def test_plans_that_somebody_wanted_do_not_count_as_unwanted(fleet_model: TinyModel) -> None:
    desk, executor = make_waiting_desk(fleet_model)

    for number in range(planner.MAX_UNWANTED):
        desk.join(f"w{number}", mode=DeviceMode.LATENCY)
        while executor.num_held:
            await make_plan(executor)
    desk.join("last", mode=DeviceMode.LATENCY)

    assert executor.num_held == 1


async def test_a_fleet_that_cannot_hold_the_model_says_so_once_that_is_found(fleet_model: TinyModel) -> None:
    desk, executor = make_waiting_desk(fleet_model)

    desk.join("w0", memory_bytes=1 << 16)
    await make_plan(executor)

    assert "need" in desk.control.status().waiting_for
    assert desk.hub.routes == {}


async def test_a_device_that_leaves_is_let_go_once_there_is_a_plan_without_it(fleet_model: TinyModel) -> None:
    desk, executor = make_waiting_desk(fleet_model, split="2,2", expect_workers=2)
    for name in ("w0", "w1"):
        desk.join(name)
    await make_plan(executor)
    desk.bring_up("w0", "w1")

    desk.tell("w1", leaving=fleet_pb2.Leaving())
    await asyncio.sleep(0)
    while_planning = desk.serving()
    await make_plan(executor)

    assert while_planning == {"p1": ["w0", "w1"]}
    assert desk.is_closed("w1")


async def test_threads_take_turns_more_often_while_a_plan_is_made_and_only_then(
    monkeypatch: pytest.MonkeyPatch, fleet_model: TinyModel
) -> None:
    before, during = sys.getswitchinterval(), list[float]()

    def spy(model: ModelFootprint, fleet: FleetFigures, in_force: tuple[Placement, ...], demand: Demand) -> Plan:
        during.append(sys.getswitchinterval())
        return Plan((), (), ())

    monkeypatch.setattr(planner, "plan", spy)
    desk = make_desk(fleet_model)

    desk.join("w0")

    assert during == [pytest.approx(planner.SWITCH_S)]
    assert sys.getswitchinterval() == before > planner.SWITCH_S


async def test_threads_take_turns_as_before_also_once_there_can_be_no_plan(fleet_model: TinyModel) -> None:
    before = sys.getswitchinterval()
    desk = make_desk(fleet_model)

    desk.join("w0", memory_bytes=1 << 16)

    assert "need" in desk.control.status().waiting_for
    assert sys.getswitchinterval() == before
