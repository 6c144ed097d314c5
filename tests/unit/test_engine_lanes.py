"""The engine with several pipelines: who gets a request, and how it goes on elsewhere when its pipeline is lost."""

from __future__ import annotations

import pytest

from orchestrator.answer import Answer
from orchestrator.core.limits import Pace
from orchestrator.core.parking import PARKED_S
from orchestrator.core.tenants import TenantLedger
from shoal.errors import ContextExceeded, NotReady, Overloaded, WorkerLost
from shoal.types import DeviceMode, FinishReason, NumericClass, QosClass, SequenceId
from tests.support.builders import know_times
from tests.support.lanes import (
    LOST,
    P1,
    P2,
    P3,
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

# Routing


def test_a_pipeline_that_nobody_has_measured_is_expected_to_be_like_the_others() -> None:
    """Else the first one that proves faster than expected would get everything."""
    harness = Harness()
    harness.add(P2)
    know_times(harness.p1.lane.scheduler, base_s=0.0002, token_s=0.00005)

    answers = [harness.submit(number) for number in range(1, 5)]

    assert sorted(where(answer) for answer in answers) == [P1, P1, P2, P2]


def test_a_slow_device_is_expected_to_be_slow_before_anything_is_measured() -> None:
    harness = Harness(stage_costs=(3.0,))
    harness.add(P2, stage_costs=(1.0,))

    assert where(harness.submit(1)) == P2


def test_a_sequence_may_have_what_the_roomiest_pipeline_allows() -> None:
    harness = Harness(context_tokens=300)
    harness.add(P2, context_tokens=400)
    assert harness.engine.sequence_tokens == 400
    for pipeline_id in (P1, P2):
        harness.engine.pipeline_down(pipeline_id, LOST)
    assert harness.engine.sequence_tokens == 0


def test_requests_are_spread_over_equal_pipelines() -> None:
    harness = Harness()
    harness.add(P2)

    answers = [harness.submit(number) for number in (1, 2)]

    assert {where(answer) for answer in answers} == {P1, P2}
    harness.engine.check_invariants()


def test_a_latency_request_gets_the_latency_pipeline_and_others_do_not() -> None:
    harness = Harness()
    harness.add(P2, mode=DeviceMode.LATENCY)

    assert where(harness.submit(1, qos=QosClass.LATENCY, numeric=NumericClass.SOLO)) == P2
    assert [where(harness.submit(number)) for number in (2, 3, 4)] == [P1, P1, P1]


def test_a_request_that_the_best_pipeline_refuses_goes_to_the_next() -> None:
    harness = Harness(num_slots=1, max_waiting=1)
    p2 = harness.add(P2, num_slots=1, max_waiting=1)
    answers = [harness.submit(number) for number in (1, 2, 3, 4)]

    assert sorted(where(answer) for answer in answers) == [P1, P1, P2, P2]
    with pytest.raises(Overloaded):
        harness.submit(5)
    assert p2.lane.scheduler.num_waiting == 1
    harness.engine.check_invariants()


def test_the_story_of_a_refused_request_says_who_refused_it() -> None:
    harness = Harness(num_slots=1, max_waiting=1)
    for number in (1, 2):
        harness.submit(number)

    with pytest.raises(Overloaded):
        harness.submit(3, "r3")

    story = harness.engine.stories.find("r3").to_proto()
    assert (story.state, story.finish) == ("finished", "OVERLOADED")
    assert [event.what for event in story.events] == ["refused"]
    assert story.events[0].detail.startswith("by p1: ")


def test_a_prompt_that_no_pipeline_can_hold_is_refused_with_the_numbers_of_the_largest() -> None:
    harness = Harness(context_tokens=64)
    harness.add(P2, context_tokens=128)

    with pytest.raises(ContextExceeded, match="has 200 tokens; the context is 128"):
        harness.submit(num_prompt=200)


def test_results_go_to_the_pipeline_that_sent_them() -> None:
    harness = Harness()
    p2 = harness.add(P2)
    first, second = harness.submit(1), harness.submit(2)
    assert harness.p1.last_step().rows[0].sequence_id == p2.last_step().rows[0].sequence_id

    harness.p1.answer_step(11)

    by_pipeline = {where(answer): token_ids(answer) for answer in (first, second)}
    assert by_pipeline == {P1: [11], P2: []}


def test_totals_are_those_of_each_pipeline() -> None:
    harness = Harness()
    p2 = harness.add(P2)
    for number in (1, 2):
        harness.submit(number, num_prompt=8, max_tokens=3)
    for stages in (harness.p1, p2):
        stages.compute_all()

    assert (harness.p1.lane.prefill_rate.total, harness.p1.lane.decode_rate.total) == (8, 3)
    assert (p2.lane.prefill_rate.total, p2.lane.decode_rate.total) == (8, 3)


def test_the_pipelines_that_serve_are_told() -> None:
    harness = Harness()
    p2 = harness.add(P2)

    assert harness.engine.pipelines == {P1: harness.p1.pipeline, P2: p2.pipeline}
    assert harness.engine.lane(P3) is None


def test_what_a_tenant_has_had_of_one_pipeline_counts_at_the_others() -> None:
    harness = Harness(TenantLedger(), num_slots=1)
    running = harness.submit(1, tenant="other")
    harness.add(P2, num_slots=1)
    assert where(harness.submit(2, tenant="busy", max_tokens=400)) == P2
    harness.engine.set_accepting(P2, False)
    for number, tenant in ((3, "busy"), (4, "new")):
        harness.submit(number, tenant=tenant)

    harness.engine.abort(running.sequence.sequence_id)

    waiting = [number for number in (3, 4) if not harness.sequence(number).has_started]
    assert waiting == [3]


# Slots that are taken


def test_the_slot_of_a_preempted_answer_is_cancelled_before_the_batch_that_uses_it_again() -> None:
    harness = Harness(num_slots=1)
    low = harness.submit(1, num_prompt=20, max_tokens=8, qos=QosClass.THROUGHPUT)
    harness.p1.compute(3)
    got = token_ids(low)
    harness.p1.sent.clear()
    harness.clock.move_to(1.0)

    high = harness.submit(2, num_prompt=5, max_tokens=4, qos=QosClass.LATENCY)
    harness.p1.compute_all()

    assert harness.p1.bodies()[:2] == ["cancel", "step"]
    assert harness.p1.steps()[0].rows[0].slot == 0
    assert token_ids(high) == expected_answer(5, 4)
    assert got + token_ids(low) == expected_answer(20, 8)
    assert low.sequence.num_preemptions == 1
    assert harness.p1.lane.scheduler.num_replay_mismatches == 0


# Pipelines that go away


def run_until_lost(harness: Harness, stages: Stages, answer: Answer, num_tokens: int) -> list[int]:
    """Have a pipeline compute until it has delivered so many tokens, then lose it."""
    got: list[int] = []
    while len(got) < num_tokens:
        assert stages.compute(), "nothing left to do"
        got += token_ids(answer)
    harness.engine.pipeline_down(stages.pipeline.pipeline_id, LOST)
    harness.engine.check_invariants()
    return got


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9])
def test_an_answer_whose_pipeline_is_lost_goes_on_elsewhere_with_the_same_text(num_tokens: int) -> None:
    harness = Harness()
    answer = harness.submit(num_prompt=20, max_tokens=10)
    p2 = harness.add(P2)

    before = run_until_lost(harness, harness.p1, answer, num_tokens)
    p2.compute_all()
    events = delivered(answer)

    assert before + [event.token_id for event in events] == expected_answer(20, 10)
    assert [event.index for event in events] == list(range(num_tokens, 10))
    assert events[-1].finish is FinishReason.LENGTH
    assert where(answer) == P2
    assert harness.engine.is_idle


