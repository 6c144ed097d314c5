"""Measuring without its control task: workers speak by hand, and what they are asked is read. Used by unit tests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.figures import FleetFigures, LinkFigures
from orchestrator.core.step_time import StepTiming
from orchestrator.core.tenants import TenantLedger
from orchestrator.lane import Lane
from orchestrator.measuring import Measuring
from orchestrator.pipeline import Pipeline, StageMember
from orchestrator.shape import measure_command
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.types import DeviceProfile, LayerRange, PipelineId, WorkerId
from shoal.v1 import fleet_pb2
from tests.support.builders import make_limits
from tests.support.shards import TinyModel

NOW = 1000.0


def make_profile(**fields: Any) -> DeviceProfile:
    return DeviceProfile(**{"name": "box", "kind": "box", "memory_bytes": 1 << 30, **fields})


def figures_of(links: Mapping[str, tuple[float, float]]) -> list[fleet_pb2.LinkFigures]:
    return [
        fleet_pb2.LinkFigures(worker_id="" if far == "up" else far, rtt_ms=rtt_ms, mbit_s=mbit_s)
        for far, (rtt_ms, mbit_s) in links.items()
    ]


@dataclass
class Desk:
    """Measuring and the workers that it speaks to. busy: those that hold layers. tries: whom each was told to try."""

    tiny: TinyModel
    num_expected: int = 1
    busy: set[str] = field(default_factory=set)
    sessions: dict[str, WorkerSession] = field(default_factory=dict)
    profiles: dict[str, DeviceProfile] = field(default_factory=dict)
    tries: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measuring = Measuring(self.tiny.manifest, lambda one: one not in self.busy, self.num_expected)

    def times(self, layer_s: float = 0.001, **fields: Any) -> fleet_pb2.DeviceTimes:
        command = measure_command(self.tiny.manifest)
        assert command is not None
        defaults = {
            "shape_digest": command.shape_digest,
            "measured_at_s": time.time(),
            "layer": [fleet_pb2.RowsTime(rows=1, seconds=layer_s), fleet_pb2.RowsTime(rows=2, seconds=1.5 * layer_s)],
            "head": [fleet_pb2.RowsTime(rows=1, seconds=0.004)],
            "prefill_token_s": 0.0002,
            "pass_s": 0.0001,
            "free_bytes": 1 << 29,
        }
        return fleet_pb2.DeviceTimes(**{**defaults, **fields})

    def join(
        self,
        worker_id: str,
        *,
        host: str = "",
        machine_id: str = "",
        known: fleet_pb2.DeviceTimes | None = None,
        links: dict[str, tuple[float, float]] | None = None,
        now: float = NOW,
        **profile: Any,
    ) -> None:
        """Attach and link; by default each worker is on a machine of its own."""
        self.profiles[worker_id] = device = make_profile(**profile)
        hello = fleet_pb2.Hello(
            worker_id=worker_id,
            profile=messages.profile_to_proto(device),
            flow_address=f"{host or worker_id}:1",
            socket_address=f"{host or worker_id}:2",
            machine_id=machine_id,
            times=[] if known is None else [known],
            links=figures_of(links or {}),
        )
        self.sessions[worker_id] = WorkerSession(hello)
        self.measuring.take_in(self.sessions[worker_id], device)
        self.measuring.linked(WorkerId(worker_id), now)

    def told(self, worker_id: str) -> list[str]:
        """The kinds of command that a worker got since the last look."""
        return [str(one.WhichOneof("command")) for one in self.commands(worker_id)]

    def commands(self, worker_id: str) -> list[fleet_pb2.AttachResponse]:
        """What a worker was asked for since the last look; trying others is asked of it whenever somebody comes."""
        queue = self.sessions[worker_id]._commands
        commands = [command for command in (queue.get_nowait() for _ in range(queue.qsize())) if command is not None]
        peers = [peer.worker_id for command in commands for peer in command.try_peers.peers]
        self.tries.setdefault(worker_id, []).extend(peers)
        return [command for command in commands if not command.HasField("try_peers")]

    def tell(self, worker_id: str, now: float = NOW, **event: Any) -> bool:
        return self.measuring.on_event(self.sessions[worker_id], fleet_pb2.AttachRequest(**event), now)

    def measured(self, worker_id: str, times: fleet_pb2.DeviceTimes | None = None, now: float = NOW) -> None:
        self.tell(worker_id, now, measured=fleet_pb2.Measured(times=times or self.times()))

    def refuse(self, worker_id: str, reason: str, now: float = NOW) -> None:
        self.tell(worker_id, now, measured=fleet_pb2.Measured(reason=reason, message="no"))

    def probed(self, worker_id: str, now: float = NOW, **links: tuple[float, float]) -> None:
        """links: there and back in ms and Mbit/s, by the far end; `up` is the orchestrator."""
        self.tell(worker_id, now, links_probed=fleet_pb2.LinksProbed(links=figures_of(links)))

    def awaits(self, worker_id: str, now: float = NOW) -> bool:
        return self.measuring.awaits([(WorkerId(worker_id), self.profiles[worker_id])], now)

    def link(self, source: str | None, target: str | None) -> LinkFigures:
        ends = tuple(None if one is None else WorkerId(one) for one in (source, target))
        return self.figures.link(*ends)

    @property
    def figures(self) -> FleetFigures:
        return self.measuring.figures()


def make_lane(*worker_ids: str) -> Lane:
    """Stages of two layers each; the last one has the head."""
    members = [
        StageMember(WorkerId(worker_id), "box", LayerRange(2 * stage, 2 * stage + 2))
        for stage, worker_id in enumerate(worker_ids)
    ]
    pipeline = Pipeline(PipelineId("p1"), 1, members, make_limits(num_stages=len(members)), lambda frame: None)
    return Lane(pipeline, TenantLedger(), fallback_s=1.0)


def passed(lane: Lane, *stage_s: float, num_rows: int = 2) -> Lane:
    """The lane, as it is when a pass of two rows has come back after these times."""
    lane._timings.append(StepTiming(2.0, stage_s, is_solo=False, num_rows=num_rows))
    return lane
