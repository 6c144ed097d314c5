"""One connection to Redis that carries the calls of many tasks at once: the only importer of redis-py.

Replies come in the order of the commands, so a caller that gave up costs nothing but its reply. Connects, authenticates
and parses by way of redis-py; its own clients do one call a connection, and lose that when a call is given up. Knows no
keys and no breaker: `redis_link` does. Belongs to the event loop that opened it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)

from shoal.errors import ConfigError, ConnectionFailed

# More calls than this are not waited for: a Redis that answers has a handful in flight.
MAX_IN_FLIGHT = 1024
READ_BYTES = 1 << 18

Command = tuple[bytes | str | int | float, ...]


class RefusalKind(StrEnum):
    FULL = "full"
    LOADING = "loading"
    CREDENTIALS = "credentials"
    DENIED = "denied"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class RedisRefusal:
    """What Redis answered to a command that it did not carry out."""

    kind: RefusalKind
    message: str


_KINDS: dict[type[RedisError], RefusalKind] = {
    OutOfMemoryError: RefusalKind.FULL,
    BusyLoadingError: RefusalKind.LOADING,
    AuthenticationError: RefusalKind.CREDENTIALS,
    NoPermissionError: RefusalKind.DENIED,
}


@dataclass(slots=True)
class _Call:
    num_replies: int
    done: asyncio.Future[list[Any]]
    replies: list[Any] = field(default_factory=list)


class RedisAddress:
    """Where a Redis is and how to log in; its text has no password."""

    __slots__ = ("_arguments", "_text")

    def __init__(self, url: str) -> None:
        """Raise ConfigError for what is none of unix://PATH, redis://HOST:PORT/DB and rediss://HOST:PORT/DB."""
        self._text = without_secrets(url)
        try:
            self._arguments: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:
            raise _bad_url(self._text) from error
        if not self._arguments.get("path" if url.startswith("unix:") else "host"):
            raise _bad_url(self._text)

    def __str__(self) -> str:
        return self._text

    def make_connection(self) -> AbstractConnection:
        """Make a connection that is not open yet. Raises ConfigError for a parameter of the URL that there is not."""
        arguments = dict(self._arguments)
        kind = arguments.pop("connection_class", Connection)
        # RESP2, and nothing sent beyond login and database: any Redis since 6 will do, and no reply comes unasked.
        fixed = {"protocol": 2, "driver_info": None, "socket_timeout": None, "socket_read_size": READ_BYTES}
        try:
            connection: AbstractConnection = kind(**{**arguments, **fixed})
        except (TypeError, ValueError, RedisError) as error:
            raise _bad_url(self._text) from error
        return connection


def without_secrets(url: str) -> str:
    """An URL as it may be shown: without user, password and parameters."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "(an URL that cannot be read)"
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def _bad_url(text: str) -> ConfigError:
    return ConfigError(
        f"redis_url = {text!r} is not allowed; it must be unix://PATH, redis://HOST:PORT/DB or rediss://HOST:PORT/DB, with "
        "user:password@ before the host if need be (set by --redis-url or SHOAL_REDIS_URL)",
        field="redis_url",
    )


class RedisConnection:
    """An open connection. lost: set once it has broken, with the cause in loss.

    Invariants: `_awaited` has the calls whose replies have not all come, in the order of their commands; at most
    MAX_IN_FLIGHT; none once the connection is lost.
    """

    def __init__(self, connection: AbstractConnection) -> None:
        """Take an open connection; see open_connection."""
        self._connection = connection
        self._outgoing: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._awaited: deque[_Call] = deque()
        self.lost = asyncio.Event()
        self.loss = ""
        self._tasks = [asyncio.create_task(self._carry(self._write)), asyncio.create_task(self._carry(self._read))]

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a reply."""
        return any(not call.done.done() for call in self._awaited)

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands and wait for all replies; one that was refused has a RedisRefusal for a reply.

        Raises ConnectionFailed if the connection is or gets lost, or too many calls wait. May be cancelled.
        """
        if self.lost.is_set() or len(self._awaited) >= MAX_IN_FLIGHT:
            raise ConnectionFailed(self.loss or "too many calls wait")
        packed: list[bytes] = []
        for command in commands:
            packed.extend(self._connection.pack_command(*command))
        done: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._awaited.append(_Call(len(commands), done))
        self._outgoing.put_nowait(packed)
        return await done

    def lose(self, reason: str) -> None:
        """Take it for lost: all callers get ConnectionFailed. It is still to be closed."""
        if self.lost.is_set():
            return
        self.loss = reason
        self.lost.set()
        while self._awaited:
            call = self._awaited.popleft()
            if not call.done.done():
                call.done.set_exception(ConnectionFailed(reason))

    async def close(self) -> None:
        """Give all callers ConnectionFailed; nothing more is sent."""
        self.lose("it was closed")
        for task in self._tasks:
            task.cancel()
        # Before anything is waited for, so that it is done also if our caller is cancelled meanwhile; and not waiting for
        # the peer, which may be stopped.
        await self._connection.disconnect(nowait=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_invariants(self) -> None:
        assert len(self._awaited) <= MAX_IN_FLIGHT
        assert not (self.lost.is_set() and self._awaited)
        assert all(len(call.replies) < call.num_replies for call in self._awaited)

    async def _carry(self, direction: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                await direction()
        except (RedisError, OSError, ConnectionFailed) as error:
            self.lose(str(error) or type(error).__name__)

    async def _write(self) -> None:
        await self._connection.send_packed_command(await self._outgoing.get(), check_health=False)

    async def _read(self) -> None:
        reply = await self._read_reply()
        if not self._awaited:
            raise ConnectionFailed(f"Redis said what nobody asked for: {reply!r}")
        call = self._awaited[0]
        call.replies.append(reply)
        if len(call.replies) == call.num_replies:
            self._awaited.popleft()
            if not call.done.done():
                call.done.set_result(call.replies)

    async def _read_reply(self) -> Any:
        try:
            return await self._connection.read_response(disconnect_on_error=False)
        except (ResponseError, BusyLoadingError, AuthenticationError) as error:
            return RedisRefusal(_KINDS.get(type(error), RefusalKind.OTHER), str(error))


async def open_connection(address: RedisAddress, timeout_s: float) -> RedisConnection:
    """Connect, log in and wait until Redis answers a PING.

    Raises ConnectionFailed if it does not in time, or is loading its data, and ConfigError if it refuses the credentials.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _open(address.make_connection())
    except TimeoutError as error:
        raise ConnectionFailed(f"no answer within {timeout_s:g} s") from error
    except (RedisError, OSError) as error:
        # While it connects, redis-py makes a ConnectionError of whatever happens, with the original for its cause.
        if any(isinstance(fault, AuthenticationError | NoPermissionError) for fault in (error, error.__cause__)):
            raise ConfigError(f"Redis refuses our credentials: {error}", field="redis_url") from error
        raise ConnectionFailed(str(error) or type(error).__name__) from error


async def _open(connection: AbstractConnection) -> RedisConnection:
    opened: RedisConnection | None = None
    try:
        await connection.connect_check_health(check_health=False)
        opened = RedisConnection(connection)
        _require_pong((await opened.call([("PING",)]))[0])
    except BaseException:
        await (opened.close() if opened else connection.disconnect(nowait=True))
        raise
    return opened


def _require_pong(reply: Any) -> None:
    if isinstance(reply, RedisRefusal):
        if reply.kind in (RefusalKind.CREDENTIALS, RefusalKind.DENIED):
            raise ConfigError(f"Redis refuses our credentials: {reply.message}", field="redis_url")
        raise ConnectionFailed(reply.message)
