"""What one stage checkpoints of running sequences: the KV behind their prompts' named blocks, as trails in a lower tier.

There is no queue of copies: each slot has a cursor, and whenever the tier has room, the next segment of the slot that is
behind most is copied. So a tier that is slow, or away for a while, costs nothing but how much of a trail is there. Knows
slots and trails, neither frames nor names of blocks. Part of a stage's `reuse`, owned by the compute thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from worker.kv.arena import Arena
from worker.kv.block import HEADER_BYTES, BlockForm
from worker.kv.fetches import LowerTier
from worker.kv.trail import MAX_SEGMENT_TOKENS, Segment, pack_segment, segment_bytes, segment_tokens

# Of a slot that ends and whose sequence goes on, at 0.1 ms each: others wait meanwhile.
MAX_LAST_SEGMENTS = 16


@dataclass(slots=True)
class _Trail:
    """base: the first token that is checkpointed. written: up to where the tier has it, or is about to."""

    trail_id: bytes
    base: int
    is_exact: bool
    written: int


class Checkpoints:
    """Invariant: a cursor stands between the base of its slot and what the slot held when it was last moved."""

    __slots__ = ("_arena", "_form", "_lost", "_lower", "_segment_bytes", "_segment_tokens", "_trails")

    def __init__(self, form: BlockForm, arena: Arena, lower: LowerTier | None) -> None:
        """lower: None if nothing is written; which sequence a slot is of is known nevertheless."""
        self._form = form
        self._arena = arena
        self._lower = lower
        self._segment_tokens = segment_tokens(form)
        whole = Segment(form.layers, 0, self._segment_tokens)
        self._segment_bytes = segment_bytes(form, whole) + HEADER_BYTES
        self._trails: dict[int, _Trail] = {}
        # What the tier's thread could not store: trails and first tokens.
        self._lost: deque[tuple[bytes, int]] = deque()

    def trail_id(self, slot: int) -> bytes:
        """Of the sequence whose KV is in a slot; empty if it has none."""
        trail = self._trails.get(slot)
        return b"" if trail is None else trail.trail_id

    def is_exact(self, slot: int) -> bool:
        return self._trails[slot].is_exact

    def expect(self, slot: int, trail_id: bytes, base: int) -> None:
        """A slot is about to be filled for a sequence that ran before, or holds what it computed then."""
        known = self._trails.get(slot)
        if known is None or known.trail_id != trail_id:
            self._trails[slot] = _Trail(trail_id, base, is_exact=True, written=base)

    def restored(self, slot: int, num_tokens: int, *, is_exact: bool) -> None:
        """A slot was filled from the tier, with so many tokens, or with blocks alone."""
        trail = self._trails[slot]
        trail.is_exact = is_exact
        trail.written = max(trail.base, num_tokens)

    def begin(self, slot: int, trail_id: bytes, base: int, position: int, *, is_exact: bool) -> None:
        """The first row of a run is about to write to a slot from a position on.

        Of a trail that was expected the tier may have something beyond it, of an earlier run, which is deleted: another kind
        of processor may have drawn another answer.
        """
        known = self._trails.get(slot)
        if known is None or known.trail_id != trail_id:
            self.leave(slot)
            if trail_id:
                self._trails[slot] = _Trail(trail_id, base, is_exact, base)
            return
        # Segments of any stage begin where one of the longest does, so that there is no gap before it.
        safe = max(base, position - position % MAX_SEGMENT_TOKENS)
        known.base, known.is_exact, known.written = base, is_exact, min(max(base, known.written), safe)
        if self._lower is not None:
            self._lower.cut_trail(trail_id, self._form.layers, position)

    def leave(self, slot: int) -> None:
        """What is in a slot is about to be lost, though its sequence may go on."""
        self._trails.pop(slot, None)

    def end(self, slot: int, *, will_resume: bool) -> None:
        """A run is over: complete its trail if its sequence goes on later, else delete it."""
        trail = self._trails.pop(slot, None)
        if trail is None or self._lower is None:
            return
        if will_resume:
            self._complete(slot, trail)
        else:
            self._lower.end_trail(trail.trail_id)

    def close(self) -> None:
        """The arena is about to be closed, and sequences may go on elsewhere."""
        for slot in list(self._trails):
            self.end(slot, will_resume=True)

    @property
    def has_work(self) -> bool:
        """Whether a segment may be copied now."""
        return self._next() is not None

    def work(self) -> bool:
        """Copy a segment; False if there is none, or no room for it."""
        found = self._next()
        if found is None:
            return False
        slot, trail = found
        self._write(slot, trail, trail.written + self._segment_tokens)
        return True

    def check_invariants(self) -> None:
        for slot, trail in self._trails.items():
            assert 0 <= slot < self._arena.num_slots
            assert trail.trail_id
            assert 0 <= trail.base <= trail.written

    def _next(self) -> tuple[int, _Trail] | None:
        """The slot that is behind most, by a segment at least."""
        if self._lower is None or not self._trails:
            return None
        while self._lost:
            self._go_back(*self._lost.popleft())
        slot, trail = max(self._trails.items(), key=self._lag)
        is_due = self._lag((slot, trail)) >= self._segment_tokens
        return (slot, trail) if is_due and self._lower.takes_segment(self._segment_bytes) else None

    def _lag(self, item: tuple[int, _Trail]) -> int:
        slot, trail = item
        return self._arena.length(slot) - trail.written

    def _go_back(self, trail_id: bytes, start: int) -> None:
        for trail in self._trails.values():
            if trail.trail_id == trail_id:
                trail.written = min(trail.written, max(trail.base, start))

    def _complete(self, slot: int, trail: _Trail) -> None:
        """Write the rest of a slot, its last segment as short as it is, as far as the tier takes it."""
        assert self._lower is not None
        for stop in self._rest(slot, trail):
            if not self._lower.takes_segment(self._segment_bytes, is_urgent=True):
                return
            self._write(slot, trail, stop)

    def _rest(self, slot: int, trail: _Trail) -> Iterator[int]:
        length = self._arena.length(slot)
        for _ in range(MAX_LAST_SEGMENTS):
            if trail.written >= length:
                return
            yield min(length, trail.written + self._segment_tokens)

    def _write(self, slot: int, trail: _Trail, stop: int) -> None:
        assert self._lower is not None
        segment = Segment(self._form.layers, trail.written, stop)
        values = self._arena.tokens(slot, segment.start, stop)
        packed = pack_segment(trail.trail_id, self._form, segment, values, is_exact=trail.is_exact)
        trail.written = stop
        on_lost = partial(self._lost.append, (trail.trail_id, segment.start))
        self._lower.write_segment(trail.trail_id, segment, packed, on_lost)