def test_all_that_run_and_wait_go_on_elsewhere() -> None:
    harness = Harness(num_slots=2)
    answers = [harness.submit(number, num_prompt=5 + number, max_tokens=6) for number in range(1, 6)]
    harness.p1.compute(5)
    p2 = harness.add(P2, num_slots=2)

    harness.engine.pipeline_down(P1, LOST)
    harness.engine.check_invariants()
    p2.compute_all()

    assert [token_ids(answer) for answer in answers] == [expected_answer(5 + number, 6) for number in range(1, 6)]
    assert harness.engine.is_idle


def test_an_answer_can_lose_one_pipeline_after_the_other() -> None:
    harness = Harness()
    answer = harness.submit(num_prompt=20, max_tokens=12)
    got: list[int] = []
    stages = harness.p1
    for pipeline_id in (P2, P3, P1):
        following = harness.add(pipeline_id)
        got += run_until_lost(harness, stages, answer, 3)
        stages = following
    stages.compute_all()

    assert got + token_ids(answer) == expected_answer(20, 12)


def test_late_results_of_a_lost_pipeline_change_nothing() -> None:
    harness = Harness()
    answer = harness.submit(num_prompt=20, max_tokens=10)
    p2 = harness.add(P2)
    harness.p1.compute()
    late = harness.p1.last_step()
    harness.engine.pipeline_down(P1, LOST)

    harness.p1.answer_step(5, step=late)
    p2.compute_all()

    assert token_ids(answer) == expected_answer(20, 10)


