"""What restored prompts cost tenants and others, what is predicted of them, what is fetched early, and all of it at once."""

from __future__ import annotations

import random
from functools import partial

import pytest

from orchestrator.core.forecast import UNKNOWN_BLOCK_S, UNKNOWN_FETCH_S
from orchestrator.core.restores import Restore
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RestoredPrefix, RunId
from orchestrator.core.tenants import ANSWER_TOKEN_WEIGHT, TenantLedger
from shoal.errors import DeadlineUnmeetable
from shoal.kv import BLOCK_TOKENS
from shoal.types import FinishReason, QosClass, SequenceId
from tests.support.builders import (
    know_times,
    make_limits,
    make_sequence,
    run_step,
    with_blocks,
)
from tests.support.model_stages import answer_of
from tests.support.restoring import RUN, ask, make_prompt, make_scheduler
from tests.support.simulated_pipeline import RestoreAnswer, SimulatedPipeline, StageSpeed

LATENCY, BALANCED, THROUGHPUT = QosClass.LATENCY, QosClass.BALANCED, QosClass.THROUGHPUT


# Tenants, forecasts, fetching


def make_charged(num_restored: int) -> float:
    """What a tenant has been charged for a prompt of 200 tokens once that many blocks came."""
    ledger = TenantLedger()
    scheduler = Scheduler(make_limits(), ledger)
    scheduler.restores.index.learn(make_prompt().block_hashes)
    sequence = make_prompt(max_tokens=10)
    ask(scheduler, sequence)
    scheduler.restored(RUN, RestoredPrefix(num_restored), 0.0)
    return ledger.counter(sequence.tenant) - 10 * ANSWER_TOKEN_WEIGHT


@pytest.mark.parametrize(("num_restored", "charged"), [(0, 200), (1, 136), (3, 8)])
def test_a_tenant_pays_for_what_is_computed_of_a_prompt(num_restored: int, charged: float) -> None:
    assert make_charged(num_restored) == charged


def test_a_tenant_pays_for_a_prompt_once_though_it_is_preempted_while_it_awaits_blocks() -> None:
    ledger = TenantLedger()
    scheduler, sequence = Scheduler(make_limits(num_slots=1), ledger), make_prompt(qos=THROUGHPUT, max_tokens=10)
    scheduler.restores.index.learn(sequence.block_hashes[:2])
    ask(scheduler, sequence)
    scheduler.submit(make_sequence(2, max_tokens=1, qos=LATENCY, tenant="other"), 1.0)
    run_step(scheduler, 1.0)
    scheduler.schedule(1.0)
    scheduler.take_restores()

    scheduler.restored(RunId(3), RestoredPrefix(2), 1.0)

    assert ledger.counter(sequence.tenant) == 72 + 10 * ANSWER_TOKEN_WEIGHT


def test_what_is_cached_is_not_predicted_to_be_computed() -> None:
    scheduler = make_scheduler()
    know_times(scheduler)

    whole, rest = (scheduler.predict(192, BALANCED, 0.0, num_cached) for num_cached in (0, 128))

    assert whole.prefill_s == pytest.approx(3 * 0.34, rel=0.05)
    assert rest.prefill_s == pytest.approx(0.34, rel=0.05)


def test_who_comes_waits_only_for_what_others_will_have_to_compute() -> None:
    def queue_s(known: int) -> float:
        scheduler = make_scheduler(make_limits(num_slots=2), known=known)
        know_times(scheduler)
        for key in (1, 2, 3):
            scheduler.submit(make_prompt(key, num_prompt=194), 0.0)
        scheduler.schedule(0.0)
        slot_wait_s = scheduler._admission.slot_wait_s(BALANCED, 0.0)
        return scheduler.predict(10, BALANCED, 0.0).queue_s - slot_wait_s

    token_s = 0.34 / BLOCK_TOKENS
    assert queue_s(known=3) == pytest.approx(3 * 2 * token_s, rel=0.1)
    assert queue_s(known=0) == pytest.approx((3 * 194 - 64) * token_s, rel=0.1)


