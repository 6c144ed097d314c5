"""A pipeline that serves: turns batches into frames for its first stage, and tells how long its steps took.

Owned by a lane of the engine; created by `control` once every stage is loaded and linked. Knows messages and timing, not
policy.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message

from orchestrator.core.batch import Batch, BatchRow, EndedSequence
from orchestrator.core.hops import Hop
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.restores import Prefetch, Restore
from orchestrator.core.sequence import Sequence as AnswerSequence
from orchestrator.core.step_time import StepTiming
from shoal import messages
from shoal.kv import BlockHash
from shoal.types import DeviceMode, KVReuse, LayerRange, PipelineId, WorkerId
from shoal.v1 import flow_pb2

# Enough for a median that follows what happens now.
TIMED_STEPS = 256
# Stamps of two machines cannot be compared; what is longer than this was not a hop.
MAX_HOP_S = 1.0
# A stage that had finished something else so shortly before took up what may have waited for it.
IDLE_NS = 1_000_000
# What comes back between two looks at it, and more than counts.
MAX_HOPS = 1024


@dataclass(frozen=True, slots=True)
class StageMember:
    """A stage as a user sees it. kernel_fingerprint: equal ones compute the same bits."""

    worker_id: WorkerId
    device: str
    layers: LayerRange
    kernel_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """A step under way, as it was sent. num_sampled: rows that get a token. is_decode: nothing but decode rows.

    is_fed_back: the last stage has gone on with it by itself.
    """

    work: float
    num_sampled: int
    is_decode: bool
    is_solo: bool
    is_fed_back: bool = False


class Pipeline:
    """Stages in order, the link to the first of them, and the timing of recent steps."""

    def __init__(
        self,
        pipeline_id: PipelineId,
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
        self._steps: dict[int, _TimedStep] = {}
        self._stage_s: list[deque[float]] = [deque(maxlen=TIMED_STEPS) for _ in members]
        self._hop_s: deque[float] = deque(maxlen=TIMED_STEPS * (len(members) + 1))
        self._hops: deque[Hop] = deque(maxlen=MAX_HOPS)
        self._handed_over_ns = [0] * len(members)

    @property
    def mode(self) -> DeviceMode:
        return self.limits.mode

    @property
    def kernels(self) -> tuple[str, ...]:
        """Of each layer, what computes it."""
        return tuple(member.kernel_fingerprint for member in self.members for _ in range(len(member.layers)))

    def forward(self, batch: Batch, find: Callable[[BatchRow], AnswerSequence]) -> None:
        """Send a batch to the first stage; `find` gives the sequence of a row that starts one."""
        self._steps[batch.step] = _TimedStep(
            work=batch.work,
            num_sampled=sum(row.is_sampled for row in batch.rows),
            is_decode=not batch.has_chunk,
            is_solo=batch.is_solo,
        )
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
        refs = [
            flow_pb2.SequenceRef(sequence_id=one.run_id, slot=one.slot, will_resume=one.will_resume) for one in ended
        ]
        self._send(self._frame(cancel=flow_pb2.Cancel(sequences=refs)))

    def restore(self, restore: Restore) -> None:
        """Ask all stages to fill a slot with what they have of a run; the first of them starts from all that is asked."""
        num_blocks = len(restore.block_hashes)
        asked = flow_pb2.RestoredBlocks(num_blocks=num_blocks, is_exact=True, num_tokens=restore.num_tokens)
        message = flow_pb2.Restore(
            sequence_id=restore.run_id,
            slot=restore.slot,
            block_hashes=restore.block_hashes,
            is_exact_only=restore.is_exact_only,
            fetch_timeout_ms=restore.timeout_s * 1e3,
            restored=asked,
            trail_id=restore.trail_id,
            num_tokens=restore.num_tokens,
        )
        self._send(self._frame(restore=message))

    def prefetch(self, prefetch: Prefetch) -> None:
        """Tell all stages of blocks that will be wanted."""
        message = flow_pb2.Prefetch(
            block_hashes=prefetch.block_hashes, timeout_ms=prefetch.timeout_s * 1e3, is_ahead=prefetch.is_ahead
        )
        self._send(self._frame(prefetch=message))

    def keep(self, block_hashes: Sequence[BlockHash], ttl_s: float) -> None:
        """Have all stages pin blocks where they keep them."""
        self._send(self._frame(keep_blocks=flow_pb2.KeepBlocks(block_hashes=block_hashes, ttl_s=ttl_s)))

    def forget_blocks(self, block_hashes: Sequence[BlockHash]) -> None:
        """Have all stages delete blocks."""
        self._send(self._frame(forget_blocks=flow_pb2.ForgetBlocks(block_hashes=block_hashes)))

    def observe(self, result: flow_pb2.StepResult) -> StepTiming | None:
        """Take the timing of a pass that came back; None if it says nothing of what such a pass takes."""
        step = self._steps.get(result.step)
        if step is None:
            return None
        work = _work_done(step, len(result.tokens))
        if result.burst_steps == 0:
            del self._steps[result.step]
        elif not step.is_fed_back:
            self._steps[result.step] = replace(step, is_fed_back=True)
        stage_s = self._stage_times(result.stamps_ns, step, len(result.tokens))
        if work == 0 or not stage_s:
            return None
        return StepTiming(work, stage_s, step.is_solo, len(result.tokens) if step.is_decode else 0)

    def forget(self, step: int) -> None:
        """Expect no timing of a step any more: it was lost."""
        self._steps.pop(step, None)

    def _stage_times(self, sent_ns: Sequence[int], step: _TimedStep, num_rows: int) -> tuple[float, ...]:
        """Seconds at each stage, by the stamps of a result; keeps those of decode steps. Nothing if stamps lack."""
        stamps = [*sent_ns, time.monotonic_ns()]
        if len(stamps) != 2 * len(self.members) + 2:
            return ()
        spans = zip(stamps[1:-1:2], stamps[2:-1:2], strict=True)
        stage_s = tuple((handed_over - taken_up) / 1e9 for taken_up, handed_over in spans)
        if step.is_decode:
            self._note_hops(stamps, step, num_rows)
            for recent, seconds in zip(self._stage_s, stage_s, strict=True):
                recent.append(seconds)
            hops = [(after - before) / 1e9 for before, after in zip(stamps[::2], stamps[1::2], strict=True)]
            if all(0 <= hop <= MAX_HOP_S for hop in hops):
                self._hop_s.extend(hops)
        self._handed_over_ns = stamps[2:-1:2]
        return stage_s

    def _note_hops(self, stamps: Sequence[int], step: _TimedStep, num_rows: int) -> None:
        """Keep what the messages of a pass were under way, but for those that may have waited for a stage."""
        ids: list[WorkerId | None] = [member.worker_id for member in self.members]
        ends = [ids[-1] if step.is_fed_back else None, *ids, None]
        for at, (left_ns, taken_ns) in enumerate(zip(stamps[::2], stamps[1::2], strict=True)):
            has_waited = at < len(ids) and taken_ns < self._handed_over_ns[at] + IDLE_NS
            if ends[at] != ends[at + 1] and not has_waited:
                num_carried = num_rows if 0 < at < len(ids) else 0
                self._hops.append(Hop(ends[at], ends[at + 1], (taken_ns - left_ns) / 1e9, num_carried))

    def take_hops(self) -> list[Hop]:
        """What the messages of decode steps were under way lately, each once."""
        taken = list(self._hops)
        self._hops.clear()
        return taken

    def stage_ms(self, stage: int) -> float:
        """Median compute of a decode step at a stage, in milliseconds; 0 before the first."""
        return _median_ms(self._stage_s[stage])

    def hop_ms(self) -> float:
        """Median time of a decode step's message between two processes, in milliseconds; 0 before the first."""
        return _median_ms(self._hop_s)

    def _row(self, row: BatchRow, find: Callable[[BatchRow], AnswerSequence]) -> flow_pb2.StepRow:
        message = flow_pb2.StepRow(
            sequence_id=row.run_id,
            slot=row.slot,
            position=row.position,
            num_tokens=row.num_tokens,
            sample=row.is_sampled,
        )
        if row.is_start:
            message.start.CopyFrom(_start_of(find(row), self.limits.keeps_blocks))
        return message

    def _frame(self, **body: Message) -> flow_pb2.Frame:
        return flow_pb2.Frame(pipeline_id=self.pipeline_id, epoch=self.epoch, to_stage=0, **body)  # type: ignore[arg-type]


