"""A lane: one pipeline that serves, the scheduler that feeds it, and how much the two get done.

Turns what the scheduler decides into frames, and frames into what the scheduler has to know; says how the router sees the
pipeline. Knows nothing of other lanes, of answers or of their readers: the engine owns lanes and is their only caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from orchestrator.core.batch import Batch, BatchRow, Emitted, SampledId
from orchestrator.core.restores import Prefetch
from orchestrator.core.routing import PipelineView, RouteRequest
from orchestrator.core.scheduler import Scheduler
from orchestrator.core.sequence import RestoredPrefix, RunId, Sequence
from orchestrator.core.slots import round_up_to_page
from orchestrator.core.step_time import StepTiming
from orchestrator.core.tenants import TenantLedger
from orchestrator.pipeline import Pipeline
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import PipelineId, QosClass, SequenceId
from shoal.v1 import flow_pb2, types_pb2

RATE_WINDOW_S = 10.0
MIN_RATE_S = 1.0
# Between two looks of who learns from them.
KEPT_TIMINGS = 64


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """A token that is to be delivered."""

    emitted: Emitted
    logprobs: types_pb2.TokenLogprobs | None


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


class Lane:
    """fallback_s: a request that has not been started here within this time may be taken by another lane.

    fallback_at: when to look for such requests; None while there is no need to. is_accepting: new requests may come.
    """

    def __init__(self, pipeline: Pipeline, ledger: TenantLedger, fallback_s: float) -> None:
        self.pipeline = pipeline
        self.scheduler = Scheduler(pipeline.limits, ledger)
        self.fallback_s = fallback_s
        self.fallback_at: float | None = None
        self.is_accepting = True
        self.decode_rate = Rate()
        self.prefill_rate = Rate()
        self._timings: deque[StepTiming] = deque(maxlen=KEPT_TIMINGS)

    @property
    def pipeline_id(self) -> PipelineId:
        return self.pipeline.pipeline_id

    @property
    def has_room(self) -> bool:
        """Whether a request that comes now could be started at once, if it is small enough."""
        return self.is_accepting and has_room(self.scheduler)

    @property
    def is_limited(self) -> bool:
        """Whether heat or battery of a device hold it back."""
        pace = self.scheduler.pace
        return pace.max_batch < self.pipeline.limits.max_batch or pace.steps_per_s > 0

    @property
    def longest_pass_s(self) -> float | None:
        """What the slowest stage takes for as much as a pass may hold, at the end of a context; None before it is known."""
        limits, times = self.pipeline.limits, self.scheduler.times
        return (
            times.bottleneck_s(limits.work_of(limits.chunk_tokens, limits.context_tokens)) if times.is_known else None
        )

    def limits_text(self) -> str:
        """The limits in force, as a user reads them."""
        pace = self.scheduler.pace
        steps = f", {pace.steps_per_s:g} steps per second" if pace.steps_per_s else ""
        return f"{self.pipeline_id}: at most {pace.max_batch} rows a batch{steps}"

    def view(self, request: RouteRequest, now: float) -> PipelineView:
        """This lane as the router is to see it for a request."""
        return view_of(self.pipeline_id, self.scheduler, request, now, is_accepting=self.is_accepting)

    def send_all(self, now: float) -> None:
        """Send every batch that can be made now, and what stages are to get ready meanwhile."""
        num_prefilled = 0
        while (batch := self._next_batch(now)) is not None:
            num_prefilled += sum(row.num_tokens for row in batch.rows[batch.num_decode_rows :])
            self.pipeline.forward(batch, self._find)
        if num_prefilled:
            self.prefill_rate.add(num_prefilled, now)
        for prefetch in self.scheduler.take_prefetches(now):
            self.pipeline.prefetch(prefetch)

    def prefetch_ahead(self, block_hashes: tuple[BlockHash, ...], now: float) -> None:
        """Have stages fetch the leading blocks of a prompt that may come; nothing where they keep none."""
        if self.pipeline.limits.keeps_blocks:
            timeout_s = self.scheduler.fetch_s(now, 0, len(block_hashes))
            self.pipeline.prefetch(Prefetch(block_hashes, timeout_s, is_ahead=True))

    def _next_batch(self, now: float) -> Batch | None:
        """Make a batch, and tell stages of all runs that have ended by then: their slots may be in it for others.

        Or may be filled for others by what stages are asked to restore: that goes second.
        """
        batch = self.scheduler.schedule(now)
        ended = self.scheduler.take_ended()
        if ended:
            self.pipeline.cancel(ended)
        for restore in self.scheduler.take_restores():
            self.pipeline.restore(restore)
        return batch

    def _find(self, row: BatchRow) -> Sequence:
        sequence = self.scheduler.sequence_of(row.run_id)
        assert sequence is not None, f"run {row.run_id} is in a batch and nobody's"
        return sequence

    def on_result(self, result: flow_pb2.StepResult, now: float) -> list[EmittedToken]:
        """Take what the last stage reports of a step; returns the tokens to deliver."""
        timing = self.pipeline.observe(result)
        if timing is not None:
            self.scheduler.observe(timing)
            self._timings.append(timing)
        logprobs = self._logprobs(result)
        sampled = [SampledId(RunId(token.sequence_id), token.token_id) for token in result.tokens]
        emitted = self.scheduler.commit(result.step, sampled, result.burst_steps, now)
        if emitted:
            self.decode_rate.add(len(emitted), now)
        return [EmittedToken(token, logprobs.get(token.sequence_id)) for token in emitted]

    def take_timings(self) -> list[StepTiming]:
        """The latest passes, each once."""
        taken = list(self._timings)
        self._timings.clear()
        return taken

    def on_restored(self, restored: flow_pb2.Restored, now: float) -> None:
        """Take what the last stage reports of a Restore."""
        blocks = restored.restored
        prefix = RestoredPrefix(
            blocks.num_blocks, blocks.num_from_redis, blocks.codec, blocks.is_exact, blocks.num_tokens
        )
        self.scheduler.restored(RunId(restored.sequence_id), prefix, now)

    def on_failed(self, failed: flow_pb2.StepFailed, now: float) -> list[SequenceId]:
        """Give up a step that a stage could not run; returns the sequences that end with it."""
        self.pipeline.forget(failed.step)
        return self.scheduler.fail_step(failed.step, now)

    def _logprobs(self, result: flow_pb2.StepResult) -> dict[SequenceId, types_pb2.TokenLogprobs]:
        """By sequence: runs are the wire's business, and a run that ends with this step is not known afterwards."""
        found = {}
        for token in result.tokens:
            sequence = self.scheduler.sequence_of(RunId(token.sequence_id)) if token.HasField("logprobs") else None
            if sequence is not None:
                found[sequence.sequence_id] = token.logprobs
        return found


