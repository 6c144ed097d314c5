"""Where records of sessions are: a file in the orchestrator's home, and Redis, where there is one.

Each home may be away at any time; then it says so at once or within TIMEOUT_S, fails nobody, and never gives another record
than it was given. Which of two records counts is for `sessions` to say, which calls both. Knows no engine and no text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from orchestrator.conversation import Session, SessionKey
from shoal.redis_link import AsyncRedisLink, session_index_key, session_key

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Longer than a lookup in a cache may take, for here an error is the other way out.
TIMEOUT_S = 0.5
# Another process may be writing into the file.
_LOCK_WAIT_S = 0.2
# Deleted sessions that are remembered until Redis has heard of it.
MAX_DELETIONS = 10_000
_TENANTS_KEY = b"shoal:session-tenants"


class SessionHome(Protocol):
    """A keeper of records, for ever. None from it: it cannot be asked now."""

    async def get(self, keys: Sequence[SessionKey]) -> dict[SessionKey, bytes] | None:
        """The records that it has of these, as they were put."""
        ...

    async def put(self, session: Session) -> bool:
        """Keep a record; False if it was not taken. One without a turn says that the session is deleted."""
        ...

    async def session_ids(self, tenant: str) -> set[str] | None:
        """Those of a tenant, without the deleted ones."""
        ...

    async def tenants(self) -> set[str] | None:
        """All who ever had a session, perhaps."""
        ...


class RedisHome:
    """Records without a TTL, so that Redis never evicts them. A deleted session leaves nothing."""

    def __init__(self, link: AsyncRedisLink) -> None:
        self._link = link

    async def get(self, keys: Sequence[SessionKey]) -> dict[SessionKey, bytes] | None:
        records = await self._link.mget([_record_key(key) for key in keys], timeout_s=TIMEOUT_S)
        if records is None:
            return None
        return {key: record for key, record in zip(keys, records, strict=True) if record is not None}

    async def put(self, session: Session) -> bool:
        key = session.key
        if session.is_deleted:
            # The reverse of writing.
            return (
                await self._link.srem(session_index_key(key.tenant), key.session_id.encode()) is not None
                and await self._link.delete(_record_key(key), timeout_s=TIMEOUT_S) is not None
            )
        # The record first: what is listed can be read.
        return (
            await self._link.set(_record_key(key), session.pack(), None, timeout_s=TIMEOUT_S)
            and await self._link.sadd(session_index_key(key.tenant), key.session_id.encode()) is not None
            and await self._link.sadd(_TENANTS_KEY, key.tenant.encode()) is not None
        )

    async def session_ids(self, tenant: str) -> set[str] | None:
        members = await self._link.smembers(session_index_key(tenant), timeout_s=TIMEOUT_S)
        return None if members is None else {member.decode() for member in members}

    async def tenants(self) -> set[str] | None:
        members = await self._link.smembers(_TENANTS_KEY)
        return None if members is None else {member.decode() for member in members}


class FileHome:
    """Records in an SQLite file that only its owner may read. What is deleted is overwritten.

    It keeps records of deleted sessions too, so that Redis may hear of them later. One thread reads and writes, so the event
    loop never waits for a disk. Invariant: while a call is late, no other is begun.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "sessions")
        self._connection: sqlite3.Connection | None = None
        self._late: asyncio.Future[Any] | None = None
        self._is_failing = False

    async def get(self, keys: Sequence[SessionKey]) -> dict[SessionKey, bytes] | None:
        def read(file: sqlite3.Connection) -> dict[SessionKey, bytes]:
            query = "SELECT record FROM sessions WHERE tenant = ? AND session_id = ?"
            rows = {key: file.execute(query, (key.tenant, key.session_id)).fetchone() for key in keys}
            return {key: row[0] for key, row in rows.items() if row is not None}

        return await self._call(read)

    async def put(self, session: Session) -> bool:
        def write(file: sqlite3.Connection) -> bool:
            row = (session.key.tenant, session.key.session_id, session.is_deleted, session.expires_at, session.pack())
            file.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)", row)
            if session.is_deleted:
                oldest = "SELECT rowid FROM sessions WHERE is_deleted ORDER BY expires_at DESC LIMIT -1 OFFSET ?"
                file.execute(f"DELETE FROM sessions WHERE rowid IN ({oldest})", (MAX_DELETIONS,))
            return True

        return await self._call(write) or False

    async def session_ids(self, tenant: str) -> set[str] | None:
        query = "SELECT session_id FROM sessions WHERE tenant = ? AND NOT is_deleted"
        return await self._call(lambda file: {one for (one,) in file.execute(query, (tenant,))})

    async def tenants(self) -> set[str] | None:
        query = "SELECT DISTINCT tenant FROM sessions WHERE NOT is_deleted"
        return await self._call(lambda file: {one for (one,) in file.execute(query)})

    async def deletions(self, now: float) -> list[SessionKey] | None:
        """The deleted sessions that it remembers; forgets those that would have ended by now."""

        def read(file: sqlite3.Connection) -> list[SessionKey]:
            file.execute("DELETE FROM sessions WHERE is_deleted AND expires_at <= ?", (now,))
            rows = file.execute("SELECT tenant, session_id FROM sessions WHERE is_deleted")
            return [SessionKey(tenant, session_id) for tenant, session_id in rows]

        return await self._call(read)

    async def forget(self, key: SessionKey) -> bool:
        """Lose a record, a deleted session's too."""

        def write(file: sqlite3.Connection) -> bool:
            file.execute("DELETE FROM sessions WHERE tenant = ? AND session_id = ?", (key.tenant, key.session_id))
            return True

        return await self._call(write) or False

    async def close(self) -> None:
        """End what is under way; whoever calls later finds it away."""
        disconnecting = self._begin(self._disconnect)
        self._thread.shutdown(wait=False)
        if disconnecting is not None:
            await asyncio.wait({disconnecting}, timeout=TIMEOUT_S)

    async def _call(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        if self._late is not None and not self._late.done():
            return None
        call = self._begin(lambda: self._run(action))
        if call is None:
            return None
        done, _ = await asyncio.wait({call}, timeout=TIMEOUT_S)
        if done:
            return call.result()
        self._late = call
        logger.warning("sessions_file_late path=%s: going on without it until it answers", self._path)
        return None

    def _begin(self, call: Callable[[], T]) -> asyncio.Future[T] | None:
        try:
            return asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError:
            return None  # it is closed

    def _run(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        try:
            if self._connection is None:
                self._connection = self._connect()
            with self._connection:
                result = action(self._connection)
        except (sqlite3.Error, OSError) as error:
            self._note_failure(error)
            return None
        self._is_failing = False
        return result

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _open(self._path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # it is locked, or cannot be written
            aside = self._path.with_suffix(".damaged")
            logger.error("sessions_file_damaged path=%s error=%s: it is now %s", self._path, error, aside.name)
            self._path.replace(aside)
            return _open(self._path)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.error("sessions_file_failed path=%s error=%s: going on without it", self._path, error)


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(path, timeout=_LOCK_WAIT_S, check_same_thread=False)
    try:
        for statement in (
            "PRAGMA journal_mode = TRUNCATE",
            "PRAGMA synchronous = NORMAL",
            "PRAGMA secure_delete = ON",
            "CREATE TABLE IF NOT EXISTS sessions (tenant TEXT, session_id TEXT, is_deleted INTEGER, expires_at REAL, "
            "record BLOB, PRIMARY KEY (tenant, session_id))",
        ):
            connection.execute(statement)
    except BaseException:
        connection.close()
        raise
    return connection


def _record_key(key: SessionKey) -> bytes:
    return session_key(key.tenant, key.session_id)
