"""Stages of a real tiny model that fetch KV from a tier below: in time or not, whatever becomes of the slot meanwhile."""

from __future__ import annotations

import pytest

from shoal.kv import KVScope, chain
from shoal.v1 import flow_pb2
from tests.support.kv_reuse import (
    LAYER_BLOCK_BYTES,
    NAMES,
    PROMPT,
    Open,
    answer_without_reuse,
    model,
    open_stages,
    prefill,
    restore,
    slot_contents,
)
from tests.support.lower_tier import MemoryLowerTier
from tests.support.stages import make_cancel, make_frame, make_restore
from worker import filling
from worker.kv.block import HEADER_BYTES

__all__ = ["model", "open_stages"]


def test_what_only_the_tier_below_has_is_fetched(open_stages: Open) -> None:
    _, expected = answer_without_reuse(open_stages)
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    restarted = open_stages(lower=lower)

    restored = restore(restarted, 1, fetch_timeout_ms=50.0)
    prefill(restarted, 1, begin=192)

    assert restored == flow_pb2.RestoredBlocks(
        num_blocks=3, num_from_redis=3, codec="f32", is_exact=True, num_tokens=192
    )
    assert slot_contents(restarted) == expected
    restarted.send(make_cancel((1, 0)))
    restarted.take_results()
    assert restore(restarted, 2).num_from_redis == 0


def test_a_prompt_of_more_blocks_than_memory_holds_is_fetched_bit_by_bit(open_stages: Open) -> None:
    _, expected = answer_without_reuse(open_stages)
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    restarted = open_stages(lower=lower, budget_bytes=2 * LAYER_BLOCK_BYTES + HEADER_BYTES)

    restored = restore(restarted, 1, fetch_timeout_ms=5000.0)
    prefill(restarted, 1, begin=192)

    assert (restored.num_blocks, restored.num_from_redis) == (3, 3)
    assert slot_contents(restarted) == expected


def test_a_long_prompt_is_fetched_and_copied_some_blocks_at_a_time(
    open_stages: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "FETCH_BLOCKS", 2)
    monkeypatch.setattr(filling, "TURN_BLOCKS", 1)
    lower = MemoryLowerTier()
    prefill(open_stages((), lower=lower), 1)
    lower.answers_at_once = False
    stages = open_stages((), lower=lower)

    stages.send(make_restore(1, NAMES, fetch_timeout_ms=5000.0))
    fetched = []
    while lower.asked:
        fetched.append(len(lower.asked[0][0]))
        lower.settle()
        stages.send()

    (restored,) = stages.take_restored()
    assert (restored.restored.num_blocks, fetched) == (3, [2, 1])


def test_without_time_to_fetch_only_memory_is_asked(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)

    assert restore(open_stages(lower=lower), 1).num_blocks == 0
    assert lower.num_fetches == 0


def test_stages_fetch_at_the_same_time(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    lower.answers_at_once = False
    stages = open_stages(lower=lower)

    stages.send(make_restore(1, NAMES, fetch_timeout_ms=50.0))

    assert len(lower.asked) == 2
    lower.settle()
    lower.settle()
    stages.send()
    (restored,) = stages.take_restored()
    assert (restored.restored.num_blocks, lower.num_fetches) == (3, 2)


def test_a_fetch_that_finds_nothing_leaves_what_memory_had(open_stages: Open) -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    stages = open_stages(lower=lower)
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()
    for cache in stages.caches:
        cache.forget(NAMES[2:])

    stages.send(make_restore(2, NAMES, fetch_timeout_ms=50.0))
    assert stages.take_restored() == []
    while lower.asked:
        lower.settle(finds=False)
        stages.send()

    (restored,) = stages.take_restored()
    assert restored.restored == flow_pb2.RestoredBlocks(num_blocks=2, codec="f32", is_exact=True, num_tokens=128)
    assert lower.num_fetches == 2


def test_what_was_fetched_ahead_need_not_be_fetched_again(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    stages = open_stages(lower=lower)

    stages.send(make_frame(prefetch=flow_pb2.Prefetch(block_hashes=NAMES, timeout_ms=50.0)))
    restored = restore(stages, 1)

    assert (restored.num_blocks, restored.num_from_redis) == (3, 3)
    assert lower.num_fetches == 2


def test_what_was_fetched_before_any_request_came_was_in_memory_for_it(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    stages = open_stages(lower=lower)

    stages.send(make_frame(prefetch=flow_pb2.Prefetch(block_hashes=NAMES, timeout_ms=50.0, is_ahead=True)))
    restored = restore(stages, 1)

    assert (restored.num_blocks, restored.num_from_redis) == (3, 0)
    assert lower.num_fetches == 2


def test_a_cancelled_restore_is_not_answered_and_writes_nothing_any_more(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    lower.answers_at_once = False
    stages = open_stages(lower=lower)
    stages.send(make_restore(1, NAMES, fetch_timeout_ms=50.0))

    stages.send(make_cancel((1, 0)))
    lower.settle()
    stages.send()

    assert stages.results == []
    assert stages.kv_bytes() == [0, 0]


def test_a_late_fetch_does_not_write_to_a_slot_that_is_somebody_elses(open_stages: Open) -> None:
    _, expected = answer_without_reuse(open_stages)
    lower = MemoryLowerTier()
    stored = open_stages(lower=lower)
    prefill(stored, 1)
    lower.answers_at_once = False
    stages = open_stages(lower=lower)
    stages.send(make_restore(1, NAMES, fetch_timeout_ms=50.0), make_cancel((1, 0)))

    prefill(stages, 2, names=())
    stages.take_results()
    while lower.asked:
        lower.settle()
    stages.send()

    assert stages.results == []
    assert slot_contents(stages) == expected
    assert [shard.arena.length(0) for shard in stages.shards] == [200, 200]


def test_what_was_fetched_for_a_cancelled_restore_does_not_end_the_next_one_in_the_slot(open_stages: Open) -> None:
    lower = MemoryLowerTier()
    prefill(open_stages((), lower=lower), 1)
    lower.answers_at_once = False
    stages = open_stages((), lower=lower)
    others = chain(KVScope("11" * 32, "f32-rope-1"), PROMPT)
    stages.send(make_restore(1, others, fetch_timeout_ms=50.0), make_cancel((1, 0)))
    stages.send(make_restore(2, NAMES, fetch_timeout_ms=50.0))

    lower.settle()
    stages.send()
    assert stages.results == []
    lower.settle()
    stages.send()

    (restored,) = stages.take_restored()
    assert (restored.sequence_id, restored.restored.num_blocks) == (2, 3)


def test_a_first_row_ends_a_restore_that_is_still_under_way(open_stages: Open) -> None:
    _, expected = answer_without_reuse(open_stages, ())
    lower = MemoryLowerTier()
    prefill(open_stages((), lower=lower), 1)
    lower.answers_at_once = False
    stages = open_stages((), lower=lower)
    stages.send(make_restore(1, NAMES, fetch_timeout_ms=50.0))

    prefill(stages, 1, names=())
    stages.take_results()
    lower.settle()
    stages.send()

    assert stages.results == []
    assert slot_contents(stages) == expected
    assert stages.shards[0].arena.length(0) == 200
