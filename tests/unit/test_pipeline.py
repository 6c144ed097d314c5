"""A pipeline: batches as frames, and what the stamps of results say of the time that steps take."""

from __future__ import annotations

import time

import pytest

from orchestrator.core.batch import Batch, BatchRow, EndedSequence
from orchestrator.core.hops import Hop
from orchestrator.core.sequence import RunId
from orchestrator.core.step_time import StepTiming
from orchestrator.pipeline import Pipeline, StageMember
from shoal.types import DeviceMode, LayerRange, PipelineId, SlotId, WorkerId
from shoal.v1 import flow_pb2
from tests.support.builders import make_limits, make_sequence

MS = 1_000_000
# Of a step through two stages: sent; taken up by compute and handed over by the first; the same of the second.
STAMPS = (0, 1 * MS, 21 * MS, 22 * MS, 32 * MS)


def make_pipeline(sent: list[flow_pb2.Frame] | None = None, num_stages: int = 2) -> Pipeline:
    members = [StageMember(WorkerId(f"w{index}"), "box", LayerRange(index, index + 1)) for index in range(num_stages)]
    limits = make_limits(num_stages=num_stages)
    frames = [] if sent is None else sent
    return Pipeline(PipelineId("p1"), 3, members, limits, frames.append)


def decode_row(run_id: int = 1) -> BatchRow:
    return BatchRow(RunId(run_id), SlotId(run_id), 8, 1, (5,), True, False)


def prefill_row(run_id: int = 1, *, num_tokens: int = 16, is_sampled: bool = True, is_start: bool = True) -> BatchRow:
    return BatchRow(RunId(run_id), SlotId(run_id), 0, num_tokens, (5,) * num_tokens, is_sampled, is_start)


def make_batch(*rows: BatchRow, step: int = 1, burst_steps: int = 0, is_solo: bool = False) -> Batch:
    num_decode_rows = sum(row.num_tokens == 1 for row in rows)
    return Batch(step, rows, burst_steps, is_solo, num_decode_rows, sum(row.num_tokens for row in rows))


def forward(pipeline: Pipeline, batch: Batch) -> None:
    pipeline.forward(batch, lambda _: make_sequence())


def make_result(
    *run_ids: int, step: int = 1, burst_steps: int = 0, stamps_ns: tuple[int, ...] = STAMPS
) -> flow_pb2.StepResult:
    tokens = [flow_pb2.SampledToken(sequence_id=run_id, token_id=7) for run_id in run_ids]
    return flow_pb2.StepResult(step=step, tokens=tokens, burst_steps=burst_steps, stamps_ns=stamps_ns)


def test_a_row_names_its_run_on_the_wire() -> None:
    sent: list[flow_pb2.Frame] = []
    forward(make_pipeline(sent), make_batch(decode_row(77)))

    assert [row.sequence_id for row in sent[0].step.rows] == [77]


def test_a_cancel_names_the_runs_that_ended_and_their_slots() -> None:
    sent: list[flow_pb2.Frame] = []
    make_pipeline(sent).cancel([EndedSequence(RunId(77), SlotId(2))])

    assert list(sent[0].cancel.sequences) == [flow_pb2.SequenceRef(sequence_id=77, slot=2)]


def test_a_cancel_tells_runs_that_go_on_later_from_those_that_are_over() -> None:
    sent: list[flow_pb2.Frame] = []
    make_pipeline(sent).cancel(
        [EndedSequence(RunId(7), SlotId(0), will_resume=True), EndedSequence(RunId(8), SlotId(1))]
    )

    assert [one.will_resume for one in sent[0].cancel.sequences] == [True, False]


def test_a_pipeline_is_for_what_its_limits_say() -> None:
    assert make_pipeline().mode is DeviceMode.MIXED


def test_a_decode_step_says_what_each_stage_took_for_its_rows() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row(1), decode_row(2)))

    assert pipeline.observe(make_result(1, 2)) == StepTiming(2, (0.02, 0.01), is_solo=False, num_rows=2)


def test_a_prefill_chunk_counts_with_all_its_tokens() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row(1), prefill_row(2, num_tokens=16)))

    timing = pipeline.observe(make_result(1, 2))

    assert timing is not None
    assert timing.work == 17


def test_a_chunk_that_samples_nothing_is_timed_too() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(prefill_row(num_tokens=32, is_sampled=False)))

    timing = pipeline.observe(make_result())

    assert timing is not None
    assert timing.work == 32


def test_a_solo_step_is_told_from_others() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row(), is_solo=True))

    assert pipeline.observe(make_result(1)) == StepTiming(1, (0.02, 0.01), is_solo=True, num_rows=1)


def test_each_step_of_a_burst_is_timed_with_the_rows_it_still_had() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row(1), decode_row(2), burst_steps=2))

    timings = [
        pipeline.observe(make_result(1, 2, burst_steps=2)),
        pipeline.observe(make_result(2, burst_steps=1)),
        pipeline.observe(make_result(2, burst_steps=0)),
    ]

    assert [timing.work for timing in timings if timing is not None] == [2, 1, 1]


def test_a_step_that_is_over_is_not_known_any_more() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row()))
    pipeline.observe(make_result(1))

    assert pipeline.observe(make_result(1)) is None


