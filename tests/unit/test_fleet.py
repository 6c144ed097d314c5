"""Membership: leases, ghosts, epochs, and when a pipeline is complete."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.core.fleet import TRANSITIONS, Fleet, WorkerState
from shoal.errors import InternalError
from shoal.types import Telemetry, WorkerId
from tests.support.builders import make_placement, make_profile

LEASE_S = 3.0
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def make_fleet(*worker_ids: WorkerId, now: float = 0.0) -> Fleet:
    """These workers have attached as incarnation 1 and beaten once."""
    fleet = Fleet(lease_s=LEASE_S)
    for worker_id in worker_ids:
        fleet.attach(worker_id, 1, make_profile(), now)
        assert fleet.heartbeat(worker_id, 1, Telemetry(), now)
    return fleet


def make_ready_fleet(*worker_ids: WorkerId) -> Fleet:
    fleet = make_fleet(*worker_ids)
    epoch = fleet.assign(make_placement(*worker_ids))
    for worker_id in worker_ids:
        fleet.shard_loaded(worker_id, 1, epoch)
    assert fleet.is_ready
    return fleet


class TestLeases:
    def test_a_stall_of_our_own_is_not_held_against_anybody(self) -> None:
        fleet = Fleet(lease_s=3.0)
        fleet.attach(A, 1, make_profile(), 0.0)

        fleet.extend_leases(5.0)

        assert fleet.expire(7.9) == ()
        assert fleet.expire(8.0) == (A,)

    def test_a_worker_joins_and_is_on_standby_after_its_first_heartbeat(self) -> None:
        fleet = Fleet(lease_s=LEASE_S)
        assert fleet.attach(A, 1, make_profile(), 0.0) is None
        assert fleet.state(A) is WorkerState.JOINING
        fleet.heartbeat(A, 1, Telemetry(), 1.0)
        assert fleet.state(A) is WorkerState.STANDBY

    def test_a_silent_worker_is_gone_when_its_lease_ends(self) -> None:
        fleet = make_fleet(A, B)
        fleet.heartbeat(B, 1, Telemetry(), 2.0)
        assert fleet.expire(2.9) == ()
        assert fleet.expire(3.0) == (A,)
        assert (fleet.state(A), fleet.state(B)) == (WorkerState.GONE, WorkerState.STANDBY)

    def test_each_heartbeat_renews_the_lease(self) -> None:
        fleet = make_fleet(A)
        fleet.heartbeat(A, 1, Telemetry(), 2.5)
        assert fleet.expire(5.4) == ()
        assert fleet.expire(5.5) == (A,)

    def test_a_heartbeat_brings_telemetry(self) -> None:
        fleet = make_fleet(A)
        fleet.heartbeat(A, 1, Telemetry(rss_bytes=7), 1.0)
        assert fleet.members()[0].telemetry.rss_bytes == 7

    def test_a_heartbeat_of_a_stranger_is_refused(self) -> None:
        assert not make_fleet().heartbeat(A, 1, Telemetry(), 0.0)

    def test_a_worker_whose_lease_ended_has_to_attach_again(self) -> None:
        fleet = make_fleet(A)
        fleet.expire(10.0)
        assert not fleet.heartbeat(A, 1, Telemetry(), 10.0)
        fleet.attach(A, 1, make_profile(), 11.0)
        assert fleet.heartbeat(A, 1, Telemetry(), 11.0)

    def test_a_heartbeat_changes_nothing_of_a_ready_worker_but_lease_and_telemetry(self) -> None:
        fleet = make_ready_fleet(A, B)
        fleet.heartbeat(A, 1, Telemetry(), 2.0)
        assert fleet.is_ready


class TestGhosts:
    def test_a_restarted_worker_replaces_its_ghost(self) -> None:
        fleet = make_fleet(A)
        ghost = fleet.attach(A, 2, make_profile("tablet"), 1.0)
        assert ghost is not None
        assert ghost.incarnation == 1
        (member,) = fleet.members()
        assert (member.incarnation, member.profile.name, member.state) == (2, "tablet", WorkerState.JOINING)

    def test_events_of_a_ghost_are_refused_and_change_nothing(self) -> None:
        fleet = make_fleet(A)
        fleet.attach(A, 2, make_profile(), 1.0)
        epoch = fleet.assign(make_placement("a"))
        before = fleet.members()
        assert not fleet.heartbeat(A, 1, Telemetry(rss_bytes=9), 2.0)
        assert not fleet.shard_loaded(A, 1, epoch)
        assert not fleet.shard_failed(A, 1, epoch)
        assert not fleet.leave(A, 1)
        assert not fleet.detach(A, 1)
        assert fleet.members() == before

    def test_a_restarted_worker_does_not_hold_the_shard_of_its_ghost(self) -> None:
        fleet = make_ready_fleet(A, B)
        fleet.attach(A, 2, make_profile(), 1.0)
        assert not fleet.is_ready
        assert not fleet.shard_loaded(A, 2, fleet.epoch)
        assert not fleet.is_ready
        fleet.check_invariants()


class TestPlacements:
    def test_assigned_workers_load_and_all_others_stand_by(self) -> None:
        fleet = make_fleet(A, B, C)
        assert fleet.assign(make_placement("a", "b")) == 1
        assert [fleet.state(key) for key in (A, B, C)] == [
            WorkerState.LOADING,
            WorkerState.LOADING,
            WorkerState.STANDBY,
        ]
        member = fleet.get(B)
        assert member is not None
        assert (member.stage, str(member.layers)) == (1, "[10, 20)")

    def test_the_last_shard_to_load_completes_the_pipeline(self) -> None:
        fleet = make_fleet(A, B)
        epoch = fleet.assign(make_placement("a", "b"))
        assert not fleet.shard_loaded(B, 1, epoch)
        assert not fleet.is_ready
        assert fleet.shard_loaded(A, 1, epoch)
        assert fleet.is_ready

    def test_a_shard_of_an_earlier_epoch_does_not_count(self) -> None:
        fleet = make_fleet(A)
        stale = fleet.assign(make_placement("a"))
        fresh = fleet.assign(make_placement("a"))
        assert fresh > stale
        assert not fleet.shard_loaded(A, 1, stale)
        assert not fleet.is_ready
        assert fleet.shard_loaded(A, 1, fresh)

    def test_a_shard_reported_twice_completes_nothing_again(self) -> None:
        fleet = make_ready_fleet(A)
        assert not fleet.shard_loaded(A, 1, fleet.epoch)
        assert fleet.is_ready

    def test_a_worker_that_cannot_load_is_on_standby_and_the_pipeline_incomplete(self) -> None:
        fleet = make_fleet(A, B)
        epoch = fleet.assign(make_placement("a", "b"))
        assert fleet.shard_failed(A, 1, epoch)
        assert not fleet.shard_loaded(B, 1, epoch)
        assert fleet.state(A) is WorkerState.STANDBY
        fleet.check_invariants()

    def test_a_failure_of_an_earlier_epoch_does_not_count(self) -> None:
        fleet = make_fleet(A)
        stale = fleet.assign(make_placement("a"))
        fleet.assign(make_placement("a"))
        assert not fleet.shard_failed(A, 1, stale)
        assert fleet.state(A) is WorkerState.LOADING

    def test_a_lost_worker_takes_the_pipeline_down(self) -> None:
        fleet = make_ready_fleet(A, B)
        assert fleet.detach(B, 1)
        assert not fleet.is_ready
        assert fleet.state(A) is WorkerState.READY
        fleet.check_invariants()

    def test_a_worker_on_standby_may_be_lost_without_harm(self) -> None:
        fleet = make_fleet(A, B)
        fleet.shard_loaded(A, 1, fleet.assign(make_placement("a")))
        fleet.detach(B, 1)
        assert fleet.is_ready

    def test_a_draining_worker_is_placed_no_more(self) -> None:
        fleet = make_ready_fleet(A, B)
        assert fleet.leave(A, 1)
        assert fleet.state(A) is WorkerState.DRAINING
        assert [worker_id for worker_id, _ in fleet.placeable()] == ["b"]
        assert not fleet.is_ready

    def test_leaving_twice_is_the_same_as_once(self) -> None:
        fleet = make_fleet(A)
        assert fleet.leave(A, 1)
        assert fleet.leave(A, 1)
        assert fleet.detach(A, 1)

    def test_a_placement_on_a_draining_worker_is_a_bug_that_tells_its_story(self) -> None:
        fleet = make_fleet(A)
        fleet.leave(A, 1)
        with pytest.raises(InternalError, match=r"worker a \(incarnation 1, .* draining .* cannot become loading"):
            fleet.assign(make_placement("a"))

    def test_a_placement_on_a_stranger_is_a_bug(self) -> None:
        with pytest.raises(InternalError, match="worker b is not a member"):
            make_fleet(A).assign(make_placement("b"))

    def test_dissolving_makes_everything_in_force_stale(self) -> None:
        fleet = make_ready_fleet(A, B)
        before = fleet.epoch
        assert fleet.dissolve() == before + 1
        assert (fleet.placement, fleet.is_ready) == (None, False)
        assert {member.state for member in fleet.members()} == {WorkerState.STANDBY}

    def test_members_are_offered_for_placement_in_the_order_they_joined(self) -> None:
        fleet = make_fleet(C, A, B)
        fleet.assign(make_placement("a", "b"))
        fleet.attach(C, 2, make_profile(), 1.0)
        assert [worker_id for worker_id, _ in fleet.placeable()] == ["a", "b", "c"]


def test_the_table_has_every_state_and_lets_each_member_go() -> None:
    assert set(TRANSITIONS) == set(WorkerState)
    for state in set(WorkerState) - {WorkerState.GONE}:
        assert WorkerState.GONE in TRANSITIONS[state]
    assert not TRANSITIONS[WorkerState.GONE]


def test_a_stage_of_another_placement_breaks_an_invariant() -> None:
    fleet = make_ready_fleet(A, B)
    fleet._placement = make_placement("b", "a")
    with pytest.raises(AssertionError):
        fleet.check_invariants()


workers = st.sampled_from((A, B, C))
incarnations = st.integers(1, 3)


class FleetMachine(RuleBasedStateMachine):
    """Any order of events, stale and strange ones included: only those of living incarnations count."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(lease_s=LEASE_S)
        self.living: dict[WorkerId, int] = {}
        self.loaded: set[WorkerId] = set()
        self.now = 0.0

    @rule(worker_id=workers, incarnation=incarnations)
    def attach(self, worker_id: WorkerId, incarnation: int) -> None:
        self.fleet.attach(worker_id, incarnation, make_profile(), self.now)
        self.living[worker_id] = incarnation
        self.loaded.discard(worker_id)

    @rule(worker_id=workers, incarnation=incarnations)
    def heartbeat(self, worker_id: WorkerId, incarnation: int) -> None:
        is_known = self.fleet.heartbeat(worker_id, incarnation, Telemetry(), self.now)
        assert is_known == (self.living.get(worker_id) == incarnation)

    @rule(seconds=st.floats(0.0, 2.0))
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

    @rule(num_stages=st.integers(1, 3))
    def assign(self, num_stages: int) -> None:
        chosen = [worker_id for worker_id, _ in self.fleet.placeable()][:num_stages]
        before = self.fleet.epoch
        epoch = self.fleet.assign(make_placement(*chosen)) if chosen else self.fleet.dissolve()
        assert epoch > before
        self.loaded.clear()

    @rule(worker_id=workers, incarnation=incarnations, age=st.integers(0, 1))
    def load(self, worker_id: WorkerId, incarnation: int, age: int) -> None:
        is_loading = self.fleet.state(worker_id) is WorkerState.LOADING
        is_complete = self.fleet.shard_loaded(worker_id, incarnation, self.fleet.epoch - age)
        if is_loading and age == 0 and self.living.get(worker_id) == incarnation:
            self.loaded.add(worker_id)
            assert is_complete == self.fleet.is_ready
        else:
            assert not is_complete

    @invariant()
    def holds(self) -> None:
        self.fleet.check_invariants()
        assert {member.worker_id: member.incarnation for member in self.fleet.members()} == self.living
        placement = self.fleet.placement
        wanted = set() if placement is None else {stage.worker_id for stage in placement.stages}
        assert self.fleet.is_ready == bool(wanted and wanted == self.loaded)


TestFleetEvents = FleetMachine.TestCase
TestFleetEvents.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
