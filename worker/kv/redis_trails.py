"""Keeps trails in Redis: a hash a sequence, a field a segment, gone some minutes after the last was written.

Knows which segments belong together by their names alone (`trail`); asks only for what, as measured, arrives before it is
too late. Speaks to Redis by RedisTransfers, on its event loop; `redis_tier` gives it a thread, an order and a budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shoal.redis_connection import Command, RedisRefusal
from shoal.redis_link import trail_key
from shoal.types import LayerRange
from worker.kv.block import HEADER_BYTES
from worker.kv.redis_transfers import WRITE_TIMEOUT_S, RedisTransfers
from worker.kv.trail import (
    FoundTrail,
    PackedSegment,
    Segment,
    TrailPart,
    check_segments,
    choose,
    read_field,
    segment_bytes,
)

# Whoever goes on with an answer does so within a minute; a sequence that runs writes again and again.
TRAIL_TTL_S = 15 * 60


class RedisTrails:
    """Owned by the event loop of its transfers. mismatches: counts by reason, shared with whoever reports them."""

    def __init__(self, transfers: RedisTransfers, mismatches: Counter[str]) -> None:
        self._transfers = transfers
        self._mismatches = mismatches

    async def store(self, segments: Sequence[PackedSegment]) -> bool:
        """Write segments of any trails at once; False if not all of them are there afterwards."""
        commands: list[Command] = [("HSET", trail_key(one.trail_id), one.segment.field, one.packed) for one in segments]
        trail_ids = {one.trail_id for one in segments}
        commands.extend(("EXPIRE", trail_key(trail_id), TRAIL_TTL_S) for trail_id in trail_ids)
        return await self._transfers.write(commands, sum(len(one.packed) for one in segments))

    async def cut(self, trail_id: bytes, layers: LayerRange, num_tokens: int) -> None:
        """Delete the segments with any of these layers that reach beyond so many tokens."""
        beyond = [
            segment
            for segment in await self._segments(trail_id, WRITE_TIMEOUT_S)
            if segment.stop > num_tokens and segment.layers.start < layers.stop and layers.start < segment.layers.stop
        ]
        await self.delete(trail_id, beyond)

    async def delete(self, trail_id: bytes, segments: Sequence[Segment]) -> None:
        if segments:
            await self._transfers.write([("HDEL", trail_key(trail_id), *(one.field for one in segments))], 0)

    async def end(self, trail_id: bytes) -> None:
        await self._transfers.write([("UNLINK", trail_key(trail_id))], 0)

    async def fetch(self, part: TrailPart, deadline: float) -> tuple[FoundTrail, list[Segment]]:
        """Get a part from its begin on, as much as arrives by the deadline; and what of it was found to be unsound."""
        if not self._transfers.is_usable:
            return FoundTrail(part, (), part.start), []
        segments = await self._segments(part.trail_id, self._transfers.patience(None, deadline))
        chosen, stop = choose(segments, part)
        async with self._transfers.reading_turn(deadline) as has_turn:
            values = await self._read(part, chosen, deadline) if has_turn else []
        found, reason = check_segments(part, chosen, values, stop)
        if not reason:
            return found, []
        self._mismatches[reason] += 1
        return found, [chosen[len(found.segments)]]

    async def _segments(self, trail_id: bytes, timeout_s: float) -> list[Segment]:
        replies = await self._transfers.read([("HKEYS", trail_key(trail_id))], timeout_s)
        if replies is None or isinstance(replies[0], RedisRefusal):
            return []
        segments = map(read_field, replies[0])
        return [segment for segment in segments if segment is not None]

    async def _read(self, part: TrailPart, chosen: Sequence[Segment], deadline: float) -> list[bytes | None]:
        values: list[bytes | None] = []
        while len(values) < len(chosen):
            chunk = self._chunk(part, chosen[len(values) :], deadline)
            num_bytes = sum(_stored_bytes(part, segment) for segment in chunk)
            if not chunk:
                break
            command: Command = ("HMGET", trail_key(part.trail_id), *(segment.field for segment in chunk))
            replies = await self._transfers.read([command], self._transfers.patience(num_bytes, deadline), num_bytes)
            if replies is None or isinstance(replies[0], RedisRefusal):
                break
            values.extend(replies[0])
        return values

    def _chunk(self, part: TrailPart, segments: Sequence[Segment], deadline: float) -> list[Segment]:
        """The segments to read next: one at least, unless it would come too late."""
        room = self._transfers.chunk_bytes(deadline)
        chunk: list[Segment] = []
        for segment in segments:
            room -= _stored_bytes(part, segment)
            if room < 0 and chunk:
                break
            chunk.append(segment)
        num_bytes = sum(_stored_bytes(part, segment) for segment in chunk)
        return chunk if self._transfers.arrives(num_bytes, deadline) else []


def _stored_bytes(part: TrailPart, segment: Segment) -> int:
    return segment_bytes(part.form, segment) + HEADER_BYTES
