"""Who reads an answer, what is kept of it when nobody does, and how it is gone on with, here or by the next orchestrator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import served as module
from orchestrator.conversations import Turn
from orchestrator.journal import Journal
from orchestrator.served import KEPT_S, RECENT_S, UNCLAIMED_S, Served, ServedRequests
from shoal.errors import DeadlineExceeded, NotReady, RequestNotFound, SessionBusy, ShoalError, WorkerLost
from shoal.types import FinishReason
from tests.support.builders import make_sequence
from tests.support.conversations import KEY, TURNS, make_parts
from tests.support.fake_link import FakeLink
from tests.support.lanes import LOST, P1, expected_answer

NAME = b"n" * 16
WALL_S = 5000.0
NUM_PROMPT, NUM_TOKENS = 8, 12
ANSWER = expected_answer(NUM_PROMPT, NUM_TOKENS)


class Orchestrator:
    """One with a pipeline, whose stages compute when they are told to. now: by the clock of this process."""

    def __init__(self, link: FakeLink | None = None, now: float = 0.0) -> None:
        self.parts = make_parts(link)
        self.engine = self.parts.harness.engine
        self.now = now
        self.journal = Journal(self.parts.link, NAME, lambda: WALL_S + self.now)
        self.served = ServedRequests(
            self.engine, self.journal, self.parts.conversations, self.parts.names,
            lambda: self.now, lambda: WALL_S + self.now,
        )  # fmt: skip

    def accept(self, request_id: str = "r", *, turn: Turn | None = None, **fields: Any) -> Served:
        sequence = make_sequence(self.engine.new_sequence_id(), num_prompt=NUM_PROMPT, max_tokens=NUM_TOKENS)
        sequence = replace(sequence, **fields)
        if turn is not None:
            sequence.prompt_token_ids = turn.session.token_ids + sequence.prompt_token_ids
        return self.served.add(self.engine.submit(sequence, request_id), request_id, (), turn=turn)

    def read(self, served: Served, num_known: int = 0) -> Reader:
        return Reader(self, served, num_known)

    def compute(self, num_frames: int = 1000) -> None:
        self.parts.harness.p1.compute(num_frames)

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        self.served.check_invariants()
        self.engine.check_invariants()

    async def killed(self) -> Orchestrator:
        """The next one, which finds what was written of this one's requests."""
        await self.journal.stop()
        following = Orchestrator(self.parts.link, self.now)
        await following.served.load()
        following.served.check_invariants()
        return following


class Reader:
    """A stream as the server has it, without its text; token_ids: those that its client got."""

    def __init__(self, orchestrator: Orchestrator, served: Served, num_known: int) -> None:
        self._served = orchestrator.served
        self._request = served
        self._num_known = num_known
        self.token_ids: list[int] = []
        self.finish: FinishReason | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        served, request = self._served, self._request
        try:
            await served.claim(request)
            await served.revive(request)
            index = 0
            while self.finish is None:
                event = await served.token(request, index)
                index += 1
                if event.finish is not None:
                    served.complete(request, index, event.finish, b"said")
                if index > self._num_known:
                    self.token_ids.append(event.token_id)
                    request.num_sent = max(request.num_sent, index)
                self.finish = event.finish
            served.end_turn(request)
        except ShoalError as error:
            served.fail(request, error)
            raise
        finally:
            served.release(request)

    async def got(self, num_tokens: int) -> None:
        """Wait until so many tokens have come."""
        async with asyncio.timeout(5.0):
            while len(self.token_ids) < num_tokens:
                await asyncio.sleep(0)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def error(self) -> ShoalError:
        with pytest.raises(ShoalError) as raised:
            await asyncio.wait_for(self.task, 5.0)
        return raised.value


async def begun(orchestrator: Orchestrator, num_tokens: int = 3, **fields: Any) -> tuple[Served, Reader]:
    """A request whose client has got so many tokens of it."""
    request = orchestrator.accept(**fields)
    reader = orchestrator.read(request)
    async with asyncio.timeout(5.0):
        while len(reader.token_ids) < num_tokens:
            orchestrator.compute(1)
            await asyncio.sleep(0)
    return request, reader


