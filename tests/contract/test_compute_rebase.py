"""The compute thread when an epoch ends: the same shard goes on with what it holds, and nothing else of what was before."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from shoal.types import LayerRange
from shoal.v1 import flow_pb2
from tests.support.compute import ALL_LAYERS, WAIT_S, Bench, FakeLink, bench, model, run_badly, start
from tests.support.lower_tier import MemoryLowerTier
from tests.support.redis_tier import until
from tests.support.shards import make_tokens
from tests.support.stages import (
    EPOCH,
    PIPELINE_ID,
    graph_of,
    make_cancel,
    make_restore,
    make_row,
    make_spec,
    make_start,
    make_step,
)
from worker.commands import (
    AdoptSocket,
    ConnectStage,
    LoadStage,
    SetHeat,
    SetUplink,
    StageLoaded,
    SuspendStage,
    UnloadStage,
)
from worker.shard import Shard
from worker.stage import StageSpec

__all__ = ["bench", "model", "start"]

PROMPT = make_tokens(20, 280, seed=1)
TRAIL = bytes(range(16))


def prefill(trail_id: bytes = TRAIL, *, epoch: int = EPOCH) -> flow_pb2.Frame:
    frame = make_step(1, [make_row(1, num_tokens=20, start=make_start(trail_id=trail_id))], PROMPT)
    frame.epoch = epoch
    return frame


def resume() -> flow_pb2.Frame:
    return make_restore(2, (), trail_id=TRAIL, num_tokens=20)


def load_again(bench: Bench, monkeypatch: pytest.MonkeyPatch, **changes: object) -> StageSpec:
    """Ask for the shard of all layers once more, where nothing can be loaded from files."""
    monkeypatch.setattr("worker.compute.open_shard", run_badly)
    spec = replace(make_spec(bench.model, ALL_LAYERS, 0, 1), **changes)  # type: ignore[arg-type]
    bench.compute.post(LoadStage(spec, graph_of(bench.model, ALL_LAYERS), bench.model.blob_directory))
    return spec


def test_the_same_shard_is_not_loaded_again_and_holds_what_it_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()

    spec = load_again(bench, monkeypatch)
    loaded = bench.next_event()
    bench.compute.post(resume())

    assert isinstance(loaded, StageLoaded)
    assert loaded.spec is spec
    assert bench.uplink.next().restored.restored.num_tokens == 20


@pytest.mark.parametrize(
    "changes",
    [{"model_digest": "11" * 32}, {"pipeline_id": "p2"}, {"layers": LayerRange(0, 2)}, {"shape": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_another_shard_is_loaded_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    bench.load()
    if "shape" in changes:
        shape = make_spec(bench.model, ALL_LAYERS, 0, 1).shape
        changes = {"shape": replace(shape, kv_tokens=shape.kv_tokens + 1)}

    load_again(bench, monkeypatch, **changes)

    assert not isinstance(bench.next_event(), StageLoaded)


def test_a_stage_has_its_new_place_among_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load()

    load_again(bench, monkeypatch, epoch=EPOCH + 1)
    bench.next_event()
    bench.compute.post(prefill())
    bench.compute.post(prefill(epoch=EPOCH + 1))

    result = bench.uplink.next()
    assert (result.epoch, len(result.step_result.tokens)) == (EPOCH + 1, 1)
    assert bench.uplink.sent.empty()


@pytest.mark.parametrize("is_suspended", [False, True], ids=["rebased", "suspended"])
def test_the_links_of_an_epoch_end_with_it(bench: Bench, monkeypatch: pytest.MonkeyPatch, is_suspended: bool) -> None:
    outgoing = FakeLink()
    ours, theirs = socket.socketpair()
    bench.load()
    bench.compute.post(ConnectStage(PIPELINE_ID, EPOCH, {0: outgoing}))
    bench.compute.post(AdoptSocket(PIPELINE_ID, ours))

    if is_suspended:
        bench.compute.post(SuspendStage(PIPELINE_ID))
    else:
        load_again(bench, monkeypatch)

    outgoing.closed.get(timeout=WAIT_S)
    with theirs:
        theirs.settimeout(WAIT_S)
        assert theirs.recv(1) == b""


def test_a_suspended_stage_computes_nothing_and_goes_on_when_it_is_asked_for_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()

    bench.compute.post(SuspendStage(PIPELINE_ID))
    bench.compute.post(SetUplink(None))
    bench.compute.post(make_step(2, [make_row(1, position=20)], [5]))
    again = FakeLink()
    bench.compute.post(SetUplink(again))
    load_again(bench, monkeypatch)
    assert isinstance(bench.next_event(), StageLoaded)
    bench.compute.post(resume())

    assert again.next().restored.restored.num_tokens == 20
    assert bench.compute.kv_bytes > 0


def test_a_suspended_stage_can_be_unloaded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()

    bench.compute.post(SuspendStage(PIPELINE_ID))
    bench.compute.post(UnloadStage(PIPELINE_ID))
    bench.compute.post(SuspendStage(PIPELINE_ID))
    load_again(bench, monkeypatch)

    assert not isinstance(bench.next_event(), StageLoaded)
    assert bench.compute.kv_bytes == 0


def test_a_running_answer_is_checkpointed_between_frames_and_while_nothing_is_to_do(
    start: Callable[..., Bench],
) -> None:
    lower = MemoryLowerTier()
    bench = start(lower=lower, host_kv_bytes=1 << 26)
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()
    # An answer after the one that counts.
    bench.compute.post(make_restore(9, (), slot=1))
    bench.uplink.next()
    assert [(one.start, one.stop) for one in lower.trails[TRAIL]] == [(0, 8), (8, 16)]

    bench.compute.post(make_cancel((1, 0)))
    bench.compute.post(make_restore(10, (), slot=2))
    bench.uplink.next()
    assert lower.trails == {}


def test_an_answer_is_checkpointed_though_only_steps_of_its_burst_are_expected(start: Callable[..., Bench]) -> None:
    lower = MemoryLowerTier()
    bench = start(lower=lower, host_kv_bytes=1 << 26)
    bench.load(LayerRange(0, 2), num_stages=2)
    row = make_row(1, num_tokens=20, start=make_start(trail_id=TRAIL))

    bench.compute.post(make_step(1, [row], PROMPT, burst_steps=8))

    until(lambda: [(one.start, one.stop) for one in lower.trails.get(TRAIL, ())] == [(0, 8), (8, 16)])


def test_an_answer_is_checkpointed_while_nothing_is_to_do_once_there_is_room(start: Callable[..., Bench]) -> None:
    lower = MemoryLowerTier()
    lower.segment_room = 0
    bench = start(lower=lower, host_kv_bytes=1 << 26)
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()

    lower.segment_room = 100
    bench.compute.post(SetHeat(False))

    until(lambda: [(one.start, one.stop) for one in lower.trails.get(TRAIL, ())] == [(0, 8), (8, 16)])


def test_what_slots_may_hold_ends_with_their_stage(bench: Bench) -> None:
    bench.load()
    assert bench.compute.kv_tiers(0.0)[0].budget_bytes > 0

    bench.compute.post(UnloadStage(PIPELINE_ID))

    until(lambda: bench.compute.kv_tiers(0.0)[0].budget_bytes == 0)


def test_a_device_that_keeps_no_kv_checkpoints_nothing(start: Callable[..., Bench]) -> None:
    lower = MemoryLowerTier()
    bench = start(lower=lower)
    bench.load()
    bench.compute.post(prefill())
    bench.uplink.next()
    bench.compute.post(make_restore(9, (), slot=1))
    bench.uplink.next()

    assert lower.trails == {}


def test_how_long_it_has_been_at_something_can_be_asked_meanwhile(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_busy, may_end = threading.Event(), threading.Event()
    run = Shard.run

    def held(shard: Shard, batch: object) -> object:
        is_busy.set()
        assert may_end.wait(WAIT_S)
        return run(shard, batch)  # type: ignore[arg-type]

    bench.load()
    monkeypatch.setattr(Shard, "run", held)
    bench.compute.post(prefill())
    assert is_busy.wait(WAIT_S)
    now = time.monotonic()

    assert bench.compute.busy_s(now + 10.0) >= 10.0
    assert bench.compute.busy_s(now - 100.0) == 0.0
    may_end.set()
    bench.uplink.next()
    assert bench.compute.stop(WAIT_S)
    assert bench.compute.busy_s(now + 10.0) == 0.0
