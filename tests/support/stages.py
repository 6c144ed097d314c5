"""Stages of a tiny model chained by hand: a pipeline without threads and links, and the steps to feed it.

What the orchestrator would send is made here, message by message; what it would get is collected. Used by the tests of
stages and of the compute thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from modelstore.graph import build_shard_graph
from shoal.kv import BlockHash
from shoal.messages import sampling_to_proto
from shoal.types import KVPolicy, LayerRange, SamplingParams
from shoal.v1 import flow_pb2
from tests.support.shards import TinyModel, make_shape
from worker.emulation import SlowDown
from worker.filling import RestoreReady
from worker.kv.cache import BlockCache
from worker.kv.fetches import BlocksFetched, LowerTier
from worker.shard import Shard, open_shard
from worker.stage import ORCHESTRATOR, StageRunner, StageSpec

PIPELINE_ID = "p1"
EPOCH = 3


def make_spec(
    model: TinyModel,
    layers: LayerRange,
    stage: int,
    num_stages: int,
    *,
    epoch: int = EPOCH,
    slot_tokens: int = 128,
    num_slots: int = 4,
) -> StageSpec:
    shape = make_shape(model.manifest, layers, slot_tokens=slot_tokens, num_slots=num_slots)
    return StageSpec(PIPELINE_ID, epoch, stage, num_stages, shape, layers, model.manifest.digest)


def graph_of(model: TinyModel, layers: LayerRange) -> bytes:
    return build_shard_graph(model.manifest, layers)


def make_start(
    sampling: SamplingParams | None = None,
    *,
    stop_ids: Sequence[int] = (),
    names: Sequence[BlockHash] = (),
    is_kv_exact: bool = True,
    **fields: Any,
) -> flow_pb2.SequenceStart:
    """By default tokens are drawn at random, so that every answer is different from the next."""
    return flow_pb2.SequenceStart(
        sampling=sampling_to_proto(sampling or SamplingParams(temperature=8.0, seed=7, num_logprobs=2)),
        stop_token_ids=stop_ids,
        block_hashes=names,
        is_kv_exact=is_kv_exact,
        **fields,
    )


def make_row(
    sequence_id: int,
    *,
    num_tokens: int = 1,
    slot: int = 0,
    position: int = 0,
    sample: bool = True,
    start: flow_pb2.SequenceStart | None = None,
) -> flow_pb2.StepRow:
    """A row; without a position it begins its sequence."""
    row = flow_pb2.StepRow(
        sequence_id=sequence_id, slot=slot, position=position, num_tokens=num_tokens, sample=sample, start=start
    )
    if position == 0 and start is None:
        row.start.CopyFrom(make_start())
    return row


def make_step(
    step: int, rows: Sequence[flow_pb2.StepRow], token_ids: Sequence[int], *, burst_steps: int = 0, **fields: Any
) -> flow_pb2.Frame:
    """A step for the first stage."""
    message = flow_pb2.Step(step=step, rows=rows, token_ids=token_ids, burst_steps=burst_steps, **fields)
    return flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=EPOCH, to_stage=0, step=message)


def make_cancel(*ended: tuple[int, int], will_resume: bool = False) -> flow_pb2.Frame:
    """End sequences, given as (sequence id, slot)."""
    refs = [
        flow_pb2.SequenceRef(sequence_id=sequence_id, slot=slot, will_resume=will_resume) for sequence_id, slot in ended
    ]
    return flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=EPOCH, to_stage=0, cancel=flow_pb2.Cancel(sequences=refs))


@dataclass(frozen=True, slots=True)
class KVKeeping:
    """What each stage keeps KV blocks in; by default it keeps none. lower: one for all stages.

    kv_tokens: None is room for all slots.
    """

    budget_bytes: int = 0
    policy: KVPolicy = KVPolicy.EXACT
    lower: LowerTier | None = None
    slot_tokens: int = 128
    kv_tokens: int | None = None


def make_restore(
    sequence_id: int,
    names: Sequence[BlockHash],
    *,
    slot: int = 0,
    is_exact_only: bool = False,
    fetch_timeout_ms: float = 0.0,
    **fields: Any,
) -> flow_pb2.Frame:
    restore = flow_pb2.Restore(
        sequence_id=sequence_id,
        slot=slot,
        block_hashes=names,
        is_exact_only=is_exact_only,
        fetch_timeout_ms=fetch_timeout_ms,
        **fields,
    )
    return flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=EPOCH, to_stage=0, restore=restore)


def make_frame(**body: Any) -> flow_pb2.Frame:
    """Any frame for the first stage."""
    return flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=EPOCH, to_stage=0, **body)


class StageChain:
    """Stages cut before the layers named; frames wait in one queue until they are passed on.

    passed: every frame between stages, in order. results: those for the orchestrator. posted: by stage, what is to go on
    behind the frames that wait. caches: of the stages; a chain that takes those of another has what that one kept.
    """

    def __init__(
        self,
        model: TinyModel,
        cuts: Sequence[int] = (),
        keeping: KVKeeping = KVKeeping(),
        caches: Sequence[BlockCache] | None = None,
    ) -> None:
        edges = [0, *cuts, model.manifest.config.num_layers]
        self._model, self._keeping, self._layers = model, keeping, [LayerRange(*edge) for edge in pairwise(edges)]
        self.posted: deque[tuple[int, RestoreReady | BlocksFetched]] = deque()
        self.waiting: deque[flow_pb2.Frame] = deque()
        self.passed: list[flow_pb2.Frame] = []
        self.results: list[flow_pb2.Frame] = []
        opened = [self._open(stage, caches) for stage in range(len(self._layers))]
        self.stages: list[StageRunner] = [runner for runner, _, _ in opened]
        self.shards: list[Shard] = [shard for _, shard, _ in opened]
        self.caches: list[BlockCache] = [cache for _, _, cache in opened]

    def _open(self, stage: int, caches: Sequence[BlockCache] | None) -> tuple[StageRunner, Shard, BlockCache]:
        layers, keeping = self._layers[stage], self._keeping
        spec = make_spec(self._model, layers, stage, len(self._layers), slot_tokens=keeping.slot_tokens)
        if keeping.kv_tokens is not None:
            spec = replace(spec, shape=replace(spec.shape, kv_tokens=keeping.kv_tokens))
        shard = open_shard(spec.shape, graph_of(self._model, layers), self._model.blob_directory)
        post = partial(self._post, stage)
        cache = (
            BlockCache(keeping.budget_bytes, keeping.policy, post, lower=keeping.lower)
            if caches is None
            else caches[stage]
        )
        runner = StageRunner(spec, shard, SlowDown(1.0), self._sent, cache, post, lower=keeping.lower)
        return runner, shard, cache

    def replace(self, stage: int) -> None:
        """Lose a stage, and put one in its place that knows nothing."""
        self.shards[stage].close()
        self.stages[stage], self.shards[stage], self.caches[stage] = self._open(stage, None)

    def rebase(self) -> None:
        """End the epoch of all stages, and begin another, which an orchestrator that knows of none has numbered alike."""
        for runner in self.stages:
            spec = runner.spec
            runner.suspend()
            runner.rebase(spec)
            runner.check_invariants()

    def _post(self, stage: int, item: RestoreReady | BlocksFetched) -> None:
        self.posted.append((stage, item))

    def _sent(self, frame: flow_pb2.Frame) -> None:
        if frame.to_stage == ORCHESTRATOR:
            self.results.append(frame)
        else:
            self.passed.append(frame)
            self.waiting.append(frame)

    def send(self, *frames: flow_pb2.Frame) -> None:
        """Hand frames over, then pass everything on until nothing moves."""
        self.waiting.extend(frames)
        while self.waiting or self.posted:
            self.pass_one()

    def pass_one(self) -> None:
        if not self.waiting:
            self._go_on()
            return
        frame = self.waiting.popleft()
        self.stages[frame.to_stage].handle(frame)

    def _go_on(self) -> None:
        stage, item = self.posted.popleft()
        if isinstance(item, RestoreReady):
            self.stages[stage].resume(item)
        else:
            self.caches[stage].fetched(item)

    def keep_up(self) -> None:
        """Have all that waits copied."""
        for cache in self.caches:
            while cache.has_work:
                cache.work()
            cache.check_invariants()
        for runner in self.stages:
            while runner.has_segment:
                runner.checkpoint(1)
            runner.check_invariants()

    def take_results(self) -> list[flow_pb2.StepResult]:
        results, self.results = self.results, []
        return [frame.step_result for frame in results]

    def take_restored(self) -> list[flow_pb2.Restored]:
        results, self.results = self.results, []
        return [frame.restored for frame in results if frame.HasField("restored")]

    def tokens_of(self, sequence_id: int) -> list[flow_pb2.SampledToken]:
        """All tokens of a sequence that were reported so far."""
        reported = [token for frame in self.results for token in frame.step_result.tokens]
        return [token for token in reported if token.sequence_id == sequence_id]

    def kv_bytes(self) -> list[int]:
        return [shard.kv_bytes for shard in self.shards]

    def close(self) -> None:
        for runner, shard in zip(self.stages, self.shards, strict=True):
            runner.close()
            shard.close()
