"""The compute thread that keeps KV: when it copies blocks, where it gets them, and that a block that fails ends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from shoal.kv import BLOCK_TOKENS, KVScope, chain
from shoal.types import KVPolicy
from shoal.v1 import flow_pb2
from tests.support.compute import ALL_LAYERS, WAIT_S, Bench, model, run_badly, start
from tests.support.fleet import LOOK_S
from tests.support.lower_tier import MemoryLowerTier
from tests.support.shards import make_shape, make_tokens
from tests.support.stages import EPOCH, PIPELINE_ID, make_cancel, make_restore, make_row, make_start, make_step
from worker.commands import SetHeat
from worker.filling import RestoreReady
from worker.kv.block import HEADER_BYTES
from worker.kv.cache import BlockCache

__all__ = ["model", "start"]

LONG_PROMPT = make_tokens(100, 280, seed=3)
NAMES = chain(KVScope("00" * 32, "f32-rope-1"), LONG_PROMPT)
KEEPING = {"host_kv_bytes": 1 << 26}


def prefill_long(step: int = 1, sequence_id: int = 1) -> flow_pb2.Frame:
    return make_step(step, [make_row(sequence_id, num_tokens=100, start=make_start(names=NAMES))], LONG_PROMPT)


def test_what_a_prompt_filled_is_kept_while_nothing_else_is_to_do(start: Callable[..., Bench]) -> None:
    bench = start(**KEEPING)
    bench.load()
    bench.compute.post(prefill_long())
    bench.uplink.next()
    bench.compute.post(make_cancel((1, 0)))

    bench.compute.post(make_restore(2, NAMES))

    restored = bench.uplink.next().restored
    assert (restored.sequence_id, restored.restored.num_blocks, restored.restored.is_exact) == (2, 1, True)


def test_what_only_the_tier_below_has_is_fetched_by_its_own_thread(start: Callable[..., Bench]) -> None:
    lower = MemoryLowerTier()
    first = start(lower=lower, **KEEPING)
    assert lower.calls == ["start"]
    first.load()
    first.compute.post(prefill_long())
    first.uplink.next()
    assert first.compute.stop(WAIT_S)
    assert lower.calls == ["start", "stop"]

    second = start(lower=lower, **KEEPING)
    second.load()
    second.compute.post(make_restore(1, NAMES, fetch_timeout_ms=1000.0))

    assert second.uplink.next().restored.restored.num_from_redis == 1


@pytest.mark.parametrize("method", ["restore", "fetch"])
def test_a_restore_that_fails_is_answered_as_if_nothing_had_been_kept(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    bench = start(lower=MemoryLowerTier(), **KEEPING)
    bench.load()
    monkeypatch.setattr(BlockCache, method, run_badly)

    bench.compute.post(make_restore(7, NAMES, fetch_timeout_ms=1000.0))

    restored = bench.uplink.next().restored
    assert (restored.sequence_id, restored.restored.num_blocks) == (7, 0)


def test_a_block_that_cannot_be_copied_is_given_up_and_the_thread_lives_on(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start(**KEEPING)
    bench.load()
    monkeypatch.setattr("worker.kv.cache.pack_block", run_badly)

    bench.compute.post(prefill_long())
    bench.uplink.next()
    bench.compute.post(make_restore(2, NAMES, slot=1))

    assert bench.uplink.next().restored.restored.num_blocks == 0


def test_the_tiers_are_reported_with_their_budgets(start: Callable[..., Bench]) -> None:
    bench = start(lower=MemoryLowerTier(), **KEEPING)
    bench.load()
    bench.compute.post(prefill_long())
    bench.uplink.next()
    bench.compute.post(make_restore(2, NAMES, slot=1))
    bench.uplink.next()
    # An answer after the one that counts: what it reports is complete then.
    bench.compute.post(make_restore(3, NAMES, slot=2))
    bench.uplink.next()

    device, host, redis = bench.compute.kv_tiers(time.monotonic())
    assert (device.tier, host.tier, redis.tier) == ("device", "host", "redis")
    assert device.num_blocks >= 2
    assert 0 < device.used_bytes <= device.budget_bytes
    assert (host.budget_bytes, host.num_blocks, host.puts) == (1 << 26, 1, 1)
    assert host.hits >= 1
    assert host.oldest_s >= host.mean_age_s >= 0.0
    assert redis.num_blocks == 1


def test_a_hot_device_keeps_less_precisely_as_its_policy_allows(start: Callable[..., Bench]) -> None:
    bench = start(kv_policy=KVPolicy.BALANCED, **KEEPING)
    bench.load()
    prompt = make_tokens(192, 280, seed=4)
    names = chain(KVScope("00" * 32, "f32-rope-1"), prompt)
    bench.compute.post(SetHeat(True))
    row = make_row(1, num_tokens=128, sample=False, start=make_start(names=names))
    bench.compute.post(make_step(1, [row], prompt[:128]))
    bench.uplink.next()

    bench.compute.post(make_cancel((1, 0)))
    bench.compute.post(make_restore(2, names[:2]))

    restored = bench.uplink.next().restored.restored
    assert (restored.num_blocks, restored.codec) == (2, "int8")


def test_what_has_grown_cold_gets_coarser_while_nothing_else_is_to_do(
    start: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.kv.host.COLD_AFTER_S", 0.0)
    bench = start(kv_policy=KVPolicy.BALANCED, **KEEPING)
    bench.load(slot_tokens=256)
    prompt = make_tokens(192, 280, seed=4)
    names = chain(KVScope("00" * 32, "f32-rope-1"), prompt)
    bench.compute.post(make_step(1, [make_row(1, num_tokens=192, start=make_start(names=names))], prompt))
    bench.uplink.next()
    bench.compute.post(make_cancel((1, 0)))
    bench.compute.post(prefill_long(step=2, sequence_id=2))
    bench.uplink.next()

    block_bytes = BLOCK_TOKENS * make_shape(bench.model.manifest, ALL_LAYERS).kv_bytes_per_token + HEADER_BYTES
    deadline = time.monotonic() + WAIT_S
    while (host := bench.compute.kv_tiers(time.monotonic())[1]).puts < 4 or host.used_bytes == host.puts * block_bytes:
        assert time.monotonic() < deadline, host
        time.sleep(LOOK_S)
    bench.compute.post(make_restore(3, names, slot=1))

    assert bench.uplink.next().restored.restored.codec == "int8"


def test_what_was_to_go_on_in_an_epoch_that_is_over_does_not_end_a_restore(start: Callable[..., Bench]) -> None:
    lower = MemoryLowerTier()
    first = start(lower=lower, **KEEPING)
    first.load()
    first.compute.post(prefill_long())
    first.uplink.next()
    assert first.compute.stop(WAIT_S)
    lower.answers_at_once = False
    bench = start(lower=lower, **KEEPING)
    bench.load()
    bench.compute.post(make_restore(1, NAMES, fetch_timeout_ms=1e6))

    bench.compute.post(RestoreReady(PIPELINE_ID, EPOCH - 1, 0, 1))
    bench.compute.post(make_restore(2, (), slot=1))
    assert bench.uplink.next().restored.sequence_id == 2
    lower.settle()

    assert bench.uplink.next().restored.restored.num_blocks == 1
