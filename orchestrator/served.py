"""Requests that are being answered, and those whose answer or whose client ended a moment ago: who reads them, who resumes.

A request outlives the stream that asked for it. Its client may come back for the rest, through another stream or to the next
orchestrator, which goes on with what the journal has. Owns what is known of each answer, and its session's turn; knows no
text. Called by `server`; `app` has it load and watch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from orchestrator.answer import Answer, TokenEvent
from orchestrator.block_names import BlockNames
from orchestrator.conversation import SessionKey, unpack
from orchestrator.conversations import Conversations, Turn
from orchestrator.core.sequence import Sequence as AnswerSequence
from orchestrator.core.sequence import SequenceState
from orchestrator.engine import Engine
from orchestrator.journal import Journal
from orchestrator.record import AnswerLog, RequestRecord
from orchestrator.trails import Trails
from shoal.errors import DeadlineExceeded, NotReady, RequestCancelled, RequestNotFound, SessionBusy, ShoalError
from shoal.types import FinishReason, KVReuse

logger = logging.getLogger(__name__)

# A client comes back within seconds, or not at all.
UNCLAIMED_S = 30.0
KEPT_S = 60.0
# An orchestrator that was away for longer than this does not go on by itself with what it finds.
RECENT_S = 60.0
WATCH_S = 1.0
# A stream that is cancelled ends at once; where its connection hangs it has no say any more all the same.
LET_GO_S = 1.0
# Bound what is kept for clients that may come back.
MAX_KEPT_TOKENS = 500_000
RECORD_ID_BYTES = 16


@dataclass(slots=True, eq=False)
class Served:
    """One request.

    answer: None while nobody computes it. turn: of its session. num_sent: answer tokens that a stream took. reader: the task
    of the stream that it goes to; is_awaited: it waits for a token. idle_since: when it last lost its reader. error: what
    who comes back hears of its end.
    """

    record: RequestRecord
    log: AnswerLog
    answer: Answer | None = None
    turn: Turn | None = None
    num_sent: int = 0
    reader: asyncio.Task[Any] | None = None
    idle_since: float = 0.0
    error: ShoalError | None = None
    is_awaited: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.record.tenant, self.record.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.record.prompt_token_ids) + len(self.log.token_ids)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be computed of it."""
        return self.log.finish is not None or self.error is not None


