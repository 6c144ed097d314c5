"""Which of the sequences that have a deadline is to be ended next, and when.

It knows only who has one: whether a sequence is still there is asked of the scheduler's sequences, whose heap this is.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from orchestrator.core.sequence import Sequence
from shoal.types import SequenceId


class Deadlines:
    """The earliest first; those of sequences that are gone are dropped when they come to the top."""

    def __init__(self, living: Mapping[SequenceId, Sequence]) -> None:
        self._living = living
        self._heap: list[tuple[float, SequenceId]] = []

    def add(self, sequence: Sequence) -> None:
        """Mind the deadline of a sequence, if it has one."""
        if sequence.deadline_at is not None:
            heapq.heappush(self._heap, (sequence.deadline_at, sequence.sequence_id))

    def pop(self, now: float) -> Sequence | None:
        """The next of the living whose deadline has passed."""
        while self._heap and self._heap[0][0] <= now:
            sequence = self._living.get(heapq.heappop(self._heap)[1])
            if sequence is not None:
                return sequence
        return None

    def first(self) -> list[float]:
        """The earliest deadline of the living, if any of them has one."""
        while self._heap and self._heap[0][1] not in self._living:
            heapq.heappop(self._heap)
        return [at for at, _ in self._heap[:1]]
