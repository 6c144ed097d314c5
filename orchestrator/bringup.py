"""Carries placements out: shards loaded, links opened, the pipeline given to the engine, and taken from it.

Sends commands to workers and sets the routes of the hub. Which placement is in force, and what follows from a worker that
is slow or lost, is decided by `control`, its only caller; it reads the fleet and changes nothing of it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping

from modelstore.manifest import Manifest
from orchestrator.core.fleet import Fleet, Placed, WorkerState
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.placement import Placement
from orchestrator.core.replacement import Arrival
from orchestrator.engine import Engine
from orchestrator.flow import FlowHub
from orchestrator.pipeline import Pipeline, StageMember
from orchestrator.shards import load_command
from orchestrator.worker_session import WorkerSession
from shoal.config import OrchestratorConfig
from shoal.errors import ShoalError
from shoal.types import DeviceProfile, PipelineId, WorkerId
from shoal.v1 import fleet_pb2

logger = logging.getLogger(__name__)

# Downloading and loading a shard, over the slowest link that makes sense.
LOAD_TIMEOUT_S = 300.0


class Bringup:
    """Pipelines on their way up.

    Invariants: the hub has a route exactly for each pipeline that was told to load and has not ended; of these, the engine
    has those that are loaded and linked, the others have a deadline.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        manifest: Manifest,
        fleet: Fleet,
        sessions: Mapping[WorkerId, WorkerSession],
        hub: FlowHub,
        engine: Engine,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._fleet = fleet
        self._sessions = sessions
        self._hub = hub
        self._engine = engine
        self._deadlines: dict[PipelineId, float] = {}

    def load(self, placed: Placed, now: float) -> None:
        """Tell every worker of a placement its shard."""
        placement = placed.placement
        self._deadlines[placement.pipeline_id] = now + LOAD_TIMEOUT_S
        self._hub.routes[placement.pipeline_id] = placement.worker_ids
        token = secrets.token_bytes(16)
        for index in range(len(placement.stages)):
            self._tell(placement, index, placed.epoch, token)

    def load_ahead(self, arrival: Arrival) -> int:
        """Tell the worker of a stage to load it before its placement is in force; returns the epoch of this by itself.

        A worker that has a stage loaded goes over to a later epoch of the same pipeline without loading it again.
        """
        epoch = self._fleet.new_epoch()
        self._tell(arrival.placement, arrival.index, epoch, secrets.token_bytes(16))
        return epoch

    def _tell(self, placement: Placement, index: int, epoch: int, token: bytes) -> None:
        stage = placement.stages[index]
        session = self._sessions[stage.worker_id]
        session.link_to_next = ""
        stages = [_address(self._sessions[worker_id].hello) for worker_id in placement.worker_ids]
        command = load_command(self._manifest, placement, index, epoch=epoch, stages=stages, link_token=token)
        session.load(command)
        logger.info(
            "placed worker=%s layers=%s pipeline=%s epoch=%d",
            stage.worker_id, stage.layers, placement.pipeline_id, epoch,
        )  # fmt: skip

    def unload_others(self, keeping: Collection[WorkerId] = ()) -> None:
        """Tell those that are in no placement, nor among those to keep theirs, that they need hold no layers."""
        for member in self._fleet.members():
            if member.stage is None and member.worker_id not in keeping:
                # No shard is of a later epoch.
                self._sessions[member.worker_id].unload(self._fleet.epoch)

    def open_links(self, pipeline_id: PipelineId, epoch: int) -> None:
        """Tell the stages, all of which are loaded, to reach for each other."""
        for worker_id in self._hub.routes[pipeline_id]:
            self._sessions[worker_id].send(open_links=fleet_pb2.OpenLinks(pipeline_id=pipeline_id, epoch=epoch))

    def serve_if_linked(self, pipeline_id: PipelineId) -> bool:
        """Give the engine a pipeline whose stages are all loaded and linked; True if it was done now."""
        placed = self._fleet.placed(pipeline_id)
        if placed is None or pipeline_id not in self._deadlines or not self._fleet.is_ready(pipeline_id):
            return False
        placement = placed.placement
        if not all(self._sessions[worker_id].link_to_next for worker_id in placement.worker_ids):
            return False
        del self._deadlines[pipeline_id]
        profiles = [self._profile(worker_id) for worker_id in placement.worker_ids]
        # The most impatient device speaks for its pipeline.
        fallback_s = min(profile.fallback_timeout_ms for profile in profiles) / 1e3
        self._engine.pipeline_up(self._pipeline(placed, profiles), fallback_s)
        logger.info(
            "serving pipeline=%s epoch=%d mode=%s stages=%d context=%d",
            pipeline_id, placed.epoch, placement.mode.value, len(placement.stages), placement.context_tokens,
        )  # fmt: skip
        return True

    def end(self, pipeline_id: PipelineId, error: ShoalError, *, is_final: bool = False) -> None:
        """Serve with a pipeline no more; its answers wait for another one, unless there will be none."""
        self._deadlines.pop(pipeline_id, None)
        self._hub.routes.pop(pipeline_id, None)
        self._engine.pipeline_down(pipeline_id, error, is_final=is_final)

    def overdue(self, now: float) -> dict[PipelineId, list[WorkerId]]:
        """The pipelines that were told to load long ago, and those of their workers that neither did nor said why not."""
        late = [pipeline_id for pipeline_id, deadline in self._deadlines.items() if deadline <= now]
        return {pipeline_id: self._waited_for(pipeline_id) for pipeline_id in late}

    def _waited_for(self, pipeline_id: PipelineId) -> list[WorkerId]:
        worker_ids = self._hub.routes[pipeline_id]
        loading = [one for one in worker_ids if self._fleet.state(one) is WorkerState.LOADING]
        # Nobody is told to link before all have loaded.
        return loading or [one for one in worker_ids if not self._sessions[one].link_to_next]

    def _profile(self, worker_id: WorkerId) -> DeviceProfile:
        member = self._fleet.get(worker_id)
        assert member is not None, f"{worker_id} is a stage and no member"
        return member.profile

    def _fingerprint(self, worker_id: WorkerId) -> str:
        return self._sessions[worker_id].hello.runtime.kernel_fingerprint

    def _pipeline(self, placed: Placed, profiles: list[DeviceProfile]) -> Pipeline:
        placement = placed.placement
        first = placement.worker_ids[0]
        members = [
            StageMember(stage.worker_id, profile.name, stage.layers, self._fingerprint(stage.worker_id))
            for stage, profile in zip(placement.stages, profiles, strict=True)
        ]
        return Pipeline(
            placement.pipeline_id,
            placed.epoch,
            members,
            self._limits(placement, profiles),
            lambda frame: self._hub.send(first, frame),
        )

    def _limits(self, placement: Placement, profiles: list[DeviceProfile]) -> SchedulerLimits:
        num_layers = self._manifest.config.num_layers
        costs = (
            len(stage.layers) / num_layers / profile.speed
            for stage, profile in zip(placement.stages, profiles, strict=True)
        )
        return SchedulerLimits(
            num_stages=len(placement.stages),
            num_slots=placement.slots,
            kv_tokens=placement.kv_tokens,
            context_tokens=placement.context_tokens,
            max_batch=min(profile.max_batch for profile in profiles),
            chunk_tokens=self._config.chunk_tokens,
            max_waiting=self._config.max_waiting,
            burst_steps=self._config.burst_steps,
            mode=placement.mode,
            stage_costs=tuple(costs),
            attention_tokens=self._manifest.config.attention_tokens,
            # A prompt that one stage has to compute, all have to.
            keeps_blocks=all(profile.host_kv_bytes > 0 for profile in profiles),
            chunk_border=self._manifest.config.chunk_border,
        )


def _address(hello: fleet_pb2.Hello) -> fleet_pb2.StageAddress:
    return fleet_pb2.StageAddress(
        worker_id=hello.worker_id, flow_address=hello.flow_address, socket_address=hello.socket_address
    )
