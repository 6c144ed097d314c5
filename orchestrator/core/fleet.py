"""Who is a member of the fleet, who may be routed to, and which placement is in force.

Leases tell the living from the lost, incarnations a restarted worker from its ghost, epochs the placement in force from
earlier ones. It neither talks to workers nor chooses placements: the control task feeds it what happened and asks it
what holds now.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from orchestrator.core.placement import Placement
from shoal.errors import InternalError
from shoal.types import DeviceProfile, LayerRange, Telemetry, WorkerId


class WorkerState(Enum):
    """Of a worker, as far as routing is concerned.

    JOINING: attached, no heartbeat yet. STANDBY: holds no layers. LOADING: was told to load a shard. READY: holds it.
    DRAINING: accepts no more and is about to leave. GONE: not a member.
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


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as it is known now.

    lease_expires_at: it may be routed to until then. stage, layers: in the placement in force; None if it has none.
    """

    worker_id: WorkerId
    incarnation: int
    profile: DeviceProfile
    joined_at: float
    lease_expires_at: float
    state: WorkerState = WorkerState.JOINING
    telemetry: Telemetry = field(default_factory=Telemetry)
    stage: int | None = None
    layers: LayerRange | None = None

    def story(self) -> str:
        return (
            f"worker {self.worker_id} (incarnation {self.incarnation}, joined {self.joined_at}, lease until "
            f"{self.lease_expires_at}) is {self.state.value} with stage {self.stage}"
        )


class Fleet:
    """The members, in the order they joined, and the placement in force.

    Invariants:
    - no member is GONE; LOADING and READY members have a stage, JOINING ones have none;
    - a stage is held by at most one member, the one the placement names, with the placement's layers;
    - is_ready exactly if a placement is in force and each of its stages is held by a READY member.
    """

    def __init__(self, *, lease_s: float) -> None:
        self.lease_s = lease_s
        self._members: dict[WorkerId, Member] = {}
        self._placement: Placement | None = None
        self._epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def placement(self) -> Placement | None:
        return self._placement

    @property
    def is_ready(self) -> bool:
        """Whether the whole pipeline can serve; false as soon as one of its workers drains or is lost."""
        if self._placement is None:
            return False
        return all(self._holds(stage.worker_id, index) for index, stage in enumerate(self._placement.stages))

    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def placeable(self) -> tuple[tuple[WorkerId, DeviceProfile], ...]:
        """The members that a placement may use: all that do not drain."""
        return tuple((one.worker_id, one.profile) for one in self._members.values() if one.state in PLACEABLE)

    def get(self, worker_id: WorkerId) -> Member | None:
        return self._members.get(worker_id)

    def state(self, worker_id: WorkerId) -> WorkerState:
        """GONE for whoever is not a member (any more)."""
        member = self._members.get(worker_id)
        return WorkerState.GONE if member is None else member.state

    def attach(self, worker_id: WorkerId, incarnation: int, profile: DeviceProfile, now: float) -> Member | None:
        """Take a worker in; returns the member of the same name that it replaces, which is fenced from now on."""
        ghost = self._members.pop(worker_id, None)
        self._members[worker_id] = Member(worker_id, incarnation, profile, now, now + self.lease_s)
        return ghost

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

    def assign(self, placement: Placement) -> int:
        """Put a placement in force and return its epoch: its workers are LOADING, all others STANDBY."""
        self._begin_epoch(placement)
        for index, stage in enumerate(placement.stages):
            self._move(stage.worker_id, WorkerState.LOADING, stage=index, layers=stage.layers)
        return self._epoch

    def dissolve(self) -> int:
        """Put no placement in force; whatever still runs is stale under the new epoch, which is returned."""
        self._begin_epoch(None)
        return self._epoch

    def shard_loaded(self, worker_id: WorkerId, incarnation: int, epoch: int) -> bool:
        """Note that a worker holds its shard; True if the pipeline is complete with it. A stale report is refused."""
        member = self._find_loading(worker_id, incarnation, epoch)
        if member is None:
            return False
        self._move(worker_id, WorkerState.READY, stage=member.stage, layers=member.layers)
        return self.is_ready

    def shard_failed(self, worker_id: WorkerId, incarnation: int, epoch: int) -> bool:
        """Note that a worker could not load its shard; False if the report is stale. It is STANDBY then."""
        member = self._find_loading(worker_id, incarnation, epoch)
        if member is not None:
            self._move(worker_id, WorkerState.STANDBY)
        return member is not None

    def _holds(self, worker_id: WorkerId, stage: int) -> bool:
        member = self._members.get(worker_id)
        return member is not None and member.state is WorkerState.READY and member.stage == stage

    def _find(self, worker_id: WorkerId, incarnation: int) -> Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def _find_loading(self, worker_id: WorkerId, incarnation: int, epoch: int) -> Member | None:
        member = self._find(worker_id, incarnation) if epoch == self._epoch else None
        return member if member is not None and member.state is WorkerState.LOADING else None

    def _begin_epoch(self, placement: Placement | None) -> None:
        self._epoch += 1
        self._placement = placement
        for member in self.members():
            if member.state in PLACEABLE:
                self._move(member.worker_id, WorkerState.STANDBY)
            else:
                self._members[member.worker_id] = replace(member, stage=None, layers=None)

    def _move(
        self,
        worker_id: WorkerId,
        state: WorkerState,
        *,
        stage: int | None = None,
        layers: LayerRange | None = None,
    ) -> None:
        """Change a member's state; raises InternalError with its story if the table does not allow it."""
        member = self._members.get(worker_id)
        if member is None:
            raise InternalError(f"worker {worker_id} is not a member and cannot become {state.value}")
        if state not in TRANSITIONS[member.state]:
            raise InternalError(f"{member.story()}: cannot become {state.value}")
        if state is WorkerState.GONE:
            del self._members[worker_id]
        elif state is WorkerState.DRAINING:
            self._members[worker_id] = replace(member, state=state)
        else:
            self._members[worker_id] = replace(member, state=state, stage=stage, layers=layers)

    def check_invariants(self) -> None:
        stages = () if self._placement is None else self._placement.stages
        for key, member in self._members.items():
            assert key == member.worker_id
            assert member.state is not WorkerState.GONE, member.story()
            if member.state in (WorkerState.LOADING, WorkerState.READY):
                assert member.stage is not None, member.story()
            if member.state in (WorkerState.JOINING, WorkerState.STANDBY):
                assert member.stage is None, member.story()
            assert (member.stage is None) == (member.layers is None), member.story()
            if member.stage is not None:
                assert stages[member.stage].worker_id == key, member.story()
                assert stages[member.stage].layers == member.layers, member.story()
        ready = {one.stage for one in self._members.values() if one.state is WorkerState.READY}
        assert self.is_ready == (bool(stages) and ready == set(range(len(stages))))