async def test_an_answer_is_read_to_its_end() -> None:
    orchestrator = Orchestrator()
    reader = orchestrator.read(orchestrator.accept())
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()

    assert (reader.token_ids, reader.finish) == (ANSWER, FinishReason.LENGTH)


async def test_another_stream_takes_over_without_a_token_lost_or_doubled() -> None:
    orchestrator = Orchestrator()
    request, first = await begun(orchestrator)
    second = orchestrator.read(request, len(first.token_ids))
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()

    assert first.task.cancelled()
    assert first.token_ids + second.token_ids == ANSWER


async def test_of_two_streams_that_take_over_at_once_the_last_has_the_answer() -> None:
    orchestrator = Orchestrator()
    request, first = await begun(orchestrator)
    second, third = (orchestrator.read(request, len(first.token_ids)) for _ in range(2))
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()

    assert second.task.cancelled()
    assert first.token_ids + third.token_ids == ANSWER


async def test_an_answer_whose_client_leaves_is_computed_no_more() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun(orchestrator)
    await reader.leave()
    await orchestrator.settle()

    assert orchestrator.engine.is_idle


async def test_who_left_may_come_back_for_the_rest() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun(orchestrator)
    await reader.leave()
    orchestrator.now += KEPT_S - 1
    orchestrator.served.tend()

    again = orchestrator.read(orchestrator.served.find("default", "r"), len(reader.token_ids))
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()

    assert reader.token_ids + again.token_ids == ANSWER


async def test_a_complete_answer_can_be_fetched_again() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun(orchestrator, NUM_TOKENS)
    await orchestrator.settle()
    again = orchestrator.read(request, NUM_TOKENS - 2)
    await orchestrator.settle()

    assert (reader.finish, again.token_ids, again.finish) == (FinishReason.LENGTH, ANSWER[-2:], FinishReason.LENGTH)
    assert request.log.finished == b"said"


async def test_what_nobody_comes_back_for_is_forgotten_everywhere() -> None:
    orchestrator = await Orchestrator().killed()
    _, reader = await begun(orchestrator)
    await reader.leave()
    orchestrator.now += KEPT_S
    orchestrator.served.tend()
    orchestrator.served.check_invariants()
    await orchestrator.journal.stop()

    with pytest.raises(RequestNotFound):
        orchestrator.served.find("default", "r")
    assert orchestrator.parts.link.hashes == {}


async def test_a_request_of_another_tenant_is_not_found_and_not_told_from_none() -> None:
    orchestrator = await Orchestrator().killed()
    orchestrator.accept(tenant="gold")

    assert orchestrator.served.find("gold", "r").record.tenant == "gold"
    messages = []
    for tenant, request_id in (("default", "r"), ("default", "s")):
        with pytest.raises(RequestNotFound) as raised:
            orchestrator.served.find(tenant, request_id)
        messages.append(raised.value.message.replace("'s'", "'r'"))
    assert messages[0] == messages[1]


async def test_a_newer_request_of_the_same_id_is_the_one_that_is_found() -> None:
    orchestrator = Orchestrator()
    older, reader = await begun(orchestrator)
    newer = orchestrator.accept()

    assert orchestrator.served.find("default", "r") is newer
    await reader.leave()
    orchestrator.now += KEPT_S
    orchestrator.served.tend()
    assert orchestrator.served.find("default", "r") is newer
    assert older.answer is None


async def test_of_two_requests_of_an_id_the_next_orchestrator_knows_the_newer_one() -> None:
    before = Orchestrator()
    await begun(before)
    before.now = 1.0
    newer, _ = await begun(before, arrived_at=1.0)
    orchestrator = await before.killed()
    await orchestrator.journal.stop()

    assert orchestrator.served.find("default", "r").record.record_id == newer.record.record_id
    assert len(orchestrator.parts.link.hashes) == 1


async def test_the_error_that_ended_an_answer_is_told_to_who_comes_back() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun(orchestrator)
    orchestrator.engine.pipeline_down(P1, LOST, is_final=True)

    assert await reader.error() is LOST
    assert isinstance(await orchestrator.read(request).error(), WorkerLost)
    await orchestrator.journal.stop()
    assert orchestrator.parts.link.hashes == {}


