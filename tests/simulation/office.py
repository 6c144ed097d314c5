"""One life of the orchestrator in a simulated fleet: the real engine, control, hub and FleetService, over simulated streams.

Messages are those of the protocol; only the transport is played. What the real `app` composes is composed here without
servers and files. When it dies, all of this is forgotten; the next one begins with what the journal has.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Collection, Coroutine
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, NoReturn, cast

import grpc

from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from orchestrator.clock import Alarm
from orchestrator.control import TICK_S, Control
from orchestrator.core.fleet import Member, WorkerState
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.membership import FleetServicer
from shoal.config import OrchestratorConfig
from shoal.errors import ShoalError
from shoal.types import PROTOCOL_VERSION, WorkerId
from shoal.v1 import fleet_pb2, flow_pb2
from tests.simulation.network import Process, Stream
from tests.support.executors import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.worker import SimulatedWorker
    from tests.simulation.world import World


# What a plan takes, at most what eight devices take.
PLANNING_S = (0.003, 0.03, 0.3)
# Leases are looked at with every tick.
TICK_SLACK_S = 2 * TICK_S


class Timer:
    """An alarm of an orchestrator's engine, which rings only while that lives."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    def __call__(self) -> None:
        if not self._is_cancelled:
            self._ring()


class OfficeClock:
    """The world's time for the engine."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def now(self) -> float:
        return self._world.now()

    def call_at(self, at: float, ring: Callable[[], None]) -> Alarm:
        timer = Timer(ring)
        self._process.after(max(at - self.now(), 0.0), timer)
        return timer


class OfficeExecutor(Executor):
    """Makes plans beside the orchestrator's event loop, which take some time of the world."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        delay_s = self._world.random.choice(PLANNING_S)
        self._process.after(delay_s, lambda: run(future, lambda: work(*args, **kwargs)))
        return future


class Office:
    """engine, control and hub are those of one process; tasks end with it."""

    def __init__(self, world: World, config: OrchestratorConfig, manifest: Manifest) -> None:
        self.world = world
        self.process = Process(world, "orchestrator")
        self.engine = Engine(clock=OfficeClock(world, self.process))
        self.hub = FlowHub(self.engine.on_frame, self._link_lost)
        executor = OfficeExecutor(world, self.process)
        self.control = Control(
            config, manifest, self.hub, self.engine, self._set_serving, executor, world.cordoned, self._keep_cordoned
        )
        # Nobody fetches blobs here.
        store = cast(ModelStore, None)
        self.servicer = FleetServicer(self.control, self.hub, manifest, store, config.heartbeat_s)
        # What a stage sends another one by way of the hub, of whatever epoch; that one looks at it.
        self.relayed: flow_pb2.Frame | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.start(self.control.watch())

    def _link_lost(self, worker_id: WorkerId, message: str) -> None:
        self.control.link_lost(worker_id, message)

    def _keep_cordoned(self, names: Collection[WorkerId]) -> None:
        self.world.cordoned = names

    async def _set_serving(self, is_serving: bool) -> None:
        self.world.note(f"orchestrator is {'serving' if is_serving else 'not serving'}")

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Aborted):
            self.world.fail(error)

    def kill(self) -> None:
        """Die at once, with nobody told."""
        self.process.kill()
        for task in list(self._tasks):
            task.cancel()

    def check_invariants(self) -> None:
        self.engine.check_invariants()
        self.control._fleet.check_invariants()
        self._check_pipelines()
        for member in self.control._fleet.members():
            self._check_member(member)

    def _check_member(self, member: Member) -> None:
        """Who is taken to hold a stage has said so of this very epoch, and nobody is a member whose lease is over."""
        if self.world.is_attentive:
            assert member.lease_expires_at > self.world.now() - TICK_SLACK_S, f"its lease is over: {member.story()}"
        worker = self.world.devices[member.worker_id].worker
        if member.state is not WorkerState.READY or worker is None or worker.incarnation != member.incarnation:
            return
        assert member.pipeline_id is not None
        placed = self.control._fleet.placed(member.pipeline_id)
        assert placed is not None
        assert (member.pipeline_id, placed.epoch) in worker.loaded, f"it has not loaded that: {member.story()}"

    def _check_pipelines(self) -> None:
        for pipeline_id in self.engine.pipelines:
            lane = self.engine.lane(pipeline_id)
            assert lane is not None
            if lane.scheduler.has_work:
                lane.scheduler.check_invariants()
            placed = self.control._fleet.placed(pipeline_id)
            assert placed is not None, f"{pipeline_id} serves and is not in force"
            assert placed.epoch == lane.pipeline.epoch, f"{pipeline_id} serves in an epoch that is over"
            for worker_id in placed.placement.worker_ids:
                member = self.control._fleet.get(worker_id)
                assert member is not None, f"{pipeline_id} serves without {worker_id}"
                assert member.pipeline_id == pipeline_id, f"{pipeline_id} serves, and {member.story()}"


