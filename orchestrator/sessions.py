"""Conversations that are kept between requests: in a file in the orchestrator's home, and in Redis where there is one.

Owns which record of a session counts, who of them has a turn that is being answered, and how many there may be. Each turn
is written to both homes; where they differ, the record with more turns counts, and the other home gets it. So a home may be
away, from the start on, without a request being refused. Knows no engine and no text. Called by `conversations`.
"""

from __future__ import annotations

import time
from asyncio import Lock
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from orchestrator.conversation import Session, SessionKey, newest, readable, unpack
from orchestrator.session_homes import FileHome, RedisHome, SessionHome
from shoal.errors import InvalidRequest, SessionBusy, SessionNotFound, SessionUnavailable, TooManySessions
from shoal.kv import BlockHash

# Bound what clients can make the orchestrator keep; a session takes about five bytes a token.
MAX_SESSIONS_OF_TENANT = 1000
MAX_SESSIONS = 10_000
# Of sessions that a home has too; they serve when it is away.
MAX_REMEMBERED = 256
RETRY_S = 2.0
# Records that are asked for at once: a few hundred kilobytes.
_BATCH = 32


@dataclass(slots=True)
class _Copies:
    """What a home has. lacking: sessions of which it has no record, or an old one, as far as is known."""

    home: SessionHome
    lacking: set[SessionKey] = field(default_factory=set)


