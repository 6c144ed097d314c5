"""What a link to stored blocks gives, learned from its transfers: how long so many bytes will take.

Pure arithmetic. The Redis tier keeps one for each direction, and asks before it fetches.
"""

from __future__ import annotations

# Weight of the latest transfer: a change shows within a few, one that another program hindered does not decide.
WEIGHT = 0.3
# Shorter transfers tell of the round trip, longer ones of the bandwidth.
SMALL_BYTES = 16 * 1024
# Shorter than this no transfer was: two times may be equal where clocks are coarse.
LEAST_S = 1e-6


class TransferRate:
    """Latency and bandwidth as moving averages of what was measured; None before anything was.

    Invariant: what is known of either is more than 0.
    """

    __slots__ = ("bytes_per_s", "latency_s")

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.bytes_per_s: float | None = None

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes, the request included, took so long."""
        if num_bytes <= SMALL_BYTES:
            self.latency_s = _mixed(self.latency_s, max(LEAST_S, seconds))
        else:
            # Half of it at least is the bytes' own: a round trip may have been hindered when it was measured.
            sending_s = max(seconds - (self.latency_s or 0.0), seconds / 2, LEAST_S)
            self.bytes_per_s = _mixed(self.bytes_per_s, num_bytes / sending_s)

    def observe_late(self, num_bytes: int, seconds: float) -> None:
        """A transfer was given up after so long: it would have taken more, so what is expected is twice that."""
        if num_bytes > SMALL_BYTES:
            self.bytes_per_s = min(self.bytes_per_s or float("inf"), num_bytes / max(LEAST_S, 2 * seconds))

    def seconds(self, num_bytes: int) -> float | None:
        """How long a transfer of so many bytes is going to take; None if that is not known."""
        if self.bytes_per_s is None:
            return None
        return (self.latency_s or 0.0) + num_bytes / self.bytes_per_s

    def bytes_within(self, seconds: float) -> int | None:
        """How many bytes one transfer can bring in that time."""
        if self.bytes_per_s is None:
            return None
        return max(0, int((seconds - (self.latency_s or 0.0)) * self.bytes_per_s))

    def check_invariants(self) -> None:
        assert self.latency_s is None or self.latency_s > 0.0
        assert self.bytes_per_s is None or self.bytes_per_s > 0.0


def _mixed(known: float | None, latest: float) -> float:
    return latest if known is None else known + WEIGHT * (latest - known)
