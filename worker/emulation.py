"""Makes a fast machine look like the device of a profile: how much to wait, when a message arrives, what fits.

Timing is pure arithmetic: `now` comes in, a duration or a due time goes out; whoever calls it does the waiting. Knows
no sockets, threads or sessions. The worker's compute thread asks SlowDown, each outgoing link asks its LinkShaper, and
a shard is checked against the memory budget before any of it is downloaded.
"""

from __future__ import annotations

from shoal.errors import ConfigError, ShardDoesNotFit
from shoal.types import DeviceProfile, LinkProfile


class SlowDown:
    """Stretches compute time so that a device seems `speed` times as fast as the machine it runs on."""

    __slots__ = ("_extra_per_second",)

    def __init__(self, speed: float) -> None:
        """Raise ConfigError unless speed is in (0, 1]: waiting makes nothing faster."""
        if not 0.0 < speed <= 1.0:
            raise ConfigError(
                f"speed = {speed} cannot be emulated: it must be above 0 and at most 1, the speed of this machine",
                field="speed",
            )
        self._extra_per_second = 1.0 / speed - 1.0

    def extra_seconds(self, compute_s: float) -> float:
        """Return how long to wait after a computation that took compute_s."""
        return compute_s * self._extra_per_second


class LinkShaper:
    """Delays the messages of one direction of a link as its rate and its delay would.

    Invariants: the link carries one message at a time, in the order asked for; due times never go down.
    """

    __slots__ = ("_bytes_per_second", "_delay_s", "_free_at")

    def __init__(self, link: LinkProfile) -> None:
        """Raise ConfigError if delay or rate is negative; 0 means not limited."""
        if not (link.delay_ms >= 0.0 and link.rate_mbit_s >= 0.0):
            raise ConfigError(
                f"a link of {link.delay_ms} ms and {link.rate_mbit_s} Mbit/s: both must be 0 (not limited) or more",
                field="link",
            )
        self._delay_s = link.delay_ms / 1e3
        self._bytes_per_second = link.rate_mbit_s * 1e6 / 8
        self._free_at = float("-inf")

    def due(self, num_bytes: int, now: float) -> float:
        """Return when a message handed over at `now` arrives; the link is taken until it is sent."""
        sending_s = num_bytes / self._bytes_per_second if self._bytes_per_second else 0.0
        self._free_at = max(now, self._free_at) + sending_s
        return self._free_at + self._delay_s


def check_fits(profile: DeviceProfile, need: int, what: str) -> None:
    """Raise ShardDoesNotFit, with the bytes it lacks, if `what` needs more than the device may use."""
    lacking = need - profile.memory_bytes
    if lacking <= 0:
        return
    raise ShardDoesNotFit(
        f"{what} does not fit on {profile.name} ({profile.kind}): it needs {need} bytes, the device may use "
        f"{profile.memory_bytes}, so it lacks {lacking}; give it fewer layers, shorter contexts or a larger memory_mib",
        field="memory_mib",
    )
