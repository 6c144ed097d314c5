"""Which devices of a site are there, and what pipelines are made of them as they leave and come back.

A device leaves unannounced. Once that is noticed, `core.repair` gives its stage to one that stands by, or else whoever is
free makes a pipeline as `core.grouping` says; both take the time that loading does. Knows no requests: the site is told
which pipelines are up and down.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from orchestrator.core.figures import FleetFigures
from orchestrator.core.grouping import place_all
from orchestrator.core.pipelines import can_hold
from orchestrator.core.placement import Placement, Stage
from orchestrator.core.repair import repair
from shoal.errors import PlacementImpossible
from shoal.types import PipelineId, WorkerId
from simulation.agenda import Agenda
from simulation.fetches import Fetches
from simulation.lane import SimulatedLane
from simulation.settings import Settings
from simulation.site import Site
from simulation.stages import Stages
from simulation.tally import Losses

# Source: docs/results/recovery.md. Who leaves is like one that is frozen or cut off: its streams do not break.
NOTICED_S = 1.2
# Loading blobs that are there and opening links (assumption: such that a killed stage costs the median gap that was
# measured, 0.5 s).
LOAD_S = 0.1
# Reading blobs from a phone's storage (assumption).
READ_BYTES_PER_S = 500e6
# From being there again to being of use, what was measured of it being kept (assumption).
JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class _Build:
    """A pipeline on its way. new: the stages that have to be loaded, by index. before: the lane whose id it has."""

    placement: Placement
    new: tuple[int, ...]
    before: SimulatedLane | None = None


class Upkeep:
    """The devices of a site.

    Invariants: a device is in at most one pipeline, in force or on its way; who is known to be away is in none.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: FleetFigures,
        placements: Collection[Placement],
        site: Site,
        agenda: Agenda,
        losses: Losses,
        random: Random,
    ) -> None:
        """All devices are there, and the pipelines serve."""
        self.busy_s: dict[WorkerId, float] = {}
        self._settings = settings
        self._fleet = fleet
        self._by_id = {device.worker_id: device for device in fleet.devices}
        self._num_wanted = len(placements)
        self._num_made = len(placements)
        self._site = site
        self._agenda = agenda
        self._losses = losses
        self._random = random
        self._away: set[WorkerId] = set()
        # Away, and nobody has noticed yet.
        self._missed: set[WorkerId] = set()
        self._builds: dict[PipelineId, _Build] = {}
        # Layers whose blobs a device has.
        self._stored: dict[WorkerId, set[int]] = {worker_id: set() for worker_id in self._by_id}
        for placement in placements:
            for stage in placement.stages:
                self._store(stage)
            site.pipeline_up(self._lane(placement))
        if settings.churn.per_hour:
            for worker_id in self._by_id:
                self._plan_leave(worker_id)

    def _plan_leave(self, worker_id: WorkerId) -> None:
        at = self._agenda.now + self._random.expovariate(self._settings.churn.per_hour / 3600)
        if at < self._settings.duration_s:
            self._agenda.at(at, partial(self._leave, worker_id))

    def _leave(self, worker_id: WorkerId) -> None:
        self._losses.num_left += 1
        self._away.add(worker_id)
        self._missed.add(worker_id)
        lane = self._lane_with(worker_id)
        if lane is not None:
            lane.is_lost = True
        now = self._agenda.now
        away_s = max(self._random.expovariate(1 / self._settings.churn.away_s), NOTICED_S)
        self._agenda.at(now + NOTICED_S, partial(self._notice, worker_id))
        self._agenda.at(now + away_s + JOIN_S, partial(self._come_back, worker_id))

    def _come_back(self, worker_id: WorkerId) -> None:
        self._away.discard(worker_id)
        self._plan_leave(worker_id)
        self._fill()

    def _notice(self, worker_id: WorkerId) -> None:
        """A device is known to be away: what it was part of goes on without it."""
        self._missed.discard(worker_id)
        build = next((one for one in self._builds.values() if worker_id in one.placement.worker_ids), None)
        if build is not None:
            self._end_build(build)
        lane = self._lane_with(worker_id)
        if lane is not None:
            self._losses.num_pipelines += 1
            self._losses.at_s.append(self._agenda.now)
            self._note_busy(lane)
            self._site.pipeline_down(lane.pipeline_id)
            self._repair(lane, worker_id)
        self._fill()

    def _repair(self, lane: SimulatedLane, lost: WorkerId) -> None:
        """Have somebody who stands by take the place of a lost device, if nobody else of the pipeline is away."""
        placement = lane.placement
        if (self._away - {lost}).intersection(placement.worker_ids):
            return
        repaired = repair(self._settings.model, placement, lost, self._free(placement.worker_ids), self._fleet)
        if repaired is not None:
            self._losses.num_repaired += 1
            self._begin(_Build(repaired, (placement.worker_ids.index(lost),), lane))

    def _fill(self) -> None:
        """Make pipelines of who is free while there are fewer than planned."""
        num_missing = self._num_wanted - len(self._site.lanes) - len(self._builds)
        model, demand = self._settings.model, self._settings.demand
        free = replace(self._fleet, devices=tuple(self._by_id[one] for one in self._free()))
        if num_missing < 1 or not can_hold(model, free, demand.least_kv(model)):
            return
        share = -(-demand.num_streams * num_missing // self._num_wanted)
        try:
            placements = place_all(model, free, replace(demand, num_streams=share, replicas=num_missing))
        except PlacementImpossible:
            return
        for placement in placements[:num_missing]:
            self._num_made += 1
            self._losses.num_built += 1
            named = replace(placement, pipeline_id=PipelineId(f"p{self._num_made}"))
            self._begin(_Build(named, tuple(range(len(named.stages)))))

    def _begin(self, build: _Build) -> None:
        stages = [build.placement.stages[index] for index in build.new]
        self._builds[build.placement.pipeline_id] = build
        self._site.is_building = True
        there_at = self._agenda.now + max(self._load_s(stage) for stage in stages)
        self._agenda.at(there_at, partial(self._loaded, build))

    def _loaded(self, build: _Build) -> None:
        pipeline_id = build.placement.pipeline_id
        if self._builds.get(pipeline_id) is not build:
            return
        self._end_build(build)
        lane = self._lane(build.placement)
        if build.before is not None:
            lane.keep(build.before, build.new)
        # Somebody may have left whom nobody misses yet.
        lane.is_lost = bool(self._away.intersection(build.placement.worker_ids))
        self._site.pipeline_up(lane)

    def _end_build(self, build: _Build) -> None:
        del self._builds[build.placement.pipeline_id]
        self._site.is_building = bool(self._builds)

    def _load_s(self, stage: Stage) -> float:
        """Blobs that are not there come over the device's link."""
        missing = self._store(stage) / len(stage.layers) * stage.weight_bytes
        return LOAD_S + stage.weight_bytes / READ_BYTES_PER_S + missing / self._bytes_per_s(stage.worker_id)

    def _bytes_per_s(self, worker_id: WorkerId) -> float:
        """Of the link to the orchestrator and its Redis, taken to be as fast in both directions."""
        return self._fleet.link(worker_id, None).bytes_per_s

    def _store(self, stage: Stage) -> int:
        """Note what blobs a device has from now on; returns the number of layers that it had not."""
        stored, layers = self._stored[stage.worker_id], range(stage.layers.start, stage.layers.stop)
        num_missing = len(set(layers) - stored)
        stored.update(layers)
        return num_missing

    def _free(self, taken: Collection[WorkerId] = ()) -> list[WorkerId]:
        held = set(self._held())
        return [one for one in self._by_id if one not in held and one not in self._away and one not in taken]

    def _held(self) -> list[WorkerId]:
        """Who is in pipelines, in force or on their way."""
        placements = [lane.placement for lane in self._site.lanes.values()]
        placements += [build.placement for build in self._builds.values()]
        return [worker_id for placement in placements for worker_id in placement.worker_ids]

    def _lane_with(self, worker_id: WorkerId) -> SimulatedLane | None:
        lanes = self._site.lanes.values()
        return next((lane for lane in lanes if worker_id in lane.placement.worker_ids), None)

    def _lane(self, placement: Placement) -> SimulatedLane:
        stages = Stages(self._settings.model, self._fleet, placement)
        # The most impatient device speaks for its pipeline.
        fallback_s = min(device.profile.fallback_timeout_ms for device in stages.devices) / 1e3
        limits = self._settings.limits(placement, stages.devices)
        kv_bytes = self._settings.model.kv_bytes_per_token_per_layer
        fetches = Fetches(
            [len(stage.layers) * kv_bytes for stage in placement.stages],
            [self._bytes_per_s(stage.worker_id) for stage in placement.stages],
        )
        return SimulatedLane(placement, limits, stages, fetches, self._site.ledger, fallback_s)

    # How busy devices are

    def begin_count(self) -> None:
        """Count from now on how long devices compute."""
        self.busy_s = dict.fromkeys(self._by_id, 0.0)
        for lane in self._site.lanes.values():
            lane.stages.busy_s = [0.0] * len(lane.stages.busy_s)

    def end_count(self) -> None:
        """Have in busy_s how long they have computed."""
        for lane in self._site.lanes.values():
            self._note_busy(lane)

    def _note_busy(self, lane: SimulatedLane) -> None:
        if self.busy_s:
            for worker_id, busy_s in zip(lane.placement.worker_ids, lane.stages.busy_s, strict=True):
                self.busy_s[worker_id] += busy_s

    def check_invariants(self) -> None:
        held = self._held()
        assert len(held) == len(set(held)), f"in two pipelines: {sorted(held)}"
        assert not (self._away - self._missed).intersection(held), "a device that is known to be away is counted on"