def test_a_deadline_that_only_the_rest_of_a_prompt_can_make_is_no_reason_to_refuse() -> None:
    known, unknown = make_scheduler(known=3), make_scheduler()
    for scheduler in (known, unknown):
        know_times(scheduler)
    sequences = [make_prompt(num_prompt=194), make_prompt(num_prompt=194)]
    for sequence in sequences:
        sequence.deadline_at = 0.5

    known.submit(sequences[0], 0.0)
    with pytest.raises(DeadlineUnmeetable):
        unknown.submit(sequences[1], 0.0)


def test_what_only_redis_holds_is_fetched_for_who_waits_and_once() -> None:
    scheduler = make_scheduler(make_limits(num_slots=1), known=1)
    scheduler.submit(make_sequence(1), 0.0)
    run_step(scheduler, 0.0)
    waiting = make_prompt(2, num_stored=3)
    scheduler.submit(waiting, 0.0)
    scheduler.schedule(0.0)

    (prefetch,) = scheduler.take_prefetches(0.0)

    assert prefetch.block_hashes == waiting.block_hashes[:3]
    assert prefetch.timeout_s == UNKNOWN_FETCH_S + 2 * UNKNOWN_BLOCK_S
    assert scheduler.take_prefetches(0.0) == []


def test_nothing_is_fetched_beforehand_for_who_starts_at_once() -> None:
    scheduler = make_scheduler()
    ask(scheduler, make_prompt(num_stored=3))

    assert scheduler.take_prefetches(0.0) == []


def test_nothing_is_fetched_beforehand_of_what_is_known() -> None:
    scheduler = make_scheduler(make_limits(num_slots=1), known=3)
    scheduler.submit(make_sequence(1), 0.0)
    scheduler.submit(make_prompt(2, num_stored=3), 0.0)
    scheduler.schedule(0.0)

    assert scheduler.num_waiting == 1
    assert scheduler.take_prefetches(0.0) == []


# All of it


def cancel(pipeline: SimulatedPipeline, sequence_id: SequenceId) -> None:
    pipeline.scheduler.abort(sequence_id, FinishReason.CANCELLED, pipeline.now)


@pytest.mark.parametrize("seed", range(6))
def test_conversations_that_come_back_get_the_answers_they_get_alone(seed: int) -> None:
    """Stages lose blocks, answer late, with less, or never because the run was cancelled; classes compete for slots."""
    draws = random.Random(seed)

    def answer(_: Restore) -> RestoreAnswer:
        for block_hash in list(pipeline.stages.kept):
            if draws.random() < 0.1:
                del pipeline.stages.kept[block_hash]
        return RestoreAnswer(draws.choice([0.001, 0.02, 0.5]), draws.choice([0, 1, 2, 1000]))

    limits = make_limits(num_slots=3, kv_tokens=1600, num_stages=2)
    scheduler = Scheduler(limits)
    speeds = [StageSpeed(0.01, 0.002)] * 2
    pipeline = SimulatedPipeline(scheduler, speeds, scheduler.check_invariants, answer)
    sequences = []
    for key in range(1, 61):
        qos = draws.choice(list(QosClass))
        sequence = make_prompt(key, num_prompt=draws.randrange(2, 450), max_tokens=draws.randrange(1, 30), qos=qos)
        if draws.random() < 0.3:
            sequence.prompt_token_ids = (draws.randrange(9), *sequence.prompt_token_ids[1:])
            with_blocks(sequence)
        sequence.num_stored_blocks = draws.choice([0, 0, 2])
        at = draws.uniform(0.0, 20.0)
        pipeline.submit(sequence, at)
        if draws.random() < 0.15:
            pipeline.at(at + draws.uniform(0.0, 2.0), partial(cancel, pipeline, SequenceId(key)))
        sequences.append(sequence)

    pipeline.run(600.0)

    assert not scheduler.has_work
    assert scheduler.num_replay_mismatches == 0
    assert not pipeline.stages.owners
    assert sum(one.num_restored > 0 for one in sequences) > 10, "hardly anything was restored: this shows nothing"
    for sequence in sequences:
        got = [token.token_id for token in pipeline.tokens[sequence.sequence_id]]
        whole = answer_of(sequence)
        assert got == (whole[: len(got)] if sequence.finish_reason is FinishReason.CANCELLED else whole)