def view_of(
    pipeline_id: PipelineId, scheduler: Scheduler, request: RouteRequest, now: float, *, is_accepting: bool = True
) -> PipelineView:
    """A pipeline as the router is to see it for a request."""
    limits = scheduler.limits
    num_blocks = scheduler.restores.num_believed(request.block_hashes, request.num_stored)
    cached_tokens = num_blocks * BLOCK_TOKENS
    prediction = scheduler.predict(request.num_prompt, request.qos, now, cached_tokens)
    whole = scheduler.predict(request.num_prompt, request.qos, now) if cached_tokens else prediction
    return PipelineView(
        pipeline_id=pipeline_id,
        mode=limits.mode,
        num_stages=limits.num_stages,
        prediction=prediction,
        sequence_tokens=limits.sequence_tokens,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        has_latency=scheduler.has_class(QosClass.LATENCY),
        can_start=is_accepting and has_room(scheduler) and _has_kv(scheduler, request),
        max_batch=scheduler.pace.max_batch,
        steps_per_s=scheduler.pace.steps_per_s,
        cached_tokens=cached_tokens,
        saved_s=max(whole.prefill_s - prediction.prefill_s, 0.0),
        is_accepting=is_accepting,
    )


def has_room(scheduler: Scheduler) -> bool:
    """Whether a slot is free and nobody waits for one."""
    return scheduler.num_waiting == 0 and scheduler.used_slots < scheduler.limits.num_slots


def _has_kv(scheduler: Scheduler, request: RouteRequest) -> bool:
    limits = scheduler.limits
    num_tokens = min(request.num_prompt + request.max_tokens, limits.sequence_tokens)
    return scheduler.used_kv_tokens + round_up_to_page(num_tokens) <= limits.kv_tokens


def route_request(sequence: Sequence, now: float) -> RouteRequest:
    """What matters of a sequence to the router."""
    return RouteRequest(
        sequence.qos,
        len(sequence.prompt_token_ids),
        sequence.max_tokens,
        has_answer=bool(sequence.output_token_ids),
        time_left_s=None if sequence.deadline_at is None else sequence.deadline_at - now,
        num_certain=1 if sequence.stop_ids else sequence.max_tokens,
        period_s=sequence.period_s,
        block_hashes=sequence.restorable_blocks,
        num_stored=sequence.num_stored_blocks,
    )
