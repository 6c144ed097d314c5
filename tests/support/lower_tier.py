"""A tier of KV blocks below a worker's memory, in a dictionary: it loses what it is told to, and answers when it is told to.

What Redis is to a block cache, without threads and links: fetches wait in a list until the test settles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.kv import BlockKey
from shoal.types import KVTierStatus, LayerRange
from worker.kv.block import StageBlock
from worker.kv.trail import FoundTrail, Segment, TrailPart, check_segments, choose

OnDone = Callable[[dict[BlockKey, bytes]], None]


class MemoryLowerTier:
    """values: what is stored, by key; trails: segments, by trail. asked, asked_trails: fetches not answered yet.

    answers_at_once: none has to be settled. segment_room: how many segments are still taken.
    """

    def __init__(self, *, answers_at_once: bool = True) -> None:
        self.values: dict[BlockKey, bytes] = {}
        self.asked: list[tuple[tuple[StageBlock, ...], float, OnDone]] = []
        self.answers_at_once = answers_at_once
        self.takes_writes = True
        self.num_fetches = 0
        self.trails: dict[bytes, dict[Segment, bytes]] = {}
        self.asked_trails: list[tuple[TrailPart, float, Callable[[FoundTrail], None]]] = []
        self.segment_room = 1 << 30
        self.loses_segments = False
        # start, stop
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, timeout_s: float) -> None:
        self.calls.append("stop")

    def write(self, block: StageBlock, packed: bytes) -> bool:
        if self.takes_writes:
            self.values[block.key] = packed
        return self.takes_writes

    def fetch(self, blocks: Sequence[StageBlock], timeout_s: float, on_done: OnDone) -> None:
        self.num_fetches += 1
        self.asked.append((tuple(blocks), timeout_s, on_done))
        if self.answers_at_once:
            self.settle()

    def settle(self, *, finds: bool = True) -> None:
        """Answer the fetch that waits for longest: with what is stored, or with nothing."""
        blocks, _, on_done = self.asked.pop(0)
        on_done({block.key: self.values[block.key] for block in blocks if finds and block.key in self.values})

    def takes_segment(self, num_bytes: int, *, is_urgent: bool = False) -> bool:
        return self.segment_room > 0

    def write_segment(self, trail_id: bytes, segment: Segment, packed: bytes, on_lost: Callable[[], None]) -> None:
        self.segment_room -= 1
        if self.loses_segments:
            on_lost()
        else:
            self.trails.setdefault(trail_id, {})[segment] = packed

    def cut_trail(self, trail_id: bytes, layers: LayerRange, num_tokens: int) -> None:
        self.trails[trail_id] = {
            segment: packed
            for segment, packed in self.trails.get(trail_id, {}).items()
            if segment.stop <= num_tokens or segment.layers.stop <= layers.start or layers.stop <= segment.layers.start
        }

    def end_trail(self, trail_id: bytes) -> None:
        self.trails.pop(trail_id, None)

    def fetch_trail(self, part: TrailPart, timeout_s: float, on_done: Callable[[FoundTrail], None]) -> None:
        self.asked_trails.append((part, timeout_s, on_done))
        if self.answers_at_once:
            self.settle_trail()

    def settle_trail(self, *, finds: bool = True) -> None:
        """Answer the fetch of a trail that waits for longest."""
        part, _, on_done = self.asked_trails.pop(0)
        segments = self.trails.get(part.trail_id, {}) if finds else {}
        chosen, stop = choose(segments, part)
        on_done(check_segments(part, chosen, [segments[segment] for segment in chosen], stop)[0])

    def status(self) -> KVTierStatus:
        return KVTierStatus("redis", num_blocks=len(self.values))
