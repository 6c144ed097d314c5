"""Membership under any order of events, stale and strange ones included."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.core.fleet import Fleet, WorkerState
from shoal.types import PipelineId, Telemetry, WorkerId
from tests.support.builders import make_profile
from tests.support.members import LEASE_S, P1, P2, A, B, C, D, place_on

workers = st.sampled_from((A, B, C, D))
pipelines = st.sampled_from((P1, P2))
incarnations = st.integers(1, 3)


class FleetMachine(RuleBasedStateMachine):
    """Any order of events, stale and strange ones included: only those of living incarnations count."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lease_s=LEASE_S)
        self.living: dict[WorkerId, int] = {}
        self.loaded: set[WorkerId] = set()
        self.now = 0.0

    @initialize(worker_ids=st.lists(workers, unique=True))
    def begin(self, worker_ids: list[WorkerId]) -> None:
        for worker_id in worker_ids:
            self.attach(worker_id, 1)

    @rule(worker_id=workers, incarnation=incarnations)
    def attach(self, worker_id: WorkerId, incarnation: int) -> None:
        self.fleet.attach(worker_id, incarnation, make_profile(), self.now)
        self.living[worker_id] = incarnation
        self.loaded.discard(worker_id)

    @rule(worker_id=workers, incarnation=incarnations)
    def heartbeat(self, worker_id: WorkerId, incarnation: int) -> None:
        is_known = self.fleet.heartbeat(worker_id, incarnation, Telemetry(), self.now)
        assert is_known == (self.living.get(worker_id) == incarnation)

    @rule(seconds=st.sampled_from((0.1, 0.5, 1.6)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker_id in self.fleet.expire(self.now):
            del self.living[worker_id]
            self.loaded.discard(worker_id)

    @rule(worker_id=workers, incarnation=incarnations, is_draining=st.booleans())
    def go(self, worker_id: WorkerId, incarnation: int, is_draining: bool) -> None:
        event = self.fleet.leave if is_draining else self.fleet.detach
        is_known = event(worker_id, incarnation)
        assert is_known == (self.living.get(worker_id) == incarnation)
        if is_known:
            self.loaded.discard(worker_id)
            if not is_draining:
                del self.living[worker_id]

    @rule(worker_id=workers, is_cordoned=st.booleans())
    def cordon(self, worker_id: WorkerId, is_cordoned: bool) -> None:
        is_known = worker_id in self.living or worker_id in self.fleet.cordoned
        assert self.fleet.cordon(worker_id, is_cordoned) == is_known

    @rule(sizes=st.lists(st.integers(1, 2), max_size=2), is_kept=st.booleans())
    def assign(self, sizes: list[int], is_kept: bool) -> None:
        """Place anew, with the first of the placements in force kept if it can be."""
        kept = [one for one in self.fleet.placements if is_kept][:1]
        taken = {worker_id for one in kept for worker_id in one.worker_ids}
        free = [worker_id for worker_id, _ in self.fleet.placeable() if worker_id not in taken]
        names = (pipeline_id for pipeline_id in (P1, P2) if pipeline_id not in {one.pipeline_id for one in kept})
        before, fresh = self.fleet.epoch, []
        for size, pipeline_id in zip(sizes, names, strict=False):
            chosen, free = free[:size], free[size:]
            if chosen:
                fresh.append(place_on(*chosen, pipeline_id=pipeline_id))
        in_force = self.fleet.placements
        begun = self.fleet.assign([*kept, *fresh])
        assert [placed.placement for placed in begun] == [one for one in fresh if one not in in_force]
        assert all(placed.epoch > before for placed in begun)
        lasting = {worker_id for one in in_force if one in [*kept, *fresh] for worker_id in one.worker_ids}
        self.loaded &= lasting

    @rule(pipeline_id=pipelines)
    def drop(self, pipeline_id: PipelineId) -> None:
        placed = self.fleet.placed(pipeline_id)
        self.fleet.drop(pipeline_id)
        if placed is not None:
            self.loaded -= set(placed.placement.worker_ids)

    @rule(worker_id=workers, incarnation=incarnations, pipeline_id=pipelines, age=st.integers(0, 1))
    def load(self, worker_id: WorkerId, incarnation: int, pipeline_id: PipelineId, age: int) -> None:
        is_loading = self.fleet.state(worker_id) is WorkerState.LOADING
        placed, found = self.fleet.placed(pipeline_id), self.fleet.get(worker_id)
        epoch = 0 if placed is None else placed.epoch - age
        is_complete = self.fleet.shard_loaded(worker_id, incarnation, pipeline_id, epoch)
        is_its_own = found is not None and found.pipeline_id == pipeline_id
        if is_loading and is_its_own and age == 0 and self.living.get(worker_id) == incarnation:
            self.loaded.add(worker_id)
            assert is_complete == self.fleet.is_ready(pipeline_id)
        else:
            assert not is_complete

    @invariant()
    def holds(self) -> None:
        self.fleet.check_invariants()
        assert {member.worker_id: member.incarnation for member in self.fleet.members()} == self.living
        for placement in self.fleet.placements:
            assert self.fleet.is_ready(placement.pipeline_id) == (set(placement.worker_ids) <= self.loaded)


TestFleetEvents = FleetMachine.TestCase
TestFleetEvents.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
