"""What turns leave of a session, how its KV is settled after an answer, and what is deleted with it.

Stages are played by a model whose answers depend on all that was fed, and which keeps blocks by their names.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from orchestrator.block_names import BlockNames
from orchestrator.catalogue import Catalogue
from orchestrator.conversation import Session, SessionKey
from orchestrator.conversations import Conversations, Deletion
from orchestrator.core.sequence import Sequence
from orchestrator.likely_prefixes import LikelyPrefixes
from orchestrator.sessions import SessionStore
from orchestrator.warming import KVPrompt, Warmer
from shoal.errors import SessionBusy, SessionNotFound, SessionUnavailable
from shoal.kv import BLOCK_TOKENS
from shoal.redis_connection import Command
from shoal.redis_link import block_manifest_key, session_key
from shoal.types import FinishReason, KVReuse, QosClass
from tests.support.builders import STOP_ID, make_sequence
from tests.support.fake_link import FakeLink, store_blocks
from tests.support.lanes import Harness

MODEL = "ab" * 32
TTL_S = 100.0
KEY = SessionKey("gold", "talk")
# As many turns of the event loop as any of this takes.
TURNS = 50


@dataclass(slots=True)
class Parts:
    """Conversations and what they are made of."""

    harness: Harness
    link: FakeLink
    names: BlockNames
    warmer: Warmer
    conversations: Conversations
    likely: LikelyPrefixes
    now: float = 1000.0

    async def take_turn(self, num_new: int, num_answer: int = 3, key: SessionKey = KEY, **end: Any) -> Sequence:
        """A turn that adds so many tokens, whose answer is computed elsewhere."""
        turn = await self.conversations.begin(key)
        sequence = self.sequence_of(turn.session, num_new, key.tenant)
        answer = [900 + index for index in range(num_answer)]
        await self.conversations.end(turn, sequence, answer, end.get("why", FinishReason.LENGTH))
        return sequence

    def sequence_of(self, session: Session, num_new: int, tenant: str = KEY.tenant) -> Sequence:
        num_before = len(session.token_ids)
        prompt = session.token_ids + tuple(range(100 + num_before, 100 + num_before + num_new))
        sequence = make_sequence(num_prompt=len(prompt))
        sequence.prompt_token_ids = prompt
        sequence.block_hashes = self.names.names(tenant, prompt)
        return sequence

    async def look(self, key: SessionKey = KEY) -> Session:
        turn = await self.conversations.begin(key)
        self.conversations.leave(turn)
        return turn.session

    async def run(self) -> None:
        """Let the stages compute, and everybody act on it, until nothing happens any more."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
            self.harness.p1.compute_all()
            self.harness.engine.check_invariants()


def make_parts(link: FakeLink | None = None, **limits: Any) -> Parts:
    harness, link = Harness(**{"num_slots": 2, **limits}), link or FakeLink()
    names = BlockNames(MODEL, b"s" * 32, link)
    warmer = Warmer(harness.engine)
    store, likely = SessionStore(link, MODEL, TTL_S, lambda: parts.now), LikelyPrefixes()
    conversations = Conversations(store, names, Catalogue(link, num_layers=3), harness.engine, warmer, likely)
    parts = Parts(harness, link, names, warmer, conversations, likely)
    return parts


async def test_a_turn_leaves_its_prompt_and_its_answer() -> None:
    parts = make_parts()

    await parts.take_turn(num_new=4, num_answer=2)
    await parts.take_turn(num_new=1, num_answer=1)

    session = await parts.look()
    assert session.token_ids == (100, 101, 102, 103, 900, 901, 106, 900)
    assert session.num_turns == 2


async def test_the_stop_token_that_ended_an_answer_is_no_part_of_it() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    sequence = parts.sequence_of(turn.session, 2)

    await parts.conversations.end(turn, sequence, [900, STOP_ID], FinishReason.STOP)

    assert (await parts.look()).token_ids == (100, 101, 900)


async def test_a_stop_token_amid_an_answer_that_went_on_stays() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    sequence = parts.sequence_of(turn.session, 2)

    await parts.conversations.end(turn, sequence, [900, STOP_ID], FinishReason.CANCELLED)

    assert (await parts.look()).token_ids == (100, 101, 900, STOP_ID)


async def test_a_turn_that_is_left_did_not_happen() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=4, num_answer=2)

    turn = await parts.conversations.begin(KEY)
    with pytest.raises(SessionBusy):
        await parts.conversations.begin(KEY)
    parts.conversations.leave(turn)

    assert (await parts.look()).num_turns == 1


async def test_the_next_turn_may_begin_while_the_last_is_being_written() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    writing = parts.conversations.end(turn, parts.sequence_of(turn.session, 2), [900], FinishReason.LENGTH)

    assert (await parts.look()).token_ids == (100, 101, 900)
    await writing


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


