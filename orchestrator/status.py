"""What `shoal status` shows of devices and pipelines, as messages.

Reads fleet, sessions, thermal monitors and the engine; changes nothing. Called by `control`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version

from orchestrator.core.fleet import Fleet, Member, WorkerState
from orchestrator.core.thermal import ThermalMonitor
from orchestrator.engine import Engine
from orchestrator.lane import Lane
from orchestrator.monitors import Monitors
from orchestrator.prefetching import Prefetch
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.types import WorkerId
from shoal.v1 import admin_pb2

# In place of its state: it has missed heartbeats.
SUSPECT = "suspect"


def waiting_for(members: Sequence[Member], num_expected: int, trouble: str = "") -> str:
    """What keeps a fleet from serving, and who is cordoned, for that may be why.

    num_expected: devices without which none is given layers. trouble: what went wrong; empty: nothing did.
    """
    what, cordoned = trouble or _awaited(members, num_expected), cordoned_devices(members)
    return f"{what}; {cordoned}" if cordoned else what


def cordoned_devices(members: Sequence[Member]) -> str:
    """Say which devices hold nothing and may not be given layers, and what would help; empty if there are none."""
    names = sorted(one.worker_id for one in members if _is_kept_out(one))
    if not names:
        return ""
    are, them = ("is", "it") if len(names) == 1 else ("are", "one of them")
    return f"{', '.join(names)} {are} cordoned: `shoal uncordon {names[0]}` would let {them} be given layers"


def _is_kept_out(member: Member) -> bool:
    return member.is_cordoned and member.stage is None


def _awaited(members: Sequence[Member], num_expected: int) -> str:
    if len(members) < num_expected:
        return f"{len(members)} of {num_expected} devices have joined"
    if not members:
        return "no device has joined: start one with `shoal worker --join HOST:PORT`"
    if all(_is_kept_out(one) for one in members):
        return "no device may be given layers"
    members = [one for one in members if not _is_kept_out(one)]
    loading = [one.worker_id for one in members if one.state is not WorkerState.READY]
    return f"layers are loaded by {', '.join(loading)}" if loading else "devices open links to each other"


def fleet_status(
    fleet: Fleet,
    engine: Engine,
    sessions: Mapping[WorkerId, WorkerSession],
    monitors: Monitors,
    relieving: Collection[WorkerId],
    prefetch_of: Callable[[WorkerId], Prefetch],
    *,
    model: str,
    trouble: str,
    uptime_s: float,
) -> admin_pb2.GetStatusResponse:
    """The whole of it. relieving: those whose layers are being moved elsewhere. trouble: why no pipeline is up."""
    now = time.monotonic()

    def state(member: Member) -> str:
        if fleet.is_suspect(member.worker_id, now):
            return SUSPECT
        return (WorkerState.DRAINING if member.worker_id in relieving else member.state).value

    members = sorted(fleet.members(), key=lambda one: one.worker_id)
    return admin_pb2.GetStatusResponse(
        version=version("shoal"),
        model=model,
        ready=bool(engine.pipelines),
        waiting_for=trouble,
        devices=[
            device_status(
                one,
                state(one),
                sessions[one.worker_id],
                monitors[one.worker_id],
                engine,
                prefetch_of(one.worker_id),
            )
            for one in members
        ],
        pipelines=pipeline_statuses(fleet, engine),
        num_running=engine.num_running,
        num_waiting=engine.num_waiting,
        uptime_s=uptime_s,
        departed=[
            admin_pb2.DepartedDevice(worker_id=one.worker_id, why=one.why, ago_s=now - one.at, has_left=one.is_orderly)
            for one in monitors.departures.recent(now)
        ],
    )


def pipeline_statuses(fleet: Fleet, engine: Engine) -> list[admin_pb2.PipelineStatus]:
    """Of the pipelines that serve, in the order of the placements in force."""
    lanes = (engine.lane(placement.pipeline_id) for placement in fleet.placements)
    now = time.monotonic()
    return [_pipeline_status(lane, now) for lane in lanes if lane is not None]


def _pipeline_status(lane: Lane, now: float) -> admin_pb2.PipelineStatus:
    pipeline, scheduler = lane.pipeline, lane.scheduler
    return admin_pb2.PipelineStatus(
        pipeline_id=pipeline.pipeline_id,
        epoch=pipeline.epoch,
        mode=pipeline.mode.value,
        worker_ids=[member.worker_id for member in pipeline.members],
        num_slots=pipeline.limits.num_slots,
        used_slots=scheduler.used_slots,
        kv_tokens=pipeline.limits.kv_tokens,
        used_kv_tokens=scheduler.used_kv_tokens,
        context_tokens=pipeline.limits.context_tokens,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        max_batch=scheduler.pace.max_batch,
        steps_per_s=scheduler.pace.steps_per_s,
        decode_tokens_per_s=lane.decode_rate.per_second(now),
        prefill_tokens_per_s=lane.prefill_rate.per_second(now),
        hop_ms=pipeline.hop_ms(),
        completion_tokens_total=lane.decode_rate.total,
        prompt_tokens_total=lane.prefill_rate.total,
    )


def device_status(
    member: Member, state: str, session: WorkerSession, monitor: ThermalMonitor, engine: Engine, prefetch: Prefetch
) -> admin_pb2.DeviceStatus:
    """A worker: what it said of itself, what it holds, how it does, and how much its device is spared."""
    pace = monitor.pace()
    return admin_pb2.DeviceStatus(
        worker_id=member.worker_id,
        profile=session.hello.profile,
        runtime=session.hello.runtime,
        state=state,
        pipeline_id=member.pipeline_id or "",
        layers=messages.layers_to_proto(member.layers),
        telemetry=messages.telemetry_to_proto(member.telemetry),
        link_to_next=session.link_to_next if member.stage is not None else "",
        execution_provider=session.execution_provider,
        decode_ms=_decode_ms(member, engine),
        thermal_state=monitor.state.value,
        thermal_cause=monitor.cause,
        max_batch=pace.max_batch,
        steps_per_s=pace.steps_per_s,
        is_cordoned=member.is_cordoned,
        standby_layers=[messages.layers_to_proto(layers) for layers in prefetch.layers],
        prefetch_bytes=prefetch.num_bytes,
        prefetched_bytes=prefetch.fetched_bytes,
    )


def _decode_ms(member: Member, engine: Engine) -> float:
    lane = engine.lane(member.pipeline_id) if member.pipeline_id is not None else None
    if lane is None or member.stage is None:
        return 0.0
    return lane.pipeline.stage_ms(member.stage)
