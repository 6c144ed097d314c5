"""Stages of a tiny model chained by hand: a pipeline without threads and links, and the steps to feed it.

What the orchestrator would send is made here, message by message; what it would get is collected. Used by the tests of
stages and of the compute thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from modelstore.graph import build_shard_graph
from shoal.rpc import sampling_to_proto
from shoal.types import LayerRange, SamplingParams
from shoal.v1 import flow_pb2
from tests.support.shards import TinyModel, make_shape
from worker.emulation import SlowDown
from worker.shard import open_shard
from worker.stage import ORCHESTRATOR, StageRunner, StageSpec

PIPELINE_ID = "p1"
EPOCH = 3


def make_spec(model: TinyModel, layers: LayerRange, stage: int, num_stages: int, *, epoch: int = EPOCH) -> StageSpec:
    return StageSpec(PIPELINE_ID, epoch, stage, num_stages, make_shape(model.manifest, layers))


def graph_of(model: TinyModel, layers: LayerRange) -> bytes:
    return build_shard_graph(model.manifest, layers)


def make_start(sampling: SamplingParams | None = None, *, stop_ids: Sequence[int] = ()) -> flow_pb2.SequenceStart:
    """By default tokens are drawn at random, so that every answer is different from the next."""
    return flow_pb2.SequenceStart(
        sampling=sampling_to_proto(sampling or SamplingParams(temperature=8.0, seed=7, num_logprobs=2)),
        stop_token_ids=stop_ids,
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


def make_cancel(*ended: tuple[int, int]) -> flow_pb2.Frame:
    """End sequences, given as (sequence id, slot)."""
    refs = [flow_pb2.SequenceRef(sequence_id=sequence_id, slot=slot) for sequence_id, slot in ended]
    return flow_pb2.Frame(pipeline_id=PIPELINE_ID, epoch=EPOCH, to_stage=0, cancel=flow_pb2.Cancel(sequences=refs))


class StageChain:
    """Stages cut before the layers named; frames wait in one queue until they are passed on.

    passed: every frame between stages, in order. results: those for the orchestrator.
    """

    def __init__(self, model: TinyModel, cuts: Sequence[int] = ()) -> None:
        edges = [0, *cuts, model.manifest.config.num_layers]
        self.waiting: deque[flow_pb2.Frame] = deque()
        self.passed: list[flow_pb2.Frame] = []
        self.results: list[flow_pb2.Frame] = []
        self.stages = []
        self.shards = []
        for stage, (first, stop) in enumerate(pairwise(edges)):
            layers = LayerRange(first, stop)
            spec = make_spec(model, layers, stage, len(edges) - 1)
            shard = open_shard(spec.shape, graph_of(model, layers), model.blob_directory)
            self.shards.append(shard)
            self.stages.append(StageRunner(spec, shard, SlowDown(1.0), self._sent))

    def _sent(self, frame: flow_pb2.Frame) -> None:
        if frame.to_stage == ORCHESTRATOR:
            self.results.append(frame)
        else:
            self.passed.append(frame)
            self.waiting.append(frame)

    def send(self, *frames: flow_pb2.Frame) -> None:
        """Hand frames over, then pass everything on until nothing moves."""
        self.waiting.extend(frames)
        while self.waiting:
            self.pass_one()

    def pass_one(self) -> None:
        frame = self.waiting.popleft()
        self.stages[frame.to_stage].handle(frame)

    def take_results(self) -> list[flow_pb2.StepResult]:
        results, self.results = self.results, []
        return [frame.step_result for frame in results]

    def tokens_of(self, sequence_id: int) -> list[flow_pb2.SampledToken]:
        """All tokens of a sequence that were reported so far."""
        reported = [token for frame in self.results for token in frame.step_result.tokens]
        return [token for token in reported if token.sequence_id == sequence_id]

    def kv_bytes(self) -> list[int]:
        return [shard.kv_bytes for shard in self.shards]

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
