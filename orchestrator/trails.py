"""Deletes the trails of sequences that end without a slot: no stage has them any more, so no stage deletes what they left.

What a stage checkpoints of a sequence that runs it deletes itself, when it is told of the end. Written behind: nobody waits,
and what Redis does not hear of is gone with its time to live. Called by `served`, which knows when an answer ends.
"""

from __future__ import annotations

import asyncio

from shoal.redis_link import AsyncRedisLink, trail_key

# Nobody waits for these.
TIMEOUT_S = 0.5
MAX_AT_ONCE = 64
# As many as may be parked; more are left to their time to live.
MAX_ENDED = 4096


class Trails:
    """Invariant: whenever trails are still to be deleted, a task is at it."""

    def __init__(self, link: AsyncRedisLink | None) -> None:
        """link: None if there is no Redis, hence no trails."""
        self._link = link
        self._ended: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def end(self, trail_id: bytes) -> None:
        """Delete the trail of a sequence that has ended; nothing if it has none."""
        if self._link is None or not trail_id or len(self._ended) >= MAX_ENDED:
            return
        self._ended.append(trail_id)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._delete(self._link))

    async def _delete(self, link: AsyncRedisLink) -> None:
        while self._ended:
            keys, self._ended = [trail_key(one) for one in self._ended[:MAX_AT_ONCE]], self._ended[MAX_AT_ONCE:]
            await link.call(("UNLINK", *keys), timeout_s=TIMEOUT_S)

    async def stop(self) -> None:
        """Wait for what is still to be deleted."""
        if self._task is not None:
            await self._task
