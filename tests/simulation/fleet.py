"""A simulated fleet in virtual time: the real engine, schedulers, router and thermal policy; devices that only take time.

A device computes as long as its profile's speed, its warmth and the batch say, in the order in which frames reach it; tokens
are those of `slot_model`. Nothing here is random; what comes when is the test's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from google.protobuf.message import Message

from orchestrator.answer import Answer, TokenEvent
from orchestrator.core.limits import Pace, SchedulerLimits
from orchestrator.core.sequence import Sequence
from orchestrator.core.tenants import TenantLedger
from orchestrator.core.thermal import ThermalMonitor
from orchestrator.engine import Engine
from orchestrator.pipeline import Pipeline, StageMember
from shoal.errors import ShoalError
from shoal.types import DeviceMode, DeviceProfile, LayerRange, PipelineId, Telemetry, WorkerId
from shoal.v1 import flow_pb2
from tests.support.clock import FakeClock
from tests.support.slot_model import SlotModel, answer_to
from worker.emulation import EmulatedDevice

# A pass of the default model on one thread of the development machine: 23.5 ms for a row, 4.7 ms for each further one.
BASE_S, TOKEN_S = 0.0188, 0.0047
LINK_S = 0.001
HEARTBEAT_S = 1.0
FALLBACK_S = 0.2
NUM_LAYERS = 30


@dataclass(slots=True)
class _Item:
    """A step, a cancel or a restore on its way through the stages of a pipeline."""

    frame: flow_pb2.Frame
    num_tokens: int
    stamps_ns: list[int] = field(default_factory=list)


class SimulatedDevice:
    """Takes frames one after the other; warms as it works, and is limited as the real policy says."""

    def __init__(self, worker_id: str, profile: DeviceProfile, clock: FakeClock) -> None:
        self.worker_id = WorkerId(worker_id)
        self.profile = profile
        self.emulated = EmulatedDevice(profile, clock.now())
        self.monitor = ThermalMonitor(profile.limits, profile.max_batch)
        self.hottest_c = 0.0
        self._clock = clock
        self._queue: deque[tuple[_Item, float, Callable[[_Item], None]]] = deque()
        self._is_busy = False

    def take(self, item: _Item, share: float, then: Callable[[_Item], None]) -> None:
        """Compute a share of the model for an item when its turn comes, then pass it on."""
        self._queue.append((item, share, then))
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        item, share, then = self._queue.popleft()
        self._is_busy = True
        now = self._clock.now()
        self.emulated.begin(now)
        work_s = share * (BASE_S + TOKEN_S * item.num_tokens) if item.num_tokens else 0.0
        done_at = now + work_s + self.emulated.slow_down.extra_seconds(work_s)
        item.stamps_ns += [int(now * 1e9), int(done_at * 1e9)]

        def end() -> None:
            self.emulated.end(self._clock.now())
            self._is_busy = False
            then(item)
            if self._queue and not self._is_busy:
                self._begin()

        if work_s:
            self._clock.call_at(done_at, end)
        else:
            end()

    def beat(self, now: float) -> bool:
        """Report as a worker does; True if the limits changed."""
        condition = self.emulated.condition(now)
        self.hottest_c = max(self.hottest_c, condition.temperature_c or 0.0)
        telemetry = Telemetry(temperature_c=condition.temperature_c, battery_percent=condition.battery_percent)
        return self.monitor.observe(telemetry, now)


class DevicePipeline:
    """Stages on devices, and what the slots at its last stage hold."""

    def __init__(
        self,
        pipeline_id: str,
        devices: Seq[SimulatedDevice],
        fleet: SimulatedFleet,
        *,
        mode: DeviceMode = DeviceMode.MIXED,
        num_slots: int = 16,
        max_waiting: int = 256,
    ) -> None:
        self.devices = tuple(devices)
        self.max_batch = min(device.profile.max_batch for device in devices)
        limits = SchedulerLimits(
            num_stages=len(devices),
            num_slots=num_slots,
            kv_tokens=8192,
            context_tokens=2048,
            max_batch=self.max_batch,
            max_waiting=max_waiting,
            mode=mode,
        )
        ends = [round(NUM_LAYERS * (index + 1) / len(devices)) for index in range(len(devices))]
        members = [
            StageMember(device.worker_id, device.profile.name, LayerRange(end - NUM_LAYERS // len(devices), end))
            for device, end in zip(devices, ends, strict=True)
        ]
        self.pipeline = Pipeline(PipelineId(pipeline_id), 1, members, limits, self._send)
        self._fleet = fleet
        self._model = SlotModel()
        self.is_up = True

    @property
    def pipeline_id(self) -> PipelineId:
        return self.pipeline.pipeline_id

    def pace(self) -> Pace:
        """That of the tightest stage."""
        paces = [device.monitor.pace() for device in self.devices]
        steps = [pace.steps_per_s for pace in paces if pace.steps_per_s]
        return Pace(min(self.max_batch, *(pace.max_batch for pace in paces)), min(steps, default=0.0))

    def _send(self, frame: flow_pb2.Frame) -> None:
        self._enter(_Item(frame, sum(row.num_tokens for row in frame.step.rows)))

    def _enter(self, item: _Item, stage: int = 0) -> None:
        """Send an item to a stage; frames of one pipeline never overtake each other."""

        def arrive() -> None:
            self.devices[stage].take(item, 1 / len(self.devices), lambda done: self._leave(done, stage))

        self._fleet.clock.call_at(self._fleet.clock.now() + LINK_S, arrive)

    def _leave(self, item: _Item, stage: int) -> None:
        if stage + 1 < len(self.devices):
            self._enter(item, stage + 1)
        elif item.frame.HasField("cancel"):
            self._model.cancel(item.frame.cancel)
        elif item.frame.HasField("restore"):
            self._report_later(restored=self._model.restore(item.frame.restore))
        elif item.frame.HasField("step"):
            self._finish(item)

    def _finish(self, item: _Item) -> None:
        """Sample at the last stage; in a burst, feed back."""
        result, following = self._model.step(item.frame.step)
        if following is not None:
            self._send(flow_pb2.Frame(step=following))
        result.stamps_ns.extend([0, *item.stamps_ns])
        self._report_later(step_result=result)

    def _report_later(self, **body: Message) -> None:
        frame = flow_pb2.Frame(pipeline_id=self.pipeline_id, epoch=1, to_stage=-1, **body)  # type: ignore[arg-type]
        self._fleet.clock.call_at(self._fleet.clock.now() + LINK_S, lambda: self._report(frame))

    def _report(self, frame: flow_pb2.Frame) -> None:
        if self.is_up:
            self._fleet.engine.on_frame(frame)
            self._fleet.after_event()


class SimulatedFleet:
    """Engine, devices and pipelines under one clock."""

    def __init__(self, ledger: TenantLedger | None = None) -> None:
        self.clock = FakeClock()
        self.engine = Engine(ledger, self.clock)
        self.pipelines: list[DevicePipeline] = []
        self.paces: list[tuple[float, PipelineId, Pace]] = []
        self._num_events = 0
        self.clock.call_at(HEARTBEAT_S, self._beat)

    def add_device(self, worker_id: str, profile: DeviceProfile) -> SimulatedDevice:
        return SimulatedDevice(worker_id, profile, self.clock)

    def add_pipeline(
        self,
        pipeline_id: str,
        devices: Seq[SimulatedDevice],
        *,
        mode: DeviceMode = DeviceMode.MIXED,
        num_slots: int = 16,
        max_waiting: int = 256,
    ) -> DevicePipeline:
        pipeline = DevicePipeline(pipeline_id, devices, self, mode=mode, num_slots=num_slots, max_waiting=max_waiting)
        self.pipelines.append(pipeline)
        self.engine.pipeline_up(pipeline.pipeline, FALLBACK_S)
        return pipeline

    def lose(self, pipeline: DevicePipeline, error: ShoalError) -> None:
        """A device of a pipeline is gone, and with it all that its slots held."""
        pipeline.is_up = False
        self.pipelines.remove(pipeline)
        self.engine.pipeline_down(pipeline.pipeline_id, error)

    def _beat(self) -> None:
        now = self.clock.now()
        for pipeline in self.pipelines:
            # All of them report, whoever is the first with news.
            if sum(device.beat(now) for device in pipeline.devices):
                self.paces.append((now, pipeline.pipeline_id, pipeline.pace()))
                self.engine.set_pace(pipeline.pipeline_id, pipeline.pace())
        self.clock.call_at(now + HEARTBEAT_S, self._beat)

    def after_event(self) -> None:
        """Check what must always hold; often enough to point at what broke it, seldom enough to simulate an hour."""
        self._num_events += 1
        if self._num_events % 64 == 0:
            self.engine.check_invariants()
            for pipeline in self.pipelines:
                lane = self.engine.lane(pipeline.pipeline_id)
                assert lane is not None
                lane.scheduler.check_invariants()


@dataclass(slots=True)
class Request:
    """A request as its client sees it: what came of it so far."""

    sequence: Sequence
    answer: Answer
    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    error: ShoalError | None = None
    is_finished: bool = False
    is_cancelled: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_finished or self.is_cancelled or self.error is not None

    def read(self) -> None:
        """Take what was delivered, and check that it is the next token of the right answer."""
        while not self.answer._queue.empty():
            event = self.answer._queue.get_nowait()
            assert not self.is_finished, f"something after the end: {event}"
            if not isinstance(event, TokenEvent):
                self.error = event
                return
            assert event.index == len(self.token_ids), "a token was lost, or came twice"
            self.token_ids.append(event.token_id)
            self.is_finished = event.finish is not None

    def check_text(self) -> None:
        expected = answer_to(self.sequence.prompt_token_ids, len(self.token_ids))
        assert self.token_ids == expected, self.sequence.story()
