"""What turns leave of a session, and what is deleted with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.block_names import BlockNames
from orchestrator.conversation import SessionKey
from orchestrator.conversations import Deletion
from orchestrator.core.shingles import make_sketch
from orchestrator.session_homes import FileHome
from shoal.errors import SessionBusy, SessionNotFound, SessionUnavailable
from shoal.kv import BLOCK_TOKENS
from shoal.redis_connection import Command
from shoal.redis_link import block_manifest_key, session_key
from shoal.types import FinishReason
from tests.support.builders import STOP_ID, make_sequence
from tests.support.conversations import KEY, MODEL, TTL_S, make_parts
from tests.support.fake_link import FakeLink, store_blocks


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


async def test_what_is_deleted_with_a_session_is_no_guess_for_what_is_typed_any_more() -> None:
    parts = make_parts()
    sequence = await parts.take_turn(num_new=100)
    sketch = make_sketch(sequence.prompt_token_ids)
    parts.likely.learn(KEY.tenant, sequence.block_hashes, sketch)

    await parts.conversations.delete(KEY)

    assert parts.likely.find(KEY.tenant, sketch) == []
    parts.likely.check_invariants()


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


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[FileHome]:
    file = FileHome(tmp_path / "sessions.sqlite")
    yield file
    await file.close()


async def test_what_redis_has_of_a_session_that_was_deleted_while_it_was_away_is_deleted_when_it_is_back(
    file: FileHome,
) -> None:
    parts = make_parts(file=file)
    await parts.take_turn(num_new=100)
    store_blocks(parts.link, (await parts.look()).blocks)
    parts.link.is_away = True
    assert await parts.conversations.delete(KEY) == Deletion(1, 0)
    with pytest.raises(SessionNotFound):
        await parts.conversations.delete(KEY)
    parts.link.is_away = False

    for _ in range(2):
        await parts.conversations.tend(is_expiring=False)

    assert (parts.link.hashes, parts.link.values) == ({}, {})
    assert await file.get([KEY]) == {}


async def test_blocks_that_another_session_came_to_use_meanwhile_are_not_deleted_later(file: FileHome) -> None:
    parts = make_parts(file=file)
    await parts.take_turn(num_new=100)
    (block,) = (await parts.look()).blocks
    store_blocks(parts.link, [block])
    parts.link.is_away = True
    await parts.conversations.delete(KEY)
    await parts.take_turn(num_new=100, key=SessionKey("gold", "other"))
    parts.link.is_away = False

    for _ in range(2):
        await parts.conversations.tend(is_expiring=False)

    assert list(parts.link.hashes) == [block_manifest_key(block)]
    assert await file.get([KEY]) == {}


async def test_an_expired_session_begins_anew_though_redis_is_away(file: FileHome) -> None:
    parts = make_parts(file=file)
    await parts.take_turn(num_new=100)
    parts.now += TTL_S
    parts.link.is_away = True
    await parts.take_turn(num_new=4, num_answer=1)
    parts.link.is_away = False

    for _ in range(2):
        await parts.conversations.tend(is_expiring=True)

    assert len((await parts.look()).token_ids) == 5
    assert [one.num_turns for one in await parts.conversations.sessions("gold")] == [1]


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
    """hangs_at: calls with this command do not come back."""

    hangs_at = ""

    async def call(self, *commands: Command, timeout_s: float = 0.05) -> list[Any] | None:
        if any(command[0] == self.hangs_at for command in commands):
            await asyncio.Event().wait()
        return await super().call(*commands, timeout_s=timeout_s)


async def test_a_client_that_leaves_while_an_expired_session_is_deleted_leaves_it_free() -> None:
    link = HangingLink()
    parts = make_parts(link)
    await parts.take_turn(num_new=100)
    parts.now += TTL_S
    # When its tenant's sessions are listed, for the sake of their blocks.
    link.hangs_at = "SMEMBERS"
    beginning = asyncio.create_task(parts.conversations.begin(KEY))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning

    link.hangs_at = ""
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


async def test_what_others_have_made_public_comes_to_be_known() -> None:
    parts, tokens = make_parts(), range(BLOCK_TOKENS)
    await BlockNames(MODEL, b"t" * 32, parts.link).make_public(tokens)

    await parts.conversations.tend(is_expiring=False)

    assert [parts.names.is_public(one) for one in parts.names.names("gold", tokens)] == [True]


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


async def test_nothing_is_left_to_be_done_for_a_turn_after_the_end() -> None:
    parts = make_parts()
    turn = await parts.conversations.begin(KEY)
    writing = parts.conversations.end(turn, parts.sequence_of(turn.session, 2), [900], FinishReason.LENGTH)

    await parts.conversations.stop()

    assert writing.done()
