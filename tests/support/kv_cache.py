"""A block cache on an arena of a few slots, whose contents say which block they are: for the tests of the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.kv import BLOCK_TOKENS, BlockHash, KVScope, chain
from shoal.types import KVPolicy, KVTierStatus, LayerRange, ShardShape
from tests.support.clock import FakeClock
from tests.support.lower_tier import MemoryLowerTier
from worker.kv.arena import Arena
from worker.kv.block import HEADER_BYTES, BlockForm, ChainBlock
from worker.kv.cache import BlockCache, Restored
from worker.kv.codec import KVCodec, encoded_bytes
from worker.kv.fetches import BlocksFetched, Found
from worker.kv.trace import BlockTrace

FORM = BlockForm("ab" * 32, LayerRange(0, 2), num_kv_heads=2, head_dim=16)
SHAPE = (2, 2, 2, BLOCK_TOKENS, 16)
LOSSLESS_BYTES = encoded_bytes(KVCodec.LOSSLESS, SHAPE) + HEADER_BYTES
COST_S = 0.01
EXACT = Restored(KVCodec.LOSSLESS, is_exact=True, is_from_lower=False)
# More than any test keeps blocks.
MAX_IDLE_UNITS = 200


def make_arena(num_slots: int = 2, num_blocks: int = 8) -> Arena:
    tokens = num_blocks * BLOCK_TOKENS
    return Arena(
        ShardShape(
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            hidden_size=64,
            vocab_size=288,
            num_slots=num_slots,
            slot_tokens=tokens,
            kv_tokens=num_slots * tokens,
            is_first=True,
            is_last=True,
        )
    )


def make_names(count: int, prompt: int = 0) -> tuple[BlockHash, ...]:
    """Of a prompt's blocks; prompts have nothing in common."""
    return chain(KVScope("ab" * 32, "f32-rope-1"), [prompt] * (count * BLOCK_TOKENS))


def values_of(block_hash: BlockHash) -> NDArray[np.float32]:
    """What computing a block gives: [L, 2, K, tokens, D]."""
    seed = int.from_bytes(block_hash[:8], "little")
    return np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)


class CacheBench:
    """A cache with room for so many lossless blocks; posted: what its lower tier's thread has brought."""

    def __init__(
        self,
        num_blocks: float = 100,
        policy: KVPolicy = KVPolicy.EXACT,
        *,
        lower: MemoryLowerTier | None = None,
        trace: Path | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.arena = make_arena()
        self.lower = lower
        self.posted: deque[BlocksFetched] = deque()
        self.cache = BlockCache(
            int(num_blocks * LOSSLESS_BYTES),
            policy,
            self.posted.append,
            lower=lower,
            trace=BlockTrace(trace),
            clock=self.clock.now,
        )

    def fill(self, names: Sequence[BlockHash], slot: int = 0) -> tuple[ChainBlock, ...]:
        """Write what a prompt computes into a slot."""
        blocks = FORM.chain(names)
        for block in blocks:
            self.arena.block(slot, block.index)[...] = values_of(block.block_hash)
        self.arena.set_length(slot, len(blocks) * BLOCK_TOKENS)
        return blocks

    def queue(
        self, names: Sequence[BlockHash], *, slot: int = 0, is_exact: bool = True, is_newest: bool = True
    ) -> tuple[ChainBlock, ...]:
        blocks = self.fill(names, slot)
        if not is_newest:
            blocks = tuple(replace(block, is_newest=False) for block in blocks)
        self.cache.store(blocks, self.arena, slot, is_exact=is_exact, cost_s=COST_S)
        return blocks

    def store(
        self, names: Sequence[BlockHash], *, is_exact: bool = True, is_newest: bool = True
    ) -> tuple[ChainBlock, ...]:
        blocks = self.queue(names, is_exact=is_exact, is_newest=is_newest)
        self.keep_up()
        return blocks

    def keep_up(self) -> None:
        while self.cache.has_work:
            self.cache.work()
        self.cache.check_invariants()

    def idle(self) -> None:
        """Have all done that waits for a time when nothing else is to be done."""
        for _ in range(MAX_IDLE_UNITS):
            if not self.cache.has_idle_work:
                return
            self.cache.work()
            self.cache.check_invariants()
        raise AssertionError("there is no end to it")

    def settle(self) -> None:
        """Bring to the cache all that was fetched."""
        while self.posted:
            self.cache.fetched(self.posted.popleft())
            self.cache.check_invariants()

    def restore(
        self, block: ChainBlock, *, is_exact_only: bool = False, fetched: Found | None = None
    ) -> tuple[Restored | None, NDArray[np.float32]]:
        """What came of it, and what was written."""
        out = np.full(SHAPE, np.nan, np.float32)
        restored = self.cache.restore(block, out, is_exact_only=is_exact_only, fetched=fetched or {})
        self.cache.check_invariants()
        return restored, out

    def held(self, blocks: Sequence[ChainBlock]) -> list[bool]:
        return [self.cache.holds(block.key) for block in blocks]


def status_of(bench: CacheBench) -> KVTierStatus:
    return bench.cache.snapshot().status_at(bench.clock.now())