async def test_an_answer_that_fits_no_other_pipeline_gets_the_error_when_it_has_waited_in_vain() -> None:
    harness = Harness()
    answer = harness.submit(num_prompt=20, max_tokens=100)
    harness.p1.compute()
    harness.add(P2, context_tokens=64)

    harness.engine.pipeline_down(P1, LOST)
    harness.clock.move_to(PARKED_S)

    assert (await next_event(answer)).index == 0
    assert await error_of(answer) is LOST
    assert harness.engine.is_idle


def test_a_request_without_a_token_yet_may_go_where_less_of_its_answer_fits() -> None:
    harness = Harness()
    answer = harness.submit(num_prompt=20, max_tokens=100)
    p2 = harness.add(P2, context_tokens=64)

    harness.engine.pipeline_down(P1, LOST)
    p2.compute_all()

    assert token_ids(answer) == expected_answer(20, 44)


def test_the_move_is_part_of_the_story() -> None:
    harness = Harness()
    harness.submit(1, "r1")
    harness.add(P2)
    harness.engine.pipeline_down(P1, LOST)

    story = harness.engine.stories.find("r1").to_proto()

    assert ("moved", "p1 -> p2: p1 is gone (WORKER_LOST)") in told(harness, "r1")
    assert [(route.pipeline_id, route.reason) for route in story.routes] == [
        ("p1", "arrived"),
        ("p2", "p1 is gone (WORKER_LOST)"),
    ]


def test_a_pipeline_that_is_gone_already_can_be_taken_down_again() -> None:
    harness = Harness()
    harness.engine.pipeline_down(P1, LOST)

    harness.engine.pipeline_down(P1, LOST)
    harness.engine.set_pace(P1, Pace(1))

    assert harness.engine.pipelines == {}


def test_a_moved_sequence_can_be_aborted_where_it_is_now() -> None:
    harness = Harness()
    harness.submit(1)
    p2 = harness.add(P2)
    harness.engine.pipeline_down(P1, LOST)

    harness.engine.abort(SequenceId(1))

    assert p2.bodies() == ["step", "cancel"]
    assert harness.engine.is_idle


def test_a_pipeline_that_a_device_leaves_takes_nothing_more_and_ends_what_it_has() -> None:
    harness = Harness()
    answer = harness.submit(1, num_prompt=20, max_tokens=5)
    harness.add(P2)
    harness.engine.set_accepting(P1, False)

    assert [where(harness.submit(number)) for number in (2, 3, 4)] == [P2, P2, P2]
    harness.p1.compute_all()
    assert token_ids(answer) == expected_answer(20, 5)


def test_nothing_moves_to_a_pipeline_that_takes_nothing_more() -> None:
    harness = Harness()
    answer = harness.submit(1)
    harness.add(P2)
    harness.engine.set_accepting(P2, False)

    harness.engine.pipeline_down(P1, LOST)
    harness.clock.move_to(PARKED_S)

    assert harness.engine.is_idle
    assert isinstance(answer._queue.get_nowait(), WorkerLost)


def test_where_no_pipeline_takes_requests_any_more_a_new_one_is_told_to_come_again() -> None:
    harness = Harness()
    harness.engine.set_accepting(P1, False)

    with pytest.raises(NotReady) as raised:
        harness.submit(1)

    assert raised.value.retry_after_s > 0
