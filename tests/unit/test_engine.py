"""The engine between scheduler and pipeline, with one lane: frames out are recorded, results are fed in by hand."""

from __future__ import annotations

import pytest

from orchestrator.engine import Engine
from shoal.errors import ContextExceeded, InternalError, NotReady, Overloaded, WorkerLost
from shoal.types import FinishReason, NumericClass, SequenceId
from shoal.v1 import flow_pb2, types_pb2
from tests.support.builders import STOP_ID, TOKEN_ID, make_sequence
from tests.support.lanes import EPOCH, FALLBACK_S, P1, Harness, error_of, next_event


def test_a_submitted_sequence_is_sent_at_once_with_all_a_stage_has_to_know() -> None:
    harness = Harness()

    harness.submit(num_prompt=3)

    (frame,) = harness.p1.sent
    (row,) = frame.step.rows
    assert (frame.pipeline_id, frame.epoch, frame.to_stage) == (P1, EPOCH, 0)
    assert (row.sequence_id, row.slot, row.position, row.num_tokens, row.sample) == (1, 0, 0, 3, True)
    assert list(frame.step.token_ids) == [100, 101, 102]
    assert list(row.start.stop_token_ids) == [STOP_ID]
    assert row.start.sampling.HasField("temperature")


def test_decode_rows_carry_no_start() -> None:
    harness = Harness()
    harness.submit(num_prompt=3)
    harness.p1.answer_step()

    (row,) = harness.p1.last_step().rows

    assert (row.position, row.num_tokens, row.HasField("start")) == (3, 1, False)
    assert list(harness.p1.last_step().token_ids) == [TOKEN_ID]


def test_a_solo_sequence_is_sent_as_solo() -> None:
    harness = Harness()
    harness.submit(numeric=NumericClass.SOLO)
    harness.p1.answer_step()

    assert harness.p1.last_step().solo


async def test_tokens_come_in_order_and_the_last_says_why() -> None:
    harness = Harness()
    answer = harness.submit(max_tokens=3)
    for token_id in (11, 12, 13):
        harness.p1.answer_step(token_id)

    events = [await next_event(answer) for _ in range(3)]

    assert [(event.index, event.token_id, event.finish) for event in events] == [
        (0, 11, None),
        (1, 12, None),
        (2, 13, FinishReason.LENGTH),
    ]
    assert harness.engine.is_idle


async def test_the_tokens_of_a_burst_come_in_order() -> None:
    harness = Harness(burst_steps=4)
    answer = harness.submit(max_tokens=5)
    harness.p1.answer_step(10)
    step = harness.p1.last_step()
    assert step.burst_steps == 3

    for left in (3, 2, 1, 0):
        harness.p1.answer_step(20 + left, step=step, burst_steps=left)

    assert [(await next_event(answer)).token_id for _ in range(5)] == [10, 23, 22, 21, 20]


async def test_a_stop_token_ends_an_answer() -> None:
    harness = Harness()
    answer = harness.submit()
    harness.p1.answer_step(STOP_ID)

    assert (await next_event(answer)).finish is FinishReason.STOP
    assert harness.p1.bodies() == ["step", "cancel"]


async def test_logprobs_go_to_the_answer_they_belong_to() -> None:
    harness = Harness()
    # Runs are numbered by themselves: 1 and 2.
    answers = [harness.submit(12), harness.submit(11)]
    tokens = [
        flow_pb2.SampledToken(sequence_id=1, token_id=5, logprobs=types_pb2.TokenLogprobs(logprob=-0.5)),
    ]
    harness.p1.feed(flow_pb2.StepResult(step=harness.p1.sent[0].step.step, tokens=tokens))
    harness.p1.answer_step(6, step=harness.p1.sent[1].step)

    first, second = [await next_event(answer) for answer in answers]
    assert first.logprobs == types_pb2.TokenLogprobs(logprob=-0.5)
    assert second.logprobs is None


