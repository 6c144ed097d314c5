"""The control task: takes workers in, has the model placed over them, and notices who is lost, who is warm and who leaves.

Owns the fleet; `membership` tells it what workers say. Decisions are the cores' (`core.fleet`, `core.grouping`): this module
asks for them when something has changed, has `bringup` carry them out, and keeps what happens to one pipeline from the
others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Executor

from modelstore.manifest import Manifest
from orchestrator.bringup import Bringup
from orchestrator.core.fleet import PLACEABLE, Fleet, WorkerState
from orchestrator.core.placement import Placement, Worker
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.measuring import Measuring
from orchestrator.monitors import Monitors
from orchestrator.moving import Mover
from orchestrator.placing import Placing, Situation
from orchestrator.planner import Planner
from orchestrator.prefetching import Prefetching
from orchestrator.relief import Relief
from orchestrator.serving import Serving
from orchestrator.status import cordoned_devices, fleet_status, waiting_for
from orchestrator.worker_session import LEFT, WorkerSession
from shoal import messages
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError, NotReady, PlacementImpossible, ShardDoesNotFit, ShoalError, WorkerLost
from shoal.types import PipelineId, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2

logger = logging.getLogger(__name__)

TICK_S = 0.25
# A longer pause between two looks is our own stall, not the devices'.
STALL_S = 1.0
# A killed device breaks its links and its Attach stream within milliseconds, in any order.
LINK_GRACE_S = 0.05
# Between two tries of a placement that failed for a reason that may pass.
RETRY_S = 2.0
# Since our start: devices that held layers for the orchestrator before us dial every 0.3 s; who is not back may be lost.
REUNION_S = 2.0


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
        executor: Executor,
        cordoned: Collection[WorkerId] = (),
        keep_cordoned: Callable[[Collection[WorkerId]], None] = lambda _: None,
    ) -> None:
        """executor: makes plans. cordoned: by an orchestrator before; keep_cordoned: remembers them for the next one."""
        self._config = config
        self._manifest = manifest
        self._hub = hub
        self._engine = engine
        self._planner = Planner(config, manifest, executor, self._consider_placement)
        self._fleet = Fleet(lease_s=config.lease_s, cordoned=cordoned)
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._monitors = Monitors(self._fleet, engine)
        self.measuring = Measuring(manifest, self._is_unplaced, config.expect_workers)
        self._bringup = Bringup(config, manifest, self._fleet, self._sessions, hub, engine)
        self._mover = Mover(
            self._usable, self._put_in_force, self._fleet, self._bringup, engine, self._planner, self.measuring.figures
        )
        self._placing = Placing(self._planner, self.measuring, self._monitors, self._sessions, manifest)
        self.relief = Relief(self._fleet, self._mover, self._leave, self._want_placement, keep_cordoned)
        self._prefetching = Prefetching(
            manifest, self._planner, self._fleet, self._sessions, self._engine, self.measuring.figures
        )
        self._unlinked: set[WorkerId] = set()
        self._refused: set[WorkerId] = set()
        self._has_placed = False
        self._wants_placement = True
        self._retry_at = 0.0
        self._trouble = ""
        self._started_at = time.monotonic()
        self._serving = Serving(set_serving, self._is_building, self._waiting_for)
        self.wait_serving = self._serving.wait
        self._is_stopping = False

    async def watch(self) -> None:
        """Tick and report health until cancelled."""
        looked_at = time.monotonic()
        while True:
            now = time.monotonic()
            if now - looked_at > STALL_S:
                # We slept, or were busy: heartbeats of that time lie unread.
                self._fleet.extend_leases(now - looked_at)
            looked_at = now
            self.tick(now)
            await self._serving.show()
            await asyncio.sleep(TICK_S)

    def tick(self, now: float) -> None:
        """Do what time alone brings: expire leases, give up who is late, let devices recover, and place."""
        for worker_id in self._fleet.expire(now):
            self._lost(worker_id, f"no heartbeat for {self._config.lease_s} s")
        self._expire_loading(now)
        self._monitors.tick(now)
        lanes = (self._engine.lane(pipeline_id) for pipeline_id in self._engine.pipelines)
        self._wants_placement |= self.measuring.tick([lane for lane in lanes if lane is not None], now)
        self._release_leaving()
        self._wants_placement |= self._placing.is_review_due(now)
        self._consider_placement()
        if self._is_building():
            self._engine.hold_parked()
        elif cordoned_devices(self._fleet.members()):
            self._engine.parked_trouble = self._waiting_for()
        is_quiet = not (self._mover.is_moving or self.measuring.is_asking)
        self._prefetching.tick(self._usable(), now, is_quiet=is_quiet)

    def stop(self) -> None:
        """End every answer and every Attach stream; workers then wait for the next orchestrator."""
        self._is_stopping = True
        self.relief.stop()
        self._mover.stop()
        for placement in self._fleet.placements:
            error = NotReady("this orchestrator has shut down; ask again when it is back", retry_after_s=5.0)
            self._end(placement.pipeline_id, error, is_final=True)
        for session in self._sessions.values():
            session.close()

    def _is_building(self) -> bool:
        """Whether a pipeline that takes requests is likely soon: stages load or drain, or are about to be placed."""
        states = {one.state for one in self._fleet.members()}
        if states & {WorkerState.LOADING, WorkerState.DRAINING}:
            return True
        if any(self._fleet.is_ready(placement.pipeline_id) for placement in self._fleet.placements):
            return True
        return self._has_placed and self._wants_placement and bool(self._usable())

    def _usable(self, *, with_cordoned: bool = False) -> tuple[Worker, ...]:
        """Those that layers may be given to, in the order of their names: a restarted fleet finds its blobs again.

        with_cordoned: and those that may keep what they have.
        """
        silent = self._monitors.unfit(time.monotonic())
        unusable = self._refused | self._unlinked | self.relief.relieving | silent
        members = self._fleet.placeable(with_cordoned=with_cordoned)
        return tuple(sorted(one for one in members if one[0] not in unusable))

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
            self._prefetching.remove(session.worker_id)
            earlier.close()
        self._sessions[session.worker_id] = session
        self._unlinked.add(session.worker_id)
        self._refused.discard(session.worker_id)
        profile = messages.profile_from_proto(hello.profile)
        self._fleet.attach(session.worker_id, hello.incarnation, profile, time.monotonic())
        self._monitors.add(session.worker_id, profile)
        self.measuring.take_in(session, profile)
        return session

    def joined(self, worker_id: WorkerId) -> None:
        """A worker is attached and has its link: it can be used, as soon as nobody is disturbed by it."""
        self._unlinked.discard(worker_id)
        logger.info("worker_joined worker=%s members=%d", worker_id, len(self._fleet.members()))
        self._wants_placement = True
        self._retry_at = 0.0
        self.measuring.linked(worker_id, time.monotonic())
        self._consider_placement()

    def left(self, session: WorkerSession) -> None:
        """The Attach stream of a session ended."""
        if self._sessions.get(session.worker_id) is session:
            self._fleet.detach(session.worker_id, session.hello.incarnation)
            self._lost(session.worker_id, session.ended_because or "its connection ended")

    def on_event(self, session: WorkerSession, request: fleet_pb2.AttachRequest) -> None:
        """Act on what a worker reports; the fleet refuses what ghosts say."""
        worker_id, incarnation = session.worker_id, session.hello.incarnation
        match request.WhichOneof("event"):
            case "heartbeat":
                self._heartbeat(session, request.heartbeat)
            case "shard_loaded":
                loaded = request.shard_loaded
                session.execution_provider = loaded.execution_provider
                session.loaded(loaded.pipeline_id, loaded.epoch)
                pipeline_id = PipelineId(loaded.pipeline_id)
                self._mover.loaded(worker_id, pipeline_id, loaded.epoch)
                if self._fleet.shard_loaded(worker_id, incarnation, pipeline_id, loaded.epoch):
                    self._bringup.open_links(pipeline_id, loaded.epoch)
            case "shard_failed":
                failed = request.shard_failed
                pipeline_id = PipelineId(failed.pipeline_id)
                self._mover.failed(worker_id, pipeline_id, failed.epoch)
                if self._fleet.shard_failed(worker_id, incarnation, pipeline_id, failed.epoch):
                    self._shard_failed(worker_id, failed)
            case "links_opened":
                self._links_opened(session, request.links_opened)
            case "link_failed":
                self._link_failed(worker_id, request.link_failed)
            case "leaving":
                self.relief.leave(worker_id, incarnation)
            case "measured" | "links_probed":
                if self.measuring.on_event(session, request, time.monotonic()):
                    self._consider_placement()
            case "blob_prefetched":
                self._prefetching.prefetched(session, request.blob_prefetched, time.monotonic())
            case event:
                logger.warning("unknown_event worker=%s event=%s", worker_id, event)

    def _heartbeat(self, session: WorkerSession, heartbeat: fleet_pb2.Heartbeat) -> None:
        telemetry, now = messages.telemetry_from_proto(heartbeat.telemetry), time.monotonic()
        if self._fleet.heartbeat(session.worker_id, session.hello.incarnation, telemetry, now):
            self._wants_placement |= self._monitors.observe(session.worker_id, telemetry, now)
            if stuck_s := self._monitors.stuck_s(session.worker_id):
                self._fleet.detach(session.worker_id, session.hello.incarnation)
                self._lost(session.worker_id, f"it has been at one step for {stuck_s:.0f} s")
        else:
            session.close()

    # Placement

    def _consider_placement(self) -> None:
        """Place if it is wanted, and only what does not disturb anybody's answer."""
        now, in_force = time.monotonic(), self._fleet.placements
        is_late = self._is_stopping or now < self._retry_at
        if not self._wants_placement or is_late or (in_force and self._mover.is_moving):
            return
        workers = self._usable()
        joined = self._usable(with_cordoned=True)
        if reunited := self._placing.reunited([one for one in joined if self._is_unplaced(one[0])], in_force):
            self._put_in_force((*in_force, *reunited))
            return
        is_early = not self._has_placed and len(joined) < self._config.expect_workers
        scattered = any(self._sessions[one].hello.HasField("held") for one, _ in workers if self._is_unplaced(one))
        if scattered or (not self._has_placed and self._engine.num_parked):
            is_early = now < self._started_at + REUNION_S
        if is_early or not workers or self.measuring.awaits(workers, now):
            return
        busy = frozenset(one.pipeline_id for one in in_force if self._engine.is_busy(one.pipeline_id))
        try:
            choice = self._placing.choose(Situation(workers, self._fleet.profiles(), in_force, busy), now)
        except (PlacementImpossible, ConfigError) as error:
            self._cannot_place(error)
            return
        self._wants_placement = not choice.is_settled
        if choice.change is not None and choice.change.arrivals and not choice.change.ended:
            self._mover.begin(choice.change)
        elif choice.change is not None:
            self._put_in_force(choice.change.placements)

    def _cannot_place(self, error: ShoalError) -> None:
        """Keep what serves, if anything does; else say what is missing until somebody joins."""
        self._wants_placement = False
        if not self._engine.pipelines:
            if self._trouble != error.message:
                logger.error("placement_impossible message=%s", error.message)
            self._trouble = self._engine.parked_trouble = error.message

    def _put_in_force(self, placements: tuple[Placement, ...]) -> None:
        """End the pipelines that are not among these placements, and have those brought up that are new."""
        self._has_placed = True
        self._trouble = self._engine.parked_trouble = ""
        for placement in self._fleet.placements:
            if placement not in placements:
                error = NotReady("the layers are being placed anew; try again in a moment", retry_after_s=1.0)
                self._end(placement.pipeline_id, error)
        now = time.monotonic()
        self._placing.changed(now)
        self._prefetching.stop(now)
        for placed in self._fleet.assign(placements):
            self._bringup.load(placed, now)
        self._bringup.unload_others(self._mover.loading)

    def _expire_loading(self, now: float) -> None:
        """Do without devices that were told to load long ago and neither did nor said why not."""
        for pipeline_id, worker_ids in self._bringup.overdue(now).items():
            self._end(pipeline_id, NotReady(f"{', '.join(worker_ids)} did not load in time"))
            for worker_id in worker_ids:
                self._refused.add(worker_id)
                logger.error("load_timeout worker=%s pipeline=%s", worker_id, pipeline_id)
                self._sessions[worker_id].close("it did not load its layers in time")
            self._wants_placement = True

    def _links_opened(self, session: WorkerSession, opened: fleet_pb2.LinksOpened) -> None:
        pipeline_id = PipelineId(opened.pipeline_id)
        if not self._fleet.is_stage(session.worker_id, pipeline_id, opened.epoch):
            return
        session.link_to_next = opened.link_to_next
        if self._bringup.serve_if_linked(pipeline_id):
            self._monitors.apply(pipeline_id)
            self._note_serving()

    def _note_serving(self) -> None:
        """Requests are taken while a pipeline is up that no worker is leaving."""
        self._serving.note(any(self._fleet.is_ready(pipeline_id) for pipeline_id in self._engine.pipelines))
        self._mover.changed()

    def _is_unplaced(self, worker_id: WorkerId) -> bool:
        return self._fleet.pipeline_of(worker_id) is None

    # Trouble

    def link_lost(self, worker_id: WorkerId, message: str) -> None:
        """The data link of a worker ended; its Attach stream may still be there."""
        self._pipeline_lost(worker_id, f"its data link ended: {message}")
        session = self._sessions.get(worker_id)
        if session is not None:
            session.close(f"its data link ended: {message}")

    def _want_placement(self) -> None:
        self._wants_placement = True

    def _leave(self, worker_id: WorkerId, incarnation: int) -> None:
        """Let a worker go: at once if it holds nothing, else when the answers that need it have ended; no others come."""
        pipeline_id = self._fleet.pipeline_of(worker_id)
        if self._fleet.leave(worker_id, incarnation) and pipeline_id is not None:
            self._engine.set_accepting(pipeline_id, False)
            self._note_serving()
            self._wants_placement = True
        self._release_leaving()

    def _link_failed(self, worker_id: WorkerId, failed: fleet_pb2.LinkFailed) -> None:
        """End the pipeline, but first let the device at the other end of the link be missed: it is the one to name."""

        def end() -> None:
            if self._fleet.is_stage(worker_id, PipelineId(failed.pipeline_id), failed.epoch):
                self._pipeline_lost(worker_id, failed.message, is_gone=False)

        asyncio.get_running_loop().call_later(LINK_GRACE_S, end)

    def _release_leaving(self) -> None:
        """Let workers that drain go, as soon as no answer needs them."""
        leaving = [one.worker_id for one in self._fleet.members() if one.state is WorkerState.DRAINING]
        for worker_id in leaving:
            pipeline_id = self._fleet.pipeline_of(worker_id)
            if pipeline_id is None or not self._engine.is_busy(pipeline_id):
                self._pipeline_lost(worker_id, LEFT)
                self._sessions[worker_id].close(LEFT)

    def _lost(self, worker_id: WorkerId, message: str) -> None:
        session = self._sessions.pop(worker_id, None)
        if session is not None:
            session.close()
        self._hub.forget(worker_id)
        self._unlinked.discard(worker_id)
        if not self._is_stopping:
            logger.warning("worker_lost worker=%s message=%s", worker_id, message)
        self._pipeline_lost(worker_id, message)
        if not self._sessions:
            self._engine.parked_trouble = "no device is left"
        self._monitors.remove(worker_id, message, time.monotonic())
        self._mover.changed()
        self.measuring.remove(worker_id)
        self._prefetching.remove(worker_id)

    def _pipeline_lost(self, worker_id: WorkerId, message: str, *, is_gone: bool = True) -> None:
        """A worker cannot go on: if it is a stage of a pipeline, have others take its place, where there are such.

        The answers wait for that, with what the other stages hold of them; else all layers are placed anew. is_gone: the
        worker is not to be used any more; False: only its link to the next one broke, so both stay where they are.
        """
        pipeline_id = self._fleet.pipeline_of(worker_id)
        if pipeline_id is None:
            return
        placement = next(one for one in self._fleet.placements if one.pipeline_id == pipeline_id)
        layers = next(stage.layers for stage in placement.stages if stage.worker_id == worker_id)
        if not self._is_stopping:
            logger.warning("pipeline_lost pipeline=%s worker=%s message=%s", pipeline_id, worker_id, message)
        if is_gone:
            self._unlinked.add(worker_id)
        lost = f"device {worker_id} was lost while it computed this answer ({message}), and with it layers {layers}"
        self._end(pipeline_id, WorkerLost(lost, retry_after_s=1.0))
        self._trouble = f"{worker_id} was lost ({message})"
        self._wants_placement = True
        if not self._is_stopping:
            self._repair(placement, worker_id, is_gone=is_gone)

    def _repair(self, placement: Placement, worker_id: WorkerId, *, is_gone: bool) -> None:
        """Put a placement in force again, with others in the place of one that is gone; or place all anew."""
        others = self._fleet.placements
        left = set(placement.worker_ids) - ({worker_id} if is_gone else set())
        # A cordoned one keeps what it has; one that leaves gets nothing again.
        are_there = all(self._fleet.state(one) in PLACEABLE and one not in self._unlinked for one in left)
        repaired = None
        if are_there and time.monotonic() >= self._retry_at:
            usable, figures = self._usable(), self.measuring.figures()
            free = tuple(one for one in usable if self._is_unplaced(one[0]) and one[0] not in placement.worker_ids)
            repaired = self._planner.repair(placement, worker_id, free, figures) if is_gone else placement
            repaired = repaired or self._planner.absorb(placement, worker_id, usable, self._fleet.profiles(), figures)
        if repaired is None:
            self._consider_placement()
            return
        # Should it break again at once, others come first.
        self._retry_at = time.monotonic() + (0.0 if is_gone else RETRY_S)
        logger.info("repaired pipeline=%s workers=%s", placement.pipeline_id, ",".join(repaired.worker_ids))
        self._put_in_force((*others, repaired))

    def _end(self, pipeline_id: PipelineId, error: ShoalError, *, is_final: bool = False) -> None:
        """Take a pipeline out of force; its answers wait for another one, unless there will be none."""
        self._fleet.drop(pipeline_id)
        self._bringup.end(pipeline_id, error, is_final=is_final)
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
        num_expected = 0 if self._has_placed else self._config.expect_workers
        return waiting_for(self._fleet.members(), num_expected, self._trouble)

    def status(self) -> admin_pb2.GetStatusResponse:
        """All that `shoal status` shows."""
        return fleet_status(
            self._fleet, self._engine, self._sessions, self._monitors, self.relief.relieving, self._prefetching.of,
            model=self._manifest.name,
            trouble="" if self._engine.pipelines else self._waiting_for(),
            uptime_s=time.monotonic() - self._started_at,
        )  # fmt: skip
