"""A fleet while devices come and go: nothing hangs, nothing is lost unsaid, and it serves again."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from modelstore.graph import shard_blobs
from orchestrator import bringup
from orchestrator.core import parking
from shoal.errors import NotReady, WorkerLost
from shoal.status import DeviceStatus, FleetStatus
from shoal.types import LayerRange, LinkProfile
from shoal.v1 import flow_pb2
from tests.support.fleet import LOOK_S, WAIT_S, HeldFetch, make_device, start_fleet
from tests.support.shards import TinyModel
from tests.support.streams import SLOW, Reader, start_stream
from worker.agent import Agent
from worker.links import SocketLink, dial

HELD = make_device()
SLOW_HIDDEN = make_device(speed=0.05, is_emulated=True, allow_direct_links=False)
SLOW_FAR = make_device(speed=0.1, is_emulated=True, link=LinkProfile(delay_ms=1.0))
QUICK_BEATS: dict[str, Any] = {"heartbeat_s": 0.05}

Store = Path


@pytest.fixture
def store(fleet_model: TinyModel) -> Store:
    return fleet_model.store.root


def device_of(status: FleetStatus, worker_id: str) -> DeviceStatus:
    return next(device for device in status.devices if device.worker_id == worker_id)


# Devices that leave


@pytest.mark.parametrize(
    ("device", "options"),
    [(SLOW, {}), (SLOW_HIDDEN, {}), (SLOW, {"use_sockets": False}), (SLOW_FAR, {})],
    ids=["ring", "hub", "grpc", "slow links"],
)
@pytest.mark.parametrize("victim", ["w0", "w1"])
async def test_the_answers_of_a_device_that_vanishes_go_on_with_the_rest_and_are_what_they_would_have_been(
    store: Store, tmp_path: Path, device: Any, options: dict[str, Any], victim: str
) -> None:
    async with start_fleet(store, tmp_path, [device] * 2, **options) as fleet:
        before = await fleet.client.generate("hello", max_tokens=60, ignore_eos=True, num_logprobs=2)
        reader = await start_stream(fleet, max_tokens=60, num_logprobs=2)

        await fleet.workers[victim].vanish()
        after = await reader.result()
        status = await fleet.serving(1)

    assert (after.token_ids, after.logprobs, after.text) == (before.token_ids, before.logprobs, before.text)
    assert [one.worker_id for one in status.devices] == [one for one in ("w0", "w1") if one != victim]


async def test_answers_that_nobody_can_go_on_with_end_and_say_which_layers_are_missing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "PARKED_S", 0.3)
    async with start_fleet(store, tmp_path, [SLOW] * 2) as fleet:
        reader = await start_stream(fleet)

        await asyncio.gather(fleet.workers["w0"].vanish(), fleet.workers["w1"].vanish())
        error = await reader.error()

    assert isinstance(error, WorkerLost)
    assert "was lost while it computed this answer" in error.message
    assert "no device is left" in error.message
    assert error.retry_after_s > 0


async def test_of_two_devices_with_one_name_the_second_waits_until_the_first_is_gone(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start_fleet(store, tmp_path, [HELD]) as fleet:
        first = fleet.workers["w0"]
        second = fleet.add_worker("w0")
        async with asyncio.timeout(WAIT_S):
            while "another device is attached as 'w0'" not in caplog.text:
                await asyncio.sleep(LOOK_S)
        during = await fleet.client.generate("hello", max_tokens=2)
        await first.end()
        await fleet.until(lambda status: not status.ready)
        await fleet.serving(1)

        assert during.completion_tokens == 2
        assert not second.task.done()


async def test_a_device_that_leaves_in_order_is_replaced(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [HELD] * 2) as fleet:
        await fleet.workers["w0"].end()

        status = await fleet.serving(1)

    assert [one.worker_id for one in status.devices] == ["w1"]


async def test_the_answers_of_a_device_that_leaves_in_order_go_on_with_the_rest_and_are_what_they_would_have_been(
    store: Store, tmp_path: Path
) -> None:
    async with start_fleet(store, tmp_path, [SLOW] * 2) as fleet:
        before = await fleet.client.generate("hello", max_tokens=60, ignore_eos=True, num_logprobs=2)
        reader = await start_stream(fleet, max_tokens=60, num_logprobs=2)

        await fleet.workers["w0"].end()
        later = await fleet.client.generate("hello", max_tokens=2)
        after = await reader.result()

    assert (after.token_ids, after.logprobs, after.text) == (before.token_ids, before.logprobs, before.text)
    assert [stage.worker_id for stage in later.pipeline] == ["w1"]


async def test_a_standby_device_leaves_at_once_while_others_answer(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW], split="4") as fleet:
        fleet.add_worker("w1")
        await fleet.until(lambda status: len(status.devices) == 2)
        reader = await start_stream(fleet)

        await fleet.workers["w1"].end()

        assert not reader.task.done()
        reader.stream.cancel()
        await asyncio.wait({reader.task})


async def test_the_last_device_that_leaves_is_waited_for(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [HELD]) as fleet:
        await fleet.workers["w0"].end()
        status = await fleet.until(lambda status: not status.ready)
        with pytest.raises(NotReady):
            await fleet.client.generate("hello")

        fleet.add_worker("w0")
        await fleet.serving(1)

    assert "w0 was lost" in status.waiting_for


async def test_a_standby_device_that_leaves_disturbs_nobody(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW], split="4") as fleet:
        fleet.add_worker("w1")
        await fleet.until(lambda status: len(status.devices) == 2)
        reader = await start_stream(fleet, max_tokens=40)

        await fleet.workers["w1"].vanish()
        await fleet.until(lambda status: len(status.devices) == 1)

        assert (await reader.result()).completion_tokens == 40


async def test_a_device_without_heartbeats_is_lost_when_its_lease_ends(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beat, lives = Agent._beat, []

    async def be_silent_at_first(agent: Agent, interval_s: float) -> None:
        lives.append(agent)
        if len(lives) == 1:
            await asyncio.Event().wait()
        await beat(agent, interval_s)

    monkeypatch.setattr(Agent, "_beat", be_silent_at_first)
    async with start_fleet(store, tmp_path, [SLOW], lease_s=0.3, heartbeat_s=0.1) as fleet:
        reader = await start_stream(fleet, max_tokens=100)

        answer = await reader.result()

    assert answer.completion_tokens == 100
    assert len(lives) == 2
    assert "no heartbeat for 0.3 s" in caplog.text


# Devices that come


async def test_a_device_that_joins_an_idle_fleet_gets_its_share(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [HELD]) as fleet:
        before = await fleet.client.generate("hello", max_tokens=8, num_logprobs=2)

        fleet.add_worker("w1")
        await fleet.serving(2)
        after = await fleet.client.generate("hello", max_tokens=8, num_logprobs=2)

    assert [stage.worker_id for stage in after.pipeline] == ["w0", "w1"]
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


async def test_a_device_that_joins_a_busy_fleet_waits_until_nobody_is_served(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [SLOW]) as fleet:
        reader = await start_stream(fleet, max_tokens=60)

        fleet.add_worker("w1", SLOW)
        status = await fleet.until(lambda status: len(status.devices) == 2)
        result = await reader.result()
        await fleet.serving(2)

    assert device_of(status, "w1").layers is None
    assert (result.completion_tokens, len(result.pipeline)) == (60, 1)


async def test_a_device_that_has_no_share_any_more_gives_its_memory_back(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, split="4", **QUICK_BEATS) as fleet:
        fleet.add_worker("w1", SLOW)
        await fleet.until(lambda status: any(one.telemetry.weight_bytes > 0 for one in status.devices))

        fleet.add_worker("w0")
        status = await fleet.until(
            lambda status: (
                {one.worker_id: one.telemetry.weight_bytes > 0 for one in status.devices} == {"w0": True, "w1": False}
            )
        )

    assert device_of(status, "w1").state == "standby"


async def test_a_device_that_would_do_no_better_takes_no_layers_from_another(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with start_fleet(store, tmp_path, split="4") as fleet:
        fleet.add_worker("w1")
        await fleet.serving(1)

        fleet.add_worker("w0")
        async with asyncio.timeout(WAIT_S):
            while "another placement gains 0.0%" not in caplog.text:
                await asyncio.sleep(LOOK_S)
        status = await fleet.client.status()

    assert device_of(status, "w1").layers == LayerRange(0, 4)
    assert (device_of(status, "w0").layers, device_of(status, "w0").state) == (None, "standby")


async def test_a_device_whose_load_hangs_is_given_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = HeldFetch(monkeypatch)
    monkeypatch.setattr(bringup, "LOAD_TIMEOUT_S", 0.2)
    async with start_fleet(store, tmp_path) as fleet:
        fleet.add_worker("w0")
        await fleet.serving(1)

        assert fetch.is_held.is_set()


async def test_a_cache_that_cannot_be_written_is_told(store: Store, tmp_path: Path, fleet_model: TinyModel) -> None:
    for blob in fleet_model.manifest.blobs:
        (tmp_path / "devices" / "w0" / "blobs" / blob.digest).mkdir(parents=True)
    async with start_fleet(store, tmp_path) as fleet:
        fleet.add_worker("w0")

        await fleet.until(lambda status: "w0 could not load its layers" in status.waiting_for)
        status = await fleet.until(lambda status: "blob cache cannot be used" in status.waiting_for)

    assert not status.ready


async def test_a_shard_that_is_replaced_while_it_is_fetched_is_given_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet_model: TinyModel
) -> None:
    fetch = HeldFetch(monkeypatch)
    async with start_fleet(store, tmp_path) as fleet:
        fleet.add_worker("w0")
        await asyncio.wait_for(fetch.is_held.wait(), WAIT_S)
        fleet.add_worker("w1")
        status = await fleet.serving(2)
        answer = await fleet.client.generate("hello", max_tokens=2)
        await asyncio.wait_for(fetch.is_given_up.wait(), WAIT_S)

    assert answer.completion_tokens == 2
    # What was being fetched goes on where it ended should the device ever need it; what it needs now is whole.
    for device in status.devices:
        assert device.layers is not None
        blobs = tmp_path / "devices" / device.worker_id / "blobs"
        needed = {blob.digest for blob in shard_blobs(fleet_model.manifest, device.layers)}
        assert needed <= {path.name for path in blobs.iterdir()}
        assert not {f"{digest}.part" for digest in needed} & {path.name for path in blobs.iterdir()}


async def test_links_of_a_placement_that_is_over_are_given_up(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_dialling, may_dial = asyncio.Event(), asyncio.Event()
    late: asyncio.Queue[SocketLink | None] = asyncio.Queue()

    async def dial_slowly(address: str, hello: flow_pb2.Frame, timeout_s: float) -> SocketLink | None:
        if hello.pipeline_id != "p1" or is_dialling.is_set():
            return await dial(address, hello, timeout_s)
        is_dialling.set()
        await may_dial.wait()
        link = await dial(address, hello, timeout_s)
        late.put_nowait(link)
        return link

    monkeypatch.setattr("worker.dialing.dial", dial_slowly)
    slow = make_device(speed=0.5, is_emulated=True)
    async with start_fleet(store, tmp_path, expect_workers=2) as fleet:
        fleet.add_worker("w0", slow)
        fleet.add_worker("w1", slow)
        await asyncio.wait_for(is_dialling.wait(), WAIT_S)
        fleet.add_worker("w2")
        # Much of what the others had is given to it: they dial anew while the first one still dials.
        status = await fleet.until(
            lambda status: status.is_complete and any(one.worker_id == "w2" and one.layers for one in status.devices)
        )
        may_dial.set()
        link = await asyncio.wait_for(late.get(), WAIT_S)
        answer = await fleet.client.generate("hello", max_tokens=2)
        after = await fleet.client.status()

        assert link is None or link.connection.fileno() == -1
    assert [one.epoch for one in after.pipelines] == [one.epoch for one in status.pipelines]
    assert answer.completion_tokens == 2
    assert {stage.worker_id for stage in answer.pipeline} == {one.worker_id for one in status.devices if one.layers}


async def test_a_worker_that_is_cut_off_again_and_again_leaves_no_threads(store: Store, tmp_path: Path) -> None:
    far = make_device(is_emulated=True, link=LinkProfile(delay_ms=1.0))
    async with start_fleet(store, tmp_path, [far]) as fleet:
        for _ in range(3):
            await fleet.restart_orchestrator()
            await fleet.serving(1)
        lines = [thread.name for thread in threading.enumerate() if thread.name in ("delay-line", "uplink")]

    # One for what comes and one for what goes, and the reader.
    assert sorted(lines) == ["delay-line", "delay-line", "uplink"]


async def test_a_request_that_comes_while_layers_are_loaded_waits_for_them(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = HeldFetch(monkeypatch)
    async with start_fleet(store, tmp_path) as fleet:
        fleet.add_worker("w0")
        await fleet.until(lambda status: any(one.state == "loading" for one in status.devices))
        reader = Reader(fleet.client.stream("hello", max_tokens=2))
        status = await fleet.client.status()
        fetch.may_go_on.set()

        assert (await reader.result()).completion_tokens == 2
    assert (status.ready, status.waiting_for) == (False, "layers are loaded by w0")


async def test_devices_join_again_when_their_orchestrator_was_restarted(store: Store, tmp_path: Path) -> None:
    async with start_fleet(store, tmp_path, [HELD] * 2) as fleet:
        before = await fleet.client.generate("hello", max_tokens=4)
        await fleet.restart_orchestrator()
        await fleet.serving(2)
        after = await fleet.client.generate("hello", max_tokens=4)

    assert after.token_ids == before.token_ids
