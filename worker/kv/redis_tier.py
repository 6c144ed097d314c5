"""The Redis tier of a worker's KV, blocks and trails: written behind, fetched when that is sooner than computing.

Gives `redis_store` and `redis_trails` a thread, queues that are bounded in bytes, and an end. Never makes its callers wait,
and never fails them: what cannot be written is dropped and counted, what cannot be had in time is not found. The worker
starts and stops it; its compute thread writes and fetches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from shoal.breaker import LinkState
from shoal.kv import BlockKey
from shoal.redis_link import AsyncRedisLink
from shoal.types import KVTierStatus, LayerRange, LinkProfile
from worker.kv.block import StageBlock
from worker.kv.redis_store import RedisStore
from worker.kv.redis_trails import RedisTrails
from worker.kv.redis_transfers import RedisTransfers
from worker.kv.trail import FoundTrail, PackedSegment, Segment, TrailPart

logger = logging.getLogger(__name__)

# Blocks that wait to be written: what a prompt of some thousand tokens leaves behind, and little memory for a phone.
MAX_QUEUED_BYTES = 32 * 2**20
# Segments of trails that wait to be written: a dozen or more of any stage. They are copies, so that they need memory.
MAX_TRAIL_BYTES = 4 * 2**20
# Of what the link was measured to write; the rest is for blocks, and for what an answer waits for.
TRAIL_SHARE = 0.25
# Written by one call, which takes half a millisecond for one segment or four.
MAX_BATCH_BYTES = 768 * 1024
# Of the time there is for stopping, the part in which blocks that wait may still be written.
FLUSH_SHARE = 0.8

OnFetched = Callable[[dict[BlockKey, bytes]], None]
# Segments that are written together where there is nothing between them, and what else is done to trails.
TrailWork = PackedSegment | Callable[[], Coroutine[None, None, None]]


class RedisTier:
    """See LowerTier in `fetches`. One thread from start() to stop(); all but status is for one other thread.

    Invariants: each number has one thread that changes it: those of what was taken or refused, and `_trails_free_at`, the
    caller's, the others ours; bytes taken less bytes done are those in the queue, of blocks at most max_queued_bytes, of
    trails MAX_TRAIL_BYTES; what is done to a trail is done in the order in which it was asked for.
    """

    def __init__(
        self,
        url: str,
        link: LinkProfile | None = None,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """url: empty is off; raises ConfigError as AsyncRedisLink does. link: that of an emulated device."""
        self._clock = clock
        self._max_queued_bytes = max_queued_bytes
        self._link = AsyncRedisLink(url, clock)
        self._transfers = RedisTransfers(self._link, link or LinkProfile(), clock)
        self._store = RedisStore(self._transfers, clock)
        self._trails = RedisTrails(self._transfers, self._store.counters.mismatches)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-redis", daemon=True)
        self._writes: asyncio.Queue[tuple[StageBlock, bytes]] = asyncio.Queue()
        self._trail_work: asyncio.Queue[TrailWork] = asyncio.Queue()
        self._fetches: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._flush_s = 0.0
        self._is_stopped = False
        self._num_taken_bytes = 0
        self._num_done_bytes = 0
        self._num_refused = 0
        self._num_dropped = 0
        self._num_trail_bytes_taken = 0
        self._num_trail_bytes_done = 0
        self._trails_free_at = float("-inf")

    @property
    def queued_bytes(self) -> int:
        return self._num_taken_bytes - self._num_done_bytes

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what waits, as far as time allows, and end; fetches under way find nothing."""
        if not self._thread.is_alive():
            return
        self._flush_s = timeout_s * FLUSH_SHARE
        self._post(self._stopping.set)
        self._thread.join(timeout_s)

    def write(self, block: StageBlock, packed: bytes) -> bool:
        """Take a block to be written some time; False if it was dropped: Redis is away, or too much waits already."""
        has_room = self.queued_bytes + len(packed) <= self._max_queued_bytes
        if has_room and self._link.state.is_usable:
            self._num_taken_bytes += len(packed)
            if self._post(lambda: self._writes.put_nowait((block, packed))):
                return True
            self._num_taken_bytes -= len(packed)
        self._num_refused += 1
        return False

    def fetch(self, blocks: Sequence[StageBlock], timeout_s: float, on_done: OnFetched) -> None:
        """Look for blocks; on_done gets the leading ones that arrived in time, once, in our thread (here after the end)."""
        deadline = self._clock() + timeout_s
        wanted = tuple(blocks)
        if not self._post(lambda: self._begin(self._fetch(wanted, deadline, on_done))):
            on_done({})

    def takes_segment(self, num_bytes: int, *, is_urgent: bool = False) -> bool:
        """Whether a segment may be written now: Redis takes it, little waits, and trails have not had their share."""
        if self._link.state is not LinkState.OK or self._transfers.is_refused:
            return False
        queued_bytes = self._num_trail_bytes_taken - self._num_trail_bytes_done
        return queued_bytes + num_bytes <= MAX_TRAIL_BYTES and (is_urgent or self._clock() >= self._trails_free_at)

    def write_segment(self, trail_id: bytes, segment: Segment, packed: bytes, on_lost: Callable[[], None]) -> None:
        """Take a segment to be written some time; on_lost is called, in our thread, if Redis did not take it."""
        self._num_trail_bytes_taken += len(packed)
        bytes_per_s = self._transfers.writing.bytes_per_s
        if bytes_per_s is not None:
            began_at = max(self._clock(), self._trails_free_at)
            self._trails_free_at = began_at + len(packed) / (TRAIL_SHARE * bytes_per_s)
        if not self._post_trail_work(PackedSegment(trail_id, segment, packed, on_lost)):
            self._num_trail_bytes_taken -= len(packed)
            on_lost()

    def cut_trail(self, trail_id: bytes, layers: LayerRange, num_tokens: int) -> None:
        self._post_trail_work(partial(self._trails.cut, trail_id, layers, num_tokens))

    def end_trail(self, trail_id: bytes) -> None:
        self._post_trail_work(partial(self._trails.end, trail_id))

    def fetch_trail(self, part: TrailPart, timeout_s: float, on_done: Callable[[FoundTrail], None]) -> None:
        """Look for a part of a trail; on_done gets what arrived in time, once, in our thread (here after the end)."""
        deadline = self._clock() + timeout_s
        if not self._post(lambda: self._begin(self._fetch_trail(part, deadline, on_done))):
            on_done(FoundTrail(part, (), part.start))

    def status(self) -> KVTierStatus:
        state = self._link.state
        counters = self._store.counters
        return KVTierStatus(
            tier="redis",
            state="slow" if state is LinkState.OK and self._store.is_slow else state.value,
            hits=counters.hits,
            misses=counters.misses,
            puts=counters.puts,
            dropped_writes=self._num_refused + self._num_dropped,
            mismatches=dict(counters.mismatches),
            read_mb_s=(self._transfers.reading.bytes_per_s or 0.0) / 1e6,
            write_mb_s=(self._transfers.writing.bytes_per_s or 0.0) / 1e6,
            queued_bytes=max(0, self.queued_bytes),
            max_queued_bytes=self._max_queued_bytes,
        )

    def _post_trail_work(self, work: TrailWork) -> bool:
        return self._post(lambda: self._trail_work.put_nowait(work))

    def _post(self, callback: Callable[[], object]) -> bool:
        """Have our thread call something; False if it has ended."""
        if self._is_stopped:
            return False
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            # The loop was closed in between.
            return False
        return True

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        connecting = asyncio.create_task(self._link.connect(0.0))
        writing = [asyncio.create_task(work()) for work in (self._write_behind, self._follow_trails)]
        for behind in writing:
            # Without a writer we would only gather what is to be written.
            behind.add_done_callback(lambda _: self._stopping.set())
            behind.add_done_callback(_tell)
        await self._stopping.wait()
        await self._flush()
        self._is_stopped = True
        tasks = [connecting, *writing, *self._fetches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._store.close()
        await self._link.close()

    async def _flush(self) -> None:
        if self._link.state is LinkState.OK:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._flush_s):
                    # First what answers may need that go on elsewhere.
                    await self._trail_work.join()
                    await self._writes.join()
        self._num_dropped += self._writes.qsize()

    async def _write_behind(self) -> None:
        while True:
            block, packed = await self._writes.get()
            is_stored = False
            try:
                is_stored = await self._store.store(block, packed)
            finally:
                # Also if we end amid it.
                self._num_dropped += not is_stored
                self._num_done_bytes += len(packed)
                self._writes.task_done()

    async def _follow_trails(self) -> None:
        following: TrailWork | None = None
        while True:
            work = following or await self._trail_work.get()
            if not isinstance(work, PackedSegment):
                following = None
                try:
                    await work()
                finally:
                    self._trail_work.task_done()
                continue
            segments, following = self._batch(work)
            await self._store_segments(segments)

    def _batch(self, first: PackedSegment) -> tuple[list[PackedSegment], TrailWork | None]:
        """A segment with those behind it that can be written by the same call, and what comes then, if it was taken out."""
        segments, room = [first], MAX_BATCH_BYTES - len(first.packed)
        while not self._trail_work.empty():
            work = self._trail_work.get_nowait()
            if not isinstance(work, PackedSegment) or len(work.packed) > room:
                return segments, work
            room -= len(work.packed)
            segments.append(work)
        return segments, None

    async def _store_segments(self, segments: Sequence[PackedSegment]) -> None:
        is_stored = False
        try:
            is_stored = await self._trails.store(segments)
        finally:
            for one in segments:
                self._num_trail_bytes_done += len(one.packed)
                self._trail_work.task_done()
                if not is_stored:
                    one.on_lost()

    async def _fetch_trail(self, part: TrailPart, deadline: float, on_done: Callable[[FoundTrail], None]) -> None:
        found, unsound = FoundTrail(part, (), part.start), list[Segment]()
        try:
            found, unsound = await self._trails.fetch(part, deadline)
        finally:
            on_done(found)
        await self._trails.delete(part.trail_id, unsound)

    def _begin(self, fetching: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(fetching)
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)
        task.add_done_callback(_tell)

    async def _fetch(self, blocks: Sequence[StageBlock], deadline: float, on_done: OnFetched) -> None:
        found: dict[BlockKey, bytes] = {}
        try:
            fetched = await self._store.fetch(blocks, deadline)
            found = fetched.found
        finally:
            on_done(found)
        await self._store.repair(fetched)


def _tell(task: asyncio.Task[None]) -> None:
    """Say what ended a task, if it was a bug of ours: nobody awaits it."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        logger.error("kv_redis_failed error=%s: %s", type(error).__name__, error, exc_info=error)
