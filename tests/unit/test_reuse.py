"""What one stage tells the next of a slot that it filled: how many blocks, where they were from, and what time is left."""

from __future__ import annotations

from collections import deque

import pytest

from shoal.kv import BlockHash
from shoal.v1 import flow_pb2
from tests.support.kv_cache import FORM, CacheBench, make_names
from tests.support.lower_tier import MemoryLowerTier
from worker import filling
from worker.filling import Message, RestoreReady, joined
from worker.kv.cache import Restored
from worker.kv.codec import KVCodec
from worker.reuse import Reuse

NAMES = make_names(3)
IN_MEMORY = Restored(KVCodec.LOSSLESS, is_exact=True, is_from_lower=False)
FETCHED = Restored(KVCodec.LOSSLESS, is_exact=True, is_from_lower=True)


class ReuseBench:
    """A stage's reuse over a cache. sent: what it passed on. ready: restores that may go on."""

    def __init__(self, cache: CacheBench) -> None:
        self.cache = cache
        self.sent: list[Message] = []
        self.ready: deque[RestoreReady] = deque()
        self.reuse = Reuse(
            ("p1", 1), FORM, cache.arena, cache.cache, self.sent.append, self.ready.append, clock=cache.clock.now
        )

    def restore(self, names: tuple[BlockHash, ...], timeout_ms: float) -> None:
        self.reuse.restore(flow_pb2.Restore(sequence_id=7, block_hashes=names, fetch_timeout_ms=timeout_ms))

    def settle(self) -> None:
        """Bring what was fetched, and let restores go on."""
        self.cache.settle()
        while self.ready:
            self.reuse.resume(self.ready.popleft())

    def answer(self) -> flow_pb2.Restore:
        (answer,) = [message for message in self.sent if isinstance(message, flow_pb2.Restore)]
        return answer


def make_fetching(num_stored: int) -> tuple[ReuseBench, MemoryLowerTier]:
    """One that has nothing in memory, above a tier that has so many blocks and answers when it is told to."""
    lower = MemoryLowerTier()
    CacheBench(lower=lower).store(NAMES[:num_stored])
    lower.answers_at_once = False
    return ReuseBench(CacheBench(lower=lower)), lower


def test_the_next_stage_has_the_time_that_fetching_left() -> None:
    bench, lower = make_fetching(3)
    bench.restore(NAMES, timeout_ms=500.0)
    bench.cache.clock.move_to(0.2)
    lower.settle()
    bench.settle()

    assert bench.answer().restored.num_blocks == 3
    assert bench.answer().fetch_timeout_ms == pytest.approx(300.0)


def test_nothing_more_is_fetched_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "FETCH_BLOCKS", 1)
    bench, lower = make_fetching(3)
    bench.restore(NAMES, timeout_ms=500.0)
    bench.cache.clock.move_to(0.6)
    lower.settle()
    bench.settle()

    assert (bench.answer().restored.num_blocks, bench.answer().fetch_timeout_ms) == (1, 0.0)
    assert lower.num_fetches == 1


def test_who_has_no_time_does_not_wait_for_what_is_on_its_way_for_others() -> None:
    bench, lower = make_fetching(3)
    bench.reuse.prefetch(flow_pb2.Prefetch(block_hashes=NAMES, timeout_ms=500.0, is_ahead=True))

    bench.restore(NAMES, timeout_ms=0.0)

    assert (bench.answer().restored.num_blocks, lower.num_fetches) == (0, 1)


def test_a_restore_that_is_given_up_has_restored_nothing() -> None:
    bench, _ = make_fetching(3)
    bench.cache.store(NAMES[:1])
    bench.restore(NAMES, timeout_ms=500.0)

    bench.reuse.give_up(0, 7)

    assert bench.answer().restored == flow_pb2.RestoredBlocks(is_exact=True)


def test_a_restore_that_is_not_under_way_is_not_given_up() -> None:
    bench, _ = make_fetching(3)
    bench.restore(NAMES, timeout_ms=500.0)

    bench.reuse.give_up(0, 8)
    bench.reuse.give_up(1, 7)

    assert not [message for message in bench.sent if isinstance(message, flow_pb2.Restore)]


@pytest.mark.parametrize(("count", "expected"), [(4, 2), (3, 1), (2, 0), (1, 0)])
def test_what_a_later_stage_lacks_is_taken_from_the_end_that_was_fetched(count: int, expected: int) -> None:
    before = flow_pb2.RestoredBlocks(num_blocks=4, num_from_redis=2, codec="f32", is_exact=True)

    assert joined(before, [IN_MEMORY] * count, 64 * count).num_from_redis == expected


def test_what_any_stage_fetched_was_fetched() -> None:
    before = flow_pb2.RestoredBlocks(num_blocks=2, num_from_redis=0, codec="f32", is_exact=True)

    assert joined(before, [IN_MEMORY, FETCHED], 128).num_from_redis == 1


@pytest.mark.parametrize(("codec", "is_exact"), [("int8", False), ("f32", False), ("f32", True)])
def test_a_slot_is_as_exact_as_its_least_exact_stage(codec: str, is_exact: bool) -> None:
    before = flow_pb2.RestoredBlocks(num_blocks=1, codec=codec, is_exact=is_exact)

    both = joined(before, [IN_MEMORY], 64)

    assert (both.codec, both.is_exact) == (codec, is_exact)
