"""What the compute thread is told to do, and what it tells the agent. Plain values; what becomes of them is `compute`'s."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.v1 import flow_pb2
from worker.filling import RestoreReady
from worker.inbox import SocketClosed
from worker.kv.fetches import BlocksFetched
from worker.links import Link
from worker.probing import EchoCame, SendEcho
from worker.profiling import MeasureShape, ShapeMeasured
from worker.stage import StageSpec


@dataclass(frozen=True, slots=True)
class LoadStage:
    spec: StageSpec
    graph: bytes
    blob_dir: Path


@dataclass(frozen=True, slots=True)
class ConnectStage:
    """Links by the stage they lead to; a stage without one is reached through the orchestrator."""

    pipeline_id: str
    epoch: int
    links: dict[int, Link]


@dataclass(frozen=True, slots=True)
class SuspendStage:
    """The stage's epoch is over: it holds what it holds, for the same shard may be asked for again."""

    pipeline_id: str


@dataclass(frozen=True, slots=True)
class UnloadStage:
    pipeline_id: str


@dataclass(frozen=True, slots=True)
class AdoptSocket:
    """A link that another stage of a pipeline opened."""

    pipeline_id: str
    connection: socket.socket


@dataclass(frozen=True, slots=True)
class SetUplink:
    """The link to the orchestrator, None while there is none, and the socket to read it from, if we have to."""

    link: Link | None
    connection: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class SetHeat:
    """Whether the device is hot."""

    is_hot: bool


@dataclass(frozen=True, slots=True)
class KeepUp:
    """Do a unit of what the block cache has to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write what running sequences have computed since, as far as there is room."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = (
    LoadStage
    | ConnectStage
    | SuspendStage
    | UnloadStage
    | AdoptSocket
    | SetUplink
    | SetHeat
    | BlocksFetched
    | RestoreReady
    | MeasureShape
    | SendEcho
    | KeepUp
    | Checkpoint
    | Stop
)
Item = Command | flow_pb2.Frame | SocketClosed


@dataclass(frozen=True, slots=True)
class StageLoaded:
    spec: StageSpec
    execution_provider: str


@dataclass(frozen=True, slots=True)
class StageFailed:
    spec: StageSpec
    error: ShoalError


@dataclass(frozen=True, slots=True)
class LinkBroke:
    spec: StageSpec
    message: str


Event = StageLoaded | StageFailed | LinkBroke | SocketClosed | ShapeMeasured | EchoCame
