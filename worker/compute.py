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

from shoal.errors import ConnectionFailed, InternalError, NotReady, ShoalError
from shoal.kv import BLOCK_TOKENS
from shoal.types import DeviceProfile, KVTierStatus
from shoal.v1 import flow_pb2
from worker.anticipation import Anticipation
from worker.commands import (
    AdoptSocket,
    Checkpoint,
    Command,
    ConnectStage,
    Event,
    Item,
    KeepUp,
    LinkBroke,
    LoadStage,
    SetHeat,
    SetUplink,
    StageFailed,
    StageLoaded,
    Stop,
    SuspendStage,
    UnloadStage,
)
from worker.emulation import EmulatedDevice, SlowDown
from worker.filling import RestoreReady
from worker.inbox import Inbox, SocketClosed
from worker.kv.cache import BlockCache
from worker.kv.fetches import BlocksFetched, LowerTier
from worker.kv.host import HOST
from worker.kv.trace import BlockTrace
from worker.links import Link
from worker.probing import EchoCame, SendEcho, echo_frame
from worker.profiling import HOLDS_LAYERS, MeasureShape, ShapeMeasured, measure
from worker.shard import Shard, open_shard
from worker.stage import ORCHESTRATOR, StageRunner

logger = logging.getLogger(__name__)

# With more rows, other batches fill the wait.
LONE_ROWS = 2
# Checkpointed after a frame, at 0.1 ms each: more than its rows fill.
FRAME_SEGMENTS = 4
DEVICE = "device"


@dataclass(slots=True)
class _Loaded:
    runner: StageRunner
    shard: Shard
    links: dict[int, Link]
    inbound: list[socket.socket]


class Compute:
    """Runs in a thread of its own from start() to stop().

    kv_bytes, kv_tiers(), busy_s(), and the condition of the emulated device, may be read by any thread.
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
        self._busy_since: float | None = None

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

    def busy_s(self, now: float) -> float:
        """How long the thread has been at what it does now, 0 if it waits; now is that of the monotonic clock."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, now - since)

    @property
    def _has_segment(self) -> bool:
        return any(loaded.runner.has_segment for loaded in self._stages.values())

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
            if isinstance(item, flow_pb2.Frame) and self._has_segment:
                self._work_on(Checkpoint())
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
        if self._cache.has_work or (self._cache.has_idle_work and not self._expects_step):
            return self._inbox.poll() or KeepUp()
        if not self._expects_step:
            return (self._inbox.poll() or Checkpoint()) if self._has_segment else self._inbox.get()
        started = time.monotonic()
        item = self._inbox.get(self._anticipation.plan())
        if _is_lone_burst(item):
            self._anticipation.observe(time.monotonic() - started)
        return item

    def _work_on(self, item: Item) -> None:
        """Act on an item; what it takes, the wait of a slowed-down device included, warms an emulated one."""
        self._busy_since = time.monotonic()
        if self.emulated is not None:
            self.emulated.begin(self._busy_since)
        self._supervise(item)
        if self.emulated is not None:
            self.emulated.end(time.monotonic())
        self._busy_since = None

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
            case flow_pb2.Frame() if item.HasField("echo"):
                self._notify(EchoCame((time.monotonic_ns() - item.echo.sent_ns) / 1e9))
            case flow_pb2.Frame():
                loaded = self._stages.get(item.pipeline_id)
                if loaded is not None:
                    loaded.runner.handle(item)
                    self._measure()
            case LoadStage():
                self._load(item)
            case ConnectStage():
                self._connect(item)
            case SuspendStage(pipeline_id):
                self._suspend(pipeline_id)
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
            case MeasureShape():
                self._measure_shape(item)
            case SendEcho(num_bytes):
                if self._uplink.link is not None:
                    self._uplink.link.send(echo_frame(num_bytes, time.monotonic_ns(), ORCHESTRATOR))
            case KeepUp():
                self._cache.work()
            case Checkpoint():
                for loaded in self._stages.values():
                    loaded.runner.checkpoint(FRAME_SEGMENTS)
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
            case MeasureShape():
                self._notify(ShapeMeasured(item.command.shape_digest, None, error.reason, error.message))
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
        loaded = self._stages.get(spec.pipeline_id)
        if loaded is not None and loaded.runner.spec.is_same_shard(spec):
            self._unlink(loaded)
            loaded.runner.rebase(spec)
        else:
            loaded = self._open(command)
        self._measure_budget()
        self._notify(StageLoaded(spec, loaded.shard.provider))

    def _open(self, command: LoadStage) -> _Loaded:
        spec = command.spec
        self._unload(spec.pipeline_id)
        shard = open_shard(spec.shape, command.graph, command.blob_dir, num_threads=self._profile.num_threads)
        # Only an emulated device is slower than the machine it runs on.
        slow_down = SlowDown(1.0) if self.emulated is None else self.emulated.slow_down
        send = partial(self._route, spec.pipeline_id)
        lower = self._lower if self._cache.is_on else None
        runner = StageRunner(spec, shard, slow_down, send, self._cache, self._inbox.post, lower=lower)
        self._stages[spec.pipeline_id] = loaded = _Loaded(runner, shard, {}, [])
        return loaded

    def _suspend(self, pipeline_id: str) -> None:
        loaded = self._stages.get(pipeline_id)
        if loaded is not None:
            self._unlink(loaded)
            loaded.runner.suspend()
            self._measure()

    def _unlink(self, loaded: _Loaded) -> None:
        """Close the links of a stage, which are those of an epoch."""
        for link in loaded.links.values():
            link.close()
        for connection in loaded.inbound:
            self._inbox.remove_socket(connection)
            connection.close()
        loaded.links, loaded.inbound = {}, []

    def _measure_shape(self, item: MeasureShape) -> None:
        if self._stages:
            raise NotReady(HOLDS_LAYERS)
        times = measure(item.command, self._profile, item.folder, time.time())
        self._notify(ShapeMeasured(times.shape_digest, times))

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
        self._unlink(loaded)
        loaded.runner.close()
        loaded.shard.close()
        self._measure_budget()

    def _route(self, pipeline_id: str, frame: flow_pb2.Frame) -> None:
        loaded = self._stages[pipeline_id]
        spec = loaded.runner.spec
        if frame.to_stage == spec.stage:
            # Through the inbox, behind what came from outside: a burst on one device can be cancelled.
            self._inbox.post(frame)
            return
        link = self._uplink.link
        if frame.to_stage != ORCHESTRATOR:
            link = loaded.links.get(frame.to_stage, link)
        try:
            if link is None:
                raise ConnectionFailed("the orchestrator is out of reach")
            link.send(frame)
        except ConnectionFailed as error:
            self._notify(LinkBroke(spec, f"to stage {frame.to_stage}: {error.message}"))


def _is_lone_burst(item: object) -> bool:
    """Whether more steps of one or two streams follow without the orchestrator: the wait for them is idle and regular."""
    return isinstance(item, flow_pb2.Frame) and item.step.burst_steps > 0 and len(item.step.rows) <= LONE_ROWS
