"""Figures of a run: each is what it is called, errors and waiting show, and a slow harness is told from a server."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.plan import Plan, PlannedRequest, Record, RunResult, Slo
from loadtest.statistics import (
    CLIENT_RULE,
    Group,
    Spread,
    Statistics,
    e2e_s,
    gaps_s,
    is_good,
    spread,
    summarize,
    tpot_s,
    ttft_s,
)
from shoal.types import QosClass


def make_record(
    *token_at_s: float,
    due_s: float = 0.0,
    sent_at_s: float | None = None,
    ended_at_s: float | None = None,
    qos: QosClass = QosClass.BALANCED,
    tenant: str = "",
    stream: str = "default",
    prompt_tokens: int = 10,
    error: str = "",
    num_preemptions: int = 0,
) -> Record:
    """A record whose answer ended with its last token, or, without tokens, when it was due."""
    last_s = token_at_s[-1] if token_at_s else due_s
    return Record(
        request=PlannedRequest(0, due_s, "words", 99, 16, qos, tenant, stream),
        due_s=due_s,
        sent_at_s=due_s if sent_at_s is None else sent_at_s,
        ended_at_s=last_s if ended_at_s is None else ended_at_s,
        token_at_s=token_at_s,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(token_at_s),
        error=error,
        num_preemptions=num_preemptions,
    )


def make_result(
    *records: Record,
    duration_s: float = 10.0,
    slos: dict[QosClass, Slo] | None = None,
    loop_lag_s: tuple[float, ...] = (),
    cpu_share: float = 0.1,
    num_planned: int | None = None,
) -> RunResult:
    requests = (PlannedRequest(0, 0.0, "words", 1, 1),) * (len(records) if num_planned is None else num_planned)
    plan = Plan(requests, 0, 1, "made by hand")
    return RunResult(plan, "target", records, duration_s, slos or {}, loop_lag_s, cpu_share)


def overall(*records: Record, **fields: object) -> Group:
    return summarize(make_result(*records, **fields)).overall  # type: ignore[arg-type]


class TestLatencies:
    def test_time_to_first_token_counts_from_when_the_request_was_due(self) -> None:
        assert ttft_s(make_record(3.0, due_s=1.0, sent_at_s=2.5)) == 2.0

    def test_time_to_the_end_counts_from_when_the_request_was_due(self) -> None:
        assert e2e_s(make_record(3.0, due_s=1.0, sent_at_s=2.5, ended_at_s=4.0)) == 3.0

    def test_time_per_token_leaves_the_first_token_out(self) -> None:
        assert tpot_s(make_record(5.0, 5.1, 5.2, ended_at_s=5.4)) == pytest.approx(0.2)

    def test_one_token_has_no_time_per_token(self) -> None:
        assert tpot_s(make_record(5.0, ended_at_s=6.0)) is None

    def test_tokens_of_one_message_have_no_gap(self) -> None:
        assert gaps_s(make_record(1.0, 1.0, 1.5)) == [0.0, 0.5]

    def test_each_is_summed_up_over_requests_or_gaps(self) -> None:
        group = overall(make_record(1.0, 2.0, 4.0), make_record(3.0, 3.5, due_s=1.0, ended_at_s=4.0))
        assert group.ttft is not None
        assert (group.ttft.count, group.ttft.mean_s, group.ttft.max_s) == (2, 1.5, 2.0)
        assert group.tpot is not None
        assert (group.tpot.count, group.tpot.p50_s) == (2, 1.25)
        assert group.gap is not None
        assert (group.gap.count, group.gap.max_s) == (3, 2.0)
        assert group.e2e is not None
        assert (group.e2e.count, group.e2e.mean_s) == (2, 3.5)

    def test_failed_requests_have_no_latency_and_are_counted_by_reason(self) -> None:
        group = overall(
            make_record(1.0),
            make_record(9.0, error="WORKER_LOST"),
            make_record(error="OVERLOADED"),
            make_record(error="OVERLOADED"),
        )
        assert group.ttft is not None
        assert group.ttft.max_s == 1.0
        assert (group.num_requests, group.num_ok) == (4, 1)
        assert list(group.errors.items()) == [("OVERLOADED", 2), ("WORKER_LOST", 1)]

    def test_without_samples_there_is_nothing_and_not_a_zero(self) -> None:
        group = overall()
        assert (group.ttft, group.tpot, group.gap, group.e2e, group.steady_tokens_per_s) == (None,) * 5
        assert (group.good_share, group.goodput_per_s, group.tokens_per_s) == (None, 0.0, 0.0)

    def test_a_run_of_no_duration_has_no_rates(self) -> None:
        group = overall(make_record(0.0), duration_s=0.0)
        assert (group.goodput_per_s, group.tokens_per_s) == (0.0, 0.0)


class TestSpreads:
    def test_percentiles_are_linear_between_neighbours(self) -> None:
        found = spread([float(sample) for sample in range(1, 102)])
        assert found == Spread(101, 51.0, 51.0, 91.0, 100.0, 101.0, is_p99_rough=False)
        two = spread([0.0, 1.0])
        assert two is not None
        assert (two.p50_s, two.p90_s, two.p99_s) == pytest.approx((0.5, 0.9, 0.99))

    @pytest.mark.parametrize(("count", "is_rough"), [(99, True), (100, False)])
    def test_the_highest_percentile_of_few_samples_is_marked(self, count: int, is_rough: bool) -> None:
        found = spread([1.0] * count)
        assert found is not None
        assert found.is_p99_rough is is_rough

    def test_no_samples_have_no_spread(self) -> None:
        assert spread([]) is None
        assert spread([None]) is None

    @given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=50))
    def test_percentiles_rise_and_stay_within_the_samples(self, samples: list[float]) -> None:
        found = spread(samples)
        assert found is not None
        assert min(samples) <= found.p50_s <= found.p90_s <= found.p99_s <= found.max_s == max(samples)
        assert found.p50_s == pytest.approx(np.median(samples))


class TestGoodput:
    @pytest.mark.parametrize(
        ("slo", "is_met"),
        [
            (Slo(), True),
            (Slo(ttft_s=1.0, tpot_s=0.5, e2e_s=2.0), True),
            (Slo(ttft_s=0.99), False),
            (Slo(tpot_s=0.49), False),
            (Slo(e2e_s=1.99), False),
        ],
    )
    def test_good_means_within_every_limit(self, slo: Slo, is_met: bool) -> None:
        assert is_good(make_record(2.0, 2.5, 3.0, due_s=1.0), slo) is is_met

    def test_a_failed_request_is_not_good_whatever_its_speed(self) -> None:
        assert not is_good(make_record(0.1, error="CANCELLED"), Slo())

    def test_one_token_cannot_miss_the_time_per_token(self) -> None:
        assert is_good(make_record(1.0, ended_at_s=9.0), Slo(tpot_s=0.01))

    def test_an_empty_answer_counts_as_there_when_it_ended(self) -> None:
        assert is_good(make_record(ended_at_s=1.0), Slo(ttft_s=1.0))
        assert not is_good(make_record(ended_at_s=1.1), Slo(ttft_s=1.0))

    def test_waiting_in_the_harness_makes_a_request_late(self) -> None:
        assert not is_good(make_record(2.0, due_s=0.0, sent_at_s=1.9), Slo(ttft_s=1.0))

    def test_each_class_is_held_to_its_own_limits(self) -> None:
        slos = {QosClass.LATENCY: Slo(ttft_s=0.5), QosClass.BALANCED: Slo(ttft_s=2.0)}
        records = [make_record(1.0, qos=qos) for qos in QosClass]
        statistics = summarize(make_result(*records, slos=slos))
        assert [(group.name, group.num_good) for group in statistics.by_class] == [
            ("latency", 0),
            ("balanced", 1),
            ("throughput", 1),
        ]
        assert statistics.overall.num_good == 2

    def test_requests_without_an_slo_are_no_part_of_the_share(self) -> None:
        slos = {QosClass.LATENCY: Slo(ttft_s=0.5), QosClass.BALANCED: Slo(ttft_s=2.0), QosClass.THROUGHPUT: Slo()}
        statistics = summarize(make_result(*(make_record(1.0, qos=qos) for qos in QosClass), slos=slos))
        assert [group.good_share for group in statistics.by_class] == [0.0, 1.0, None]
        assert (statistics.overall.num_judged, statistics.overall.good_share) == (2, 0.5)

    def test_errors_count_against_the_share(self) -> None:
        records = (make_record(1.0), make_record(1.0), make_record(1.0), make_record(error="OVERLOADED"))
        group = overall(*records, slos={QosClass.BALANCED: Slo(ttft_s=2.0)})
        assert group.good_share == 0.75
        assert group.goodput_per_s == 0.3


class TestRates:
    def test_the_aggregate_is_all_tokens_by_all_time(self) -> None:
        # The fastest stream has 2 tokens/s; two of them would make 4.
        group = overall(make_record(0.5, 1.0, 1.5, 2.0), make_record(4.0, 9.0))
        assert (group.completion_tokens, group.tokens_per_s) == (6, 0.6)

    def test_tokens_of_failed_requests_were_delivered_too(self) -> None:
        assert overall(make_record(1.0, 2.0, error="WORKER_LOST")).tokens_per_s == 0.2

    def test_tokens_after_the_end_of_the_run_do_not_count(self) -> None:
        assert overall(make_record(9.0, 10.0, 11.0)).tokens_per_s == 0.2

    def test_the_steady_rate_leaves_out_the_tail_in_which_the_run_empties(self) -> None:
        group = overall(make_record(1.0, 2.0, 4.0, due_s=0.0), make_record(5.0, 9.0, due_s=4.0))
        assert group.steady_tokens_per_s == 0.75

    def test_steady_rates_of_groups_add_up_to_that_of_all(self) -> None:
        records = [make_record(1.0, 2.0, due_s=0.0, tenant="a"), make_record(5.0, due_s=4.0, tenant="b")]
        statistics = summarize(make_result(*records))
        assert statistics.overall.steady_tokens_per_s == 0.5
        assert [group.steady_tokens_per_s for group in statistics.by_tenant] == [0.5, 0.0]

    def test_one_arrival_has_no_steady_rate(self) -> None:
        assert overall(make_record(1.0, 2.0)).steady_tokens_per_s is None

    @given(st.lists(st.lists(st.floats(0.0, 10.0), max_size=8), max_size=8))
    def test_the_aggregate_is_the_sum_over_streams(self, times: list[list[float]]) -> None:
        records = [make_record(*sorted(at_s), stream=f"s{index % 3}") for index, at_s in enumerate(times)]
        statistics = summarize(make_result(*records))
        assert sum(group.tokens_per_s for group in statistics.by_stream) == pytest.approx(
            statistics.overall.tokens_per_s
        )
        assert sum(group.num_requests for group in statistics.by_stream) == len(records)


class TestGroups:
    def test_classes_come_from_the_most_urgent_on_and_only_those_that_are_there(self) -> None:
        records = [make_record(qos=QosClass.THROUGHPUT), make_record(qos=QosClass.LATENCY)]
        assert [group.name for group in summarize(make_result(*records)).by_class] == ["latency", "throughput"]

    def test_tenants_come_by_name_and_the_unnamed_one_is_the_default(self) -> None:
        records = [make_record(tenant="z"), make_record(tenant=""), make_record(tenant="a")]
        assert [group.name for group in summarize(make_result(*records)).by_tenant] == ["a", "default", "z"]

    def test_streams_come_as_they_first_did(self) -> None:
        records = [make_record(stream="b"), make_record(stream="a"), make_record(stream="b")]
        found = summarize(make_result(*records)).by_stream
        assert [(group.name, group.num_requests) for group in found] == [("b", 2), ("a", 1)]

    def test_preemptions_and_tokens_are_added_up(self) -> None:
        group = overall(make_record(1.0, num_preemptions=2), make_record(1.0, 2.0, num_preemptions=1, prompt_tokens=7))
        assert (group.num_preemptions, group.prompt_tokens, group.completion_tokens) == (3, 17, 3)

    def test_a_server_that_does_not_count_prompt_tokens_is_taken_at_the_plan(self) -> None:
        assert overall(make_record(1.0, prompt_tokens=0)).prompt_tokens == 99

    def test_requests_that_were_never_sent_are_seen_in_the_count_of_the_plan(self) -> None:
        statistics = summarize(make_result(make_record(1.0), num_planned=5))
        assert (statistics.num_planned, statistics.overall.num_requests) == (5, 1)


class TestFairness:
    def test_service_weighs_answer_tokens_double(self) -> None:
        records = [make_record(1.0, 2.0, tenant="a", prompt_tokens=6), make_record(1.0, tenant="b", prompt_tokens=28)]
        shares = summarize(make_result(*records)).fairness.tenants
        assert [(share.tenant, share.service, share.share) for share in shares] == [("a", 10, 0.25), ("b", 30, 0.75)]

    def test_equal_service_is_fair(self) -> None:
        records = [make_record(1.0, tenant=tenant) for tenant in "abc"]
        assert summarize(make_result(*records)).fairness.jain_index == pytest.approx(1.0)

    def test_a_tenant_that_gets_nothing_is_seen(self) -> None:
        records = [make_record(1.0, tenant="a"), make_record(tenant="b", error="OVERLOADED")]
        fairness = summarize(make_result(*records)).fairness
        assert fairness.jain_index == 0.5
        assert fairness.tenants[1].service == 0

    def test_without_service_there_is_no_fairness(self) -> None:
        assert summarize(make_result()).fairness.jain_index is None


class TestTheHarness:
    def limited(self, *records: Record, **fields: object) -> tuple[str, ...]:
        client = summarize(make_result(*records, **fields)).client  # type: ignore[arg-type]
        assert client.is_client_limited == bool(client.reasons)
        return client.reasons

    def test_a_harness_in_time_is_not_the_bottleneck(self) -> None:
        assert self.limited(make_record(0.1, sent_at_s=0.009), loop_lag_s=(0.001, 0.009)) == ()

    def test_late_sending_is_told(self) -> None:
        assert self.limited(make_record(0.1, sent_at_s=0.011)) == (
            "p99 of the lag of sending is 11.0 ms, above 10.0 ms",
        )

    def test_lag_that_is_little_beside_the_latency_does_no_harm(self) -> None:
        assert self.limited(make_record(2.0, sent_at_s=0.09)) == ()
        assert self.limited(make_record(2.0, sent_at_s=0.11)) != ()

    def test_a_late_event_loop_is_told(self) -> None:
        reasons = self.limited(make_record(0.1), loop_lag_s=(0.02,))
        assert reasons == ("p99 of the event loop's lag is 20.0 ms, above 10.0 ms",)

    def test_a_busy_core_is_told(self) -> None:
        assert self.limited(make_record(0.1), cpu_share=0.95) == ("the harness took 95% of a core, above 90%",)

    def test_lag_is_measured_of_failed_requests_too(self) -> None:
        client = summarize(make_result(make_record(error="OVERLOADED", sent_at_s=0.5))).client
        assert client.lag is not None
        assert client.lag.max_s == 0.5

    def test_the_rule_is_stated(self) -> None:
        assert summarize(make_result()).client.rule == CLIENT_RULE
        assert "above 10 ms and above 5% of the median time to first token" in CLIENT_RULE


class TestJson:
    def statistics(self) -> Statistics:
        records = [make_record(1.0, 2.0), make_record(error="OVERLOADED", qos=QosClass.LATENCY)]
        return summarize(make_result(*records, slos={QosClass.LATENCY: Slo(ttft_s=0.5)}, loop_lag_s=(0.001,)))

    def test_everything_can_be_written_as_json_and_read_back(self) -> None:
        jsonable = self.statistics().to_jsonable()
        assert json.loads(json.dumps(jsonable, allow_nan=False)) == jsonable

    def test_names_are_those_of_the_fields(self) -> None:
        jsonable = self.statistics().to_jsonable()
        assert jsonable["overall"]["ttft"]["p99_s"] == 1.0
        assert jsonable["overall"]["ttft"]["is_p99_rough"] is True
        assert jsonable["by_class"][0]["errors"] == {"OVERLOADED": 1}
        assert jsonable["slos"] == {"latency": {"ttft_s": 0.5, "tpot_s": None, "e2e_s": None}}
        assert jsonable["client"]["is_client_limited"] is False

    @given(st.lists(st.floats(0.0, 1e9), max_size=20), st.just(0.0) | st.floats(1e-6, 1e9))
    def test_no_figure_is_infinite_or_no_number(self, times: list[float], duration_s: float) -> None:
        statistics = summarize(make_result(make_record(*sorted(times)), duration_s=duration_s))
        json.dumps(statistics.to_jsonable(), allow_nan=False)
        assert math.isfinite(statistics.overall.tokens_per_s)
