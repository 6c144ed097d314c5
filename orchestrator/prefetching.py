"""Weights for devices that stand by: those of the layers that they would take over, fetched before anybody is lost.

One device at a time, and only while all pipelines that are in force serve and nothing has changed for a while. `control`
tells it who stands by and what workers report; which device takes which stage is `core.repair`'s to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from modelstore.manifest import Manifest
from orchestrator.core.figures import FleetFigures
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import Placement, Stage, Worker
from orchestrator.engine import Engine
from orchestrator.planner import Planner
from orchestrator.shards import blob_refs
from orchestrator.worker_session import WorkerSession
from shoal.types import LayerRange, WorkerId
from shoal.v1 import fleet_pb2

logger = logging.getLogger(__name__)

# Since something changed: more devices may be about to join, and caches and links have other things to do.
CALM_S = 5.0
# For one blob, over the slowest link that makes sense; who takes longer is stuck.
BLOB_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """layers: of the stages that a device would take over. blobs: bytes by digest, in the order of fetching."""

    layers: tuple[LayerRange, ...] = ()
    blobs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """layers: that a device would take over. num_bytes: of their blobs; fetched_bytes: of those that it has."""

    layers: tuple[LayerRange, ...] = ()
    num_bytes: int = 0
    fetched_bytes: int = 0


class Prefetching:
    """Invariants: at most one device is asked at a time, for no more than its memory holds, and not for what it has;
    `_wanted` has whoever is asked.
    """

    def __init__(
        self,
        manifest: Manifest,
        planner: Planner,
        fleet: Fleet,
        sessions: Mapping[WorkerId, WorkerSession],
        engine: Engine,
        figures: Callable[[], FleetFigures],
    ) -> None:
        self._manifest = manifest
        self._planner = planner
        self._fleet = fleet
        self._sessions = sessions
        self._engine = engine
        self._figures = figures
        self._situation: tuple[tuple[Placement, ...], tuple[Worker, ...]] = ((), ())
        self._wanted: dict[WorkerId, Wanted] = {}
        self._there: dict[WorkerId, set[str]] = {}
        self._failed: set[WorkerId] = set()
        self._asked: WorkerId | None = None
        self._late_at = self._calm_at = 0.0

    def tick(self, usable: Sequence[Worker], now: float, *, is_quiet: bool) -> None:
        """Ask the next device, if there is one. usable: may be given layers. is_quiet: nobody measures, no layers move."""
        placements = self._fleet.placements
        free = tuple(one for one in usable if self._fleet.pipeline_of(one[0]) is None)
        if not is_quiet or not self._is_all_up(placements) or (placements, free) != self._situation:
            self._situation = (placements, free)
            self._wanted.clear()
            self.stop(now)
        if now < self._calm_at:
            return
        if free and not self._wanted:
            found = self._planner.takers(placements, free, self._figures())
            self._wanted = {
                one: wanted_of(self._manifest, found.get(one, ()), profile.shard_bytes) for one, profile in free
            }
        if self._asked is not None and now >= self._late_at:
            self._fail(self._asked, "it did not answer in time")
        if self._asked is None:
            self._ask_next(now)

    def _is_all_up(self, placements: Sequence[Placement]) -> bool:
        in_force = [placement.pipeline_id for placement in placements]
        return all(self._fleet.is_ready(one) and self._engine.lane(one) is not None for one in in_force)

    def stop(self, now: float) -> None:
        """Have nobody fetch anything now, nor for a while."""
        self._calm_at = now + CALM_S
        session = None if self._asked is None else self._sessions.get(self._asked)
        self._asked = None
        if session is not None:
            session.send(prefetch_blobs=fleet_pb2.PrefetchBlobs())

    def _ask_next(self, now: float) -> None:
        for worker_id, wanted in self._wanted.items():
            missing = [one for one in wanted.blobs if one not in self._there.get(worker_id, ())]
            session = self._sessions.get(worker_id)
            if missing and session is not None and worker_id not in self._failed:
                refs = [fleet_pb2.BlobRef(digest=one, num_bytes=wanted.blobs[one]) for one in missing]
                session.send(prefetch_blobs=fleet_pb2.PrefetchBlobs(blobs=refs))
                self._asked, self._late_at = worker_id, now + BLOB_TIMEOUT_S
                logger.info("prefetching worker=%s layers=%s", worker_id, ",".join(map(str, wanted.layers)))
                return

    def prefetched(self, session: WorkerSession, event: fleet_pb2.BlobPrefetched, now: float) -> None:
        """A device has a blob, or cannot get any; what ghosts say does not count."""
        worker_id = session.worker_id
        if self._sessions.get(worker_id) is not session:
            return
        if event.reason:
            self._fail(worker_id, event.message)
            return
        there = self._there.setdefault(worker_id, set())
        there.add(event.digest)
        if worker_id == self._asked:
            self._late_at = now + BLOB_TIMEOUT_S
            if there.issuperset(self._wanted[worker_id].blobs):
                logger.info("prefetched worker=%s", worker_id)
                self._asked = None

    def _fail(self, worker_id: WorkerId, message: str) -> None:
        """Ask a device no more before it attaches again."""
        logger.warning("not_prefetched worker=%s message=%s", worker_id, message)
        self._failed.add(worker_id)
        if worker_id == self._asked:
            self._asked = None

    def remove(self, worker_id: WorkerId) -> None:
        """A device is gone, and has lost what it has when it comes again, for all that is known."""
        self._there.pop(worker_id, None)
        self._failed.discard(worker_id)
        if worker_id == self._asked:
            self._asked = None

    def of(self, worker_id: WorkerId) -> Prefetch:
        """What a device would take over, and how far it is."""
        wanted, there = self._wanted.get(worker_id, Wanted()), self._there.get(worker_id, ())
        fetched_bytes = sum(num_bytes for digest, num_bytes in wanted.blobs.items() if digest in there)
        return Prefetch(wanted.layers, sum(wanted.blobs.values()), fetched_bytes)


def wanted_of(manifest: Manifest, stages: Sequence[Stage], most_bytes: int) -> Wanted:
    """What is to be fetched of these stages, in this order, as far as there is room for all blobs of a stage."""
    layers: list[LayerRange] = []
    blobs: dict[str, int] = {}
    for stage in stages:
        more = blobs | {blob.digest: blob.num_bytes for blob in blob_refs(manifest, stage.layers)}
        if sum(more.values()) <= most_bytes:
            layers.append(stage.layers)
            blobs = more
    return Wanted(tuple(layers), blobs)
