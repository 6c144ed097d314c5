"""A lane: what it sends in which order, how the router sees it, and how much it gets done."""

from __future__ import annotations

import time

import pytest

from orchestrator.core.limits import Pace
from orchestrator.core.routing import PipelineView, RouteRequest
from orchestrator.lane import RATE_WINDOW_S, Rate
from shoal.types import DeviceMode, QosClass, SequenceId
from shoal.v1 import flow_pb2
from tests.support.lanes import P2, Harness

REQUEST = RouteRequest(QosClass.BALANCED, num_prompt=20, max_tokens=30)


def view(harness: Harness, request: RouteRequest = REQUEST) -> PipelineView:
    return harness.p1.lane.view(request, harness.clock.now())


def test_an_idle_lane_can_start_a_request_at_once() -> None:
    seen = view(Harness(num_stages=2, context_tokens=300, max_batch=6))

    assert (seen.can_start, seen.has_latency, seen.num_running, seen.num_waiting) == (True, False, 0, 0)
    assert (seen.num_stages, seen.sequence_tokens, seen.max_batch, seen.steps_per_s) == (2, 300, 6, 0.0)
    assert (seen.mode, seen.cached_tokens, seen.is_accepting) == (DeviceMode.MIXED, 0, True)


def test_a_lane_without_a_free_slot_cannot_start_a_request() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)

    assert not view(harness).can_start


def test_a_lane_where_somebody_waits_cannot_start_a_request() -> None:
    harness = Harness(num_slots=2, kv_tokens=512)
    harness.submit(1, num_prompt=100, max_tokens=300)
    harness.submit(2, num_prompt=100, max_tokens=300)
    assert harness.p1.lane.scheduler.used_slots == 1

    assert view(harness).num_waiting == 1
    assert not view(harness).can_start


@pytest.mark.parametrize(("max_tokens", "can_start"), [(108, True), (109, False)])
def test_a_lane_without_kv_for_all_of_an_answer_cannot_start_it(max_tokens: int, can_start: bool) -> None:
    harness = Harness(kv_tokens=512)
    harness.submit(1, num_prompt=84, max_tokens=300)

    # 384 of 512 tokens are reserved.
    assert view(harness, RouteRequest(QosClass.BALANCED, 20, max_tokens)).can_start == can_start


def test_a_lane_can_start_what_asks_for_more_than_a_sequence_may_have() -> None:
    assert view(Harness(kv_tokens=512), RouteRequest(QosClass.BALANCED, 20, 10_000)).can_start


def test_a_lane_that_takes_nothing_more_cannot_start_a_request() -> None:
    harness = Harness()
    harness.p1.lane.is_accepting = False

    assert not view(harness).can_start
    assert not view(harness).is_accepting
    assert not harness.p1.lane.has_room


def test_a_latency_request_that_runs_or_waits_is_seen() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    assert not view(harness).has_latency

    harness.submit(2, qos=QosClass.LATENCY)
    assert view(harness).has_latency
    harness.engine.abort(SequenceId(2))
    assert not view(harness).has_latency


def test_limits_in_force_are_seen() -> None:
    harness = Harness(max_batch=8)

    harness.engine.set_pace(harness.p1.pipeline.pipeline_id, Pace(4, 6.0))

    assert (view(harness).max_batch, view(harness).steps_per_s) == (4, 6.0)
    assert harness.p1.lane.limits_text() == "p1: at most 4 rows a batch, 6 steps per second"


@pytest.mark.parametrize(("pace", "is_limited"), [(Pace(8), False), (Pace(7), True), (Pace(8, 12.0), True)])
def test_a_lane_is_limited_where_rows_or_steps_are_fewer_than_it_could(pace: Pace, is_limited: bool) -> None:
    harness = Harness(max_batch=8)

    harness.engine.set_pace(harness.p1.pipeline.pipeline_id, pace)

    assert harness.p1.lane.is_limited == is_limited


def test_what_steps_take_goes_into_what_is_predicted() -> None:
    harness = Harness()
    harness.add(P2)
    harness.submit(1, max_tokens=200)
    before = view(harness).prediction
    for _ in range(20):
        sent_ns = time.monotonic_ns()
        stamps_ns = (sent_ns, sent_ns, sent_ns + 3 * 10**9)
        row = harness.p1.last_step().rows[0]
        token = flow_pb2.SampledToken(sequence_id=row.sequence_id, token_id=7)
        result = flow_pb2.StepResult(step=harness.p1.last_step().step, tokens=[token], stamps_ns=stamps_ns)
        harness.p1.feed(result)

    after = view(harness).prediction

    assert after.inter_token_s > 1.0 > before.inter_token_s


def test_a_rate_is_over_the_time_since_the_first_of_the_window() -> None:
    rate = Rate()
    for second in range(5):
        rate.add(10, 100.0 + second)

    assert rate.per_second(105.0) == 10.0
    assert rate.total == 50


def test_a_few_events_at_once_are_no_high_rate() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0.0

    rate.add(10, 1.0)
    rate.add(10, 1.000001)
    assert rate.per_second(1.00001) == 20.0


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    rate = Rate()
    rate.add(1000, 0.0)
    rate.add(1, 50.0)
    rate.add(1, 51.0)

    assert rate.per_second(52.0) == 1.0
    assert rate.per_second(51.0 + RATE_WINDOW_S + 1.0) == 0.0
    assert rate.total == 1002
