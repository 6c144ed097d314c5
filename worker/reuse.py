"""What one stage does about kept KV: fills slots with blocks before their first row, and keeps what prompts compute.

Copies a few blocks a turn, so that steps of other sequences go on in between. However a restore goes, it travels on to the
next stage, unless its sequence was cancelled: then nobody waits for it, and nothing writes to the slot any more. Knows
frames and names of blocks; `cache` knows their bytes. Part of a `stage`, owned by the compute thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.errors import ShoalError
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.v1 import flow_pb2
from worker.kv.arena import Arena
from worker.kv.block import BlockForm, ChainBlock
from worker.kv.cache import BlockCache
from worker.kv.cache import Restored as RestoredBlock
from worker.kv.codec import KVCodec
from worker.kv.fetches import Found
from worker.kv.policy import coarser

# At about 1.5 ms each.
TURN_BLOCKS = 4
# Fetched at a time: they may take memory beyond what blocks are kept in.
FETCH_BLOCKS = 16

# What goes on to the next stage.
Message = flow_pb2.Restore | flow_pb2.Prefetch | flow_pb2.KeepBlocks | flow_pb2.ForgetBlocks


@dataclass(frozen=True, slots=True)
class RestoreReady:
    """A restore may go on; for `Reuse.resume`."""

    pipeline_id: str
    epoch: int
    slot: int
    sequence_id: int


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a prompt's full blocks, and whether what its rows compute is exact."""

    block_hashes: list[BlockHash]
    is_exact: bool


@dataclass(slots=True)
class _Restoring:
    """chain: blocks that all stages before have. fetch_began_at: None before anything was fetched.

    num_at_fetch: blocks that were done when the last fetch began.
    """

    request: flow_pb2.Restore
    chain: tuple[ChainBlock, ...]
    done: list[RestoredBlock] = field(default_factory=list)
    fetched: Found = field(default_factory=dict)
    fetch_began_at: float | None = None
    num_at_fetch: int = -1


