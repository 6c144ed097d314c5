"""What the block cache makes room with: what it loses, what it stores more coarsely, and what it keeps on demand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from shoal.types import KVPolicy
from tests.support.kv_cache import (
    COST_S,
    EXACT,
    FORM,
    LOSSLESS_BYTES,
    SHAPE,
    CacheBench,
    make_names,
    status_of,
)
from worker.kv.block import ChainBlock
from worker.kv.codec import KVCodec, encoded_bytes
from worker.kv.policy import COLD_AFTER_S


def test_an_exact_cache_evicts_and_never_shrinks() -> None:
    bench = CacheBench(num_blocks=3)
    bench.store(make_names(2))
    bench.store(make_names(3, prompt=1))
    assert status_of(bench).num_blocks == 3
    assert status_of(bench).evictions == 2


def test_under_pressure_the_coldest_lossless_blocks_are_stored_more_coarsely_before_any_is_lost() -> None:
    bench = CacheBench(num_blocks=5, policy=KVPolicy.BALANCED)
    blocks = bench.store(make_names(5))
    bench.clock.move_to(10.0)
    bench.restore(blocks[1])

    bench.store(make_names(1, prompt=1))

    assert status_of(bench).evictions == 0
    codecs = [bench.restore(block)[0] for block in blocks]
    assert [one.codec.value for one in codecs if one is not None] == ["f32", "f32", "int8", "int8", "f32"]
    assert [one.is_exact for one in codecs if one is not None] == [True, True, False, False, True]


def test_blocks_that_were_not_used_for_long_are_stored_in_four_bits_under_pressure() -> None:
    bench = CacheBench(num_blocks=3, policy=KVPolicy.BALANCED)
    blocks = bench.store(make_names(3))
    bench.clock.move_to(COLD_AFTER_S + 1.0)

    bench.store(make_names(1, prompt=1))

    restored = bench.restore(blocks[1])[0]
    assert restored is not None
    assert restored.codec is KVCodec.K4V4


def codecs_of(bench: CacheBench, blocks: Sequence[ChainBlock]) -> list[str]:
    found = [bench.restore(block)[0] for block in blocks]
    return [one.codec.value if one is not None else "none" for one in found]


@pytest.mark.parametrize(
    ("policy", "is_hot", "codec"),
    [
        (KVPolicy.BALANCED, False, "int8"),
        (KVPolicy.BALANCED, True, "k4v4"),
        (KVPolicy.EXACT, True, "f32"),
    ],
    ids=str,
)
def test_what_was_not_used_while_others_were_grows_coarser_though_there_is_room(
    policy: KVPolicy, is_hot: bool, codec: str
) -> None:
    bench = CacheBench(policy=policy)
    first, middle, last = bench.store(make_names(3))
    bench.clock.move_to(COLD_AFTER_S + 1.0)
    others = bench.store(make_names(3, prompt=1))
    bench.cache.is_hot = is_hot

    bench.idle()

    assert codecs_of(bench, [first, middle, last]) == ["f32", codec, "f32"]
    assert codecs_of(bench, others) == ["f32", "f32", "f32"]


def test_what_no_longer_ends_its_prefix_grows_coarser_too() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    names = make_names(3)
    bench.store(names[:2])
    bench.clock.move_to(COLD_AFTER_S + 1.0)
    bench.store(make_names(1, prompt=1))
    bench.idle()
    blocks = bench.store(names, is_newest=False)
    bench.clock.move_to(2 * COLD_AFTER_S + 2.0)
    bench.store(make_names(1, prompt=2))

    bench.idle()

    assert codecs_of(bench, blocks) == ["f32", "int8", "f32"]


def test_a_device_that_nobody_uses_keeps_what_it_has() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    blocks = bench.store(make_names(3))
    bench.clock.move_to(100 * COLD_AFTER_S)

    assert not bench.cache.has_idle_work
    assert codecs_of(bench, blocks) == ["f32", "f32", "f32"]


def test_what_is_used_again_in_time_stays_as_it_is() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    blocks = bench.store(make_names(3))
    bench.clock.move_to(COLD_AFTER_S)
    codecs_of(bench, blocks)
    bench.clock.move_to(2 * COLD_AFTER_S)
    bench.store(make_names(1, prompt=1))

    assert not bench.cache.has_idle_work


def test_what_is_used_does_not_keep_others_from_growing_coarser() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    blocks = bench.store(make_names(4))
    bench.clock.move_to(COLD_AFTER_S + 1.0)
    bench.restore(blocks[0])
    bench.restore(blocks[1])

    bench.idle()

    assert codecs_of(bench, blocks) == ["f32", "f32", "int8", "f32"]


def test_a_unit_of_idle_work_makes_one_block_coarser() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    bench.store(make_names(6))
    bench.clock.move_to(COLD_AFTER_S + 1.0)
    bench.store(make_names(1, prompt=1))
    sizes = [status_of(bench).used_bytes]
    # The first and the last of the prefix are looked at and left as they are.
    for _ in range(6):
        bench.cache.work()
        sizes.append(status_of(bench).used_bytes)

    assert not bench.cache.has_idle_work
    saved = [before - after for before, after in itertools.pairwise(sizes)]
    assert [bool(one) for one in saved] == [False, True, True, True, True, False]
    assert len(set(saved)) == 2


def test_what_a_prompt_filled_is_copied_before_anything_grows_coarser() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    bench.store(make_names(3))
    bench.clock.move_to(COLD_AFTER_S + 1.0)
    waiting = bench.queue(make_names(2, prompt=1))

    bench.cache.work()
    assert bench.held(waiting) == [True, False]
    bench.cache.release(bench.arena, 0)

    assert bench.held(waiting) == [True, True]
    assert (bench.cache.has_work, bench.cache.has_idle_work) == (False, True)


def test_what_is_cold_and_coarse_already_gets_coarser_still_before_any_is_lost() -> None:
    num_between = sum(encoded_bytes(codec, SHAPE) for codec in (KVCodec.INT8, KVCodec.K4V4)) / 2 / LOSSLESS_BYTES
    bench = CacheBench(num_blocks=4 + num_between, policy=KVPolicy.BALANCED)
    blocks = bench.store(make_names(3))
    bench.clock.move_to(COLD_AFTER_S + 1.0)
    bench.store(make_names(1, prompt=1))
    bench.idle()

    bench.store(make_names(1, prompt=2))

    assert status_of(bench).evictions == 0
    assert codecs_of(bench, blocks[1:2]) == ["k4v4"]


def test_a_hot_device_stores_more_coarsely() -> None:
    bench = CacheBench(policy=KVPolicy.BALANCED)
    bench.cache.is_hot = True
    blocks = bench.store(make_names(3))
    found = [bench.restore(block)[0] for block in blocks]
    assert [one.codec.value for one in found if one is not None] == ["f32", "int8", "f32"]


def test_a_block_that_no_codec_can_hold_stays_lossless() -> None:
    bench = CacheBench(policy=KVPolicy.COMPACT)
    blocks = bench.fill(make_names(3))
    bench.arena.block(0, 1)[0, 0, 0, 0, 0] = np.inf
    bench.cache.store(blocks, bench.arena, 0, is_exact=True, cost_s=COST_S)
    bench.keep_up()
    assert bench.restore(blocks[1])[0] == EXACT


def test_a_kept_block_outlasts_others_until_its_time_is_over() -> None:
    bench = CacheBench(num_blocks=2)
    names = make_names(1)
    kept = bench.store(names)
    bench.cache.keep(names, 60.0)
    bench.store(make_names(2, prompt=1))
    assert bench.held(kept) == [True]

    bench.clock.move_to(61.0)
    bench.store(make_names(2, prompt=2))
    bench.store(make_names(2, prompt=3))
    assert bench.held(kept) == [False]


def test_kept_blocks_leave_half_of_the_memory_to_others() -> None:
    bench = CacheBench(num_blocks=4)
    names = make_names(4)
    kept = bench.store(names)
    bench.cache.keep(names, 60.0)

    others = bench.store(make_names(2, prompt=1))

    assert bench.held(kept) == [True, True, False, False]
    assert bench.held(others) == [True, True]


def test_a_pinned_block_that_was_computed_anew_still_counts_as_pinned() -> None:
    bench = CacheBench(num_blocks=4)
    names = make_names(2)
    bench.store(names, is_exact=False)
    bench.cache.keep([names[0], names[0], names[1]], 60.0)
    bench.store(names, is_exact=True)
    others = make_names(2, prompt=1)
    bench.store(others)

    bench.cache.keep(others, 60.0)

    assert bench.held(bench.store(make_names(2, prompt=2))) == [True, True]
    assert bench.held(FORM.chain(names)) == [True, True]


def test_blocks_that_are_kept_again_are_kept_for_longer_though_no_more_could_be_pinned() -> None:
    bench = CacheBench(num_blocks=4)
    names = make_names(2)
    kept = bench.store(names)
    bench.cache.keep(names, 60.0)
    bench.clock.move_to(50.0)

    bench.cache.keep(names, 60.0)

    bench.clock.move_to(100.0)
    for prompt in (1, 2):
        bench.store(make_names(2, prompt=prompt))
    assert bench.held(kept) == [True, True]


def test_a_wish_to_keep_what_comes_later_ends_with_its_time() -> None:
    bench = CacheBench(num_blocks=2)
    names = make_names(1)
    bench.cache.keep(names, 60.0)
    bench.clock.move_to(61.0)
    kept = bench.store(names)
    bench.store(make_names(2, prompt=1))
    assert bench.held(kept) == [False]
