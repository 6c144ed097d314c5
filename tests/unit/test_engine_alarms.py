"""What the engine does when nothing happens but time: fallback, deadlines, pace and limits."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.answer import Answer
from orchestrator.core.limits import Pace
from orchestrator.core.step_time import StepTiming
from orchestrator.engine import FALLBACK_AGAIN
from shoal.errors import DeadlineExceeded, Overloaded
from shoal.types import DeviceMode, FinishReason, SequenceId
from tests.support.lanes import (
    FALLBACK_S,
    LOST,
    P1,
    P2,
    Harness,
    Stages,
    delivered,
    error_of,
    expected_answer,
    next_event,
    token_ids,
    told,
    where,
)

# Waiting too long


def wait_at_p1(**fields: Any) -> tuple[Harness, Answer]:
    """A harness whose only slot is taken, and a request that waits for it."""
    harness = Harness(num_slots=1)
    harness.submit(1, max_tokens=400)
    return harness, harness.submit(2, "r2", **fields)


def test_a_request_not_started_in_time_is_taken_by_another_pipeline() -> None:
    harness, answer = wait_at_p1(num_prompt=12, max_tokens=5)
    p2 = harness.add(P2)

    harness.clock.move_to(FALLBACK_S - 0.001)
    assert where(answer) == P1
    harness.clock.move_to(FALLBACK_S + 0.001)
    assert where(answer) == P2
    p2.compute_all()

    assert token_ids(answer) == expected_answer(12, 5)
    assert ("moved", "p1 -> p2: not started within 200 ms") in told(harness, "r2")
    harness.engine.check_invariants()


def test_a_request_waits_on_while_nobody_else_can_start_it() -> None:
    harness, answer = wait_at_p1()
    p2 = harness.add(P2, num_slots=1)
    other = harness.submit(3, max_tokens=400)
    assert where(other) == P2

    harness.clock.move_to(1.0)
    assert where(answer) == P1
    harness.engine.abort(other.sequence.sequence_id)
    harness.clock.move_to(1.0 + FALLBACK_S * FALLBACK_AGAIN)

    assert where(answer) == P2
    assert p2.lane.scheduler.num_running == 1


def test_waiting_without_hope_costs_a_few_looks_a_second_and_no_more() -> None:
    harness, _ = wait_at_p1()
    harness.add(P2, num_slots=1)
    harness.submit(3, max_tokens=400)

    harness.clock.move_to(10.0)

    assert harness.clock.num_rung <= 10.0 / (FALLBACK_S * FALLBACK_AGAIN) + 2


def test_a_look_at_a_long_queue_costs_no_more_than_one_at_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each class one request is weighed: where that finds no place, none behind it does."""
    harness, _ = wait_at_p1(num_prompt=60, max_tokens=400)
    p2 = harness.add(P2, num_slots=4, kv_tokens=64)
    for number in range(3, 13):
        harness.submit(number, num_prompt=60, max_tokens=400)
    assert p2.lane.scheduler.num_running + p2.lane.scheduler.num_waiting == 0, "they are to wait at the other one"
    weighing = Mock(wraps=p2.lane.scheduler.predict)
    monkeypatch.setattr(p2.lane.scheduler, "predict", weighing)

    harness.clock.move_to(FALLBACK_S * 1.1)

    assert weighing.call_count == 1


def test_a_timeout_of_nought_does_not_poll() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1, max_tokens=400)
    harness.add(P2, num_slots=1, fallback_s=0.0)
    harness.submit(2, max_tokens=400)
    harness.submit(3)
    harness.submit(4)

    harness.clock.move_to(1.0)

    assert harness.clock.num_rung <= 110


def test_with_one_pipeline_nothing_is_looked_at_again() -> None:
    harness, _ = wait_at_p1()

    assert harness.clock.next_alarm_at is None


def test_of_those_who_wait_only_as_many_move_as_can_start_there() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1, max_tokens=400)
    waiting = [harness.submit(number, max_tokens=400) for number in range(2, 6)]
    p2 = harness.add(P2, num_slots=2)

    harness.clock.move_to(FALLBACK_S + 0.001)

    assert [where(answer) for answer in waiting] == [P2, P2, P1, P1]
    assert (p2.lane.scheduler.num_running, p2.lane.scheduler.num_waiting) == (2, 0)
    harness.engine.check_invariants()


def test_an_idle_latency_pipeline_is_lent_to_two_and_kept_from_the_third() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1, max_tokens=400)
    waiting = [harness.submit(number, max_tokens=400) for number in (2, 3, 4)]
    harness.add(P2, mode=DeviceMode.LATENCY)

    harness.clock.move_to(FALLBACK_S * 4)

    assert [where(answer) for answer in waiting] == [P2, P2, P1]


def make_slow(stages: Stages, pass_s: float) -> None:
    """Let a pipeline of one stage know that its passes take so long."""
    for _ in range(10):
        stages.lane.scheduler.observe(StepTiming(8, (pass_s,), is_solo=False))


@pytest.mark.parametrize(
    ("fields", "pass_s"), [({}, 30.0), ({"stop_ids": frozenset()}, 2.0)], ids=["the first token", "the whole answer"]
)
def test_a_request_that_would_miss_its_deadline_elsewhere_keeps_its_place(
    fields: dict[str, Any], pass_s: float
) -> None:
    harness = Harness(num_slots=1)
    running = harness.submit(1, max_tokens=400)
    harness.clock.move_to(0.1)
    waiting = [harness.submit(number, f"r{number}", deadline_at=9.0, **fields) for number in (2, 3)]
    make_slow(harness.add(P2), pass_s)

    harness.clock.move_to(1.0)
    harness.engine.abort(running.sequence.sequence_id)

    assert [where(answer) for answer in waiting] == [P1, P1]
    assert [answer.sequence.has_started for answer in waiting] == [True, False]
    assert [what for what, _ in told(harness, "r2")] == ["queued", "admitted"]


