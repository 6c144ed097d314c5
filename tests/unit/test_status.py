"""What is told of devices and pipelines: made by the orchestrator, read by the client."""

from __future__ import annotations

import time
from dataclasses import replace

from orchestrator.core.fleet import Fleet
from orchestrator.core.limits import Pace
from orchestrator.core.thermal import ThermalMonitor
from orchestrator.engine import Engine
from orchestrator.monitors import Monitors
from orchestrator.pipeline import Pipeline, StageMember
from orchestrator.prefetching import Prefetch
from orchestrator.status import cordoned_devices, device_status, pipeline_statuses, waiting_for
from orchestrator.status import fleet_status as fleet_status_of
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.status import FleetStatus, status_from_proto
from shoal.types import DeviceLimits, DeviceMode, LayerRange, PipelineId, Telemetry, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2, types_pb2
from tests.support.builders import make_limits, make_placement, make_profile, make_sequence

P1, P2 = PipelineId("p1"), PipelineId("p2")
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
PROFILE = replace(make_profile(), mode=DeviceMode.LATENCY, max_batch=8, limits=DeviceLimits(moderate_c=60.0))


class Scene:
    """a and b are p1, c is p2, kept for latency; both serve unless told otherwise."""

    def __init__(self, *serving: PipelineId) -> None:
        self.fleet = Fleet(lease_s=3.0)
        self.engine = Engine()
        for worker_id in (A, B, C):
            self.fleet.attach(worker_id, 1, PROFILE, 0.0)
        begun = self.fleet.assign([make_placement("a", "b"), replace(make_placement("c"), pipeline_id=P2)])
        for placed in begun:
            pipeline_id = placed.placement.pipeline_id
            for worker_id in placed.placement.worker_ids:
                self.fleet.shard_loaded(worker_id, 1, pipeline_id, placed.epoch)
            if pipeline_id in (serving or (P1, P2)):
                members = [StageMember(stage.worker_id, "phone", stage.layers) for stage in placed.placement.stages]
                limits = replace(make_limits(num_stages=len(members)), mode=placed.placement.mode)
                self.engine.pipeline_up(
                    Pipeline(pipeline_id, placed.epoch, members, limits, lambda frame: None), fallback_s=0.2
                )

    def device(self, worker_id: WorkerId, telemetry: Telemetry | None = None) -> admin_pb2.DeviceStatus:
        session = WorkerSession(fleet_pb2.Hello(worker_id=worker_id, profile=messages.profile_to_proto(PROFILE)))
        session.link_to_next = "socket"
        monitor = ThermalMonitor(PROFILE.limits, PROFILE.max_batch)
        if telemetry is not None:
            self.fleet.heartbeat(worker_id, 1, telemetry, 0.0)
            monitor.observe(telemetry, 0.0)
        member = self.fleet.get(worker_id)
        assert member is not None
        return device_status(member, member.state.value, session, monitor, self.engine, Prefetch())


def fleet_status(*pipelines: str, devices: dict[str, str]) -> FleetStatus:
    """A status with these pipelines; devices: worker -> the pipeline it is a stage of, empty for none."""
    layers = types_pb2.LayerRange(start=0, stop=4)
    message = admin_pb2.GetStatusResponse(
        ready=bool(pipelines),
        pipelines=[admin_pb2.PipelineStatus(pipeline_id=pipeline_id) for pipeline_id in pipelines],
        devices=[
            admin_pb2.DeviceStatus(worker_id=one, pipeline_id=part_of, layers=layers if part_of else None)
            for one, part_of in devices.items()
        ],
    )
    return status_from_proto(message)


async def test_each_pipeline_is_told_with_its_own_load_and_workers() -> None:
    scene = Scene()
    scene.engine.submit(make_sequence(1))
    lanes = {one: scene.engine.lane(one) for one in (P1, P2)}
    (busy,) = [one for one, lane in lanes.items() if lane is not None and lane.scheduler.num_running]

    told = {one.pipeline_id: one for one in pipeline_statuses(scene.fleet, scene.engine)}

    assert list(told) == ["p1", "p2"]
    assert (list(told["p1"].worker_ids), list(told["p2"].worker_ids)) == (["a", "b"], ["c"])
    assert {one: (pipeline.num_running, pipeline.used_slots) for one, pipeline in told.items()} == {
        one: (1, 1) if one == busy else (0, 0) for one in told
    }
    assert told["p1"].epoch != told["p2"].epoch


def test_a_device_that_is_late_is_suspect_and_one_whose_layers_are_moved_drains() -> None:
    scene = Scene()
    monitors = Monitors(scene.fleet, scene.engine)
    sessions = {one: WorkerSession(fleet_pb2.Hello(worker_id=one)) for one in (A, B, C)}
    now = time.monotonic()
    for worker_id, beaten_at in ((A, now - 2.0), (B, now), (C, now)):
        monitors.add(worker_id, PROFILE)
        scene.fleet.heartbeat(worker_id, 1, Telemetry(), beaten_at)

    told = fleet_status_of(
        scene.fleet, scene.engine, sessions, monitors, [C], lambda _: Prefetch(), model="tiny", trouble="", uptime_s=1.0
    )

    assert [(one.worker_id, one.state) for one in told.devices] == [("a", "suspect"), ("b", "ready"), ("c", "draining")]


