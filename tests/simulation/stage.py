"""A stage as it is to be seen from outside: it takes, holds, restores and sends what a real one does, and computes numbers.

Takes the frames of a real orchestrator and answers in kind; the contract suite plays the same frames to a real stage. What a
stage relies on is asserted here, where a real one would compute nonsense: a slot is cancelled before it is another's, and no
token is left out. Links, time and loading are the worker's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from shoal.kv import BLOCK_TOKENS
from shoal.v1 import flow_pb2
from tests.simulation.layers import LayerKV, draw
from tests.simulation.store import HostBlocks, WriteBehind
from worker.checkpoints import MAX_LAST_SEGMENTS
from worker.kv.trail import MAX_SEGMENT_TOKENS as SEGMENT_TOKENS
from worker.kv.trail import Segment
from worker.stage import ORCHESTRATOR, StageSpec

FETCH_S = 0.03


@dataclass(slots=True)
class Slot:
    """run_id: whose it is, or was before it was retained. base, written: where its trail begins, and ends so far.

    is_filling: it is a run's that has no rows yet, num_retained: what it held of that when it was asked for. is_known: Redis
    may have some of its trail.
    """

    run_id: int
    layers: list[LayerKV]
    trail_id: bytes = b""
    names: list[bytes] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    base: int = 0
    written: int = 0
    is_filling: bool = False
    is_retained: bool = False
    is_known: bool = False
    num_retained: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.layers[0].inputs)

    def cut(self, num_tokens: int) -> None:
        for layer in self.layers:
            layer.cut(num_tokens)

    def extend(self, inputs: Seq[Seq[int]]) -> None:
        """Fill with what the layers were given, instead of computing it."""
        for layer, values in zip(self.layers, inputs, strict=True):
            layer.feed(values)


class SimulatedStage:
    """Invariants: a slot is one run's at most; all layers of it hold equally many tokens; retained ones have a trail."""

    def __init__(
        self,
        spec: StageSpec,
        send: Callable[[flow_pb2.Frame], None],
        host: HostBlocks,
        writes: WriteBehind,
        after: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """after: lets something happen after a while, if the device is there then."""
        self.spec = spec
        self.slots: dict[int, Slot] = {}
        self._send = send
        self._host = host
        self._writes = writes
        self._after = after
        self._broken_runs: set[int] = set()

    def handle(self, frame: flow_pb2.Frame) -> None:
        if (frame.pipeline_id, frame.epoch) != (self.spec.pipeline_id, self.spec.epoch):
            return
        match frame.WhichOneof("body"):
            case "step":
                self._step(frame.step)
            case "cancel":
                self._cancel(frame.cancel)
            case "restore":
                self._restore(frame.restore)
            case "prefetch":
                self._pass_on(prefetch=frame.prefetch)
            case "keep_blocks":
                self._pass_on(keep_blocks=frame.keep_blocks)
            case "forget_blocks":
                for name in frame.forget_blocks.block_hashes:
                    self._host.forget(name)
                self._pass_on(forget_blocks=frame.forget_blocks)
            case body:
                raise AssertionError(f"a stage got a frame with {body}")
        self.checkpoint()

    def rebase(self, spec: StageSpec) -> None:
        """Go on in another epoch with what slots hold of sequences that may come back."""
        self.spec = spec
        self._broken_runs.clear()
        for number, slot in list(self.slots.items()):
            if slot.trail_id and slot.num_tokens:
                slot.is_retained, slot.is_filling, slot.names = True, False, []
            else:
                del self.slots[number]

    def close(self) -> None:
        """Be unloaded: sequences may go on elsewhere."""
        for slot in self.slots.values():
            self._complete(slot)
        self.slots.clear()

    def fail(self, step: flow_pb2.Step) -> None:
        """Break at a step: nothing of it is computed, so nothing that follows in its runs can be."""
        self._broken_runs |= {row.sequence_id for row in step.rows}
        failed = flow_pb2.StepFailed(step=step.step, stage=self.spec.stage, reason="INTERNAL", message="a kernel broke")
        self._send(self._frame(ORCHESTRATOR, step_failed=failed))

    def check_invariants(self) -> None:
        for slot in self.slots.values():
            assert len({len(layer.inputs) for layer in slot.layers}) == 1
            assert not slot.is_retained or slot.trail_id
        held = sum(slot.num_tokens for slot in self.slots.values())
        assert held <= self.spec.shape.kv_tokens, f"{held} tokens are held"

    def _frame(self, to_stage: int, **body: object) -> flow_pb2.Frame:
        spec = self.spec
        return flow_pb2.Frame(pipeline_id=spec.pipeline_id, epoch=spec.epoch, to_stage=to_stage, **body)  # type: ignore[arg-type]

    def _pass_on(self, **body: object) -> None:
        if not self.spec.shape.is_last:
            self._send(self._frame(self.spec.stage + 1, **body))

    def _new_slot(self, number: int, run_id: int) -> Slot:
        assert number < self.spec.shape.num_slots, f"there is no slot {number}"
        earlier = self.slots.get(number)
        assert earlier is None or earlier.is_retained, (
            f"slot {number} was not cancelled for run {earlier and earlier.run_id} before run {run_id} took it"
        )
        layers = self.spec.layers
        self.slots[number] = Slot(run_id, [LayerKV(layer) for layer in range(layers.start, layers.stop)])
        return self.slots[number]

    # Steps

    def _step(self, step: flow_pb2.Step) -> None:
        inputs = list(step.token_ids) if self.spec.shape.is_first else array("I", step.activations).tolist()
        assert len(inputs) == sum(row.num_tokens for row in step.rows), "a step has not the tokens of its rows"
        if any(row.sequence_id in self._broken_runs for row in step.rows):
            self.fail(step)
            return
        live, outputs = [], list[list[int]]()
        for row in step.rows:
            values, inputs = inputs[: row.num_tokens], inputs[row.num_tokens :]
            slot = self._slot_of(row)
            if slot is not None:
                live.append(row)
                outputs.append(self._compute(slot, row, values))
        if self.spec.shape.is_last:
            self._finish(step, live, outputs)
            return
        activations = array("I", [value for values in outputs for value in values]).tobytes()
        following = flow_pb2.Step(
            step=step.step, rows=live, activations=activations, burst_steps=step.burst_steps, solo=step.solo,
            dtype=flow_pb2.ACTIVATION_DTYPE_FLOAT32, stamps_ns=step.stamps_ns,
        )  # fmt: skip
        self._send(self._frame(self.spec.stage + 1, step=following))

    def _slot_of(self, row: flow_pb2.StepRow) -> Slot | None:
        """The slot of a row, taken by it if it starts a run; None if its run is over."""
        slot = self.slots.get(row.slot)
        is_its = slot is not None and slot.run_id == row.sequence_id and not slot.is_retained
        if not row.HasField("start"):
            assert slot is None or not (is_its and slot.is_filling), f"run {row.sequence_id} was filled and not started"
            return slot if is_its else None
        if slot is None or not is_its:
            slot = self._new_slot(row.slot, row.sequence_id)
        assert row.position <= slot.num_tokens, f"run {row.sequence_id} starts behind what was restored"
        start = row.start
        slot.is_filling = False
        slot.names, slot.stop_ids = list(start.block_hashes), frozenset(start.stop_token_ids)
        self._begin_trail(slot, start.trail_id, row.position)
        return slot

    def _compute(self, slot: Slot, row: flow_pb2.StepRow, values: list[int]) -> list[int]:
        assert row.position <= slot.num_tokens, (
            f"run {row.sequence_id} leaves out tokens: {row.position} after {slot.num_tokens}"
        )
        slot.cut(row.position)
        self._make_room(row.num_tokens)
        for layer in slot.layers:
            values = layer.feed(values)
        for index in range(row.position // BLOCK_TOKENS, min(slot.num_tokens // BLOCK_TOKENS, len(slot.names))):
            self._keep(slot, index)
        return values

    def _keep(self, slot: Slot, index: int) -> None:
        """Keep a block that was completed, below too if it is new."""
        name = slot.names[index]
        for number, layer in enumerate(slot.layers, self.spec.layers.start):
            inputs = layer.inputs[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            if self._host.put(name, number, inputs):
                self._writes.write(lambda redis, number=number, inputs=inputs: redis.write_block(name, number, inputs))  # type: ignore[misc]

    def _finish(self, step: flow_pb2.Step, rows: Seq[flow_pb2.StepRow], outputs: Seq[Seq[int]]) -> None:
        drawn = [(row, draw(values[-1])) for row, values in zip(rows, outputs, strict=True) if row.sample]
        left = [(row, token) for row, token in drawn if step.burst_steps and token not in self.slots[row.slot].stop_ids]
        if left:
            rows = [
                flow_pb2.StepRow(
                    sequence_id=row.sequence_id, slot=row.slot, position=row.position + row.num_tokens, num_tokens=1,
                    sample=True,
                )
                for row, _ in left
            ]  # fmt: skip
            following = flow_pb2.Step(
                step=step.step, rows=rows, token_ids=[token for _, token in left], burst_steps=step.burst_steps - 1,
                solo=step.solo, stamps_ns=step.stamps_ns[:1],
            )  # fmt: skip
            self._send(self._frame(0, step=following))
        tokens = [
            flow_pb2.SampledToken(sequence_id=row.sequence_id, position=row.position + row.num_tokens, token_id=token)
            for row, token in drawn
        ]
        burst_steps = step.burst_steps if left else 0
        result = flow_pb2.StepResult(step=step.step, tokens=tokens, burst_steps=burst_steps, stamps_ns=step.stamps_ns)
        self._send(self._frame(ORCHESTRATOR, step_result=result))

    def _cancel(self, cancel: flow_pb2.Cancel) -> None:
        for ref in cancel.sequences:
            slot = self.slots.get(ref.slot)
            if slot is not None and slot.run_id == ref.sequence_id and not slot.is_retained:
                del self.slots[ref.slot]
                self._end_trail(slot, will_resume=ref.will_resume)
        self._pass_on(cancel=cancel)

    def _make_room(self, num_tokens: int) -> None:
        """Lose retained slots, the longest first, until there is room for more."""
        total = sum(slot.num_tokens for slot in self.slots.values()) + num_tokens
        while total > self.spec.shape.kv_tokens:
            retained = [(slot.num_tokens, number) for number, slot in self.slots.items() if slot.is_retained]
            assert retained, f"{total} tokens are to be held"
            length, number = max(retained)
            total -= length
            del self.slots[number]

    # Restoring

    def _restore(self, restore: flow_pb2.Restore) -> None:
        """Fill a slot with what is there; what has to be fetched takes a while, and others go on meanwhile."""
        is_first, before = self.spec.shape.is_first, restore.restored
        count = len(restore.block_hashes) if is_first else before.num_blocks
        limit = count * BLOCK_TOKENS
        if restore.trail_id:
            limit = restore.num_tokens if is_first else min(restore.num_tokens, before.num_tokens)
        slot = self.slots.get(restore.slot)
        if slot is not None and slot.is_retained and restore.trail_id and slot.trail_id == restore.trail_id:
            slot.run_id, slot.is_retained = restore.sequence_id, False
            if limit:
                slot.cut(limit)
            # Else its first row writes over it.
        else:
            slot = self._new_slot(restore.slot, restore.sequence_id)
            slot.trail_id = restore.trail_id
            slot.base = slot.written = len(restore.block_hashes) * BLOCK_TOKENS
        slot.is_filling, slot.is_known = True, bool(restore.trail_id)
        slot.num_retained = min(slot.num_tokens, limit)
        self._make_room(max(limit, count * BLOCK_TOKENS) - slot.num_tokens)
        where = (self.spec, slot)

        def fetched() -> None:
            if (self.spec, self.slots.get(restore.slot)) == where and slot.is_filling:
                num_fetched = self._fill(slot, restore, count, limit, is_fetched=True)
                self._restored(slot, restore, count, limit, num_fetched)

        self._fill(slot, restore, count, limit, is_fetched=False)
        has_all = slot.num_tokens >= max(limit, count * BLOCK_TOKENS)
        if has_all or restore.fetch_timeout_ms <= 0 or self._writes.redis is None:
            self._restored(slot, restore, count, limit, 0)
        else:
            self._after(min(FETCH_S, restore.fetch_timeout_ms / 1e3), fetched)

    def _fill(self, slot: Slot, restore: flow_pb2.Restore, count: int, limit: int, *, is_fetched: bool) -> int:
        """Go on filling: with blocks from memory, or from Redis if that is_fetched; how many blocks came from there."""
        redis = self._writes.redis if is_fetched else None
        num_fetched = 0
        while slot.num_tokens < count * BLOCK_TOKENS and slot.num_tokens % BLOCK_TOKENS == 0:
            name = restore.block_hashes[slot.num_tokens // BLOCK_TOKENS]
            inputs = self._host.get(name, self.spec.layers)
            if inputs is None and redis is not None:
                inputs = redis.read_block(name, self.spec.layers)
                num_fetched += inputs is not None
                for layer, values in enumerate(inputs or (), self.spec.layers.start):
                    self._host.put(name, layer, values)
            if inputs is None:
                return num_fetched
            slot.extend(inputs)
        has_all_blocks = count == len(restore.block_hashes) and slot.num_tokens >= count * BLOCK_TOKENS
        if redis is not None and has_all_blocks and slot.num_tokens < limit:
            slot.extend(redis.read_trail(restore.trail_id, self.spec.layers, slot.num_tokens, limit))
        return num_fetched

    def _restored(self, slot: Slot, restore: flow_pb2.Restore, count: int, limit: int, num_fetched: int) -> None:
        num_tokens = min(slot.num_tokens, limit)
        if restore.trail_id and not slot.num_retained:
            slot.written = max(slot.base, num_tokens)
        num_blocks = min(count, num_tokens // BLOCK_TOKENS)
        before = restore.restored
        num_from_redis = num_fetched
        if not self.spec.shape.is_first:
            num_from_redis = max(num_fetched, before.num_from_redis - (before.num_blocks - num_blocks))
        blocks = flow_pb2.RestoredBlocks(
            num_blocks=num_blocks, num_from_redis=num_from_redis, codec="f32" if num_blocks else "", is_exact=True,
            num_tokens=num_tokens,
        )  # fmt: skip
        if self.spec.shape.is_last:
            restored = flow_pb2.Restored(sequence_id=restore.sequence_id, restored=blocks)
            self._send(self._frame(ORCHESTRATOR, restored=restored))
            return
        following = flow_pb2.Restore()
        following.CopyFrom(restore)
        following.restored.CopyFrom(blocks)
        self._send(self._frame(self.spec.stage + 1, restore=following))

    # Trails

    def _begin_trail(self, slot: Slot, trail_id: bytes, position: int) -> None:
        base = len(slot.names) * BLOCK_TOKENS
        if slot.trail_id != trail_id:
            slot.trail_id, slot.base, slot.written = trail_id, base, base
            return
        safe = max(base, position - position % SEGMENT_TOKENS)
        slot.base, slot.written = base, min(max(base, slot.written), safe)
        if slot.is_known:
            layers = self.spec.layers
            self._writes.write(lambda redis: redis.cut_trail(trail_id, layers, position))

    def checkpoint(self) -> bool:
        """Write the next segment of the slot that is behind most; False if there is none."""
        behind = [slot for slot in self.slots.values() if slot.trail_id]
        if not behind or self._writes.redis is None:
            return False
        slot = max(behind, key=lambda slot: slot.num_tokens - slot.written)
        if slot.num_tokens - slot.written < SEGMENT_TOKENS:
            return False
        self._write(slot, slot.written + SEGMENT_TOKENS)
        return True

    def _complete(self, slot: Slot) -> None:
        """Write the rest of a trail, as far as there is time for it."""
        for _ in range(MAX_LAST_SEGMENTS):
            if slot.trail_id and slot.written < slot.num_tokens:
                self._write(slot, min(slot.num_tokens, slot.written + SEGMENT_TOKENS))

    def _end_trail(self, slot: Slot, *, will_resume: bool) -> None:
        trail_id = slot.trail_id
        if will_resume:
            self._complete(slot)
        elif trail_id:
            self._writes.write(lambda redis: redis.end_trail(trail_id))

    def _write(self, slot: Slot, stop: int) -> None:
        trail_id, segment = slot.trail_id, Segment(self.spec.layers, slot.written, stop)
        inputs = [layer.inputs[segment.start : stop] for layer in slot.layers]
        slot.written = stop
        self._writes.write(lambda redis: redis.write_segment(trail_id, segment, inputs))
