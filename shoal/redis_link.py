"""The link to Redis (or Valkey) as both sides use it: keys, calls with a deadline, and what happens when it is away.

Fails open: no call raises because of Redis or waits beyond its deadline. One that could not be answered gives None (or
False), which every caller has to take as "not there". A breaker keeps from asking a Redis that is away, and the link itself
tries it again. Owned by one event loop: the orchestrator's, or that of a worker's Redis tier.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shoal.breaker import Breaker, LinkState
from shoal.errors import ConfigError, ConnectionFailed
from shoal.kv import BlockHash, BlockKey
from shoal.redis_connection import (
    Command,
    RedisAddress,
    RedisConnection,
    RedisRefusal,
    RefusalKind,
    open_connection,
)

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 0.05
# Connecting takes several round trips, with TLS more; nobody waits for it.
CONNECT_TIMEOUT_S = 2.0
# A Redis that hangs is noticed by us, not by a request, if none comes for so long.
HEARTBEAT_S = 1.0
HEARTBEAT_TIMEOUT_S = 0.5

_WRITES = frozenset({"SET", "HSET", "SADD"})


@dataclass(slots=True)
class LinkCounters:
    """Since the link was made: calls that were sent, and those of them that were not answered in time."""

    calls: int = 0
    timeouts: int = 0


def block_value_key(key: BlockKey) -> bytes:
    """Of the layers of a block that `shoal.kv.layer_key` names."""
    return b"shoal:kv:v:" + key.hex().encode()


def block_manifest_key(block_hash: BlockHash) -> bytes:
    """A hash: its fields are layer ranges as b"start-stop", its values are for the tier alone."""
    return b"shoal:kv:m:" + block_hash.hex().encode()


def trail_key(trail_id: bytes) -> bytes:
    """A hash: what is checkpointed of a running sequence, for the tier alone."""
    return b"shoal:kv:t:" + trail_id.hex().encode()


def session_key(tenant: str, session_id: str) -> bytes:
    """No two pairs have the same."""
    return f"shoal:session:{_quoted(tenant)}:{_quoted(session_id)}".encode()


def session_index_key(tenant: str) -> bytes:
    return f"shoal:sessions:{_quoted(tenant)}".encode()


def request_key(orchestrator: bytes, record_id: bytes) -> bytes:
    """A hash: what one orchestrator needs of a request that it answers, to go on after it was restarted."""
    return b"shoal:request:%s:%s" % (orchestrator.hex().encode(), record_id.hex().encode())


def request_index_key(orchestrator: bytes) -> bytes:
    """The record ids of an orchestrator's requests."""
    return b"shoal:requests:" + orchestrator.hex().encode()


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="surrogatepass")


