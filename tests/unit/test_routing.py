"""The choice of a pipeline: which one a request of each class goes to, and what the decision says of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.routing import (
    EXPECTED_TOKENS,
    MAX_BORROWERS,
    SHARED_HANDICAP,
    Candidate,
    Decision,
    PipelineView,
    RouteRequest,
    reroute,
    route,
)
from orchestrator.core.step_time import Prediction
from shoal.types import DeviceMode, PipelineId, QosClass

P1, P2, P3 = PipelineId("p1"), PipelineId("p2"), PipelineId("p3")


def make_view(
    pipeline_id: PipelineId = P1,
    *,
    mode: DeviceMode = DeviceMode.MIXED,
    queue_s: float = 0.0,
    prefill_s: float = 1.0,
    inter_token_s: float = 0.05,
    num_stages: int = 1,
    can_start: bool = True,
    has_latency: bool = False,
    num_running: int = 0,
    **fields: Any,
) -> PipelineView:
    values = {"sequence_tokens": 512, "num_waiting": 0, "max_batch": 8, **fields}
    return PipelineView(
        pipeline_id=pipeline_id,
        mode=mode,
        num_stages=num_stages,
        prediction=Prediction(queue_s=queue_s, prefill_s=prefill_s, inter_token_s=inter_token_s),
        num_running=num_running,
        has_latency=has_latency,
        can_start=can_start,
        **values,
    )


def make_latency_view(pipeline_id: PipelineId = P2, **fields: Any) -> PipelineView:
    return make_view(pipeline_id, mode=DeviceMode.LATENCY, **fields)


def make_request(
    qos: QosClass = QosClass.BALANCED, *, num_prompt: int = 100, max_tokens: int = 64, has_answer: bool = False
) -> RouteRequest:
    return RouteRequest(qos, num_prompt, max_tokens, has_answer)


LATENCY, THROUGHPUT = make_request(QosClass.LATENCY), make_request(QosClass.THROUGHPUT)
NOT_LATENCY = pytest.mark.parametrize("qos", [QosClass.BALANCED, QosClass.THROUGHPUT], ids=lambda qos: qos.value)


def candidate(decision: Decision, pipeline_id: PipelineId) -> Candidate:
    return next(one for one in decision.candidates if one.pipeline_id == pipeline_id)


def test_without_pipelines_there_is_nobody_to_take_a_request() -> None:
    assert route(LATENCY, []) == Decision((), "arrived")


def test_the_only_pipeline_takes_every_class() -> None:
    for qos in QosClass:
        assert route(make_request(qos), [make_view()]).pipeline_id == P1


def test_a_score_is_the_time_to_the_first_token_and_to_an_answer_of_usual_length() -> None:
    decision = route(make_request(), [make_view(queue_s=2.0, prefill_s=1.0, inter_token_s=0.5)])

    (one,) = decision.candidates
    assert one.score_s == 3.0 + EXPECTED_TOKENS * 0.5
    assert (one.queue_s, one.prefill_s, one.inter_token_s, one.num_stages) == (2.0, 1.0, 0.5, 1)


@pytest.mark.parametrize(
    "slower", [{"queue_s": 0.1}, {"prefill_s": 1.1}, {"inter_token_s": 0.06}], ids=["queue", "prefill", "pace"]
)
def test_a_request_goes_where_its_answer_is_predicted_to_be_complete_first(slower: dict[str, Any]) -> None:
    decision = route(make_request(), [make_view(P1, **slower), make_view(P2)])

    assert decision.pipeline_id == P2
    assert decision.ranking == (P2, P1)


def test_among_equals_the_shortest_pipeline_is_taken_then_the_first_by_name() -> None:
    views = [make_view(P3), make_view(P2), make_view(P1, num_stages=2)]

    assert route(make_request(), views).ranking == (P2, P3, P1)


def test_among_equals_the_one_with_the_fewest_requests_is_taken() -> None:
    views = [make_view(P1, num_running=1), make_view(P2, num_waiting=2), make_view(P3, num_stages=2)]

    assert route(make_request(), views).ranking == (P3, P1, P2)


def cached(pipeline_id: PipelineId, **fields: Any) -> PipelineView:
    """A pipeline that has three quarters of a prompt that takes a second."""
    return make_view(pipeline_id, prefill_s=0.25, cached_tokens=75, saved_s=0.75, **fields)


def test_a_request_goes_where_the_most_time_is_saved_and_the_decision_says_by_what() -> None:
    decision = route(make_request(), [make_view(P1), cached(P2)])

    assert decision.pipeline_id == P2
    assert (candidate(decision, P2).prefill_s, candidate(decision, P2).cached_tokens) == (0.25, 75)
    assert (candidate(decision, P1).prefill_s, candidate(decision, P1).cached_tokens) == (1.0, 0)


def test_a_fast_device_computes_a_prompt_sooner_than_a_slow_one_the_rest_of_it() -> None:
    fast = make_view(P1, prefill_s=0.2)

    assert route(make_request(), [fast, cached(P2)]).pipeline_id == P1


@pytest.mark.parametrize(("num_running", "chosen", "prefill_s"), [(4, P2, 0.25), (5, P1, 1.0)])
def test_a_crowded_pipeline_is_not_chosen_for_its_cache_alone(
    num_running: int, chosen: PipelineId, prefill_s: float
) -> None:
    # Half a batch of 8 more than nothing is not crowded yet.
    decision = route(make_request(), [make_view(P1), cached(P2, num_running=num_running, queue_s=0.01)])

    assert decision.pipeline_id == chosen
    assert (candidate(decision, P2).prefill_s, candidate(decision, P2).cached_tokens) == (prefill_s, 75)


def test_where_all_are_about_as_busy_the_cache_counts() -> None:
    views = [make_view(P1, num_running=16), cached(P2, num_running=24), make_view(P3, num_running=17)]

    assert route(make_request(), views).pipeline_id == P2


def test_what_is_ruled_out_is_no_measure_of_who_is_crowded() -> None:
    idle = make_view(P1, is_accepting=False)

    decision = route(make_request(), [idle, cached(P2, num_running=8)])

    assert candidate(decision, P2).prefill_s == 0.25


def test_a_pipeline_that_heat_has_made_small_is_crowded_sooner() -> None:
    decision = route(make_request(), [make_view(P1, num_running=1), cached(P2, num_running=3, max_batch=2)])

    assert candidate(decision, P2).prefill_s == 1.0


def test_a_deadline_is_met_where_the_prompt_is_there_already() -> None:
    request = replace(make_request(), time_left_s=0.5)
    views = [make_view(P1, can_start=False), cached(P2, inter_token_s=0.05), make_view(P3)]

    decision = reroute(request, P1, views)

    assert decision.ranking == (P2,)
    assert candidate(decision, P3).ruled_out.startswith("would miss the deadline")


def test_a_limit_on_steps_is_a_limit_on_the_pace_of_an_answer() -> None:
    decision = route(make_request(), [make_view(P1, steps_per_s=4.0), make_view(P2, inter_token_s=0.2)])

    assert candidate(decision, P1).inter_token_s == 0.25
    assert decision.pipeline_id == P2


# Latency


def test_a_latency_request_gets_an_idle_latency_device_though_another_is_predicted_to_be_faster() -> None:
    views = [make_view(P1, inter_token_s=0.01), make_latency_view(inter_token_s=0.05)]

    assert route(LATENCY, views).pipeline_id == P2


def test_a_latency_device_that_others_borrow_is_still_the_first_choice_of_latency() -> None:
    views = [make_view(P1, inter_token_s=0.01), make_latency_view(num_running=1)]

    assert route(LATENCY, views).pipeline_id == P2


@pytest.mark.parametrize(("shared_s", "chosen"), [(0.026, P2), (0.024, P1)])
def test_a_second_latency_request_leaves_the_device_only_for_a_much_faster_pipeline(
    shared_s: float, chosen: PipelineId
) -> None:
    views = [
        make_view(P1, prefill_s=0.0, inter_token_s=shared_s),
        make_latency_view(prefill_s=0.0, inter_token_s=0.05, has_latency=True, num_running=1),
    ]

    decision = route(LATENCY, views)

    assert decision.pipeline_id == chosen
    assert candidate(decision, P1).score_s == SHARED_HANDICAP * EXPECTED_TOKENS * shared_s


def test_of_two_latency_devices_the_free_one_is_taken() -> None:
    views = [make_latency_view(P1, has_latency=True, inter_token_s=0.01), make_latency_view(P2)]

    assert route(LATENCY, views).pipeline_id == P2


def test_a_full_latency_device_is_weighed_like_others() -> None:
    views = [make_view(P1), make_latency_view(can_start=False, queue_s=60.0)]

    assert route(LATENCY, views).pipeline_id == P1


# Others


@NOT_LATENCY
def test_a_latency_pipeline_is_kept_from_other_classes(qos: QosClass) -> None:
    decision = route(make_request(qos), [make_view(P1, queue_s=60.0, can_start=False), make_latency_view()])

    assert decision.pipeline_id == P1
    assert candidate(decision, P2).ruled_out == "kept for class latency"
    assert decision.ranking == (P1,)


@NOT_LATENCY
def test_where_all_pipelines_are_for_latency_other_classes_share_them(qos: QosClass) -> None:
    views = [make_latency_view(P1, queue_s=1.0, has_latency=True), make_latency_view(P2)]

    assert route(make_request(qos), views).ranking == (P2, P1)


@NOT_LATENCY
def test_a_latency_pipeline_takes_what_the_others_cannot_hold(qos: QosClass) -> None:
    decision = route(make_request(qos, num_prompt=300), [make_view(sequence_tokens=256), make_latency_view()])

    assert decision.pipeline_id == P2


def test_a_throughput_request_goes_where_a_token_costs_least_not_where_it_comes_soonest() -> None:
    alone = make_view(P1, inter_token_s=0.03, num_stages=1)
    gathered = make_view(P2, inter_token_s=0.06, num_stages=3)

    assert route(make_request(QosClass.BALANCED), [alone, gathered]).pipeline_id == P1
    assert route(THROUGHPUT, [alone, gathered]).pipeline_id == P2


def test_a_throughput_request_avoids_a_pipeline_whose_batches_heat_has_made_small() -> None:
    assert route(THROUGHPUT, [make_view(P1, max_batch=2), make_view(P2, max_batch=8)]).pipeline_id == P2


def test_a_throughput_request_minds_the_queue() -> None:
    assert route(THROUGHPUT, [make_view(P1, num_stages=3, queue_s=5.0), make_view(P2)]).pipeline_id == P2


# Room


def test_a_pipeline_that_holds_less_of_the_answer_than_another_is_ruled_out_with_the_numbers() -> None:
    views = [make_view(P1, sequence_tokens=128), make_view(P2, sequence_tokens=512, queue_s=9.0)]

    decision = route(make_request(num_prompt=100, max_tokens=64), views)

    assert decision.pipeline_id == P2
    assert candidate(decision, P1).ruled_out == "holds 128 tokens of a sequence, this takes 164"


def test_a_new_request_may_ask_for_more_than_any_pipeline_holds() -> None:
    views = [make_view(P1, sequence_tokens=128), make_view(P2, sequence_tokens=512)]

    assert route(make_request(num_prompt=100, max_tokens=4096), views).ranking == (P2,)


def test_a_prompt_that_no_pipeline_holds_is_taken_by_none() -> None:
    decision = route(make_request(num_prompt=512), [make_view(sequence_tokens=512)])

    assert decision.pipeline_id is None
    assert decision.candidates[0].ruled_out == "holds 512 tokens of a sequence, this takes 513"


def test_an_answer_that_has_begun_only_goes_where_all_of_it_fits() -> None:
    request = make_request(num_prompt=100, max_tokens=100, has_answer=True)

    assert route(request, [make_view(sequence_tokens=199)]).pipeline_id is None
    assert route(request, [make_view(sequence_tokens=200)]).pipeline_id == P1


# Leaving


def test_a_pipeline_that_is_about_to_go_away_takes_nothing_more() -> None:
    views = [make_view(P1, is_accepting=False), make_view(P2, queue_s=60.0)]

    decision = route(make_request(), views)

    assert decision.pipeline_id == P2
    assert candidate(decision, P1).ruled_out == "takes no more requests: a device leaves"
    assert reroute(make_request(), P2, views).pipeline_id is None


def test_a_pipeline_that_goes_away_is_no_reason_to_keep_or_to_spare_another() -> None:
    leaving = make_view(P1, is_accepting=False, sequence_tokens=4096)

    assert route(make_request(num_prompt=400, max_tokens=400), [leaving, make_latency_view()]).pipeline_id == P2


# Fallback


def test_a_request_that_is_not_started_in_time_goes_to_a_pipeline_that_can_start_it() -> None:
    decision = reroute(make_request(), P1, [make_view(P1), make_view(P2, queue_s=3.0)], "not started within 200 ms")

    assert (decision.pipeline_id, decision.reason) == (P2, "not started within 200 ms")
    assert candidate(decision, P1).ruled_out == "where it waits"


def test_a_request_stays_where_it_is_if_no_other_can_start_it() -> None:
    decision = reroute(make_request(), P1, [make_view(P1), make_view(P2, can_start=False)])

    assert decision.pipeline_id is None
    assert candidate(decision, P2).ruled_out == "cannot start it now"


@pytest.mark.parametrize(("time_left_s", "chosen"), [(None, P2), (2.6, P2), (2.4, None)])
def test_a_request_stays_where_it_is_if_it_would_miss_its_deadline_elsewhere(
    time_left_s: float | None, chosen: PipelineId | None
) -> None:
    views = [make_view(P1, can_start=False), make_view(P2, prefill_s=1.0, inter_token_s=0.5)]
    request = replace(make_request(), time_left_s=time_left_s, num_certain=4)

    assert reroute(request, P1, views).pipeline_id == chosen


def test_a_fallback_never_shortens_an_answer() -> None:
    views = [make_view(P1, can_start=False), make_view(P2, sequence_tokens=150)]

    assert reroute(make_request(num_prompt=100, max_tokens=64), P1, views).pipeline_id is None


@NOT_LATENCY
def test_an_idle_latency_pipeline_is_lent_to_a_request_that_waits_too_long(qos: QosClass) -> None:
    views = [make_view(P1, can_start=False), make_latency_view(num_running=MAX_BORROWERS - 1)]

    assert reroute(make_request(qos), P1, views).pipeline_id == P2


def test_a_latency_pipeline_is_lent_to_two_at_most() -> None:
    views = [make_view(P1, can_start=False), make_latency_view(num_running=MAX_BORROWERS)]

    decision = reroute(make_request(), P1, views)

    assert decision.pipeline_id is None
    assert candidate(decision, P2).ruled_out == "kept for class latency, and lent to 2 others already"


def test_a_latency_pipeline_in_use_is_not_lent() -> None:
    views = [make_view(P1, can_start=False), make_latency_view(has_latency=True, num_running=1)]

    decision = reroute(make_request(), P1, views)

    assert decision.pipeline_id is None
    assert candidate(decision, P2).ruled_out == "kept for class latency, which it serves now"


def test_a_latency_request_may_leave_its_device_for_a_pipeline_that_can_start_it() -> None:
    views = [make_view(P1), make_latency_view(P2, can_start=False, has_latency=True)]

    assert reroute(LATENCY, P2, views).pipeline_id == P1


def test_candidates_that_are_ruled_out_come_last_and_show_their_numbers_too() -> None:
    decision = route(make_request(), [make_latency_view(P1, inter_token_s=0.001), make_view(P2), make_view(P3)])

    assert [one.pipeline_id for one in decision.candidates] == [P2, P3, P1]
    assert candidate(decision, P1).score_s > 0
