"""The loop between scheduler and pipeline: takes what happened, makes the next batches, delivers tokens to requests.

One turn is `_step`; it runs on the event loop whenever a request comes or goes or a frame arrives, and waits for nothing.
The only owner of the scheduler. Knows token ids, not text; `server` submits, `control` brings pipelines up and down.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass

from orchestrator.core.scheduler import BatchRow, SampledId, Scheduler
from orchestrator.core.sequence import Sequence
from orchestrator.pipeline import Pipeline
from shoal.errors import NotReady, ShoalError, rebuild
from shoal.types import FinishReason, SequenceId
from shoal.v1 import flow_pb2, types_pb2

logger = logging.getLogger(__name__)

RATE_WINDOW_S = 10.0
MIN_RATE_S = 1.0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """An answer token; finish says why it is the last one."""

    index: int
    token_id: int
    logprobs: types_pb2.TokenLogprobs | None
    finish: FinishReason | None


class Answer:
    """What the engine delivers of one sequence: tokens in order, then nothing, or an error."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._queue: asyncio.Queue[TokenEvent | ShoalError] = asyncio.Queue()

    async def next(self) -> TokenEvent:
        """Wait for the next token. Raises the error that ended the sequence, if one did."""
        event = await self._queue.get()
        if isinstance(event, ShoalError):
            raise event
        return event

    def put(self, event: TokenEvent | ShoalError) -> None:
        self._queue.put_nowait(event)


class Rate:
    """Events per second over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self.total = 0
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, count: int, now: float) -> None:
        self.total += count
        self._recent.append((now, count))
        self._forget(now)

    def per_second(self, now: float) -> float:
        """Over the time since the first event of the window, yet at least MIN_RATE_S: few events are no rate."""
        self._forget(now)
        if not self._recent:
            return 0.0
        return sum(count for _, count in self._recent) / max(now - self._recent[0][0], MIN_RATE_S)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_WINDOW_S:
            self._recent.popleft()


class Engine:
    """Sequences in, tokens out.

    Invariants: an Answer is known exactly while its sequence waits or runs; without a pipeline there are no sequences.
    """

    def __init__(self) -> None:
        self.pipeline: Pipeline | None = None
        self._scheduler: Scheduler | None = None
        self._answers: dict[SequenceId, Answer] = {}
        self._numbers = itertools.count(1)
        self.decode_rate = Rate()
        self.prefill_rate = Rate()

    @property
    def scheduler(self) -> Scheduler | None:
        """For reading only."""
        return self._scheduler

    @property
    def is_idle(self) -> bool:
        return not self._answers

    @property
    def num_running(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return 0 if self._scheduler is None else self._scheduler.num_waiting

    def new_sequence_id(self) -> SequenceId:
        return SequenceId(next(self._numbers))

    def submit(self, sequence: Sequence) -> Answer:
        """Take a sequence. Raises NotReady, or what the scheduler refuses it with."""
        if self._scheduler is None:
            raise NotReady("no pipeline serves now; try again in a moment", retry_after_s=1.0)
        self._scheduler.submit(sequence, time.monotonic())
        answer = self._answers[sequence.sequence_id] = Answer(sequence)
        self._step()
        return answer

    def abort(self, sequence_id: SequenceId) -> None:
        """End a sequence whose client is gone or has enough; nothing if it ended already."""
        if self._answers.pop(sequence_id, None) is not None and self._scheduler is not None:
            self._scheduler.abort(sequence_id, FinishReason.CANCELLED, time.monotonic())
            self._step()

    def pipeline_up(self, pipeline: Pipeline) -> None:
        """Serve with a new pipeline; there must be none."""
        assert self.pipeline is None, "two pipelines"
        self.pipeline = pipeline
        self._scheduler = Scheduler(pipeline.limits)

    def pipeline_down(self, error: ShoalError) -> None:
        """Serve no more: every sequence ends with the error."""
        if self._scheduler is not None:
            self._scheduler.release_all()
        self.pipeline = self._scheduler = None
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.put(error)

    def on_frame(self, frame: flow_pb2.Frame) -> None:
        """Act on a frame from a stage; one of a pipeline that is gone is dropped."""
        if self.pipeline is None or (frame.pipeline_id, frame.epoch) != (
            self.pipeline.pipeline_id,
            self.pipeline.epoch,
        ):
            return
        match frame.WhichOneof("body"):
            case "step_result":
                self._on_result(frame.step_result)
            case "step_failed":
                self._on_failed(frame.step_failed)
            case body:
                logger.warning("unexpected_frame body=%s", body)
        self._step()

    def _on_result(self, result: flow_pb2.StepResult) -> None:
        assert self._scheduler is not None
        assert self.pipeline is not None
        now = time.monotonic()
        self.pipeline.observe(result)
        sampled = [SampledId(SequenceId(token.sequence_id), token.token_id) for token in result.tokens]
        logprobs = {token.sequence_id: token.logprobs for token in result.tokens if token.HasField("logprobs")}
        emitted = self._scheduler.commit(result.step, sampled, result.burst_steps, now)
        self.decode_rate.add(len(emitted), now)
        for token in emitted:
            ended = token.finish is not None
            answer = self._answers.pop(token.sequence_id) if ended else self._answers[token.sequence_id]
            answer.put(TokenEvent(token.index, token.token_id, logprobs.get(token.sequence_id), token.finish))

    def _on_failed(self, failed: flow_pb2.StepFailed) -> None:
        assert self._scheduler is not None
        assert self.pipeline is not None
        self.pipeline.forget(failed.step)
        error = rebuild(failed.reason, f"stage {failed.stage} could not run a step: {failed.message}")
        logger.error("step_failed step=%d stage=%d error=%s", failed.step, failed.stage, failed.message)
        for sequence_id in self._scheduler.fail_step(failed.step, time.monotonic()):
            self._answers.pop(sequence_id).put(error)

    def _step(self) -> None:
        """Make every batch that can be made now, and send it."""
        scheduler, pipeline = self._scheduler, self.pipeline
        if scheduler is None or pipeline is None:
            return
        self._send_ended(scheduler, pipeline)
        while (batch := scheduler.schedule(time.monotonic())) is not None:
            prefilled = sum(row.num_tokens for row in batch.rows[batch.num_decode_rows :])
            if prefilled:
                self.prefill_rate.add(prefilled, time.monotonic())
            pipeline.forward(batch, self._find)

    @staticmethod
    def _send_ended(scheduler: Scheduler, pipeline: Pipeline) -> None:
        """Before any batch: the slots of ended sequences may be in it for others."""
        ended = scheduler.take_ended()
        if ended:
            pipeline.cancel(ended)

    def _find(self, row: BatchRow) -> Sequence:
        return self._answers[row.sequence_id].sequence
