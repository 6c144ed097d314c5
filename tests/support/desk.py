"""A control task that is told by hand what workers say, and the commands that it gives them. Used by contract tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from orchestrator.control import Control
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.config import OrchestratorConfig
from shoal.errors import InternalError
from shoal.types import DeviceLimits, PipelineId, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2
from tests.support.executors import InlineExecutor
from tests.support.fleet import make_device
from tests.support.shards import TinyModel

LIMITS = DeviceLimits(moderate_c=60.0, hot_c=70.0, max_batch=(8, 6, 4, 2))


@dataclass
class Desk:
    """A control task without its loop, the commands that it gave each worker, and the cordons that it kept each time."""

    control: Control
    engine: Engine
    hub: FlowHub
    cordons: list[Collection[WorkerId]]
    sessions: dict[str, WorkerSession] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)

    def join(self, worker_id: str, held: fleet_pb2.HeldShard | None = None, **profile: Any) -> None:
        self.incarnations[worker_id] = self.incarnations.get(worker_id, 0) + 1
        device = make_device(max_batch=8, limits=LIMITS, **profile)
        hello = fleet_pb2.Hello(
            worker_id=worker_id,
            incarnation=self.incarnations[worker_id],
            profile=messages.profile_to_proto(device),
            flow_address=f"{worker_id}:1",
            held=held,
        )
        self.sessions[worker_id] = self.control.take_in(hello)
        self.tell(worker_id, heartbeat=fleet_pb2.Heartbeat())
        self.control.joined(WorkerId(worker_id))
        while self._answer_survey():
            pass

    def _answer_survey(self) -> bool:
        """Let all workers that are asked of themselves say that there is nothing to tell; False if nobody is asked."""
        has_answered = False
        for worker_id, session in list(self.sessions.items()):
            queue = session._commands
            for command in [queue.get_nowait() for _ in range(queue.qsize())]:
                match None if command is None else command.WhichOneof("command"):
                    case "measure":
                        self.tell(worker_id, measured=fleet_pb2.Measured(reason=InternalError.reason))
                    case "probe_links":
                        self.tell(worker_id, links_probed=fleet_pb2.LinksProbed())
                    case _:
                        queue.put_nowait(command)
                        continue
                has_answered = True
        return has_answered

    def tell(self, worker_id: str, **event: Any) -> None:
        self.control.on_event(self.sessions[worker_id], fleet_pb2.AttachRequest(**event))

    def lose(self, worker_id: str) -> None:
        self.control.left(self.sessions.pop(worker_id))

    def commands(self, worker_id: str) -> list[fleet_pb2.AttachResponse]:
        """What the worker has not read yet; a stream that was closed ends them."""
        queue, commands = self.sessions[worker_id]._commands, []
        while not queue.empty():
            command = queue.get_nowait()
            if command is not None:
                commands.append(command)
        return commands

    def is_closed(self, worker_id: str) -> bool:
        queue = self.sessions[worker_id]._commands
        return None in [queue.get_nowait() for _ in range(queue.qsize())]

    def load_command(self, worker_id: str) -> fleet_pb2.LoadShard:
        """The newest; earlier ones were overtaken."""
        return [one.load_shard for one in self.commands(worker_id) if one.HasField("load_shard")][-1]

    def bring_up(self, *worker_ids: str) -> None:
        """Let these, the stages of one pipeline, load and link."""
        shards = {worker_id: self.load_command(worker_id) for worker_id in worker_ids}
        for worker_id, shard in shards.items():
            loaded = fleet_pb2.ShardLoaded(pipeline_id=shard.pipeline_id, epoch=shard.epoch, stage=shard.stage)
            self.tell(worker_id, shard_loaded=loaded)
        for worker_id, shard in shards.items():
            self.link(worker_id, shard.pipeline_id, shard.epoch)

    def link(self, worker_id: str, pipeline_id: str, epoch: int) -> None:
        opened = fleet_pb2.LinksOpened(pipeline_id=pipeline_id, epoch=epoch, link_to_next="socket")
        self.tell(worker_id, links_opened=opened)

    def epoch(self, pipeline_id: PipelineId) -> int:
        return self.engine.pipelines[pipeline_id].epoch

    def serving(self) -> dict[str, list[str]]:
        status = self.control.status()
        return {one.pipeline_id: list(one.worker_ids) for one in status.pipelines}

    def device(self, worker_id: str) -> admin_pb2.DeviceStatus:
        return next(one for one in self.control.status().devices if one.worker_id == worker_id)


def make_desk(
    model: TinyModel, *, executor: Executor | None = None, cordoned: Iterable[WorkerId] = (), **options: Any
) -> Desk:
    """executor: makes plans; without it, they are there at once. cordoned: by an orchestrator before."""
    config = OrchestratorConfig(home=model.store.root, model=model.manifest.name, lease_s=1000.0, **options)
    engine = Engine()
    hub = FlowHub(engine.on_frame, lambda worker_id, message: None)

    async def ignore(_: bool) -> None:
        pass

    cordons: list[Collection[WorkerId]] = []
    control = Control(
        config, model.manifest, hub, engine, ignore, executor or InlineExecutor(), tuple(cordoned), cordons.append
    )
    return Desk(control, engine, hub, cordons)


def held_by(command: fleet_pb2.LoadShard) -> fleet_pb2.HeldShard:
    return fleet_pb2.HeldShard(
        pipeline_id=command.pipeline_id, layers=command.layers, model_digest=command.model_digest, shape=command.shape
    )
