"""Fleets of workers that attached, loaded and beat as told. Used by the tests of membership."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.fleet import Fleet, Member
from orchestrator.core.placement import Placement
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
