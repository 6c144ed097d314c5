"""How long to wait before what has ended is started again: longer each time it ends soon, from the start after a good while.

Pure: given the time, it says another one. Used by whoever keeps a process or an actor running.
"""

from __future__ import annotations

FIRST_S = 0.5
LONGEST_S = 30.0
# What ran for so long was well: its end is the first one again.
STEADY_S = 20.0


class Backoff:
    """The ends of one thing. Invariant: the next wait is from FIRST_S to LONGEST_S."""

    __slots__ = ("_began_at", "_wait_s")

    def __init__(self) -> None:
        self._began_at = 0.0
        self._wait_s = FIRST_S

    def began(self, now: float) -> None:
        """It was started."""
        self._began_at = now

    def ended(self, now: float) -> float:
        """It has ended; return when to start it again."""
        wait_s = FIRST_S if now - self._began_at > STEADY_S else self._wait_s
        self._wait_s = min(2 * wait_s, LONGEST_S)
        return now + wait_s

    def check_invariants(self) -> None:
        assert FIRST_S <= self._wait_s <= LONGEST_S
