"""Puts a stage's blocks into Redis and gets them back in time, or not at all.

A block is values of a few layers each, then its manifest: who finds the manifest finds the values, or takes what is missing
for a shorter prefix. Asks only for what, as measured, arrives before it is too late. Speaks to Redis by AsyncRedisLink, on
its event loop; `redis_tier` gives it a thread and a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.kv import BlockKey
from shoal.redis_connection import Command, RedisRefusal, RefusalKind
from shoal.redis_link import AsyncRedisLink, block_manifest_key, block_value_key
from shoal.types import LinkProfile
from worker.emulation import LinkShaper
from worker.kv.block import Mismatch, StageBlock
from worker.kv.groups import Damage, Entry, choose, cut, join, lossless_bytes, read_entry, read_manifest
from worker.kv.transfer_rate import TransferRate

# Only keys with a TTL may be evicted, so that sessions are not; a month without a new writing is no loss.
KV_TTL_S = 30 * 24 * 3600
# For one value, of which nobody waits.
WRITE_TIMEOUT_S = 2.0
LONGEST_WRITE_S = 30.0
# A Redis that is full is not sent what it will refuse, for so long.
FULL_PAUSE_S = 5.0
# One MGET brings what takes so long: little is lost when it comes too late, and a round trip is short beside it.
CHUNK_S = 0.05
MAX_CHUNK_BYTES = 8 * 2**20
# What a call may take beyond what was expected of it before Redis is taken to hang.
PATIENCE_S = 0.05
PATIENCE_RATIO = 4.0
UNKNOWN_TIMEOUT_S = 0.25
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
    """Owned by the event loop of its link; counters and rates may be read by any thread.

    Invariant: at most one task measures a link that was too slow.
    """

    def __init__(self, link: AsyncRedisLink, profile: LinkProfile, clock: Callable[[], float] = time.monotonic) -> None:
        """profile: what an emulated device's link is slowed down to."""
        self._link = link
        self._clock = clock
        self._up, self._down = LinkShaper(profile), LinkShaper(profile)
        self.reading, self.writing = TransferRate(), TransferRate()
        self.is_slow = False
        self.counters = StoreCounters()
        # What is stored of a block for each byte of its lossless form, as seen last.
        self._stored_share: float | None = None
        self._full_until = float("-inf")
        self._measuring: asyncio.Task[None] | None = None
        self._measure_after = float("-inf")

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)

    async def store(self, block: StageBlock, packed: bytes) -> bool:
        """Write what Redis lacks of a block, its manifest last; False if not all of it is there afterwards."""
        if self._clock() < self._full_until:
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
            if not await self._write([("SET", key, value, "EX", KV_TTL_S)], len(value)):
                return False
        written = {entry for entry, _ in missing}
        if not await self._write(self._closing(block, [entry for entry, _ in values], written), 0):
            return False
        self.counters.puts += 1
        return True

    async def fetch(self, blocks: Sequence[StageBlock], deadline: float) -> Fetched:
        """Get leading blocks, as many as arrive by the deadline; nothing if not even the first would."""
        fetched = Fetched()
        if blocks and self._link.state.is_usable and await self._fetch(blocks, deadline, fetched):
            self.counters.hits += len(fetched.found)
            self.counters.misses += len(blocks) - len(fetched.found)
        return fetched

    async def repair(self, fetched: Fetched) -> None:
        """Take what was unsound out of manifests, so that nobody is promised it again."""
        for block, entry in fetched.unsound:
            await self._link.call(
                ("HDEL", block_manifest_key(block.block_hash), entry.field),
                ("DEL", block_value_key(entry.key(block.block_hash))),
                timeout_s=WRITE_TIMEOUT_S,
            )

    async def _fetch(self, blocks: Sequence[StageBlock], deadline: float, fetched: Fetched) -> bool:
        """Fetch what there is; False if computing is sooner, so that it is left alone."""
        if self._stored_share is not None and not self._arrives(self._expected_bytes(blocks[0]), deadline):
            self._refuse(blocks[0])
            return False
        wanted = await self._look_up(blocks, self._patience(None, deadline))
        if not wanted:
            return True
        self._learn_share(*wanted[0])
        if not self._arrives(sum(entry.num_bytes for entry in wanted[0][1]), deadline):
            self._refuse(blocks[0])
            return False
        self.is_slow = False
        parts = [_Part(block, entry, entry is entries[-1]) for block, entries in wanted for entry in entries]
        await self._read_parts(parts, deadline, fetched)
        return True

    async def _look_up(self, blocks: Sequence[StageBlock], timeout_s: float) -> list[tuple[StageBlock, list[Entry]]]:
        """The leading blocks that have manifests for all their layers, with the values to read."""
        commands = [("HGETALL", block_manifest_key(block.block_hash)) for block in blocks]
        replies = await self._read(commands, timeout_s)
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
            replies = await self._read([("MGET", *keys)], self._patience(num_bytes, deadline), num_bytes)
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
        if not self._arrives(rest, deadline):
            self.is_slow = True
            return start
        within_s = min(CHUNK_S, deadline - self._clock())
        # One value at least, and no more before anything is known of the link.
        room = min(MAX_CHUNK_BYTES, self._rate().bytes_within(within_s) or 0)
        sizes = itertools.accumulate(part.entry.num_bytes for part in parts[start:])
        return start + max(1, sum(1 for size in sizes if size <= room))

    def _rate(self) -> TransferRate:
        """What is known of reading; before anything was read, that it may be as fast as writing."""
        return self.reading if self.reading.bytes_per_s is not None else self.writing

    def _arrives(self, num_bytes: int, deadline: float) -> bool:
        now = self._clock()
        return now < deadline and now + (self._rate().seconds(num_bytes) or 0.0) <= deadline

    def _patience(self, num_bytes: int | None, deadline: float) -> float:
        """How long to wait for a reply: not to the deadline if Redis seems to hang. num_bytes: None for a short one."""
        expected_s = self.reading.latency_s if num_bytes is None else self._rate().seconds(num_bytes)
        timeout_s = UNKNOWN_TIMEOUT_S if expected_s is None else PATIENCE_S + PATIENCE_RATIO * expected_s
        return max(0.0, min(timeout_s, deadline - self._clock()))

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
            await self._read([command], REMEASURE_TIMEOUT_S, entry.num_bytes)
        took_s = self._clock() - began_at
        self._measure_after = self._clock() + max(REMEASURE_S, REMEASURE_RATIO * took_s)

    async def _missing(
        self, block: StageBlock, values: Sequence[tuple[Entry, bytes]]
    ) -> list[tuple[Entry, bytes]] | None:
        """The values that Redis does not have, or less precisely; None if it does not say."""
        manifest = block_manifest_key(block.block_hash)
        exists: list[Command] = [("EXISTS", block_value_key(entry.key(block.block_hash))) for entry, _ in values]
        fields: Command = ("HMGET", manifest, *(entry.field for entry, _ in values))
        replies = await self._transfer([fields, *exists], 0, WRITE_TIMEOUT_S)
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

    async def _write(self, commands: Sequence[Command], num_bytes: int) -> bool:
        began_at = self._clock()
        expected_s = self.writing.seconds(num_bytes) or 0.0
        timeout_s = min(LONGEST_WRITE_S, WRITE_TIMEOUT_S + PATIENCE_RATIO * expected_s)
        replies = await self._transfer(commands, num_bytes, timeout_s)
        now = self._clock()
        if replies is None:
            if _is_late(now - began_at, timeout_s):
                self.writing.observe_late(num_bytes, now - began_at)
            return False
        refusals = [reply for reply in replies if isinstance(reply, RedisRefusal)]
        if any(refusal.kind is RefusalKind.FULL for refusal in refusals):
            self._full_until = now + FULL_PAUSE_S
        if refusals:
            return False
        if num_bytes:
            self.writing.observe(num_bytes, now - began_at)
        return True

    async def _read(self, commands: Sequence[Command], timeout_s: float, num_bytes: int = 0) -> list[Any] | None:
        """Read, and learn from how long it took. num_bytes: expected, if that is more than a round trip."""
        began_at = self._clock()
        replies = await self._transfer(commands, 0, timeout_s)
        took_s = self._clock() - began_at
        if replies is not None:
            self.reading.observe(sum(map(_size, replies)), took_s)
        elif _is_late(took_s, timeout_s):
            self.reading.observe_late(num_bytes, took_s)
        return replies

    async def _transfer(self, commands: Sequence[Command], num_bytes: int, timeout_s: float) -> list[Any] | None:
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


def _is_late(took_s: float, timeout_s: float) -> bool:
    """Whether time was up, as far as timers are exact; else the connection was lost, or there was none."""
    return took_s >= 0.9 * timeout_s > 0.0


def _is_as_good(entry: Entry, content: bytes | None) -> bool:
    known = None if content is None else read_entry(entry.field, content)
    return known is not None and known.rank <= entry.rank


def _pairs(reply: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(reply[::2], reply[1::2], strict=True))


def _size(reply: Any) -> int:
    match reply:
        case bytes():
            return len(reply)
        case list():
            return sum(map(_size, reply))
        case _:
            return 0