def test_what_a_fleet_waits_for_is_told_in_the_order_in_which_it_comes() -> None:
    fleet = Fleet(lease_s=3.0)
    assert waiting_for(fleet.members(), 1) == "0 of 1 devices have joined"
    assert "no device has joined" in waiting_for(fleet.members(), 0)

    linking = Scene()
    fleet.attach(A, 1, PROFILE, 0.0)
    assert waiting_for(fleet.members(), 2) == "1 of 2 devices have joined"
    assert waiting_for(fleet.members(), 1) == "layers are loaded by a"
    assert waiting_for(linking.fleet.members(), 3) == "devices open links to each other"


def make_members(*cordoned: WorkerId) -> Fleet:
    """a and b stand by, some of them cordoned."""
    fleet = Fleet(lease_s=3.0, cordoned=cordoned)
    for worker_id in (B, A):
        fleet.attach(worker_id, 1, PROFILE, 0.0)
    return fleet


def test_devices_that_are_cordoned_are_named_with_what_would_help() -> None:
    both, one = make_members(A, B).members(), make_members(B).members()

    assert waiting_for(both, 0) == (
        "no device may be given layers; a, b are cordoned: `shoal uncordon a` would let one of them be given layers"
    )
    assert waiting_for(one, 0) == (
        "layers are loaded by a; b is cordoned: `shoal uncordon b` would let it be given layers"
    )
    assert waiting_for(one, 0, "w9 was lost").startswith("w9 was lost; b is cordoned")
    assert waiting_for(one, 3).startswith("2 of 3 devices have joined; b is cordoned")


def test_who_is_cordoned_and_computes_is_not_in_the_way() -> None:
    scene = Scene()
    scene.fleet.cordon(A, True)

    assert cordoned_devices(scene.fleet.members()) == ""


def test_a_pipeline_that_does_not_serve_yet_is_not_told() -> None:
    scene = Scene(P2)

    assert [one.pipeline_id for one in pipeline_statuses(scene.fleet, scene.engine)] == ["p2"]


def test_the_limits_in_force_are_told() -> None:
    scene = Scene()

    scene.engine.set_pace(P1, Pace(max_batch=4, steps_per_s=6.0))
    told, _ = pipeline_statuses(scene.fleet, scene.engine)

    assert (told.max_batch, told.steps_per_s) == (4, 6.0)


def test_a_device_is_told_with_its_part_and_its_heat() -> None:
    told = Scene().device(C, Telemetry(temperature_c=61.5))

    assert (told.pipeline_id, told.state, told.link_to_next) == ("p2", "ready", "socket")
    assert (told.thermal_state, told.thermal_cause, told.max_batch, told.steps_per_s) == ("moderate", "61.5 C", 6, 12.0)


def test_a_device_on_standby_has_no_part_and_no_link() -> None:
    scene = Scene()
    scene.fleet.drop(P2)

    told = scene.device(C)

    assert (told.state, told.pipeline_id, told.link_to_next) == ("standby", "", "")
    assert messages.layers_from_proto(told.layers) is None


def test_what_is_told_is_what_the_client_reads() -> None:
    scene = Scene()
    message = admin_pb2.GetStatusResponse(
        ready=True,
        devices=[scene.device(A, Telemetry(temperature_c=61.5, battery_percent=80.0)), scene.device(B)],
        pipelines=pipeline_statuses(scene.fleet, scene.engine),
    )

    status = status_from_proto(message)

    assert [(one.pipeline_id, one.mode, one.worker_ids) for one in status.pipelines] == [
        ("p1", "mixed", ("a", "b")),
        ("p2", "mixed", ("c",)),
    ]
    device = status.devices[0]
    assert (device.mode, device.pipeline_id, device.layers) == ("latency", "p1", LayerRange(0, 10))
    assert (device.thermal_state, device.max_batch, device.telemetry.battery_percent) == ("moderate", 6, 80.0)


def test_who_knows_of_one_pipeline_gets_the_first() -> None:
    assert fleet_status(devices={}).pipeline is None
    first = fleet_status("p2", "p1", devices={}).pipeline
    assert first is not None
    assert first.pipeline_id == "p2"


def test_a_fleet_is_complete_when_all_its_pipelines_serve() -> None:
    assert fleet_status("p1", "p2", devices={"a": "p1", "b": "p2"}).is_complete
    assert not fleet_status("p1", devices={"a": "p1", "b": "p2"}).is_complete


def test_devices_on_standby_are_not_missed() -> None:
    assert fleet_status("p1", devices={"a": "p1", "b": ""}).is_complete


def test_a_fleet_that_serves_nothing_is_not_complete() -> None:
    assert not fleet_status(devices={"a": ""}).is_complete
