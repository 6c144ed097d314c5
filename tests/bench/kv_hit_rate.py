"""What share of an unbounded cache's hits the tier in memory reaches with less room: `python -m tests.bench.kv_hit_rate`.

Replays the shipped trace of conversations, in virtual time, against the tier that workers have, and against one that loses
what was used longest ago. Computes nothing else: no model, no process, the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from loadtest.traces import Trace, read_trace
from shoal.kv import BLOCK_TOKENS, BlockKey
from tests.bench.figures import Figure
from tests.bench.report import table
from tests.support.clock import FakeClock
from worker.kv.tiers import HostTier

TRACE = "chats"
SHARE = 0.25
SHARES = (0.05, 0.1, SHARE, 0.5, 1.0)
# Of a stage with 15 layers of the default model, exact, and what computing it took there. All share one bytes object.
BLOCK = bytes(1_474_560)
COST_S = 0.13


class Cache(Protocol):
    """What is replayed against: leading blocks are used, those after them put."""

    def use(self, keys: Iterable[BlockKey]) -> int:
        """Use blocks until one is missing; return how many were there."""
        ...

    def put(self, key: BlockKey, parent: BlockKey | None) -> None: ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """Tokens of all prompts, those of them that were restored, and the different blocks that were offered."""

    prompt_tokens: int
    hit_tokens: int
    num_blocks: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class WorkerMemory:
    """The tier of a worker's memory, used as `worker.kv.host` does."""

    def __init__(self, budget_bytes: int, clock: Callable[[], float]) -> None:
        self.tier = HostTier(budget_bytes, clock)

    def use(self, keys: Iterable[BlockKey]) -> int:
        num_found = 0
        for key in keys:
            if not self.tier.get([key]):
                break
            self.tier.release([key])
            num_found += 1
        return num_found

    def put(self, key: BlockKey, parent: BlockKey | None) -> None:
        if not self.tier.contains(key):
            self.tier.put(key, BLOCK, parent=parent, cost_s=COST_S)


class LeastRecentlyUsed:
    """For comparison: what was used longest ago goes first, of one prompt the tail."""

    def __init__(self, budget_bytes: int, clock: Callable[[], float]) -> None:
        self._num_most = budget_bytes // len(BLOCK)
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()
        self._used: list[BlockKey] = []

    def use(self, keys: Iterable[BlockKey]) -> int:
        self._used.clear()
        for key in keys:
            if key not in self._keys:
                break
            self._used.append(key)
        self._touch()
        return len(self._used)

    def put(self, key: BlockKey, parent: BlockKey | None) -> None:
        self._keys[key] = None
        self._used.append(key)
        self._touch()
        while len(self._keys) > self._num_most:
            self._keys.popitem(last=False)

    def _touch(self) -> None:
        """Make the prompt's blocks the newest, its first one above all."""
        for key in reversed(self._used):
            if key in self._keys:
                self._keys.move_to_end(key)


def replay(trace: Trace, make_cache: Callable[[int, Callable[[], float]], Cache], budget_bytes: int) -> Replayed:
    """Restore the leading blocks of each prompt and put the others, as stages do; no block outlives its tenant's name.

    At least two tokens of a prompt are computed.
    """
    assert trace.block_tokens == BLOCK_TOKENS
    clock = FakeClock()
    cache = make_cache(budget_bytes, clock.now)
    seen: set[BlockKey] = set()
    prompt_tokens = hit_tokens = 0
    for entry in trace.entries:
        clock.move_to(entry.timestamp_ms / 1000)
        num_full = min(len(entry.hash_ids), entry.input_tokens // BLOCK_TOKENS)
        keys = [_key(entry.tenant, hash_id) for hash_id in entry.hash_ids[:num_full]]
        num_hits = cache.use(keys[: (entry.input_tokens - 2) // BLOCK_TOKENS])
        for place in range(num_hits, num_full):
            cache.put(keys[place], keys[place - 1] if place else None)
        prompt_tokens += entry.input_tokens
        hit_tokens += num_hits * BLOCK_TOKENS
        seen.update(keys)
    return Replayed(prompt_tokens, hit_tokens, len(seen))


def measure(trace: Trace) -> list[dict[str, object]]:
    """A row for each share of the trace's footprint, with the hits of both tiers as shares of an unbounded one's."""
    unbounded = replay(trace, WorkerMemory, sys.maxsize)
    rows: list[dict[str, object]] = []
    for share in SHARES:
        budget = math.floor(share * unbounded.num_blocks) * len(BLOCK)
        ours, theirs = (replay(trace, kind, budget) for kind in (WorkerMemory, LeastRecentlyUsed))
        rows.append(
            {
                "share": share,
                "num_blocks": budget // len(BLOCK),
                "hit_rate": ours.hit_rate,
                "of_unbounded": ours.hit_tokens / unbounded.hit_tokens,
                "lru_of_unbounded": theirs.hit_tokens / unbounded.hit_tokens,
                "counts": share == SHARE,
            }
        )
    return rows


def hit_rate() -> list[Figure]:
    """The share at a quarter of the footprint; it is the same in every run, so every run counts."""
    trace = read_trace(TRACE)
    rows = measure(trace)
    (row,) = (row for row in rows if row["counts"])
    note = (
        f"{len(trace.entries)} requests, {rows[-1]['num_blocks']} blocks; {rows[-1]['hit_rate']:.0%} of all prompt tokens "
        f"if nothing is lost; least recently used first: {row['lru_of_unbounded']:.3f}"
    )
    return [Figure("kv_hit_rate", float(str(row["of_unbounded"])), len(rows), 0, rows, note)]


def _key(tenant: str, hash_id: int) -> BlockKey:
    return BlockKey(hashlib.sha256(f"{hash_id} {tenant}".encode()).digest())


def main() -> None:
    rows = measure(read_trace(TRACE))
    shown = [
        {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]
    sys.stdout.write("\n".join(table(shown)) + "\n")


if __name__ == "__main__":
    main()