class AsyncRedisLink:
    """See the module. An empty URL is a link that is off: every call gives None at once.

    It connects when it is first used. Any thread may read state and counters.
    Invariants: there is a connection exactly while the state is OK; one task connects and watches.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise ConfigError for an URL that is none of unix://PATH, redis://HOST:PORT/DB, rediss:// and empty."""
        self._address = RedisAddress(url) if url else None
        self._clock = clock
        self._breaker = Breaker()
        self._connection: RedisConnection | None = None
        self._keeper: asyncio.Task[None] | None = None
        # No more the first attempt: from then on nobody waits for a connection.
        self._was_tried = asyncio.Event()
        self._is_full = False
        self.counters = LinkCounters()
        if self._address is None:
            self._breaker.turn_off()
            self._was_tried.set()

    @property
    def state(self) -> LinkState:
        return self._breaker.state

    @property
    def is_full(self) -> bool:
        """Whether the last write was refused for lack of memory."""
        return self._is_full

    async def connect(self, timeout_s: float) -> bool:
        """Start connecting, and wait so long at most for it; True if Redis answers. Calls do it by themselves."""
        self._begin()
        try:
            async with asyncio.timeout(timeout_s):
                await self._was_tried.wait()
        except TimeoutError:
            return False
        return self.state is LinkState.OK

    async def close(self) -> None:
        """End for good: calls in flight give None, and so does every later one."""
        self._breaker.turn_off()
        self._was_tried.set()
        self._connection = None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def call(self, *commands: Command, timeout_s: float = CALL_TIMEOUT_S) -> list[Any] | None:
        """Send commands at once; their replies in order, or None. A refused command's reply is a RedisRefusal."""
        deadline = self._clock() + timeout_s
        if self.state is LinkState.CONNECTING:
            await self.connect(timeout_s)
        connection = self._connection
        if connection is None:
            return None
        self.counters.calls += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                replies = await connection.call(commands)
        except TimeoutError:
            self._on_timeout(connection)
            return None
        except ConnectionFailed:
            return None
        return self._judged(connection, commands, replies)

    async def get(self, key: bytes, *, timeout_s: float = CALL_TIMEOUT_S) -> bytes | None:
        value: bytes | None = await self._one("GET", key, timeout_s=timeout_s)
        return value

    async def mget(self, keys: Sequence[bytes], *, timeout_s: float = CALL_TIMEOUT_S) -> list[bytes | None] | None:
        return await self._one("MGET", *keys, timeout_s=timeout_s) if keys else []

    async def set(self, key: bytes, value: bytes, ttl_s: float | None, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """True if Redis has it. ttl_s: None for ever."""
        ttl = () if ttl_s is None else ("PX", max(1, round(ttl_s * 1e3)))
        return await self._one("SET", key, value, *ttl, timeout_s=timeout_s) is not None

    async def delete(self, *keys: bytes, timeout_s: float = CALL_TIMEOUT_S) -> int | None:
        """How many there were."""
        return await self._one("DEL", *keys, timeout_s=timeout_s) if keys else 0

    async def hkeys_many(self, keys: Sequence[bytes], *, timeout_s: float = CALL_TIMEOUT_S) -> list[list[bytes]] | None:
        """The fields of each hash, none for one that is not there."""
        if not keys:
            return []
        replies = await self.call(*(("HKEYS", key) for key in keys), timeout_s=timeout_s)
        if replies is None or any(isinstance(reply, RedisRefusal) for reply in replies):
            return None
        return replies

    async def sadd(self, key: bytes, *members: bytes, timeout_s: float = CALL_TIMEOUT_S) -> int | None:
        return await self._one("SADD", key, *members, timeout_s=timeout_s) if members else 0

    async def srem(self, key: bytes, *members: bytes, timeout_s: float = CALL_TIMEOUT_S) -> int | None:
        return await self._one("SREM", key, *members, timeout_s=timeout_s) if members else 0

    async def smembers(self, key: bytes, *, timeout_s: float = CALL_TIMEOUT_S) -> frozenset[bytes] | None:
        members = await self._one("SMEMBERS", key, timeout_s=timeout_s)
        return None if members is None else frozenset(members)

    def check_invariants(self) -> None:
        self._breaker.check_invariants()
        assert (self._connection is not None) == (self.state is LinkState.OK)

    async def _one(self, *command: bytes | str | int | float, timeout_s: float) -> Any:
        replies = await self.call(command, timeout_s=timeout_s)
        return None if replies is None or isinstance(replies[0], RedisRefusal) else replies[0]

    def _judged(self, connection: RedisConnection, commands: Sequence[Command], replies: list[Any]) -> list[Any] | None:
        """Learn from what Redis answered; None if it is not able to answer at all."""
        kinds = {reply.kind for reply in replies if isinstance(reply, RedisRefusal)}
        if RefusalKind.CREDENTIALS in kinds or RefusalKind.LOADING in kinds:
            # The watcher closes it, and connecting anew tells which of them it is.
            self._lose(connection, "it does not answer any more: " + ", ".join(sorted(kinds)))
            return None
        if connection is self._connection:
            self._breaker.succeed()
        if RefusalKind.FULL in kinds:
            self._note_full(True)
        elif not kinds and any(command[0] in _WRITES for command in commands):
            self._note_full(False)
        return replies

    def _note_full(self, is_full: bool) -> None:
        if is_full == self._is_full:
            return
        self._is_full = is_full
        if is_full:
            logger.warning("redis_full url=%s: it refuses writes for lack of memory; reads go on", self._address)
        else:
            logger.info("redis_has_room url=%s", self._address)

    def _on_timeout(self, connection: RedisConnection) -> None:
        self.counters.timeouts += 1
        if connection is self._connection and self._breaker.time_out(self._clock()):
            self._drop("it does not answer in time")

    def _lose(self, connection: RedisConnection, reason: str) -> None:
        if connection is self._connection and self._breaker.fail(self._clock()):
            self._drop(reason)

    def _drop(self, reason: str) -> None:
        """Go on without Redis; the watcher closes the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.lose(reason)
        logger.warning("redis_away url=%s reason=%s: going on without it", self._address, reason)

    def _begin(self) -> None:
        if self._keeper is None and self.state is not LinkState.OFF:
            self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Connect, watch, and connect again, until the link is off."""
        while self.state is not LinkState.OFF:
            await asyncio.sleep(self._breaker.wait_s(self._clock()))
            connection = await self._try()
            self._was_tried.set()
            if connection is None:
                continue
            try:
                await self._watch(connection)
            finally:
                self._connection = None
                await connection.close()

    async def _try(self) -> RedisConnection | None:
        assert self._address is not None
        try:
            connection = await open_connection(self._address, CONNECT_TIMEOUT_S)
        except ConfigError as error:
            if self._breaker.turn_off():
                logger.error("redis_off url=%s reason=%s", self._address, error.message)
            return None
        except ConnectionFailed as error:
            if self._breaker.fail(self._clock()):
                self._drop(error.message)
            return None
        self._connection = connection
        if self._breaker.succeed():
            logger.info("redis_ok url=%s", self._address)
        return connection

    async def _watch(self, connection: RedisConnection) -> None:
        """Return once the connection is lost or given up."""
        while not connection.lost.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await connection.lost.wait()
            except TimeoutError:
                # Who waits for a reply, maybe behind large values on a slow link, finds out by himself.
                if not connection.is_busy:
                    await self._beat(connection)
        self._lose(connection, connection.loss)

    async def _beat(self, connection: RedisConnection) -> None:
        try:
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                await connection.call([("PING",)])
        except TimeoutError:
            self._lose(connection, f"it did not answer a PING within {HEARTBEAT_TIMEOUT_S:g} s")
        except ConnectionFailed:
            pass