def test_a_cancel_goes_before_the_batch_that_uses_the_slot_again() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1, max_tokens=1)
    harness.submit(2)
    assert harness.p1.bodies() == ["step"]

    harness.p1.answer_step()

    assert harness.p1.bodies() == ["step", "cancel", "step"]
    assert harness.p1.sent[1].cancel.sequences[0] == flow_pb2.SequenceRef(sequence_id=1, slot=0)
    assert (harness.p1.sent[2].step.rows[0].sequence_id, harness.p1.sent[2].step.rows[0].slot) == (2, 0)


def test_an_aborted_sequence_is_cancelled_and_its_slot_goes_to_the_next() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    harness.submit(2)

    harness.engine.abort(SequenceId(1))

    assert harness.p1.bodies() == ["step", "cancel", "step"]
    assert harness.p1.sent[2].step.rows[0].sequence_id == 2


def test_tokens_of_an_aborted_sequence_are_dropped() -> None:
    harness = Harness()
    answer = harness.submit(1)
    step = harness.p1.last_step()
    harness.engine.abort(SequenceId(1))

    harness.p1.answer_step(step=step)

    assert answer._queue.empty()
    assert harness.engine.is_idle
    assert harness.p1.lane.scheduler.num_in_flight == 0


def test_aborting_what_has_ended_does_nothing() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=1)
    harness.p1.answer_step()
    num_sent = len(harness.p1.sent)

    harness.engine.abort(SequenceId(1))
    harness.engine.abort(SequenceId(99))

    assert len(harness.p1.sent) == num_sent


def test_a_waiting_sequence_that_is_aborted_was_never_known_to_a_stage() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    harness.submit(2)

    harness.engine.abort(SequenceId(2))

    assert harness.p1.bodies() == ["step"]


async def test_a_pipeline_that_nothing_comes_after_ends_everything_with_its_error() -> None:
    harness = Harness(num_slots=1)
    answers = [harness.submit(1), harness.submit(2)]
    lost = WorkerLost("w0 is gone")

    harness.engine.pipeline_down(P1, lost, is_final=True)

    assert [await error_of(answer) for answer in answers] == [lost, lost]
    assert harness.engine.is_idle
    assert harness.engine.pipelines == {}
    assert harness.engine.lane(P1) is None


async def test_tokens_that_came_before_a_loss_are_delivered_before_its_error() -> None:
    harness = Harness()
    answer = harness.submit()
    harness.p1.answer_step(11)

    harness.engine.pipeline_down(P1, WorkerLost("w0 is gone"), is_final=True)

    assert (await next_event(answer)).token_id == 11
    assert isinstance(await error_of(answer), WorkerLost)


def test_without_a_pipeline_nothing_is_taken() -> None:
    with pytest.raises(NotReady) as raised:
        Engine().submit(make_sequence())

    assert raised.value.retry_after_s > 0


def test_an_abort_after_the_pipeline_is_lost_does_nothing() -> None:
    harness = Harness()
    harness.submit(1)
    harness.engine.pipeline_down(P1, WorkerLost("w0 is gone"))

    harness.engine.abort(SequenceId(1))

    assert harness.p1.bodies() == ["step"]


def test_a_new_pipeline_serves_after_a_loss() -> None:
    harness = Harness()
    harness.submit(1)
    harness.engine.pipeline_down(P1, WorkerLost("w0 is gone"), is_final=True)
    harness.p1.sent.clear()

    harness.engine.pipeline_up(harness.p1.pipeline, FALLBACK_S)
    harness.submit(2)

    assert harness.p1.bodies() == ["step"]


async def test_frames_of_another_epoch_are_dropped() -> None:
    harness = Harness()
    answer = harness.submit()
    tokens = [flow_pb2.SampledToken(sequence_id=1, token_id=5)]

    harness.p1.feed(flow_pb2.StepResult(step=harness.p1.last_step().step, tokens=tokens), epoch=EPOCH - 1)

    assert answer._queue.empty()
    assert harness.p1.bodies() == ["step"]