class Aborted(Exception):
    """An Attach call ended with a status."""


class Attachment:
    """An Attach call: a stream each way, and the task of the servicer."""

    def __init__(self, world: World, office: Office, worker: SimulatedWorker) -> None:
        self._office = office
        self._worker = worker
        self._requests: asyncio.Queue[fleet_pb2.AttachRequest | None] = asyncio.Queue()
        self.to_office: Stream[fleet_pb2.AttachRequest] = Stream(
            world, office.process, self._requests.put_nowait, self._hung_up, world.link_delay(worker)
        )
        self.to_worker: Stream[fleet_pb2.AttachResponse] = Stream(
            world, worker.process, worker.obey, self._ended_for_worker, world.link_delay(worker)
        )
        self._task = office.start(self._serve())

    async def _serve(self) -> None:
        try:
            await self._office.servicer.Attach(self._read(), cast(Any, self))
        finally:
            self.to_worker.close()

    async def _read(self) -> AsyncIterator[fleet_pb2.AttachRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    def _hung_up(self) -> None:
        """The call is cancelled when its connection ends."""
        self._task.cancel()

    def _ended_for_worker(self) -> None:
        if self._worker._attachment is self:
            self._worker.detached()

    def leave(self) -> None:
        """The worker wants no more of it."""
        self.to_worker.leave()
        self.to_office.close(self._office.world.delay_s())

    def cut(self, worker_hears_s: float, office_hears_s: float) -> None:
        self.to_worker.cut(worker_hears_s)
        self.to_office.cut(office_hears_s)

    # What the servicer sees of its call

    async def write(self, response: fleet_pb2.AttachResponse) -> None:
        self.to_worker.send(response)

    def cancelled(self) -> bool:
        return False

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: object) -> NoReturn:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ShoalError):
            self._office.world.fail(error)
        self._office.world.note(f"{self._worker.device.worker_id} is refused: {details}")
        raise Aborted(details)


class Uplink:
    """A worker's data link as the hub sees it."""

    def __init__(self, world: World, office: Office, worker: SimulatedWorker, token: bytes) -> None:
        self.office = office
        self._world = world
        self._worker = worker
        self._worker_id: WorkerId | None = None
        delay_s = world.link_delay(worker)
        self.to_office: Stream[flow_pb2.Frame] = Stream(world, office.process, self._arrived, self._hung_up, delay_s)
        self.to_worker: Stream[flow_pb2.Frame] = Stream(
            world, worker.process, worker.receive, self._ended_for_worker, delay_s
        )
        hello = flow_pb2.LinkHello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=worker.device.worker_id,
            incarnation=worker.incarnation,
            link_token=token,
        )
        self.to_office.send(flow_pb2.Frame(link_hello=hello))

    def _arrived(self, frame: flow_pb2.Frame) -> None:
        if self._worker_id is not None:
            self.office.relayed = frame if frame.to_stage >= 0 else None
            self.office.hub.receive(self._worker_id, frame)
            return
        try:
            self._worker_id = self.office.hub.register(frame, self)
        except ShoalError:
            self.to_worker.close()

    def _hung_up(self) -> None:
        if self._worker_id is not None:
            self.office.hub.lost(self._worker_id, self, "it broke")

    def _ended_for_worker(self) -> None:
        if self._worker.uplink is self:
            self._worker.link_failed(self._worker.current, "the link to the orchestrator: it broke")

    def send(self, frame: flow_pb2.Frame) -> None:
        """As the hub calls it: nothing may be sent to who has no lease, or is of another epoch."""
        if frame is not self.office.relayed and not frame.HasField("echo"):
            self._world.check_call(self.office, self._worker, frame)
        copy = flow_pb2.Frame()
        copy.CopyFrom(frame)
        self.to_worker.send(copy)

    def close(self) -> None:
        self.to_worker.close()

    def left_by_worker(self) -> None:
        self.to_worker.leave()
        self.to_office.close(self._world.delay_s())

    def cut(self, worker_hears_s: float, office_hears_s: float) -> None:
        self.to_worker.cut(worker_hears_s)
        self.to_office.cut(office_hears_s)
