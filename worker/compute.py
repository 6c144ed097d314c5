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
from functools import partial
from pathlib import Path
from typing import assert_never

from shoal.errors import ConnectionFailed, InternalError, ShoalError
from shoal.kv import BLOCK_TOKENS
from shoal.types import DeviceProfile, KVTierStatus
from shoal.v1 import flow_pb2
from worker.anticipation import Anticipation
from worker.emulation import EmulatedDevice, SlowDown
from worker.inbox import Inbox, SocketClosed
from worker.kv.cache import BlockCache
from worker.kv.fetches import BlocksFetched, LowerTier
from worker.kv.host import HOST
from worker.kv.trace import BlockTrace
from worker.links import Link
from worker.reuse import RestoreReady
from worker.shard import Shard, open_shard
from worker.stage import ORCHESTRATOR, StageRunner, StageSpec

logger = logging.getLogger(__name__)

# With more rows, other batches fill the wait.
LONE_ROWS = 2
DEVICE = "device"


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
class SetHeat:
    """Whether the device is hot."""

    is_hot: bool


@dataclass(frozen=True, slots=True)
class KeepUp:
    """Do a unit of what the block cache has to do."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = (
    LoadStage
    | ConnectStage
    | UnloadStage
    | AdoptSocket
    | SetUplink
    | SetHeat
    | BlocksFetched
    | RestoreReady
    | KeepUp
    | Stop
)
Item = Command | flow_pb2.Frame | SocketClosed


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

    kv_bytes, kv_tiers(), and the condition of the emulated device, may be read by any thread.
    Invariant: sessions, arenas, stages and the block cache are touched by that thread only; others post().
    """

    def __init__(
        self,
        profile: DeviceProfile,
        notify: Callable[[Event], None],
        *,
        lower: LowerTier | None = None,
        kv_trace: Path | None = None,
    ) -> None:
        """lower: the tier of KV below memory; it runs from start() to stop(), too. kv_trace: where to tell of blocks."""
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
        self._lower = lower
        trace = BlockTrace(kv_trace)
        trace.begin(HOST)
        self._cache = BlockCache(profile.host_kv_bytes, profile.kv_policy, self._inbox.post, lower=lower, trace=trace)
        self._cached = self._cache.snapshot()
        self._kv_budget_bytes = 0
        self._num_held_blocks = 0

    def start(self) -> None:
        if self._lower is not None:
            self._lower.start()
        self._thread.start()

    def post(self, item: Command | flow_pb2.Frame) -> None:
        self._inbox.post(item)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the step it is in; False if that took longer than timeout_s."""
        self._inbox.post(Stop())
        self._thread.join(timeout_s)
        if self._lower is not None:
            self._lower.stop(timeout_s)
        return not self._thread.is_alive()

    def kv_tiers(self, now: float) -> tuple[KVTierStatus, ...]:
        """The tiers that KV is in; now is that of the monotonic clock."""
        cached = self._cached
        device = KVTierStatus(
            DEVICE, budget_bytes=self._kv_budget_bytes, used_bytes=self.kv_bytes, num_blocks=self._num_held_blocks
        )
        return device, cached.status_at(now), self._cache.lower_status(cached)

    def _run(self) -> None:
        while True:
            item = self._next()
            if isinstance(item, Stop):
                break
            self._work_on(item)
            if not isinstance(item, KeepUp):
                self._expects_step = _is_lone_burst(item)
            # Between frames, so that what prompts fill is kept even if there is no idle time.
            is_step = isinstance(item, flow_pb2.Frame) and item.HasField("step")
            has_kept_up = isinstance(item, flow_pb2.Frame) and self._cache.has_work
            if has_kept_up:
                self._work_on(KeepUp())
            # A step by itself changes nothing that is kept.
            if has_kept_up or not is_step:
                self._cached = self._cache.snapshot()
        for pipeline_id in list(self._stages):
            self._unload(pipeline_id)
        self._cache.close()
        self._set_uplink(SetUplink(None))
        self._inbox.close()

    def _next(self) -> Item:
        """Wait for what comes next; awake, if the device may and a step of a lone stream's burst is to come round."""
        if self._cache.has_work:
            return self._inbox.poll() or KeepUp()
        if not self._expects_step:
            return self._inbox.get()
        started = time.monotonic()
        item = self._inbox.get(self._anticipation.plan())
        if _is_lone_burst(item):
            self._anticipation.observe(time.monotonic() - started)
        return item

    def _work_on(self, item: Item) -> None:
        """Act on an item; what it takes, the wait of a slowed-down device included, warms an emulated one."""
        if self.emulated is None:
            self._supervise(item)
            return
        self.emulated.begin(time.monotonic())
        self._supervise(item)
        self.emulated.end(time.monotonic())

    def _supervise(self, item: Item) -> None:
        try:
            self._handle(item)
        except ShoalError as error:
            self._fail(item, error)
        except Exception as error:
            correlation_id = secrets.token_hex(4)
            logger.exception("compute_failed correlation_id=%s", correlation_id)
            self._fail(item, InternalError(f"{type(error).__name__}: {error} (correlation id {correlation_id})"))

    def _handle(self, item: Item) -> None:
        match item:
            case flow_pb2.Frame():
                loaded = self._stages.get(item.pipeline_id)
                if loaded is not None:
                    loaded.runner.handle(item)
                    self._measure()
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
            case SetHeat(is_hot):
                self._cache.is_hot = is_hot
            case BlocksFetched():
                self._cache.fetched(item)
            case RestoreReady():
                runner = self._runner_of(item)
                if runner is not None:
                    runner.resume(item)
            case KeepUp():
                self._cache.work()
            case SocketClosed():
                self._notify(item)
            case Stop():
                raise AssertionError("Stop ends the loop")
            case _:
                assert_never(item)

    def _fail(self, item: Command | flow_pb2.Frame | SocketClosed, error: ShoalError) -> None:
        match item:
            case LoadStage():
                self._notify(StageFailed(item.spec, error))
            case flow_pb2.Frame() if item.HasField("step") and item.pipeline_id in self._stages:
                logger.error(
                    "step_failed pipeline=%s step=%d error=%s", item.pipeline_id, item.step.step, error.message
                )
                self._stages[item.pipeline_id].runner.report_failure(item.step.step, error)
            case flow_pb2.Frame() if item.HasField("restore"):
                restore = item.restore
                self._give_up(RestoreReady(item.pipeline_id, item.epoch, restore.slot, restore.sequence_id), error)
            case RestoreReady():
                self._give_up(item, error)
            case _:
                what = item.WhichOneof("body") if isinstance(item, flow_pb2.Frame) else type(item).__name__
                logger.error("command_failed command=%s error=%s", what, error.message)

    def _give_up(self, restore: RestoreReady, error: ShoalError) -> None:
        logger.error("restore_failed pipeline=%s error=%s", restore.pipeline_id, error.message)
        runner = self._runner_of(restore)
        if runner is not None:
            runner.give_up_restore(restore.slot, restore.sequence_id)

    def _runner_of(self, restore: RestoreReady) -> StageRunner | None:
        loaded = self._stages.get(restore.pipeline_id)
        return loaded.runner if loaded is not None and loaded.runner.spec.epoch == restore.epoch else None

    def _measure(self) -> None:
        """Publish what the slots hold."""
        self.kv_bytes = sum(loaded.shard.kv_bytes for loaded in self._stages.values())
        num_tokens = sum(loaded.shard.arena.tokens_held for loaded in self._stages.values())
        self._num_held_blocks = num_tokens // BLOCK_TOKENS

    def _measure_budget(self) -> None:
        """Publish what the slots may hold, when stages have come or gone."""
        shapes = [loaded.runner.spec.shape for loaded in self._stages.values()]
        self._kv_budget_bytes = sum(shape.kv_tokens * shape.kv_bytes_per_token for shape in shapes)
        self._measure()

    def _load(self, command: LoadStage) -> None:
        spec = command.spec
        self._unload(spec.pipeline_id)
        shard = open_shard(spec.shape, command.graph, command.blob_dir, num_threads=self._profile.num_threads)
        # Only an emulated device is slower than the machine it runs on.
        slow_down = SlowDown(1.0) if self.emulated is None else self.emulated.slow_down
        send = partial(self._route, spec)
        runner = StageRunner(spec, shard, slow_down, send, self._cache, self._inbox.post)
        self._stages[spec.pipeline_id] = _Loaded(runner, shard, {}, [])
        self._measure_budget()
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
        loaded.runner.close()
        loaded.shard.close()
        self._measure_budget()

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
