"""The engine between scheduler and pipeline: frames out are recorded, results are fed in by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.engine import RATE_WINDOW_S, Answer, Engine, Rate, TokenEvent
from orchestrator.pipeline import Pipeline, StageMember
from shoal.errors import ContextExceeded, InternalError, NotReady, Overloaded, ShoalError, WorkerLost
from shoal.types import FinishReason, LayerRange, NumericClass, SequenceId, WorkerId
from shoal.v1 import flow_pb2, types_pb2
from tests.support.builders import STOP_ID, TOKEN_ID, make_limits, make_sequence

PIPELINE_ID, EPOCH = "p1", 4


class Harness:
    """An engine whose pipeline writes what it sends into `sent`."""

    def __init__(self, **limits: Any) -> None:
        self.sent: list[flow_pb2.Frame] = []
        self.engine = Engine()
        stage = StageMember(WorkerId("w0"), "box", LayerRange(0, 3))
        self.pipeline = Pipeline(PIPELINE_ID, EPOCH, [stage], make_limits(**limits), self.sent.append)
        self.engine.pipeline_up(self.pipeline)

    def submit(self, sequence_id: int = 1, **fields: Any) -> Answer:
        return self.engine.submit(make_sequence(sequence_id, **fields))

    def bodies(self) -> list[str]:
        return [str(frame.WhichOneof("body")) for frame in self.sent]

    def last_step(self) -> flow_pb2.Step:
        return next(frame.step for frame in reversed(self.sent) if frame.HasField("step"))

    def feed(self, body: flow_pb2.StepResult | flow_pb2.StepFailed, *, epoch: int = EPOCH) -> None:
        name = "step_result" if isinstance(body, flow_pb2.StepResult) else "step_failed"
        self.engine.on_frame(
            flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=epoch, to_stage=-1, **{name: body})  # type: ignore[arg-type]
        )

    def answer_step(self, token_id: int = TOKEN_ID, *, step: flow_pb2.Step | None = None, burst_steps: int = 0) -> None:
        """Report a token for each sampled row of a step, by default the newest."""
        step = step or self.last_step()
        tokens = [
            flow_pb2.SampledToken(sequence_id=row.sequence_id, token_id=token_id) for row in step.rows if row.sample
        ]
        self.feed(flow_pb2.StepResult(step=step.step, tokens=tokens, burst_steps=burst_steps))

    def fail_step(self, step: flow_pb2.Step, reason: str = "INTERNAL") -> None:
        self.feed(flow_pb2.StepFailed(step=step.step, stage=0, reason=reason, message="kernel broke"))


async def next_event(answer: Answer) -> TokenEvent:
    return await asyncio.wait_for(answer.next(), 5)


async def error_of(answer: Answer) -> ShoalError:
    with pytest.raises(ShoalError) as raised:
        await next_event(answer)
    return raised.value


def test_a_submitted_sequence_is_sent_at_once_with_all_a_stage_has_to_know() -> None:
    harness = Harness()

    harness.submit(num_prompt=3)

    (frame,) = harness.sent
    (row,) = frame.step.rows
    assert (frame.pipeline_id, frame.epoch, frame.to_stage) == (PIPELINE_ID, EPOCH, 0)
    assert (row.sequence_id, row.slot, row.position, row.num_tokens, row.sample) == (1, 0, 0, 3, True)
    assert list(frame.step.token_ids) == [100, 101, 102]
    assert list(row.start.stop_token_ids) == [STOP_ID]
    assert row.start.sampling.HasField("temperature")


def test_decode_rows_carry_no_start() -> None:
    harness = Harness()
    harness.submit(num_prompt=3)
    harness.answer_step()

    (row,) = harness.last_step().rows

    assert (row.position, row.num_tokens, row.HasField("start")) == (3, 1, False)
    assert list(harness.last_step().token_ids) == [TOKEN_ID]


def test_a_solo_sequence_is_sent_as_solo() -> None:
    harness = Harness()
    harness.submit(numeric=NumericClass.SOLO)
    harness.answer_step()

    assert harness.last_step().solo


async def test_tokens_come_in_order_and_the_last_says_why() -> None:
    harness = Harness()
    answer = harness.submit(max_tokens=3)
    for token_id in (11, 12, 13):
        harness.answer_step(token_id)

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
    harness.answer_step(10)
    step = harness.last_step()
    assert step.burst_steps == 3

    for left in (3, 2, 1, 0):
        harness.answer_step(20 + left, step=step, burst_steps=left)

    assert [(await next_event(answer)).token_id for _ in range(5)] == [10, 23, 22, 21, 20]


async def test_a_stop_token_ends_an_answer() -> None:
    harness = Harness()
    answer = harness.submit()
    harness.answer_step(STOP_ID)

    assert (await next_event(answer)).finish is FinishReason.STOP
    assert harness.bodies() == ["step", "cancel"]


async def test_logprobs_go_to_the_answer_they_belong_to() -> None:
    harness = Harness()
    answers = [harness.submit(1), harness.submit(2)]
    tokens = [
        flow_pb2.SampledToken(sequence_id=1, token_id=5, logprobs=types_pb2.TokenLogprobs(logprob=-0.5)),
    ]
    harness.feed(flow_pb2.StepResult(step=harness.sent[0].step.step, tokens=tokens))
    harness.answer_step(6, step=harness.sent[1].step)

    first, second = [await next_event(answer) for answer in answers]
    assert first.logprobs == types_pb2.TokenLogprobs(logprob=-0.5)
    assert second.logprobs is None


def test_a_cancel_goes_before_the_batch_that_uses_the_slot_again() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1, max_tokens=1)
    harness.submit(2)
    assert harness.bodies() == ["step"]

    harness.answer_step()

    assert harness.bodies() == ["step", "cancel", "step"]
    assert harness.sent[1].cancel.sequences[0] == flow_pb2.SequenceRef(sequence_id=1, slot=0)
    assert (harness.sent[2].step.rows[0].sequence_id, harness.sent[2].step.rows[0].slot) == (2, 0)


def test_an_aborted_sequence_is_cancelled_and_its_slot_goes_to_the_next() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    harness.submit(2)

    harness.engine.abort(SequenceId(1))

    assert harness.bodies() == ["step", "cancel", "step"]
    assert harness.sent[2].step.rows[0].sequence_id == 2


def test_tokens_of_an_aborted_sequence_are_dropped() -> None:
    harness = Harness()
    answer = harness.submit(1)
    step = harness.last_step()
    harness.engine.abort(SequenceId(1))

    harness.answer_step(step=step)

    assert answer._queue.empty()
    assert harness.engine.is_idle
    assert harness.engine.scheduler is not None
    assert harness.engine.scheduler.num_in_flight == 0


def test_aborting_what_has_ended_does_nothing() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=1)
    harness.answer_step()
    num_sent = len(harness.sent)

    harness.engine.abort(SequenceId(1))
    harness.engine.abort(SequenceId(99))

    assert len(harness.sent) == num_sent


def test_a_waiting_sequence_that_is_aborted_was_never_known_to_a_stage() -> None:
    harness = Harness(num_slots=1)
    harness.submit(1)
    harness.submit(2)

    harness.engine.abort(SequenceId(2))

    assert harness.bodies() == ["step"]


async def test_a_lost_pipeline_ends_everything_with_its_error() -> None:
    harness = Harness(num_slots=1)
    answers = [harness.submit(1), harness.submit(2)]
    lost = WorkerLost("w0 is gone")

    harness.engine.pipeline_down(lost)

    assert [await error_of(answer) for answer in answers] == [lost, lost]
    assert harness.engine.is_idle
    assert (harness.engine.pipeline, harness.engine.scheduler) == (None, None)


async def test_tokens_that_came_before_a_loss_are_delivered_before_its_error() -> None:
    harness = Harness()
    answer = harness.submit()
    harness.answer_step(11)

    harness.engine.pipeline_down(WorkerLost("w0 is gone"))

    assert (await next_event(answer)).token_id == 11
    assert isinstance(await error_of(answer), WorkerLost)


def test_without_a_pipeline_nothing_is_taken() -> None:
    with pytest.raises(NotReady) as raised:
        Engine().submit(make_sequence())

    assert raised.value.retry_after_s > 0


def test_an_abort_after_the_pipeline_is_lost_does_nothing() -> None:
    harness = Harness()
    harness.submit(1)
    harness.engine.pipeline_down(WorkerLost("w0 is gone"))

    harness.engine.abort(SequenceId(1))

    assert harness.bodies() == ["step"]


def test_a_new_pipeline_serves_after_a_loss() -> None:
    harness = Harness()
    harness.submit(1)
    harness.engine.pipeline_down(WorkerLost("w0 is gone"))
    harness.sent.clear()

    harness.engine.pipeline_up(harness.pipeline)
    harness.submit(2)

    assert harness.bodies() == ["step"]


async def test_frames_of_another_epoch_are_dropped() -> None:
    harness = Harness()
    answer = harness.submit()
    tokens = [flow_pb2.SampledToken(sequence_id=1, token_id=5)]

    harness.feed(flow_pb2.StepResult(step=harness.last_step().step, tokens=tokens), epoch=EPOCH - 1)

    assert answer._queue.empty()
    assert harness.bodies() == ["step"]


async def test_a_lost_step_ends_only_its_own_sequences() -> None:
    harness = Harness()
    answers = [harness.submit(1), harness.submit(2)]
    first, second = (frame.step for frame in harness.sent)

    harness.fail_step(first)
    harness.answer_step(12, step=second)

    error = await error_of(answers[0])
    assert isinstance(error, InternalError)
    assert error.message == "stage 0 could not run a step: kernel broke"
    assert (await next_event(answers[1])).token_id == 12


def test_the_slots_of_a_lost_step_are_freed_at_the_stages() -> None:
    harness = Harness()
    harness.submit(1)

    harness.fail_step(harness.last_step())

    assert harness.bodies() == ["step", "cancel"]
    assert harness.engine.is_idle


async def test_a_lost_step_of_an_unknown_reason_is_an_internal_error() -> None:
    harness = Harness()
    answer = harness.submit(1)

    harness.fail_step(harness.last_step(), reason="NEWER_THAN_US")

    assert isinstance(await error_of(answer), InternalError)


def test_the_loss_of_a_step_nobody_knows_ends_nothing() -> None:
    harness = Harness()
    harness.submit(1)

    harness.fail_step(flow_pb2.Step(step=77))

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


def test_totals_count_prompt_and_answer_tokens() -> None:
    harness = Harness()
    harness.submit(num_prompt=8, max_tokens=3)
    for _ in range(3):
        harness.answer_step()

    assert (harness.engine.prefill_rate.total, harness.engine.decode_rate.total) == (8, 3)


def test_steps_that_were_lost_leave_nothing_to_be_timed() -> None:
    harness = Harness()
    harness.submit(1)
    harness.answer_step()

    harness.fail_step(harness.last_step())

    assert harness.pipeline._decode_steps == {}


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
