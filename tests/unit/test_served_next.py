"""What the orchestrator after one that was killed or has ended makes of its requests."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import served as module
from orchestrator.served import RECENT_S, UNCLAIMED_S
from shoal.errors import DeadlineExceeded, NotReady, SessionBusy
from shoal.types import FinishReason, KVReuse
from tests.support.lanes import LOST, P1
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


async def test_of_two_requests_of_an_id_the_next_orchestrator_knows_the_newer_one() -> None:
    before = Orchestrator()
    await begun(before)
    before.now = 1.0
    newer, _ = await begun(before, arrived_at=1.0)
    orchestrator = await before.killed()
    await orchestrator.journal.stop()

    assert orchestrator.served.find("default", "r").record.record_id == newer.record.record_id
    assert len(orchestrator.parts.link.hashes) == 1


async def test_the_next_orchestrator_goes_on_before_anybody_asks() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    orchestrator = await before.killed()
    assert orchestrator.engine.num_running + orchestrator.engine.num_waiting == 1
    orchestrator.compute()

    again = await orchestrator.resumed(len(reader.token_ids))

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

    again = await following.resumed(known)

    assert reader.token_ids + again.token_ids == ANSWER


async def test_what_an_answer_has_outlived_is_known_to_the_next_orchestrator() -> None:
    before = Orchestrator()
    request, reader = await begun(before)
    assert request.answer is not None
    sequence = request.answer.sequence
    sequence.num_preemptions, sequence.num_recoveries, sequence.has_changed_kernels = 3, 2, True
    await before.compute_until(reader, 4)
    orchestrator = await before.killed()

    following = orchestrator.served.find("default", "r").answer
    assert following is not None
    outlived = following.sequence
    assert (outlived.num_preemptions, outlived.num_recoveries, outlived.has_changed_kernels) == (3, 2, True)


async def test_what_the_next_orchestrator_goes_on_with_in_vain_ends() -> None:
    before = Orchestrator()
    await begun(before)
    orchestrator = await before.killed()
    orchestrator.now += UNCLAIMED_S
    orchestrator.served.tend()
    await orchestrator.settle()

    assert orchestrator.engine.is_idle
    assert orchestrator.served.find("default", "r").log.is_left


async def test_an_answer_waits_for_devices_as_long_as_for_its_client() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    await before.journal.stop()
    orchestrator = Orchestrator(before.parts.link)
    orchestrator.engine.pipeline_down(P1, LOST)
    await orchestrator.served.load()
    again = orchestrator.read(orchestrator.served.find("default", "r"), len(reader.token_ids))
    await orchestrator.settle()

    orchestrator.parts.harness.clock.move_to(UNCLAIMED_S - 0.1)
    await orchestrator.settle()
    assert not again.task.done()
    orchestrator.parts.harness.clock.move_to(UNCLAIMED_S)
    assert isinstance(await again.error(), NotReady)


async def test_an_answer_whose_client_had_left_waits_for_it_at_the_next_orchestrator() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    await reader.leave()
    orchestrator = await before.killed()
    assert orchestrator.engine.is_idle

    again = await orchestrator.resumed(len(reader.token_ids))

    assert reader.token_ids + again.token_ids == ANSWER


async def test_an_answer_whose_client_came_back_is_gone_on_with_before_anybody_asks() -> None:
    before = Orchestrator()
    request, reader = await begun(before)
    await reader.leave()
    await before.journal.stop()
    before.read(request, len(reader.token_ids))
    await before.settle()
    orchestrator = await before.killed()

    assert not orchestrator.engine.is_idle


async def test_an_answer_outlives_one_orchestrator_after_the_other() -> None:
    before = Orchestrator()
    _, first = await begun(before)
    between = await before.killed()
    second = between.read(between.served.find("default", "r"), len(first.token_ids))
    await between.compute_until(second, 3)
    known = first.token_ids + second.token_ids
    orchestrator = await between.killed()

    assert orchestrator.served.find("default", "r").log.token_ids == known
    third = await orchestrator.resumed(len(known))
    assert known + third.token_ids == ANSWER


async def test_an_id_that_was_used_anew_before_the_journal_could_be_read_is_of_the_new_request() -> None:
    before = Orchestrator()
    await begun(before)
    await before.journal.stop()
    orchestrator = Orchestrator(before.parts.link)
    newer = orchestrator.accept()
    await orchestrator.served.load()
    await orchestrator.journal.stop()

    assert orchestrator.served.find("default", "r") is newer
    assert len(orchestrator.parts.link.hashes) == 1


async def test_a_journal_that_can_be_read_later_is_read_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.0)
    before = Orchestrator()
    await begun(before)
    await before.journal.stop()
    before.parts.link.is_away = True
    orchestrator = Orchestrator(before.parts.link)
    await orchestrator.served.load()
    before.parts.link.is_away = False
    watching = asyncio.create_task(orchestrator.served.watch())
    await orchestrator.settle()
    watching.cancel()

    assert orchestrator.served.find("default", "r").answer is not None


@pytest.mark.parametrize("kv_reuse", list(KVReuse))
async def test_what_is_kept_of_its_prompt_is_used_by_the_next_orchestrator_if_its_client_allowed_it(
    kv_reuse: KVReuse,
) -> None:
    before, prompt = Orchestrator(), tuple(range(100, 230))
    before.accept(prompt_token_ids=prompt, kv_reuse=kv_reuse)
    orchestrator = await before.killed()

    answer = orchestrator.served.find("default", "r").answer
    assert answer is not None
    names = orchestrator.parts.names.names("default", prompt)
    assert len(names) == 2
    assert answer.sequence.block_hashes == (() if kv_reuse is KVReuse.NONE else names)


async def test_an_orchestrator_that_was_away_for_long_computes_only_what_is_asked_for() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    await before.journal.stop()
    before.now += RECENT_S + 1
    orchestrator = Orchestrator(before.parts.link, before.now)
    await orchestrator.served.load()

    assert orchestrator.engine.is_idle
    again = await orchestrator.resumed(len(reader.token_ids))
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


async def test_an_answer_that_ended_with_a_stop_token_is_not_computed_on() -> None:
    before = Orchestrator()
    request, _ = await begun(before, 5, stop_ids=frozenset({ANSWER[4]}))
    request.log.finish, request.log.finished = None, b""
    orchestrator = await before.killed()

    assert orchestrator.engine.is_idle
    assert orchestrator.served.find("default", "r").log.finish is FinishReason.STOP


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
    again = await orchestrator.resumed(len(reader.token_ids))

    assert reader.token_ids + again.token_ids == ANSWER


async def test_an_orchestrator_that_ends_leaves_its_answers_to_the_next() -> None:
    before = Orchestrator()
    _, reader = await begun(before)
    before.served.close()
    before.engine.pipeline_down(P1, NotReady("this orchestrator has shut down"), is_final=True)
    assert isinstance(await reader.error(), NotReady)
    orchestrator = await before.killed()

    assert orchestrator.served.find("default", "r").answer is not None


async def test_the_next_orchestrator_holds_the_session_until_the_turn_is_over() -> None:
    before = Orchestrator()
    _, reader = await begun_turn(before)
    orchestrator = await before.killed()
    with pytest.raises(SessionBusy):
        await orchestrator.parts.look()
    await finish_turn(orchestrator, len(reader.token_ids))

    session = await orchestrator.parts.look()
    assert (session.num_turns, session.token_ids) == (1, WHOLE)


async def test_a_turn_that_nobody_claims_leaves_what_was_known_of_it() -> None:
    before = Orchestrator()
    _, reader = await begun_turn(before)
    orchestrator = await before.killed()
    orchestrator.now += UNCLAIMED_S
    orchestrator.served.tend()

    session = await orchestrator.parts.look()
    assert session.token_ids == (*WHOLE[:NUM_PROMPT], *reader.token_ids)
