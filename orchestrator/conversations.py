"""The life of sessions: a turn begins and ends, its conversation is settled, and what nobody wants any more is deleted.

What a turn leaves: the prompt and those answer tokens that were handed to the client's stream, without a final stop token,
if the answer ended well, at its length, or because the client left; a turn that ended by an error, or before its first
token, did not happen. Stores through `sessions`, computes through `warming`. Called by `server`; `app` has it tend itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.block_names import BlockNames
from orchestrator.catalogue import Catalogue
from orchestrator.conversation import Session, SessionKey
from orchestrator.core.sequence import Sequence as AnswerSequence
from orchestrator.engine import Engine
from orchestrator.likely_prefixes import LikelyPrefixes
from orchestrator.sessions import SessionStore
from orchestrator.warming import KVPrompt, Warmer
from shoal.errors import SessionUnavailable, ShoalError
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import FinishReason, KVReuse

logger = logging.getLogger(__name__)

# Between two looks at what waits for a home; every so many of them, at what has expired.
TEND_S = 5.0
EXPIRE_EVERY = 120


@dataclass(slots=True)
class Turn:
    """A turn under way. session: as it was before; is_over: it has left what it leaves."""

    session: Session
    is_over: bool = False

    @property
    def key(self) -> SessionKey:
        return self.session.key


@dataclass(frozen=True, slots=True)
class Deletion:
    """Blocks that went with a session, and those that others go on using."""

    num_deleted: int
    num_shared: int


class Conversations:
    """Invariant: a turn holds its session until `end` or `leave`, one of which is called for each."""

    def __init__(
        self,
        store: SessionStore,
        names: BlockNames,
        catalogue: Catalogue,
        engine: Engine,
        warmer: Warmer,
        likely: LikelyPrefixes,
    ) -> None:
        self._store = store
        self._names = names
        self._catalogue = catalogue
        self._engine = engine
        self._warmer = warmer
        self._likely = likely
        self._saving: set[asyncio.Task[None]] = set()

    # Turns

    async def begin(self, key: SessionKey) -> Turn:
        """Take a session for a turn. Raises what SessionStore.begin does."""
        self._warmer.abort_settling(key)
        session = await self._store.begin(key)
        turn = Turn(session)
        with contextlib.ExitStack() as undo:
            # Also if the client leaves meanwhile.
            undo.callback(self.leave, turn)
            if session.expires_at <= self._store.now():
                turn.session, _ = await self._erase(session)
            undo.pop_all()
        return turn

    async def history(self, key: SessionKey) -> tuple[int, ...]:
        """The tokens of a session so far; none if there is no such session, or nobody who could tell answers."""
        session = await self._store.peek(key)
        return () if session is None else session.token_ids

    def leave(self, turn: Turn) -> None:
        """Give up a turn that leaves nothing; harmless if it is over."""
        if not turn.is_over:
            turn.is_over = True
            self._store.release(turn.key)

    def end(
        self, turn: Turn, sequence: AnswerSequence, answer_token_ids: Sequence[int], why: FinishReason
    ) -> asyncio.Task[None]:
        """Take over what a turn leaves; the next one may begin at once. The task ends when all is written that can be."""
        answer = tuple(answer_token_ids)
        if why is FinishReason.STOP and answer and answer[-1] in sequence.stop_ids:
            answer = answer[:-1]
        session = self._store.used(turn.session)
        session = replace(
            session,
            token_ids=sequence.prompt_token_ids + answer,
            num_turns=session.num_turns + 1,
            blocks=session.blocks if sequence.kv_reuse is KVReuse.NONE else sequence.block_hashes,
        )
        self._store.keep(session)
        self.leave(turn)
        # A session that left out a part of itself is named anew from there on.
        kept = set(session.blocks)
        left_out = [block for block in turn.session.blocks if block not in kept]
        task = asyncio.create_task(self._save(session, left_out, sequence.kv_reuse))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        return task

    async def _save(self, session: Session, left_out: Sequence[BlockHash], kv_reuse: KVReuse) -> None:
        await self._store.write(session.key)
        if left_out:
            with contextlib.suppress(SessionUnavailable):
                # Those that cannot be deleted now go with their TTL.
                await self._erase_blocks(session.key, left_out)
        if kv_reuse is not KVReuse.NONE:
            self._settle(session, kv_reuse)

    def _settle(self, session: Session, kv_reuse: KVReuse) -> None:
        num_tokens = len(session.token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        has_more = num_tokens > len(session.blocks) * BLOCK_TOKENS
        if not (has_more and self._store.is_newest(session) and self._engine.keeps_blocks):
            return
        token_ids = session.token_ids[:num_tokens]
        blocks = self._names.names(session.key.tenant, token_ids)

        async def note_blocks() -> None:
            if self._store.is_newest(session):
                self._store.keep(replace(session, blocks=blocks))
                await self._store.write(session.key)

        self._warmer.settle(session.key, KVPrompt(session.key.tenant, token_ids, blocks, kv_reuse), note_blocks)

    # What operators want

    def now(self) -> float:
        """By the clock of the sessions' times."""
        return self._store.now()

    async def sessions(self, tenant: str) -> list[Session]:
        """Those of a tenant whose time is not over. Raises SessionUnavailable."""
        now = self._store.now()
        return [session for session in await self._store.sessions(tenant) if session.expires_at > now]

    async def delete(self, key: SessionKey) -> Deletion:
        """Delete a session, and its blocks that no other one has. Raises what SessionStore.take and delete do."""
        self._warmer.abort_settling(key)
        session = await self._store.take(key)
        try:
            _, deletion = await self._erase(session)
        finally:
            self._store.release(key)
        return deletion

    async def _erase(self, session: Session) -> tuple[Session, Deletion]:
        """Delete a session and its blocks; what Redis has of them as soon as it is there, see `tend`.

        Blocks first: a session that is gone does not know them any more. Returns what is left of the session.
        """
        key, num_blocks = session.key, len(session.blocks)
        own, are_erased = await self._erase_blocks(key, session.blocks)
        left = await self._store.delete(session, () if are_erased else own)
        logger.info("session_deleted session=%r tenant=%r blocks=%d", key.session_id, key.tenant, len(own))
        return left, Deletion(len(own), num_blocks - len(own))

    async def _erase_blocks(self, key: SessionKey, blocks: Sequence[BlockHash]) -> tuple[list[BlockHash], bool]:
        """Delete those blocks of a session that nobody else has; which they are, and whether no home has them any more.

        Raises SessionUnavailable if it cannot be told who else has them.
        """
        others = await self._store.sessions(key.tenant)
        shared = {block for other in others if other.key != key for block in other.blocks}
        own = [block for block in blocks if not self._is_shared(block, shared)]
        self._engine.forget_blocks(own)
        self._likely.forget(key.tenant, own)
        return own, self._catalogue.has_redis and await self._catalogue.delete(own)

    def _is_shared(self, block: BlockHash, of_others: set[BlockHash]) -> bool:
        return block in of_others or self._names.is_public(block) or self._warmer.is_pinned(block)

    # What time brings

    async def watch(self) -> None:
        """Keep what is stored in step and delete what has expired, until cancelled."""
        for count in itertools.count():
            await self.tend(is_expiring=count % EXPIRE_EVERY == 0)
            await asyncio.sleep(TEND_S)

    async def tend(self, *, is_expiring: bool) -> None:
        """Write what waits for a home; is_expiring: delete sessions whose time is over."""
        await self._names.tend()
        try:
            await self._store.tend()
            for session in await self._store.deletions():
                await self._go_on_deleting(session)
            for key in await self._store.expired() if is_expiring else ():
                await self.delete(key)
        except ShoalError as error:
            # No home answers, or a turn began meanwhile: the next look will tell.
            logger.info("sessions_not_tended reason=%s", error.reason)

    async def _go_on_deleting(self, session: Session) -> None:
        """Delete what Redis, which was away, still has of a deleted session."""
        _, are_erased = await self._erase_blocks(session.key, session.blocks)
        if are_erased and self._store.is_newest(session):
            self._store.keep(replace(session, blocks=()))
            await self._store.write(session.key)

    async def stop(self) -> None:
        """Settle no more, and wait until what was said is written, as far as its homes take it."""
        await self._warmer.stop()
        await asyncio.gather(*self._saving)
        with contextlib.suppress(SessionUnavailable):
            await self._store.tend()
        if self._store.num_unsaved:
            logger.warning("sessions_lost count=%d: neither file nor Redis took them", self._store.num_unsaved)
