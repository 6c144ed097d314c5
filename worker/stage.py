"""One loaded stage: takes steps, runs the shard, samples at the end of the pipeline, and says what to send where.

Owned by the compute thread. Knows sequences, slots and bursts, but neither threads nor how links carry frames: `send` is
given by `compute`. Rows of sequences that were cancelled meanwhile are dropped at the first stage; the step itself always
goes on, so that its credit returns to the orchestrator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shoal.codec import pack_activations, unpack_activations
from shoal.errors import InternalError, ShoalError
from shoal.messages import sampling_from_proto
from shoal.types import LayerRange, ShardShape
from shoal.v1 import flow_pb2, types_pb2
from worker.emulation import SlowDown
from worker.filling import Message, RestoreReady
from worker.kv.block import BlockForm
from worker.kv.cache import BlockCache
from worker.kv.fetches import LowerTier
from worker.reuse import Reuse
from worker.sampling import Sampled, Sampler
from worker.shard import Shard, ShardBatch, ShardRow

ORCHESTRATOR = -1
# Of a stage that is in no epoch now: no frame has it.
NO_EPOCH = -1

Body = flow_pb2.Step | flow_pb2.StepResult | flow_pb2.Cancel | flow_pb2.StepFailed | flow_pb2.Restored


@dataclass(frozen=True, slots=True)
class StageSpec:
    """Which stage of which pipeline this is, with which layers of which model."""

    pipeline_id: str
    epoch: int
    stage: int
    num_stages: int
    shape: ShardShape
    layers: LayerRange
    model_digest: str

    def is_same_shard(self, other: StageSpec) -> bool:
        """Whether a stage loaded for one can go on for the other, with what its slots hold."""
        return (self.pipeline_id, self.model_digest, self.layers, self.shape) == (
            other.pipeline_id,
            other.model_digest,
            other.layers,
            other.shape,
        )

    @property
    def block_form(self) -> BlockForm:
        return BlockForm(self.model_digest, self.layers, self.shape.num_kv_heads, self.shape.head_dim)


@dataclass(slots=True)
class ActiveSequence:
    """A sequence in a slot; the sampler is there at the last stage only."""

    sequence_id: int
    sampler: Sampler | None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)


class StageRunner:
    """Runs the steps of one stage.

    Invariants: a slot holds at most one sequence; a row is computed only while its sequence holds its slot.
    """

    __slots__ = ("_active", "_reuse", "_send", "_shard", "_slow_down", "spec")

    def __init__(
        self,
        spec: StageSpec,
        shard: Shard,
        slow_down: SlowDown,
        send: Callable[[flow_pb2.Frame], None],
        cache: BlockCache,
        post: Callable[[RestoreReady], None],
        *,
        lower: LowerTier | None = None,
    ) -> None:
        """post: brings a restore that may go on back to `resume`, behind what has arrived meanwhile.

        lower: where running sequences are checkpointed, if they are.
        """
        self.spec = spec
        self._shard = shard
        self._slow_down = slow_down
        self._send = send
        self._active: dict[int, ActiveSequence] = {}
        where = (spec.pipeline_id, spec.epoch)
        self._reuse = Reuse(where, spec.block_form, shard.arena, cache, self._send_on, post, lower=lower)

    def handle(self, frame: flow_pb2.Frame) -> None:
        """Act on a frame for this stage; one of another epoch is dropped. Whatever fails becomes a StepFailed."""
        if (frame.pipeline_id, frame.epoch) != (self.spec.pipeline_id, self.spec.epoch):
            return
        match frame.WhichOneof("body"):
            case "step":
                self._step(frame.step)
            case "cancel":
                self._cancel(frame.cancel)
            case "restore":
                self._active[frame.restore.slot] = ActiveSequence(frame.restore.sequence_id, None)
                self._reuse.restore(frame.restore)
            case "prefetch":
                self._reuse.prefetch(frame.prefetch)
            case "keep_blocks":
                self._reuse.keep(frame.keep_blocks)
            case "forget_blocks":
                self._reuse.forget(frame.forget_blocks)
            case body:
                raise InternalError(f"a stage got a frame with {body}")

    def resume(self, ready: RestoreReady) -> None:
        """Go on with a restore."""
        self._reuse.resume(ready)

    def give_up_restore(self, slot: int, sequence_id: int) -> None:
        """End a restore that failed: nothing was restored."""
        self._reuse.give_up(slot, sequence_id)

    def rebase(self, spec: StageSpec) -> None:
        """Go on as the same shard in another epoch. What slots hold of sequences that may go on is retained."""
        assert self.spec.is_same_shard(spec)
        for slot, active in self._active.items():
            if not self._reuse.retain(slot, active.sequence_id):
                self._release(slot, will_resume=True)
        self._active.clear()
        self.spec = spec
        self._reuse.rebase((spec.pipeline_id, spec.epoch))

    def suspend(self) -> None:
        """Be in no epoch until it is rebased."""
        self.rebase(replace(self.spec, epoch=NO_EPOCH))

    @property
    def has_segment(self) -> bool:
        """Whether a segment of a sequence is to be checkpointed, and can be."""
        return self._reuse.has_segment

    def checkpoint(self, most: int) -> None:
        """Checkpoint so many segments at most, as there are and as there is room now."""
        self._reuse.checkpoint(most)

    def check_invariants(self) -> None:
        self._reuse.check_invariants()
        for slot, active in self._active.items():
            assert not self._reuse.is_retained(slot, active.sequence_id)

    def close(self) -> None:
        """Let go of the shard, which is about to be closed."""
        self._reuse.close()

    def report_failure(self, step: int, error: ShoalError) -> None:
        """Tell the orchestrator that a step is lost."""
        failed = flow_pb2.StepFailed(step=step, stage=self.spec.stage, reason=error.reason, message=error.message)
        self._send(self._frame(ORCHESTRATOR, step_failed=failed))

    def _frame(self, to_stage: int, **body: Message | Body) -> flow_pb2.Frame:
        return flow_pb2.Frame(
            pipeline_id=self.spec.pipeline_id,
            epoch=self.spec.epoch,
            to_stage=to_stage,
            **body,  # type: ignore[arg-type]
        )

    def _send_on(self, message: Message) -> None:
        """Pass on what is for all stages; the last one answers a restore."""
        following = self.spec.stage + 1
        is_last = self.spec.shape.is_last
        match message:
            case flow_pb2.Restore() if is_last:
                restored = flow_pb2.Restored(sequence_id=message.sequence_id, restored=message.restored)
                self._send(self._frame(ORCHESTRATOR, restored=restored))
            case _ if is_last:
                return
            case flow_pb2.Restore():
                self._send(self._frame(following, restore=message))
            case flow_pb2.Prefetch():
                self._send(self._frame(following, prefetch=message))
            case flow_pb2.KeepBlocks():
                self._send(self._frame(following, keep_blocks=message))
            case flow_pb2.ForgetBlocks():
                self._send(self._frame(following, forget_blocks=message))

    def _cancel(self, cancel: flow_pb2.Cancel) -> None:
        for sequence in cancel.sequences:
            slot, sequence_id = sequence.slot, sequence.sequence_id
            active = self._active.get(slot)
            if active is not None and active.sequence_id == sequence_id:
                del self._active[slot]
                self._release(slot, will_resume=sequence.will_resume)
            elif active is None and self._reuse.is_retained(slot, sequence_id):
                self._release(slot, will_resume=sequence.will_resume)
            else:
                self._reuse.expect_no_more(slot, sequence_id)
        if not self.spec.shape.is_last:
            self._send(self._frame(self.spec.stage + 1, cancel=cancel))

    def _release(self, slot: int, *, will_resume: bool = False) -> None:
        try:
            self._reuse.release(slot, will_resume=will_resume)
        finally:
            self._shard.release(slot)

    def _step(self, step: flow_pb2.Step) -> None:
        taken_up_ns = time.monotonic_ns()
        for row in step.rows:
            if row.HasField("start"):
                self._start(row)
        live = [self._is_live(row) for row in step.rows]
        rows = [row for row, is_live in zip(step.rows, live, strict=True) if is_live]
        output = self._compute(step, rows, live)
        if self.spec.shape.is_last:
            self._finish(step, rows, output, taken_up_ns)
        else:
            self._pass_on(step, rows, output, taken_up_ns)

    def _start(self, row: flow_pb2.StepRow) -> None:
        sampler = None
        if self.spec.shape.is_last:
            sampling = sampling_from_proto(row.start.sampling, seed=0)
            sampler = Sampler(sampling, row.start.prompt_token_ids, row.start.answer_token_ids)
        self._active[row.slot] = ActiveSequence(row.sequence_id, sampler, frozenset(row.start.stop_token_ids))
        self._reuse.start(row.slot, row.start, row.position)

    def _is_live(self, row: flow_pb2.StepRow) -> bool:
        active = self._active.get(row.slot)
        return active is not None and active.sequence_id == row.sequence_id

    def _compute(
        self, step: flow_pb2.Step, rows: Sequence[flow_pb2.StepRow], live: Sequence[bool]
    ) -> npt.NDArray[np.float32] | None:
        if not rows:
            return None
        is_last = self.spec.shape.is_last
        batch = ShardBatch(
            rows=tuple(ShardRow(row.slot, row.position, row.num_tokens, row.sample and is_last) for row in rows),
            tokens_or_hidden=self._input(step, live),
            solo=step.solo,
        )
        self._reuse.make_room(rows)
        started = time.monotonic()
        output = self._shard.run(batch)
        wait_s = self._slow_down.extra_seconds(time.monotonic() - started)
        if wait_s > 0:
            time.sleep(wait_s)
        token_s = (time.monotonic() - started) / sum(row.num_tokens for row in rows)
        for row in rows:
            self._reuse.computed(row.slot, row.position, row.num_tokens, token_s)
        return output

    def _input(self, step: flow_pb2.Step, live: Sequence[bool]) -> npt.NDArray[np.int64] | npt.NDArray[np.float32]:
        counts = [row.num_tokens for row in step.rows]
        num_tokens = sum(counts)
        values: npt.NDArray[np.int64] | npt.NDArray[np.float32]
        if self.spec.shape.is_first:
            values = np.array(step.token_ids, dtype=np.int64)  # [T]
            if len(values) != num_tokens:
                raise InternalError(f"a step has {len(values)} tokens for rows of {num_tokens}")
            # The runtime reads beyond the embedding instead of refusing.
            if num_tokens and values.max() >= self.spec.shape.vocab_size:
                raise InternalError(f"token {values.max()} is not in the vocabulary of {self.spec.shape.vocab_size}")
        else:
            values = unpack_activations(step.activations, num_tokens, self.spec.shape.hidden_size)  # [T, E]
        return values if all(live) else values[np.repeat(live, counts)]

    def _pass_on(
        self,
        step: flow_pb2.Step,
        rows: Sequence[flow_pb2.StepRow],
        hidden: npt.NDArray[np.float32] | None,
        taken_up_ns: int,
    ) -> None:
        following = flow_pb2.Step(
            step=step.step,
            rows=rows,
            activations=b"" if hidden is None else pack_activations(hidden),
            dtype=flow_pb2.ACTIVATION_DTYPE_FLOAT32,
            burst_steps=step.burst_steps,
            solo=step.solo,
            stamps_ns=[*step.stamps_ns, taken_up_ns, time.monotonic_ns()],
        )
        self._send(self._frame(self.spec.stage + 1, step=following))

    def _finish(
        self,
        step: flow_pb2.Step,
        rows: Sequence[flow_pb2.StepRow],
        logits: npt.NDArray[np.float32] | None,
        taken_up_ns: int,
    ) -> None:
        sampled = [] if logits is None else self._sample(rows, logits)
        left = [(row, token) for row, token in sampled if step.burst_steps > 0 and not self._ends(row, token)]
        stamps_ns = [*step.stamps_ns, taken_up_ns, time.monotonic_ns()]
        if left:
            self._send(self._frame(0, step=_next_of_burst(step, left)))
        result = flow_pb2.StepResult(
            step=step.step,
            tokens=[_to_message(row, token) for row, token in sampled],
            burst_steps=step.burst_steps if left else 0,
            stamps_ns=stamps_ns,
        )
        self._send(self._frame(ORCHESTRATOR, step_result=result))

    def _sample(
        self, rows: Sequence[flow_pb2.StepRow], logits: npt.NDArray[np.float32]
    ) -> list[tuple[flow_pb2.StepRow, Sampled]]:
        wanted = [row for row in rows if row.sample]
        drawn = []
        for row, row_logits in zip(wanted, logits, strict=True):
            sampler = self._active[row.slot].sampler
            assert sampler is not None
            drawn.append((row, sampler.sample(row_logits, row.position + row.num_tokens)))
        return drawn

    def _ends(self, row: flow_pb2.StepRow, token: Sampled) -> bool:
        return token.token_id in self._active[row.slot].stop_token_ids


def _next_of_burst(step: flow_pb2.Step, left: Sequence[tuple[flow_pb2.StepRow, Sampled]]) -> flow_pb2.Step:
    return flow_pb2.Step(
        step=step.step,
        rows=[
            flow_pb2.StepRow(
                sequence_id=row.sequence_id,
                slot=row.slot,
                position=row.position + row.num_tokens,
                num_tokens=1,
                sample=True,
            )
            for row, _ in left
        ],
        token_ids=[token.token_id for _, token in left],
        burst_steps=step.burst_steps - 1,
        solo=step.solo,
        stamps_ns=[time.monotonic_ns()],
    )


def _to_message(row: flow_pb2.StepRow, token: Sampled) -> flow_pb2.SampledToken:
    message = flow_pb2.SampledToken(
        sequence_id=row.sequence_id, position=row.position + row.num_tokens, token_id=token.token_id
    )
    if token.logprob is not None:
        message.logprobs.logprob = token.logprob
        message.logprobs.top.extend(
            types_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top
        )
    return message