def _start_of(sequence: AnswerSequence, keeps_blocks: bool) -> flow_pb2.SequenceStart:
    """What stages have to know of a run; names of blocks only if they are to keep them."""
    sampling = sequence.sampling
    needs_prompt = sampling.repetition_penalty != 1.0
    needs_answer = needs_prompt or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    num_known = len(sequence.output_token_ids) - sequence.num_to_replay
    is_kept = keeps_blocks and sequence.kv_reuse is not KVReuse.NONE
    return flow_pb2.SequenceStart(
        sampling=messages.sampling_to_proto(sequence.sampling),
        prompt_token_ids=sequence.prompt_token_ids if needs_prompt else (),
        stop_token_ids=sorted(sequence.stop_ids),
        block_hashes=sequence.block_hashes if is_kept else (),
        is_kv_exact=sequence.is_kv_exact,
        trail_id=sequence.trail_id,
        answer_token_ids=sequence.output_token_ids[:num_known] if needs_answer else (),
    )


def _work_done(step: _TimedStep, num_drawn: int) -> float:
    """The work of a pass with num_drawn results; 0 if there were none, or if that does not show.

    Rows of ended sequences are dropped on the way. A decode row that was not draws one token, in every pass of a burst.
    """
    if step.is_decode:
        return step.work * num_drawn / step.num_sampled
    return step.work if num_drawn == step.num_sampled else 0.0


def _median_ms(samples: deque[float]) -> float:
    return statistics.median(samples) * 1e3 if samples else 0.0
