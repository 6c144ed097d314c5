"""Prompts that are computed for the sake of their KV alone: what operators warm, and conversations that have just ended.

An answer's tokens were computed one at a time, whose KV is not bit-equal to a prompt's and is not kept; computed once more
as a prompt, they are there when the next turn comes. That is settling: one conversation at a time, of the lowest class, and
never while requests wait. Owns what is to be settled. Called by `server` and `conversations`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from orchestrator.conversation import SessionKey
from orchestrator.core.sequence import Sequence
from orchestrator.engine import Engine
from shoal.errors import ShoalError
from shoal.kv import BlockHash
from shoal.types import KVReuse, NumericClass, QosClass, SamplingParams

logger = logging.getLogger(__name__)

# Conversations that wait to be settled; with more, those that wait longest are not.
MAX_PENDING = 16


@dataclass(frozen=True, slots=True)
class KVPrompt:
    """Full blocks of tokens, and their names."""

    tenant: str
    token_ids: tuple[int, ...]
    blocks: tuple[BlockHash, ...]
    kv_reuse: KVReuse = KVReuse.POLICY


@dataclass(slots=True)
class SettlingCounters:
    """Since the start. skipped: for requests that waited, or for lack of room. aborted: by a next turn or a request."""

    done: int = 0
    skipped: int = 0
    aborted: int = 0
    failed: int = 0


class Warmer:
    """Invariant: while something is to be settled, one task works at it, at one conversation at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: OrderedDict[SessionKey, tuple[KVPrompt, Callable[[], Awaitable[None]]]] = OrderedDict()
        self._current: tuple[SessionKey, asyncio.Task[Sequence]] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._pinned_until: dict[BlockHash, float] = {}
        self.counters = SettlingCounters()

    async def compute(self, prompt: KVPrompt, request_id: str = "") -> Sequence:
        """Have a prompt computed, or restored as far as it is kept. Raises what the engine refuses or ends it with."""
        sequence = Sequence(
            sequence_id=self._engine.new_sequence_id(),
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(),
            max_tokens=1,
            stop_ids=frozenset(),
            numeric=NumericClass.SHARED,
            qos=QosClass.THROUGHPUT,
            arrived_at=time.monotonic(),
            tenant=prompt.tenant,
            block_hashes=prompt.blocks,
            kv_reuse=prompt.kv_reuse,
        )
        answer = self._engine.submit(sequence, request_id)
        try:
            # The one token there has to be is of no use.
            await answer.next()
        finally:
            self._engine.abort(sequence.sequence_id)
        return sequence

    # Pins

    def pin(self, blocks: tuple[BlockHash, ...], ttl_s: float) -> None:
        """Keep blocks in workers' memory for so long."""
        now = time.monotonic()
        self._pinned_until = {block: until for block, until in self._pinned_until.items() if until > now}
        self._pinned_until |= dict.fromkeys(blocks, now + ttl_s)
        self._engine.keep_blocks(blocks, ttl_s)

    def is_pinned(self, block: BlockHash) -> bool:
        return self._pinned_until.get(block, 0.0) > time.monotonic()

    # Settling

    def settle(self, key: SessionKey, prompt: KVPrompt, on_done: Callable[[], Awaitable[None]]) -> None:
        """Compute a conversation as soon as it is its turn, unless requests wait then; on_done: only if it was computed."""
        if self._is_stopped:
            return
        self._pending[key] = (prompt, on_done)
        self._pending.move_to_end(key)
        if len(self._pending) > MAX_PENDING:
            self._pending.popitem(last=False)
            self.counters.skipped += 1
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    def abort_settling(self, key: SessionKey) -> None:
        """Leave a conversation as it is: its next turn computes what it needs."""
        if self._pending.pop(key, None) is not None:
            self.counters.aborted += 1
        if self._current is not None and self._current[0] == key:
            self._current[1].cancel()

    def make_way(self) -> None:
        """Leave what is being settled to a request that would have to wait."""
        if self._current is not None:
            self._current[1].cancel()

    async def stop(self) -> None:
        """Settle no more."""
        self._is_stopped = True
        self._pending.clear()
        self.make_way()
        if self._worker is not None:
            await self._worker

    async def _work(self) -> None:
        while self._pending:
            key, (prompt, on_done) = self._pending.popitem(last=False)
            if self._engine.num_waiting:
                self.counters.skipped += 1
                logger.info("session_not_settled session=%r reason=requests wait", key.session_id)
                continue
            task = asyncio.create_task(self.compute(prompt))
            self._current = (key, task)
            try:
                await asyncio.wait({task})
            finally:
                self._current = None
                task.cancel()
            if self._count(key, task):
                await on_done()

    def _count(self, key: SessionKey, task: asyncio.Task[Sequence]) -> bool:
        """Count what came of settling a conversation; True if it was computed."""
        if task.cancelled():
            self.counters.aborted += 1
            return False
        error = task.exception()
        if isinstance(error, ShoalError):
            self.counters.failed += 1
            logger.info("session_not_settled session=%r reason=%s", key.session_id, error.reason)
            return False
        sequence = task.result()
        self.counters.done += 1
        logger.info(
            "session_settled session=%r prompt_tokens=%d cached_tokens=%d",
            key.session_id, len(sequence.prompt_token_ids), sequence.num_restored,
        )  # fmt: skip
        return True