def test_a_step_that_was_lost_is_not_known_any_more() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row()))
    pipeline.forget(1)

    assert pipeline.observe(make_result(1)) is None


def test_a_step_whose_rows_were_all_dropped_says_nothing() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row()))

    assert pipeline.observe(make_result()) is None


def test_a_prefill_of_which_a_part_was_dropped_says_nothing() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row(1), prefill_row(2)))

    assert pipeline.observe(make_result(1)) is None


@pytest.mark.parametrize("stamps_ns", [(), STAMPS[:-2], (*STAMPS, 40 * MS, 41 * MS)], ids=["none", "few", "many"])
def test_stamps_of_another_number_of_stages_say_nothing(stamps_ns: tuple[int, ...]) -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(decode_row()))

    assert pipeline.observe(make_result(1, stamps_ns=stamps_ns)) is None
    assert pipeline.stage_ms(0) == 0.0


def test_the_median_of_a_stage_is_of_decode_steps_alone() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(prefill_row(), step=1))
    pipeline.observe(make_result(1, step=1, stamps_ns=(0, 0, 500 * MS, 500 * MS, 900 * MS)))
    forward(pipeline, make_batch(decode_row(), step=2))
    pipeline.observe(make_result(1, step=2))

    assert (pipeline.stage_ms(0), pipeline.stage_ms(1)) == (20.0, 10.0)


def test_a_hop_is_what_lies_between_the_stamps_of_two_processes() -> None:
    pipeline, sent_ns = make_pipeline(), time.monotonic_ns() - STAMPS[-1]
    forward(pipeline, make_batch(decode_row()))
    pipeline.observe(make_result(1, stamps_ns=tuple(sent_ns + offset for offset in STAMPS)))

    # Two of a millisecond; the third ends when the result is observed.
    assert pipeline.hop_ms() == 1.0


def test_stamps_of_clocks_that_do_not_agree_are_no_hops() -> None:
    pipeline, sent_ns = make_pipeline(), time.monotonic_ns()
    forward(pipeline, make_batch(decode_row()))
    timing = pipeline.observe(make_result(1, stamps_ns=(sent_ns, *STAMPS[1:])))

    assert timing is not None
    assert pipeline.hop_ms() == 0.0


W0, W1 = WorkerId("w0"), WorkerId("w1")


def shifted(offset_ns: int) -> tuple[int, ...]:
    return tuple(stamp + offset_ns for stamp in STAMPS)


def test_a_hop_is_told_with_its_ends_and_the_rows_whose_activations_it_carried() -> None:
    pipeline, sent_ns = make_pipeline(), time.monotonic_ns() - STAMPS[-1]
    forward(pipeline, make_batch(decode_row(1), decode_row(2)))
    pipeline.observe(make_result(1, 2, stamps_ns=shifted(sent_ns)))

    first, second, last = pipeline.take_hops()

    assert (first, second) == (Hop(None, W0, 0.001), Hop(W0, W1, 0.001, num_rows=2))
    assert (last.ends, last.num_rows) == ((W1, None), 0)
    assert pipeline.take_hops() == []


def test_in_a_burst_the_last_stage_sends_to_the_first() -> None:
    pipeline, sent_ns = make_pipeline(), time.monotonic_ns()
    forward(pipeline, make_batch(decode_row(), burst_steps=1))
    pipeline.observe(make_result(1, burst_steps=1, stamps_ns=shifted(sent_ns)))
    pipeline.take_hops()

    pipeline.observe(make_result(1, stamps_ns=shifted(sent_ns + 40 * MS)))

    assert [hop.ends for hop in pipeline.take_hops()] == [(W1, W0), (W0, W1), (W1, None)]


def test_what_a_device_hands_itself_is_no_hop() -> None:
    pipeline, sent_ns = make_pipeline(num_stages=1), time.monotonic_ns()
    forward(pipeline, make_batch(decode_row(), burst_steps=1))
    for burst_steps, offset_ns in ((1, 0), (0, 40 * MS)):
        stamps_ns = shifted(sent_ns + offset_ns)[:3]
        pipeline.observe(make_result(1, burst_steps=burst_steps, stamps_ns=stamps_ns))

    assert [hop.ends for hop in pipeline.take_hops()] == [(None, W0), (W0, None), (W0, None)]


def test_a_message_that_may_have_waited_for_its_stage_tells_nothing_of_its_link() -> None:
    pipeline, sent_ns = make_pipeline(), time.monotonic_ns()
    for step in (1, 2):
        forward(pipeline, make_batch(decode_row(), step=step))
    pipeline.observe(make_result(1, step=1, stamps_ns=shifted(sent_ns)))
    pipeline.take_hops()

    # The first stage takes it up as soon as it has handed over the other one; the second was idle before.
    waited = (0, 21 * MS + 1, 41 * MS, 42 * MS, 52 * MS)
    pipeline.observe(make_result(1, step=2, stamps_ns=tuple(sent_ns + stamp for stamp in waited)))

    assert [hop.ends for hop in pipeline.take_hops()] == [(W0, W1), (W1, None)]


def test_messages_with_prompts_in_them_tell_nothing_of_their_links() -> None:
    pipeline = make_pipeline()
    forward(pipeline, make_batch(prefill_row()))
    pipeline.observe(make_result(1))

    assert pipeline.take_hops() == []
