"""The compute thread: the one owner of sessions, KV arenas and stages, fed from one inbox.

Takes frames and commands, lets `stage` act on frames, and routes what a stage sends to the right link. Tells the agent,
through `notify`, what it has to know; never waits for the event loop. One of the two places that catch any exception: a
step that fails must become a StepFailed, not a dead thread.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from shoal.errors import ConnectionFailed, InternalError, ShoalError
from shoal.types import DeviceProfile
from shoal.v1 import flow_pb2
from worker.anticipation import Anticipation
from worker.emulation import EmulatedDevice, SlowDown
from worker.inbox import Inbox, SocketClosed
from worker.links import Link
from worker.shard import Shard, open_shard
from worker.stage import ORCHESTRATOR, StageRunner, StageSpec

logger = logging.getLogger(__name__)

# With more rows, other batches fill the wait.
LONE_ROWS = 2


@dataclass(frozen=True, slots=True)
class LoadStage:
    spec: StageSpec
    graph: bytes
    blob_dir: Path


@dataclass(frozen=True, slots=True)
class ConnectStage:
    """Links by the stage they lead to; a stage without one is reached through the orchestrator."""

    pipeline_id: str
    epoch: int
    links: dict[int, Link]


@dataclass(frozen=True, slots=True)
class UnloadStage:
    pipeline_id: str


@dataclass(frozen=True, slots=True)
class AdoptSocket:
    """A link that another stage of a pipeline opened."""

    pipeline_id: str
    connection: socket.socket


@dataclass(frozen=True, slots=True)
class SetUplink:
    """The link to the orchestrator, None while there is none, and the socket to read it from, if we have to."""

    link: Link | None
    connection: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = LoadStage | ConnectStage | UnloadStage | AdoptSocket | SetUplink | Stop


@dataclass(frozen=True, slots=True)
class StageLoaded:
    spec: StageSpec
    execution_provider: str


@dataclass(frozen=True, slots=True)
class StageFailed:
    spec: StageSpec
    error: ShoalError


@dataclass(frozen=True, slots=True)
class LinkBroke:
    pipeline_id: str
    epoch: int
    message: str


Event = StageLoaded | StageFailed | LinkBroke | SocketClosed


@dataclass(slots=True)
class _Loaded:
    runner: StageRunner
    shard: Shard
    links: dict[int, Link]
    inbound: list[socket.socket]


class Compute:
    """Runs in a thread of its own from start() to stop().

    kv_bytes, and the condition of the emulated device, may be read by any thread.
    Invariant: sessions, arenas and stages are touched by that thread only; others post().
    """

    def __init__(self, profile: DeviceProfile, notify: Callable[[Event], None]) -> None:
        self._profile = profile
        self._notify = notify
        self._inbox: Inbox[Command | flow_pb2.Frame] = Inbox()
        self._stages: dict[str, _Loaded] = {}
        self._uplink = SetUplink(None)
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._anticipation = Anticipation(profile.poll_ms / 1e3)
        self._expects_step = False
        self.emulated = EmulatedDevice(profile, time.monotonic()) if profile.is_emulated else None
        self.kv_bytes = 0

    def start(self) -> None:
        self._thread.start()

    def post(self, item: Command | flow_pb2.Frame) -> None:
        self._inbox.post(item)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step it is in; False if that took longer than timeout_s."""
        self._inbox.post(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            item = self._next()
            if isinstance(item, Stop):
                break
            self._work_on(item)
            self._expects_step = _is_lone_burst(item)
        for pipeline_id in list(self._stages):
            self._unload(pipeline_id)
        self._set_uplink(SetUplink(None))
        self._inbox.close()

    def _next(self) -> Command | flow_pb2.Frame | SocketClosed:
        """Wait for what comes next; awake, if the device may and a step of a lone stream's burst is to come round."""
        if not self._expects_step:
            return self._inbox.get()
        started = time.monotonic()
        item = self._inbox.get(self._anticipation.plan())
        if _is_lone_burst(item):
            self._anticipation.observe(time.monotonic() - started)
        return item

    def _work_on(self, item: Command | flow_pb2.Frame | SocketClosed) -> None:
        """Act on an item; what it takes, the wait of a slowed-down device included, warms an emulated one."""
        if self.emulated is None:
            self._supervise(item)
            return
        self.emulated.begin(time.monotonic())
        self._supervise(item)
        self.emulated.end(time.monotonic())

    def _supervise(self, item: Command | flow_pb2.Frame | SocketClosed) -> None:
        try:
            self._handle(item)
        except ShoalError as error:
            self._fail(item, error)
        except Exception as error:
            correlation_id = secrets.token_hex(4)
            logger.exception("compute_failed correlation_id=%s", correlation_id)
            self._fail(item, InternalError(f"{type(error).__name__}: {error} (correlation id {correlation_id})"))

    def _handle(self, item: Command | flow_pb2.Frame | SocketClosed) -> None:
        match item:
            case flow_pb2.Frame():
                loaded = self._stages.get(item.pipeline_id)
                if loaded is not None:
                    loaded.runner.handle(item)
                    self.kv_bytes = sum(stage.shard.kv_bytes for stage in self._stages.values())
            case LoadStage():
                self._load(item)
            case ConnectStage():
                self._connect(item)
            case UnloadStage(pipeline_id):
                self._unload(pipeline_id)
            case AdoptSocket():
                self._adopt(item)
            case SetUplink():
                self._set_uplink(item)
            case SocketClosed():
                self._notify(item)
            case Stop():
                raise AssertionError("Stop ends the loop")
            case _:
                assert_never(item)

    def _fail(self, item: Command | flow_pb2.Frame | SocketClosed, error: ShoalError) -> None:
        if isinstance(item, LoadStage):
            self._notify(StageFailed(item.spec, error))
        elif isinstance(item, flow_pb2.Frame) and item.pipeline_id in self._stages:
            logger.error("step_failed pipeline=%s step=%d error=%s", item.pipeline_id, item.step.step, error.message)
            self._stages[item.pipeline_id].runner.report_failure(item.step.step, error)
        else:
            logger.error("command_failed command=%s error=%s", type(item).__name__, error.message)

    def _load(self, command: LoadStage) -> None:
        spec = command.spec
        self._unload(spec.pipeline_id)
        shard = open_shard(spec.shape, command.graph, command.blob_dir, num_threads=self._profile.num_threads)
        # Only an emulated device is slower than the machine it runs on.
        slow_down = SlowDown(1.0) if self.emulated is None else self.emulated.slow_down
        runner = StageRunner(spec, shard, slow_down, lambda frame: self._route(spec, frame))
        self._stages[spec.pipeline_id] = _Loaded(runner, shard, {}, [])
        self._notify(StageLoaded(spec, shard.provider))

    def _connect(self, command: ConnectStage) -> None:
        loaded = self._stages.get(command.pipeline_id)
        if loaded is None or loaded.runner.spec.epoch != command.epoch:
            for link in command.links.values():
                link.close()
            return
        loaded.links = command.links

    def _adopt(self, command: AdoptSocket) -> None:
        loaded = self._stages.get(command.pipeline_id)
        if loaded is None:
            command.connection.close()
            return
        loaded.inbound.append(command.connection)
        self._inbox.add_socket(command.connection)

    def _set_uplink(self, command: SetUplink) -> None:
        """Change the uplink; its socket leaves the inbox before it is closed, for its number may come again."""
        if self._uplink.connection is not None:
            self._inbox.remove_socket(self._uplink.connection)
        if self._uplink.link is not None:
            self._uplink.link.close()
        self._uplink = command
        if command.connection is not None:
            self._inbox.add_socket(command.connection)

    def _unload(self, pipeline_id: str) -> None:
        loaded = self._stages.pop(pipeline_id, None)
        if loaded is None:
            return
        for link in loaded.links.values():
            link.close()
        for connection in loaded.inbound:
            self._inbox.remove_socket(connection)
            connection.close()
        loaded.shard.close()
        self.kv_bytes = sum(stage.shard.kv_bytes for stage in self._stages.values())

    def _route(self, spec: StageSpec, frame: flow_pb2.Frame) -> None:
        if frame.to_stage == spec.stage:
            # Through the inbox, behind what came from outside: a burst on one device can be cancelled.
            self._inbox.post(frame)
            return
        link = self._uplink.link
        if frame.to_stage != ORCHESTRATOR:
            link = self._stages[spec.pipeline_id].links.get(frame.to_stage, link)
        try:
            if link is None:
                raise ConnectionFailed("the orchestrator is out of reach")
            link.send(frame)
        except ConnectionFailed as error:
            self._notify(LinkBroke(spec.pipeline_id, spec.epoch, f"to stage {frame.to_stage}: {error.message}"))


def _is_lone_burst(item: object) -> bool:
    """Whether more steps of one or two streams follow without the orchestrator: the wait for them is idle and regular."""
    return isinstance(item, flow_pb2.Frame) and item.step.burst_steps > 0 and len(item.step.rows) <= LONE_ROWS