class ServedRequests:
    """See the module.

    Invariants: who has an answer is not over, or has a reader; nobody but the newest request of a tenant is found by its
    id; at most MAX_KEPT_TOKENS are kept of those that have neither reader nor answer.
    """

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        conversations: Conversations,
        names: BlockNames,
        trails: Trails,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._conversations = conversations
        self._names = names
        self._trails = trails
        self._clock = clock
        self._wall_clock = wall_clock
        self._served: dict[bytes, Served] = {}
        self._newest: dict[tuple[str, str], Served] = {}
        # Those with neither reader nor answer, the longest idle first.
        self._kept: OrderedDict[bytes, Served] = OrderedDict()
        self._num_kept_tokens = 0
        self._is_loaded = False
        self._is_closing = False

    # Streams

    def add(
        self, answer: Answer, request_id: str, stops: Sequence[str], *, turn: Turn | None = None, num_dropped: int = 0
    ) -> Served:
        """Take in a request that the engine has taken."""
        record = RequestRecord.of(
            answer.sequence,
            record_id=secrets.token_bytes(RECORD_ID_BYTES),
            request_id=request_id,
            stops=stops,
            wall_s=self._wall_s,
            num_dropped=num_dropped,
            session=b"" if turn is None else turn.session.pack(),
        )
        served = Served(record, AnswerLog(), answer, turn)
        self._put(served)
        self._journal.begin(record, served.log)
        return served

    def find(self, tenant: str, request_id: str) -> Served:
        """A request that can be resumed. Raises RequestNotFound, and NotReady where that cannot be told yet."""
        served = self._newest.get((tenant, request_id))
        if served is not None:
            return served
        if not self._is_loaded:
            raise NotReady("Redis, which may know this request, does not answer yet; try again", retry_after_s=WATCH_S)
        raise RequestNotFound(
            f"tenant {tenant!r} has no request {request_id!r} that can be resumed: it ended more than {KEPT_S:g} s ago, or "
            "never began here; ask again",
            field="request_id",
        )

    async def claim(self, served: Served) -> None:
        """Have an answer go to the stream of this task alone; the one that it went to ends with its next token.

        It is woken if it waits for one, and not disturbed amid a write: a call whose write is cancelled has no status.
        """
        before, served.reader = served.reader, asyncio.current_task()
        self._keep_no_more(served)
        if before is not None:
            if served.is_awaited:
                before.cancel()
            await asyncio.wait({before}, timeout=LET_GO_S)

    def is_reader(self, served: Served) -> bool:
        """Whether the stream of this task is the one."""
        return served.reader is asyncio.current_task()

    async def revive(self, served: Served) -> None:
        """Have an answer computed on, if nobody computes it and it is not complete.

        Raises the error that it ended with, DeadlineExceeded, and for a turn of a session what Conversations.begin does, or
        SessionBusy if it went on without it.
        """
        if served.error is not None:
            raise served.error
        if served.answer is not None or served.log.finish is not None:
            return
        record, log = served.record, served.log
        if record.deadline_at is not None and record.deadline_at <= self._wall_clock():
            raise DeadlineExceeded("the deadline passed while nobody computed this answer; allow more time")
        with ExitStack() as undo:
            turn = await self._take_turn_again(record, log)
            if turn is not None:
                undo.callback(self._conversations.leave, turn)
            if self._is_closing:
                raise NotReady("this orchestrator is shutting down; ask again when it is back", retry_after_s=1.0)
            undo.pop_all()
        has_names = record.kv_reuse is not KVReuse.NONE
        blocks = self._names.names(record.tenant, record.prompt_token_ids) if has_names else ()
        sequence = record.to_sequence(self._engine.new_sequence_id(), log, blocks, wall_s=self._wall_s)
        served.turn, served.num_sent = turn, len(log.token_ids)
        log.is_left, log.num_left = False, 0
        served.answer = self._engine.adopt(sequence, record.request_id, UNCLAIMED_S)
        self._journal.touch(record.record_id)

    async def token(self, served: Served, index: int) -> TokenEvent:
        """The next token of an answer; those that are known come at once. Raises the error that ended it.

        And RequestCancelled if another stream has claimed it.
        """
        log = served.log
        if not self.is_reader(served):
            raise taken_over()
        if index == len(log.token_ids):
            assert served.answer is not None
            served.is_awaited = True
            try:
                event = await served.answer.next()
            finally:
                served.is_awaited = False
            assert event.index == index, f"token {event.index} came, {index} was due"
            log.append(event.token_id, event.logprobs, self._wall_clock())
            self._note(served)
            return event
        is_last = index == len(log.token_ids) - 1
        return TokenEvent(
            index, log.token_ids[index], log.logprobs[index] if log.logprobs else None, log.finish if is_last else None
        )

    def complete(self, served: Served, num_tokens: int, why: FinishReason, finished: bytes) -> None:
        """Note that an answer ends after so many tokens; what is known beyond them is no part of it."""
        log = served.log
        if not log.finished:
            log.cut(num_tokens)
            log.finish, log.finished = why, finished
            self._note(served)
        if served.answer is not None:
            self._abort(served.answer.sequence, why)

    def end_turn(self, served: Served) -> asyncio.Task[None] | None:
        """Leave to a session what its turn has become, nothing if that is no token; the task ends when it is stored."""
        turn, log = served.turn, served.log
        if turn is None or turn.is_over or served.answer is None:
            return None
        token_ids = log.token_ids if log.finish else log.token_ids[: served.num_sent]
        if not token_ids:
            self._conversations.leave(turn)
            return None
        log.num_left = len(token_ids)
        why = log.finish or FinishReason.CANCELLED
        return self._conversations.end(turn, served.answer.sequence, token_ids, why)

    def release(self, served: Served) -> None:
        """The stream of this task has ended: nobody wants the answer, unless another stream has claimed it."""
        if not self.is_reader(served):
            return
        served.reader = None
        served.idle_since = self._clock()
        self._leave(served)

    def fail(self, served: Served, error: ShoalError) -> None:
        """Note the error that ended an answer; nothing if it was complete, or nobody computed it."""
        if served.answer is None or served.is_over:
            return
        if served.turn is not None:
            self._conversations.leave(served.turn)
        if self._is_closing and isinstance(error, NotReady):
            # The next orchestrator goes on with it.
            return
        self._end_trail(served.answer.sequence)
        served.error = _told_again(error)
        self._journal.forget(served.record.record_id)

    # What time brings

    async def load(self) -> None:
        """Go on with what the orchestrator before this one has left, unless Redis is away; then `watch` tries again."""
        entries = await self._journal.load()
        if entries is None:
            return
        self._is_loaded = True
        recent_at = self._wall_clock() - RECENT_S
        num_resumed = 0
        newest = {(entry.record.tenant, entry.record.request_id): entry for entry in entries}
        for record, log in ((entry.record, entry.log) for entry in entries):
            served = Served(record, log, num_sent=len(log.token_ids), idle_since=self._clock())
            if served.key in self._newest or newest[served.key].record is not record:
                # Its id was used anew, maybe since this orchestrator began.
                self._journal.forget(record.record_id)
                continue
            log.finish = log.finish or _finish_of(record, log.token_ids)
            self._put(served)
            self._journal.begin(record, log)
            if not log.is_left and log.written_at > recent_at:
                num_resumed += await self._resume_unclaimed(served)
            self._keep_if_idle(served)
        if entries:
            logger.info("journal_loaded requests=%d resumed=%d", len(entries), num_resumed)

    async def watch(self) -> None:
        """Forget what nobody came for, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._is_loaded:
                await self.load()
            self.tend()

    def tend(self) -> None:
        """End what nobody has claimed for UNCLAIMED_S, and forget what has been kept for KEPT_S."""
        now = self._clock()
        for served in list(self._served.values()):
            if served.reader is None and served.answer is not None and served.idle_since + UNCLAIMED_S <= now:
                logger.info("request_unclaimed request_id=%r", served.record.request_id)
                served.idle_since = now
                self._leave(served)
        while self._kept and next(iter(self._kept.values())).idle_since + KEPT_S <= now:
            self._forget(next(iter(self._kept.values())))

    def close(self) -> None:
        """From now on answers end because this orchestrator does: the next one goes on with them."""
        self._is_closing = True

    @property
    def _wall_s(self) -> float:
        """What the wall clock is ahead of the other one."""
        return self._wall_clock() - self._clock()

    async def _resume_unclaimed(self, served: Served) -> bool:
        """Have it computed on, for its client will come; True if it is."""
        try:
            await self.revive(served)
        except ShoalError as error:
            logger.info("request_not_resumed request_id=%r reason=%s", served.record.request_id, error.reason)
        return served.answer is not None

    async def _take_turn_again(self, record: RequestRecord, log: AnswerLog) -> Turn | None:
        """Begin a turn as it was begun, though its session may have been left what there was of the answer."""
        if not record.session:
            return None
        before = unpack(SessionKey(record.tenant, ""), record.session)
        turn = await self._conversations.begin(before.key)
        now, prompt = turn.session, record.prompt_token_ids
        is_left_by_it = now.num_turns == before.num_turns + 1 and now.token_ids[: len(prompt)] == prompt
        is_as_before = now.token_ids == before.token_ids and not log.num_left
        if now.life != before.life or not (is_left_by_it or is_as_before):
            self._conversations.leave(turn)
            raise SessionBusy(
                f"session {before.key.session_id!r} went on without this turn; ask again", field="session_id"
            )
        if is_left_by_it:
            turn.session = before
        return turn

    def _leave(self, served: Served) -> None:
        """Compute no more of an answer; what there is of it is kept."""
        if served.answer is not None:
            self._abort(served.answer.sequence, served.log.finish or FinishReason.CANCELLED)
            self.end_turn(served)
            if not served.is_over and not self._is_closing:
                served.log.is_left = True
            self._note(served)
            served.answer = None
        self._keep_if_idle(served)

    def _abort(self, sequence: AnswerSequence, why: FinishReason) -> None:
        """End a sequence, if it has not ended; without a slot, what it left is of no use but to the next orchestrator."""
        is_waiting = sequence.state is SequenceState.WAITING
        self._engine.abort(sequence.sequence_id, why)
        if is_waiting and not self._is_closing:
            self._end_trail(sequence)

    def _end_trail(self, sequence: AnswerSequence) -> None:
        """Delete what stages have written of a sequence, if it ever ran, here or with an earlier orchestrator."""
        if sequence.has_started or sequence.output_token_ids:
            self._trails.end(sequence.trail_id)

    def _note(self, served: Served) -> None:
        if served.answer is not None:
            served.log.note(served.answer.sequence)
        self._journal.touch(served.record.record_id)

    def _put(self, served: Served) -> None:
        self._served[served.record.record_id] = served
        self._newest[served.key] = served

    def _keep_if_idle(self, served: Served) -> None:
        if served.reader is None and served.answer is None and served.record.record_id not in self._kept:
            self._kept[served.record.record_id] = served
            self._num_kept_tokens += served.num_tokens
            while self._num_kept_tokens > MAX_KEPT_TOKENS:
                self._forget(next(iter(self._kept.values())))

    def _keep_no_more(self, served: Served) -> None:
        if self._kept.pop(served.record.record_id, None) is not None:
            self._num_kept_tokens -= served.num_tokens

    def _forget(self, served: Served) -> None:
        self._keep_no_more(served)
        del self._served[served.record.record_id]
        if self._newest.get(served.key) is served:
            del self._newest[served.key]
        self._journal.forget(served.record.record_id)

    def check_invariants(self) -> None:
        """Assert the invariants of the class."""
        for served in self._served.values():
            served.log.check_invariants()
            assert served.answer is None or served.reader is not None or not served.is_over
            is_idle = served.reader is None and served.answer is None
            assert is_idle == (served.record.record_id in self._kept), served.record.request_id
        assert all(served.key == key for key, served in self._newest.items())
        assert self._num_kept_tokens == sum(served.num_tokens for served in self._kept.values()) <= MAX_KEPT_TOKENS


def _finish_of(record: RequestRecord, token_ids: Sequence[int]) -> FinishReason | None:
    """Why an answer is at its end with its last token, if it is: for one whose end was not written any more."""
    if token_ids and token_ids[-1] in record.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) >= record.max_tokens else None


def _told_again(error: ShoalError) -> ShoalError:
    """What is said of an answer that ended with an error to whoever asks for the rest of it."""
    if not isinstance(error, NotReady):
        return error
    # NotReady would have its client ask again and again for what cannot come any more.
    return RequestNotFound(f"this request cannot be resumed, for it has ended: {error.message}", field="request_id")


def taken_over() -> RequestCancelled:
    """The end of a stream whose answer another one has claimed."""
    return RequestCancelled("another stream goes on with this answer")
