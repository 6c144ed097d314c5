"""Stages of a real tiny model that keep KV: what a slot is filled with is what computing it would have written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shoal.kv import KVScope, chain
from shoal.types import KVPolicy
from shoal.v1 import flow_pb2
from tests.support.kv_reuse import (
    LAYER_BLOCK_BYTES,
    NAMES,
    PROMPT,
    TWO_STAGES,
    Open,
    answer_without_reuse,
    decode,
    model,
    open_stages,
    prefill,
    restore,
    slot_contents,
)
from tests.support.lower_tier import MemoryLowerTier
from tests.support.shards import make_tokens
from tests.support.stages import make_cancel, make_frame, make_restore
from worker.kv.block import HEADER_BYTES

__all__ = ["model", "open_stages"]


@pytest.mark.parametrize("cuts", [(), (1,), TWO_STAGES, (1, 2)])
@pytest.mark.parametrize(("stored_chunk", "chunk"), [(64, 64), (40, 64), (200, 32), (64, 8)])
def test_a_restored_prompt_gives_the_bits_of_a_computed_one(
    open_stages: Open, cuts: Sequence[int], stored_chunk: int, chunk: int
) -> None:
    expected_tokens, expected_contents = answer_without_reuse(open_stages, cuts)
    stages = open_stages(cuts)
    prefill(stages, 1, chunk=stored_chunk)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    restored = restore(stages, 2)
    prefill(stages, 2, begin=192, chunk=chunk)

    assert restored == flow_pb2.RestoredBlocks(num_blocks=3, codec="f32", is_exact=True, num_tokens=192)
    assert slot_contents(stages) == expected_contents
    tokens = decode(stages, 2, 5)
    for token in tokens:
        token.sequence_id = 1
    assert tokens == expected_tokens


def test_a_prompt_that_is_restored_in_part_goes_on_with_the_same_bits(open_stages: Open) -> None:
    _, expected_contents = answer_without_reuse(open_stages)
    stages = open_stages()
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)), make_frame(forget_blocks=flow_pb2.ForgetBlocks(block_hashes=NAMES[1:])))
    stages.take_results()

    assert restore(stages, 2).num_blocks == 1
    prefill(stages, 2, begin=64)

    assert slot_contents(stages) == expected_contents


def test_stages_that_hold_more_than_the_others_are_overwritten_with_the_same_bits(open_stages: Open) -> None:
    _, expected_contents = answer_without_reuse(open_stages)
    stages = open_stages()
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()
    stages.caches[1].forget(NAMES[2:])

    assert restore(stages, 2).num_blocks == 2
    assert [shard.arena.length(0) for shard in stages.shards] == [192, 128]
    prefill(stages, 2, begin=128)

    assert slot_contents(stages) == expected_contents


def test_blocks_that_were_evicted_are_computed_again_with_the_same_bits(open_stages: Open) -> None:
    _, expected_contents = answer_without_reuse(open_stages)
    # Room for two blocks at the first stage, of two layers, and for more at the second, of one.
    stages = open_stages(budget_bytes=2 * (2 * LAYER_BLOCK_BYTES + HEADER_BYTES))
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    restored = restore(stages, 2)
    prefill(stages, 2, begin=64 * restored.num_blocks)

    assert restored.num_blocks in (1, 2)
    assert slot_contents(stages) == expected_contents


def test_blocks_are_kept_over_epochs_of_a_pipeline(open_stages: Open) -> None:
    before = open_stages()
    prefill(before, 1)

    after = open_stages(caches=before.caches)

    assert restore(after, 1).num_blocks == 3


def test_another_cut_of_the_layers_finds_nothing(open_stages: Open) -> None:
    before = open_stages((2,))
    prefill(before, 1)

    assert restore(open_stages((1,), caches=before.caches), 1).num_blocks == 0


def test_what_decode_steps_write_is_not_kept(open_stages: Open) -> None:
    stages = open_stages()
    prefill(stages, 1, names=NAMES[:1])
    decode(stages, 1, 5)
    stages.keep_up()

    assert [cache.snapshot().status.num_blocks for cache in stages.caches] == [1, 1]


@pytest.mark.parametrize(("policy", "codec"), [(KVPolicy.COMPACT, "k4v4"), (KVPolicy.EXACT, "f32")])
def test_a_policy_shows_in_what_is_restored(open_stages: Open, policy: KVPolicy, codec: str) -> None:
    stages = open_stages(policy=policy)
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    restored = restore(stages, 2)

    assert restored == flow_pb2.RestoredBlocks(num_blocks=3, codec=codec, is_exact=codec == "f32", num_tokens=192)


def test_first_and_newest_blocks_of_a_prompt_stay_exact_under_a_lossy_policy(open_stages: Open) -> None:
    _, expected = answer_without_reuse(open_stages)
    stages = open_stages(policy=KVPolicy.COMPACT)
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    restore(stages, 2)

    exact = np.frombuffer(expected[0], np.float32).reshape(2, 2, 2, len(PROMPT), 16)
    held = stages.shards[0].arena.array[:, :, 0, :, :192]
    assert (held[..., :64, :] == exact[..., :64, :]).all()
    assert (held[..., 64:128, :] != exact[..., 64:128, :]).any()
    assert (held[..., 128:192, :] == exact[..., 128:192, :]).all()


def test_a_request_for_exact_blocks_gets_none_behind_a_lossy_one(open_stages: Open) -> None:
    stages = open_stages(policy=KVPolicy.COMPACT)
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    assert restore(stages, 2, is_exact_only=True) == flow_pb2.RestoredBlocks(
        num_blocks=1, codec="f32", is_exact=True, num_tokens=64
    )


def test_what_is_computed_from_lossy_blocks_is_not_exact_and_gives_way_to_what_is(open_stages: Open) -> None:
    stages = open_stages()
    prefill(stages, 1, is_kv_exact=False)
    stages.send(make_cancel((1, 0)))
    stages.take_results()
    assert restore(stages, 2, is_exact_only=True).num_blocks == 0
    assert restore(stages, 3) == flow_pb2.RestoredBlocks(num_blocks=3, codec="f32", is_exact=False, num_tokens=192)

    prefill(stages, 4)
    stages.send(make_cancel((4, 0)))
    stages.take_results()

    assert restore(stages, 5, is_exact_only=True).num_blocks == 3


def test_a_restore_of_more_than_a_slot_holds_restores_nothing(open_stages: Open) -> None:
    stages = open_stages()
    names = chain(KVScope("00" * 32, "f32-rope-1"), make_tokens(640, 280))

    stages.send(make_restore(1, names))

    (restored,) = stages.take_restored()
    assert restored.restored == flow_pb2.RestoredBlocks(is_exact=True)


def test_stages_that_keep_nothing_answer_at_once(open_stages: Open) -> None:
    lower = MemoryLowerTier(answers_at_once=False)
    stages = open_stages(budget_bytes=0, lower=lower)
    prefill(stages, 1)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    assert restore(stages, 2, fetch_timeout_ms=50.0).num_blocks == 0
    assert lower.values == {}


def test_a_slot_that_ends_has_copied_what_waits(open_stages: Open) -> None:
    stages = open_stages()
    prefill(stages, 1, keeps_up=False)
    stages.send(make_cancel((1, 0)))
    stages.take_results()

    assert restore(stages, 2).num_blocks == 3


def test_forgotten_blocks_are_gone_at_all_stages(open_stages: Open) -> None:
    stages = open_stages()
    prefill(stages, 1, keeps_up=False)
    stages.send(make_frame(forget_blocks=flow_pb2.ForgetBlocks(block_hashes=NAMES)), make_cancel((1, 0)))
    stages.take_results()

    assert restore(stages, 2).num_blocks == 0
    assert [cache.snapshot().status.used_bytes for cache in stages.caches] == [0, 0]


def test_kept_blocks_stay_when_others_need_room(open_stages: Open) -> None:
    stages = open_stages((), budget_bytes=6 * (3 * LAYER_BLOCK_BYTES + HEADER_BYTES))
    stages.send(make_frame(keep_blocks=flow_pb2.KeepBlocks(block_hashes=NAMES, ttl_s=60.0)))
    prefill(stages, 1)
    for number in (1, 2, 3):
        others = chain(KVScope(f"{number}{number}" * 32, "f32-rope-1"), PROMPT)
        prefill(stages, 1 + number, slot=1, names=others)
        stages.send(make_cancel((1 + number, 1)))
    stages.take_results()

    stages.send(make_cancel((1, 0)))

    assert restore(stages, 9).num_blocks == 3
