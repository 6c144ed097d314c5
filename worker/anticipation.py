"""When the next step of a burst is expected, and whether to wait for it awake.

A core that slept some milliseconds computes its next step 10-15 % slower here (measured: caches and clock, besides the
wake-up itself). A device that can afford it sleeps through the first part of an expected wait and polls through the rest.
Pure arithmetic in seconds; the compute thread feeds it and the inbox does the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the expected wait, slept before polling begins: enough to be early even if the step comes sooner than usual.
SLEEP_SHARE = 0.4
# Polling goes on until the step is this much later than expected, then the thread sleeps.
LATE_FACTOR = 1.5
# Weight of the newest wait in the expectation.
NEWEST_WEIGHT = 0.3
# A wait this short is over before polling could gain anything.
MIN_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep for sleep_s, then poll for poll_s, then sleep until something comes."""

    sleep_s: float
    poll_s: float


class Anticipation:
    """Learns how long steps of bursts take to come round.

    max_poll_s: the most to poll for one step; 0 never polls.
    """

    __slots__ = ("_expected_s", "_max_poll_s")

    def __init__(self, max_poll_s: float) -> None:
        self._max_poll_s = max_poll_s
        self._expected_s: float | None = None

    def observe(self, waited_s: float) -> None:
        """Take the time that a step of a burst was waited for."""
        if self._expected_s is None:
            self._expected_s = waited_s
        else:
            self._expected_s += NEWEST_WEIGHT * (waited_s - self._expected_s)

    def plan(self) -> Wait | None:
        """How to wait for the next step; None: asleep."""
        if self._expected_s is None or self._expected_s < MIN_WAIT_S or self._max_poll_s <= 0:
            return None
        sleep_s = SLEEP_SHARE * self._expected_s
        return Wait(sleep_s, min(self._max_poll_s, LATE_FACTOR * self._expected_s - sleep_s))
