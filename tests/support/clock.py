"""A clock that tests set: alarms ring when it is moved past them, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class FakeAlarm:
    def __init__(self, ring: Callable[[], None]) -> None:
        self.ring = ring
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeClock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._numbers = itertools.count()
        self._alarms: list[tuple[float, int, FakeAlarm]] = []
        self.num_rung = 0

    def now(self) -> float:
        return self._now

    def call_at(self, at: float, ring: Callable[[], None]) -> FakeAlarm:
        alarm = FakeAlarm(ring)
        heapq.heappush(self._alarms, (at, next(self._numbers), alarm))
        return alarm

    @property
    def next_alarm_at(self) -> float | None:
        """When the next alarm rings that was not cancelled."""
        return min((at for at, _, alarm in self._alarms if not alarm.is_cancelled), default=None)

    def move_to(self, now: float) -> None:
        """Let time pass until `now`, and ring what is due on the way."""
        while self._alarms and self._alarms[0][0] <= now:
            at, _, alarm = heapq.heappop(self._alarms)
            self._now = max(self._now, at)
            if not alarm.is_cancelled:
                self.num_rung += 1
                alarm.ring()
        self._now = now

    def jump_to(self, now: float) -> None:
        """Let time pass while nobody rings: what became due meanwhile rings late, at once."""
        self._now = now
        self.move_to(now)
