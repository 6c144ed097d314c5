"""Stages of a real tiny model that keep KV: what a slot is filled with is what computing it would have written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from shoal.kv import BlockHash, KVScope, chain
from shoal.types import KVPolicy, SamplingParams
from shoal.v1 import flow_pb2
from tests.support.lower_tier import MemoryLowerTier
from tests.support.shards import TinyModel, make_tiny_model, make_tokens
from tests.support.stages import (
    KVKeeping,
    StageChain,
    make_cancel,
    make_frame,
    make_restore,
    make_row,
    make_start,
    make_step,
)
from worker.kv.block import HEADER_BYTES
from worker.kv.cache import BlockCache

NUM_LAYERS = 3
PROMPT = make_tokens(200, 280, seed=1)
NAMES = chain(KVScope("00" * 32, "f32-rope-1"), PROMPT)
EVERYTHING = 1 << 30
# Of the tiny model: 2 heads of 16.
LAYER_BLOCK_BYTES = 2 * 2 * 64 * 16 * 4
TWO_STAGES = (2,)
SAMPLING = SamplingParams(num_logprobs=20)

Open = Callable[..., StageChain]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("reuse"), num_layers=NUM_LAYERS)


@pytest.fixture
def open_stages(model: TinyModel) -> Iterator[Open]:
    opened: list[StageChain] = []

    def open_with(
        cuts: Sequence[int] = TWO_STAGES,
        *,
        budget_bytes: int = EVERYTHING,
        policy: KVPolicy = KVPolicy.EXACT,
        lower: MemoryLowerTier | None = None,
        caches: Sequence[BlockCache] | None = None,
    ) -> StageChain:
        keeping = KVKeeping(budget_bytes, policy, lower, slot_tokens=256)
        opened.append(StageChain(model, cuts, keeping, caches))
        return opened[-1]

    yield open_with
    for stages in opened:
        stages.close()


def prefill(
    stages: StageChain,
    sequence_id: int = 1,
    *,
    slot: int = 0,
    begin: int = 0,
    chunk: int = 64,
    names: Sequence[BlockHash] = NAMES,
    is_kv_exact: bool = True,
    keeps_up: bool = True,
) -> None:
    """Compute the prompt from a token on, in chunks, as a run does after its restore."""
    for position in range(begin, len(PROMPT), chunk):
        piece = PROMPT[position : position + chunk]
        start = make_start(SAMPLING, names=names, is_kv_exact=is_kv_exact) if position == begin else None
        is_end = position + chunk >= len(PROMPT)
        row = make_row(sequence_id, slot=slot, position=position, num_tokens=len(piece), sample=is_end, start=start)
        stages.send(make_step(position + 1, [row], piece))
        if keeps_up:
            stages.keep_up()


def decode(stages: StageChain, sequence_id: int, count: int, *, slot: int = 0) -> list[flow_pb2.SampledToken]:
    for _ in range(count):
        newest = stages.tokens_of(sequence_id)[-1]
        stages.send(make_step(900, [make_row(sequence_id, slot=slot, position=newest.position)], [newest.token_id]))
    return stages.tokens_of(sequence_id)


def restore(stages: StageChain, sequence_id: int = 1, **options: object) -> flow_pb2.RestoredBlocks:
    stages.send(make_restore(sequence_id, NAMES, **options))  # type: ignore[arg-type]
    (restored,) = stages.take_restored()
    assert restored.sequence_id == sequence_id
    return restored.restored


def slot_contents(stages: StageChain, slot: int = 0) -> list[bytes]:
    return [shard.arena.array[:, :, slot, :, : len(PROMPT)].tobytes() for shard in stages.shards]


def answer_without_reuse(open_stages: Open, cuts: Sequence[int] = TWO_STAGES) -> tuple[list[object], list[bytes]]:
    stages = open_stages(cuts, budget_bytes=0)
    prefill(stages)
    contents = slot_contents(stages)
    return list(decode(stages, 1, 5)), contents


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

    assert restored == flow_pb2.RestoredBlocks(num_blocks=3, codec="f32", is_exact=True)
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

    assert restored == flow_pb2.RestoredBlocks(num_blocks=3, codec=codec, is_exact=codec == "f32")


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

    assert restore(stages, 2, is_exact_only=True) == flow_pb2.RestoredBlocks(num_blocks=1, codec="f32", is_exact=True)


def test_what_is_computed_from_lossy_blocks_is_not_exact_and_gives_way_to_what_is(open_stages: Open) -> None:
    stages = open_stages()
    prefill(stages, 1, is_kv_exact=False)
    stages.send(make_cancel((1, 0)))
    stages.take_results()
    assert restore(stages, 2, is_exact_only=True).num_blocks == 0
    assert restore(stages, 3) == flow_pb2.RestoredBlocks(num_blocks=3, codec="f32", is_exact=False)

    prefill(stages, 4)
    stages.send(make_cancel((4, 0)))
    stages.take_results()

    assert restore(stages, 5, is_exact_only=True).num_blocks == 3


def test_what_only_the_tier_below_has_is_fetched(open_stages: Open) -> None:
    _, expected = answer_without_reuse(open_stages)
    lower = MemoryLowerTier()
    prefill(open_stages(lower=lower), 1)
    restarted = open_stages(lower=lower)

    restored = restore(restarted, 1, fetch_timeout_ms=50.0)
    prefill(restarted, 1, begin=192)

    assert restored == flow_pb2.RestoredBlocks(num_blocks=3, num_from_redis=3, codec="f32", is_exact=True)
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
    assert restored.restored == flow_pb2.RestoredBlocks(num_blocks=2, codec="f32", is_exact=True)


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
