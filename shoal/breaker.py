"""Decides whether a system that may be away is asked, and when it is tried again.

Pure: whoever asks says what came of it and what time it is. One party tries an open breaker, at its own pace, and nobody
else waits for that. `redis_link` carries it out.
"""

from __future__ import annotations

from enum import StrEnum

# In a row: one late answer is no sign of anything on a busy machine.
MAX_TIMEOUTS = 3
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


class LinkState(StrEnum):
    """OFF: not asked any more. CONNECTING: was never reached yet. OK: asked. OPEN: away, and tried from time to time."""

    OFF = "off"
    CONNECTING = "connecting"
    OK = "ok"
    OPEN = "open"

    @property
    def is_usable(self) -> bool:
        """Whether asking may bring an answer."""
        return self in (LinkState.CONNECTING, LinkState.OK)


TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.CONNECTING: frozenset({LinkState.OK, LinkState.OPEN, LinkState.OFF}),
    LinkState.OK: frozenset({LinkState.OPEN, LinkState.OFF}),
    LinkState.OPEN: frozenset({LinkState.OK, LinkState.OFF}),
    LinkState.OFF: frozenset(),
}


class Breaker:
    """The state of one link. Every method that may change it says whether it did, which is what a log line is for.

    Invariants:
    - fewer than MAX_TIMEOUTS timeouts in a row are counted, and none unless the state is OK;
    - the wait before the next trial is 0 until something failed, and at most LONGEST_WAIT_S.
    """

    __slots__ = ("_next_trial_at", "_num_timeouts", "_state", "_wait_s")

    def __init__(self) -> None:
        self._state = LinkState.CONNECTING
        self._num_timeouts = 0
        self._wait_s = 0.0
        self._next_trial_at = float("-inf")

    @property
    def state(self) -> LinkState:
        return self._state

    def succeed(self) -> bool:
        """An answer came, or a trial connected."""
        self._num_timeouts = 0
        if self._state is LinkState.OFF:
            return False
        self._wait_s = 0.0
        return self._become(LinkState.OK)

    def time_out(self, now: float) -> bool:
        """No answer came in time to what was asked while the state was OK; a late one of another state does not count."""
        if self._state is not LinkState.OK:
            return False
        self._num_timeouts += 1
        return self._num_timeouts >= MAX_TIMEOUTS and self.fail(now)

    def fail(self, now: float) -> bool:
        """The connection broke, or a trial failed: wait twice as long as before the last trial."""
        if self._state is LinkState.OFF:
            return False
        self._num_timeouts = 0
        self._wait_s = min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * self._wait_s))
        self._next_trial_at = now + self._wait_s
        return self._become(LinkState.OPEN)

    def turn_off(self) -> bool:
        """Asking again would not help."""
        self._num_timeouts = 0
        return self._become(LinkState.OFF)

    def wait_s(self, now: float) -> float:
        """How long to wait before the next trial."""
        return max(0.0, self._next_trial_at - now) if self._state is LinkState.OPEN else 0.0

    def check_invariants(self) -> None:
        assert 0 <= self._num_timeouts < MAX_TIMEOUTS
        assert self._num_timeouts == 0 or self._state is LinkState.OK
        assert self._wait_s == 0.0 or FIRST_WAIT_S <= self._wait_s <= LONGEST_WAIT_S

    def _become(self, state: LinkState) -> bool:
        if state is self._state:
            return False
        assert state in TRANSITIONS[self._state], f"a link that is {self._state} cannot become {state}"
        self._state = state
        return True
