"""Parts of trails on their way into slots: asked for, arrived, and copied a little at a time.

A stage begins when it hears that a slot is going to be filled, which is before it is its turn: all stages fetch at the same
time. Knows slots, sequences and trails; neither frames nor blocks. Part of a stage's `reuse`, owned by the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from worker.kv.arena import Arena
from worker.kv.block import BlockForm
from worker.kv.fetches import LowerTier
from worker.kv.trail import FoundTrail, TrailPart, fill, token_bytes

# At 0.1 ms each.
TURN_SEGMENTS = 32
# Asked for at a time, for it takes memory until it is in its slot.
MAX_PART_BYTES = 16 * 2**20

# Brings what was found of a slot's trail to the owner's thread: slot, sequence, and what it was.
Post = Callable[[int, int, FoundTrail], None]


@dataclass(slots=True)
class _Fetch:
    """stop: where what is wanted ends. asked: the part that is on its way. found: the one that is being copied.

    num_copied: segments of it. is_exact: all that was copied.
    """

    sequence_id: int
    trail_id: bytes
    stop: int
    deadline: float
    asked: TrailPart | None = None
    found: FoundTrail | None = None
    num_copied: int = 0
    is_exact: bool = True


class TrailFetches:
    """Invariants: one fetch a slot at most; of it one part at most is on its way, and none while one is being copied."""

    __slots__ = ("_arena", "_clock", "_fetches", "_form", "_lower", "_post")

    def __init__(
        self,
        form: BlockForm,
        arena: Arena,
        lower: LowerTier | None,
        post: Post,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """post: called from the tier's thread; brings what it is given to `arrived`."""
        self._form = form
        self._arena = arena
        self._lower = lower
        self._post = post
        self._clock = clock
        self._fetches: dict[int, _Fetch] = {}

    def begin(self, slot: int, sequence_id: int, trail_id: bytes, start: int, stop: int, timeout_s: float) -> bool:
        """Fetch the tokens [start, stop) for a slot; False if that is done already, or there is nothing to fetch from."""
        fetch = self._fetches.get(slot)
        if fetch is not None and fetch.sequence_id == sequence_id:
            return False
        self._fetches.pop(slot, None)
        if self._lower is None or timeout_s <= 0.0 or start >= stop:
            return False
        fetch = _Fetch(sequence_id, trail_id, stop, self._clock() + timeout_s)
        self._fetches[slot] = fetch
        self._ask(slot, fetch, start)
        return True

    def arrived(self, slot: int, sequence_id: int, found: FoundTrail) -> bool:
        """Take what came of a fetch; False if nobody waits for it any more."""
        fetch = self._fetches.get(slot)
        if fetch is None or fetch.sequence_id != sequence_id or fetch.asked != found.part:
            return False
        fetch.asked, fetch.found, fetch.num_copied = None, found, 0
        return True

    def is_on_its_way(self, slot: int) -> bool:
        fetch = self._fetches.get(slot)
        return fetch is not None and fetch.asked is not None

    def has_come(self, slot: int) -> bool:
        """Whether there is something to be copied."""
        fetch = self._fetches.get(slot)
        return fetch is not None and fetch.found is not None

    def copy(self, slot: int, held: int, stop: int, *, is_exact_only: bool) -> int:
        """Copy some of what has come into a slot that holds so many tokens; how many it holds then, at most `stop`."""
        fetch = self._fetches[slot]
        found = fetch.found
        assert found is not None
        if held < found.part.start or found.stop <= held or (is_exact_only and not found.is_exact):
            fetch.found = None
            return held
        batch = found.segments[fetch.num_copied : fetch.num_copied + TURN_SEGMENTS]
        for segment in batch:
            fill(self._arena, slot, found.part, segment)
        fetch.num_copied += len(batch)
        if fetch.num_copied < len(found.segments):
            return max(held, min(stop, found.segments[fetch.num_copied].segment.start))
        fetch.found = None
        fetch.is_exact = fetch.is_exact and found.is_exact
        if found.stop == found.part.stop < min(stop, fetch.stop) and self._clock() < fetch.deadline:
            self._ask(slot, fetch, found.stop)
        return min(stop, found.stop)

    def is_exact(self, slot: int) -> bool:
        """Whether all that was copied into a slot is."""
        fetch = self._fetches.get(slot)
        return fetch is None or fetch.is_exact

    def drop(self, slot: int, sequence_id: int | None = None) -> None:
        """Want nothing more for a slot (or for one sequence in it)."""
        fetch = self._fetches.get(slot)
        if fetch is not None and sequence_id in (None, fetch.sequence_id):
            del self._fetches[slot]

    def clear(self) -> None:
        self._fetches.clear()

    def check_invariants(self) -> None:
        assert all(fetch.asked is None or fetch.found is None for fetch in self._fetches.values())

    def _ask(self, slot: int, fetch: _Fetch, start: int) -> None:
        assert self._lower is not None
        most = max(1, MAX_PART_BYTES // token_bytes(self._form))
        part = TrailPart(fetch.trail_id, self._form, start, min(fetch.stop, start + most))
        fetch.asked = part
        sequence_id = fetch.sequence_id
        timeout_s = fetch.deadline - self._clock()
        self._lower.fetch_trail(part, timeout_s, lambda found: self._post(slot, sequence_id, found))
