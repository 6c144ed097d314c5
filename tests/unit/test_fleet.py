"""Membership: leases, ghosts, epochs, and when each of several pipelines is complete."""

from __future__ import annotations

import pytest

from orchestrator.core.fleet import TRANSITIONS, Fleet, Placed, WorkerState
from shoal.errors import InternalError
from shoal.types import Telemetry
from tests.support.builders import make_profile
from tests.support.members import (
    LEASE_S,
    P1,
    P2,
    A,
    B,
    C,
    D,
    assign,
    load_all,
    make_fleet,
    make_ready_fleet,
    make_two_ready,
    member,
    place_on,
)


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
