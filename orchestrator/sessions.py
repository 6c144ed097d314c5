"""Conversations that are kept between requests: in Redis where there is one, else in memory.

Owns what is stored of sessions, who of them has a turn that is being answered, and how many there may be. In memory they
live as long as the orchestrator. While Redis is away, sessions in memory go on and new ones are begun there, to be written
later; one that only Redis can have is refused, for a lost conversation is worse than an error. Knows no engine and no text.
Called by `conversations`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from orchestrator.conversation import Session, SessionKey, unpack
from shoal.errors import InvalidRequest, SessionBusy, SessionNotFound, SessionUnavailable, TooManySessions
from shoal.redis_link import AsyncRedisLink, session_index_key, session_key

# Bound what clients can make the orchestrator keep; a session takes about five bytes a token.
MAX_SESSIONS_OF_TENANT = 1000
MAX_SESSIONS = 10_000
# Of sessions that Redis has too; they serve when it is away.
MAX_REMEMBERED = 256
# Longer than a lookup in a cache may take, for here an error is the other way out.
TIMEOUT_S = 0.5
RETRY_S = 2.0
# Records that are asked for at once: a few hundred kilobytes.
_BATCH = 32
_TENANTS_KEY = b"shoal:session-tenants"


class SessionStore:
    """The sessions of one model.

    Invariants: what waits to be written is in memory; without Redis nothing waits, and all that is known is in memory; what
    is in memory is known. At most one turn of a session is under way.
    """

    def __init__(
        self, link: AsyncRedisLink | None, model_digest: str, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: seconds of the wall clock, which a restart does not set back."""
        self._link = link
        self._model_digest = model_digest
        self._ttl_s = ttl_s
        self._clock = clock
        self._busy: set[SessionKey] = set()
        # The session used last is last.
        self._memory: OrderedDict[SessionKey, bytes] = OrderedDict()
        self._unsaved: set[SessionKey] = set()
        self._known: dict[str, set[str]] = {}
        # Whether Redis was asked for all ids once: from then on an unknown id is new, also while it is away.
        self._knows_all = link is None
        self._writing = asyncio.Lock()

    @property
    def num_unsaved(self) -> int:
        return len(self._unsaved)

    def now(self) -> float:
        return self._clock()

    # Turns

    async def begin(self, key: SessionKey) -> Session:
        """Take a session for a turn, until `release`; one that is not there begins now.

        Raises SessionBusy, SessionUnavailable, TooManySessions, and InvalidRequest for a session of another model.
        """
        with self._taken(key) as undo:
            session = await self._load(key)
            if session is None:
                await self._check_room(key.tenant)
                session = self.blank(key)
            if session.model_digest != self._model_digest:
                raise InvalidRequest(
                    "session_id", f"{key.session_id!r} was held with another model; delete it or take another id"
                )
            undo.pop_all()
        return session

    async def peek(self, key: SessionKey) -> Session | None:
        """A session as it is now, whoever is at work on it; None if there is none to go on with, or none can be had now."""
        try:
            packed = await self._find(key)
        except SessionUnavailable:
            return None
        session = None if packed is None else _readable(key, packed)
        if session is None or session.model_digest != self._model_digest or session.expires_at <= self._clock():
            return None
        return session

    def blank(self, key: SessionKey) -> Session:
        """A conversation without a turn."""
        now = self._clock()
        return Session(key, self._model_digest, created_at=now, used_at=now, expires_at=now + self._ttl_s)

    def used(self, session: Session) -> Session:
        """The same, used now: it lives for the whole of its time again."""
        now = self._clock()
        return replace(session, used_at=now, expires_at=now + self._ttl_s)

    def release(self, key: SessionKey) -> None:
        self._busy.discard(key)

    def is_newest(self, session: Session) -> bool:
        """Whether this is what a session is now, with nobody at work on it."""
        return session.key not in self._busy and self._memory.get(session.key) == session.pack()

    def keep(self, session: Session) -> None:
        """Take over what a session has become, in memory; `write` brings it to Redis."""
        if self._link is not None:
            self._unsaved.add(session.key)
        self._remember(session.key, session.pack())

    async def write(self, key: SessionKey) -> bool:
        """Write a session that waits for it; False if Redis is away: `tend` tries again."""
        async with self._writing:
            if self._link is None or key not in self._unsaved:
                return True
            packed = self._memory[key]
            # The record first: what is listed can be read.
            is_written = (
                await self._link.set(_record_key(key), packed, None, timeout_s=TIMEOUT_S)
                and await self._link.sadd(session_index_key(key.tenant), key.session_id.encode()) is not None
                and await self._link.sadd(_TENANTS_KEY, key.tenant.encode()) is not None
            )
            if is_written and self._memory.get(key) is packed:
                self._unsaved.discard(key)
                self._forget_some()
            return bool(is_written)

    # Listing, deleting, and what time brings

    async def sessions(self, tenant: str) -> list[Session]:
        """All sessions of a tenant that can be read, by id. Raises SessionUnavailable if Redis is away."""
        if not await self._refresh([tenant]):
            raise _unavailable("sessions cannot be listed")
        keys = [SessionKey(tenant, session_id) for session_id in sorted(self._known.get(tenant, ()))]
        return [session for session in await self._read(keys) if session is not None]

    async def take(self, key: SessionKey) -> Session:
        """Take a session to delete it, until `release`; of a damaged one nothing but the key is known.

        Raises SessionNotFound, SessionBusy, SessionUnavailable.
        """
        with self._taken(key) as undo:
            packed = await self._find(key)
            if packed is None:
                raise SessionNotFound(f"tenant {key.tenant!r} has no session {key.session_id!r}", field="session_id")
            undo.pop_all()
        return _readable(key, packed) or self.blank(key)

    async def delete(self, key: SessionKey) -> None:
        """Forget a session everywhere. Raises SessionUnavailable if Redis is away; deleting can be tried again then."""
        async with self._writing:
            # The reverse of writing.
            if self._link is not None and (
                await self._link.srem(session_index_key(key.tenant), key.session_id.encode()) is None
                or await self._link.delete(_record_key(key), timeout_s=TIMEOUT_S) is None
            ):
                raise _unavailable(f"session {key.session_id!r} cannot be deleted")
            self._unsaved.discard(key)
            self._memory.pop(key, None)
            self._known.get(key.tenant, set()).discard(key.session_id)

    async def tend(self) -> None:
        """Write what waits to be written, and learn which sessions Redis has, if it is there."""
        for key in sorted(self._unsaved):
            if not await self.write(key):
                return
        if self._link is not None:
            tenants = await self._link.smembers(_TENANTS_KEY)
            self._knows_all |= tenants is not None and await self._refresh(tenant.decode() for tenant in tenants)

    async def expired(self) -> list[SessionKey]:
        """Sessions whose time is over and that have no turn under way; reads them all. Raises SessionUnavailable."""
        keys = [SessionKey(tenant, one) for tenant, ids in sorted(self._known.items()) for one in sorted(ids)]
        now = self._clock()
        return [
            one.key for one in await self._read(keys) if one and one.expires_at <= now and one.key not in self._busy
        ]

    def _taken(self, key: SessionKey) -> ExitStack:
        """Mark a session as busy until the context is left."""
        if key in self._busy:
            raise SessionBusy(
                f"a turn of session {key.session_id!r} is under way; wait for its end",
                field="session_id",
                retry_after_s=1.0,
            )
        self._busy.add(key)
        undo = ExitStack()
        undo.callback(self.release, key)
        return undo

    async def _load(self, key: SessionKey) -> Session | None:
        packed = await self._find(key)
        return None if packed is None else unpack(key, packed)

    async def _find(self, key: SessionKey) -> bytes | None:
        """The newest record of a session, None if there is none; raises SessionUnavailable if that cannot be told."""
        held = self._memory.get(key)
        if self._link is None or key in self._unsaved:
            return held
        found = await self._link.mget([_record_key(key)], timeout_s=TIMEOUT_S)
        if found is None:
            if held is None and (not self._knows_all or key.session_id in self._known.get(key.tenant, ())):
                raise _unavailable(f"session {key.session_id!r} cannot be looked up")
            return held
        stored = found[0]
        if held is not None and held != stored and _used_at(key, held) > _used_at(key, stored):
            # A Redis that crashed has lost the end of it; it is written again with what this turn makes of it.
            self._unsaved.add(key)
            return held
        if stored is not None:
            self._remember(key, stored)
        return stored

    async def _read(self, keys: Sequence[SessionKey]) -> list[Session | None]:
        """Read many sessions, None for each that is not there or damaged. Raises SessionUnavailable."""
        packed = {key: self._memory[key] for key in keys if self._link is None or key in self._unsaved}
        missing = [key for key in keys if key not in packed]
        for start in range(0, len(missing) if self._link is not None else 0, _BATCH):
            batch = missing[start : start + _BATCH]
            assert self._link is not None
            records = await self._link.mget([_record_key(key) for key in batch], timeout_s=TIMEOUT_S)
            if records is None:
                raise _unavailable("sessions cannot be read")
            packed |= {key: record for key, record in zip(batch, records, strict=True) if record is not None}
        return [_readable(key, packed.get(key)) for key in keys]

    async def _refresh(self, tenants: Iterable[str]) -> bool:
        """Learn the ids of these tenants' sessions; False if Redis is away."""
        if self._link is None:
            return True
        for tenant in tenants:
            members = await self._link.smembers(session_index_key(tenant), timeout_s=TIMEOUT_S)
            if members is None:
                return False
            held = {key.session_id for key in self._memory if key.tenant == tenant}
            self._known[tenant] = held.union(member.decode() for member in members)
        return True

    async def _check_room(self, tenant: str) -> None:
        await self._refresh([tenant])
        num_own = len(self._known.get(tenant, ()))
        if num_own >= MAX_SESSIONS_OF_TENANT or sum(map(len, self._known.values())) >= MAX_SESSIONS:
            raise TooManySessions(
                f"tenant {tenant!r} has {num_own} sessions; at most {MAX_SESSIONS_OF_TENANT} of a tenant and {MAX_SESSIONS} "
                "of all are kept: delete some (shoal sessions list, shoal sessions delete)",
                field="session_id",
            )

    def _remember(self, key: SessionKey, packed: bytes) -> None:
        self._memory[key] = packed
        self._memory.move_to_end(key)
        self._known.setdefault(key.tenant, set()).add(key.session_id)
        self._forget_some()

    def _forget_some(self) -> None:
        """With Redis, keep no more in memory than the sessions used last and those that nobody else has."""
        excess = len(self._memory) - MAX_REMEMBERED if self._link is not None else 0
        for key in [key for key in self._memory if key not in self._unsaved][: max(excess, 0)]:
            del self._memory[key]

    def check_invariants(self) -> None:
        """Assert the invariants of the class."""
        known = {SessionKey(tenant, one) for tenant, ids in self._known.items() for one in ids}
        assert self._unsaved <= self._memory.keys() <= known
        if self._link is None:
            assert not self._unsaved
            assert self._memory.keys() == known


def _record_key(key: SessionKey) -> bytes:
    return session_key(key.tenant, key.session_id)


def _readable(key: SessionKey, packed: bytes | None) -> Session | None:
    try:
        return None if packed is None else unpack(key, packed)
    except InvalidRequest:
        return None


def _used_at(key: SessionKey, packed: bytes | None) -> float:
    """Before all times for what is not there or damaged."""
    session = _readable(key, packed)
    return -math.inf if session is None else session.used_at


def _unavailable(what: str) -> SessionUnavailable:
    return SessionUnavailable(f"{what}: Redis, where sessions are kept, does not answer now", retry_after_s=RETRY_S)
