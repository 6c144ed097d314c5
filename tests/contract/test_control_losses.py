"""Control when devices or links are lost, and when devices hold layers from before: who gets which layers then."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from orchestrator import control
from shoal.types import PipelineId, WorkerId
from shoal.v1 import fleet_pb2
from tests.support.builders import make_sequence
from tests.support.desk import Desk, held_by, make_desk
from tests.support.shards import TinyModel

P1 = PipelineId("p1")
AFTER_GRACE_S = control.LINK_GRACE_S * 2


def make_pipeline(model: TinyModel, *, speed: float = 1.0) -> Desk:
    """p1 is w0 and w1, w2 stands by, of that speed."""
    desk = make_desk(model, split="2,2", expect_workers=3)
    desk.join("w0")
    desk.join("w1")
    desk.join("w2", speed=speed)
    desk.bring_up("w0", "w1")
    assert desk.serving() == {"p1": ["w0", "w1"]}
    desk.commands("w2")
    return desk


async def test_a_device_that_stands_by_takes_the_stage_of_a_lost_one(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model)

    desk.lose("w0")
    desk.bring_up("w2", "w1")

    assert desk.serving() == {"p1": ["w2", "w1"]}


def make_three(model: TinyModel, *, is_split: bool = False) -> Desk:
    """p1 is w0, w1 and w2, with one, one and two layers; nobody stands by. is_split: as the operator wants it."""
    desk = make_desk(model, split="1,1,2", expect_workers=3)
    for name in ("w0", "w1", "w2"):
        desk.join(name)
    desk.bring_up("w0", "w1", "w2")
    desk.control._planner.demand = replace(desk.control._planner.demand, split=(1, 1, 2) if is_split else None)
    return desk


async def test_where_nobody_stands_by_the_stages_beside_a_lost_one_take_its_layers(fleet_model: TinyModel) -> None:
    desk = make_three(fleet_model)
    epoch = desk.epoch(P1)
    for name in ("w0", "w2"):
        desk.commands(name)

    desk.lose("w1")
    desk.bring_up("w0", "w2")

    (placement,) = desk.control._fleet.placements
    assert desk.serving() == {"p1": ["w0", "w2"]}
    assert desk.epoch(P1) > epoch
    assert [str(stage.layers) for stage in placement.stages] == ["[0, 2)", "[2, 4)"]


async def test_a_cordoned_stage_keeps_what_it_has_and_takes_no_layers_of_a_lost_one(fleet_model: TinyModel) -> None:
    desk = make_three(fleet_model)
    desk.control.relief.cordon(WorkerId("w0"), True)

    desk.lose("w1")

    (placement,) = desk.control._fleet.placements
    assert {stage.worker_id: str(stage.layers) for stage in placement.stages} == {"w0": "[0, 1)", "w2": "[1, 4)"}


async def test_a_split_that_an_operator_wants_is_not_changed_by_a_loss(fleet_model: TinyModel) -> None:
    desk = make_three(fleet_model, is_split=True)

    desk.lose("w1")

    assert P1 not in desk.hub.routes


async def test_a_link_that_breaks_is_opened_anew_between_the_same_devices(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model)
    before = desk.epoch(P1)

    desk.tell("w0", link_failed=fleet_pb2.LinkFailed(pipeline_id="p1", epoch=before))
    await asyncio.sleep(AFTER_GRACE_S)
    desk.bring_up("w0", "w1")

    assert desk.serving() == {"p1": ["w0", "w1"]}
    assert desk.epoch(P1) > before
    assert [one.WhichOneof("command") for one in desk.commands("w2")] == ["unload_shard"]


async def test_a_link_that_breaks_again_at_once_is_not_tried_without_end(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model)
    for _ in range(2):
        epoch = max(one.epoch for one in [desk.control._fleet.placed(P1)] if one is not None)
        desk.tell("w0", link_failed=fleet_pb2.LinkFailed(pipeline_id="p1", epoch=epoch))
        await asyncio.sleep(AFTER_GRACE_S)

    assert P1 not in desk.hub.routes
    desk.control._retry_at = time.monotonic()
    desk.control.tick(time.monotonic())
    assert P1 in desk.hub.routes


async def test_a_pipeline_that_answers_wait_for_is_not_placed_anew_while_it_loads(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model, speed=0.2)
    desk.lose("w0")
    desk.engine.adopt(make_sequence(7))
    routes = desk.hub.routes[P1]
    desk.commands("w2")

    desk.join("w0")
    for _ in range(2):  # It answers what it is asked of itself, and of its links.
        desk.commands("w0")
    desk.control.tick(time.monotonic())
    await asyncio.sleep(AFTER_GRACE_S)

    assert desk.hub.routes[P1] == routes == ("w2", "w1")
    assert not any(command.HasField("load_shard") for name in ("w0", "w2") for command in desk.commands(name))


async def test_a_pipeline_in_force_is_not_given_to_others_that_hold_it_too(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, split="4")
    desk.join("w1")
    held = held_by(desk.load_command("w1"))
    desk = make_desk(fleet_model, split="4")
    desk.join("w1")
    desk.bring_up("w1")
    epoch = desk.epoch(P1)

    desk.join("w0", held)
    desk.control.tick(time.monotonic())

    assert desk.serving() == {"p1": ["w1"]}
    assert desk.epoch(P1) == epoch
    assert not any(command.HasField("load_shard") for command in desk.commands("w0"))


async def test_an_orchestrator_that_finds_answers_to_go_on_with_does_not_wait_for_every_device(
    fleet_model: TinyModel,
) -> None:
    desk = make_desk(fleet_model, expect_workers=3)
    desk.engine.adopt(make_sequence(7))
    desk.join("w0")
    assert desk.commands("w0") == []
    desk.control._started_at -= control.REUNION_S

    desk.control.tick(time.monotonic())

    assert desk.hub.routes[P1] == ("w0",)


async def test_devices_that_hold_a_whole_pipeline_have_it_again_whoever_else_is_awaited(fleet_model: TinyModel) -> None:
    before = make_desk(fleet_model, split="2,2", expect_workers=2)
    for name in ("w0", "w1"):
        before.join(name)
    held = {name: held_by(before.load_command(name)) for name in ("w0", "w1")}
    desk = make_desk(fleet_model, split="2,2", expect_workers=4)

    for name, shard in held.items():
        desk.join(name, shard)
    desk.bring_up("w0", "w1")

    assert desk.serving() == {"p1": ["w0", "w1"]}


async def test_who_holds_layers_waits_a_moment_for_its_partner_and_not_for_ever(fleet_model: TinyModel) -> None:
    before = make_desk(fleet_model, split="2,2", expect_workers=2)
    for name in ("w0", "w1"):
        before.join(name)
    held = held_by(before.load_command("w0"))
    desk = make_desk(fleet_model, expect_workers=3)
    desk.join("w0", held)
    desk.control.tick(desk.control._started_at + control.REUNION_S - 0.1)
    assert desk.commands("w0") == []
    desk.control._started_at -= control.REUNION_S

    desk.control.tick(time.monotonic())
    desk.bring_up("w0")

    assert desk.serving() == {"p1": ["w0"]}


async def test_a_lost_device_is_told_with_its_reason_until_it_is_back(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model)

    desk.lose("w0")
    told = [(one.worker_id, one.why, one.has_left) for one in desk.control.status().departed]
    desk.join("w0")

    assert told == [("w0", "its connection ended", False)]
    assert not desk.control.status().departed


async def test_a_device_whose_data_link_ended_is_told_with_that_as_the_reason(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model)

    desk.control.link_lost(WorkerId("w0"), "reset by peer")
    desk.lose("w0")

    assert [one.why for one in desk.control.status().departed] == ["its data link ended: reset by peer"]


async def test_a_device_that_was_let_go_has_left(fleet_model: TinyModel) -> None:
    desk = make_pipeline(fleet_model)

    desk.tell("w2", leaving=fleet_pb2.Leaving())
    await asyncio.sleep(0)
    desk.control.tick(time.monotonic())
    desk.lose("w2")

    assert [(one.worker_id, one.has_left) for one in desk.control.status().departed] == [("w2", True)]