async def test_the_next_orchestrator_goes_on_before_anybody_asks() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    orchestrator = await before.killed()
    assert orchestrator.engine.num_running + orchestrator.engine.num_waiting == 1
    orchestrator.compute()

    again = orchestrator.read(orchestrator.served.find("default", "r"), len(reader.token_ids))
    await orchestrator.settle()

    assert reader.token_ids + again.token_ids == ANSWER


async def test_a_client_that_knows_more_than_the_journal_gets_what_follows() -> None:
    before = Orchestrator()
    _, reader = await begun(before, 3)
    await before.journal.stop()
    for _ in range(20):
        before.compute(1)
        await asyncio.sleep(0)
    known = len(reader.token_ids)
    assert known > 3
    following = Orchestrator(before.parts.link)
    await following.served.load()
    request = following.served.find("default", "r")
    assert len(request.log.token_ids) < known

    again = following.read(request, known)
    await following.settle()
    following.compute()
    await following.settle()

    assert reader.token_ids + again.token_ids == ANSWER


async def test_what_the_next_orchestrator_goes_on_with_in_vain_ends() -> None:
    before = Orchestrator()
    await begun(before)
    orchestrator = await before.killed()
    orchestrator.now += UNCLAIMED_S
    orchestrator.served.tend()
    await orchestrator.settle()

    assert orchestrator.engine.is_idle
    assert orchestrator.served.find("default", "r").log.is_left


async def test_an_answer_whose_client_had_left_waits_for_it_at_the_next_orchestrator() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    await reader.leave()
    orchestrator = await before.killed()
    assert orchestrator.engine.is_idle

    again = orchestrator.read(orchestrator.served.find("default", "r"), len(reader.token_ids))
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()

    assert reader.token_ids + again.token_ids == ANSWER


async def test_an_orchestrator_that_was_away_for_long_computes_only_what_is_asked_for() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    await before.journal.stop()
    before.now += RECENT_S + 1
    orchestrator = Orchestrator(before.parts.link, before.now)
    await orchestrator.served.load()

    assert orchestrator.engine.is_idle
    again = orchestrator.read(orchestrator.served.find("default", "r"), len(reader.token_ids))
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()
    assert reader.token_ids + again.token_ids == ANSWER


async def test_an_answer_that_was_complete_when_it_was_found_is_not_computed_on() -> None:
    before = Orchestrator()
    request, _ = await begun(before, NUM_TOKENS)
    request.log.finish, request.log.finished = None, b""
    orchestrator = await before.killed()

    assert orchestrator.engine.is_idle
    again = orchestrator.read(orchestrator.served.find("default", "r"), 1)
    await orchestrator.settle()
    assert (again.token_ids, again.finish) == (ANSWER[1:], FinishReason.LENGTH)


async def test_what_was_sampled_beyond_a_stop_string_is_no_part_of_the_answer() -> None:
    orchestrator = Orchestrator()
    request, _ = await begun(orchestrator, 5)

    orchestrator.served.complete(request, 2, FinishReason.STOP, b"said")
    orchestrator.served.check_invariants()

    assert (request.log.token_ids, request.log.finish) == (ANSWER[:2], FinishReason.STOP)


async def test_a_deadline_goes_on_while_there_is_no_orchestrator() -> None:
    before = Orchestrator()
    await begun(before, deadline_at=100.0)
    before.now = 50.0
    in_time = await before.killed()
    before.now = 100.0
    too_late = await before.killed()

    assert in_time.served.find("default", "r").answer is not None
    assert isinstance(await too_late.read(too_late.served.find("default", "r")).error(), DeadlineExceeded)


async def test_while_the_journal_cannot_be_read_nobody_is_told_that_there_is_no_request() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    await before.journal.stop()
    before.parts.link.is_away = True
    orchestrator = Orchestrator(before.parts.link)
    await orchestrator.served.load()
    with pytest.raises(NotReady):
        orchestrator.served.find("default", "r")

    before.parts.link.is_away = False
    await orchestrator.served.load()
    again = orchestrator.read(orchestrator.served.find("default", "r"), len(reader.token_ids))
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()

    assert reader.token_ids + again.token_ids == ANSWER


