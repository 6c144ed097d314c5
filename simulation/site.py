"""A site in virtual time: one orchestrator, its pipelines, and the requests that come to it.

Does what `orchestrator.engine` does, with the same cores: routes what comes, moves what waits too long, parks what lost its
pipeline, and asks each scheduler whenever something may be sent. Which pipelines there are is `upkeep`'s, which brings them
up and down; who asks for what is `run`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from orchestrator.core.batch import Emitted
from orchestrator.core.parking import Parking
from orchestrator.core.routing import PipelineView, RouteRequest, reroute, route
from orchestrator.core.sequence import Sequence
from orchestrator.core.tenants import TenantLedger
from orchestrator.engine import FALLBACK_AGAIN, MAX_VAIN_RECOVERIES, MIN_FALLBACK_S
from orchestrator.lane import has_room, route_request, view_of
from shoal.errors import ShoalError, WorkerLost
from shoal.types import PipelineId, QosClass, SequenceId
from simulation.agenda import Agenda
from simulation.lane import Calls, SimulatedLane
from simulation.requests import Request
from simulation.tally import End, Tally

_LOST = WorkerLost("a device was lost")
# When a refused request may come again if nobody says.
RETRY_S = 1.0


class Site:
    """is_building: a pipeline is on its way, which those who are parked may wait for.

    Invariant: a request is known exactly while its sequence waits or runs in one lane, or is parked and in none.
    """

    def __init__(
        self,
        agenda: Agenda,
        tally: Tally,
        on_end: Callable[[Request, End, float], None],
    ) -> None:
        """on_end: takes requests that ended, and for refused ones the seconds after which they may come again."""
        self.lanes: dict[PipelineId, SimulatedLane] = {}
        self.ledger = TenantLedger()
        self.is_building = False
        self._agenda = agenda
        self._tally = tally
        self._on_end = on_end
        self._calls = Calls(self._draw, self._deliver)
        self._parking = Parking()
        self._parking_at: float | None = None
        self._requests: dict[SequenceId, Request] = {}

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    # Requests

    def submit(self, request: Request) -> None:
        """Take a request, or end it at once where nobody takes it."""
        sequence, now = request.sequence, self._agenda.now
        self._requests[sequence.sequence_id] = request
        if not self.lanes:
            self._end(request, End.NO_CAPACITY, RETRY_S)
            return
        wanted = route_request(sequence, now)
        retry_s = RETRY_S
        for pipeline_id in route(wanted, self._views(wanted)).ranking:
            lane = self.lanes[pipeline_id]
            try:
                lane.scheduler.submit(sequence, now)
            except ShoalError as error:
                retry_s = max(retry_s, error.retry_after_s)
            else:
                self._turn(lane)
                return
        self._end(request, End.REFUSED, retry_s)

    def give_up_waiting(self) -> None:
        """End all requests that have had no slot: the run is over."""
        now = self._agenda.now
        new = [one for one in self._requests.values() if not one.sequence.has_started]
        for request in new:
            lanes = self.lanes.values()
            if any(lane.scheduler.withdraw(request.sequence.sequence_id, now) is not None for lane in lanes):
                self._end(request, End.WAITING)

    def _end(self, request: Request, end: End, retry_s: float = 0.0) -> None:
        del self._requests[request.sequence.sequence_id]
        self._tally.end(request, end, self._agenda.now)
        self._on_end(request, end, retry_s)

    def _draw(self, sequence: Sequence, index: int) -> int:
        return self._requests[sequence.sequence_id].token_id(index)

    def _deliver(self, lane: SimulatedLane, tokens: Seq[Emitted], is_turn: bool) -> None:
        now = self._agenda.now
        for token in tokens:
            request = self._requests[token.sequence_id]
            self._tally.token(request, token.index, now)
            if token.finish is not None:
                self._end(request, End.FINISHED)
        if is_turn:
            self._turn(lane)

    # Turns and alarms

    def _turn(self, lane: SimulatedLane) -> None:
        """Send what can be sent now, and see when to look again if nothing happens."""
        now = self._agenda.now
        lane.send_all(self._agenda, self._calls)
        if len(self.lanes) < 2 or lane.scheduler.num_waiting == 0:
            lane.fallback_at = None
        elif lane.fallback_at is None:
            lane.fallback_at = now + max(lane.fallback_s, MIN_FALLBACK_S)
        due = [at for at in (lane.scheduler.wake_at(now), lane.fallback_at) if at is not None]
        if due and (lane.alarm_at is None or min(due) < lane.alarm_at):
            lane.alarm_at = min(due)
            self._agenda.at(lane.alarm_at, partial(self._ring, lane, lane.alarm_at))

    def _turn_all(self) -> None:
        for lane in list(self.lanes.values()):
            self._turn(lane)

    def _ring(self, lane: SimulatedLane, at: float) -> None:
        if lane.alarm_at != at or self.lanes.get(lane.pipeline_id) is not lane:
            return
        lane.alarm_at = None
        if lane.fallback_at is not None and lane.fallback_at <= at:
            self._fall_back(lane)
        self._turn(lane)

    def _fall_back(self, lane: SimulatedLane) -> None:
        """Move what waits here too long to lanes that can start it at once."""
        now = self._agenda.now
        lane.fallback_at = now + max(lane.fallback_s * FALLBACK_AGAIN, MIN_FALLBACK_S)
        if not any(one is not lane and has_room(one.scheduler) for one in self.lanes.values()):
            return
        blocked: set[QosClass] = set()
        for sequence in lane.scheduler.overdue(now, lane.fallback_s):
            if sequence.qos in blocked:
                continue
            wanted = route_request(sequence, now)
            target_id = reroute(wanted, lane.pipeline_id, self._views(wanted)).pipeline_id
            if target_id is None:
                blocked.add(sequence.qos)
            elif lane.scheduler.withdraw(sequence.sequence_id, now) is not None:
                self._take_over(sequence, lane, self.lanes[target_id])

    def _take_over(self, sequence: Sequence, source: SimulatedLane, target: SimulatedLane) -> None:
        if self._hand_over(sequence, target):
            # So that the next one sees the slot taken.
            self._turn(target)
        elif not self._hand_over(sequence, source):
            self._end(self._requests[sequence.sequence_id], End.REFUSED, RETRY_S)

    def _views(self, wanted: RouteRequest) -> list[PipelineView]:
        """All lanes as the router sees them; what nobody has measured yet is expected to be like what is known."""
        slownesses = {lane.pipeline_id: lane.scheduler.times.slowness for lane in self.lanes.values()}
        known = [one for one in slownesses.values() if one is not None]
        for pipeline_id in slownesses if 0 < len(known) < len(slownesses) else ():
            self.lanes[pipeline_id].scheduler.times.expect(sum(known) / len(known))
        now = self._agenda.now
        return [view_of(lane.pipeline_id, lane.scheduler, wanted, now) for lane in self.lanes.values()]

    # Pipelines up and down

    def pipeline_up(self, lane: SimulatedLane) -> None:
        """Serve with a further pipeline; those who are parked go on where they can."""
        assert lane.pipeline_id not in self.lanes, f"two pipelines {lane.pipeline_id}"
        self.lanes[lane.pipeline_id] = lane
        for sequence in self._parking.sequences():
            if self._move(sequence):
                self._parking.remove(sequence.sequence_id, self._agenda.now)
        self._turn_all()

    def pipeline_down(self, pipeline_id: PipelineId) -> None:
        """Serve with a pipeline no more, a device of which was lost."""
        now, losses = self._agenda.now, self._tally.losses
        for sequence in self.lanes.pop(pipeline_id).take_all(now):
            request = self._requests[sequence.sequence_id]
            if sequence.has_started:
                request.num_losses += 1
                sequence.num_recoveries += 1
                sequence.num_vain_recoveries += 1
            if sequence.num_vain_recoveries > MAX_VAIN_RECOVERIES:
                self._end(request, End.LOST)
            elif self._move(sequence):
                losses.num_moved += sequence.has_started
            else:
                losses.num_parked += sequence.has_started
                self._parking.add(sequence, _LOST, now)
        self._watch_parking()
        self._turn_all()

    def _move(self, sequence: Sequence) -> bool:
        """Find a lane for a sequence that is in none; False if there is none that can take it."""
        wanted = route_request(sequence, self._agenda.now)
        ranking = route(wanted, self._views(wanted)).ranking
        return any(self._hand_over(sequence, self.lanes[pipeline_id]) for pipeline_id in ranking)

    def _hand_over(self, sequence: Sequence, lane: SimulatedLane) -> bool:
        try:
            lane.scheduler.submit(sequence, self._agenda.now)
        except ShoalError:
            return False
        return True

    def _watch_parking(self) -> None:
        at = self._parking.wake_at()
        if at is not None and (self._parking_at is None or at < self._parking_at):
            self._parking_at = at
            self._agenda.at(at, partial(self._end_late, at))

    def _end_late(self, at: float) -> None:
        """End who has waited too long for a pipeline, unless one is being built."""
        if at != self._parking_at:
            return
        self._parking_at, now = None, self._agenda.now
        if self.is_building:
            self._parking.hold(now)
        for sequence, _ in self._parking.take_late(now):
            self._end(self._requests[sequence.sequence_id], End.NO_CAPACITY)
        self._watch_parking()

    def check_invariants(self) -> None:
        """Assert the invariants of the class and of its cores; costs time proportional to all sequences."""
        self._parking.check_invariants()
        for lane in self.lanes.values():
            lane.scheduler.check_invariants()
            assert lane.scheduler.num_replay_mismatches == 0
        for sequence_id, request in self._requests.items():
            num_holders = sum(lane.scheduler.get(sequence_id) is not None for lane in self.lanes.values())
            assert num_holders + (sequence_id in self._parking) == 1, request.sequence.story()
