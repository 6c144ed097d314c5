"""A worker in virtual time: attaches, loads, links, computes frame by frame, and attaches again, as `worker.agent` does.

One object is one life of the process; its device starts the next one. States are those of the real `worker.lifecycle`. It
keeps a stage that it has loaded when it loses the orchestrator, and goes over to a later epoch of it without loading again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal import messages
from shoal.types import PROTOCOL_VERSION, DeviceProfile, LayerRange, Telemetry
from shoal.v1 import fleet_pb2, flow_pb2
from tests.simulation.network import Process, Stream
from tests.simulation.stage import SimulatedStage
from tests.simulation.store import HostBlocks, WriteBehind
from worker.agent import BACKOFF_S, LEAVE_TIMEOUT_S
from worker.lifecycle import Lifecycle, WorkerState
from worker.stage import NO_EPOCH, ORCHESTRATOR, StageSpec

if TYPE_CHECKING:
    from tests.simulation.office import Attachment, Uplink
    from tests.simulation.world import World

# A stage is kept so long without an orchestrator.
KEEP_STAGE_S = 30.0
COMMAND_S = 0.0002
WELCOME_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Device:
    """A machine that workers run on, one after the other. skew: its clock goes so much faster.

    blobs: layers that it has the weights of. temperature_c: what its sensor says. Until cut_off_until nothing comes or goes.
    """

    worker_id: str
    profile: DeviceProfile
    load_s: float
    token_s: float
    max_blocks: int
    skew: float = 1.0
    temperature_c: float = 40.0
    cut_off_until: float = 0.0
    blobs: set[int] = field(default_factory=set)
    worker: SimulatedWorker | None = None

    def is_cut_off(self, now: float) -> bool:
        return now < self.cut_off_until

    def is_up(self, now: float) -> bool:
        """Whether it could serve."""
        worker = self.worker
        if worker is None or not worker.process.is_alive or self.is_cut_off(now):
            return False
        return not (worker.process.is_stopped or worker.is_leaving)


class SimulatedWorker:
    """Invariants: `current` is the newest LoadShard, links belong to it, and only frames of its epoch reach the stage."""

    def __init__(self, world: World, device: Device) -> None:
        self.device = device
        self.world = world
        self.process = Process(world, device.worker_id)
        self.lifecycle = Lifecycle()
        self.incarnation = world.random.getrandbits(60)
        self.current: fleet_pb2.LoadShard | None = None
        self.stage: SimulatedStage | None = None
        self.is_leaving = False
        # Pipelines and epochs that it has said to hold a stage of, to the orchestrator that is there.
        self.loaded: set[tuple[str, int]] = set()
        # Links from other stages, to be let go of with the epoch.
        self.inbound: list[Stream[flow_pb2.Frame]] = []
        self.next_link: Stream[flow_pb2.Frame] | None = None
        self.uplink: Uplink | None = None
        self._attachment: Attachment | None = None
        # Frames, and what else the compute thread is told, in the order in which it comes.
        self._inbox: deque[flow_pb2.Frame | Callable[[], None]] = deque()
        self._is_busy = False
        self._attempt = 0
        self._num_loads = 0
        self._num_prefetches = 0
        self._num_attached = 0
        self.fails_next_step = False
        self._host = HostBlocks(device.max_blocks)
        self._writes = WriteBehind(world.redis, self.process.after)
        self.process.after(0.0, self._attach)

    # Membership

    def _attach(self) -> None:
        self._num_attached += 1
        self._attachment = self.world.open_attachment(self)
        if self._attachment is None:
            self._retry()
            return
        self.report(hello=self._hello())
        number = self._num_attached

        def give_up() -> None:
            if number == self._num_attached and self.lifecycle.state is WorkerState.DIALING:
                self.detached()

        self.process.after(WELCOME_TIMEOUT_S, give_up)

    def _retry(self) -> None:
        self._attempt += 1
        self.process.after(BACKOFF_S[min(self._attempt, len(BACKOFF_S)) - 1], self._attach)

    def detached(self) -> None:
        """The Attach stream is over: keep the stage, and try again."""
        if self._attachment is None:
            return
        self._attachment.leave()
        self._attachment = None
        self._close_links()
        if self.uplink is not None:
            self.uplink.left_by_worker()
            self.uplink = None
        if self.is_leaving:
            self.world.end_life(self)
            return
        if self.lifecycle.state is WorkerState.LOADING:
            self._unload()
        else:
            self._post(self._suspend)
        if self.lifecycle.state is not WorkerState.DIALING:
            self._attempt = 0
            self.lifecycle.move_to(WorkerState.DIALING)
        kept = self.current
        self.process.after(KEEP_STAGE_S, lambda: self._give_up_stage(kept))
        self._retry()

    def _suspend(self) -> None:
        """Be in no epoch: the next orchestrator may give the same one again."""
        if self.stage is not None:
            self.stage.rebase(replace(self.stage.spec, epoch=NO_EPOCH))

    def _give_up_stage(self, kept: fleet_pb2.LoadShard | None) -> None:
        if kept is not None and self.current is kept and self.lifecycle.state is WorkerState.DIALING:
            self._unload()

    def report(self, **event: Any) -> None:
        if self._attachment is not None:
            self._attachment.to_office.send(fleet_pb2.AttachRequest(**event))

    def _hello(self) -> fleet_pb2.Hello:
        is_direct = self.device.profile.allow_direct_links
        return fleet_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.device.worker_id,
            incarnation=self.incarnation,
            profile=messages.profile_to_proto(self.device.profile),
            runtime=fleet_pb2.RuntimeSummary(name="onnxruntime", version="1.32.0", kernel_fingerprint="simulated"),
            flow_address=f"{self.device.worker_id}:1" if is_direct else "",
        )

    def obey(self, response: fleet_pb2.AttachResponse) -> None:
        """Carry out a command of the orchestrator."""
        match response.WhichOneof("command"):
            case "welcome":
                self._welcomed(response.welcome)
            case "load_shard":
                self._load(response.load_shard)
            case "open_links":
                if self.is_current(response.open_links.pipeline_id, response.open_links.epoch):
                    self._open_links()
            case "unload_shard":
                if self.current is not None and self.current.epoch <= response.unload_shard.epoch:
                    self._unload()
                    if self.lifecycle.state is not WorkerState.ATTACHED:
                        self.lifecycle.move_to(WorkerState.ATTACHED)
            case "measure":
                failed = fleet_pb2.Measured(reason="INTERNAL", message="is not measured")
                self.process.after(0.05, lambda: self.report(measured=failed))
            case "probe_links":
                self.process.after(0.05, lambda: self.report(links_probed=fleet_pb2.LinksProbed()))
            case "prefetch_blobs":
                self._prefetch(list(response.prefetch_blobs.blobs))

    def _prefetch(self, blobs: list[fleet_pb2.BlobRef]) -> None:
        """Have one blob after the other, unless something else is to be had or a shard to be loaded meanwhile."""
        self._num_prefetches += 1
        number = self._num_prefetches

        def have_next() -> None:
            if blobs and number == self._num_prefetches and self.current is None:
                self.report(blob_prefetched=fleet_pb2.BlobPrefetched(digest=blobs.pop(0).digest))
                self.process.after(0.1, have_next)

        self.process.after(0.1, have_next)

    def _welcomed(self, welcome: fleet_pb2.Welcome) -> None:
        self.uplink = self.world.open_uplink(self, welcome.link_token)
        self.lifecycle.move_to(WorkerState.ATTACHED)
        self._attempt = 0
        self.loaded.clear()
        if self.is_leaving:
            self.report(leaving=fleet_pb2.Leaving())
        self._beat(self._num_attached, welcome.heartbeat_interval_s / self.device.skew)

    def _beat(self, number: int, interval_s: float) -> None:
        if number != self._num_attached or self.lifecycle.state is WorkerState.DIALING:
            return
        telemetry = Telemetry(temperature_c=self.device.temperature_c)
        self.report(heartbeat=fleet_pb2.Heartbeat(telemetry=messages.telemetry_to_proto(telemetry)))
        self.process.after(interval_s, lambda: self._beat(number, interval_s))

    def leave(self) -> None:
        """End in order: once nobody needs it any more, or when that takes too long."""
        self.is_leaving = True
        if self.lifecycle.state is WorkerState.DIALING:
            self.world.end_life(self)
            return
        self.report(leaving=fleet_pb2.Leaving())
        self.process.after(LEAVE_TIMEOUT_S, lambda: self.world.end_life(self))

    # Shards and links

    def is_current(self, pipeline_id: str, epoch: int) -> bool:
        current = self.current
        return current is not None and (current.pipeline_id, current.epoch) == (pipeline_id, epoch)

    def _load(self, command: fleet_pb2.LoadShard) -> None:
        self._close_links()
        earlier, self.current = self.current, command
        self.lifecycle.move_to(WorkerState.LOADING)
        self._num_loads += 1
        number, spec = self._num_loads, _spec_of(command)
        if self.stage is not None and earlier is not None and _is_same_shard(earlier, command):
            self.world.happened["rebased"] += 1
            self.world.note(f"{self.device.worker_id} goes over to epoch {command.epoch}")
            self._post(lambda: self._loaded(number, spec, is_rebased=True))
            return
        self._post(self._close_stage)
        missing = set(range(spec.layers.start, spec.layers.stop)) - self.device.blobs
        self.device.blobs |= missing
        load_s = self.device.load_s * (0.2 + len(missing))
        self.process.after(load_s, lambda: self._post(lambda: self._loaded(number, spec, is_rebased=False)))

    def _loaded(self, number: int, spec: StageSpec, *, is_rebased: bool) -> None:
        if number != self._num_loads or self.lifecycle.state is not WorkerState.LOADING:
            return
        if is_rebased and self.stage is not None:
            self.stage.rebase(spec)
        else:
            self.stage = SimulatedStage(spec, partial(self._route, spec), self._host, self._writes, self.process.after)
        self.lifecycle.move_to(WorkerState.LOADED)
        loaded = fleet_pb2.ShardLoaded(pipeline_id=spec.pipeline_id, epoch=spec.epoch, stage=spec.stage)
        self.loaded.add((spec.pipeline_id, spec.epoch))
        self.report(shard_loaded=loaded)

    def _unload(self) -> None:
        self._close_links()
        self._post(self._close_stage)
        self._num_loads += 1
        self.current = None

    def _close_stage(self) -> None:
        if self.stage is not None:
            self.stage.close()
            self.stage = None

    def _close_links(self) -> None:
        """Of the epoch that is over; the other ends learn of it."""
        for link in self.inbound:
            link.leave()
        self.inbound.clear()
        if self.next_link is not None:
            self.next_link.close(self.world.delay_s())
            self.next_link = None

    def _open_links(self) -> None:
        command, state = self.current, self.lifecycle.state
        assert command is not None
        assert state is WorkerState.LOADED, f"{self.device.worker_id} is told to open links and is {state.value}"
        following = (command.stage + 1) % len(command.stages)
        if following == command.stage:
            self.linked(command, None, "local")
        elif not command.stages[following].flow_address:
            self.linked(command, None, "relay")
        else:
            self.world.open_peer_link(self, command, command.stages[following].worker_id)

    def linked(self, command: fleet_pb2.LoadShard, link: Stream[flow_pb2.Frame] | None, kind: str) -> None:
        """The link to the next stage is open, or frames go by the orchestrator."""
        is_awaited = self.lifecycle.state is WorkerState.LOADED and self.current is command
        if not is_awaited:
            if link is not None:
                link.close()
            return
        self.next_link = link
        self.lifecycle.move_to(WorkerState.SERVING)
        opened = fleet_pb2.LinksOpened(
            pipeline_id=command.pipeline_id, epoch=command.epoch, stage=command.stage, link_to_next=kind
        )
        self.report(links_opened=opened)

    def link_failed(self, command: fleet_pb2.LoadShard | None, what: str) -> None:
        """Report a broken link of the current shard."""
        if command is None or self.current is not command or self.is_leaving:
            return
        failed = fleet_pb2.LinkFailed(
            pipeline_id=command.pipeline_id, epoch=command.epoch, stage=command.stage, message=what
        )
        self.report(link_failed=failed)

    # Computing

    def receive(self, frame: flow_pb2.Frame) -> None:
        self._post(frame)

    def _post(self, item: flow_pb2.Frame | Callable[[], None]) -> None:
        self._inbox.append(item)
        self._work()

    def _work(self) -> None:
        if self._is_busy or not self._inbox:
            return
        item = self._inbox.popleft()
        self._is_busy = True
        taken_up, took_s = self.world.now(), COMMAND_S
        if isinstance(item, flow_pb2.Frame) and item.HasField("step"):
            num_tokens = sum(row.num_tokens for row in item.step.rows)
            took_s = self.device.token_s * (1 + num_tokens / 8)

        def done() -> None:
            self._is_busy = False
            if not isinstance(item, flow_pb2.Frame):
                item()
            else:
                if item.HasField("step"):
                    item.step.stamps_ns.extend([int(taken_up * 1e9), int(self.world.now() * 1e9)])
                self._handle(item)
            self._work()

        self.process.after(took_s, done)

    def _handle(self, frame: flow_pb2.Frame) -> None:
        stage = self.stage
        if stage is None or frame.pipeline_id != stage.spec.pipeline_id:
            return
        if self.fails_next_step and frame.HasField("step") and frame.epoch == stage.spec.epoch:
            self.fails_next_step = False
            stage.fail(frame.step)
            return
        stage.handle(frame)
        stage.check_invariants()

    def _route(self, spec: StageSpec, frame: flow_pb2.Frame) -> None:
        if frame.to_stage == spec.stage:
            self.receive(frame)
            return
        is_next = frame.to_stage == (spec.stage + 1) % spec.num_stages
        link: Callable[[flow_pb2.Frame], None] | None = None
        if frame.to_stage != ORCHESTRATOR and is_next and self.next_link is not None:
            link = self.next_link.send
            if self.next_link.is_broken:
                self.link_failed(self.current, f"to stage {frame.to_stage}: it broke")
        elif self.uplink is not None:
            link = self.uplink.to_office.send
        if link is None:
            self.link_failed(self.current, "the orchestrator is out of reach")
            return
        copy = flow_pb2.Frame()
        copy.CopyFrom(frame)
        self.world.remember(self, copy)
        link(frame)


def _spec_of(command: fleet_pb2.LoadShard) -> StageSpec:
    layers = LayerRange(command.layers.start, command.layers.stop)
    return StageSpec(
        command.pipeline_id, command.epoch, command.stage, len(command.stages),
        messages.shape_from_proto(command.shape), layers, command.model_digest,
    )  # fmt: skip


def _is_same_shard(one: fleet_pb2.LoadShard, other: fleet_pb2.LoadShard) -> bool:
    return (one.pipeline_id, one.model_digest, one.layers, one.shape) == (
        other.pipeline_id, other.model_digest, other.layers, other.shape,
    )  # fmt: skip
