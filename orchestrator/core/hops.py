"""Tells links that have become much slower than they were, by the messages of decode steps that pass over them.

Clocks of two devices differ by a constant and drift slowly, so what counts is how much longer a hop takes than it took at
first. A pure value with time passed in: `pipeline` says what hops took, `measuring` feeds it and has plans made with what it
tells. How fast a link is when a device joins is measured by echoes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from orchestrator.core.figures import LinkEnds
from shoal.types import WorkerId

# Hops of which the median counts: a hiccup is no slow link.
NUM_HOPS = 16
# A link is late if a message takes so many times longer than is known of it on top of that, and so long at least: on a
# machine that is crowded, a thread may wait for tens of milliseconds for a core.
MUCH = 2.0
MIN_LATE_S = 0.05
# It is told of again once it is half as late again, or half as late; so often at most.
CHANGE = 0.5
TELL_EVERY_S = 5.0
# What hops take at first follows what they take as long as they are not late: half of the way in this time.
DRIFT_S = 60.0
# Nobody goes over a link that was late: it may be well again.
FORGET_S = 300.0


@dataclass(frozen=True, slots=True)
class Hop:
    """A decode step's message from one process to another; None is the orchestrator.

    seconds: by the clocks of both. num_rows: whose activations it carried; 0: it carried tokens.
    """

    source: WorkerId | None
    target: WorkerId | None
    seconds: float
    num_rows: int = 0

    @property
    def ends(self) -> LinkEnds:
        return self.source, self.target


@dataclass(slots=True)
class _Link:
    """usual_s: what hops took at first; None before NUM_HOPS of them."""

    known_s: float
    seen_at: float
    followed_at: float
    usual_s: float | None = None
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_HOPS))


class HopWatch:
    """What links take longer than is known of them.

    Invariants: `late_s` has links that were late when they were told of last, each with more than 0 s, and none that nothing
    went over for FORGET_S; it changes at most once in TELL_EVERY_S, but for devices that are forgotten.
    """

    def __init__(self) -> None:
        self.late_s: dict[LinkEnds, float] = {}
        self._links: dict[LinkEnds, _Link] = {}
        self._told_at = -math.inf

    def observe(self, ends: LinkEnds, seconds: float, known_s: float, now: float) -> None:
        """Take what a small message took over a link, and what it should take."""
        link = self._links.setdefault(ends, _Link(known_s, now, now))
        link.known_s, link.seen_at = known_s, now
        link.recent_s.append(seconds)

    def update(self, now: float) -> bool:
        """Let `late_s` follow what was seen; True if it changed."""
        if now < self._told_at + TELL_EVERY_S:
            return False
        before = dict(self.late_s)
        for ends, link in list(self._links.items()):
            if now >= link.seen_at + FORGET_S:
                self._forget(ends)
            elif len(link.recent_s) == NUM_HOPS:
                self._judge(ends, link, now)
        if self.late_s == before:
            return False
        self._told_at = now
        return True

    def by_s(self, ends: LinkEnds) -> float:
        """How late a link is, at least one way: whatever makes a radio slow does so both ways. 0 if it is not."""
        source, target = ends
        return max(self.late_s.get((source, target), 0.0), self.late_s.get((target, source), 0.0))

    def forget(self, worker_id: WorkerId) -> None:
        """Know nothing of the links of a device: it came or went, or they were measured anew."""
        for ends in [ends for ends in self._links if worker_id in ends]:
            self._forget(ends)

    def _forget(self, ends: LinkEnds) -> None:
        del self._links[ends]
        self.late_s.pop(ends, None)

    def _judge(self, ends: LinkEnds, link: _Link, now: float) -> None:
        took_s = statistics.median(link.recent_s)
        if link.usual_s is None:
            link.usual_s, link.followed_at = took_s, now
            return
        more_s, told_s, limit_s = (
            took_s - link.usual_s,
            self.late_s.get(ends, 0.0),
            max(MUCH * link.known_s, MIN_LATE_S),
        )
        if more_s > limit_s and abs(more_s - told_s) > CHANGE * told_s:
            self.late_s[ends] = more_s
        elif more_s < limit_s / 2:
            self.late_s.pop(ends, None)
        if ends not in self.late_s:
            link.usual_s += more_s * (1.0 - 0.5 ** ((now - link.followed_at) / DRIFT_S))
        link.followed_at = now

    def check_invariants(self) -> None:
        assert all(late_s > 0.0 for late_s in self.late_s.values()), self.late_s
        assert self.late_s.keys() <= self._links.keys(), self.late_s
