"""The control task: takes workers in, places the model over them, brings the pipeline up, and notices who is lost.

Owns the fleet; `membership` tells it what workers say. Decisions are the cores' (`core.fleet`, `core.placement`); this
module carries them out: commands down the Attach streams, the pipeline up or down at the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from modelstore.manifest import Manifest
from orchestrator.core.fleet import Fleet, Member, WorkerState
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.placement import Placement, check_split, place
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.pipeline import Pipeline, StageMember
from orchestrator.session import WorkerSession
from orchestrator.shards import footprint, load_command
from orchestrator.status import device_status, pipeline_status
from shoal import rpc
from shoal.config import OrchestratorConfig
from shoal.errors import (
    ConfigError,
    NotReady,
    PlacementImpossible,
    ShardDoesNotFit,
    ShoalError,
    WorkerLost,
)
from shoal.types import DeviceProfile, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2

logger = logging.getLogger(__name__)

PIPELINE_ID = "p1"
TICK_S = 0.25
# A longer pause between two looks is our own stall, not the devices'.
STALL_S = 1.0
# Downloading and loading a shard, over the slowest link that makes sense.
LOAD_TIMEOUT_S = 300.0
# A request that comes while a pipeline is being built waits for it this long.
SERVING_TIMEOUT_S = 15.0
# A killed device breaks its links and its Attach stream within milliseconds, in any order.
LINK_GRACE_S = 0.05
# Between two tries of a placement that failed for a reason that may pass.
RETRY_S = 2.0


class Control:
    """Fleet, placement and the life of the pipeline.

    Invariants: every member of the fleet has a session; the engine has a pipeline only while the fleet's placement is in
    force and all its stages are loaded and linked.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        manifest: Manifest,
        hub: FlowHub,
        engine: Engine,
        set_serving: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._hub = hub
        self._engine = engine
        self._set_serving = set_serving
        self._split = _parse_split(config.split, manifest.config.num_layers)
        self._footprint = footprint(manifest)
        self._fleet = Fleet(lease_s=config.lease_s)
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._unlinked: set[WorkerId] = set()
        self._refused: dict[WorkerId, str] = {}
        self._has_placed = False
        self._wants_placement = True
        self._retry_at = 0.0
        self._load_deadline = 0.0
        self._trouble = ""
        self._started_at = time.monotonic()
        self._serving = asyncio.Event()
        self._serving_shown = False
        self._is_stopping = False

    async def watch(self) -> None:
        """Place, expire leases and report health until cancelled."""
        await self._set_serving(False)
        looked_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked_at > STALL_S:
                # We slept, or were busy: heartbeats of that time lie unread.
                self._fleet.extend_leases(now - looked_at)
            looked_at = now
            for worker_id in self._fleet.expire(now):
                self._lost(worker_id, f"no heartbeat for {self._config.lease_s} s")
            self._expire_loading(now)
            self._release_leaving()
            self._consider_placement()
            if self._serving_shown != self._serving.is_set():
                self._serving_shown = self._serving.is_set()
                await self._set_serving(self._serving_shown)
            await asyncio.sleep(TICK_S)

    def stop(self) -> None:
        """End every answer and every Attach stream; workers then wait for the next orchestrator."""
        self._is_stopping = True
        self._down(NotReady("this orchestrator has shut down; ask again when it is back", retry_after_s=5.0))
        for session in self._sessions.values():
            session.close()

    async def wait_serving(self) -> Pipeline:
        """The pipeline that takes requests; waits while one is being built. Raises NotReady if there will be none soon."""
        deadline = time.monotonic() + SERVING_TIMEOUT_S
        while not self._serving.is_set() and self._is_building and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving.wait(), TICK_S)
        if self._engine.pipeline is None or not self._serving.is_set():
            raise NotReady(f"not serving: {self._waiting_for()}", retry_after_s=1.0)
        return self._engine.pipeline

    @property
    def _is_building(self) -> bool:
        """Whether a pipeline that takes requests is likely soon: stages load or drain, or are about to be placed."""
        states = {one.state for one in self._fleet.members()}
        if self._fleet.is_ready or states & {WorkerState.LOADING, WorkerState.DRAINING}:
            return True
        return self._has_placed and self._wants_placement and bool(self._usable())

    def _usable(self) -> list[tuple[WorkerId, DeviceProfile]]:
        """Those that layers may be given to, in the order of their names: a restarted fleet finds its blobs again."""
        unusable = self._refused.keys() | self._unlinked
        return sorted((one for one in self._fleet.placeable() if one[0] not in unusable), key=lambda one: one[0])

    # Membership

    def take_in(self, hello: fleet_pb2.Hello) -> WorkerSession:
        """Make a worker a member. Raises NotReady while another process has its name; that one may yet turn out lost."""
        session = WorkerSession(hello)
        earlier = self._sessions.get(session.worker_id)
        if earlier is not None and earlier.hello.incarnation != hello.incarnation:
            raise NotReady(
                f"another device is attached as {session.worker_id!r}: give each an --id of its own", retry_after_s=1.0
            )
        if earlier is not None:
            self._pipeline_lost(session.worker_id, "it attached again")
            earlier.close()
        self._sessions[session.worker_id] = session
        self._unlinked.add(session.worker_id)
        self._refused.pop(session.worker_id, None)
        profile = rpc.profile_from_proto(hello.profile)
        self._fleet.attach(session.worker_id, hello.incarnation, profile, time.monotonic())
        return session

    def joined(self, worker_id: WorkerId) -> None:
        """A worker is attached and has its link: it can be used, at once if nothing serves, else when nobody is served."""
        self._unlinked.discard(worker_id)
        logger.info("worker_joined worker=%s members=%d", worker_id, len(self._fleet.members()))
        self._wants_placement = True
        self._retry_at = 0.0
        self._consider_placement()

    def left(self, session: WorkerSession) -> None:
        """The Attach stream of a session ended."""
        if self._sessions.get(session.worker_id) is session:
            self._fleet.detach(session.worker_id, session.hello.incarnation)
            self._lost(session.worker_id, "its connection ended")

    def on_event(self, session: WorkerSession, request: fleet_pb2.AttachRequest) -> None:
        """Act on what a worker reports; the fleet refuses what ghosts say."""
        worker_id, incarnation = session.worker_id, session.hello.incarnation
        match request.WhichOneof("event"):
            case "heartbeat":
                telemetry = rpc.telemetry_from_proto(request.heartbeat.telemetry)
                if not self._fleet.heartbeat(worker_id, incarnation, telemetry, time.monotonic()):
                    session.close()
            case "shard_loaded":
                session.execution_provider = request.shard_loaded.execution_provider
                if self._fleet.shard_loaded(worker_id, incarnation, request.shard_loaded.epoch):
                    self._open_links()
            case "shard_failed":
                if self._fleet.shard_failed(worker_id, incarnation, request.shard_failed.epoch):
                    self._shard_failed(worker_id, request.shard_failed)
            case "links_opened":
                if request.links_opened.epoch == self._fleet.epoch:
                    session.link_to_next = request.links_opened.link_to_next
                    self._maybe_serve()
            case "link_failed":
                self._link_failed(worker_id, request.link_failed)
            case "leaving":
                self._leave(worker_id, incarnation)
            case event:
                logger.warning("unknown_event worker=%s event=%s", worker_id, event)

    # Placement

    def _consider_placement(self) -> None:
        """Place if it is wanted and does not disturb anybody's answer."""
        if not self._wants_placement or time.monotonic() < self._retry_at:
            return
        if self._engine.pipeline is not None and not self._engine.is_idle:
            return
        workers = self._usable()
        if not workers or (not self._has_placed and len(workers) < self._config.expect_workers):
            return
        try:
            placement = place(
                self._footprint,
                workers,
                num_slots=self._config.max_sequences,
                context_tokens=self._config.context_tokens,
                split=self._split,
            )
        except (PlacementImpossible, ConfigError) as error:
            self._cannot_place(error)
            return
        self._wants_placement = False
        if placement == self._fleet.placement:
            return
        self._load(placement)

    def _cannot_place(self, error: ShoalError) -> None:
        """Keep what serves, if it does; else say what is missing until somebody joins."""
        self._wants_placement = False
        if self._engine.pipeline is None:
            if self._trouble != error.message:
                logger.error("placement_impossible message=%s", error.message)
            self._trouble = error.message

    def _load(self, placement: Placement) -> None:
        """Tell every worker of a placement its shard, and the others that they have none."""
        self._down(NotReady("the layers are being placed anew; try again in a moment", retry_after_s=1.0))
        self._has_placed = True
        self._trouble = ""
        epoch = self._fleet.assign(placement)
        self._load_deadline = time.monotonic() + LOAD_TIMEOUT_S
        self._hub.routes = {index: stage.worker_id for index, stage in enumerate(placement.stages)}
        token = secrets.token_bytes(16)
        stages = [_address(self._sessions[stage.worker_id].hello) for stage in placement.stages]
        for index, stage in enumerate(placement.stages):
            self._sessions[stage.worker_id].link_to_next = ""
            command = load_command(
                self._manifest,
                placement,
                index,
                pipeline_id=PIPELINE_ID,
                epoch=epoch,
                stages=stages,
                link_token=token,
            )
            self._sessions[stage.worker_id].send(load_shard=command)
            logger.info("placed worker=%s layers=%s epoch=%d", stage.worker_id, stage.layers, epoch)
        placed = {stage.worker_id for stage in placement.stages}
        for worker_id in self._sessions.keys() - placed:
            self._sessions[worker_id].send(unload_shard=fleet_pb2.UnloadShard(pipeline_id=PIPELINE_ID, epoch=epoch))

    def _expire_loading(self, now: float) -> None:
        """Do without devices that were told to load long ago and neither did nor said why not."""
        if self._fleet.placement is None or self._engine.pipeline is not None or now < self._load_deadline:
            return
        for stage in self._fleet.placement.stages:
            session = self._sessions[stage.worker_id]
            if self._fleet.state(stage.worker_id) is WorkerState.LOADING or not session.link_to_next:
                self._refused[stage.worker_id] = f"did not load its layers within {LOAD_TIMEOUT_S} s"
                logger.error("load_timeout worker=%s", stage.worker_id)
                session.close()
        self._fleet.dissolve()
        self._wants_placement = True

    def _open_links(self) -> None:
        command = fleet_pb2.OpenLinks(pipeline_id=PIPELINE_ID, epoch=self._fleet.epoch)
        for worker_id in self._hub.routes.values():
            self._sessions[worker_id].send(open_links=command)

    def _maybe_serve(self) -> None:
        placement = self._fleet.placement
        if placement is None or not self._fleet.is_ready or self._engine.pipeline is not None:
            return
        if not all(self._sessions[stage.worker_id].link_to_next for stage in placement.stages):
            return
        first = placement.stages[0].worker_id
        pipeline = Pipeline(
            PIPELINE_ID,
            self._fleet.epoch,
            [self._member(stage.worker_id, index, placement) for index, stage in enumerate(placement.stages)],
            self._limits(placement),
            lambda frame: self._hub.send(first, frame),
        )
        self._engine.pipeline_up(pipeline)
        self._serving.set()
        logger.info(
            "serving epoch=%d stages=%d context=%d", pipeline.epoch, len(placement.stages), placement.context_tokens
        )

    def _member(self, worker_id: WorkerId, index: int, placement: Placement) -> StageMember:
        return StageMember(worker_id, self._sessions[worker_id].hello.profile.name, placement.stages[index].layers)

    def _limits(self, placement: Placement) -> SchedulerLimits:
        profiles = [self._sessions[stage.worker_id].hello.profile for stage in placement.stages]
        return SchedulerLimits(
            num_stages=len(placement.stages),
            num_slots=placement.slots,
            kv_tokens=placement.kv_tokens,
            context_tokens=placement.context_tokens,
            max_batch=min(profile.max_batch for profile in profiles),
            chunk_tokens=self._config.chunk_tokens,
            burst_steps=self._config.burst_steps,
        )

    # Trouble

    def link_lost(self, worker_id: WorkerId, message: str) -> None:
        """The data link of a worker ended; its Attach stream may still be there."""
        self._pipeline_lost(worker_id, f"its data link ended: {message}")
        session = self._sessions.get(worker_id)
        if session is not None:
            session.close()

    def _leave(self, worker_id: WorkerId, incarnation: int) -> None:
        """Take no more requests until the layers of a worker that wants to go are elsewhere."""
        if self._fleet.leave(worker_id, incarnation) and self._is_placed(worker_id):
            self._serving.clear()
        self._release_leaving()

    def _link_failed(self, worker_id: WorkerId, failed: fleet_pb2.LinkFailed) -> None:
        """End the pipeline, but first let the device at the other end of the link be missed: it is the one to name."""

        def end() -> None:
            if failed.epoch == self._fleet.epoch:
                self._pipeline_lost(worker_id, failed.message)

        asyncio.get_running_loop().call_later(LINK_GRACE_S, end)

    def _release_leaving(self) -> None:
        """Let workers that drain go, as soon as no answer needs them; new requests wait meanwhile."""
        leaving = [one.worker_id for one in self._fleet.members() if one.state is WorkerState.DRAINING]
        for worker_id in leaving:
            if self._engine.is_idle or not self._is_placed(worker_id):
                self._pipeline_lost(worker_id, "it left")
                self._sessions[worker_id].close()

    def _lost(self, worker_id: WorkerId, message: str) -> None:
        session = self._sessions.pop(worker_id, None)
        if session is not None:
            session.close()
        self._hub.forget(worker_id)
        self._unlinked.discard(worker_id)
        if not self._is_stopping:
            logger.warning("worker_lost worker=%s message=%s", worker_id, message)
        self._pipeline_lost(worker_id, message)

    def _pipeline_lost(self, worker_id: WorkerId, message: str) -> None:
        """A worker cannot go on: if it is part of the placement, end that and place anew."""
        if not self._is_placed(worker_id):
            return
        if not self._is_stopping:
            logger.warning("pipeline_lost worker=%s message=%s", worker_id, message)
        self._fleet.dissolve()
        self._hub.routes = {}
        lost = f"device {worker_id} was lost while it computed this answer ({message}); ask again"
        self._down(WorkerLost(lost, retry_after_s=1.0))
        self._trouble = f"{worker_id} was lost ({message})"
        self._wants_placement = True

    def _is_placed(self, worker_id: WorkerId) -> bool:
        placement = self._fleet.placement
        return placement is not None and worker_id in {stage.worker_id for stage in placement.stages}

    def _down(self, error: ShoalError) -> None:
        self._serving.clear()
        self._engine.pipeline_down(error)

    def _shard_failed(self, worker_id: WorkerId, failed: fleet_pb2.ShardFailed) -> None:
        """Do without a device that cannot hold its shard; try others again, for their trouble may pass."""
        logger.error("shard_failed worker=%s reason=%s message=%s", worker_id, failed.reason, failed.message)
        self._fleet.dissolve()
        self._hub.routes = {}
        self._down(NotReady(f"{worker_id} could not load its layers: {failed.message}"))
        self._trouble = f"{worker_id} could not load its layers: {failed.message}"
        if failed.reason == ShardDoesNotFit.reason:
            self._refused[worker_id] = failed.message
        self._wants_placement = True
        self._retry_at = time.monotonic() + RETRY_S

    # Status

    def _waiting_for(self) -> str:
        members = len(self._fleet.members())
        if self._trouble:
            return self._trouble
        if not self._has_placed and members < self._config.expect_workers:
            return f"{members} of {self._config.expect_workers} devices have joined"
        if not members:
            return "no device has joined: start one with `shoal worker --join HOST:PORT`"
        loading = [one.worker_id for one in self._fleet.members() if one.state is not WorkerState.READY]
        return f"{', '.join(loading)} to load" if loading else "links between the devices"

    def status(self) -> admin_pb2.GetStatusResponse:
        """All that `shoal status` shows."""
        is_ready = self._engine.pipeline is not None
        return admin_pb2.GetStatusResponse(
            version=version("shoal"),
            model=self._manifest.name,
            ready=is_ready,
            waiting_for="" if is_ready else self._waiting_for(),
            devices=[self._device(one) for one in sorted(self._fleet.members(), key=lambda one: one.worker_id)],
            pipeline=pipeline_status(self._engine),
            num_running=self._engine.num_running,
            num_waiting=self._engine.num_waiting,
            uptime_s=time.monotonic() - self._started_at,
        )

    def _device(self, member: Member) -> admin_pb2.DeviceStatus:
        session = self._sessions[member.worker_id]
        link_to_next = session.link_to_next if member.stage is not None else ""
        return device_status(member, session.hello, link_to_next, session.execution_provider, self._engine)


def _parse_split(text: str, num_layers: int) -> list[int] | None:
    if not text:
        return None
    try:
        split = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"split = {text!r} is not a list of layer counts such as 12,10,8", field="split") from error
    check_split(split, num_layers)
    return split


def _address(hello: fleet_pb2.Hello) -> fleet_pb2.StageAddress:
    return fleet_pb2.StageAddress(
        worker_id=hello.worker_id, flow_address=hello.flow_address, socket_address=hello.socket_address
    )
