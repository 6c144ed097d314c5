"""A whole fleet with several pipelines: each comes up, goes away, leaves and is limited without the others minding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator import bringup
from shoal.status import DeviceStatus, FleetStatus, PipelineStatus
from shoal.types import BatteryModel, DeviceLimits, DeviceMode, ThermalModel
from tests.support.fleet import WAIT_S, HeldFetch, LocalFleet, make_device, start_fleet
from tests.support.shards import TinyModel
from tests.support.streams import SLOW, SLOW_LATENCY, Reader, start_stream

Store = Path
HELD = make_device()
HELD_HIDDEN = make_device(allow_direct_links=False)
TWO_REPLICAS: dict[str, Any] = {"replicas": 2, "heartbeat_s": 0.05}


@pytest.fixture
def store(fleet_model: TinyModel) -> Store:
    return fleet_model.store.root


def pipeline_of(status: FleetStatus, *worker_ids: str) -> PipelineStatus:
    return next(one for one in status.pipelines if one.worker_ids == worker_ids)


def device_of(status: FleetStatus, worker_id: str) -> DeviceStatus:
    return next(device for device in status.devices if device.worker_id == worker_id)


def workers_of(status: FleetStatus) -> list[tuple[str, ...]]:
    return sorted(one.worker_ids for one in status.pipelines)


async def stream_on_each(fleet: LocalFleet, **options: Any) -> dict[str, Reader]:
    """A stream on every pipeline, by the first of its workers; where each goes is the router's choice."""
    readers: dict[str, Reader] = {}
    spare: list[Reader] = []
    pipelines = (await fleet.client.status()).pipelines
    while len(readers) < len(pipelines):
        name = f"r-{len(readers) + len(spare)}"
        reader = await start_stream(fleet, request_id=name, **options)
        chosen = (await fleet.client.explain(name)).routes[-1].pipeline_id
        (worker_id,) = [one.worker_ids[0] for one in pipelines if one.pipeline_id == chosen]
        if worker_id in readers:
            spare.append(reader)
        else:
            readers[worker_id] = reader
    if spare:
        await cancel(*spare)
    return readers


async def cancel(*readers: Reader) -> None:
    for reader in readers:
        reader.stream.cancel()
    await asyncio.wait([reader.task for reader in readers])


async def test_two_replicas_answer_at_the_same_time_and_alike(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, **TWO_REPLICAS) as fleet:
        readers = await stream_on_each(fleet, max_tokens=20)
        answers = {worker_id: await reader.result() for worker_id, reader in readers.items()}
        status = await fleet.client.status()

    assert workers_of(status) == [("w0",), ("w1",)]
    assert {worker_id: answer.pipeline[0].worker_id for worker_id, answer in answers.items()} == {
        "w0": "w0",
        "w1": "w1",
    }
    assert answers["w0"].token_ids == answers["w1"].token_ids
    # And what those had that were stopped because they met on one pipeline.
    assert sum(one.completion_tokens_total for one in status.pipelines) >= 40


async def test_a_killed_worker_of_one_pipeline_leaves_the_other_serving(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, **TWO_REPLICAS) as fleet:
        readers = await stream_on_each(fleet, max_tokens=60)
        before = pipeline_of(await fleet.client.status(), "w1")

        await fleet.workers["w0"].vanish()
        status = await fleet.until(lambda status: len(status.pipelines) == 1)
        later = await fleet.client.generate("hello", max_tokens=2)
        answer = await readers["w1"].result()

        assert status.ready
        assert pipeline_of(status, "w1").epoch == before.epoch
        assert (later.pipeline_id, answer.pipeline_id) == (before.pipeline_id, before.pipeline_id)
        assert answer.completion_tokens == 60
        # The other's answer went on beside it.
        assert (await readers["w0"].result()).token_ids == answer.token_ids


async def test_what_a_lost_worker_leaves_serves_again_while_the_other_pipeline_is_busy(
    store: Store, tmp_path: Path
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 4, **TWO_REPLICAS) as fleet:
        assert workers_of(await fleet.client.status()) == [("w0", "w2"), ("w1", "w3")]
        readers = await stream_on_each(fleet)
        await cancel(readers["w0"])
        before = pipeline_of(await fleet.client.status(), "w1", "w3")

        await fleet.workers["w0"].vanish()
        status = await fleet.until(lambda status: ("w2",) in workers_of(status))

        assert not readers["w1"].task.done()
        assert pipeline_of(status, "w1", "w3").epoch == before.epoch
        assert pipeline_of(status, "w2").epoch > before.epoch
        await cancel(readers["w1"])


async def test_a_device_kept_for_latency_has_a_pipeline_of_its_own(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [HELD, make_device(mode=DeviceMode.LATENCY), HELD]) as fleet:
        status = await fleet.client.status()

    assert [(one.worker_ids, one.mode) for one in status.pipelines] == [(("w0", "w2"), "mixed"), (("w1",), "latency")]
    assert str(device_of(status, "w1").layers) == "[0, 4)"
    assert {one.worker_id: one.pipeline_id for one in status.devices} == {"w0": "p1", "w1": "p2", "w2": "p1"}


