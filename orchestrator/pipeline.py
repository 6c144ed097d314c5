"""The pipeline that serves: turns batches into frames for its first stage, and tells how its steps went.

Owned by the engine; created by `control` once every stage is loaded and linked. Knows messages and timing, not policy.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.scheduler import Batch, BatchRow, EndedSequence
from orchestrator.core.sequence import Sequence as AnswerSequence
from shoal import rpc
from shoal.types import LayerRange, WorkerId
from shoal.v1 import flow_pb2

# Enough for a median that follows what happens now.
TIMED_STEPS = 256
# Stamps of two machines cannot be compared; what is longer than this was not a hop.
MAX_HOP_S = 1.0


@dataclass(frozen=True, slots=True)
class StageMember:
    """A stage as a user sees it."""

    worker_id: WorkerId
    device: str
    layers: LayerRange


class Pipeline:
    """Stages in order, the link to the first of them, and the timing of recent decode steps."""

    def __init__(
        self,
        pipeline_id: str,
        epoch: int,
        members: Sequence[StageMember],
        limits: SchedulerLimits,
        send: Callable[[flow_pb2.Frame], None],
    ) -> None:
        self.pipeline_id = pipeline_id
        self.epoch = epoch
        self.members = tuple(members)
        self.limits = limits
        self._send = send
        self._decode_steps: dict[int, None] = {}
        self._stage_s: list[deque[float]] = [deque(maxlen=TIMED_STEPS) for _ in members]
        self._hop_s: deque[float] = deque(maxlen=TIMED_STEPS * (len(members) + 1))

    def forward(self, batch: Batch, find: Callable[[BatchRow], AnswerSequence]) -> None:
        """Send a batch to the first stage; `find` gives the sequence of a row that starts one."""
        if len(batch.rows) == batch.num_decode_rows:
            self._decode_steps[batch.step] = None
        step = flow_pb2.Step(
            step=batch.step,
            rows=[self._row(row, find) for row in batch.rows],
            token_ids=[token_id for row in batch.rows for token_id in row.token_ids],
            burst_steps=batch.burst_steps,
            solo=batch.is_solo,
            stamps_ns=[time.monotonic_ns()],
        )
        self._send(self._frame(step=step))

    def cancel(self, ended: Sequence[EndedSequence]) -> None:
        """Tell all stages that sequences ended and their slots are free."""
        refs = [flow_pb2.SequenceRef(sequence_id=one.sequence_id, slot=one.slot) for one in ended]
        self._send(self._frame(cancel=flow_pb2.Cancel(sequences=refs)))

    def observe(self, result: flow_pb2.StepResult) -> None:
        """Take the timing of a step that came back."""
        if result.step not in self._decode_steps:
            return
        if result.burst_steps == 0:
            del self._decode_steps[result.step]
        stamps = [*result.stamps_ns, time.monotonic_ns()]
        if len(stamps) != 2 * len(self.members) + 2:
            return
        for stage_s, taken_up, handed_over in zip(self._stage_s, stamps[1:-1:2], stamps[2:-1:2], strict=True):
            stage_s.append((handed_over - taken_up) / 1e9)
        hops = [(after - before) / 1e9 for before, after in zip(stamps[::2], stamps[1::2], strict=True)]
        if all(0 <= hop <= MAX_HOP_S for hop in hops):
            self._hop_s.extend(hops)

    def forget(self, step: int) -> None:
        """Expect no timing of a step any more: it was lost."""
        self._decode_steps.pop(step, None)

    def stage_ms(self, stage: int) -> float:
        """Median compute of a decode step at a stage, in milliseconds; 0 before the first."""
        return _median_ms(self._stage_s[stage])

    def hop_ms(self) -> float:
        """Median time of a decode step's message between two processes, in milliseconds; 0 before the first."""
        return _median_ms(self._hop_s)

    def _row(self, row: BatchRow, find: Callable[[BatchRow], AnswerSequence]) -> flow_pb2.StepRow:
        message = flow_pb2.StepRow(
            sequence_id=row.sequence_id,
            slot=row.slot,
            position=row.position,
            num_tokens=row.num_tokens,
            sample=row.is_sampled,
        )
        if row.is_start:
            message.start.CopyFrom(_start_of(find(row)))
        return message

    def _frame(self, **body: flow_pb2.Step | flow_pb2.Cancel) -> flow_pb2.Frame:
        return flow_pb2.Frame(pipeline_id=self.pipeline_id, epoch=self.epoch, to_stage=0, **body)  # type: ignore[arg-type]


def _start_of(sequence: AnswerSequence) -> flow_pb2.SequenceStart:
    needs_prompt = sequence.sampling.repetition_penalty != 1.0
    return flow_pb2.SequenceStart(
        sampling=rpc.sampling_to_proto(sequence.sampling),
        prompt_token_ids=sequence.prompt_token_ids if needs_prompt else (),
        stop_token_ids=sorted(sequence.stop_ids),
    )


def _median_ms(samples: deque[float]) -> float:
    return statistics.median(samples) * 1e3 if samples else 0.0
