"""What one stage does about kept KV: what fills slots before their first row, and what is kept of what they compute.

A slot that was a sequence's in an earlier epoch of the pipeline may still hold its KV: it is retained until it is asked for
or needed. Else `filling` gets what is kept elsewhere. Prompts leave blocks in `cache`, running sequences their trails by
`checkpoints`. Knows frames and names of blocks. Part of a `stage`, owned by the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.v1 import flow_pb2
from worker.checkpoints import Checkpoints
from worker.filling import Filling, Message, RestoreReady, names_of
from worker.kv.arena import Arena
from worker.kv.block import BlockForm
from worker.kv.cache import BlockCache
from worker.kv.fetches import LowerTier


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a prompt's full blocks, and whether what its rows compute is exact."""

    block_hashes: list[BlockHash]
    is_exact: bool


class Reuse:
    """Invariant: a retained slot is of a sequence of an earlier epoch that has a trail: it has no names, and no rows yet."""

    __slots__ = ("_arena", "_cache", "_checkpoints", "_filling", "_form", "_names", "_retained", "_send")

    def __init__(
        self,
        where: tuple[str, int],
        form: BlockForm,
        arena: Arena,
        cache: BlockCache,
        send: Callable[[Message], None],
        post: Callable[[RestoreReady], None],
        *,
        lower: LowerTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """where: pipeline and epoch. send: to whoever comes after. post: brings what it is given back to `resume`, later.

        lower: where sequences are checkpointed, if they are.
        """
        self._form = form
        self._arena = arena
        self._cache = cache
        self._send = send
        self._names: dict[int, _Names] = {}
        # Slots, and the sequences that had them.
        self._retained: dict[int, int] = {}
        self._checkpoints = Checkpoints(form, arena, lower)
        self._filling = Filling(where, form, arena, cache, self._checkpoints, send, post, lower=lower, clock=clock)

    # Filling slots

    def restore(self, request: flow_pb2.Restore) -> None:
        """Begin to fill a slot."""
        count, limit = self._filling.wanted(request)
        held = self._take_retained(request, limit)
        if request.slot < self._arena.num_slots:
            self._make_room({request.slot: max(limit, count * BLOCK_TOKENS)})
        self._filling.begin(request, held)

    def resume(self, ready: RestoreReady) -> None:
        """Go on with a restore."""
        self._filling.resume(ready)

    def give_up(self, slot: int, sequence_id: int) -> None:
        """End a restore that failed as if nothing had been found."""
        self._filling.give_up(slot, sequence_id)

    def prefetch(self, request: flow_pb2.Prefetch) -> None:
        self._send(request)
        if not (request.trail_id and self._retains(request.slot, request.trail_id)):
            self._filling.prefetch(request)

    def keep(self, request: flow_pb2.KeepBlocks) -> None:
        self._send(request)
        self._cache.keep(names_of(request.block_hashes), request.ttl_s)

    def forget(self, request: flow_pb2.ForgetBlocks) -> None:
        self._send(request)
        self._cache.forget(names_of(request.block_hashes))

    # Keeping what slots hold

    def start(self, slot: int, start: flow_pb2.SequenceStart, position: int) -> None:
        """A sequence has its first row, from a position on, with the names of its prompt's blocks."""
        self._filling.drop(slot)
        if slot in self._retained:
            self._lose_retained(slot)
        self._names[slot] = _Names(names_of(start.block_hashes), start.is_kv_exact)
        if slot < self._arena.num_slots:
            base = len(start.block_hashes) * BLOCK_TOKENS
            self._checkpoints.begin(slot, start.trail_id, base, position, is_exact=start.is_kv_exact)

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

    @property
    def has_segment(self) -> bool:
        """Whether a segment of a running sequence is to be checkpointed, and can be."""
        return self._checkpoints.has_work

    def checkpoint(self, most: int) -> None:
        """Checkpoint so many segments at most."""
        for _ in range(most):
            if not self._checkpoints.work():
                return

    def release(self, slot: int, *, will_resume: bool = False) -> None:
        """A slot is about to be emptied. will_resume: its sequence goes on later, and needs what is checkpointed of it."""
        self._filling.drop(slot)
        self._names.pop(slot, None)
        self._retained.pop(slot, None)
        self._checkpoints.end(slot, will_resume=will_resume)
        self._cache.release(self._arena, slot)

    def close(self) -> None:
        """The arena is about to be closed."""
        self._filling.rebase(("", 0))
        self._names.clear()
        self._retained.clear()
        self._checkpoints.close()
        self._cache.release(self._arena)

    # Retained slots

    def retain(self, slot: int, sequence_id: int) -> bool:
        """The epoch of a slot is over: keep what it holds, for a run that goes on with it; False if none can."""
        self._filling.drop(slot)
        self._names.pop(slot, None)
        if not self._checkpoints.trail_id(slot) or self._arena.length(slot) == 0:
            return False
        self._retained[slot] = sequence_id
        return True

    def rebase(self, where: tuple[str, int]) -> None:
        """Go on in another epoch; of the one before there are retained slots and nothing else."""
        self._filling.rebase(where)

    def is_retained(self, slot: int, sequence_id: int) -> bool:
        return self._retained.get(slot) == sequence_id

    def make_room(self, rows: Iterable[flow_pb2.StepRow]) -> None:
        """Lose retained slots if rows need what they take: nobody reserves KV memory for what may come back."""
        if self._retained:
            self._make_room(
                {row.slot: row.position + row.num_tokens for row in rows if row.slot < self._arena.num_slots}
            )

    def _make_room(self, lengths: Mapping[int, int]) -> None:
        while not self._arena.has_room(lengths):
            others = [slot for slot in self._retained if slot not in lengths]
            if not others:
                return
            self._lose_retained(max(others, key=self._arena.length))

    def expect_no_more(self, slot: int, sequence_id: int) -> None:
        """A sequence ends of which this stage has heard only that its slot would be filled."""
        self._filling.drop(slot, sequence_id)

    def check_invariants(self) -> None:
        self._checkpoints.check_invariants()
        self._filling.check_invariants()
        for slot in self._retained:
            assert self._checkpoints.trail_id(slot), f"slot {slot} is retained for nobody"
            assert slot not in self._names

    def _retains(self, slot: int, trail_id: bytes) -> bool:
        return slot in self._retained and self._checkpoints.trail_id(slot) == trail_id

    def _take_retained(self, request: flow_pb2.Restore, limit: int) -> int:
        """Give a retained slot to whom it is asked for; how many tokens of use it holds, 0 if it was another's."""
        slot = request.slot
        if slot not in self._retained:
            return 0
        is_exact_enough = self._checkpoints.is_exact(slot) or not request.is_exact_only
        if not (request.trail_id and self._retains(slot, request.trail_id) and is_exact_enough):
            self._lose_retained(slot)
            return 0
        del self._retained[slot]
        return min(self._arena.length(slot), limit)

    def _lose_retained(self, slot: int) -> None:
        del self._retained[slot]
        self._checkpoints.leave(slot)
        self._cache.release(self._arena, slot)
        self._arena.release(slot)