def test_a_request_that_another_pipeline_refuses_after_all_goes_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sequence: object, now: float) -> None:
        raise Overloaded("full after all", retry_after_s=1.0)

    harness, answer = wait_at_p1()
    monkeypatch.setattr(harness.add(P2).lane.scheduler, "submit", refuse)

    harness.clock.move_to(FALLBACK_S * 1.1)

    assert where(answer) == P1
    assert "refused" in [what for what, _ in told(harness, "r2")]
    harness.engine.check_invariants()
    harness.engine.abort(SequenceId(1))
    assert answer.sequence.has_started


def test_a_running_answer_is_never_moved_for_its_slowness() -> None:
    harness = Harness()
    answer = harness.submit(1)
    harness.add(P2)

    harness.clock.move_to(60.0)

    assert where(answer) == P1


# Deadlines


async def test_a_request_that_misses_its_deadline_ends_with_the_numbers() -> None:
    harness = Harness()
    answer = harness.submit(1, "r1", deadline_at=3.0)
    harness.p1.answer_step(11)

    harness.clock.move_to(2.9)
    assert not harness.engine.is_idle
    harness.clock.move_to(3.1)

    assert (await next_event(answer)).token_id == 11
    error = await error_of(answer)
    assert isinstance(error, DeadlineExceeded)
    assert "1 of at most 16 answer tokens" in error.message
    assert harness.engine.stories.find("r1").to_proto().finish == "DEADLINE_EXCEEDED"
    assert harness.engine.is_idle


def test_the_slot_of_a_request_that_missed_its_deadline_is_freed_at_the_stages_before_it_is_used_again() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1, deadline_at=3.0)
    harness.submit(2)

    harness.clock.move_to(3.1)

    assert harness.p1.bodies() == ["step", "cancel", "step"]


async def test_a_waiting_request_that_misses_its_deadline_ends_too() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    answer = harness.submit(2, deadline_at=3.0)

    harness.clock.move_to(3.1)

    assert isinstance(await error_of(answer), DeadlineExceeded)
    assert harness.p1.bodies() == ["step"]


def test_the_alarm_rings_for_the_earliest_deadline_whenever_it_came() -> None:
    harness = Harness()
    harness.submit(1, deadline_at=9.0)
    harness.submit(2, deadline_at=3.0)

    harness.clock.move_to(3.1)

    assert harness.engine.num_running == 1


def test_without_pipelines_there_is_no_alarm() -> None:
    harness = Harness()
    harness.submit(1, deadline_at=9.0)

    harness.engine.pipeline_down(P1, LOST, is_final=True)

    assert harness.clock.next_alarm_at is None


def test_a_request_that_ends_in_time_leaves_no_deadline_behind() -> None:
    harness = Harness()
    answer = harness.submit(1, max_tokens=2, deadline_at=3.0)
    harness.p1.compute_all()

    harness.clock.move_to(10.0)

    assert delivered(answer)[-1].finish is FinishReason.LENGTH
    assert harness.clock.next_alarm_at is None


# Pace


def test_a_paced_stream_gets_its_next_token_when_it_is_due() -> None:
    harness = Harness()
    answer = harness.submit(1, max_tokens=8, max_tokens_per_s=4.0)
    got = []
    for quarter in range(8):
        harness.clock.move_to(quarter * 0.25 + 0.01)
        harness.p1.compute_all()
        got.append(len(delivered(answer)))

    assert sum(got[:4]) <= 5
    assert max(got[1:]) <= 2
    assert sum(got) >= 7


def test_a_limit_that_comes_into_force_is_told_to_those_it_concerns() -> None:
    harness = Harness()
    harness.submit(1, "r1", num_prompt=8)
    p2 = harness.add(P2)
    assert where(harness.submit(2, "r2")) == P2

    harness.engine.set_pace(P1, Pace(2, 3.0))

    assert ("limits", "p1: at most 2 rows a batch, 3 steps per second") in told(harness, "r1")
    assert "limits" not in [what for what, _ in told(harness, "r2")]
    assert harness.p1.lane.scheduler.pace == Pace(2, 3.0)
    assert p2.lane.scheduler.pace.steps_per_s == 0.0


def test_a_request_that_comes_to_a_limited_pipeline_is_told_so() -> None:
    harness = Harness()
    harness.engine.set_pace(P1, Pace(2))

    harness.submit(1, "r1")

    assert ("limits", "p1: at most 2 rows a batch") in told(harness, "r1")


def test_a_limited_pipeline_goes_on_when_its_next_step_is_due() -> None:
    harness = Harness()
    harness.engine.set_pace(P1, Pace(4, 2.0))
    answer = harness.submit(1, num_prompt=4, max_tokens=4)

    harness.clock.move_to(20.0)
    for second in range(21, 31):
        harness.p1.compute_all()
        harness.clock.move_to(second)

    assert token_ids(answer) == expected_answer(4, 4)


def test_an_alarm_that_rings_late_does_what_was_due_and_is_not_set_for_the_past() -> None:
    harness = Harness()
    harness.submit(1, deadline_at=3.0)
    harness.submit(2, deadline_at=4.0)

    harness.clock.jump_to(100.0)

    assert harness.engine.is_idle
    assert harness.clock.num_rung == 1
