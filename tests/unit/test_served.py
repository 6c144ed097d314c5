"""Who reads an answer, what is kept of it when nobody does, and how it is gone on with."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import served as module
from orchestrator.served import KEPT_S
from shoal.errors import InvalidRequest, NotReady, RequestCancelled, RequestNotFound, SessionBusy, WorkerLost
from shoal.types import FinishReason
from tests.support.conversations import KEY
from tests.support.lanes import LOST, P1
from tests.support.requests_kept import make_logprobs
from tests.support.served_requests import (
    ANSWER,
    NUM_PROMPT,
    NUM_TOKENS,
    WHOLE,
    Orchestrator,
    begun,
    begun_turn,
    finish_turn,
)


async def test_an_answer_is_read_to_its_end() -> None:
    orchestrator = Orchestrator()
    reader = orchestrator.read(orchestrator.accept())
    await orchestrator.run()

    assert (reader.token_ids, reader.finish) == (ANSWER, FinishReason.LENGTH)


async def test_another_stream_takes_over_without_a_token_lost_or_doubled() -> None:
    orchestrator = Orchestrator()
    request, first = await begun(orchestrator)
    second = orchestrator.read(request, len(first.token_ids))
    await orchestrator.run()

    assert first.task.cancelled()
    assert first.token_ids + second.token_ids == ANSWER


async def test_a_stream_amid_a_write_is_waited_for_and_not_disturbed() -> None:
    orchestrator = Orchestrator()
    request, written = orchestrator.accept(), asyncio.Event()

    async def write() -> None:
        await orchestrator.served.claim(request)
        await written.wait()
        await orchestrator.served.token(request, 0)

    first = asyncio.create_task(write())
    await orchestrator.settle()
    second = orchestrator.read(request)
    await orchestrator.settle()
    assert not request.is_awaited

    written.set()
    with pytest.raises(RequestCancelled):
        await first
    await orchestrator.run()
    assert second.token_ids == ANSWER


async def test_of_two_streams_that_take_over_at_once_the_last_has_the_answer() -> None:
    orchestrator = Orchestrator()
    request, first = await begun(orchestrator)
    second, third = (orchestrator.read(request, len(first.token_ids)) for _ in range(2))
    await orchestrator.run()

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

    again = await orchestrator.resumed(len(reader.token_ids))

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


async def test_the_error_that_ended_an_answer_is_told_to_who_comes_back() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun(orchestrator)
    orchestrator.engine.pipeline_down(P1, LOST, is_final=True)

    assert await reader.error() is LOST
    assert isinstance(await orchestrator.read(request).error(), WorkerLost)
    await orchestrator.journal.stop()
    assert orchestrator.parts.link.hashes == {}


async def test_who_comes_back_is_not_asked_to_try_again_for_an_answer_that_ended_as_nobody_was_ready() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun(orchestrator)
    orchestrator.engine.pipeline_down(P1, NotReady("no device loaded the layers"), is_final=True)

    assert isinstance(await reader.error(), NotReady)
    error = await orchestrator.read(request).error()
    assert isinstance(error, RequestNotFound)
    assert "no device loaded the layers" in error.message
    await orchestrator.journal.stop()
    assert orchestrator.parts.link.hashes == {}


async def test_what_was_sampled_beyond_a_stop_string_is_no_part_of_the_answer() -> None:
    orchestrator = Orchestrator()
    request, _ = await begun(orchestrator, 5)

    orchestrator.served.complete(request, 2, FinishReason.STOP, b"said")
    orchestrator.served.check_invariants()

    assert (request.log.token_ids, request.log.finish) == (ANSWER[:2], FinishReason.STOP)
    assert orchestrator.engine.is_idle


async def test_what_goes_wrong_after_the_end_takes_nothing_from_a_complete_answer() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun(orchestrator, 5)
    orchestrator.served.complete(request, 2, FinishReason.STOP, b"said")
    orchestrator.served.fail(request, InvalidRequest("num_tokens", "9 is out of range"))
    await reader.leave()

    again = orchestrator.read(request)
    await orchestrator.settle()
    assert (again.token_ids, again.finish) == (ANSWER[:2], FinishReason.STOP)


async def test_known_tokens_come_again_with_their_logprobs() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun(orchestrator)
    await reader.leave()
    request.log.logprobs = [make_logprobs(token_id) for token_id in request.log.token_ids]

    await orchestrator.served.claim(request)
    event = await orchestrator.served.token(request, 1)
    orchestrator.served.release(request)

    assert (event.token_id, event.logprobs) == (ANSWER[1], make_logprobs(ANSWER[1]))


async def test_an_orchestrator_that_ends_goes_on_with_nothing() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun_turn(orchestrator)
    await reader.leave()
    orchestrator.served.close()

    assert isinstance(await orchestrator.read(request).error(), NotReady)
    assert orchestrator.engine.is_idle
    # And holds no session.
    assert (await orchestrator.parts.look()).num_turns == 1


async def test_the_longest_idle_are_forgotten_for_those_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_TOKENS", 3 * NUM_PROMPT)
    orchestrator = await Orchestrator().killed()
    for request_id in ("a", "b", "c"):
        reader = orchestrator.read(orchestrator.accept(request_id))
        await orchestrator.run()
        assert reader.finish is not None

    assert orchestrator.served.find("default", "c")
    for forgotten in ("a", "b"):
        with pytest.raises(RequestNotFound):
            orchestrator.served.find("default", forgotten)


async def test_a_client_that_leaves_has_left_what_it_got_to_its_session() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun_turn(orchestrator)
    await reader.leave()

    session = await orchestrator.parts.look()
    assert session.token_ids == (*WHOLE[:NUM_PROMPT], *reader.token_ids)


async def test_what_could_not_be_sent_is_not_left_to_the_session() -> None:
    orchestrator = Orchestrator()
    request, reader = await begun_turn(orchestrator)
    request.num_sent = 2
    await reader.leave()

    session = await orchestrator.parts.look()
    assert session.token_ids == WHOLE[: NUM_PROMPT + 2]


async def test_a_turn_without_a_token_did_not_happen() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun_turn(orchestrator, 0)
    await orchestrator.settle()
    await reader.leave()

    assert (await orchestrator.parts.look()).num_turns == 0


async def test_a_turn_that_failed_did_not_happen() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun_turn(orchestrator)
    orchestrator.engine.pipeline_down(P1, LOST, is_final=True)
    assert await reader.error() is LOST

    assert (await orchestrator.parts.look()).num_turns == 0


async def test_a_turn_that_is_gone_on_with_is_one_turn_and_whole() -> None:
    orchestrator = Orchestrator()
    _, reader = await begun_turn(orchestrator)
    await reader.leave()
    await finish_turn(orchestrator, len(reader.token_ids))

    session = await orchestrator.parts.look()
    assert (session.num_turns, session.token_ids) == (1, WHOLE)


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