async def test_a_session_is_deleted_with_its_blocks_wherever_they_are() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await parts.run()
    session = await parts.look()
    store_blocks(parts.link, session.blocks, ranges=((0, 2), (2, 3)))

    assert await parts.conversations.delete(KEY) == Deletion(2, 0)
    await parts.run()

    assert parts.harness.p1.model.kept == {}
    assert parts.link.hashes == {}
    assert parts.link.values == {}
    with pytest.raises(SessionNotFound):
        await parts.conversations.delete(KEY)


async def test_blocks_of_tokens_that_a_session_left_out_are_deleted() -> None:
    parts = make_parts()
    before = await parts.take_turn(num_new=BLOCK_TOKENS * 3)
    store_blocks(parts.link, before.block_hashes)
    turn = await parts.conversations.begin(KEY)
    sequence = make_sequence(num_prompt=BLOCK_TOKENS * 2)
    sequence.prompt_token_ids = before.prompt_token_ids[:BLOCK_TOKENS] + tuple(range(500, 500 + BLOCK_TOKENS))
    sequence.block_hashes = parts.names.names(KEY.tenant, sequence.prompt_token_ids)

    await parts.conversations.end(turn, sequence, [900], FinishReason.LENGTH)

    first, *others = before.block_hashes
    assert sequence.block_hashes[0] == first
    assert block_manifest_key(first) in parts.link.hashes
    assert [block_manifest_key(one) in parts.link.hashes for one in others] == [False, False]


async def test_blocks_that_another_session_uses_stay() -> None:
    parts = make_parts()
    other = SessionKey("gold", "other")
    await parts.take_turn(num_new=BLOCK_TOKENS, num_answer=70)
    await parts.take_turn(num_new=BLOCK_TOKENS, num_answer=1, key=other)
    await parts.run()
    store_blocks(parts.link, (await parts.look()).blocks)

    assert await parts.conversations.delete(KEY) == Deletion(1, 1)
    await parts.run()

    (shared,) = (await parts.look(other)).blocks
    assert list(parts.link.hashes) == [block_manifest_key(shared)]


async def test_public_and_pinned_blocks_stay() -> None:
    parts = make_parts()
    await parts.names.make_public(range(100, 100 + BLOCK_TOKENS))
    await parts.take_turn(num_new=3 * BLOCK_TOKENS, num_answer=1)
    blocks = (await parts.look()).blocks
    parts.warmer.pin(blocks[1:2], 60.0)

    assert await parts.conversations.delete(KEY) == Deletion(1, 2)


async def test_a_session_is_not_settled_any_more_once_it_is_deleted() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    await parts.conversations.delete(KEY)
    await parts.run()

    assert parts.warmer.counters.aborted == 1
    assert await parts.conversations.sessions("gold") == []


async def test_a_session_whose_blocks_cannot_be_deleted_stays_to_be_deleted_later() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100)
    parts.link.is_away = True
    with pytest.raises(SessionUnavailable):
        await parts.conversations.delete(KEY)
    parts.link.is_away = False

    assert await parts.conversations.delete(KEY) == Deletion(1, 0)


async def test_an_expired_session_begins_anew() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100)
    parts.now += TTL_S

    assert await parts.conversations.sessions("gold") == []
    assert (await parts.look()).token_ids == ()
    assert session_key("gold", "talk") not in parts.link.values


class HangingLink(FakeLink):
    """hangs: calls do not come back."""

    hangs = False

    async def call(self, *commands: Command, timeout_s: float = 0.05) -> list[Any] | None:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().call(*commands, timeout_s=timeout_s)


async def test_a_client_that_leaves_while_an_expired_session_is_deleted_leaves_it_free() -> None:
    link = HangingLink()
    parts = make_parts(link)
    await parts.take_turn(num_new=100)
    parts.now += TTL_S
    link.hangs = True
    beginning = asyncio.create_task(parts.conversations.begin(KEY))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning

    link.hangs = False
    assert (await parts.look()).token_ids == ()


async def test_sessions_whose_time_is_over_are_deleted_by_themselves() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100)
    parts.now += TTL_S - 1
    await parts.take_turn(num_new=100, key=SessionKey("gold", "later"))
    parts.now += 1

    await parts.conversations.tend(is_expiring=True)

    assert [one.key.session_id for one in await parts.conversations.sessions("gold")] == ["later"]
    assert session_key("gold", "talk") not in parts.link.values


async def test_looking_after_sessions_goes_on_when_redis_is_away() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100)
    parts.link.is_away = True

    await parts.conversations.tend(is_expiring=True)


async def test_what_waited_for_redis_is_written_at_the_end() -> None:
    parts = make_parts()
    await parts.conversations.tend(is_expiring=False)
    parts.link.is_away = True
    await parts.take_turn(num_new=4)
    parts.link.is_away = False

    await parts.conversations.stop()

    assert session_key("gold", "talk") in parts.link.values


async def test_nothing_is_settled_any_more_at_the_end() -> None:
    parts = make_parts()
    await parts.take_turn(num_new=100, num_answer=40)
    await asyncio.sleep(0)

    await parts.conversations.stop()

    assert parts.harness.engine.is_idle
    assert parts.warmer.counters.done == 0