async def test_a_device_kept_for_latency_is_used_at_once_also_by_a_busy_fleet(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        reader = await start_stream(fleet)
        before = await fleet.client.status()

        fleet.add_worker("w1", SLOW_LATENCY)
        status = await fleet.until(lambda status: workers_of(status) == [("w0",), ("w1",)])
        urgent = await fleet.client.generate("hello", max_tokens=2, qos_class="latency")

        assert not reader.task.done()
        assert pipeline_of(status, "w0").epoch == pipeline_of(before, "w0").epoch
        assert urgent.pipeline[0].worker_id == "w1"
        await cancel(reader)


async def test_frames_of_two_pipelines_are_relayed_at_once(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path / "alone", [HELD]) as alone:
        expected = await alone.client.generate("hello", max_tokens=40, ignore_eos=True, num_logprobs=2)
    async with start_fleet(store, tmp_path, [HELD_HIDDEN] * 4, **TWO_REPLICAS) as fleet:
        status = await fleet.client.status()
        options: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "num_logprobs": 2}
        streams = [fleet.client.generate("hello", **options) for _ in range(6)]
        answers = await asyncio.gather(*streams)

    assert {one.link_to_next for one in status.devices} == {"relay"}
    assert {answer.pipeline_id for answer in answers} == {"p1", "p2"}
    assert {(answer.token_ids, answer.logprobs) for answer in answers} == {(expected.token_ids, expected.logprobs)}


async def test_a_worker_that_leaves_stops_its_own_pipeline_from_taking_requests_alone(
    store: Store, tmp_path: Path
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2, **TWO_REPLICAS) as fleet:
        reader = await start_stream(fleet, max_tokens=60)
        (busy,) = [one for one in (await fleet.client.status()).pipelines if one.num_running]
        (leaver,) = busy.worker_ids

        leaving = asyncio.create_task(fleet.workers[leaver].end())
        await fleet.until(lambda status: device_of(status, leaver).state == "draining")
        later = [await fleet.client.generate("hello", max_tokens=2, qos_class=qos) for qos in ("latency", "throughput")]

        assert not reader.task.done()
        assert leaver not in {stage.worker_id for answer in later for stage in answer.pipeline}
        assert (await reader.result()).pipeline_id == busy.pipeline_id
        await leaving


async def test_a_leaving_device_serves_until_a_free_one_has_its_layers(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(store, tmp_path, [SLOW], split="4") as fleet:
        fleet.add_worker("w1", SLOW)
        await fleet.until(lambda status: len(status.devices) == 2)
        reader = await start_stream(fleet)
        fetch = HeldFetch(monkeypatch)

        leaving = asyncio.create_task(fleet.workers["w0"].end())
        await asyncio.wait_for(fetch.is_held.wait(), WAIT_S)
        during = await fleet.client.generate("hello", max_tokens=2)
        fetch.may_go_on.set()
        await leaving
        later = await fleet.client.generate("hello", max_tokens=2)

        assert not reader.task.done()
        assert [answer.pipeline[0].worker_id for answer in (during, later)] == ["w0", "w1"]
        assert later.token_ids == during.token_ids
        await cancel(reader)


async def test_one_pipeline_serves_while_another_is_still_loading(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = HeldFetch(monkeypatch)
    async with start_fleet(store, tmp_path, expect_workers=2, **TWO_REPLICAS) as fleet:
        fleet.add_worker("w0")
        fleet.add_worker("w1")
        early = await fleet.until(lambda status: status.ready)
        answer = await fleet.client.generate("hello", max_tokens=2)
        fetch.may_go_on.set()
        status = await fleet.serving(2)

    assert (early.is_complete, len(early.pipelines)) == (False, 1)
    assert answer.completion_tokens == 2
    assert workers_of(status) == [("w0",), ("w1",)]


async def test_a_device_that_loads_for_too_long_does_not_disturb_who_serves(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        reader = await start_stream(fleet)
        epoch = pipeline_of(await fleet.client.status(), "w0").epoch
        fetch = HeldFetch(monkeypatch)
        monkeypatch.setattr(bringup, "LOAD_TIMEOUT_S", 0.2)

        fleet.add_worker("w1", SLOW_LATENCY)
        status = await fleet.until(lambda status: workers_of(status) == [("w0",), ("w1",)])

        assert fetch.is_held.is_set()
        assert not reader.task.done()
        assert pipeline_of(status, "w0").epoch == epoch
        await cancel(reader)


async def test_the_limits_of_its_tightest_device_hold_for_a_pipeline_and_for_no_other(
    store: Store, tmp_path: Path
) -> None:
    limits = DeviceLimits(moderate_c=45.0, low_battery_percent=20.0, critical_battery_percent=10.0)
    warm = ThermalModel(ambient_c=50.0, heat_c_per_s=0.001)
    emulated: dict[str, Any] = {"is_emulated": True, "max_batch": 8, "limits": limits}
    devices = [
        make_device(**emulated, thermal=warm),
        make_device(max_batch=8),
        make_device(**emulated, battery=BatteryModel(capacity_wh=10.0, start_percent=9.0)),
        make_device(max_batch=8),
    ]
    async with start_fleet(store, tmp_path, devices, **TWO_REPLICAS) as fleet:
        status = await fleet.until(lambda status: pipeline_of(status, "w0", "w2").max_batch == 2)
        answer = await fleet.client.generate("hello", max_tokens=4, ignore_eos=True)

    spared, free = pipeline_of(status, "w0", "w2"), pipeline_of(status, "w1", "w3")
    assert (spared.steps_per_s, free.max_batch, free.steps_per_s) == (3.0, 8, 0.0)
    warm_device, empty_device = device_of(status, "w0"), device_of(status, "w2")
    assert (warm_device.thermal_state, warm_device.thermal_cause, warm_device.max_batch) == ("moderate", "50.0 C", 6)
    assert (empty_device.thermal_state, empty_device.thermal_cause) == ("critical", "battery at 9 %")
    assert {device_of(status, one).thermal_state for one in ("w1", "w3")} == {"nominal"}
    assert answer.completion_tokens == 4


async def test_pipelines_come_back_together_when_their_orchestrator_was_restarted(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [HELD] * 4, **TWO_REPLICAS) as fleet:
        before = workers_of(await fleet.client.status())
        await fleet.restart_orchestrator()
        status = await fleet.serving(4)

    assert workers_of(status) == before
