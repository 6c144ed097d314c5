"""Devices taken out of use while a fleet serves: their layers go elsewhere, and no answer ends for it or differs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from shoal.errors import InvalidRequest, PlacementImpossible
from shoal.status import DeviceStatus, FleetStatus
from tests.support.fleet import WAIT_S, HeldFetch, LocalFleet, make_device, start_fleet
from tests.support.shards import TinyModel
from tests.support.streams import SLOW, SLOW_LATENCY, start_stream

# Two stages of two layers; whoever comes behind these in the order of names stands by.
HALVES = "2,2"
NUM_TOKENS = 60

Store = Path


@pytest.fixture
def store(fleet_model: TinyModel) -> Store:
    return fleet_model.store.root


def device_of(status: FleetStatus, worker_id: str) -> DeviceStatus:
    return next(device for device in status.devices if device.worker_id == worker_id)


def holders(status: FleetStatus) -> dict[str, str]:
    return {one.worker_id: str(one.layers) for one in status.devices if one.layers is not None}


async def add_standby(fleet: LocalFleet, worker_id: str) -> None:
    fleet.add_worker(worker_id, SLOW)
    await fleet.until(lambda status: [one.worker_id for one in status.devices if one.layers is None] == [worker_id])


@pytest.mark.parametrize("drained_id", ["w0", "w1"])
async def test_a_drained_device_hands_its_layers_to_one_that_stood_by_and_the_answers_are_the_same(
    store: Store, tmp_path: Path, drained_id: str
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await add_standby(fleet, "w2")
        before = await fleet.client.generate("hello", max_tokens=NUM_TOKENS, ignore_eos=True)
        layers = device_of(await fleet.client.status(), drained_id).layers
        readers = [await start_stream(fleet, max_tokens=NUM_TOKENS) for _ in range(2)]

        drained = await fleet.client.drain(drained_id)
        status = await fleet.serving(2)
        answers = [await reader.result() for reader in readers]

    assert (drained.moved, drained.num_sequences) == (f"layers {layers} to w2", 2)
    assert (device_of(status, "w2").layers, device_of(status, drained_id).layers) == (layers, None)
    assert (device_of(status, drained_id).state, device_of(status, drained_id).is_cordoned) == ("standby", True)
    assert [answer.token_ids for answer in answers] == [before.token_ids] * 2


async def test_the_old_device_serves_until_the_new_one_has_its_layers(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await add_standby(fleet, "w2")
        fetch = HeldFetch(monkeypatch)
        draining = asyncio.create_task(fleet.client.drain("w1"))
        async with asyncio.timeout(WAIT_S):
            await fetch.is_held.wait()

        during = await fleet.client.generate("hello", max_tokens=4)
        status = await fleet.client.status()
        fetch.may_go_on.set()
        await draining
        after = await fleet.client.generate("hello", max_tokens=4)

    assert [stage.worker_id for stage in during.pipeline] == ["w0", "w1"]
    assert (device_of(status, "w1").state, status.ready) == ("draining", True)
    assert [stage.worker_id for stage in after.pipeline] == ["w0", "w2"]


async def test_where_nobody_stands_by_the_layers_are_cut_anew_over_the_others(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2) as fleet:
        before = await fleet.client.generate("hello", max_tokens=NUM_TOKENS, ignore_eos=True)
        reader = await start_stream(fleet, max_tokens=NUM_TOKENS)

        drained = await fleet.client.drain("w1")
        status = await fleet.until(lambda status: status.is_complete and "w1" not in holders(status))
        answer = await reader.result()

    assert answer.token_ids == before.token_ids
    assert drained.moved == "layers [2, 4) to w0"
    assert device_of(status, "w1").is_cordoned


async def test_a_drain_with_nowhere_to_go_is_refused_with_the_bytes_and_changes_nothing(
    store: Store, tmp_path: Path
) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        before = await fleet.client.status()

        with pytest.raises(PlacementImpossible, match=r"layers \[0, 4\) of w0 need \d+ bytes, and no other device"):
            await fleet.client.drain("w0")
        after = await fleet.client.status()

    assert (holders(after), after.pipelines[0].epoch) == (holders(before), before.pipelines[0].epoch)
    assert not device_of(after, "w0").is_cordoned


async def test_a_device_that_cannot_hold_the_layers_is_named_with_what_it_lacks(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        fleet.add_worker("w1", make_device(memory_bytes=1 << 20))
        await fleet.until(lambda status: len(status.devices) == 2)

        with pytest.raises(PlacementImpossible, match=r"w1 \(box\).* lacks \d+"):
            await fleet.client.drain("w0")

        assert list(holders(await fleet.client.status())) == ["w0"]


async def test_a_pipeline_that_drains_away_leaves_its_answers_to_another_one(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW, SLOW_LATENCY]) as fleet:
        reader = await start_stream(fleet, max_tokens=NUM_TOKENS)

        drained = await fleet.client.drain("w0")
        answer = await reader.result()

    assert drained.moved == "requests to p2"
    assert answer.completion_tokens == NUM_TOKENS


async def test_a_device_that_is_lost_while_it_loads_for_a_drain_is_done_without(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await add_standby(fleet, "w2")
        fetch = HeldFetch(monkeypatch)
        draining = asyncio.create_task(fleet.client.drain("w1"))
        async with asyncio.timeout(WAIT_S):
            await fetch.is_held.wait()
        fleet.add_worker("w3", SLOW)
        await fleet.until(lambda status: len(status.devices) == 4)

        await fleet.workers["w2"].vanish()
        fetch.may_go_on.set()
        drained = await draining

    assert drained.moved == "layers [2, 4) to w3"


async def test_a_device_without_layers_is_drained_at_once(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await add_standby(fleet, "w2")
        drained = await fleet.client.drain("w2")
        status = await fleet.client.status()

    assert (drained.moved, drained.num_sequences) == ("", 0)
    assert device_of(status, "w2").is_cordoned


async def test_a_device_that_is_told_to_stop_hands_its_layers_over_before_it_goes(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await add_standby(fleet, "w2")
        before = await fleet.client.generate("hello", max_tokens=NUM_TOKENS, ignore_eos=True)
        reader = await start_stream(fleet, max_tokens=NUM_TOKENS)

        await fleet.workers["w1"].end()
        status = await fleet.client.status()
        answer = await reader.result()

    assert answer.token_ids == before.token_ids
    assert holders(status) == {"w0": "[0, 2)", "w2": "[2, 4)"}


async def test_a_cordoned_device_is_given_no_layers_until_it_is_uncordoned(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await fleet.client.cordon("w1")
        await fleet.workers["w1"].end()
        fleet.add_worker("w1", SLOW)
        cordoned = await fleet.until(lambda status: [one.is_cordoned for one in status.devices] == [False, True])

        await fleet.client.cordon("w1", is_cordoned=False)
        status = await fleet.serving(2)

    assert (cordoned.ready, holders(cordoned)) == (False, {})
    assert not device_of(status, "w1").is_cordoned


async def test_a_cordoned_device_goes_on_with_what_it_holds(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, split=HALVES) as fleet:
        await fleet.client.cordon("w1")
        fleet.add_worker("w2", SLOW)
        await fleet.until(lambda status: len(status.devices) == 3)
        answer = await fleet.client.generate("hello", max_tokens=4)
        status = await fleet.client.status()

    assert [stage.worker_id for stage in answer.pipeline] == ["w0", "w1"]
    assert (device_of(status, "w1").state, device_of(status, "w1").is_cordoned) == ("ready", True)


async def test_a_stranger_can_be_neither_drained_nor_cordoned(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        with pytest.raises(InvalidRequest, match="no device 'nobody' is attached; there are: w0"):
            await fleet.client.drain("nobody")
        with pytest.raises(InvalidRequest, match="no device 'nobody'"):
            await fleet.client.cordon("nobody")
