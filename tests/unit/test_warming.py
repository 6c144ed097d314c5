"""When the KV of a conversation is settled after an answer, and what operators have computed ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orchestrator import warming
from orchestrator.conversation import SessionKey
from orchestrator.warming import KVPrompt
from shoal.kv import BLOCK_TOKENS
from shoal.types import FinishReason, KVReuse, QosClass
from tests.support.conversations import KEY, TURNS, make_parts


async def test_an_answer_is_settled_as_a_prompt_of_the_lowest_class_and_full_blocks() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    (sequence,) = [parts.harness.sequence(1)]
    assert (sequence.qos, sequence.tenant, len(sequence.prompt_token_ids)) == (QosClass.THROUGHPUT, "gold", 128)
    await parts.run()

    session = await parts.look()
    assert parts.warmer.counters.done == 1
    assert session.blocks == parts.names.names("gold", session.token_ids)
    assert len(session.blocks) == 2
    assert session.blocks[1] in parts.harness.p1.model.kept
    assert parts.harness.engine.is_idle


async def test_a_settled_conversation_is_not_computed_again_by_its_next_turn() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await parts.run()
    session = await parts.look()

    sequence = parts.sequence_of(session, 10)
    parts.harness.engine.submit(sequence)
    await parts.run()

    assert sequence.num_restored == 128


async def test_an_answer_that_fills_no_block_is_not_settled() -> None:
    parts = make_parts()

    await parts.take_turn(num_new=66, num_answer=40)
    await parts.run()

    assert parts.harness.p1.sent == []
    assert len((await parts.look()).blocks) == 1


async def test_where_no_stage_keeps_blocks_nothing_is_settled() -> None:
    parts = make_parts(keeps_blocks=False)

    await parts.take_turn(num_new=100, num_answer=40)
    await parts.run()

    assert parts.harness.p1.sent == []


async def test_a_turn_that_wants_nothing_stored_is_not_settled() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    sequence = parts.sequence_of(turn.session, 100)
    sequence.block_hashes, sequence.kv_reuse = (), KVReuse.NONE

    await parts.conversations.end(turn, sequence, range(900, 940), FinishReason.LENGTH)
    await parts.run()

    assert parts.harness.p1.sent == []
    assert (await parts.look()).blocks == ()


async def test_nothing_is_settled_while_requests_wait() -> None:
    parts = make_parts(num_slots=1)
    parts.harness.submit(101)
    parts.harness.submit(102)
    assert parts.harness.engine.num_waiting == 1

    await parts.take_turn(num_new=100, num_answer=40)
    for _ in range(TURNS):
        await asyncio.sleep(0)

    assert parts.warmer.counters.skipped == 1
    assert (parts.harness.engine.num_running, parts.harness.engine.num_waiting) == (1, 1)


async def test_settling_makes_way_for_a_request_that_would_wait() -> None:
    parts = make_parts(num_slots=1)
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert parts.harness.engine.num_running == 1

    parts.harness.submit(101)
    assert parts.harness.engine.num_waiting == 1

    parts.warmer.make_way()
    await parts.run()

    assert (parts.warmer.counters.aborted, parts.warmer.counters.done) == (1, 0)


async def test_the_next_turn_of_a_session_ends_its_settling() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    await parts.conversations.begin(KEY)
    await asyncio.sleep(0)

    assert parts.harness.engine.is_idle
    await parts.run()
    assert parts.warmer.counters.aborted == 1


async def test_a_session_whose_next_turn_began_before_it_was_written_is_not_settled() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    writing = parts.conversations.end(turn, parts.sequence_of(turn.session, 100), range(900, 940), FinishReason.LENGTH)

    await parts.conversations.begin(KEY)
    await writing
    await parts.run()

    assert parts.harness.p1.sent == []


async def test_a_session_that_went_on_meanwhile_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, settled = make_parts(), list[Callable[[], Awaitable[None]]]()
    monkeypatch.setattr(parts.warmer, "settle", lambda _key, _prompt, on_done: settled.append(on_done))
    for _ in range(2):
        await parts.take_turn(num_new=100, num_answer=40)
    before = await parts.look()

    await settled[0]()

    assert await parts.look() == before


async def test_the_next_turn_of_another_session_does_not() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    await parts.conversations.begin(SessionKey("gold", "another"))
    await parts.run()

    assert parts.warmer.counters.done == 1


async def test_one_conversation_is_settled_at_a_time_and_all_of_them_are() -> None:
    parts = make_parts()
    for name in ("a", "b", "c"):
        await parts.take_turn(num_new=100, num_answer=40, key=SessionKey("gold", name))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert parts.harness.engine.num_running == 1

    await parts.run()

    assert parts.warmer.counters.done == 3


async def test_a_session_is_not_settled_any_more_once_it_is_deleted() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    await parts.conversations.delete(KEY)
    await parts.run()

    assert parts.warmer.counters.aborted == 1
    assert await parts.conversations.sessions("gold") == []


async def test_nothing_is_settled_any_more_at_the_end() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)

    await parts.conversations.stop()

    assert parts.harness.engine.is_idle
    assert parts.warmer.counters.done == 0


async def test_what_was_not_written_before_the_end_is_not_settled_after_it() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    parts.conversations.end(turn, parts.sequence_of(turn.session, 100), range(900, 940), FinishReason.LENGTH)

    await parts.conversations.stop()
    await parts.run()

    assert parts.harness.p1.sent == []


async def test_with_too_many_conversations_those_that_wait_longest_are_not_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warming, "MAX_PENDING", 2)
    parts, names = make_parts(), ("a", "b", "c", "d")
    for name in names:
        await parts.take_turn(num_new=100, num_answer=40, key=SessionKey("gold", name))
    await parts.run()

    num_blocks = [len((await parts.look(SessionKey("gold", name))).blocks) for name in names]
    # The first was being settled before there were too many.
    assert num_blocks == [2, 1, 2, 2]
    assert (parts.warmer.counters.done, parts.warmer.counters.skipped) == (3, 1)


async def test_a_conversation_that_could_not_be_settled_stays_as_it_is() -> None:
    parts = make_parts()
    before = await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    parts.harness.p1.fail_step(parts.harness.p1.last_step())
    for _ in range(TURNS):
        await asyncio.sleep(0)

    assert (await parts.look()).blocks == before.block_hashes
    assert (parts.warmer.counters.done, parts.warmer.counters.failed) == (0, 1)


async def test_a_prompt_is_warmed_from_what_is_kept_of_it() -> None:
    parts = make_parts()
    tokens = tuple(range(100, 100 + 2 * BLOCK_TOKENS))
    prompt = KVPrompt("gold", tokens, parts.names.names("gold", tokens))
    for expected in (0, BLOCK_TOKENS):
        warming = asyncio.create_task(parts.warmer.compute(prompt))
        await parts.run()

        assert (await warming).num_restored == expected


async def test_pinned_blocks_are_pinned_everywhere() -> None:
    parts = make_parts()
    blocks = parts.names.names("gold", range(BLOCK_TOKENS))

    parts.warmer.pin(blocks, 60.0)

    (frame,) = parts.harness.p1.sent
    assert (list(frame.keep_blocks.block_hashes), frame.keep_blocks.ttl_s) == (list(blocks), 60.0)


async def test_blocks_whose_time_is_over_are_pinned_no_longer() -> None:
    parts = make_parts()
    first, second = parts.names.names("gold", range(2 * BLOCK_TOKENS))

    parts.warmer.pin((second,), 60.0)
    parts.warmer.pin((first,), 0.0)

    assert (parts.warmer.is_pinned(first), parts.warmer.is_pinned(second)) == (False, True)
