"""Who is a member of the fleet, who may be routed to, and which placements are in force, each a pipeline.

Leases tell the living from the lost, and those who are only late, incarnations a restarted worker from its ghost, epochs a
placement in force from earlier ones. It neither talks to workers nor chooses placements: the control task feeds it what
happened and asks it what holds now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from orchestrator.core.placement import Placement
from shoal.errors import InternalError
from shoal.types import DeviceProfile, LayerRange, PipelineId, Telemetry, WorkerId


class WorkerState(Enum):
    """Of a worker, as far as routing is concerned.

    JOINING: attached, no heartbeat yet. STANDBY: holds no layers. LOADING: was told to load a shard. READY: holds it.
    DRAINING: accepts no more and is about to leave. GONE: not a member. Being late (`is_suspect`) and being cordoned are no
    states: both come and go in any of these and leave what a worker holds as it is (ADR 19).
    """

    JOINING = "joining"
    STANDBY = "standby"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


_LEAVES = frozenset({WorkerState.DRAINING, WorkerState.GONE})
TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.JOINING: _LEAVES | {WorkerState.STANDBY, WorkerState.LOADING},
    WorkerState.STANDBY: _LEAVES | {WorkerState.STANDBY, WorkerState.LOADING},
    WorkerState.LOADING: _LEAVES | {WorkerState.STANDBY, WorkerState.LOADING, WorkerState.READY},
    WorkerState.READY: _LEAVES | {WorkerState.STANDBY, WorkerState.LOADING},
    WorkerState.DRAINING: frozenset({WorkerState.GONE}),
    WorkerState.GONE: frozenset(),
}
PLACEABLE = frozenset(WorkerState) - _LEAVES
# Of a lease: who has been silent for longer gets nothing new, and loses nothing yet.
SUSPECT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as it is known now.

    lease_expires_at: it may be routed to until then. pipeline_id, stage, layers: in the placement in force; None if it is
    in none. is_cordoned: an operator wants it to be given no layers.
    """

    worker_id: WorkerId
    incarnation: int
    profile: DeviceProfile
    joined_at: float
    lease_expires_at: float
    state: WorkerState = WorkerState.JOINING
    telemetry: Telemetry = field(default_factory=Telemetry)
    pipeline_id: PipelineId | None = None
    stage: int | None = None
    layers: LayerRange | None = None
    is_cordoned: bool = False

    def story(self) -> str:
        return (
            f"worker {self.worker_id} (incarnation {self.incarnation}, joined {self.joined_at}, lease until "
            f"{self.lease_expires_at}) is {self.state.value} with stage {self.stage} of {self.pipeline_id}"
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement in force. epoch: of it alone; no other placement has had or will have the same."""

    placement: Placement
    epoch: int


class Fleet:
    """The members, in the order they joined, and the placements in force.

    Invariants:
    - no member is GONE; LOADING and READY members have a stage, JOINING ones have none;
    - a stage is held by at most one member, the one its placement names, with the placement's layers, and no member is in
      two placements;
    - `_pipeline_of` has exactly the workers that placements in force name, each with its pipeline;
    - epochs of placements in force differ, and none is above `epoch`;
    - a member is cordoned exactly if its name is, which stays so while nobody has the name;
    - is_ready(a pipeline) exactly if its placement is in force and each of its stages is held by a READY member.
    """

    def __init__(self, *, lease_s: float, cordoned: Iterable[WorkerId] = ()) -> None:
        """cordoned: names of devices that are to be given no layers, whenever they come."""
        self.lease_s = lease_s
        self._members: dict[WorkerId, Member] = {}
        self._placed: dict[PipelineId, Placed] = {}
        self._pipeline_of: dict[WorkerId, PipelineId] = {}
        self._cordoned = set(cordoned)
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The highest that was given."""
        return self._epoch

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(one.placement for one in self._placed.values())

    def placed(self, pipeline_id: PipelineId) -> Placed | None:
        return self._placed.get(pipeline_id)

    def is_current(self, pipeline_id: PipelineId, epoch: int) -> bool:
        """Whether what carries this pipeline and epoch is of a placement in force."""
        placed = self._placed.get(pipeline_id)
        return placed is not None and placed.epoch == epoch

    def pipeline_of(self, worker_id: WorkerId) -> PipelineId | None:
        """The pipeline whose placement names a worker, be it a member or lost."""
        return self._pipeline_of.get(worker_id)

    def is_stage(self, worker_id: WorkerId, pipeline_id: PipelineId, epoch: int) -> bool:
        """Whether a worker may speak for a pipeline: it is one of its stages, and the placement is in force."""
        return self.is_current(pipeline_id, epoch) and self.pipeline_of(worker_id) == pipeline_id

    def is_ready(self, pipeline_id: PipelineId) -> bool:
        """Whether a whole pipeline can serve; false as soon as one of its workers drains or is lost."""
        placed = self._placed.get(pipeline_id)
        if placed is None:
            return False
        return all(
            self._holds(stage.worker_id, pipeline_id, index) for index, stage in enumerate(placed.placement.stages)
        )

    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def placeable(self, *, with_cordoned: bool = False) -> tuple[tuple[WorkerId, DeviceProfile], ...]:
        """The members that a placement may use: all that neither drain nor are cordoned, or with those that are."""
        return tuple(
            (one.worker_id, one.profile)
            for one in self._members.values()
            if one.state in PLACEABLE and (with_cordoned or not one.is_cordoned)
        )

    def profiles(self) -> tuple[tuple[WorkerId, DeviceProfile], ...]:
        """All members with what they declare."""
        return tuple((one.worker_id, one.profile) for one in self._members.values())

    def get(self, worker_id: WorkerId) -> Member | None:
        return self._members.get(worker_id)

    def state(self, worker_id: WorkerId) -> WorkerState:
        """GONE for whoever is not a member (any more)."""
        member = self._members.get(worker_id)
        return WorkerState.GONE if member is None else member.state

    def attach(self, worker_id: WorkerId, incarnation: int, profile: DeviceProfile, now: float) -> Member | None:
        """Take a worker in; returns the member of the same name that it replaces, which is fenced from now on."""
        ghost = self._members.pop(worker_id, None)
        is_cordoned = worker_id in self._cordoned
        self._members[worker_id] = Member(
            worker_id, incarnation, profile, now, now + self.lease_s, is_cordoned=is_cordoned
        )
        return ghost

    def cordon(self, worker_id: WorkerId, is_cordoned: bool) -> bool:
        """Have a member given no layers, or let it again; it keeps what it has. False for strangers.

        It holds for the name: who attaches under it later is cordoned too.
        """
        member = self._members.get(worker_id)
        if member is None and worker_id not in self._cordoned:
            return False
        (self._cordoned.add if is_cordoned else self._cordoned.discard)(worker_id)
        if member is not None:
            self._members[worker_id] = replace(member, is_cordoned=is_cordoned)
        return True

    @property
    def cordoned(self) -> frozenset[WorkerId]:
        """All names that are, of members and of others."""
        return frozenset(self._cordoned)

    def is_suspect(self, worker_id: WorkerId, now: float) -> bool:
        """Whether a member has missed heartbeats: its lease runs on, but it may be lost already."""
        member = self._members.get(worker_id)
        return member is not None and member.lease_expires_at - now < self.lease_s * (1 - SUSPECT_SHARE)

    def heartbeat(self, worker_id: WorkerId, incarnation: int, telemetry: Telemetry, now: float) -> bool:
        """Renew a lease; False for strangers and ghosts, who have to attach (again)."""
        member = self._find(worker_id, incarnation)
        if member is None:
            return False
        self._members[worker_id] = replace(member, lease_expires_at=now + self.lease_s, telemetry=telemetry)
        if member.state is WorkerState.JOINING:
            self._move(worker_id, WorkerState.STANDBY)
        return True

    def expire(self, now: float) -> tuple[WorkerId, ...]:
        """Drop the members whose lease ran out, and name them."""
        lost = tuple(one.worker_id for one in self._members.values() if one.lease_expires_at <= now)
        for worker_id in lost:
            self._move(worker_id, WorkerState.GONE)
        return lost

    def extend_leases(self, by_s: float) -> None:
        """Let all leases run longer: for that long, nobody looked at heartbeats."""
        for worker_id, member in self._members.items():
            self._members[worker_id] = replace(member, lease_expires_at=member.lease_expires_at + by_s)

    def leave(self, worker_id: WorkerId, incarnation: int) -> bool:
        """Let a worker drain: it finishes what it has and is placed no more. False for strangers and ghosts."""
        member = self._find(worker_id, incarnation)
        if member is not None and member.state is not WorkerState.DRAINING:
            self._move(worker_id, WorkerState.DRAINING)
        return member is not None

    def detach(self, worker_id: WorkerId, incarnation: int) -> bool:
        """Drop a worker whose stream ended. False for strangers and ghosts: nothing changes for the living."""
        member = self._find(worker_id, incarnation)
        if member is not None:
            self._move(worker_id, WorkerState.GONE)
        return member is not None

    def new_epoch(self) -> int:
        """Take an epoch that no placement has: of a shard that is loaded before its placement is in force."""
        self._epoch += 1
        return self._epoch

    def assign(self, placements: Iterable[Placement]) -> tuple[Placed, ...]:
        """Put exactly these placements in force and return those that were not: their workers are LOADING.

        A placement that is in force already stays so, with its epoch and its workers' states. Who has lost its stage is on
        STANDBY.
        """
        before, self._placed = self._placed, {}
        begun = []
        for placement in placements:
            placed = before.get(placement.pipeline_id)
            if placed is None or placed.placement != placement:
                placed = Placed(placement, self.new_epoch())
                begun.append(placed)
            self._placed[placement.pipeline_id] = placed
        self._pipeline_of = {
            one: placement.pipeline_id for placement in self.placements for one in placement.worker_ids
        }
        for pipeline_id, placed in before.items():
            if self._placed.get(pipeline_id) is not placed:
                self._release(pipeline_id)
        for placed in begun:
            self._give_stages(placed.placement)
        return tuple(begun)

    def drop(self, pipeline_id: PipelineId) -> None:
        """Put a placement out of force: what is still said of it is stale. Its workers are on STANDBY, none is told."""
        placed = self._placed.pop(pipeline_id, None)
        if placed is not None:
            for worker_id in placed.placement.worker_ids:
                del self._pipeline_of[worker_id]
            self._release(pipeline_id)

    def shard_loaded(self, worker_id: WorkerId, incarnation: int, pipeline_id: PipelineId, epoch: int) -> bool:
        """Note that a worker holds its shard; True if its pipeline is complete with it. A stale report is refused."""
        member = self._find_loading(worker_id, incarnation, pipeline_id, epoch)
        if member is None:
            return False
        self._move(worker_id, WorkerState.READY)
        return self.is_ready(pipeline_id)

    def shard_failed(self, worker_id: WorkerId, incarnation: int, pipeline_id: PipelineId, epoch: int) -> bool:
        """Note that a worker could not load its shard; False if the report is stale. It is STANDBY then."""
        member = self._find_loading(worker_id, incarnation, pipeline_id, epoch)
        if member is not None:
            self._take_stage(member)
        return member is not None

    def _holds(self, worker_id: WorkerId, pipeline_id: PipelineId, stage: int) -> bool:
        member = self._members.get(worker_id)
        return (
            member is not None
            and member.state is WorkerState.READY
            and (member.pipeline_id, member.stage) == (pipeline_id, stage)
        )

    def _find(self, worker_id: WorkerId, incarnation: int) -> Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def _find_loading(
        self, worker_id: WorkerId, incarnation: int, pipeline_id: PipelineId, epoch: int
    ) -> Member | None:
        member = self._find(worker_id, incarnation)
        if member is None or member.pipeline_id != pipeline_id or not self.is_current(pipeline_id, epoch):
            return None
        return member if member.state is WorkerState.LOADING else None

    def _give_stages(self, placement: Placement) -> None:
        for index, stage in enumerate(placement.stages):
            member = self._move(stage.worker_id, WorkerState.LOADING)
            self._members[stage.worker_id] = replace(
                member, pipeline_id=placement.pipeline_id, stage=index, layers=stage.layers
            )

    def _release(self, pipeline_id: PipelineId) -> None:
        for member in self.members():
            if member.pipeline_id == pipeline_id:
                self._take_stage(member)

    def _take_stage(self, member: Member) -> None:
        if member.state in PLACEABLE:
            member = self._move(member.worker_id, WorkerState.STANDBY)
        self._members[member.worker_id] = replace(member, pipeline_id=None, stage=None, layers=None)

    def _move(self, worker_id: WorkerId, state: WorkerState) -> Member:
        """Change a member's state; raises InternalError with its story if the table does not allow it."""
        member = self._members.get(worker_id)
        if member is None:
            raise InternalError(f"worker {worker_id} is not a member and cannot become {state.value}")
        if state not in TRANSITIONS[member.state]:
            raise InternalError(f"{member.story()}: cannot become {state.value}")
        if state is WorkerState.GONE:
            return self._members.pop(worker_id)
        self._members[worker_id] = replace(member, state=state)
        return self._members[worker_id]

    def check_invariants(self) -> None:
        for key, member in self._members.items():
            assert key == member.worker_id
            assert member.state is not WorkerState.GONE, member.story()
            assert member.is_cordoned == (key in self._cordoned), member.story()
            if member.state in (WorkerState.LOADING, WorkerState.READY):
                assert member.stage is not None, member.story()
            if member.state in (WorkerState.JOINING, WorkerState.STANDBY):
                assert member.stage is None, member.story()
            assert (member.stage is None) == (member.layers is None) == (member.pipeline_id is None), member.story()
            if member.pipeline_id is not None and member.stage is not None:
                stage = self._placed[member.pipeline_id].placement.stages[member.stage]
                assert (stage.worker_id, stage.layers) == (key, member.layers), member.story()
        named = [stage.worker_id for placement in self.placements for stage in placement.stages]
        assert len(named) == len(set(named)), named
        assert self._pipeline_of.keys() == set(named), self._pipeline_of
        for worker_id, pipeline_id in self._pipeline_of.items():
            assert worker_id in self._placed[pipeline_id].placement.worker_ids, self._pipeline_of
        epochs = [placed.epoch for placed in self._placed.values()]
        assert len(epochs) == len(set(epochs)), epochs
        assert max(epochs, default=0) <= self._epoch
        for pipeline_id, placed in self._placed.items():
            assert pipeline_id == placed.placement.pipeline_id
            ready = {
                one.stage
                for one in self._members.values()
                if one.pipeline_id == pipeline_id and one.state is WorkerState.READY
            }
            assert self.is_ready(pipeline_id) == (ready == set(range(len(placed.placement.stages))))
