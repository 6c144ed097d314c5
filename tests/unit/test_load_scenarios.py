"""Plans are what workload, seed and sizes say: shares, turns, texts that share what they should and nothing by accident."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest import scenarios
from loadtest.amounts import Amount, Shape, fixed
from loadtest.arrivals import CONSTANT
from loadtest.plan import Plan, PlannedRequest
from loadtest.prompts import NUM_SERIAL_WORDS, TextWriter, vocabulary
from loadtest.traces import Trace, TraceEntry, convert_mooncake, read_trace
from loadtest.workloads import DEFAULT_SLOS, Stream, Workload, load_workload
from shoal.errors import ConfigError
from shoal.types import QosClass

SEEDS = st.integers(0, 2**64 - 1)


def make_stream(name: str = "a", **fields: object) -> Stream:
    defaults: dict[str, object] = {"prompt_tokens": fixed(16), "output_tokens": fixed(8)}
    return Stream(name, **(defaults | fields))  # type: ignore[arg-type]


def make_workload(*streams: Stream, rate_per_s: float | None = None) -> Workload:
    return Workload("w", streams or (make_stream(),), DEFAULT_SLOS, rate_per_s=rate_per_s)


def make_server(*streams: Stream, rate_per_s: float = 2.0, num_requests: int = 40, seed: int = 1) -> Plan:
    return scenarios.server(make_workload(*streams), seed=seed, rate_per_s=rate_per_s, num_requests=num_requests)


def num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def num_shared_words(one: PlannedRequest, other: PlannedRequest) -> int:
    return num_shared(one.prompt.split(), other.prompt.split())


def conversations(plan: Plan) -> list[list[PlannedRequest]]:
    turns: dict[int, list[PlannedRequest]] = {}
    for request in plan.requests:
        if request.after is None:
            turns[request.number] = [request]
        else:
            turns[request.number] = turns.pop(request.after)
            turns[request.number].append(request)
    return list(turns.values())


def check_plan(plan: Plan) -> None:
    """What holds for every plan."""
    assert [request.number for request in plan.requests] == list(range(len(plan.requests)))
    due_s = [request.due_s for request in plan.requests if request.due_s is not None]
    assert due_s == sorted(due_s)
    assert len(due_s) == (0 if plan.concurrency else len(plan.requests))
    for request in plan.requests:
        assert request.max_tokens >= 1
        assert len(request.prompt.split()) == request.prompt_tokens
        assert request.after is None or request.after < request.number


class TestSeeds:
    @given(SEEDS, st.sampled_from(["chat", "mixed", "batch"]))
    @settings(max_examples=20)
    def test_the_same_seed_gives_the_same_plan(self, seed: int, name: str) -> None:
        plans = [scenarios.server(load_workload(name), seed=seed, rate_per_s=2.0, duration_s=10.0) for _ in range(2)]
        assert plans[0] == plans[1]
        check_plan(plans[0])

    # Written down from a run: another machine, or another release of numpy, must not make other requests.
    def test_a_seed_gives_this_very_plan_everywhere(self) -> None:
        plan = scenarios.server(load_workload("mixed"), seed=1, rate_per_s=2.0, num_requests=50)
        drawn = [(r.due_s, r.prompt, r.max_tokens, r.stream, r.after) for r in plan.requests]
        assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == "2ef2e0fcfdb8e896"

    def test_another_seed_gives_other_texts_and_times(self) -> None:
        one, other = make_server(seed=1), make_server(seed=2)
        assert {request.prompt for request in one.requests}.isdisjoint(request.prompt for request in other.requests)
        assert one.requests[0].due_s != other.requests[0].due_s

    def test_another_rate_changes_times_only(self) -> None:
        slow, fast = make_server(rate_per_s=1.0), make_server(rate_per_s=10.0)
        assert [request.prompt for request in slow.requests] == [request.prompt for request in fast.requests]

    def test_a_plan_says_how_it_was_made(self) -> None:
        plan = scenarios.server(make_workload(), seed=1, rate_per_s=2.5, duration_s=10.0)
        assert plan.description.startswith("server: workload w (")
        assert plan.description.endswith("), 2.5 requests/s, burstiness 1, 10 s")

    def test_two_workloads_of_one_name_are_described_differently(self) -> None:
        assert make_server(make_stream()).description != make_server(make_stream(tenant="t")).description


class TestScenarios:
    def test_single_stream_has_one_request_at_a_time(self) -> None:
        plan = scenarios.single_stream(make_workload(), seed=1, num_requests=5)
        assert (plan.concurrency, len(plan.requests)) == (1, 5)
        check_plan(plan)

    def test_offline_has_all_at_once(self) -> None:
        plan = scenarios.offline(make_workload(), seed=1, num_requests=5)
        assert (plan.concurrency, len(plan.requests)) == (5, 5)
        check_plan(plan)

    def test_offline_may_have_fewer_at_once(self) -> None:
        assert scenarios.offline(make_workload(), seed=1, num_requests=5, concurrency=2).concurrency == 2

    def test_server_is_an_open_loop(self) -> None:
        plan = scenarios.server(make_workload(), seed=1, rate_per_s=2.0, duration_s=2.1, burstiness=CONSTANT)
        assert plan.concurrency == 0
        assert [request.due_s for request in plan.requests] == [0.5, 1.0, 1.5, 2.0]

    def test_server_takes_the_workload_s_rate_where_none_is_given(self) -> None:
        workload = make_workload(rate_per_s=4.0)
        plan = scenarios.server(workload, seed=1, num_requests=1, burstiness=CONSTANT)
        assert plan.requests[0].due_s == 0.25

    @pytest.mark.parametrize(
        ("field", "arguments"),
        [("rate_per_s", {"num_requests": 1}), ("duration_s", {"rate_per_s": 0.01, "duration_s": 0.001})],
    )
    def test_server_refuses_what_gives_no_request(self, field: str, arguments: dict[str, float]) -> None:
        with pytest.raises(ConfigError) as caught:
            scenarios.server(make_workload(), seed=1, **arguments)  # type: ignore[arg-type]
        assert caught.value.field == field

    def test_a_count_of_nothing_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="num_requests = 0 is not allowed"):
            scenarios.single_stream(make_workload(), seed=1, num_requests=0)
        with pytest.raises(ConfigError, match="concurrency = 0 is not allowed"):
            scenarios.offline(make_workload(), seed=1, num_requests=1, concurrency=0)


class TestStreams:
    @given(SEEDS, st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5), st.integers(1, 60))
    @settings(max_examples=50)
    def test_each_stream_gets_its_share_to_within_one_request(
        self, seed: int, shares: list[float], num_requests: int
    ) -> None:
        streams = [make_stream(str(index), share=share) for index, share in enumerate(shares)]
        counts = Counter(
            request.stream for request in make_server(*streams, num_requests=num_requests, seed=seed).requests
        )
        assert sum(counts.values()) == num_requests
        for stream in streams:
            assert abs(counts[stream.name] - num_requests * stream.share / sum(shares)) < 1.0 + 1e-6

    def test_streams_are_mixed_and_not_one_after_the_other(self) -> None:
        plan = make_server(make_stream("a"), make_stream("b"))
        assert len({request.stream for request in plan.requests[:20]}) == 2
        assert len({request.stream for request in plan.requests[20:]}) == 2

    def test_requests_carry_what_their_stream_says(self) -> None:
        stream = make_stream(qos=QosClass.LATENCY, tenant="t", max_tokens_per_s=5.0, output_tokens=fixed(9))
        request = make_server(stream).requests[0]
        assert (request.qos, request.tenant, request.max_tokens_per_s) == (QosClass.LATENCY, "t", 5.0)
        assert (request.prompt_tokens, request.max_tokens, request.stream) == (16, 9, "a")

    def test_lengths_of_one_stream_do_not_hang_on_the_others(self) -> None:
        varied = make_stream("a", prompt_tokens=Amount(Shape.UNIFORM, 16, 64))
        alone = make_server(varied, num_requests=10)
        beside = make_server(varied, make_stream("b"), num_requests=20)
        lengths = [request.prompt_tokens for request in beside.requests if request.stream == "a"]
        assert [request.prompt_tokens for request in alone.requests] == lengths


class TestTexts:
    def test_words_are_plain_and_each_is_there_once(self) -> None:
        assert len(set(vocabulary())) == len(vocabulary()) >= 400
        assert all(word.isascii() and word.isalpha() and word.islower() for word in vocabulary())

    @given(SEEDS, st.integers(0, 40))
    def test_texts_have_their_length(self, seed: int, num_words: int) -> None:
        assert len(TextWriter(seed).fresh(num_words)) == num_words

    @given(SEEDS)
    @settings(max_examples=20)
    def test_no_two_texts_begin_with_the_same_words(self, seed: int) -> None:
        writer = TextWriter(seed)
        beginnings = [writer.fresh(20)[:NUM_SERIAL_WORDS] for _ in range(2000)]
        assert len(set(beginnings)) == 2000
        assert all(one[0] != next_one[0] for one, next_one in pairwise(beginnings))

    @given(SEEDS, st.integers(1, 3), st.sampled_from([0, 4, 16]))
    @settings(max_examples=30)
    def test_prompts_share_their_prefix_and_no_more(self, seed: int, num_prefixes: int, prefix_tokens: int) -> None:
        stream = make_stream(prefix_tokens=prefix_tokens, num_prefixes=num_prefixes)
        requests = make_server(stream, seed=seed, num_requests=30).requests
        shared = [num_shared_words(one, other) for one, other in combinations(requests, 2)]
        assert all(count < NUM_SERIAL_WORDS or 0 <= count - prefix_tokens < NUM_SERIAL_WORDS for count in shared)
        beginnings = {tuple(request.prompt.split()[:prefix_tokens]) for request in requests}
        assert len(beginnings) <= (num_prefixes if prefix_tokens else 1)

    def test_all_prefixes_are_used(self) -> None:
        requests = make_server(make_stream(prefix_tokens=8, num_prefixes=3)).requests
        assert len({tuple(request.prompt.split()[:8]) for request in requests}) == 3

    def test_streams_do_not_share_prefixes(self) -> None:
        streams = [make_stream(name, prefix_tokens=8) for name in "ab"]
        assert len({tuple(request.prompt.split()[:8]) for request in make_server(*streams).requests}) == 2


class TestConversations:
    @given(SEEDS, st.floats(0.2, 50.0))
    @settings(max_examples=30)
    def test_a_turn_holds_all_that_was_said_and_comes_no_earlier_than_thinking_takes(
        self, seed: int, rate_per_s: float
    ) -> None:
        stream = make_stream(turns=Amount(Shape.UNIFORM, 1, 4), think_s=3.0, output_tokens=Amount(Shape.UNIFORM, 4, 20))
        plan = make_server(stream, seed=seed, rate_per_s=rate_per_s)
        check_plan(plan)
        for turns in conversations(plan):
            assert len(turns) <= 4
            for earlier, later in pairwise(turns):
                assert later.prompt.startswith(earlier.prompt + " ")
                assert later.prompt_tokens == earlier.prompt_tokens + earlier.max_tokens + 16
                assert (later.due_s or 0.0) - (earlier.due_s or 0.0) >= 3.0

    def test_all_turns_come_if_there_are_requests_for_them(self) -> None:
        plan = make_server(make_stream(turns=fixed(3), think_s=1.0), num_requests=100)
        lengths = Counter(len(turns) for turns in conversations(plan))
        assert lengths[3] > 25

    def test_a_conversation_ends_before_it_is_too_long(self) -> None:
        stream = make_stream(turns=fixed(9), think_s=0.0, max_prompt_tokens=64, prompt_tokens=fixed(16))
        plan = make_server(stream)
        # 16, then 16 + 8 + 16 = 40, then 64, then no more.
        assert {request.prompt_tokens for request in plan.requests} == {16, 40, 64}

    def test_one_at_a_time_a_conversation_goes_on_at_once(self) -> None:
        plan = scenarios.single_stream(make_workload(make_stream(turns=fixed(3))), seed=1, num_requests=6)
        assert [request.after for request in plan.requests] == [None, 0, 1, None, 3, 4]

    def test_with_more_at_once_as_many_conversations_are_open(self) -> None:
        workload = make_workload(make_stream(turns=fixed(2)))
        plan = scenarios.offline(workload, seed=1, num_requests=8, concurrency=4)
        assert [request.after for request in plan.requests] == [None, None, None, None, 0, 1, 2, 3]


def make_trace(*entries: TraceEntry, block_tokens: int = 4) -> Trace:
    return Trace(entries, block_tokens, origin="made by hand")


class TestTraces:
    def test_requests_come_at_the_times_of_the_trace(self) -> None:
        recorded = make_trace(TraceEntry(0.0, 8, 5), TraceEntry(1500.0, 9, 0))
        plan = scenarios.trace(recorded, seed=1)
        check_plan(plan)
        assert [(request.due_s, request.prompt_tokens, request.max_tokens) for request in plan.requests] == [
            (0.0, 8, 5),
            # An answer has at least one token.
            (1.5, 9, 1),
        ]

    def test_speed_up_shrinks_the_gaps(self) -> None:
        plan = scenarios.trace(make_trace(TraceEntry(0.0, 8, 5), TraceEntry(1500.0, 9, 5)), seed=1, speed_up=3.0)
        assert plan.requests[1].due_s == 0.5

    def test_equal_hash_ids_are_equal_blocks_of_text(self) -> None:
        recorded = make_trace(TraceEntry(0.0, 10, 5, (0, 1, 2)), TraceEntry(1.0, 12, 5, (0, 1, 3)))
        one, other = scenarios.trace(recorded, seed=1).requests
        assert one.prompt.split()[:8] == other.prompt.split()[:8]
        assert one.prompt.split()[8] != other.prompt.split()[8]

    @given(SEEDS)
    @settings(max_examples=5)
    def test_prompts_share_as_many_blocks_as_in_the_trace(self, seed: int) -> None:
        recorded = read_trace("small")
        plan = scenarios.trace(recorded, seed=seed)
        check_plan(plan)
        for (one, entry), (other, same) in combinations(zip(plan.requests, recorded.entries, strict=True), 2):
            num_blocks = num_shared(entry.hash_ids, same.hash_ids)
            assert num_shared_words(one, other) // recorded.block_tokens == num_blocks

    def test_a_shrunk_mooncake_trace_shares_its_blocks(self) -> None:
        lines = [
            '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [4, 5, 6, 7, 8, 9, 10, 11, '
            "12, 13, 14, 15, 2353, 2354]}",
            '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [4, 5, 6, 7, 8, 9, 10, 11, '
            "12, 13, 14, 15, 2366]}",
        ]
        one, other = scenarios.trace(convert_mooncake(lines), seed=1).requests
        assert (one.prompt_tokens, other.prompt_tokens) == (109, 102)
        assert num_shared_words(one, other) == 12 * 8

    def test_what_hash_ids_do_not_cover_is_unlike_everything_else(self) -> None:
        recorded = make_trace(TraceEntry(0.0, 12, 5, (0,)), TraceEntry(1.0, 12, 5, (0,)), TraceEntry(2.0, 12, 5))
        one, other, third = scenarios.trace(recorded, seed=1).requests
        assert num_shared_words(one, other) == 4
        assert num_shared_words(one, third) == 0

    def test_turns_wait_for_the_ones_before_them(self) -> None:
        recorded = make_trace(
            TraceEntry(0.0, 8, 5, conversation="a"),
            TraceEntry(1.0, 8, 5),
            TraceEntry(2.0, 8, 5, conversation="a", turn=1),
            TraceEntry(3.0, 8, 5),
            TraceEntry(4.0, 8, 5, conversation="a", turn=2),
        )
        assert [request.after for request in scenarios.trace(recorded, seed=1).requests] == [None, None, 0, None, 2]

    def test_class_and_tenant_are_the_trace_s_where_it_names_them(self) -> None:
        recorded = make_trace(TraceEntry(0.0, 8, 5, qos=QosClass.LATENCY, tenant="t"), TraceEntry(0.0, 8, 5))
        named, unnamed = scenarios.trace(recorded, seed=1, qos=QosClass.THROUGHPUT).requests
        assert (named.qos, named.tenant) == (QosClass.LATENCY, "t")
        assert (unnamed.qos, unnamed.tenant) == (QosClass.THROUGHPUT, "")

    def test_only_the_first_requests_may_be_taken(self) -> None:
        recorded = read_trace("small")
        part = scenarios.trace(recorded, seed=1, num_requests=5)
        assert part.requests == scenarios.trace(recorded, seed=1).requests[:5]

    def test_a_plan_says_which_trace_it_is_of(self) -> None:
        plan = scenarios.trace(make_trace(TraceEntry(0.0, 8, 5)), seed=1, speed_up=2.5)
        assert plan.description.startswith("trace: made by hand (")
        assert plan.description.endswith("), 1 requests, speed-up 2.5, class balanced where it names none")

    @pytest.mark.parametrize("arguments", [{"speed_up": 0.0}, {"num_requests": 0}])
    def test_a_size_out_of_range_is_named(self, arguments: dict[str, float]) -> None:
        with pytest.raises(ConfigError) as caught:
            scenarios.trace(read_trace("small"), seed=1, **arguments)  # type: ignore[arg-type]
        assert caught.value.field in arguments
