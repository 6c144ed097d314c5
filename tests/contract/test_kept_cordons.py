"""Cordons over a restart of the orchestrator, and what is said of them while nothing serves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import NotReady, PlacementImpossible
from shoal.types import WorkerId
from tests.support.desk import Desk, held_by, make_desk
from tests.support.fleet import start_fleet
from tests.support.shards import TinyModel
from tests.support.streams import SLOW

W0, W1 = WorkerId("w0"), WorkerId("w1")
HALVES = "2,2"


def kept(desk: Desk) -> set[str]:
    """What the next orchestrator would find."""
    return set(desk.cordons[-1]) if desk.cordons else set()


async def test_what_an_operator_cordons_is_kept_until_it_is_uncordoned(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model)
    for name in ("w0", "w1"):
        desk.join(name)

    desk.control.relief.cordon(W0, True)
    assert kept(desk) == {"w0"}
    desk.control.relief.cordon(W1, True)
    assert kept(desk) == {"w0", "w1"}
    desk.control.relief.cordon(W0, False)
    assert kept(desk) == {"w1"}


async def test_a_drained_device_is_kept_and_one_that_could_not_be_drained_is_not(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, split="4")
    desk.join("w0")
    desk.bring_up("w0")

    with pytest.raises(PlacementImpossible):
        await desk.control.relief.drain(W0)
    assert kept(desk) == set()

    desk.join("w1")
    await desk.control.relief.drain(W1)
    assert kept(desk) == {"w1"}


async def test_a_device_whose_drain_comes_to_nothing_is_not_kept_with_one_cordoned_meanwhile(
    fleet_model: TinyModel,
) -> None:
    desk = make_desk(fleet_model, split=HALVES, expect_workers=3)
    for name in ("w0", "w1", "w2"):
        desk.join(name)
    desk.bring_up("w0", "w1")
    draining = asyncio.create_task(desk.control.relief.drain(W0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    desk.control.relief.cordon(W1, True)
    desk.control.stop()
    await asyncio.wait({draining})

    assert draining.cancelled()
    assert kept(desk) == {"w1"}


async def test_a_device_that_was_cordoned_before_is_given_no_layers(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, cordoned=[W1], expect_workers=2)

    desk.join("w0")
    waiting = dict(desk.hub.routes)
    desk.join("w1")

    assert waiting == {}, "the one that is cordoned is among those that are expected"
    assert list(desk.hub.routes.values()) == [("w0",)]
    assert desk.device("w1").is_cordoned


async def test_a_cordoned_device_keeps_the_layers_that_it_has_over_a_restart(fleet_model: TinyModel) -> None:
    before = make_desk(fleet_model, split=HALVES, expect_workers=2)
    for name in ("w0", "w1"):
        before.join(name)
    held = {name: held_by(before.load_command(name)) for name in ("w0", "w1")}
    desk = make_desk(fleet_model, split=HALVES, expect_workers=2, cordoned=[W1])

    for name, shard in held.items():
        desk.join(name, shard)
    desk.bring_up("w0", "w1")

    assert desk.serving() == {"p1": ["w0", "w1"]}


async def test_a_restarted_orchestrator_knows_who_is_cordoned(fleet_model: TinyModel, tmp_path: Path) -> None:
    async with start_fleet(fleet_model.store.root, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        fleet.add_worker("w2", SLOW)
        await fleet.until(lambda status: len(status.devices) == 3)
        await fleet.client.drain("w1")
        await fleet.orchestrator.end()
        fleet.config = replace(fleet.config, expect_workers=3)
        await fleet.restart_orchestrator()
        after = await fleet.serving(2)
        await fleet.client.cordon("w1", is_cordoned=False)
        await fleet.restart_orchestrator()
        let_in = await fleet.until(lambda status: len(status.devices) == 3)

    assert {one.worker_id: one.layers is not None for one in after.devices} == {"w0": True, "w1": False, "w2": True}
    assert {one.worker_id for one in after.devices if one.is_cordoned} == {"w1"}
    assert not any(one.is_cordoned for one in let_in.devices)


async def test_who_asks_while_nothing_serves_hears_who_is_cordoned(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, cordoned=[W0])
    desk.join("w0")

    with pytest.raises(NotReady, match="w0 is cordoned: `shoal uncordon w0`"):
        await desk.control.wait_serving()


async def test_who_waits_for_a_pipeline_in_vain_hears_who_is_cordoned(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, cordoned=[W0])
    desk.join("w0")
    desk.join("w1")
    desk.bring_up("w1")

    desk.lose("w1")
    desk.control.tick(time.monotonic())
    while_it_is_cordoned = desk.engine.parked_trouble
    desk.control.relief.cordon(W0, False)
    desk.control.tick(time.monotonic())

    assert "w1 was lost" in while_it_is_cordoned
    assert "w0 is cordoned: `shoal uncordon w0`" in while_it_is_cordoned
    assert desk.engine.parked_trouble == ""
    assert desk.hub.routes == {"p1": ("w0",)}


async def test_layers_that_do_not_fit_are_told_with_who_is_cordoned(fleet_model: TinyModel) -> None:
    desk = make_desk(fleet_model, cordoned=[W0])
    desk.join("w0")
    desk.join("w1", memory_bytes=1 << 20)

    waiting_for = desk.control.status().waiting_for

    assert "lacks" in waiting_for
    assert "w0 is cordoned: `shoal uncordon w0`" in waiting_for
