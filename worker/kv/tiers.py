"""What a tier of stored KV blocks does, and the tier in a worker's memory.

A tier holds bytes by key within a budget, and decides alone what to lose. It knows links between blocks and what it cost to
compute them, not what is in them: `block` checks that. Callers promote, demote and count mismatches.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from shoal.kv import BlockKey

# Entries that a heap may keep beyond twice the blocks before it is made anew.
_HEAP_SLACK = 64


class Refusal(StrEnum):
    """Why a block was not stored."""

    TOO_LARGE = "too_large"  # larger than the whole budget
    NO_ROOM = "no_room"  # what would have to go is pinned or being read
    IN_USE = "in_use"  # the key's old bytes are being read


@dataclass(slots=True)
class TierStats:
    """Counts since the tier was made. All but replacements change how many blocks it has, or none.

    hits, misses: keys asked for with get. pins_expired: pins that ended by their time.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    replacements: int = 0
    evictions: int = 0
    deletions: int = 0
    pins_expired: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)


class KVTier(Protocol):
    """A store of blocks that may lose any of them, at any time, but never gives other bytes than were put."""

    @property
    def budget_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks, at most budget_bytes."""
        ...

    @property
    def stats(self) -> TierStats:
        """A copy of the counts."""
        ...

    def contains(self, key: BlockKey) -> bool:
        """Whether get would find it; no use of the block, and not counted."""
        ...

    def get(self, keys: Iterable[BlockKey]) -> dict[BlockKey, bytes]:
        """Find blocks; a key given twice counts once. What is found is being read, and stays, until release ends it."""
        ...

    def release(self, keys: Iterable[BlockKey]) -> None:
        """End one reading of each of these blocks; each must be being read."""
        ...

    def put(self, key: BlockKey, data: bytes, *, parent: BlockKey | None, cost_s: float) -> bool:
        """Store a block, or new bytes for one; False if it was refused, and then what the key had is as before.

        parent: the block before it in the chain, which need not be here. cost_s: seconds to compute it again.
        """
        ...

    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Forget blocks, pinned ones too; return how many there were. Bytes being read count until they are released."""
        ...

    def pin(self, keys: Iterable[BlockKey], ttl_s: float) -> int:
        """Keep blocks at least for so long, unless they are deleted; return how many of them are here."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """One block. ticket: number of its live entry in the heap, 0 for none. pinned_until: -inf if it is not pinned."""

    data: bytes
    parent: BlockKey | None
    cost_s: float
    num_uses: int = 1
    num_readers: int = 0
    pinned_until: float = -math.inf
    score: float = 0.0
    ticket: int = 0


class HostTier:
    """Blocks in this process's memory. Owned by one thread: nothing in it is locked.

    What goes first has the lowest score, uses x cost / bytes, on top of the level that evictions had reached at its last
    use. The level rises with each eviction, so what was popular long ago falls behind. Only blocks that no block here
    continues may go: a chain loses its tail first, and a pinned or read block keeps all before it.
    Source: Greedy-Dual-Size-Frequency, Cherkasova, HPL-98-69R1 (1998).

    Operations take O(log n) a key, amortised; the bytes of the index, some hundreds a block, are not in used_bytes.

    Invariants:
    - used_bytes is the sum of what is stored and what is deleted but being read, and at most budget_bytes;
    - exactly the blocks that may be evicted have one live heap entry, with their score;
    - children are counted as they are stored; a pinned block has its end in the heap of pins;
    - stored blocks are puts - evictions - deletions.
    """

    def __init__(
        self, budget_bytes: int, clock: Callable[[], float], on_evicted: Callable[[BlockKey, bytes], None] | None = None
    ) -> None:
        """on_evicted: told of each block that was lost to make room, while it is made: it must not call the tier."""
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._on_evicted = on_evicted
        self._used_bytes = 0
        self._entries: dict[BlockKey, _Entry] = {}
        # Deleted while they were read.
        self._leaving: dict[BlockKey, _Entry] = {}
        self._num_children: Counter[BlockKey] = Counter()
        self._heap: list[tuple[float, int, BlockKey]] = []
        self._num_tickets = 0
        self._pins: list[tuple[float, BlockKey]] = []
        self._level = 0.0
        self._stats = TierStats()

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def num_blocks(self) -> int:
        return len(self._entries)

    @property
    def stats(self) -> TierStats:
        return replace(self._stats, refused=Counter(self._stats.refused))

    def contains(self, key: BlockKey) -> bool:
        return key in self._entries

    def is_tail(self, key: BlockKey) -> bool:
        """Whether no block here continues this one."""
        return key not in self._num_children

    def peek(self, key: BlockKey) -> bytes | None:
        """The bytes of a block; no use of it, and not counted."""
        entry = self._entries.get(key)
        return None if entry is None else entry.data

    def recode(self, key: BlockKey, data: bytes) -> bool:
        """Give a block shorter bytes that stand for the same; no use of it. False if it is being read, or not here."""
        entry = self._entries.get(key)
        if entry is None or entry.num_readers > 0:
            return False
        assert len(data) <= len(entry.data), f"block {key.hex()} would grow from {len(entry.data)} to {len(data)} bytes"
        self._used_bytes += len(data) - len(entry.data)
        level = entry.score - _worth(entry)
        entry.data = data
        entry.score = level + _worth(entry)
        self._rank(key)
        return True

    def get(self, keys: Iterable[BlockKey]) -> dict[BlockKey, bytes]:
        found: dict[BlockKey, bytes] = {}
        for key in dict.fromkeys(keys):
            entry = self._entries.get(key)
            if entry is None:
                self._stats.misses += 1
                continue
            self._stats.hits += 1
            entry.num_readers += 1
            entry.num_uses += 1
            self._rescore(key, entry)
            found[key] = entry.data
        return found

    def release(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            entry = self._leaving.get(key) or self._entries[key]
            assert entry.num_readers > 0, f"block {key.hex()} is released, but nobody reads it"
            entry.num_readers -= 1
            if key in self._entries:
                self._rank(key)
            elif entry.num_readers == 0:
                del self._leaving[key]
                self._used_bytes -= len(entry.data)

    def put(self, key: BlockKey, data: bytes, *, parent: BlockKey | None, cost_s: float) -> bool:
        """See KVTier. One that is refused for lack of room may have cost others theirs."""
        assert parent != key, f"block {key.hex()} cannot continue itself"
        assert 0 <= cost_s < math.inf, f"a block cannot take {cost_s} s to compute"
        old = self._entries.get(key)
        refusal = self._obstacle(key, old, data) or self._make_room(key, parent, len(data) - _size(old))
        if refusal is not None:
            self._stats.refused[refusal] += 1
            return False
        entry = _Entry(data, parent, cost_s)
        if old is None:
            self._stats.puts += 1
        else:
            self._stats.replacements += 1
            entry.num_uses, entry.pinned_until = old.num_uses, old.pinned_until
            self._remove(key)
        self._entries[key] = entry
        self._used_bytes += len(data)
        if parent is not None:
            self._num_children[parent] += 1
            self._rank(parent)
        self._rescore(key, entry)
        return True

    def delete(self, keys: Iterable[BlockKey]) -> int:
        num_deleted = 0
        for key in keys:
            if key in self._entries:
                num_deleted += 1
                entry = self._remove(key)
                if entry.num_readers > 0:
                    self._leaving[key] = entry
                    self._used_bytes += len(entry.data)
        self._stats.deletions += num_deleted
        return num_deleted

    def pin(self, keys: Iterable[BlockKey], ttl_s: float) -> int:
        """See KVTier; a pin does not shorten one that lasts longer."""
        self._end_pins()
        until = self._clock() + ttl_s
        present = [key for key in dict.fromkeys(keys) if key in self._entries]
        for key in present:
            entry = self._entries[key]
            if until > entry.pinned_until:
                entry.pinned_until = until
                heapq.heappush(self._pins, (until, key))
                self._rank(key)
        if len(self._pins) > 2 * len(self._entries) + _HEAP_SLACK:
            self._pins = sorted({pin for pin in self._pins if self._is_pin(*pin)})
        return len(present)

    def is_pinned(self, key: BlockKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.pinned_until > self._clock()

    def pinned_bytes(self) -> int:
        """Bytes of the blocks that are pinned."""
        self._end_pins()
        pinned = {key for until, key in self._pins if self._is_pin(until, key)}
        return sum(len(self._entries[key].data) for key in pinned)

    def check_invariants(self) -> None:
        held = [*self._entries.values(), *self._leaving.values()]
        assert self._used_bytes == sum(len(entry.data) for entry in held) <= self._budget_bytes
        assert all(entry.num_readers > 0 for entry in self._leaving.values())
        assert not self._entries.keys() & self._leaving.keys()
        parents = Counter(entry.parent for entry in self._entries.values() if entry.parent is not None)
        assert parents == self._num_children, "children are miscounted"
        live = {(score, key) for score, ticket, key in self._heap if self._is_live(key, ticket)}
        assert live == {(entry.score, key) for key, entry in self._entries.items() if self._may_go(key, entry)}
        pins = set(self._pins)
        pinned = ((entry.pinned_until, key) for key, entry in self._entries.items() if entry.pinned_until > -math.inf)
        assert all(pin in pins for pin in pinned), "a pin would never end"
        stats = self._stats
        assert len(self._entries) == stats.puts - stats.evictions - stats.deletions
        assert len(self._heap) <= 2 * len(self._entries) + _HEAP_SLACK + 1

    def _obstacle(self, key: BlockKey, old: _Entry | None, data: bytes) -> Refusal | None:
        if key in self._leaving or (old is not None and old.num_readers > 0):
            return Refusal.IN_USE
        return Refusal.TOO_LARGE if len(data) > self._budget_bytes else None

    def _make_room(self, key: BlockKey, parent: BlockKey | None, more_bytes: int) -> Refusal | None:
        """Evict until so many more bytes fit; not what the new bytes replace, nor the block that they continue."""
        self._end_pins()
        spared = [self._entries[spared] for spared in (key, parent) if spared is not None and spared in self._entries]
        for entry in spared:
            entry.num_readers += 1
            entry.ticket = 0
        while self._used_bytes + more_bytes > self._budget_bytes and self._evict():
            pass
        for entry in spared:
            entry.num_readers -= 1
        for spared_key in (key, parent):
            if spared_key is not None:
                self._rank(spared_key)
        return Refusal.NO_ROOM if self._used_bytes + more_bytes > self._budget_bytes else None

    def _evict(self) -> bool:
        """Lose the block with the lowest score, of equal ones the one that was used longest ago; False if none may go."""
        while self._heap:
            score, ticket, key = heapq.heappop(self._heap)
            if self._is_live(key, ticket):
                self._level = max(self._level, score)
                entry = self._remove(key)
                self._stats.evictions += 1
                if self._on_evicted is not None:
                    self._on_evicted(key, entry.data)
                return True
        return False

    def _remove(self, key: BlockKey) -> _Entry:
        entry = self._entries.pop(key)
        self._used_bytes -= len(entry.data)
        parent = entry.parent
        if parent is not None:
            self._num_children[parent] -= 1
            if self._num_children[parent] == 0:
                del self._num_children[parent]
            self._rank(parent)
        return entry

    def _end_pins(self) -> None:
        now = self._clock()
        while self._pins and self._pins[0][0] <= now:
            until, key = heapq.heappop(self._pins)
            if self._is_pin(until, key):
                self._entries[key].pinned_until = -math.inf
                self._stats.pins_expired += 1
                self._rank(key)

    def _is_pin(self, until: float, key: BlockKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.pinned_until == until

    def _rescore(self, key: BlockKey, entry: _Entry) -> None:
        entry.score = self._level + _worth(entry)
        self._rank(key)

    def _rank(self, key: BlockKey) -> None:
        """Make the heap agree with what a block's readers, pin, children and score now are, if it is here."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.ticket = 0
        if self._may_go(key, entry):
            self._num_tickets += 1
            entry.ticket = self._num_tickets
            heapq.heappush(self._heap, (entry.score, entry.ticket, key))
        if len(self._heap) > 2 * len(self._entries) + _HEAP_SLACK:
            self._heap = [item for item in self._heap if self._is_live(item[2], item[1])]
            heapq.heapify(self._heap)

    def _may_go(self, key: BlockKey, entry: _Entry) -> bool:
        return entry.num_readers == 0 and entry.pinned_until == -math.inf and key not in self._num_children

    def _is_live(self, key: BlockKey, ticket: int) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ticket == ticket


def _worth(entry: _Entry) -> float:
    return entry.num_uses * entry.cost_s / max(1, len(entry.data))


def _size(entry: _Entry | None) -> int:
    return 0 if entry is None else len(entry.data)
