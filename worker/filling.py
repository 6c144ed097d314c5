"""Fills slots before their first row: with blocks, and behind all of these with the sequence's trail.

Copies a little a turn, so that steps of other sequences go on in between, and tells the stages after what they will be asked
for as soon as something has to be fetched. However a restore goes, it travels on to the next stage, unless its sequence was
cancelled: then nobody waits for it, and nothing writes to the slot any more. Part of a stage's `reuse`, which knows what a
slot still holds; owned by the compute thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.errors import ShoalError
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.v1 import flow_pb2
from worker.checkpoints import Checkpoints
from worker.kv.arena import Arena
from worker.kv.block import BlockForm, ChainBlock
from worker.kv.cache import BlockCache
from worker.kv.cache import Restored as RestoredBlock
from worker.kv.codec import KVCodec
from worker.kv.fetches import Found, LowerTier
from worker.kv.policy import coarser
from worker.kv.trail import FoundTrail
from worker.trail_fetches import TrailFetches

# At about 1.5 ms each.
TURN_BLOCKS = 4
# Fetched at a time: they may take memory beyond what blocks are kept in.
FETCH_BLOCKS = 16

# What goes on to the next stage.
Message = flow_pb2.Restore | flow_pb2.Prefetch | flow_pb2.KeepBlocks | flow_pb2.ForgetBlocks


@dataclass(frozen=True, slots=True)
class RestoreReady:
    """A restore may go on; for `Reuse.resume`. found: what has come of the sequence's trail, if that is why."""

    pipeline_id: str
    epoch: int
    slot: int
    sequence_id: int
    found: FoundTrail | None = None


@dataclass(slots=True)
class _Restoring:
    """chain: blocks that all stages before have. limit: tokens that are of use. num_tokens: those in the slot so far.

    num_retained: of these, what the slot still held. fetch_began_at: None before anything was fetched. num_at_fetch: blocks
    that were done when the last fetch began. is_announced: the stages after know that there is something to fetch.
    """

    request: flow_pb2.Restore
    chain: tuple[ChainBlock, ...]
    limit: int
    num_tokens: int = 0
    num_retained: int = 0
    done: list[RestoredBlock] = field(default_factory=list)
    fetched: Found = field(default_factory=dict)
    fetch_began_at: float | None = None
    num_at_fetch: int = -1
    is_announced: bool = False

    @property
    def has_all_blocks(self) -> bool:
        return len(self.done) == len(self.chain)


