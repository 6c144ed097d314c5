"""Membership: leases, ghosts, epochs, and when each of several pipelines is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.core.fleet import TRANSITIONS, Fleet, Member, Placed, WorkerState
from orchestrator.core.placement import Placement
from shoal.errors import InternalError
from shoal.types import PipelineId, Telemetry, WorkerId
from tests.support.builders import make_placement, make_profile

LEASE_S = 3.0
A, B, C, D = WorkerId("a"), WorkerId("b"), WorkerId("c"), WorkerId("d")
P1, P2 = PipelineId("p1"), PipelineId("p2")


def place_on(*worker_ids: WorkerId, pipeline_id: PipelineId = P1) -> Placement:
    return replace(make_placement(*worker_ids), pipeline_id=pipeline_id)


def make_fleet(*worker_ids: WorkerId, now: float = 0.0) -> Fleet:
    """These workers have attached as incarnation 1 and beaten once."""
    fleet = Fleet(lease_s=LEASE_S)
    for worker_id in worker_ids:
        fleet.attach(worker_id, 1, make_profile(), now)
        assert fleet.heartbeat(worker_id, 1, Telemetry(), now)
    return fleet


def assign(fleet: Fleet, *placements: Placement) -> list[int]:
    """The epochs of those that were not in force."""
    return [placed.epoch for placed in fleet.assign(placements)]


def load_all(fleet: Fleet, *placements: Placement) -> None:
    """Put these in force, and let all their workers load."""
    for placed in fleet.assign(placements):
        for worker_id in placed.placement.worker_ids:
            fleet.shard_loaded(worker_id, 1, placed.placement.pipeline_id, placed.epoch)
    assert all(fleet.is_ready(placement.pipeline_id) for placement in placements)


def make_ready_fleet(*worker_ids: WorkerId) -> Fleet:
    fleet = make_fleet(*worker_ids)
    load_all(fleet, place_on(*worker_ids))
    return fleet


def make_two_ready() -> Fleet:
    """A and B are p1, C and D p2."""
    fleet = make_fleet(A, B, C, D)
    load_all(fleet, place_on(A, B), place_on(C, D, pipeline_id=P2))
    return fleet


def member(fleet: Fleet, worker_id: WorkerId) -> Member:
    found = fleet.get(worker_id)
    assert found is not None
    return found


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
        assert fleet.is_ready(P1)


class TestGhosts:
    def test_a_restarted_worker_replaces_its_ghost(self) -> None:
        fleet = make_fleet(A)
        ghost = fleet.attach(A, 2, make_profile("tablet"), 1.0)
        assert ghost is not None
        assert ghost.incarnation == 1
        (living,) = fleet.members()
        assert (living.incarnation, living.profile.name, living.state) == (2, "tablet", WorkerState.JOINING)

    def test_events_of_a_ghost_are_refused_and_change_nothing(self) -> None:
        fleet = make_fleet(A)
        fleet.attach(A, 2, make_profile(), 1.0)
        (epoch,) = assign(fleet, place_on(A))
        before = fleet.members()
        assert not fleet.heartbeat(A, 1, Telemetry(rss_bytes=9), 2.0)
        assert not fleet.shard_loaded(A, 1, P1, epoch)
        assert not fleet.shard_failed(A, 1, P1, epoch)
        assert not fleet.leave(A, 1)
        assert not fleet.detach(A, 1)
        assert fleet.members() == before

    def test_a_restarted_worker_does_not_hold_the_shard_of_its_ghost(self) -> None:
        fleet = make_ready_fleet(A, B)
        fleet.attach(A, 2, make_profile(), 1.0)
        assert not fleet.is_ready(P1)
        assert not fleet.shard_loaded(A, 2, P1, fleet.epoch)
        assert not fleet.is_ready(P1)
        fleet.check_invariants()


class TestLateness:
    def test_a_worker_that_misses_heartbeats_is_suspect_before_it_is_lost(self) -> None:
        fleet = make_ready_fleet(A, B)
        fleet.heartbeat(B, 1, Telemetry(), 1.0)

        assert [key for key in (A, B) if fleet.is_suspect(key, 1.6)] == ["a"]
        assert fleet.expire(1.6) == ()

    def test_a_suspect_keeps_what_it_holds_and_is_none_with_its_next_heartbeat(self) -> None:
        fleet = make_ready_fleet(A, B)
        assert (fleet.is_suspect(A, 2.9), fleet.is_ready(P1), fleet.state(A)) == (True, True, WorkerState.READY)

        fleet.heartbeat(A, 1, Telemetry(), 2.9)

        assert not fleet.is_suspect(A, 2.9)

    def test_a_stall_of_our_own_makes_nobody_suspect(self) -> None:
        fleet = make_fleet(A)
        fleet.extend_leases(2.0)
        assert not fleet.is_suspect(A, 3.4)
        assert fleet.is_suspect(A, 3.6)

    def test_a_stranger_is_not_suspect_but_gone(self) -> None:
        assert not make_fleet(A).is_suspect(B, 100.0)


class TestCordons:
    def test_a_cordoned_worker_is_placed_no_more_and_keeps_what_it_computes(self) -> None:
        fleet = make_ready_fleet(A, B)

        assert fleet.cordon(A, True)

        assert [worker_id for worker_id, _ in fleet.placeable()] == ["b"]
        assert (fleet.is_ready(P1), fleet.state(A), member(fleet, A).is_cordoned) == (True, WorkerState.READY, True)
        fleet.check_invariants()

    def test_a_worker_that_is_uncordoned_is_placed_again(self) -> None:
        fleet = make_fleet(A)
        fleet.cordon(A, True)
        assert fleet.cordon(A, False)
        assert [worker_id for worker_id, _ in fleet.placeable()] == ["a"]
        assert fleet.cordoned == frozenset()

    def test_a_cordon_outlives_the_process_that_has_the_name(self) -> None:
        fleet = make_fleet(A)
        fleet.cordon(A, True)
        fleet.detach(A, 1)

        fleet.attach(A, 2, make_profile(), 5.0)

        assert fleet.placeable() == ()
        fleet.check_invariants()

    def test_who_is_gone_can_be_uncordoned_and_a_stranger_cannot_be_cordoned(self) -> None:
        fleet = make_fleet(A)
        fleet.cordon(A, True)
        fleet.detach(A, 1)
        assert fleet.cordon(A, False)
        assert not fleet.cordon(A, False)
        assert not fleet.cordon(B, True)

    def test_a_cordoned_worker_that_holds_its_stage_may_go_on_with_it_in_a_later_epoch(self) -> None:
        fleet = make_ready_fleet(A, B)
        fleet.cordon(A, True)
        fleet.drop(P1)
        load_all(fleet, place_on(A, B))
        fleet.check_invariants()


class TestPlacements:
    def test_assigned_workers_load_and_all_others_stand_by(self) -> None:
        fleet = make_fleet(A, B, C)
        assert assign(fleet, place_on(A, B)) == [1]
        assert [fleet.state(key) for key in (A, B, C)] == [
            WorkerState.LOADING,
            WorkerState.LOADING,
            WorkerState.STANDBY,
        ]
        assert (member(fleet, B).pipeline_id, member(fleet, B).stage, str(member(fleet, B).layers)) == (
            "p1",
            1,
            "[10, 20)",
        )

    def test_the_last_shard_to_load_completes_the_pipeline(self) -> None:
        fleet = make_fleet(A, B)
        (epoch,) = assign(fleet, place_on(A, B))
        assert not fleet.shard_loaded(B, 1, P1, epoch)
        assert not fleet.is_ready(P1)
        assert fleet.shard_loaded(A, 1, P1, epoch)
        assert fleet.is_ready(P1)

    def test_a_shard_of_an_earlier_epoch_does_not_count(self) -> None:
        fleet = make_fleet(A, B)
        (stale,) = assign(fleet, place_on(A, B))
        (fresh,) = assign(fleet, place_on(A))
        assert fresh > stale
        assert not fleet.shard_loaded(A, 1, P1, stale)
        assert not fleet.is_ready(P1)
        assert (member(fleet, B).pipeline_id, member(fleet, B).state) == (None, WorkerState.STANDBY)
        assert fleet.shard_loaded(A, 1, P1, fresh)

    def test_a_shard_reported_twice_completes_nothing_again(self) -> None:
        fleet = make_ready_fleet(A)
        assert not fleet.shard_loaded(A, 1, P1, fleet.epoch)
        assert fleet.is_ready(P1)

    def test_a_worker_that_cannot_load_is_on_standby_and_the_pipeline_incomplete(self) -> None:
        fleet = make_fleet(A, B)
        (epoch,) = assign(fleet, place_on(A, B))
        assert fleet.shard_failed(A, 1, P1, epoch)
        assert not fleet.shard_loaded(B, 1, P1, epoch)
        assert fleet.state(A) is WorkerState.STANDBY
        fleet.check_invariants()

    def test_a_failure_of_an_earlier_epoch_does_not_count(self) -> None:
        fleet = make_fleet(A, B)
        (stale,) = assign(fleet, place_on(A, B))
        assign(fleet, place_on(A))
        assert not fleet.shard_failed(A, 1, P1, stale)
        assert fleet.state(A) is WorkerState.LOADING

    def test_a_lost_worker_takes_the_pipeline_down(self) -> None:
        fleet = make_ready_fleet(A, B)
        assert fleet.detach(B, 1)
        assert not fleet.is_ready(P1)
        assert fleet.state(A) is WorkerState.READY
        fleet.check_invariants()

    def test_a_worker_on_standby_may_be_lost_without_harm(self) -> None:
        fleet = make_fleet(A, B)
        load_all(fleet, place_on(A))
        fleet.detach(B, 1)
        assert fleet.is_ready(P1)

    def test_a_draining_worker_is_placed_no_more(self) -> None:
        fleet = make_ready_fleet(A, B)
        assert fleet.leave(A, 1)
        assert fleet.state(A) is WorkerState.DRAINING
        assert [worker_id for worker_id, _ in fleet.placeable()] == ["b"]
        assert not fleet.is_ready(P1)

    def test_leaving_twice_is_the_same_as_once(self) -> None:
        fleet = make_fleet(A)
        assert fleet.leave(A, 1)
        assert fleet.leave(A, 1)
        assert fleet.detach(A, 1)

    def test_a_placement_on_a_draining_worker_is_a_bug_that_tells_its_story(self) -> None:
        fleet = make_fleet(A)
        fleet.leave(A, 1)
        with pytest.raises(InternalError, match=r"worker a \(incarnation 1, .* draining .* cannot become loading"):
            assign(fleet, place_on(A))

    def test_a_placement_on_a_stranger_is_a_bug(self) -> None:
        with pytest.raises(InternalError, match="worker b is not a member"):
            assign(make_fleet(A), place_on(B))

    def test_a_dropped_placement_is_stale_and_its_workers_stand_by(self) -> None:
        fleet = make_ready_fleet(A, B)
        (epoch,) = [placed.epoch for placed in [fleet.placed(P1)] if placed]
        fleet.drop(P1)
        assert (fleet.placements, fleet.is_ready(P1), fleet.is_current(P1, epoch)) == ((), False, False)
        assert {one.state for one in fleet.members()} == {WorkerState.STANDBY}
        fleet.check_invariants()

    def test_dropping_what_is_not_in_force_changes_nothing(self) -> None:
        fleet = make_ready_fleet(A)
        before = fleet.members()
        fleet.drop(P2)
        assert fleet.members() == before

    def test_members_are_offered_for_placement_in_the_order_they_joined(self) -> None:
        fleet = make_fleet(C, A, B)
        assign(fleet, place_on(A, B))
        fleet.attach(C, 2, make_profile(), 1.0)
        assert [worker_id for worker_id, _ in fleet.placeable()] == ["a", "b", "c"]


class TestSeveralPipelines:
    def test_each_has_an_epoch_of_its_own(self) -> None:
        fleet = make_fleet(A, B)
        first, second = assign(fleet, place_on(A), place_on(B, pipeline_id=P2))
        assert first != second
        assert fleet.is_current(P1, first)
        assert not fleet.is_current(P1, second)

    def test_each_is_complete_by_itself(self) -> None:
        fleet = make_fleet(A, B, C)
        first, second = assign(fleet, place_on(A), place_on(B, C, pipeline_id=P2))
        assert fleet.shard_loaded(A, 1, P1, first)
        assert not fleet.shard_loaded(B, 1, P2, second)
        assert (fleet.is_ready(P1), fleet.is_ready(P2)) == (True, False)

    def test_a_shard_counts_for_the_pipeline_its_worker_is_in_alone(self) -> None:
        fleet = make_fleet(A, B)
        first, second = assign(fleet, place_on(A), place_on(B, pipeline_id=P2))
        assert not fleet.shard_loaded(A, 1, P2, second)
        assert not fleet.shard_loaded(A, 1, P1, second)
        assert not fleet.shard_failed(B, 1, P1, first)
        assert {fleet.state(A), fleet.state(B)} == {WorkerState.LOADING}

    def test_a_lost_worker_leaves_the_other_pipeline_as_it_is(self) -> None:
        fleet = make_two_ready()
        before = fleet.placed(P2)
        fleet.detach(A, 1)
        fleet.drop(P1)
        assert (fleet.is_ready(P1), fleet.is_ready(P2)) == (False, True)
        assert fleet.placed(P2) is before
        assert [fleet.state(key) for key in (A, B, C)] == [WorkerState.GONE, WorkerState.STANDBY, WorkerState.READY]
        fleet.check_invariants()

    def test_a_worker_that_drains_closes_its_pipeline_alone(self) -> None:
        fleet = make_two_ready()
        fleet.leave(D, 1)
        assert (fleet.is_ready(P1), fleet.is_ready(P2)) == (True, False)

    def test_a_placement_that_stays_keeps_its_epoch_and_its_workers_their_shards(self) -> None:
        fleet = make_two_ready()
        kept = fleet.placed(P2)
        fleet.detach(A, 1)
        (fresh,) = assign(fleet, place_on(B), place_on(C, D, pipeline_id=P2))
        assert fleet.placed(P2) is kept
        assert kept is not None
        assert fresh > kept.epoch
        assert (fleet.is_ready(P2), fleet.state(B)) == (True, WorkerState.LOADING)

    def test_a_placement_that_is_not_assigned_again_is_out_of_force(self) -> None:
        fleet = make_two_ready()
        assert assign(fleet, place_on(C, D, pipeline_id=P2)) == []
        assert [one.pipeline_id for one in fleet.placements] == ["p2"]
        assert (fleet.state(A), member(fleet, A).pipeline_id) == (WorkerState.STANDBY, None)
        fleet.check_invariants()

    def test_a_worker_may_go_from_one_pipeline_to_the_other(self) -> None:
        fleet = make_two_ready()
        assert len(assign(fleet, place_on(A), place_on(B, C, D, pipeline_id=P2))) == 2
        assert (member(fleet, B).pipeline_id, member(fleet, B).stage) == ("p2", 0)
        assert {one.state for one in fleet.members()} == {WorkerState.LOADING}
        fleet.check_invariants()

    def test_a_worker_in_two_placements_breaks_an_invariant(self) -> None:
        fleet = make_fleet(A, B)
        assign(fleet, place_on(A, B), place_on(B, pipeline_id=P2))
        with pytest.raises(AssertionError):
            fleet.check_invariants()


def test_the_table_has_every_state_and_lets_each_member_go() -> None:
    assert set(TRANSITIONS) == set(WorkerState)
    for state in set(WorkerState) - {WorkerState.GONE}:
        assert WorkerState.GONE in TRANSITIONS[state]
    assert not TRANSITIONS[WorkerState.GONE]


def test_a_stage_of_another_placement_breaks_an_invariant() -> None:
    fleet = make_ready_fleet(A, B)
    fleet._placed[P1] = Placed(place_on(B, A), 1)
    with pytest.raises(AssertionError):
        fleet.check_invariants()


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
