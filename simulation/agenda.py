"""What is due when in a simulated run: a heap of times and actions, and the time that it is.

Knows nothing of what happens. Of one time, what was put in first comes first, so that a run depends on its seed alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """Invariant: time never goes back."""

    __slots__ = ("_due", "_number", "now", "num_events")

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._number = 0
        self._due: list[tuple[float, int, Action]] = []

    def at(self, at: float, action: Action) -> None:
        """Do something at a time; at once, after all that is due now, if that is past."""
        self._number += 1
        heapq.heappush(self._due, (max(at, self.now), self._number, action))

    def next_at(self) -> float | None:
        """When something is due; None: never."""
        return self._due[0][0] if self._due else None

    def run(self, until: float) -> None:
        """Do all that is due up to a time, this included."""
        due = self._due
        while due and due[0][0] <= until:
            self.now, _, action = heapq.heappop(due)
            self.num_events += 1
            action()
        self.now = max(self.now, until)
