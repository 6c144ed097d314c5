"""Transfers to and from Redis, measured: how long each may take, and how much arrives before it is too late.

Knows the link, its rates and what an emulated device's link adds; neither keys nor values. What stores blocks and what
stores trails share one, on the event loop of its link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from shoal.redis_connection import Command, RedisRefusal
from shoal.redis_link import AsyncRedisLink
from shoal.types import LinkProfile
from worker.emulation import LinkShaper
from worker.kv.transfer_rate import TransferRate

# For one value, of which nobody waits.
WRITE_TIMEOUT_S = 2.0
LONGEST_WRITE_S = 30.0
# A Redis that is full, or may not write for another reason, is not sent what it will refuse, for so long.
REFUSED_PAUSE_S = 5.0
# One command brings what takes so long: little is lost when it comes too late, and a round trip is short beside it.
CHUNK_S = 0.05
MAX_CHUNK_BYTES = 8 * 2**20
# What a call may take beyond what was expected of it before Redis is taken to hang.
PATIENCE_S = 0.05
PATIENCE_RATIO = 4.0
UNKNOWN_TIMEOUT_S = 0.25


class RedisTransfers:
    """Owned by the event loop of its link; rates may be read by any thread."""

    def __init__(self, link: AsyncRedisLink, profile: LinkProfile, clock: Callable[[], float] = time.monotonic) -> None:
        """profile: what an emulated device's link is slowed down to."""
        self._link = link
        self._clock = clock
        self._up, self._down = LinkShaper(profile), LinkShaper(profile)
        self.reading, self.writing = TransferRate(), TransferRate()
        self._refused_until = float("-inf")
        self._turn = asyncio.Lock()

    @property
    def is_usable(self) -> bool:
        """Whether asking may bring an answer."""
        return self._link.state.is_usable

    @property
    def is_refused(self) -> bool:
        """Whether a write was refused lately: who wrote the same again at once would do nothing else."""
        return self._clock() < self._refused_until

    @asynccontextmanager
    async def reading_turn(self, deadline: float) -> AsyncIterator[bool]:
        """Held by who reads values, from the first to the last that belong together; False if it did not come by then.

        All that are wanted at once, as when answers go on elsewhere, would else share the link: each would come late, and
        tell of a link that is slow.
        """
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._turn.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._turn.release()

    def arrives(self, num_bytes: int, deadline: float) -> bool:
        """Whether so many bytes will be read by then, as far as is known."""
        now = self._clock()
        return now < deadline and now + (self._rate().seconds(num_bytes) or 0.0) <= deadline

    def patience(self, num_bytes: int | None, deadline: float) -> float:
        """How long to wait for a reply: not to the deadline if Redis seems to hang. num_bytes: None for a short one."""
        expected_s = self.reading.latency_s if num_bytes is None else self._rate().seconds(num_bytes)
        timeout_s = UNKNOWN_TIMEOUT_S if expected_s is None else PATIENCE_S + PATIENCE_RATIO * expected_s
        return max(0.0, min(timeout_s, deadline - self._clock()))

    def chunk_bytes(self, deadline: float) -> int:
        """What one command should bring at most; 0 before anything is known of the link."""
        within_s = min(CHUNK_S, deadline - self._clock())
        return min(MAX_CHUNK_BYTES, self._rate().bytes_within(within_s) or 0)

    async def write(self, commands: Sequence[Command], num_bytes: int) -> bool:
        """Write, and learn from how long it took; False if Redis did not take all of it. num_bytes: of the values."""
        began_at = self._clock()
        expected_s = self.writing.seconds(num_bytes) or 0.0
        timeout_s = min(LONGEST_WRITE_S, WRITE_TIMEOUT_S + PATIENCE_RATIO * expected_s)
        replies = await self.transfer(commands, num_bytes, timeout_s)
        now = self._clock()
        if replies is None:
            if _is_late(now - began_at, timeout_s):
                self.writing.observe_late(num_bytes, now - began_at)
            return False
        if any(isinstance(reply, RedisRefusal) for reply in replies):
            self._refused_until = now + REFUSED_PAUSE_S
            return False
        if num_bytes:
            self.writing.observe(num_bytes, now - began_at)
        return True

    async def read(self, commands: Sequence[Command], timeout_s: float, num_bytes: int = 0) -> list[Any] | None:
        """Read, and learn from how long it took. num_bytes: expected, if that is more than a round trip."""
        began_at = self._clock()
        replies = await self.transfer(commands, 0, timeout_s)
        took_s = self._clock() - began_at
        if replies is not None:
            self.reading.observe(sum(map(_size, replies)), took_s)
        elif _is_late(took_s, timeout_s):
            self.reading.observe_late(num_bytes, took_s)
        return replies

    async def transfer(self, commands: Sequence[Command], num_bytes: int, timeout_s: float) -> list[Any] | None:
        """Call Redis over a link as slow as the profile's; None also if that takes longer than timeout_s.

        num_bytes: of the values sent.
        """
        began_at = self._clock()
        # Redis first, the emulated link afterwards: what that holds up, Redis would else be blamed for.
        replies = await self._link.call(*commands, timeout_s=timeout_s)
        if replies is None:
            return None
        asked_at = max(self._up.due(num_bytes, began_at), self._clock())
        arrives_at = self._down.due(sum(map(_size, replies)), asked_at)
        wait_s = min(arrives_at, began_at + timeout_s) - self._clock()
        if wait_s > 0.0:
            await asyncio.sleep(wait_s)
        return replies if arrives_at <= began_at + timeout_s else None

    def _rate(self) -> TransferRate:
        """What is known of reading; before anything was read, that it may be as fast as writing."""
        return self.reading if self.reading.bytes_per_s is not None else self.writing


def _is_late(took_s: float, timeout_s: float) -> bool:
    """Whether time was up, as far as timers are exact; else the connection was lost, or there was none."""
    return took_s >= 0.9 * timeout_s > 0.0


def _size(reply: Any) -> int:
    match reply:
        case bytes():
            return len(reply)
        case list():
            return sum(map(_size, reply))
        case _:
            return 0
