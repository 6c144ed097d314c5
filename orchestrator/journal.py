"""The requests of one orchestrator in Redis, so that the next one on its address can go on with them.

Written behind: nobody waits for Redis, and without it there is simply no journal. What of a request could not be written is
written whole when Redis takes it again; too many of them are not kept at all. Owns what has yet to be written; what it is
written from belongs to `served`, its only caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.record import SEGMENT_TOKENS, AnswerLog, RequestRecord, unpack_log, unpack_record
from shoal.redis_connection import Command, RedisRefusal
from shoal.redis_link import AsyncRedisLink, request_index_key, request_key

logger = logging.getLogger(__name__)

# At most so much of an answer is lost with its orchestrator; it is computed again.
WRITE_EVERY_S = 0.1
RETRY_S = 1.0
# Nobody waits for these.
WRITE_TIMEOUT_S = 0.5
READ_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 1.0
# Of a request that runs; a client gives up long before.
TTL_S = 3600.0
# Of one whose answer is complete, or whose client has left.
ENDED_TTL_S = 60.0
# Bound what the journal keeps and writes: a few hundred bytes a request and five a token.
MAX_REQUESTS = 4096
MAX_PROMPT_TOKENS = 4 << 20
# Lookups share the connection, and wait for what is being written.
MAX_WRITE_BYTES = 256 << 10
_READ_BATCH = 32
_RECORD, _STATE = b"record", b"state"


@dataclass(slots=True)
class JournalCounters:
    """Since the start. requests: begun. dropped: not kept, for there were too many. failed_writes: to be repeated."""

    requests: int = 0
    dropped: int = 0
    failed_writes: int = 0


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A request as it was found."""

    record: RequestRecord
    log: AnswerLog


@dataclass(slots=True)
class _Page:
    """What is in Redis of a request. fields: those that are there, as far as is known. num_tokens: those among them."""

    record: RequestRecord
    log: AnswerLog
    fields: set[bytes] = field(default_factory=set)
    num_tokens: int = 0

    def forget(self) -> None:
        """Take it for not there at all, so that all of it is written again."""
        self.fields.clear()
        self.num_tokens = 0

    def next_part(self, now: float) -> _Part:
        """What is to be written now, with the segment of tokens that was not full when it was written last."""
        log = self.log
        log.written_at = now
        first, stop = self.num_tokens // SEGMENT_TOKENS, -(-len(log.token_ids) // SEGMENT_TOKENS)
        fields = {_segment(index): log.pack_segment(index) for index in range(first, stop)}
        fields[_STATE] = log.pack_state()
        if _RECORD not in self.fields:
            fields[_RECORD] = self.record.pack()
        return _Part(self, fields, len(log.token_ids))


@dataclass(frozen=True, slots=True)
class _Part:
    """What is written of a request at once; num_tokens: those that Redis has then."""

    page: _Page
    fields: dict[bytes, bytes]
    num_tokens: int

    def commands(self, orchestrator: bytes) -> list[Command]:
        """The first of them tells how many fields are new; not each time how long they are kept."""
        record_id, log = self.page.record.record_id, self.page.log
        key = request_key(orchestrator, record_id)
        commands: list[Command] = [("HSET", key, *itertools.chain.from_iterable(self.fields.items()))]
        is_over = log.is_left or log.finish is not None
        if is_over or not self.fields.keys() <= self.page.fields:
            commands.append(("PEXPIRE", key, round((ENDED_TTL_S if is_over else TTL_S) * 1e3)))
        return commands


