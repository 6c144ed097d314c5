"""Plays a fleet in virtual time: one site after the other, and what became of all of them.

Puts together the parts of a site and its requests; sites have nothing to do with each other. Same settings, same result.
Modelled: scheduler, router, parking and repair as they are; stages and links one message at a time, by the figures of
plans; attention as slots fill; noticing, loading and fetching KV after a loss. Not modelled: the orchestrator's own time,
heat, batteries, prefixes in common, what checkpoints take of links, changes for a gain alone (`core.replacement`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures
from orchestrator.core.grouping import place_all
from orchestrator.core.predictions import Prediction, predict
from shoal.errors import InternalError
from simulation.agenda import Agenda
from simulation.requests import Request, Traffic
from simulation.settings import Settings
from simulation.site import Site
from simulation.synthetic import dealt
from simulation.tally import End, Tally
from simulation.upkeep import Upkeep

# What is under way when time is over is played to its end, within this.
MAX_DRAIN_S = 600.0
# Looks at a site within the window of a run; between them, whoever waits is told how far it is.
NUM_LOOKS = 20

# The share of all that is done, and what is being done.
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class PlannedSite:
    """Devices with an orchestrator, and what pipelines are predicted to do. share: of all requests and streams."""

    fleet: FleetFigures
    demand: Demand
    predictions: tuple[Prediction, ...]
    share: float


@dataclass(frozen=True, slots=True)
class Played:
    """What came of all sites. busy: of each device that was in a pipeline, the share of time that it computed.

    bottlenecks: of each pipeline at the end, that of its busiest stage. full: how many of the looks at pipelines found all
    slots or KV taken and somebody waiting. num_events: things that happened.
    """

    tally: Tally
    busy: tuple[float, ...]
    bottlenecks: tuple[float, ...]
    full: float
    num_events: int


def plan_sites(settings: Settings, fleets: Sequence[FleetFigures], progress: Progress) -> list[PlannedSite]:
    """Plan each site by itself, for its share of the streams: as much as its devices are of all speed.

    Raises PlacementImpossible where the devices of a site cannot hold the model.
    """
    speeds = [sum(device.profile.speed for device in fleet.devices) for fleet in fleets]
    shares = [speed / sum(speeds) for speed in speeds]
    numbers = dealt(settings.demand.num_streams, shares)
    sites = []
    for number, (fleet, share, num_streams) in enumerate(zip(fleets, shares, numbers, strict=True)):
        progress(number / len(fleets), f"planning site {number + 1} of {len(fleets)}")
        demand = replace(settings.demand, num_streams=max(num_streams, 1))
        placements = place_all(settings.model, fleet, demand)
        each = demand.of_each(len(placements))
        predictions = tuple(predict(settings.model, fleet, one, each) for one in placements)
        sites.append(PlannedSite(fleet, demand, predictions, share))
    return sites


def play(settings: Settings, sites: Sequence[PlannedSite], progress: Progress) -> Played:
    """Play all sites to their ends. Raises AssertionError if tokens come twice, or not in order, or a request never ends."""
    numbers = dealt(settings.load.num_streams, [site.share for site in sites])
    tally, played = Tally(settings), []
    for index, (site, num_streams) in enumerate(zip(sites, numbers, strict=True)):
        name = f"site {index + 1} of {len(sites)}"
        tell = partial(_tell_part, progress, index / len(sites), 1 / len(sites), name)
        played.append(_Play(settings, tally, site, index, num_streams))
        played[-1].run(tell)
    looks = [is_full for one in played for is_full in one.looks]
    return Played(
        tally=tally,
        busy=tuple(share for one in played for share in one.busy),
        bottlenecks=tuple(share for one in played for share in one.bottlenecks),
        full=sum(looks) / max(len(looks), 1),
        num_events=sum(one.agenda.num_events for one in played),
    )


def _tell_part(progress: Progress, begin: float, part: float, name: str, share: float, text: str) -> None:
    progress(begin + part * share, f"{name}: {text}")


class _Play:
    """One site, from its first request to the end of its last.

    busy, bottlenecks: as in Played. looks: at a pipeline, whether somebody waited.
    """

    def __init__(self, settings: Settings, tally: Tally, planned: PlannedSite, index: int, num_streams: int) -> None:
        self.agenda = Agenda()
        self.busy: list[float] = []
        self.bottlenecks: list[float] = []
        self.looks: list[bool] = []
        self._settings = settings
        self._site = Site(self.agenda, tally, self._ended)
        own = replace(settings, demand=planned.demand)
        random = settings.random("devices", index)
        placements = [one.placement for one in planned.predictions]
        self._upkeep = Upkeep(own, planned.fleet, placements, self._site, self.agenda, tally.losses, random)
        rate_per_s = settings.load.rate_per_s * planned.share
        self._traffic = Traffic(settings, index, rate_per_s)
        if rate_per_s:
            self._plan_arrival()
        starts = settings.random("starts", index)
        for stream in range(num_streams):
            # Who begins at the same time would stay in step.
            self.agenda.at(starts.uniform(0.0, settings.warm_s / 2), partial(self._ask, stream))

    def run(self, progress: Progress) -> None:
        settings, agenda = self._settings, self.agenda
        warm_s, counted_s = settings.warm_s, settings.duration_s - settings.warm_s
        agenda.run(warm_s)
        self._upkeep.begin_count()
        for number in range(1, NUM_LOOKS + 1):
            agenda.run(warm_s + counted_s * number / NUM_LOOKS)
            self._look()
            progress(number / NUM_LOOKS, f"{agenda.now:.0f} of {settings.duration_s:.0f} s")
        self._upkeep.end_count()
        shares = {worker_id: busy_s / counted_s for worker_id, busy_s in self._upkeep.busy_s.items()}
        self.busy = [share for share in shares.values() if share]
        placements = [lane.placement for lane in self._site.lanes.values()]
        self.bottlenecks = [max(shares[worker_id] for worker_id in placement.worker_ids) for placement in placements]
        self._drain()

    def _drain(self) -> None:
        """Nobody comes any more, and those who wait go: what runs comes to its end."""
        self._site.give_up_waiting()
        agenda, end_s = self.agenda, self._settings.duration_s + MAX_DRAIN_S
        while self._site.num_open and (next_at := agenda.next_at()) is not None and next_at <= end_s:
            agenda.run(next_at)
        if self._site.num_open:
            raise InternalError(
                f"{self._site.num_open} request(s) have not ended {MAX_DRAIN_S:.0f} s after the last came"
            )

    def _look(self) -> None:
        """See whether everything is as it should be, and which pipelines could do with more room."""
        self._site.check_invariants()
        self._upkeep.check_invariants()
        for lane in self._site.lanes.values():
            self.looks.append(lane.scheduler.num_waiting > 0)

    # Requests

    def _plan_arrival(self) -> None:
        at = self.agenda.now + self._traffic.next_gap_s()
        if at < self._settings.duration_s:
            self.agenda.at(at, self._arrive)

    def _arrive(self) -> None:
        self._site.submit(self._traffic.draw(self.agenda.now))
        self._plan_arrival()

    def _ask(self, stream: int) -> None:
        if self.agenda.now < self._settings.duration_s:
            self._site.submit(self._traffic.draw(self.agenda.now, stream))

    def _ended(self, request: Request, end: End, retry_s: float) -> None:
        """Of a closed loop, the stream asks again: the same thing where it was refused would be no different."""
        if request.stream is not None:
            self.agenda.at(self.agenda.now + retry_s, partial(self._ask, request.stream))
