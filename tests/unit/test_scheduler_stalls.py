"""In virtual time: what running streams feel of others, and that nobody and nothing is left behind meanwhile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.admission import MAX_PREEMPTIONS
from orchestrator.core.limits import STEP_TOKENS, Pace, SchedulerLimits
from orchestrator.core.qos import CLASSES, PATIENCE_S
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.core.tenants import TenantLedger
from shoal.types import NumericClass, QosClass
from tests.support.builders import know_times, make_decoding, make_limits, make_sequence
from tests.support.model_stages import answer_of
from tests.support.simulated_pipeline import SimulatedPipeline, StageSpeed

LATENCY, BALANCED, THROUGHPUT = CLASSES
# A token takes 4.7 ms in all, a pass as much as four more: about the default model on one thread.
TOKEN_S = 0.0047
LONG = frozenset[int]()


def speeds(num_stages: int, base_tokens: float = 4.0) -> list[StageSpeed]:
    return [StageSpeed(base_tokens * TOKEN_S / num_stages, TOKEN_S / num_stages)] * num_stages


def roomy(num_stages: int = 1, num_slots: int = 16, max_batch: int = 16, burst_steps: int = 16) -> SchedulerLimits:
    return make_limits(
        num_stages=num_stages,
        num_slots=num_slots,
        max_batch=max_batch,
        kv_tokens=64 * 1024,
        context_tokens=4096,
        burst_steps=burst_steps,
        max_waiting=10_000,
    )


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


class LongPrompt:
    """A prompt of 1,800 tokens that comes while streams are being answered, and what these feel of it."""

    def __init__(
        self, pipeline: SimulatedPipeline, num_streams: int, *, inter_token_s: float, arrived_at: float
    ) -> None:
        self._pipeline = pipeline
        self._streams = [
            make_sequence(key, num_prompt=16, max_tokens=2000, inter_token_s=inter_token_s, stop_ids=LONG)
            for key in range(1, num_streams + 1)
        ]
        prompt = make_sequence(99, num_prompt=1800, max_tokens=4, stop_ids=LONG)
        for stream in self._streams:
            pipeline.submit(stream, 0.0)
        pipeline.submit(prompt, arrived_at)
        for second in range(100):
            pipeline.run(float(second))
            if prompt.sequence_id in pipeline.finished_at:
                break
        assert prompt.first_token_at is not None
        assert prompt.sequence_id in pipeline.finished_at
        self.first_token_at = prompt.first_token_at

    def gaps(self, since: float, until: float) -> list[float]:
        return [gap for one in self._streams for gap in self._pipeline.gaps(one.sequence_id, since, until)]


@pytest.mark.parametrize(
    ("num_stages", "num_streams", "base_tokens", "max_batch"),
    [
        (1, 4, 2.4, 16),
        (1, 4, 8.0, 16),
        (1, 8, 4.0, 16),
        (1, 12, 4.0, 4),
        (2, 4, 2.4, 16),
        (2, 4, 4.0, 16),
        (2, 8, 2.4, 16),
        (3, 6, 4.0, 16),
    ],
)
def test_running_streams_do_not_wait_for_a_long_prompt(
    num_stages: int, num_streams: int, base_tokens: float, max_batch: int
) -> None:
    """The p99 gap while a prompt of 1,800 tokens is computed is at most 1.5 x that before it came."""
    # Streams that take turns see the others' bursts as gaps already: those are not what is looked at.
    limits = roomy(num_stages, max_batch=max_batch, burst_steps=16 if num_streams <= max_batch else 1)
    pipeline = SimulatedPipeline(Scheduler(limits), speeds(num_stages, base_tokens))
    prompt = LongPrompt(pipeline, num_streams, inter_token_s=0.02, arrived_at=8.0)
    assert p99(prompt.gaps(8.0, prompt.first_token_at)) <= 1.5 * p99(prompt.gaps(4.0, 8.0))


def test_where_more_wait_for_their_first_token_than_get_further_ones_prompts_get_more_of_a_step() -> None:
    def prompt_tokens(num_prompts: int) -> int:
        rows = [make_sequence(key, inter_token_s=0.001, max_tokens=100) for key in (1, 2)]
        scheduler = make_decoding(roomy(), *rows)
        know_times(scheduler)
        for key in range(num_prompts):
            scheduler.submit(make_sequence(10 + key, num_prompt=200), 1.0)
        batch = scheduler.schedule(1.0)
        assert batch is not None
        return sum(row.num_tokens for row in batch.rows[batch.num_decode_rows :])

    assert prompt_tokens(1) == prompt_tokens(2) < prompt_tokens(4) < prompt_tokens(8) == prompt_tokens(12)


def test_a_target_that_leaves_time_is_used_for_prompts_and_kept() -> None:
    pipeline = SimulatedPipeline(Scheduler(roomy()), speeds(1))
    prompt = LongPrompt(pipeline, 4, inter_token_s=0.15, arrived_at=4.0)
    assert p99(prompt.gaps(4.2, prompt.first_token_at)) <= 0.15
    # Alone it takes 1,800 x 4.7 ms and the base of 29 passes, 9 s in all.
    assert prompt.first_token_at - 4.0 < 1.5 * 9.0


@pytest.mark.parametrize(("num_stages", "num_streams"), [(1, 2), (2, 1), (2, 4), (2, 8), (3, 2)])
def test_a_target_is_kept_however_long_the_prompt_where_attention_costs_what_it_does(
    num_stages: int, num_streams: int
) -> None:
    """At the end of the prompt two tokens of it cost as much as eight at its start."""
    limits = replace(roomy(num_stages), attention_tokens=3000.0)
    pipeline = SimulatedPipeline(Scheduler(limits), speeds(num_stages, 1.5))
    prompt = LongPrompt(pipeline, num_streams, inter_token_s=0.1, arrived_at=4.0)
    assert p99(prompt.gaps(4.2, prompt.first_token_at)) <= 0.12


def test_prompts_go_in_passes_of_their_own_where_a_stage_would_be_idle() -> None:
    """A chunk beside the row would make it wait at both stages; alone it is at one while the row is at the other."""
    pipeline = SimulatedPipeline(Scheduler(roomy(2)), speeds(2, 1.5))
    pipeline.submit(make_sequence(1, num_prompt=16, max_tokens=2000, inter_token_s=0.05, stop_ids=LONG), 0.0)
    pipeline.submit(make_sequence(99, num_prompt=400, max_tokens=4, stop_ids=LONG), 4.0)
    pipeline.run(6.0)
    with_chunk = [batch for at, batch in pipeline.batches if at > 4.5 and batch.has_chunk]
    assert len(with_chunk) > 10
    assert all(batch.num_decode_rows == 0 for batch in with_chunk)


def test_without_targets_a_prompt_takes_all_it_can_get() -> None:
    pipeline = SimulatedPipeline(Scheduler(roomy()), speeds(1))
    for key in range(1, 5):
        pipeline.submit(make_sequence(key, num_prompt=16, max_tokens=2000, qos=THROUGHPUT, stop_ids=LONG), 0.0)
    prompt = make_sequence(99, num_prompt=1800, max_tokens=4, qos=THROUGHPUT, stop_ids=LONG)
    pipeline.submit(prompt, 4.0)
    pipeline.run(30.0)
    assert prompt.first_token_at is not None
    assert prompt.first_token_at - 4.0 < 1.2 * 9.0


def test_a_request_of_a_high_class_is_started_at_once_though_low_ones_fill_all_slots() -> None:
    pipeline = SimulatedPipeline(Scheduler(roomy(num_slots=4)), speeds(1))
    low = [make_sequence(key, num_prompt=32, max_tokens=400, qos=THROUGHPUT, stop_ids=LONG) for key in range(1, 9)]
    for sequence in low:
        pipeline.submit(sequence, 0.0)
    high = make_sequence(99, num_prompt=32, max_tokens=16, qos=LATENCY, inter_token_s=0.05, stop_ids=LONG)
    pipeline.submit(high, 5.0)
    pipeline.run(120.0)
    assert high.first_token_at is not None
    # Two batches may be under way when it comes; its own prompt takes 0.2 s with three rows beside it.
    assert high.first_token_at - 5.0 < 0.5
    assert sum(one.num_preemptions for one in low) == 1
    assert len(pipeline.finished_at) == 9
    assert all([token.token_id for token in pipeline.tokens[one.sequence_id]] == answer_of(one) for one in low)


@pytest.mark.parametrize("max_batch", [8, 2])
@pytest.mark.parametrize("steps_per_s", [12.0, 3.0])
def test_spared_devices_get_no_more_steps_than_they_may_and_streams_share_them(
    max_batch: int, steps_per_s: float
) -> None:
    scheduler = Scheduler(roomy())
    pipeline = SimulatedPipeline(scheduler, speeds(1))
    streams = [make_sequence(key, num_prompt=16, max_tokens=2000, stop_ids=LONG) for key in range(1, 5)]
    for stream in streams:
        pipeline.submit(stream, 0.0)
    pipeline.at(5.0, lambda: scheduler.set_pace(Pace(max_batch, steps_per_s)))
    pipeline.run(25.0)
    num_batches = sum(6.0 <= at < 25.0 for at, _ in pipeline.batches)
    assert 0.9 * 19 * steps_per_s <= num_batches <= 19 * steps_per_s + 1
    counts = [len(pipeline.gaps(one.sequence_id, 6.0, 25.0)) for one in streams]
    assert max(counts) - min(counts) <= 2
    assert sum(counts) == pytest.approx(min(max_batch, 4) * steps_per_s * 19, rel=0.12)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("steps_per_s", [12.0, 3.0])
@pytest.mark.parametrize(
    "fields",
    [
        {"qos": LATENCY, "numeric": NumericClass.SOLO, "inter_token_s": 0.05},
        {"qos": BALANCED, "inter_token_s": 0.1},
        {"qos": BALANCED, "inter_token_s": 0.1, "max_tokens_per_s": 5.0},
        {"qos": THROUGHPUT},
    ],
    ids=["solo", "balanced", "paced", "throughput"],
)
@pytest.mark.parametrize("num_streams", [1, 3])
def test_on_spared_devices_prompts_get_on_beside_streams_and_streams_beside_prompts(
    num_stages: int, steps_per_s: float, fields: dict[str, Any], num_streams: int
) -> None:
    scheduler = Scheduler(roomy(num_stages))
    pipeline = SimulatedPipeline(scheduler, speeds(num_stages))
    streams = [
        make_sequence(key, num_prompt=4, max_tokens=1500, stop_ids=LONG, **fields) for key in range(1, num_streams + 1)
    ]
    for stream in streams:
        pipeline.submit(stream, 0.0)
    pipeline.at(2.0, lambda: scheduler.set_pace(Pace(16, steps_per_s)))
    prompt = make_sequence(99, num_prompt=100, max_tokens=4, stop_ids=LONG)
    pipeline.submit(prompt, 3.0)
    # Eight tokens are a step, and a quarter of all steps is the least that prompts get.
    end = 4.0 + 4 * (100 / STEP_TOKENS + 1) / steps_per_s
    pipeline.run(end)
    assert prompt.first_token_at is not None
    num_steps = sum(len(pipeline.gaps(one.sequence_id, 3.0, prompt.first_token_at)) for one in streams)
    assert num_steps >= 0.3 * min(steps_per_s, 5.0 if "max_tokens_per_s" in fields else steps_per_s) * (
        prompt.first_token_at - 4.0
    )


@pytest.mark.parametrize("rate", [1.0, 10.0, 15.0])
def test_a_paced_stream_comes_at_its_rate_beside_one_that_is_not(rate: float) -> None:
    pipeline = SimulatedPipeline(Scheduler(roomy()), speeds(1))
    paced = make_sequence(1, num_prompt=16, max_tokens=2000, max_tokens_per_s=rate, stop_ids=LONG)
    pipeline.submit(paced, 0.0)
    pipeline.submit(make_sequence(2, num_prompt=16, max_tokens=2000, stop_ids=LONG), 0.0)
    pipeline.run(20.0)
    assert paced.first_token_at is not None
    times = [token.at for token in pipeline.tokens[paced.sequence_id]]
    assert all(at >= paced.first_token_at + index / rate - 1e-9 for index, at in enumerate(times))
    assert len(times) >= 0.95 * rate * (20.0 - paced.first_token_at)


def test_under_a_flood_of_a_high_class_lower_ones_still_get_their_turns() -> None:
    """Twice as many requests of class LATENCY come as can be served; each other class has a turn each patience."""
    pipeline = SimulatedPipeline(Scheduler(roomy(num_slots=4)), speeds(1))
    low = [
        make_sequence(key, num_prompt=16, max_tokens=4, qos=qos, stop_ids=LONG)
        for key, qos in ((1, BALANCED), (2, THROUGHPUT))
    ]
    for sequence in low:
        pipeline.submit(sequence, 5.0)
    for number in range(1200):
        at = number * 0.05
        high = make_sequence(100 + number, num_prompt=16, max_tokens=4, qos=LATENCY, inter_token_s=0.05, stop_ids=LONG)
        pipeline.submit(high, at)
    pipeline.run(60.0)
    assert pipeline.scheduler.num_waiting > 100
    for sequence in low:
        turns = [event.at for event in sequence.events if event.what in ("admitted", "resumed")]
        assert all(later - earlier < PATIENCE_S[sequence.qos] + 1.0 for earlier, later in pairwise([5.0, *turns]))
        assert len(turns) <= 1 + MAX_PREEMPTIONS
        assert pipeline.finished_at[sequence.sequence_id] - turns[-1] < 1.0


@pytest.mark.parametrize("weights", [{}, {"a": 3.0}])
def test_tenants_share_a_pipeline_by_weight_whatever_their_requests_are_like(weights: dict[str, float]) -> None:
    """One sends many long requests, the other as many short ones; tokens count."""
    scheduler = Scheduler(roomy(num_slots=4), TenantLedger(weights))
    pipeline = SimulatedPipeline(scheduler, speeds(1))
    requests: list[Sequence] = []
    for number in range(400):
        requests.append(make_sequence(2 * number + 1, tenant="a", num_prompt=8, max_tokens=8, stop_ids=LONG))
        requests.append(make_sequence(2 * number + 2, tenant="b", num_prompt=64, max_tokens=40, stop_ids=LONG))
    for request in requests:
        pipeline.submit(request, 0.0)
    pipeline.run(30.0)
    assert all(scheduler._admission.queue.num_of_tenant(tenant) for tenant in "ab"), "one has nothing left to do"
    delivered = dict.fromkeys("ab", 0.0)
    for request in requests:
        if request.has_started:
            tokens = len(request.prompt_token_ids) + 2 * len(pipeline.tokens[request.sequence_id])
            delivered[request.tenant] += tokens / weights.get(request.tenant, 1.0)
    # Those that run are granted more than they have; no more than four do.
    assert abs(delivered["a"] - delivered["b"]) <= (2 + 4) * (64 + 2 * 40)


request_strategy = st.tuples(
    st.floats(0.0, 6.0),
    st.integers(1, 60),
    st.integers(1, 24),
    st.sampled_from(QosClass),
    st.sampled_from(NumericClass),
    st.sampled_from([None, 0.03, 0.1]),
    st.sampled_from([0.0, 0.0, 20.0]),
)


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(request_strategy, min_size=1, max_size=14),
    num_stages=st.integers(1, 3),
    num_slots=st.integers(1, 4),
    paces=st.lists(st.tuples(st.floats(0.0, 6.0), st.integers(1, 8), st.sampled_from([0.0, 6.0])), max_size=3),
)
def test_whatever_comes_in_every_answer_is_whole_and_the_one_its_prompt_determines(
    requests: list[tuple[float, int, int, QosClass, NumericClass, float | None, float]],
    num_stages: int,
    num_slots: int,
    paces: list[tuple[float, int, float]],
) -> None:
    limits = make_limits(
        num_stages=num_stages, num_slots=num_slots, kv_tokens=256, context_tokens=96, burst_steps=8, chunk_tokens=16
    )
    scheduler = Scheduler(limits)
    pipeline = SimulatedPipeline(scheduler, speeds(num_stages), check=scheduler.check_invariants)
    sequences = []
    for key, (at, num_prompt, max_tokens, qos, numeric, inter_token_s, rate) in enumerate(requests, start=1):
        sequence = make_sequence(
            key, max_tokens=max_tokens, qos=qos, numeric=numeric, inter_token_s=inter_token_s, max_tokens_per_s=rate
        )
        sequence.prompt_token_ids = tuple(1000 * key + number for number in range(num_prompt))
        sequences.append(sequence)
        pipeline.submit(sequence, at)
    for at, max_batch, steps_per_s in [*paces, (7.0, limits.max_batch, 0.0)]:
        pipeline.at(at, partial(scheduler.set_pace, Pace(max_batch, steps_per_s)))
    pipeline.run(300.0)
    assert not scheduler.has_work
    assert scheduler.num_replay_mismatches == 0
    for sequence in sequences:
        assert [token.token_id for token in pipeline.tokens[sequence.sequence_id]] == answer_of(sequence)