class Journal:
    """See the module.

    Invariants: what is to be written is of requests that are kept; without Redis none is; one task writes, a call at a time.
    """

    def __init__(
        self, link: AsyncRedisLink | None, orchestrator: bytes, clock: Callable[[], float] = time.time
    ) -> None:
        """orchestrator: see name_of. clock: seconds of the wall clock."""
        self._link = link
        self._name = orchestrator
        self._clock = clock
        self._pages: dict[bytes, _Page] = {}
        # In the order in which it came up; of a dictionary for that.
        self._unwritten: dict[bytes, None] = {}
        self._deleted: dict[bytes, None] = {}
        self._num_prompt_tokens = 0
        self._has_work = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._is_behind = False
        self.counters = JournalCounters()

    def begin(self, record: RequestRecord, log: AnswerLog) -> None:
        """Keep a request from now on; nothing if too many are kept."""
        if self._link is None:
            return
        num_prompt = len(record.prompt_token_ids)
        if len(self._pages) >= MAX_REQUESTS or self._num_prompt_tokens + num_prompt > MAX_PROMPT_TOKENS:
            self.counters.dropped += 1
            return
        self.counters.requests += 1
        self._num_prompt_tokens += num_prompt
        self._pages[record.record_id] = _Page(record, log)
        self.touch(record.record_id)

    def touch(self, record_id: bytes) -> None:
        """Have what is new of a request written, if it is kept."""
        if record_id in self._pages:
            self._unwritten[record_id] = None
            self._wake()

    def forget(self, record_id: bytes) -> None:
        """Keep a request no more, also one that was found and not begun."""
        page = self._pages.pop(record_id, None)
        if page is not None:
            self._num_prompt_tokens -= len(page.record.prompt_token_ids)
            self._unwritten.pop(record_id, None)
        # Also where it was never written: what timed out may have been carried out.
        self._delete(record_id)

    async def load(self) -> list[JournalEntry] | None:
        """What the orchestrator before this one has left, and delete what is none; None if Redis is away."""
        if self._link is None:
            return []
        ids = await self._link.smembers(request_index_key(self._name), timeout_s=READ_TIMEOUT_S)
        if ids is None:
            return None
        entries: list[JournalEntry] = []
        record_ids = sorted(ids - self._pages.keys())
        for start in range(0, len(record_ids), _READ_BATCH):
            batch = record_ids[start : start + _READ_BATCH]
            commands: list[Command] = [("HGETALL", request_key(self._name, record_id)) for record_id in batch]
            replies = await self._link.call(*commands, timeout_s=READ_TIMEOUT_S)
            if replies is None:
                return None
            for record_id, reply in zip(batch, replies, strict=True):
                entry = _unpacked(record_id, reply)
                if entry is None:
                    self._delete(record_id)
                else:
                    entries.append(entry)
        return sorted(entries, key=lambda entry: entry.record.accepted_at)

    async def stop(self) -> None:
        """Write what is to be written, as far as Redis takes it at once, and nothing more."""
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                while self._has_more and await self._write_some():
                    pass
        except TimeoutError:
            pass
        if self._unwritten:
            logger.warning("journal_incomplete requests=%d: Redis did not take them", len(self._unwritten))

    @property
    def _has_more(self) -> bool:
        return bool(self._unwritten or self._deleted)

    def _delete(self, record_id: bytes) -> None:
        if self._link is not None:
            self._deleted[record_id] = None
            self._wake()

    def _wake(self) -> None:
        self._has_work.set()
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_on())

    async def _write_on(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            is_written = await self._write_some()
            if self._has_more:
                self._has_work.set()
            await asyncio.sleep(WRITE_EVERY_S if is_written else RETRY_S)

    async def _write_some(self) -> bool:
        """Write what has waited longest, in one call; False if Redis does not take it."""
        assert self._link is not None
        parts = self._take_unwritten()
        commands: list[Command] = []
        first: list[int] = []
        for part in parts:
            first.append(len(commands))
            commands.extend(part.commands(self._name))
        if parts:
            # Each time: it may have been evicted, and lasts as long as the youngest of its requests.
            listed = request_index_key(self._name)
            commands.append(("SADD", listed, *(part.page.record.record_id for part in parts)))
            commands.append(("PEXPIRE", listed, round(TTL_S * 1e3)))
        deleted = list(self._deleted)[:MAX_REQUESTS]
        if deleted:
            commands.append(("DEL", *(request_key(self._name, record_id) for record_id in deleted)))
            commands.append(("SREM", request_index_key(self._name), *deleted))
        try:
            replies = await self._link.call(*commands, timeout_s=WRITE_TIMEOUT_S) if commands else []
        except asyncio.CancelledError:
            self._on_failed(parts)
            raise
        if replies is None or any(isinstance(reply, RedisRefusal) for reply in replies):
            self._on_failed(parts)
            return False
        for record_id in deleted:
            self._deleted.pop(record_id, None)
        for part, index in zip(parts, first, strict=True):
            self._on_written(part, replies[index])
        if self._is_behind:
            self._is_behind = False
            logger.info("journal_goes_on requests=%d", len(self._pages))
        return True

    def _take_unwritten(self) -> list[_Part]:
        """What is to be written of the next requests, of one at least however much it is."""
        parts: list[_Part] = []
        num_bytes = 0
        while self._unwritten and num_bytes < MAX_WRITE_BYTES:
            record_id = next(iter(self._unwritten))
            del self._unwritten[record_id]
            parts.append(self._pages[record_id].next_part(self._clock()))
            num_bytes += sum(map(len, parts[-1].fields.values()))
        return parts

    def _on_written(self, part: _Part, num_new: int) -> None:
        page = part.page
        if num_new > len(part.fields.keys() - page.fields):
            # Redis has lost it meanwhile, restarted or for lack of room, and now has this part alone.
            page.forget()
            self.touch(page.record.record_id)
            return
        page.fields |= part.fields.keys()
        page.num_tokens = part.num_tokens

    def _on_failed(self, parts: list[_Part]) -> None:
        """Whether it was written or not is not known."""
        self.counters.failed_writes += len(parts)
        for part in parts:
            part.page.forget()
            if part.page.record.record_id in self._pages:
                self._unwritten[part.page.record.record_id] = None
        if parts and not self._is_behind:
            self._is_behind = True
            logger.warning("journal_behind requests=%d: Redis does not take them now", len(self._pages))

    def check_invariants(self) -> None:
        """Assert the invariants of the class."""
        assert self._unwritten.keys() <= self._pages.keys()
        assert not (self._deleted.keys() & self._pages.keys())
        assert self._num_prompt_tokens == sum(len(page.record.prompt_token_ids) for page in self._pages.values())
        assert self._link is not None or not (self._pages or self._deleted)


def name_of(secret: bytes, address: str, model_digest: str) -> bytes:
    """Name an orchestrator: the one that is started after it has the same home, address and model, and no other has."""
    return hashlib.sha256(b"\0".join([b"shoal journal", secret, address.encode(), model_digest.encode()])).digest()[:16]


def _unpacked(record_id: bytes, reply: object) -> JournalEntry | None:
    """Read what Redis has under the key of a request; None if that is none."""
    if not isinstance(reply, list):
        return None
    fields: dict[bytes, bytes] = dict(zip(reply[::2], reply[1::2], strict=False))
    record = unpack_record(record_id, fields.get(_RECORD))
    if record is None:
        return None
    segments = [fields.get(_segment(index)) for index in range(len(fields))]
    return JournalEntry(record, unpack_log(fields.get(_STATE), segments))


def _segment(index: int) -> bytes:
    return b"%d" % index
