"""What stages have checkpointed of a sequence that ends without a slot: it does not stay in Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator import trails as module
from orchestrator.core.parking import PARKED_S
from orchestrator.served import Served
from orchestrator.trails import MAX_AT_ONCE, Trails
from shoal.errors import DeadlineExceeded, NotReady
from shoal.redis_link import trail_key
from tests.support.builders import make_sequence
from tests.support.fake_link import FakeLink
from tests.support.lanes import LOST, P1
from tests.support.served_requests import Orchestrator, Reader, begun

OTHER = trail_key(b"o" * 16)


def checkpoint(orchestrator: Orchestrator, request: Served) -> bytes:
    """Have a trail in Redis, as stages write it, and one of another sequence; returns its key."""
    key = trail_key(request.record.trail_id)
    orchestrator.parts.link.hashes |= {key: {b"0-4:0-64": b"kv"}, OTHER: {b"0-4:0-64": b"kv"}}
    return key


async def parked(orchestrator: Orchestrator) -> tuple[Served, Reader, bytes]:
    """A request that has lost its pipeline, and the key of its trail."""
    request, reader = await begun(orchestrator)
    key = checkpoint(orchestrator, request)
    orchestrator.engine.pipeline_down(P1, LOST)
    await orchestrator.settle()
    assert orchestrator.engine.num_parked == 1
    return request, reader, key


def trails_of(orchestrator: Orchestrator) -> set[bytes]:
    return {key for key in orchestrator.parts.link.hashes if key.startswith(trail_key(b""))}


async def test_the_trail_of_an_answer_whose_client_leaves_while_it_waits_for_a_pipeline_is_deleted() -> None:
    orchestrator = await Orchestrator().killed()
    _, reader, key = await parked(orchestrator)
    assert trails_of(orchestrator) == {key, OTHER}

    await reader.leave()
    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {OTHER}


async def test_the_trail_of_an_answer_that_no_pipeline_came_for_is_deleted() -> None:
    orchestrator = await Orchestrator().killed()
    _, reader, _ = await parked(orchestrator)

    clock = orchestrator.parts.harness.clock
    clock.move_to(clock.now() + PARKED_S)
    await reader.error()
    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {OTHER}


async def test_the_trail_of_an_answer_that_lost_its_slot_and_missed_its_deadline_is_deleted() -> None:
    orchestrator = await Orchestrator().killed()
    clock = orchestrator.parts.harness.clock
    request, reader = await begun(orchestrator, deadline_at=clock.now() + 5.0)
    checkpoint(orchestrator, request)
    lane = orchestrator.engine.lane(P1)
    assert lane is not None
    assert request.answer is not None
    lane.scheduler._preempt(request.answer.sequence, make_sequence(99), clock.now())

    clock.move_to(clock.now() + 5.0)
    assert isinstance(await reader.error(), DeadlineExceeded)
    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {OTHER}


async def test_the_trail_of_an_answer_that_goes_on_is_kept() -> None:
    orchestrator = await Orchestrator().killed()
    _, _, key = await parked(orchestrator)

    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {key, OTHER}


async def test_a_trail_is_left_to_the_next_orchestrator_by_one_that_ends() -> None:
    orchestrator = await Orchestrator().killed()
    _, reader, key = await parked(orchestrator)

    orchestrator.served.close()
    await reader.leave()
    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {key, OTHER}


async def test_so_it_is_where_the_end_is_told_as_an_error() -> None:
    orchestrator = await Orchestrator().killed()
    _, reader, key = await parked(orchestrator)

    orchestrator.served.close()
    orchestrator.engine.pipeline_down(P1, NotReady("shut down"), is_final=True)
    await reader.error()
    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {key, OTHER}


async def test_an_answer_of_an_earlier_orchestrator_that_never_ran_here_leaves_no_trail_either() -> None:
    before = await Orchestrator().killed()
    request, _ = await begun(before)
    checkpoint(before, request)
    await before.journal.stop()
    after = Orchestrator(before.parts.link)
    after.engine.pipeline_down(P1, LOST)
    await after.served.load()
    again = after.read(after.served.find("default", "r"))
    await after.settle()
    assert after.engine.num_parked == 1

    await again.leave()
    await after.trails.stop()

    assert trails_of(after) == {OTHER}


async def test_what_runs_is_left_to_its_stages_to_delete() -> None:
    orchestrator = await Orchestrator().killed()
    request, reader = await begun(orchestrator)
    key = checkpoint(orchestrator, request)

    await reader.leave()
    await orchestrator.trails.stop()

    assert trails_of(orchestrator) == {key, OTHER}


async def test_nobody_waits_for_a_redis_that_is_away_and_trails_are_deleted_again_when_it_is_back() -> None:
    link = FakeLink()
    link.hashes = {trail_key(b"1" * 16): {}, trail_key(b"2" * 16): {}}
    trails = Trails(link)

    link.is_away = True
    trails.end(b"1" * 16)
    await trails.stop()
    link.is_away = False
    trails.end(b"2" * 16)
    await trails.stop()

    assert set(link.hashes) == {trail_key(b"1" * 16)}, "the first one is left to its time to live"


async def test_many_trails_take_few_calls_and_too_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", MAX_AT_ONCE + 1)
    link: Any = FakeLink()
    ids = [number.to_bytes(16, "big") for number in range(1, MAX_AT_ONCE + 3)]
    link.hashes = {trail_key(one): {} for one in ids}
    trails = Trails(link)

    for one in ids:
        trails.end(one)
    await trails.stop()

    assert set(link.hashes) == {trail_key(ids[-1])}
    assert link.num_calls == 2


async def test_without_redis_and_without_a_trail_nothing_is_begun() -> None:
    Trails(None).end(b"1" * 16)
    Trails(FakeLink()).end(b"")

    assert asyncio.all_tasks() == {asyncio.current_task()}
