"""A tier of KV blocks below a worker's memory, in a dictionary: it loses what it is told to, and answers when it is told to.

What Redis is to a block cache, without threads and links: fetches wait in a list until the test settles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.kv import BlockKey
from shoal.types import KVTierStatus
from worker.kv.block import StageBlock

OnDone = Callable[[dict[BlockKey, bytes]], None]


class MemoryLowerTier:
    """values: what is stored, by key. asked: fetches not answered yet. answers_at_once: none has to be settled."""

    def __init__(self, *, answers_at_once: bool = True) -> None:
        self.values: dict[BlockKey, bytes] = {}
        self.asked: list[tuple[tuple[StageBlock, ...], float, OnDone]] = []
        self.answers_at_once = answers_at_once
        self.takes_writes = True
        self.num_fetches = 0
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

    def status(self) -> KVTierStatus:
        return KVTierStatus("redis", num_blocks=len(self.values))
