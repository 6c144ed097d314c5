"""Answers whose pipeline is lost: they wait for another one, go on with the same text, or end within a bound."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.answer import Answer
from orchestrator.core.parking import MAX_PARKED_S, PARKED_S
from orchestrator.engine import MAX_VAIN_RECOVERIES, MIN_TRAIL_TOKENS
from orchestrator.pipeline import Pipeline, StageMember
from shoal.errors import DeadlineExceeded, NotReady, WorkerLost
from shoal.types import KVReuse, LayerRange, SamplingParams, SequenceId, WorkerId
from tests.support.builders import make_sequence, with_blocks
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
    token_ids,
    told,
    where,
)

NUM_PROMPT, NUM_ANSWER = 150, 30


def start(harness: Harness, sequence_id: int = 1, num_tokens: int = 12) -> Answer:
    """An answer with so many tokens by now."""
    names = with_blocks(make_sequence(num_prompt=NUM_PROMPT)).block_hashes
    answer = harness.submit(
        sequence_id, f"r{sequence_id}", num_prompt=NUM_PROMPT, max_tokens=NUM_ANSWER, block_hashes=names
    )
    while len(answer.sequence.output_token_ids) < num_tokens:
        assert harness.p1.compute()
    return answer


def lose(harness: Harness) -> None:
    harness.engine.pipeline_down(P1, LOST)
    harness.engine.check_invariants()


def rebuild(harness: Harness, *, epoch: int = 9, **limits: Any) -> Stages:
    """The same pipeline again, with what its stages retained in their slots and in Redis."""
    stages = Stages(harness.engine, P1, epoch=epoch, **limits)
    stages.model.trails, stages.model.kept = harness.p1.model.trails, harness.p1.model.kept
    harness.engine.pipeline_up(stages.pipeline, FALLBACK_S)
    harness.engine.check_invariants()
    return stages


def test_an_answer_goes_on_in_the_pipeline_that_is_built_anew_with_the_same_text() -> None:
    harness = Harness()
    answer = start(harness)
    lose(harness)
    assert (harness.engine.is_idle, harness.engine.num_waiting) == (False, 1)

    stages = rebuild(harness)
    stages.compute_all()

    assert token_ids(answer) == expected_answer(NUM_PROMPT, NUM_ANSWER)
    assert where(answer) == P1
    assert answer.sequence.num_recoveries == 1
    assert [what for what, _ in told(harness, "r1")].count("parked") == 1
    assert harness.engine.is_idle


def test_the_time_without_a_pipeline_counts_as_waiting() -> None:
    harness = Harness()
    answer = start(harness)
    lose(harness)
    harness.clock.move_to(4.0)

    rebuild(harness).compute_all()

    assert answer.sequence.queue_s == 4.0


def test_it_goes_on_where_it_was_and_computes_little_again() -> None:
    harness = Harness()
    answer = start(harness)
    slot = answer.sequence.slot
    lose(harness)
    harness.p1.model.trail_lag = 3

    stages = rebuild(harness)
    stages.model.trail_lag = 3
    stages.compute_all()

    (restore,) = [frame.restore for frame in stages.sent if frame.HasField("restore")]
    assert (restore.slot, restore.num_tokens) == (slot, NUM_PROMPT + 12 - 1)
    first = stages.steps()[0].rows[0]
    assert (first.position, first.num_tokens, first.HasField("start")) == (NUM_PROMPT + 12 - 1 - 3, 1, True)
    assert token_ids(answer) == expected_answer(NUM_PROMPT, NUM_ANSWER)


def test_a_trail_has_a_name_of_its_own_for_every_answer_that_is_worth_one() -> None:
    harness = Harness()
    plain, other = harness.submit(1), harness.submit(2)
    short = harness.submit(3, max_tokens=MIN_TRAIL_TOKENS - 1)
    unwanted = harness.submit(4, kv_reuse=KVReuse.NONE)

    assert len({plain.sequence.trail_id, other.sequence.trail_id}) == 2
    assert len(plain.sequence.trail_id) == 16
    assert (short.sequence.trail_id, unwanted.sequence.trail_id) == (b"", b"")


async def test_an_answer_that_no_pipeline_comes_for_ends_within_a_bound_and_says_why() -> None:
    harness = Harness()
    answer = start(harness, num_tokens=1)
    lose(harness)
    harness.engine.parked_trouble = "layers 0-3 do not fit"

    harness.clock.move_to(PARKED_S - 0.1)
    assert len(delivered(answer)) == 1
    harness.clock.move_to(PARKED_S)

    error = await error_of(answer)
    assert isinstance(error, WorkerLost)
    assert error.message == f"{LOST.message}; layers 0-3 do not fit"
    assert error.retry_after_s > 0
    assert harness.engine.is_idle
    assert harness.clock.next_alarm_at is None


async def test_while_a_pipeline_is_being_built_it_waits_longer_but_not_for_ever() -> None:
    harness = Harness()
    answer = start(harness, num_tokens=1)
    lose(harness)

    for second in range(int(MAX_PARKED_S)):
        harness.clock.move_to(float(second))
        harness.engine.hold_parked()
    assert len(delivered(answer)) == 1
    harness.clock.move_to(MAX_PARKED_S)

    assert isinstance(await error_of(answer), WorkerLost)


async def test_a_deadline_passes_while_nobody_computes() -> None:
    harness = Harness()
    answer = harness.submit(1, deadline_at=4.0)
    lose(harness)

    harness.clock.move_to(4.0)

    assert isinstance(await error_of(answer), DeadlineExceeded)


def test_a_client_that_leaves_meanwhile_is_forgotten() -> None:
    harness = Harness()
    answer = start(harness)
    lose(harness)

    harness.engine.abort(SequenceId(1))
    stages = rebuild(harness)

    assert harness.engine.is_idle
    assert stages.sent == []
    assert answer.sequence.run_id is None


def test_who_ran_goes_on_before_who_waited() -> None:
    harness = Harness(num_slots=1)
    first, second = start(harness), harness.submit(2)
    lose(harness)

    stages = rebuild(harness, num_slots=1)
    stages.compute(4)

    assert first.sequence.slot is not None
    assert second.sequence.slot is None
    assert (first.sequence.num_recoveries, second.sequence.num_recoveries) == (1, 0)


def test_another_pipeline_takes_it_without_waiting_and_uses_its_trail() -> None:
    harness = Harness()
    p2 = harness.add(P2)
    p2.model.trails, p2.model.kept = harness.p1.model.trails, harness.p1.model.kept
    answer = start(harness)

    lose(harness)
    p2.compute_all()

    assert where(answer) == P2
    assert p2.steps()[0].rows[0].position == NUM_PROMPT + 12 - 1
    assert token_ids(answer) == expected_answer(NUM_PROMPT, NUM_ANSWER)


async def test_a_request_that_every_pipeline_is_lost_with_is_given_up() -> None:
    harness = Harness()
    answer = start(harness, num_tokens=3)
    for number in range(MAX_VAIN_RECOVERIES):
        lose(harness)
        rebuild(harness, epoch=10 + number).compute(1)
    assert len(delivered(answer)) == 3

    lose(harness)

    error = await error_of(answer)
    assert isinstance(error, WorkerLost)
    assert f"{MAX_VAIN_RECOVERIES + 1} times without a token between" in error.message


def test_losses_with_tokens_between_are_no_reason_to_give_up() -> None:
    harness = Harness()
    answer = start(harness, num_tokens=1)
    for number in range(2 * MAX_VAIN_RECOVERIES):
        lose(harness)
        stages = rebuild(harness, epoch=10 + number)
        known = len(answer.sequence.output_token_ids)
        while len(answer.sequence.output_token_ids) == known:
            assert stages.compute()

    stages.compute_all()

    assert token_ids(answer) == expected_answer(NUM_PROMPT, NUM_ANSWER)


@pytest.mark.parametrize(("kernels", "has_changed"), [(("a", "a"), False), (("a", "b"), True)])
def test_an_answer_that_went_on_with_other_kernels_says_so(kernels: tuple[str, str], has_changed: bool) -> None:
    harness = Harness()
    harness.engine.pipeline_down(P1, LOST)

    def add(fingerprint: str, epoch: int) -> Stages:
        stages = Stages(harness.engine, P1, epoch=epoch)
        member = StageMember(WorkerId("w"), "box", LayerRange(0, 3), fingerprint)
        stages.pipeline = Pipeline(P1, epoch, [member], stages.pipeline.limits, stages._send)
        harness.engine.pipeline_up(stages.pipeline, FALLBACK_S)
        return stages

    first = add(kernels[0], 5)
    answer = harness.submit()
    first.compute()
    lose(harness)
    add(kernels[1], 6)

    assert answer.sequence.has_changed_kernels == has_changed


def test_an_answer_of_another_orchestrator_is_gone_on_with_from_what_is_known() -> None:
    whole = expected_answer(8, 16)
    harness = Harness()
    sequence = make_sequence(7, max_tokens=16)
    sequence.output_token_ids = whole[:5]

    answer = harness.engine.adopt(sequence, "old")
    harness.p1.compute_all()

    events = delivered(answer)
    assert [(event.index, event.token_id) for event in events] == list(enumerate(whole))[5:]
    assert where(answer) == P1


async def test_an_adopted_answer_waits_for_a_pipeline_as_long_as_it_is_told() -> None:
    harness = Harness()
    lose(harness)
    answer = harness.engine.adopt(make_sequence(7), "old", wait_s=30.0)
    assert answer.pipeline_id == ""

    harness.clock.move_to(29.0)
    assert not harness.engine.is_idle
    harness.clock.move_to(30.0)

    assert isinstance(await error_of(answer), NotReady)


def test_a_pipeline_that_is_placed_anew_is_no_loss() -> None:
    harness = Harness()
    answer = start(harness)
    harness.engine.pipeline_down(P1, NotReady("the layers are being placed anew"))

    rebuild(harness).compute_all()

    assert token_ids(answer) == expected_answer(NUM_PROMPT, NUM_ANSWER)
    assert answer.sequence.num_recoveries == 0


@pytest.mark.parametrize(
    ("sampling", "is_told"),
    [
        (SamplingParams(), False),
        (SamplingParams(presence_penalty=0.5), True),
        (SamplingParams(frequency_penalty=0.5), True),
        (SamplingParams(repetition_penalty=1.1), True),
    ],
)
def test_the_last_stage_is_told_what_penalties_count_of_an_answer_that_it_did_not_draw(
    sampling: SamplingParams, is_told: bool
) -> None:
    harness = Harness()
    answer = harness.submit(1, num_prompt=8, max_tokens=NUM_ANSWER, sampling=sampling)
    while len(answer.sequence.output_token_ids) < 12:
        assert harness.p1.compute()
    known = list(answer.sequence.output_token_ids)
    lose(harness)
    stages = rebuild(harness)
    stages.model.trail_lag = 2
    stages.compute_all()

    (started,) = [row.start for step in stages.steps() for row in step.rows if row.HasField("start")]
    assert list(started.answer_token_ids) == (known[:-2] if is_told else [])
