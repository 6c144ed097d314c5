"""Pipelines whose stages are played by the test: frames out are recorded, results are fed in by hand or computed.

The computed ones come from `slot_model`. Used by the engine's tests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.answer import Answer, TokenEvent
from orchestrator.core.sequence import Sequence
from orchestrator.core.tenants import TenantLedger
from orchestrator.engine import Engine
from orchestrator.lane import Lane
from orchestrator.pipeline import Pipeline, StageMember
from shoal.errors import ShoalError, WorkerLost
from shoal.types import DeviceMode, LayerRange, PipelineId, SequenceId, WorkerId
from shoal.v1 import flow_pb2
from tests.support.builders import TOKEN_ID, make_limits, make_sequence
from tests.support.clock import FakeClock
from tests.support.slot_model import SlotModel, answer_to

P1, P2, P3 = PipelineId("p1"), PipelineId("p2"), PipelineId("p3")
EPOCH = 4
FALLBACK_S = 0.2
LOST = WorkerLost("w0 is gone")


def expected_answer(num_prompt: int, num_tokens: int) -> list[int]:
    """The answer of a builder's sequence that nothing disturbs."""
    return answer_to(make_sequence(num_prompt=num_prompt).prompt_token_ids, num_tokens)


class Stages:
    """A pipeline of an engine, and its stages: what was sent to them is in `sent`, oldest first."""

    def __init__(
        self,
        engine: Engine,
        pipeline_id: PipelineId = P1,
        *,
        epoch: int = EPOCH,
        num_stages: int = 1,
        mode: DeviceMode = DeviceMode.MIXED,
        **limits: Any,
    ) -> None:
        self.sent: list[flow_pb2.Frame] = []
        self._engine = engine
        # What the first stage has yet to act on: frames of the engine, and of the last stage within a burst.
        self._inbox: deque[flow_pb2.Frame] = deque()
        self.model = SlotModel()
        members = [
            StageMember(WorkerId(f"{pipeline_id}-w{index}"), "box", LayerRange(3 * index, 3 * index + 3))
            for index in range(num_stages)
        ]
        scheduler_limits = replace(make_limits(num_stages=num_stages, **limits), mode=mode)
        self.pipeline = Pipeline(pipeline_id, epoch, members, scheduler_limits, self._send)

    def _send(self, frame: flow_pb2.Frame) -> None:
        self.sent.append(frame)
        self._inbox.append(frame)

    @property
    def lane(self) -> Lane:
        lane = self._engine.lane(self.pipeline.pipeline_id)
        assert lane is not None
        return lane

    def bodies(self) -> list[str]:
        return [str(frame.WhichOneof("body")) for frame in self.sent]

    def steps(self) -> list[flow_pb2.Step]:
        return [frame.step for frame in self.sent if frame.HasField("step")]

    def last_step(self) -> flow_pb2.Step:
        return self.steps()[-1]

    def feed(
        self,
        body: flow_pb2.StepResult | flow_pb2.StepFailed | flow_pb2.Restored | flow_pb2.Cancel,
        *,
        epoch: int | None = None,
    ) -> None:
        names: dict[type, str] = {
            flow_pb2.StepResult: "step_result",
            flow_pb2.StepFailed: "step_failed",
            flow_pb2.Restored: "restored",
        }
        self._engine.on_frame(
            flow_pb2.Frame(
                pipeline_id=self.pipeline.pipeline_id,
                epoch=self.pipeline.epoch if epoch is None else epoch,
                to_stage=-1,
                **{names.get(type(body), "cancel"): body},  # type: ignore[arg-type]
            )
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

    def compute(self, num_frames: int = 1) -> int:
        """Have the model act on the next frames of its inbox; returns how many there were."""
        for done in range(num_frames):
            if not self._inbox:
                return done
            frame = self._inbox.popleft()
            self._act(frame)
        return num_frames

    def _act(self, frame: flow_pb2.Frame) -> None:
        match frame.WhichOneof("body"):
            case "cancel":
                self.model.cancel(frame.cancel)
            case "restore":
                self.feed(self.model.restore(frame.restore))
            case "forget_blocks":
                self.model.forget(frame.forget_blocks)
            case "step":
                result, following = self.model.step(frame.step)
                if following is not None:
                    self._inbox.append(flow_pb2.Frame(step=following))
                self.feed(result)

    def compute_all(self, bound: int = 1000) -> None:
        """Have the model act until nothing is left to do."""
        assert self.compute(bound) < bound, "it does not come to an end"


class Harness:
    """An engine with a clock that stands still, and its pipelines; the first is there from the start."""

    def __init__(self, ledger: TenantLedger | None = None, **limits: Any) -> None:
        self.clock = FakeClock()
        self.engine = Engine(ledger, self.clock)
        self.p1 = self.add(P1, **limits)

    def add(self, pipeline_id: PipelineId, *, fallback_s: float = FALLBACK_S, **limits: Any) -> Stages:
        stages = Stages(self.engine, pipeline_id, **limits)
        self.engine.pipeline_up(stages.pipeline, fallback_s)
        return stages

    def submit(
        self, sequence_id: int = 1, request_id: str = "", *, num_prompt: int = 8, max_tokens: int = 16, **fields: Any
    ) -> Answer:
        sequence = make_sequence(sequence_id, num_prompt=num_prompt, max_tokens=max_tokens)
        return self.engine.submit(replace(sequence, **fields), request_id)

    def sequence(self, sequence_id: int) -> Sequence:
        """One that waits or runs, wherever it does."""
        lanes = (self.engine.lane(pipeline_id) for pipeline_id in self.engine.pipelines)
        found = (lane.scheduler.get(SequenceId(sequence_id)) for lane in lanes if lane is not None)
        return next(one for one in found if one is not None)


def delivered(answer: Answer) -> list[TokenEvent]:
    """The tokens that were delivered and not read; they are read with this."""
    events = []
    while not answer._queue.empty():
        event = answer._queue.get_nowait()
        assert isinstance(event, TokenEvent), f"an error: {event}"
        events.append(event)
    return events


def token_ids(answer: Answer) -> list[int]:
    """The same, without all that goes with a token."""
    return [event.token_id for event in delivered(answer)]


def where(answer: Answer) -> str:
    return answer.pipeline_id


def told(harness: Harness, request_id: str) -> list[tuple[str, str]]:
    """What happened to a request, as its story has it."""
    return [(event.what, event.detail) for event in harness.engine.stories.find(request_id).to_proto().events]


async def next_event(answer: Answer) -> TokenEvent:
    return await asyncio.wait_for(answer.next(), 5)


async def error_of(answer: Answer) -> ShoalError:
    with pytest.raises(ShoalError) as raised:
        await next_event(answer)
    return raised.value