class Reuse:
    """Invariants: a slot that is being filled is its sequence's, and has no rows yet; an emptied slot is not written to."""

    __slots__ = ("_arena", "_cache", "_clock", "_form", "_is_first", "_names", "_post", "_restoring", "_send", "_where")

    def __init__(
        self,
        where: tuple[str, int],
        form: BlockForm,
        arena: Arena,
        cache: BlockCache,
        send: Callable[[Message], None],
        post: Callable[[RestoreReady], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """where: pipeline and epoch. send: to whoever comes after. post: brings what it is given back to `resume`, later."""
        self._where = where
        self._form = form
        self._is_first = form.layers.start == 0
        self._arena = arena
        self._cache = cache
        self._send = send
        self._post = post
        self._clock = clock
        self._names: dict[int, _Names] = {}
        self._restoring: dict[int, _Restoring] = {}

    # Filling slots

    def restore(self, request: flow_pb2.Restore) -> None:
        """Begin to fill a slot."""
        count = len(request.block_hashes) if self._is_first else request.restored.num_blocks
        hashes = names_of(request.block_hashes[:count])
        restoring = _Restoring(request, self._form.chain(hashes))
        self._restoring[request.slot] = restoring
        try:
            self._arena.check_fill(request.slot, len(hashes) * BLOCK_TOKENS)
        except ShoalError:
            restoring.chain = ()
        self.resume(request.slot, request.sequence_id)

    def resume(self, slot: int, sequence_id: int) -> None:
        """Copy some more blocks; one that does not go on any more is nobody's."""
        restoring = self._restoring.get(slot)
        if restoring is None or restoring.request.sequence_id != sequence_id:
            return
        for _ in range(TURN_BLOCKS):
            if len(restoring.done) == len(restoring.chain):
                self._finish(restoring)
                return
            if not self._fill_next(restoring):
                if not self._fetch(restoring):
                    self._finish(restoring)
                return
        self._post(RestoreReady(*self._where, slot, sequence_id))

    def give_up(self, slot: int, sequence_id: int) -> None:
        """End a restore that failed as if nothing had been found."""
        restoring = self._restoring.get(slot)
        if restoring is not None and restoring.request.sequence_id == sequence_id:
            restoring.done.clear()
            self._finish(restoring)

    def _fill_next(self, restoring: _Restoring) -> bool:
        request, index = restoring.request, len(restoring.done)
        block = self._cache.restore(
            restoring.chain[index],
            self._arena.block(request.slot, index),
            is_exact_only=request.is_exact_only,
            fetched=restoring.fetched,
        )
        if block is None:
            return False
        restoring.done.append(block)
        self._arena.set_length(request.slot, len(restoring.done) * BLOCK_TOKENS)
        return True

    def _fetch(self, restoring: _Restoring) -> bool:
        """Fetch some of what is missing; the stages after do so at the same time. False if nothing will come.

        A few blocks at a time, for they may be more than memory holds; not again after a fetch that was of no use.
        """
        request, num_done = restoring.request, len(restoring.done)
        left_s = (request.fetch_timeout_ms - self._spent_ms(restoring)) / 1e3
        missing = restoring.chain[num_done : num_done + FETCH_BLOCKS]
        # Held is what may not be used: not exact, though that is asked for.
        if left_s <= 0.0 or restoring.num_at_fetch == num_done or self._cache.holds(missing[0].key):
            return False
        is_first = restoring.fetch_began_at is None
        if is_first:
            restoring.fetch_began_at = self._clock()
        restoring.num_at_fetch = num_done

        def go_on(found: Found) -> None:
            restoring.fetched = found
            self._post(RestoreReady(*self._where, request.slot, request.sequence_id))

        if not self._cache.fetch(missing, left_s, go_on):
            return False
        if is_first:
            hashes = [chain.block_hash for chain in restoring.chain]
            self._send(flow_pb2.Prefetch(block_hashes=hashes, timeout_ms=request.fetch_timeout_ms))
        return True

    def _spent_ms(self, restoring: _Restoring) -> float:
        """Since the first fetch."""
        began_at = restoring.fetch_began_at
        return 0.0 if began_at is None else (self._clock() - began_at) * 1e3

    def _finish(self, restoring: _Restoring) -> None:
        request = restoring.request
        del self._restoring[request.slot]
        self._send(
            flow_pb2.Restore(
                sequence_id=request.sequence_id,
                slot=request.slot,
                block_hashes=request.block_hashes,
                is_exact_only=request.is_exact_only,
                fetch_timeout_ms=max(0.0, request.fetch_timeout_ms - self._spent_ms(restoring)),
                restored=joined(None if self._is_first else request.restored, restoring.done),
            )
        )

    def prefetch(self, request: flow_pb2.Prefetch) -> None:
        self._send(request)
        blocks = self._form.chain(names_of(request.block_hashes))
        self._cache.prefetch(blocks, request.timeout_ms / 1e3, is_ahead=request.is_ahead)

    def keep(self, request: flow_pb2.KeepBlocks) -> None:
        self._send(request)
        self._cache.keep(names_of(request.block_hashes), request.ttl_s)

    def forget(self, request: flow_pb2.ForgetBlocks) -> None:
        self._send(request)
        self._cache.forget(names_of(request.block_hashes))

    # Keeping what prompts compute

    def start(self, slot: int, start: flow_pb2.SequenceStart) -> None:
        """A sequence has its first row, with the names of its prompt's blocks."""
        self._restoring.pop(slot, None)
        self._names[slot] = _Names(names_of(start.block_hashes), start.is_kv_exact)

    def computed(self, slot: int, position: int, num_tokens: int, token_s: float) -> None:
        """A row of a slot was computed, at token_s a token: have the blocks of the prompt stored that it completed."""
        names = self._names.get(slot)
        if names is None:
            return
        first, stop = position // BLOCK_TOKENS, (position + num_tokens) // BLOCK_TOKENS
        filled = self._form.chain(names.block_hashes, first, stop)
        if filled:
            cost_s = token_s * BLOCK_TOKENS
            self._cache.store(filled, self._arena, slot, is_exact=names.is_exact, cost_s=cost_s)

    def release(self, slot: int) -> None:
        """A slot is about to be emptied."""
        self._restoring.pop(slot, None)
        if self._names.pop(slot, None) is not None:
            self._cache.release(self._arena, slot)

    def close(self) -> None:
        """The arena is about to be closed."""
        self._restoring.clear()
        self._names.clear()
        self._cache.release(self._arena)


def names_of(block_hashes: Iterable[bytes]) -> list[BlockHash]:
    return [BlockHash(block_hash) for block_hash in block_hashes]


def joined(before: flow_pb2.RestoredBlocks | None, done: Sequence[RestoredBlock]) -> flow_pb2.RestoredBlocks:
    """What all stages up to this one have in the slot; before: what those before it have, None at the first.

    A stage misses the end of a prefix rather than its begin, so what was fetched before is taken to be the last of it.
    """
    count = len(done)
    if count == 0:
        return flow_pb2.RestoredBlocks(is_exact=True)
    codecs, num_from_lower, is_exact = [block.codec for block in done], 0, True
    if before is not None:
        codecs.append(KVCodec(before.codec))
        num_from_lower = max(0, before.num_from_redis - (before.num_blocks - count))
        is_exact = before.is_exact
    return flow_pb2.RestoredBlocks(
        num_blocks=count,
        num_from_redis=max(num_from_lower, sum(block.is_from_lower for block in done)),
        codec=functools.reduce(coarser, codecs).value,
        is_exact=is_exact and all(block.is_exact for block in done),
    )