async def test_a_lost_step_ends_only_its_own_sequences() -> None:
    harness = Harness()
    answers = [harness.submit(1), harness.submit(2)]
    first, second = (frame.step for frame in harness.p1.sent)

    harness.p1.fail_step(first)
    harness.p1.answer_step(12, step=second)

    error = await error_of(answers[0])
    assert isinstance(error, InternalError)
    assert error.message == "stage 0 could not run a step: kernel broke"
    assert (await next_event(answers[1])).token_id == 12


def test_the_slots_of_a_lost_step_are_freed_at_the_stages() -> None:
    harness = Harness()
    harness.submit(1)

    harness.p1.fail_step(harness.p1.last_step())

    assert harness.p1.bodies() == ["step", "cancel"]
    assert harness.engine.is_idle


async def test_a_lost_step_of_an_unknown_reason_is_an_internal_error() -> None:
    harness = Harness()
    answer = harness.submit(1)

    harness.p1.fail_step(harness.p1.last_step(), reason="NEWER_THAN_US")

    assert isinstance(await error_of(answer), InternalError)


def test_the_loss_of_a_step_nobody_knows_ends_nothing() -> None:
    harness = Harness()
    harness.submit(1)

    harness.p1.fail_step(flow_pb2.Step(step=77))

    assert not harness.engine.is_idle


def test_what_the_scheduler_refuses_leaves_no_answer_behind() -> None:
    harness = Harness(num_slots=1, max_waiting=1)
    harness.submit(1)
    harness.submit(2)

    with pytest.raises(Overloaded):
        harness.submit(3)
    with pytest.raises(ContextExceeded):
        harness.submit(4, num_prompt=600)

    harness.engine.abort(SequenceId(1))
    harness.engine.abort(SequenceId(2))
    assert harness.engine.is_idle


async def test_the_logprobs_of_the_last_token_are_delivered_too() -> None:
    harness = Harness()
    answer = harness.submit(12, max_tokens=1)
    token = flow_pb2.SampledToken(sequence_id=1, token_id=5, logprobs=types_pb2.TokenLogprobs(logprob=-0.5))

    harness.p1.feed(flow_pb2.StepResult(step=harness.p1.last_step().step, tokens=[token]))

    assert (await next_event(answer)).logprobs == types_pb2.TokenLogprobs(logprob=-0.5)


@pytest.mark.parametrize(
    ("reason", "finish"), [(FinishReason.CANCELLED, "cancelled"), (FinishReason.STOP, "stop")], ids=lambda one: str(one)
)
def test_a_story_ends_with_what_a_request_was_ended_for(reason: FinishReason, finish: str) -> None:
    harness = Harness()
    harness.submit(1, "r1")

    harness.engine.abort(SequenceId(1), reason)

    story = harness.engine.stories.find("r1").to_proto()
    assert (story.state, story.finish) == ("finished", finish)


def test_a_story_ends_with_the_last_token() -> None:
    harness = Harness()
    harness.submit(1, "r1", max_tokens=2)
    for _ in range(2):
        harness.p1.answer_step()

    story = harness.engine.stories.find("r1").to_proto()

    assert (story.state, story.finish, story.completion_tokens) == ("finished", "length", 2)
    assert [event.what for event in story.events] == ["queued", "admitted", "first_token", "ended"]


def test_a_story_ends_with_the_error_of_a_lost_step() -> None:
    harness = Harness()
    harness.submit(1, "r1")

    harness.p1.fail_step(harness.p1.last_step())

    assert harness.engine.stories.find("r1").to_proto().finish == "INTERNAL"


def test_totals_count_prompt_and_answer_tokens() -> None:
    harness = Harness()
    harness.submit(num_prompt=8, max_tokens=3)
    for _ in range(3):
        harness.p1.answer_step()

    assert (harness.p1.lane.prefill_rate.total, harness.p1.lane.decode_rate.total) == (8, 3)


def test_steps_that_were_lost_leave_nothing_to_be_timed() -> None:
    harness = Harness()
    harness.submit(1)
    harness.p1.answer_step()

    harness.p1.fail_step(harness.p1.last_step())

    assert harness.p1.pipeline._steps == {}
