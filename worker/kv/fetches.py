"""What is on its way from the tier below memory, and who waits for it.

Asks for no block twice, and for no more at a time than memory could hold. Knows neither bytes nor slots: `cache` says what
arrived. Owned by the compute thread; the tier's own thread only posts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.kv import BlockHash, BlockKey
from shoal.types import KVTierStatus, LayerRange
from worker.kv.block import ChainBlock, StageBlock
from worker.kv.trail import FoundTrail, Segment, TrailPart

# By key, packed bytes that were found.
Found = dict[BlockKey, bytes]


class LowerTier(Protocol):
    """A slower and larger tier with a thread of its own; it may lose anything, and be out of reach at any time."""

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    def write(self, block: StageBlock, packed: bytes) -> bool:
        """Take a block, to store it later; never blocks. False if it was dropped, which the tier counts."""
        ...

    def fetch(self, blocks: Sequence[StageBlock], timeout_s: float, on_done: Callable[[Found], None]) -> None:
        """Look for blocks. on_done is called exactly once, from any thread, within about timeout_s."""
        ...

    def takes_segment(self, num_bytes: int, *, is_urgent: bool = False) -> bool:
        """Whether a segment may be written now. is_urgent: even if that takes more than trails' share of the link."""
        ...

    def write_segment(self, trail_id: bytes, segment: Segment, packed: bytes, on_lost: Callable[[], None]) -> None:
        """Take a segment, to store it later; never blocks. on_lost: called, from any thread, if it could not be stored."""
        ...

    def cut_trail(self, trail_id: bytes, layers: LayerRange, num_tokens: int) -> None:
        """Delete what reaches beyond so many tokens, of any of these layers, behind what was written before."""
        ...

    def end_trail(self, trail_id: bytes) -> None:
        """Delete a trail, behind what was written before."""
        ...

    def fetch_trail(self, part: TrailPart, timeout_s: float, on_done: Callable[[FoundTrail], None]) -> None:
        """Look for a part of a trail. on_done is called exactly once, from any thread, within about timeout_s."""
        ...

    def status(self) -> KVTierStatus:
        """Any thread may ask."""
        ...


@dataclass(frozen=True, slots=True)
class BlocksFetched:
    """What came of a fetch: packed bytes of those of the blocks asked for that were found."""

    asked: tuple[BlockKey, ...]
    found: Mapping[BlockKey, bytes]


@dataclass(slots=True)
class Fetch:
    """A block on its way. is_ahead: no request has asked for it, so none will have had to fetch it."""

    chain: ChainBlock
    is_ahead: bool


@dataclass(slots=True, eq=False)
class _Waiter:
    keys: set[BlockKey]
    on_ready: Callable[[Found], None]
    found: Found = field(default_factory=dict)


class Fetches:
    """Invariant: who waits, waits for blocks that are on their way."""

    __slots__ = ("_in_flight", "_lower", "_post", "_waiters")

    def __init__(self, lower: LowerTier, post: Callable[[BlocksFetched], None]) -> None:
        """post: called from the tier's thread; brings what it is given to the owner's."""
        self._lower = lower
        self._post = post
        self._in_flight: dict[BlockKey, Fetch] = {}
        self._waiters: list[_Waiter] = []

    def ask(self, blocks: Sequence[ChainBlock], timeout_s: float, most: int, *, is_ahead: bool = False) -> None:
        """Fetch blocks that are not on their way, as long as at most so many are."""
        known = [self._in_flight[chain.key] for chain in blocks if chain.key in self._in_flight]
        for fetch in known if not is_ahead else ():
            fetch.is_ahead = False
        wanted = [chain for chain in blocks if chain.key not in self._in_flight]
        asked = wanted[: max(0, most - len(self._in_flight))]
        if not asked or timeout_s <= 0.0:
            return
        keys = tuple(chain.key for chain in asked)
        stage_blocks = [chain.block for chain in asked]
        self._lower.fetch(stage_blocks, timeout_s, lambda found: self._post(BlocksFetched(keys, found)))
        self._in_flight.update((chain.key, Fetch(chain, is_ahead)) for chain in asked)

    def wait(self, blocks: Sequence[ChainBlock], on_ready: Callable[[Found], None]) -> bool:
        """Call on_ready once those of the blocks that are on their way have arrived, or not; False if none of them is."""
        keys = {chain.key for chain in blocks if chain.key in self._in_flight}
        if keys:
            self._waiters.append(_Waiter(keys, on_ready))
        return bool(keys)

    def take(self, key: BlockKey) -> Fetch | None:
        """A block that has arrived, or not; None if it was forgotten meanwhile. `arrived` must follow."""
        return self._in_flight.pop(key, None)

    def arrived(self, key: BlockKey, data: bytes | None) -> None:
        """Tell those who wait for a block; None: it was not there."""
        self._settle({key}, {} if data is None else {key: data})

    def forget(self, block_hashes: Collection[BlockHash]) -> None:
        """Have blocks not arrive."""
        gone = {key for key, fetch in self._in_flight.items() if fetch.chain.block_hash in block_hashes}
        for key in gone:
            del self._in_flight[key]
        self._settle(gone, {})

    def check_invariants(self) -> None:
        assert all(waiter.keys and waiter.keys <= self._in_flight.keys() for waiter in self._waiters)

    def _settle(self, keys: Collection[BlockKey], found: Found) -> None:
        for waiter in self._waiters:
            waiter.found.update((key, data) for key, data in found.items() if key in waiter.keys)
            waiter.keys.difference_update(keys)
        ready = [waiter for waiter in self._waiters if not waiter.keys]
        self._waiters = [waiter for waiter in self._waiters if waiter.keys]
        for waiter in ready:
            waiter.on_ready(waiter.found)
