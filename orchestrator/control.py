"""The control task: takes workers in, has the model placed over them, and notices who is lost, who is warm and who leaves.

Owns the fleet; `membership` tells it what workers say. Decisions are the cores' (`core.fleet`, `core.grouping`): this module
asks for them when something has changed, has `bringup` carry them out, and keeps what happens to one pipeline from the
others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

from modelstore.manifest import Manifest
from orchestrator.bringup import Bringup
from orchestrator.core.fleet import Fleet, Member, WorkerState
from orchestrator.core.placement import Placement, Worker
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.monitors import Monitors
from orchestrator.planner import Planner
from orchestrator.status import device_status, pipeline_statuses
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError, NotReady, PlacementImpossible, ShardDoesNotFit, ShoalError, WorkerLost
from shoal.types import PipelineId, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2

logger = logging.getLogger(__name__)

TICK_S = 0.25
# A longer pause between two looks is our own stall, not the devices'.
STALL_S = 1.0
# A request that comes while no pipeline is up, but one is being built, waits for it this long.
SERVING_TIMEOUT_S = 15.0
# A killed device breaks its links and its Attach stream within milliseconds, in any order.
LINK_GRACE_S = 0.05
# Between two tries of a placement that failed for a reason that may pass.
RETRY_S = 2.0


class Control:
    """Fleet, placements and the life of the pipelines.

    Invariants: every member of the fleet has a session and a monitor; the engine has a pipeline only while its placement is
    in force and all its stages are loaded and linked; `_serving` is set exactly while one of them takes requests.
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
        self._planner = Planner(config, manifest)
        self._fleet = Fleet(lease_s=config.lease_s)
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._monitors = Monitors(self._fleet, engine)
        self._bringup = Bringup(config, manifest, self._fleet, self._sessions, hub, engine)
        self._unlinked: set[WorkerId] = set()
        self._refused: set[WorkerId] = set()
        self._has_placed = False
        self._wants_placement = True
        self._retry_at = 0.0
        self._trouble = ""
        self._started_at = time.monotonic()
        self._serving = asyncio.Event()
        self._serving_shown = False
        self._is_stopping = False

    async def watch(self) -> None:
        """Tick and report health until cancelled."""
        await self._set_serving(False)
        looked_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked_at > STALL_S:
                # We slept, or were busy: heartbeats of that time lie unread.
                self._fleet.extend_leases(now - looked_at)
            looked_at = now
            self.tick(now)
            if self._serving_shown != self._serving.is_set():
                self._serving_shown = self._serving.is_set()
                await self._set_serving(self._serving_shown)
            await asyncio.sleep(TICK_S)

    def tick(self, now: float) -> None:
        """Do what time alone brings: expire leases, give up who is late, let devices recover, and place."""
        for worker_id in self._fleet.expire(now):
            self._lost(worker_id, f"no heartbeat for {self._config.lease_s} s")
        self._expire_loading(now)
        self._monitors.tick(now)
        self._release_leaving()
        self._consider_placement()

    def stop(self) -> None:
        """End every answer and every Attach stream; workers then wait for the next orchestrator."""
        self._is_stopping = True
        for placement in self._fleet.placements:
            error = NotReady("this orchestrator has shut down; ask again when it is back", retry_after_s=5.0)
            self._end(placement.pipeline_id, error)
        for session in self._sessions.values():
            session.close()

    async def wait_serving(self) -> None:
        """Return when a pipeline takes requests; waits while one is being built. Raises NotReady if none will soon."""
        deadline = time.monotonic() + SERVING_TIMEOUT_S
        while not self._serving.is_set() and self._is_building and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving.wait(), TICK_S)
        if not self._serving.is_set():
            raise NotReady(f"not serving: {self._waiting_for()}", retry_after_s=1.0)

    @property
    def _is_building(self) -> bool:
        """Whether a pipeline that takes requests is likely soon: stages load or drain, or are about to be placed."""
        states = {one.state for one in self._fleet.members()}
        if states & {WorkerState.LOADING, WorkerState.DRAINING}:
            return True
        if any(self._fleet.is_ready(placement.pipeline_id) for placement in self._fleet.placements):
            return True
        return self._has_placed and self._wants_placement and bool(self._usable())

    def _usable(self) -> tuple[Worker, ...]:
        """Those that layers may be given to, in the order of their names: a restarted fleet finds its blobs again."""
        unusable = self._refused | self._unlinked
        usable = (one for one in self._fleet.placeable() if one[0] not in unusable)
        return tuple(sorted(usable, key=lambda one: one[0]))

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
        self._refused.discard(session.worker_id)
        profile = messages.profile_from_proto(hello.profile)
        self._fleet.attach(session.worker_id, hello.incarnation, profile, time.monotonic())
        self._monitors.add(session.worker_id, profile)
        return session

    def joined(self, worker_id: WorkerId) -> None:
        """A worker is attached and has its link: it can be used, as soon as nobody is disturbed by it."""
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
                self._heartbeat(session, request.heartbeat)
            case "shard_loaded":
                loaded = request.shard_loaded
                session.execution_provider = loaded.execution_provider
                pipeline_id = PipelineId(loaded.pipeline_id)
                if self._fleet.shard_loaded(worker_id, incarnation, pipeline_id, loaded.epoch):
                    self._bringup.open_links(pipeline_id, loaded.epoch)
            case "shard_failed":
                failed = request.shard_failed
                pipeline_id = PipelineId(failed.pipeline_id)
                if self._fleet.shard_failed(worker_id, incarnation, pipeline_id, failed.epoch):
                    self._shard_failed(worker_id, failed)
            case "links_opened":
                self._links_opened(session, request.links_opened)
            case "link_failed":
                self._link_failed(worker_id, request.link_failed)
            case "leaving":
                self._leave(worker_id, incarnation)
            case event:
                logger.warning("unknown_event worker=%s event=%s", worker_id, event)

    def _heartbeat(self, session: WorkerSession, heartbeat: fleet_pb2.Heartbeat) -> None:
        telemetry, now = messages.telemetry_from_proto(heartbeat.telemetry), time.monotonic()
        if self._fleet.heartbeat(session.worker_id, session.hello.incarnation, telemetry, now):
            self._monitors.observe(session.worker_id, telemetry, now)
        else:
            session.close()

    # Placement

    def _consider_placement(self) -> None:
        """Place if it is wanted, and only what does not disturb anybody's answer."""
        if not self._wants_placement or time.monotonic() < self._retry_at:
            return
        workers = self._usable()
        if not workers or (not self._has_placed and len(workers) < self._config.expect_workers):
            return
        in_force = self._fleet.placements
        try:
            plan = self._planner.plan(workers, in_force)
        except (PlacementImpossible, ConfigError) as error:
            self._cannot_place(error)
            return
        busy = {placement.pipeline_id for placement in in_force if self._is_busy(placement.pipeline_id)}
        chosen = plan.choose(busy)
        self._wants_placement = chosen != plan.best
        if chosen != in_force:
            self._put_in_force(chosen)

    def _cannot_place(self, error: ShoalError) -> None:
        """Keep what serves, if anything does; else say what is missing until somebody joins."""
        self._wants_placement = False
        if not self._engine.pipelines:
            if self._trouble != error.message:
                logger.error("placement_impossible message=%s", error.message)
            self._trouble = error.message

    def _put_in_force(self, placements: tuple[Placement, ...]) -> None:
        """End the pipelines that are not among these placements, and have those brought up that are new."""
        self._has_placed = True
        self._trouble = ""
        for placement in self._fleet.placements:
            if placement not in placements:
                error = NotReady("the layers are being placed anew; try again in a moment", retry_after_s=1.0)
                self._end(placement.pipeline_id, error)
        for placed in self._fleet.assign(placements):
            self._bringup.load(placed, time.monotonic())
        self._bringup.unload_others()

    def _expire_loading(self, now: float) -> None:
        """Do without devices that were told to load long ago and neither did nor said why not."""
        for pipeline_id, worker_ids in self._bringup.overdue(now).items():
            self._end(pipeline_id, NotReady(f"{', '.join(worker_ids)} did not load in time"))
            for worker_id in worker_ids:
                self._refused.add(worker_id)
                logger.error("load_timeout worker=%s pipeline=%s", worker_id, pipeline_id)
                self._sessions[worker_id].close()
            self._wants_placement = True

    def _links_opened(self, session: WorkerSession, opened: fleet_pb2.LinksOpened) -> None:
        pipeline_id = PipelineId(opened.pipeline_id)
        if not self._is_stage(session.worker_id, pipeline_id, opened.epoch):
            return
        session.link_to_next = opened.link_to_next
        if self._bringup.serve_if_linked(pipeline_id):
            self._monitors.apply(pipeline_id)
            self._note_serving()

    def _note_serving(self) -> None:
        """Requests are taken while a pipeline is up that no worker is leaving."""
        up = (pipeline_id for pipeline_id in self._engine.pipelines if self._fleet.is_ready(pipeline_id))
        if any(up):
            self._serving.set()
        else:
            self._serving.clear()

    def _is_busy(self, pipeline_id: PipelineId) -> bool:
        lane = self._engine.lane(pipeline_id)
        return lane is not None and lane.scheduler.num_running + lane.scheduler.num_waiting > 0

    def _is_stage(self, worker_id: WorkerId, pipeline_id: PipelineId, epoch: int) -> bool:
        """Whether a worker may speak for a pipeline: it is one of its stages, and the placement is in force."""
        return self._fleet.is_current(pipeline_id, epoch) and self._pipeline_of(worker_id) == pipeline_id

    def _pipeline_of(self, worker_id: WorkerId) -> PipelineId | None:
        """The pipeline whose placement names a worker, be it a member or lost."""
        names = (one.pipeline_id for one in self._fleet.placements if worker_id in one.worker_ids)
        return next(names, None)

    # Trouble

    def link_lost(self, worker_id: WorkerId, message: str) -> None:
        """The data link of a worker ended; its Attach stream may still be there."""
        self._pipeline_lost(worker_id, f"its data link ended: {message}")
        session = self._sessions.get(worker_id)
        if session is not None:
            session.close()

    def _leave(self, worker_id: WorkerId, incarnation: int) -> None:
        """Take no more requests where a worker wants to go, until its layers are elsewhere; others may do that at once."""
        pipeline_id = self._pipeline_of(worker_id)
        if self._fleet.leave(worker_id, incarnation) and pipeline_id is not None:
            self._engine.set_accepting(pipeline_id, False)
            self._note_serving()
            self._wants_placement = True
        self._release_leaving()

    def _link_failed(self, worker_id: WorkerId, failed: fleet_pb2.LinkFailed) -> None:
        """End the pipeline, but first let the device at the other end of the link be missed: it is the one to name."""

        def end() -> None:
            if self._is_stage(worker_id, PipelineId(failed.pipeline_id), failed.epoch):
                self._pipeline_lost(worker_id, failed.message)

        asyncio.get_running_loop().call_later(LINK_GRACE_S, end)

    def _release_leaving(self) -> None:
        """Let workers that drain go, as soon as no answer needs them."""
        leaving = [one.worker_id for one in self._fleet.members() if one.state is WorkerState.DRAINING]
        for worker_id in leaving:
            pipeline_id = self._pipeline_of(worker_id)
            if pipeline_id is None or not self._is_busy(pipeline_id):
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
        self._monitors.remove(worker_id)

    def _pipeline_lost(self, worker_id: WorkerId, message: str) -> None:
        """A worker cannot go on: if it is a stage of a pipeline, end that one and place what is left of it anew."""
        pipeline_id = self._pipeline_of(worker_id)
        if pipeline_id is None:
            return
        if not self._is_stopping:
            logger.warning("pipeline_lost pipeline=%s worker=%s message=%s", pipeline_id, worker_id, message)
        lost = f"device {worker_id} was lost while it computed this answer ({message}); ask again"
        self._end(pipeline_id, WorkerLost(lost, retry_after_s=1.0))
        self._trouble = f"{worker_id} was lost ({message})"
        self._wants_placement = True

    def _end(self, pipeline_id: PipelineId, error: ShoalError) -> None:
        """Take a pipeline out of force; its answers go on elsewhere, or end with the error."""
        self._fleet.drop(pipeline_id)
        self._bringup.end(pipeline_id, error)
        self._note_serving()

    def _shard_failed(self, worker_id: WorkerId, failed: fleet_pb2.ShardFailed) -> None:
        """Do without a device that cannot hold its shard; try others again, for their trouble may pass."""
        logger.error("shard_failed worker=%s reason=%s message=%s", worker_id, failed.reason, failed.message)
        trouble = f"{worker_id} could not load its layers: {failed.message}"
        self._end(PipelineId(failed.pipeline_id), NotReady(trouble))
        self._trouble = trouble
        if failed.reason == ShardDoesNotFit.reason:
            self._refused.add(worker_id)
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
        is_ready = bool(self._engine.pipelines)
        return admin_pb2.GetStatusResponse(
            version=version("shoal"),
            model=self._manifest.name,
            ready=is_ready,
            waiting_for="" if is_ready else self._waiting_for(),
            devices=[self._device(one) for one in sorted(self._fleet.members(), key=lambda one: one.worker_id)],
            pipelines=pipeline_statuses(self._fleet, self._engine),
            num_running=self._engine.num_running,
            num_waiting=self._engine.num_waiting,
            uptime_s=time.monotonic() - self._started_at,
        )

    def _device(self, member: Member) -> admin_pb2.DeviceStatus:
        return device_status(member, self._sessions[member.worker_id], self._monitors[member.worker_id], self._engine)
