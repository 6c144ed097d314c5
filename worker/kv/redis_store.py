"""Puts a stage's blocks into Redis and gets them back in time, or not at all.

A block is values of a few layers each, then its manifest: who finds the manifest finds the values, or takes what is missing
for a shorter prefix. Asks only for what, as measured, arrives before it is too late. Speaks to Redis by RedisTransfers, on
its event loop; `redis_tier` gives it a thread and a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.kv import BlockKey
from shoal.redis_connection import Command, RedisRefusal
from shoal.redis_link import block_manifest_key, block_value_key
from worker.kv.block import Mismatch, StageBlock
from worker.kv.groups import Damage, Entry, choose, cut, join, lossless_bytes, read_entry, read_manifest
from worker.kv.redis_transfers import WRITE_TIMEOUT_S, RedisTransfers

# Only keys with a TTL may be evicted, so that sessions are not; a month without a new writing is no loss.
KV_TTL_S = 30 * 24 * 3600
# A link that was too slow is measured again, without anybody waiting: at most 1/20 of its time goes into that.
REMEASURE_S = 2.0
REMEASURE_RATIO = 20.0
REMEASURE_TIMEOUT_S = 5.0
MISLABELLED = frozenset(
    reason.value
    for reason in (Mismatch.OTHER_MODEL, Mismatch.OTHER_LAYERS, Mismatch.OTHER_SHAPE, Mismatch.OTHER_POSITION)
)


@dataclass(slots=True)
class StoreCounters:
    """Of blocks, since the store was made. mismatches: by reason, values read that were not what they should be.

    hits, misses: of those that Redis was asked for, which it is not where computing is sooner.
    """

    hits: int = 0
    misses: int = 0
    puts: int = 0
    mismatches: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Fetched:
    """The leading blocks that were found, packed with the labels asked for, and what was found to be unsound."""

    found: dict[BlockKey, bytes] = field(default_factory=dict)
    unsound: list[tuple[StageBlock, Entry]] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    block: StageBlock
    entry: Entry
    is_last: bool


class RedisStore:
    """Owned by the event loop of its transfers; counters may be read by any thread.

    Invariant: at most one task measures a link that was too slow.
    """

    def __init__(self, transfers: RedisTransfers, clock: Callable[[], float] = time.monotonic) -> None:
        self._transfers = transfers
        self._clock = clock
        self.is_slow = False
        self.counters = StoreCounters()
        # What is stored of a block for each byte of its lossless form, as seen last.
        self._stored_share: float | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._measure_after = float("-inf")

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)

    async def store(self, block: StageBlock, packed: bytes) -> bool:
        """Write what Redis lacks of a block, its manifest last; False if not all of it is there afterwards."""
        if self._transfers.is_refused:
            return False
        values = cut(block, packed)
        if isinstance(values, Mismatch):
            self.counters.mismatches[values.value] += 1
            return False
        self._learn_share(block, [entry for entry, _ in values])
        missing = await self._missing(block, values)
        if missing is None:
            return False
        for entry, value in missing:
            key = block_value_key(entry.key(block.block_hash))
            if not await self._transfers.write([("SET", key, value, "EX", KV_TTL_S)], len(value)):
                return False
        written = {entry for entry, _ in missing}
        if not await self._transfers.write(self._closing(block, [entry for entry, _ in values], written), 0):
            return False
        self.counters.puts += 1
        return True

    async def fetch(self, blocks: Sequence[StageBlock], deadline: float) -> Fetched:
        """Get leading blocks, as many as arrive by the deadline; nothing if not even the first would."""
        fetched = Fetched()
        if blocks and self._transfers.is_usable and await self._fetch(blocks, deadline, fetched):
            self.counters.hits += len(fetched.found)
            self.counters.misses += len(blocks) - len(fetched.found)
        return fetched

    async def repair(self, fetched: Fetched) -> None:
        """Take what was unsound out of manifests, so that nobody is promised it again."""
        for block, entry in fetched.unsound:
            manifest, value = block_manifest_key(block.block_hash), block_value_key(entry.key(block.block_hash))
            await self._transfers.write([("HDEL", manifest, entry.field), ("DEL", value)], 0)

    async def _fetch(self, blocks: Sequence[StageBlock], deadline: float, fetched: Fetched) -> bool:
        """Fetch what there is; False if computing is sooner, so that it is left alone."""
        if self._stored_share is not None and not self._transfers.arrives(self._expected_bytes(blocks[0]), deadline):
            self._refuse(blocks[0])
            return False
        wanted = await self._look_up(blocks, self._transfers.patience(None, deadline))
        if not wanted:
            return True
        self._learn_share(*wanted[0])
        if not self._transfers.arrives(sum(entry.num_bytes for entry in wanted[0][1]), deadline):
            self._refuse(blocks[0])
            return False
        self.is_slow = False
        parts = [_Part(block, entry, entry is entries[-1]) for block, entries in wanted for entry in entries]
        async with self._transfers.reading_turn(deadline) as has_turn:
            if has_turn:
                await self._read_parts(parts, deadline, fetched)
        return True

    async def _look_up(self, blocks: Sequence[StageBlock], timeout_s: float) -> list[tuple[StageBlock, list[Entry]]]:
        """The leading blocks that have manifests for all their layers, with the values to read."""
        commands = [("HGETALL", block_manifest_key(block.block_hash)) for block in blocks]
        replies = await self._transfers.read(commands, timeout_s)
        wanted = []
        for block, reply in zip(blocks, replies or (), strict=False):
            if isinstance(reply, RedisRefusal):
                break
            entries = choose(read_manifest(_pairs(reply)), block.label.layers)
            if entries is None:
                break
            wanted.append((block, entries))
        return wanted

    async def _read_parts(self, parts: Sequence[_Part], deadline: float, fetched: Fetched) -> None:
        """Read values in chunks, and join each block as soon as it is whole; stop at the first that cannot be had."""
        held: list[tuple[Entry, bytes]] = []
        start = 0
        while start < len(parts):
            stop = self._chunk(parts, start, deadline)
            if stop == start:
                return
            chunk = parts[start:stop]
            keys = [block_value_key(part.entry.key(part.block.block_hash)) for part in chunk]
            num_bytes = sum(part.entry.num_bytes for part in chunk)
            timeout_s = self._transfers.patience(num_bytes, deadline)
            replies = await self._transfers.read([("MGET", *keys)], timeout_s, num_bytes)
            if replies is None or isinstance(replies[0], RedisRefusal):
                return
            for part, value in zip(chunk, replies[0], strict=True):
                if not self._take(part, value, held, fetched):
                    return
            start = stop

    def _take(self, part: _Part, value: bytes | None, held: list[tuple[Entry, bytes]], fetched: Fetched) -> bool:
        """Keep a value with those of its block before it, and join them if it is the last; False if the block is unsound."""
        if value is None:
            self._note_unsound(part.block, part.entry, Damage.MISSING_VALUE.value, fetched)
            return False
        held.append((part.entry, value))
        if not part.is_last:
            return True
        joined = join(part.block, [entry for entry, _ in held], [value for _, value in held])
        held.clear()
        if isinstance(joined, tuple):
            self._note_unsound(part.block, *joined, fetched)
            return False
        fetched.found[part.block.key] = joined
        return True

    def _note_unsound(self, block: StageBlock, entry: Entry, reason: str, fetched: Fetched) -> None:
        self.counters.mismatches[reason] += 1
        # Of whole blocks with the right key, those that asked for something else may be the ones that are wrong.
        if reason not in MISLABELLED:
            fetched.unsound.append((block, entry))

    def _chunk(self, parts: Sequence[_Part], start: int, deadline: float) -> int:
        """Where a chunk that begins at `start` ends: at `start` if the block there would come too late."""
        rest = 0
        for part in parts[start:]:
            rest += part.entry.num_bytes
            if part.is_last:
                break
        if not self._transfers.arrives(rest, deadline):
            self.is_slow = True
            return start
        # One value at least.
        room = self._transfers.chunk_bytes(deadline)
        sizes = itertools.accumulate(part.entry.num_bytes for part in parts[start:])
        return start + max(1, sum(1 for size in sizes if size <= room))

    def _expected_bytes(self, block: StageBlock) -> int:
        return int(lossless_bytes(block) * (self._stored_share or 0.0))

    def _learn_share(self, block: StageBlock, entries: Sequence[Entry]) -> None:
        self._stored_share = sum(entry.num_bytes for entry in entries) / lossless_bytes(block)

    def _refuse(self, block: StageBlock) -> None:
        """Computing is sooner; see after that, with nobody waiting, whether that is still so."""
        self.is_slow = True
        is_measuring = self._measuring is not None and not self._measuring.done()
        if not is_measuring and self._clock() >= self._measure_after:
            self._measuring = asyncio.create_task(self._measure(block))

    async def _measure(self, block: StageBlock) -> None:
        began_at = self._clock()
        wanted = await self._look_up([block], REMEASURE_TIMEOUT_S)
        if wanted:
            entry = wanted[0][1][0]
            command = ("MGET", block_value_key(entry.key(block.block_hash)))
            await self._transfers.read([command], REMEASURE_TIMEOUT_S, entry.num_bytes)
        took_s = self._clock() - began_at
        self._measure_after = self._clock() + max(REMEASURE_S, REMEASURE_RATIO * took_s)

    async def _missing(
        self, block: StageBlock, values: Sequence[tuple[Entry, bytes]]
    ) -> list[tuple[Entry, bytes]] | None:
        """The values that Redis does not have, or less precisely; None if it does not say."""
        manifest = block_manifest_key(block.block_hash)
        exists: list[Command] = [("EXISTS", block_value_key(entry.key(block.block_hash))) for entry, _ in values]
        fields: Command = ("HMGET", manifest, *(entry.field for entry, _ in values))
        replies = await self._transfers.transfer([fields, *exists], 0, WRITE_TIMEOUT_S)
        if replies is None or any(isinstance(reply, RedisRefusal) for reply in replies):
            return None
        contents, *present = replies
        return [
            (entry, value)
            for (entry, value), content, is_present in zip(values, contents, present, strict=True)
            if not (is_present and _is_as_good(entry, content))
        ]

    def _closing(self, block: StageBlock, entries: Sequence[Entry], written: set[Entry]) -> list[Command]:
        """The commands after all values: what was written into the manifest, and a new TTL for the rest."""
        manifest = block_manifest_key(block.block_hash)
        new = [part for entry in entries if entry in written for part in (entry.field, entry.content)]
        kept = [entry.key(block.block_hash) for entry in entries if entry not in written]
        commands: list[Command] = [("HSET", manifest, *new)] if new else []
        commands.append(("EXPIRE", manifest, KV_TTL_S))
        commands.extend(("EXPIRE", block_value_key(key), KV_TTL_S) for key in kept)
        return commands


def _is_as_good(entry: Entry, content: bytes | None) -> bool:
    known = None if content is None else read_entry(entry.field, content)
    return known is not None and known.rank <= entry.rank


def _pairs(reply: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(reply[::2], reply[1::2], strict=True))