async def test_an_orchestrator_that_ends_leaves_its_answers_to_the_next() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    before.served.close()
    before.engine.pipeline_down(P1, NotReady("this orchestrator has shut down"), is_final=True)
    assert isinstance(await reader.error(), NotReady)
    orchestrator = await before.killed()

    assert orchestrator.served.find("default", "r").answer is not None


async def test_the_longest_idle_are_forgotten_for_those_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_TOKENS", 3 * NUM_PROMPT)
    orchestrator = await Orchestrator().killed()
    for request_id in ("a", "b", "c"):
        reader = orchestrator.read(orchestrator.accept(request_id))
        await orchestrator.settle()
        orchestrator.compute()
        await orchestrator.settle()
        assert reader.finish is not None

    assert orchestrator.served.find("default", "c")
    for forgotten in ("a", "b"):
        with pytest.raises(RequestNotFound):
            orchestrator.served.find("default", forgotten)


# Turns of sessions


async def begun_turn(orchestrator: Orchestrator, num_tokens: int = 3) -> tuple[Served, Reader]:
    turn = await orchestrator.parts.conversations.begin(KEY)
    return await begun(orchestrator, num_tokens, turn=turn, tenant=KEY.tenant)


async def finish(orchestrator: Orchestrator, num_known: int) -> Reader:
    orchestrator.parts.now += 1
    again = orchestrator.read(orchestrator.served.find(KEY.tenant, "r"), num_known)
    await orchestrator.settle()
    orchestrator.compute()
    await orchestrator.settle()
    assert again.finish is FinishReason.LENGTH
    return again


def whole(orchestrator: Orchestrator) -> tuple[int, ...]:
    """Of a session whose first turn this was."""
    return (*make_sequence(num_prompt=NUM_PROMPT).prompt_token_ids, *ANSWER)


async def test_a_client_that_leaves_has_left_what_it_got_to_its_session() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun_turn(orchestrator)
    await reader.leave()

    session = await orchestrator.parts.look()
    assert session.token_ids == (*whole(orchestrator)[:NUM_PROMPT], *reader.token_ids)


async def test_a_turn_that_is_gone_on_with_is_one_turn_and_whole() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun_turn(orchestrator)
    await reader.leave()
    await finish(orchestrator, len(reader.token_ids))

    session = await orchestrator.parts.look()
    assert (session.num_turns, session.token_ids) == (1, whole(orchestrator))


async def test_the_next_orchestrator_holds_the_session_until_the_turn_is_over() -> None:
    before = Orchestrator()
    _, reader = await begun_turn(before)
    orchestrator = await before.killed()
    with pytest.raises(SessionBusy):
        await orchestrator.parts.look()
    await finish(orchestrator, len(reader.token_ids))

    session = await orchestrator.parts.look()
    assert (session.num_turns, session.token_ids) == (1, whole(orchestrator))


async def test_a_turn_that_nobody_claims_leaves_what_was_known_of_it() -> None:
    before = Orchestrator()
    _, reader = await begun_turn(before)
    orchestrator = await before.killed()
    orchestrator.now += UNCLAIMED_S
    orchestrator.served.tend()

    session = await orchestrator.parts.look()
    assert session.token_ids == (*whole(orchestrator)[:NUM_PROMPT], *reader.token_ids)


async def test_a_session_that_went_on_is_not_set_back() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun_turn(orchestrator)
    await reader.leave()
    await orchestrator.parts.take_turn(num_new=4)
    expected = await orchestrator.parts.look()

    assert isinstance(await orchestrator.read(request).error(), SessionBusy)
    assert await orchestrator.parts.look() == expected


async def test_a_session_that_was_deleted_does_not_come_back() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun_turn(orchestrator)
    await reader.leave()
    await orchestrator.parts.conversations.delete(KEY)

    assert isinstance(await orchestrator.read(request).error(), SessionBusy)
    assert (await orchestrator.parts.look()).num_turns == 0