class SessionStore:
    """The sessions of one model.

    Invariants: what every home lacks is in memory; without homes all sessions are. What is in memory is known, unless it
    is deleted. At most one turn of a session is under way.
    """

    def __init__(
        self,
        file: FileHome | None,
        redis: RedisHome | None,
        model_digest: str,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """clock: seconds of the wall clock, which a restart does not set back."""
        self._file = file
        self._redis = redis
        self._copies = [_Copies(home) for home in (file, redis) if home is not None]
        self._model_digest = model_digest
        self._ttl_s = ttl_s
        self._clock = clock
        self._busy: set[SessionKey] = set()
        # The session used last is last.
        self._memory: OrderedDict[SessionKey, bytes] = OrderedDict()
        # Those in memory that are deleted, of which somebody does not know yet.
        self._deleted: set[SessionKey] = set()
        self._known: dict[str, set[str]] = {}
        # Whether all homes answered at the last look, and at any.
        self._is_whole = self._was_whole = False
        self._writing = Lock()

    @property
    def num_unsaved(self) -> int:
        """Sessions that no home has taken yet."""
        return len(self._unsaved())

    def now(self) -> float:
        return self._clock()

    # Turns

    async def begin(self, key: SessionKey) -> Session:
        """Take a session for a turn, until `release`; one that is not there begins now.

        Raises SessionBusy, TooManySessions, InvalidRequest for a session of another model, and SessionUnavailable if there
        are homes, but none that can be asked.
        """
        with self._taken(key) as undo:
            packed = await self._find(key)
            session = self.blank(key) if packed is None else unpack(key, packed)
            if session.is_deleted:
                await self._check_room(key.tenant)
                session = replace(self.blank(key), life=session.life)
            if session.model_digest != self._model_digest:
                raise InvalidRequest(
                    "session_id", f"{key.session_id!r} was held with another model; delete it or take another id"
                )
            undo.pop_all()
        return session

    async def peek(self, key: SessionKey) -> Session | None:
        """A session as it is now, whoever is at work on it; None if there is none to go on with, or none can be had now."""
        try:
            session = readable(key, await self._find(key))
        except SessionUnavailable:
            return None
        if session is None or session.is_deleted or session.model_digest != self._model_digest:
            return None
        return session if session.expires_at > self._clock() else None

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
        """Take over what a session has become, in memory; `write` brings it to its homes."""
        for copies in self._copies:
            copies.lacking.add(session.key)
        self._remember(session.key, session.pack())

    async def write(self, key: SessionKey) -> bool:
        """Write a session where it is lacking; False if a home is away: `tend` tries again."""
        async with self._writing:
            return await self._bring(key, self._copies)

    # Listing, deleting, and what time brings

    async def sessions(self, tenant: str) -> list[Session]:
        """All sessions of a tenant that can be read, by id. Raises SessionUnavailable as begin does."""
        if not await self._refresh([tenant]):
            raise _unavailable("sessions cannot be listed")
        keys = [SessionKey(tenant, session_id) for session_id in sorted(self._known.get(tenant, ()))]
        return [session for session in await self._read(keys) if not session.is_deleted]

    async def take(self, key: SessionKey) -> Session:
        """Take a session to delete it, until `release`; of a damaged one nothing but the key is known.

        Raises SessionNotFound, SessionBusy, SessionUnavailable.
        """
        with self._taken(key) as undo:
            packed = await self._find(key)
            session = readable(key, packed)
            if packed is None or (session is not None and session.is_deleted):
                raise SessionNotFound(f"tenant {key.tenant!r} has no session {key.session_id!r}", field="session_id")
            undo.pop_all()
        return session or self.blank(key)

    async def delete(self, session: Session, blocks: Sequence[BlockHash] = ()) -> Session:
        """Forget a session; a home that is away does so when it is back, also if that is after a restart.

        blocks: those that are still to be deleted. Returns what is left of it. Raises SessionUnavailable if nobody could
        remember that it is deleted: then it is not.
        """
        deleted = replace(self.blank(session.key), life=session.life + 1, blocks=tuple(blocks))
        before = self._memory.get(session.key)
        self.keep(deleted)
        await self.write(session.key)
        if session.key in self._unsaved() and self._copies:
            self._forget(session.key)
            if before is not None:
                self._remember(session.key, before)
            raise _unavailable(f"session {session.key.session_id!r} cannot be deleted")
        return deleted

    async def deletions(self) -> list[Session]:
        """Deleted sessions of which Redis, if it is there, may still have something."""
        if self._redis is None or self._file is None or not self._is_whole:
            return []
        keys = [key for key in await self._file.deletions(self._clock()) or () if key not in self._busy]
        deleted = [session for session in await self._read(keys) if session.is_deleted]
        for session in deleted:
            self._remember(session.key, session.pack())
        return deleted

    async def tend(self) -> None:
        """Write what is lacking where, and learn which sessions there are, from the homes that are not away."""
        for copies in self._copies:
            for key in sorted(copies.lacking):
                async with self._writing:
                    if not await self._bring(key, [copies]):
                        break
        tenants = [await copies.home.tenants() for copies in self._copies]
        is_known = await self._refresh(set[str]().union(*(known for known in tenants if known is not None)))
        before, self._is_whole = self._is_whole, is_known and None not in tenants
        self._was_whole |= self._is_whole
        if self._is_whole and not before:
            # What either of them lacks is written next time.
            await self._read(self._all_keys())

    async def expired(self) -> list[SessionKey]:
        """Sessions whose time is over and that have no turn under way; reads them all. Raises SessionUnavailable."""
        now = self._clock()
        return [
            one.key
            for one in await self._read(self._all_keys())
            if one.expires_at <= now and not one.is_deleted and one.key not in self._busy
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

    # Records

    async def _find(self, key: SessionKey) -> bytes | None:
        """The newest record of a session, None if there is none; raises SessionUnavailable if that cannot be told."""
        found = (await self._records([key])).get(key)
        if found is not None:
            self._remember(key, found)
        return found

    async def _read(self, keys: Sequence[SessionKey]) -> list[Session]:
        """Read many sessions, without those that are not there or damaged. Raises SessionUnavailable."""
        sessions: list[Session] = []
        for start in range(0, len(keys), _BATCH):
            records = await self._records(keys[start : start + _BATCH])
            found = (readable(key, record) for key, record in records.items())
            sessions.extend(session for session in found if session is not None)
        return sessions

    async def _records(self, keys: Sequence[SessionKey]) -> dict[SessionKey, bytes]:
        """The newest records of sessions, by key in the order given; learns which home lacks them."""
        answers = [(copies, await copies.home.get(keys)) for copies in self._copies]
        is_told = not answers or any(held is not None for _, held in answers)
        found: dict[SessionKey, bytes] = {}
        for key in keys:
            in_memory = self._memory.get(key)
            if in_memory is None and not is_told and not self._is_new(key):
                raise _unavailable(f"session {key.session_id!r} cannot be looked up")
            record = newest(key, [in_memory, *(held.get(key) for _, held in answers if held is not None)])
            if record is None:
                continue
            found[key] = record
            for copies, held in answers:
                if held is not None:
                    is_same = self._is_there(copies, key, record, held.get(key))
                    (copies.lacking.discard if is_same else copies.lacking.add)(key)
        return found

    def _is_new(self, key: SessionKey) -> bool:
        """Whether there is no such session for certain, though no home answers now."""
        return self._was_whole and key.session_id not in self._known.get(key.tenant, ())

    def _is_there(self, copies: _Copies, key: SessionKey, record: bytes, stored: bytes | None) -> bool:
        """Whether a home has a record, of a deleted session in its own way."""
        if stored is None and copies.home is self._redis:
            session = readable(key, record)
            return session is not None and session.is_deleted
        return stored == record

    async def _bring(self, key: SessionKey, to: Sequence[_Copies]) -> bool:
        """Give homes the newest record of a session, where they lack it; False if one did not take it."""
        try:
            # A home that was away may turn out to have a newer one than we.
            record = (await self._records([key])).get(key)
        except SessionUnavailable:
            return False
        session = readable(key, record)
        if record is None or session is None:
            return True
        self._remember(key, record)
        for copies in to:
            # All of them, whatever becomes of one.
            if key in copies.lacking and await copies.home.put(session) and self._memory.get(key) == record:
                copies.lacking.discard(key)
        await self._forget_deleted(session)
        self._forget_some()
        return not any(key in copies.lacking for copies in to)

    async def _forget_deleted(self, session: Session) -> None:
        """Forget that a session was deleted, once nobody has anything of it any more."""
        key = session.key
        if not session.is_deleted or any(key in copies.lacking for copies in self._copies):
            return
        is_over = self._redis is not None and not session.blocks
        if is_over and self._file is not None and not await self._file.forget(key):
            return
        if key in self._deleted:
            self._forget(key)

    async def _refresh(self, tenants: Iterable[str]) -> bool:
        """Learn the ids of these tenants' sessions; False if there are homes, but none that can be asked."""
        for tenant in tenants:
            answers = [await copies.home.session_ids(tenant) for copies in self._copies]
            told = [ids for ids in answers if ids is not None]
            if answers and not told:
                return False
            ids = set[str]().union(*told)
            # What one home knows is not unknown while another is away.
            ids |= self._known.get(tenant, set()) if len(told) < len(answers) else set()
            ids.update(key.session_id for key in self._memory if key.tenant == tenant)
            ids.difference_update(key.session_id for key in self._deleted if key.tenant == tenant)
            self._known[tenant] = ids
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
        session = readable(key, packed)
        is_deleted = session is not None and session.is_deleted
        known = self._known.setdefault(key.tenant, set())
        (known.discard if is_deleted else known.add)(key.session_id)
        (self._deleted.add if is_deleted else self._deleted.discard)(key)
        self._forget_some()

    def _forget(self, key: SessionKey) -> None:
        """Have a session in memory no more."""
        del self._memory[key]
        self._deleted.discard(key)

    def _all_keys(self) -> list[SessionKey]:
        return [SessionKey(tenant, one) for tenant, ids in sorted(self._known.items()) for one in sorted(ids)]

    def _unsaved(self) -> set[SessionKey]:
        return set.intersection(*(copies.lacking for copies in self._copies)) if self._copies else set()

    def _forget_some(self) -> None:
        """With homes, keep no more in memory than the sessions used last and those that nobody else has."""
        excess = len(self._memory) - MAX_REMEMBERED if self._copies else 0
        if excess > 0:
            unsaved = self._unsaved()
            for key in [key for key in self._memory if key not in unsaved][:excess]:
                self._forget(key)

    def check_invariants(self) -> None:
        """Assert the invariants of the class."""
        known = {SessionKey(tenant, one) for tenant, ids in self._known.items() for one in ids}
        deleted = {key for key, one in self._memory.items() if (session := readable(key, one)) and session.is_deleted}
        assert self._deleted == deleted
        assert self._unsaved() <= self._memory.keys() <= known | deleted
        assert self._copies or self._memory.keys() == known
        assert not known & deleted


def _unavailable(what: str) -> SessionUnavailable:
    return SessionUnavailable(f"{what}: nowhere where sessions are kept is there an answer now", retry_after_s=RETRY_S)