class Filling:
    """Invariant: a slot that is being filled is its sequence's, and has no rows yet; an emptied slot is not written to."""

    __slots__ = (
        "_arena",
        "_cache",
        "_checkpoints",
        "_clock",
        "_form",
        "_is_first",
        "_post",
        "_restoring",
        "_send",
        "_trails",
        "_where",
    )

    def __init__(
        self,
        where: tuple[str, int],
        form: BlockForm,
        arena: Arena,
        cache: BlockCache,
        checkpoints: Checkpoints,
        send: Callable[[Message], None],
        post: Callable[[RestoreReady], None],
        *,
        lower: LowerTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """See Reuse. checkpoints: learn what slots were filled with."""
        self._where = where
        self._form = form
        self._is_first = form.layers.start == 0
        self._arena = arena
        self._cache = cache
        self._checkpoints = checkpoints
        self._send = send
        self._post = post
        self._clock = clock
        self._restoring: dict[int, _Restoring] = {}
        self._trails = TrailFetches(form, arena, lower, self._post_found, clock=clock)

    def wanted(self, request: flow_pb2.Restore) -> tuple[int, int]:
        """How many blocks and how many tokens of a request are of use here: no more than the stages before have."""
        before = request.restored
        count = len(request.block_hashes) if self._is_first else before.num_blocks
        if not request.trail_id:
            return count, count * BLOCK_TOKENS
        return count, request.num_tokens if self._is_first else min(request.num_tokens, before.num_tokens)

    def begin(self, request: flow_pb2.Restore, held: int) -> None:
        """Begin to fill a slot, which holds so many tokens of the sequence already, and none of another."""
        count, limit = self.wanted(request)
        slot, hashes = request.slot, names_of(request.block_hashes[:count])
        restoring = _Restoring(request, self._form.chain(hashes), limit, held, held)
        self._restoring[slot] = restoring
        try:
            self._arena.check_fill(slot, max(limit, len(hashes) * BLOCK_TOKENS))
        except ShoalError:
            restoring.chain, restoring.limit = (), 0
            self._finish(restoring)
            return
        if request.trail_id:
            self._checkpoints.expect(slot, request.trail_id, len(request.block_hashes) * BLOCK_TOKENS)
        if held:
            self._arena.set_length(slot, held)
            whole = RestoredBlock(KVCodec.LOSSLESS, self._checkpoints.is_exact(slot), is_from_lower=False)
            restoring.done = [whole] * min(len(hashes), held // BLOCK_TOKENS)
        if held < limit and count == len(request.block_hashes) and limit > count * BLOCK_TOKENS:
            self._begin_trail(restoring)
        self._go_on(restoring)

    def resume(self, ready: RestoreReady) -> None:
        """Copy some more; a restore that does not go on any more is nobody's."""
        restoring = self._restoring.get(ready.slot)
        if restoring is not None and restoring.request.sequence_id != ready.sequence_id:
            restoring = None
        if ready.found is not None:
            is_awaited = self._trails.arrived(ready.slot, ready.sequence_id, ready.found)
            # Else it still waits for blocks, which come by themselves.
            if not (is_awaited and restoring is not None and restoring.has_all_blocks):
                return
        if restoring is not None:
            self._go_on(restoring)

    def _go_on(self, restoring: _Restoring) -> None:
        for _ in range(TURN_BLOCKS):
            if restoring.has_all_blocks:
                self._copy_trail(restoring)
                return
            if not self._fill_next(restoring):
                if not self._fetch(restoring):
                    self._finish(restoring)
                return
        self._post(RestoreReady(*self._where, restoring.request.slot, restoring.request.sequence_id))

    def give_up(self, slot: int, sequence_id: int) -> None:
        """End a restore that failed as if nothing had been found."""
        restoring = self._restoring.get(slot)
        if restoring is not None and restoring.request.sequence_id == sequence_id:
            restoring.num_tokens = 0
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
        self._hold(restoring, len(restoring.done) * BLOCK_TOKENS)
        return True

    def _copy_trail(self, restoring: _Restoring) -> None:
        """Go on behind all blocks, with what has come, or will, of the trail."""
        request = restoring.request
        slot = request.slot
        if self._trails.is_on_its_way(slot):
            return
        if not self._trails.has_come(slot):
            self._finish(restoring)
            return
        is_exact_only = request.is_exact_only
        self._hold(
            restoring,
            self._trails.copy(slot, restoring.num_tokens, restoring.limit, is_exact_only=is_exact_only),
        )
        self._post(RestoreReady(*self._where, slot, request.sequence_id))

    def _hold(self, restoring: _Restoring, num_tokens: int) -> None:
        restoring.num_tokens = num_tokens
        self._arena.set_length(restoring.request.slot, num_tokens)

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
        if restoring.fetch_began_at is None:
            restoring.fetch_began_at = self._clock()
        restoring.num_at_fetch = num_done

        def go_on(found: Found) -> None:
            restoring.fetched = found
            self._post(RestoreReady(*self._where, request.slot, request.sequence_id))

        if not self._cache.fetch(missing, left_s, go_on):
            return False
        self._announce(restoring)
        return True

    def _begin_trail(self, restoring: _Restoring) -> None:
        """Have the trail fetched while blocks are copied, or go on with what was begun when this stage heard of it."""
        request, slot = restoring.request, restoring.request.slot
        start = max(restoring.num_tokens, len(restoring.chain) * BLOCK_TOKENS)
        timeout_s = request.fetch_timeout_ms / 1e3
        if self._trails.begin(slot, request.sequence_id, request.trail_id, start, restoring.limit, timeout_s):
            self._announce(restoring)
        if self._trails.is_on_its_way(slot):
            restoring.fetch_began_at = self._clock()

    def _announce(self, restoring: _Restoring) -> None:
        """Tell the stages after, once, what they will be asked for."""
        if restoring.is_announced:
            return
        restoring.is_announced = True
        request = restoring.request
        self._send(
            flow_pb2.Prefetch(
                block_hashes=[chain.block_hash for chain in restoring.chain],
                timeout_ms=request.fetch_timeout_ms,
                sequence_id=request.sequence_id,
                slot=request.slot,
                trail_id=request.trail_id,
                num_tokens=restoring.limit,
            )
        )

    def _spent_ms(self, restoring: _Restoring) -> float:
        """Since the first fetch."""
        began_at = restoring.fetch_began_at
        return 0.0 if began_at is None else (self._clock() - began_at) * 1e3

    def _finish(self, restoring: _Restoring) -> None:
        request, slot = restoring.request, restoring.request.slot
        del self._restoring[slot]
        num_tokens = min(restoring.num_tokens, restoring.limit)
        is_exact = self._trails.is_exact(slot)
        self._trails.drop(slot)
        if self._checkpoints.trail_id(slot) and not restoring.num_retained:
            all_exact = is_exact and all(block.is_exact for block in restoring.done)
            self._checkpoints.restored(slot, num_tokens, is_exact=all_exact)
        before = None if self._is_first else request.restored
        self._send(
            flow_pb2.Restore(
                sequence_id=request.sequence_id,
                slot=slot,
                block_hashes=request.block_hashes,
                is_exact_only=request.is_exact_only,
                fetch_timeout_ms=max(0.0, request.fetch_timeout_ms - self._spent_ms(restoring)),
                restored=joined(before, restoring.done, num_tokens, is_exact=is_exact),
                trail_id=request.trail_id,
                num_tokens=request.num_tokens,
            )
        )

    def prefetch(self, request: flow_pb2.Prefetch) -> None:
        """Have fetched what a slot, or any slot, will be filled with."""
        timeout_s = request.timeout_ms / 1e3
        if request.trail_id and request.slot < self._arena.num_slots:
            start = len(request.block_hashes) * BLOCK_TOKENS
            self._trails.begin(
                request.slot, request.sequence_id, request.trail_id, start, request.num_tokens, timeout_s
            )
        blocks = self._form.chain(names_of(request.block_hashes))
        self._cache.prefetch(blocks, timeout_s, is_ahead=request.is_ahead)

    def drop(self, slot: int, sequence_id: int | None = None) -> None:
        """Fill a slot no more (or not for one sequence)."""
        restoring = self._restoring.get(slot)
        if restoring is not None and sequence_id in (None, restoring.request.sequence_id):
            del self._restoring[slot]
        self._trails.drop(slot, sequence_id)

    def rebase(self, where: tuple[str, int]) -> None:
        """Go on in another epoch: nothing of the one before is filled any more."""
        self._where = where
        self._restoring.clear()
        self._trails.clear()

    def check_invariants(self) -> None:
        self._trails.check_invariants()
        assert all(slot == one.request.slot for slot, one in self._restoring.items())

    def _post_found(self, slot: int, sequence_id: int, found: FoundTrail) -> None:
        self._post(RestoreReady(*self._where, slot, sequence_id, found))


def names_of(block_hashes: Iterable[bytes]) -> list[BlockHash]:
    return [BlockHash(block_hash) for block_hash in block_hashes]


def joined(
    before: flow_pb2.RestoredBlocks | None, done: Sequence[RestoredBlock], num_tokens: int, *, is_exact: bool = True
) -> flow_pb2.RestoredBlocks:
    """What all stages up to this one have in the slot; before: what those before it have, None at the first.

    num_tokens: here, blocks and what is behind them, which is_exact is about. A stage misses the end of a prefix rather than
    its begin, so what was fetched before is taken to be the last of it.
    """
    count = min(len(done), num_tokens // BLOCK_TOKENS)
    if num_tokens == 0:
        return flow_pb2.RestoredBlocks(is_exact=True)
    codecs, num_from_lower = [block.codec for block in done[:count]], 0
    if before is not None:
        codecs += [KVCodec(before.codec)] if before.codec and count else []
        num_from_lower = max(0, before.num_from_redis - (before.num_blocks - count))
        is_exact = is_exact and before.is_exact
    return flow_pb2.RestoredBlocks(
        num_blocks=count,
        num_from_redis=max(num_from_lower, sum(block.is_from_lower for block in done[:count])),
        codec=functools.reduce(coarser, codecs).value if codecs else "",
        is_exact=is_exact and all(block.is_exact for block in done),
        num_tokens=num_tokens,
    )
