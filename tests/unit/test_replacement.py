"""When other pipelines take the place of those in force, and in which order: for a gain, seldom, and never with a hole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from orchestrator.core.placement import Placement, Stage
from orchestrator.core.replacement import (
    HOLD_S,
    MIN_GAIN,
    Action,
    Change,
    Outlook,
    Replacement,
    Verdict,
    change,
    gap_of,
)
from shoal.types import LayerRange, PipelineId, WorkerId
from tests.support.builders import make_placement

A, B, C, D = WorkerId("a"), WorkerId("b"), WorkerId("c"), WorkerId("d")
ALL = (A, B, C, D)
P1, P2 = PipelineId("p1"), PipelineId("p2")
NUM_LAYERS = 20


def on(*worker_ids: WorkerId, pipeline_id: PipelineId = P1, num_layers: int = NUM_LAYERS) -> Placement:
    """One pipeline of these, with all layers in equal parts."""
    return replace(make_placement(*worker_ids, layers_each=num_layers // len(worker_ids)), pipeline_id=pipeline_id)


def decide(
    in_force: Outlook,
    candidate: Outlook,
    now: float = 1000.0,
    *,
    changed_at: float = 0.0,
    usable: tuple[WorkerId, ...] = ALL,
    spent: tuple[WorkerId, ...] = (),
) -> Verdict:
    replacement = Replacement()
    replacement.changed(changed_at)
    return replacement.decide(in_force, candidate, NUM_LAYERS, now, usable=usable, spent=spent)


OLD, NEW = on(A, B), on(A, C, pipeline_id=P2)


@pytest.mark.parametrize(
    ("in_force", "candidate", "options", "action"),
    [
        (Outlook((OLD,), 1.0), Outlook((OLD,), 1.0), {}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 1.0 - MIN_GAIN + 0.01), {}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 1.0 - MIN_GAIN - 0.01), {}, Action.REPLACE),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 2.0), {}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 0.5), {"changed_at": 1000.0 - HOLD_S + 1.0}, Action.WAIT),
        (Outlook((OLD,), math.inf), Outlook((NEW,), 1.0), {}, Action.REPLACE),
        (Outlook((OLD,), math.inf), Outlook((NEW,), math.inf), {}, Action.KEEP),
        (Outlook((), math.inf), Outlook((NEW,), 1.0), {"changed_at": 999.9}, Action.REPLACE_NOW),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 5.0), {"spent": (B,)}, Action.REPLACE_NOW),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 5.0), {"spent": (B,), "changed_at": 950.0}, Action.WAIT),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 5.0), {"spent": (D,)}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 5.0), {"spent": (A,)}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((OLD, on(C, pipeline_id=P2)), 1.0), {"changed_at": 999.0}, Action.REPLACE),
        (Outlook((OLD,), 1.0), Outlook((NEW,), 0.1), {"usable": (A, B)}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((), 0.0), {}, Action.KEEP),
        (Outlook((OLD,), 1.0), Outlook((on(A, C, num_layers=18),), 0.1), {}, Action.KEEP),
    ],
    ids=[
        "the same", "too little gain", "enough gain", "a loss", "too soon", "what is in force is of no use",
        "neither is of use", "nothing in force", "a spent device is relieved", "a spent device, too soon",
        "a spent device elsewhere", "the spent device stays", "one more beside", "a device that may not be used",
        "no placement", "layers that nobody would hold",
    ],
)  # fmt: skip
def test_placements_change_for_a_gain_or_a_need_and_never_for_a_hole(
    in_force: Outlook, candidate: Outlook, options: dict[str, object], action: Action
) -> None:
    verdict = decide(in_force, candidate, **options)  # type: ignore[arg-type]
    assert verdict.action is action, verdict.why


def test_a_verdict_says_the_gain_and_what_it_is_measured_by() -> None:
    assert decide(Outlook((OLD,), 1.0), Outlook((NEW,), 0.9)).why == "another placement gains 10.0%, less than 15%"


def test_who_has_to_wait_is_told_until_when() -> None:
    verdict = decide(Outlook((OLD,), 1.0), Outlook((NEW,), 0.5), 110.0, changed_at=100.0)
    assert (verdict.action, verdict.at) == (Action.WAIT, 100.0 + HOLD_S)


@pytest.mark.parametrize(
    ("is_idle", "candidate", "action"),
    [(True, NEW, Action.REPLACE), (False, NEW, Action.WAIT), (True, on(B, A, pipeline_id=P2), Action.WAIT)],
    ids=["idle", "busy", "nobody is new"],
)
def test_only_a_device_that_holds_nothing_is_used_soon_after_a_change_and_only_while_nobody_is_served(
    is_idle: bool, candidate: Placement, action: Action
) -> None:
    replacement = Replacement()
    replacement.changed(999.0)

    verdict = replacement.decide(
        Outlook((OLD,), 1.0), Outlook((candidate,), 0.5), NUM_LAYERS, 1000.0, usable=ALL, is_idle=is_idle
    )

    assert verdict.action is action


@pytest.mark.parametrize(
    ("placements", "gap"),
    [
        ((on(A, B),), ""),
        ((), "no placement at all"),
        ((on(A, B, num_layers=18),), "nobody of p1 would hold layer 18"),
        ((replace(on(A, B), stages=on(A, B).stages[1:]),), "nobody of p1 would hold layer 0"),
        ((on(A), on(A, pipeline_id=P2)), "a cannot hold layers [0, 20) of p2"),
        ((on(A, WorkerId("gone")),), "gone cannot hold layers [10, 20) of p1"),
    ],
)
def test_a_gap_is_found_and_named(placements: tuple[Placement, ...], gap: str) -> None:
    assert gap_of(placements, NUM_LAYERS, ALL) == gap


def loads(found: Change) -> list[tuple[str, int, str]]:
    return [(one.placement.pipeline_id, one.index, one.stage.worker_id) for one in found.arrivals]


def test_a_stage_that_goes_to_a_free_device_is_loaded_there_first_under_the_same_pipeline() -> None:
    found = change([on(A, B)], [on(A, C, pipeline_id=P2)])
    assert (found.placements, loads(found), found.ended) == ((on(A, C),), [("p1", 1, "c")], ())


def test_a_pipeline_that_moves_altogether_is_loaded_beforehand_altogether() -> None:
    found = change([on(A, B)], [on(C, D, pipeline_id=P2)])
    assert (loads(found), found.ended) == ([("p1", 0, "c"), ("p1", 1, "d")], ())


def test_layers_that_are_cut_anew_over_the_same_devices_end_their_pipeline_first() -> None:
    found = change([on(A, B)], [on(A, pipeline_id=P2)])
    assert (found.placements, loads(found), found.ended) == ((on(A, pipeline_id=P2),), [], (P1,))


def test_stages_that_change_places_end_their_pipeline_first() -> None:
    assert change([on(A, B)], [on(B, A, pipeline_id=P2)]).ended == (P1,)


def test_what_stays_is_left_alone_and_what_comes_beside_ends_nobody() -> None:
    found = change([on(A, B)], [on(A, B), on(C, pipeline_id=P2)])
    assert (found.placements, loads(found), found.ended) == ((on(A, B), on(C, pipeline_id=P2)), [], ())


def test_each_of_two_pipelines_is_succeeded_by_one_alone() -> None:
    found = change([on(A), on(B, pipeline_id=P2)], [on(C, pipeline_id=PipelineId("p3")), on(B, pipeline_id=P2)])
    assert (loads(found), found.ended) == ([("p1", 0, "c")], ())


workers = st.sampled_from(ALL)


def test_no_two_pipelines_get_one_id_though_one_takes_over_that_of_another() -> None:
    """The first keeps the device that the second is relieved of, and would have kept its id too."""
    in_force = (replace(on(A, pipeline_id=P1), kv_tokens=64), on(B, pipeline_id=P2))
    chosen = (replace(on(B, pipeline_id=P2), kv_tokens=128), on(C, pipeline_id=P1))

    found = change(in_force, chosen)

    assert [(one.pipeline_id, one.worker_ids) for one in found.placements] == [(P1, (B,)), (P2, (C,))]


@dataclass
class Device:
    slowness: float = 1.0
    is_spent: bool = False
    is_cordoned: bool = False


@dataclass
class World:
    """Devices that come and go, and a planner of its own: the least of all ways to cut the layers over the usable ones."""

    devices: dict[WorkerId, Device] = field(default_factory=dict)

    def usable(self) -> list[WorkerId]:
        return sorted(key for key, device in self.devices.items() if not device.is_cordoned)

    def cost(self, placements: tuple[Placement, ...]) -> float:
        if any(worker_id not in self.devices for one in placements for worker_id in one.worker_ids):
            return math.inf
        times = [
            len(stage.layers) * self.devices[stage.worker_id].slowness for one in placements for stage in one.stages
        ]
        return max(times, default=math.inf)

    def best(self) -> tuple[Placement, ...]:
        """One pipeline, over one or two devices; those that are spent only where there are no others."""
        usable = self.usable()
        able = [one for one in usable if not self.devices[one].is_spent] or usable
        ways = [(on(one),) for one in able]
        ways += [
            (replace(on(one, other), stages=_stages(one, other, cut)),)
            for one in able
            for other in able
            if one != other
            for cut in (5, 10, 15)
        ]
        return min(ways, key=self.cost, default=())


def _stages(one: WorkerId, other: WorkerId, cut: int) -> tuple[Stage, ...]:
    return (Stage(one, LayerRange(0, cut), 1, 1), Stage(other, LayerRange(cut, NUM_LAYERS), 1, 1))


class ReplacementMachine(RuleBasedStateMachine):
    """Any order of joins, losses, heat, low batteries and cordons: what is in force is whole, and seldom replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.replacement = Replacement()
        self.in_force: tuple[Placement, ...] = ()
        self.replaced_at: list[float] = []
        self.ask_at = math.inf
        self.now = 0.0

    @rule(worker_id=workers, slowness=st.sampled_from((0.5, 1.0, 1.1, 3.0)))
    def join(self, worker_id: WorkerId, slowness: float) -> None:
        self.world.devices.setdefault(worker_id, Device(slowness))
        self.ask()

    @rule(worker_id=workers)
    def lose(self, worker_id: WorkerId) -> None:
        self.world.devices.pop(worker_id, None)
        if any(worker_id in one.worker_ids for one in self.in_force):
            self.in_force = ()
        self.ask()

    @rule(worker_id=workers, slowness=st.sampled_from((0.5, 1.0, 1.1, 3.0)))
    def heat(self, worker_id: WorkerId, slowness: float) -> None:
        if worker_id in self.world.devices:
            self.world.devices[worker_id].slowness = slowness
            self.ask()

    @rule(worker_id=workers, is_spent=st.booleans(), is_cordoned=st.booleans())
    def mark(self, worker_id: WorkerId, is_spent: bool, is_cordoned: bool) -> None:
        if worker_id in self.world.devices:
            device = self.world.devices[worker_id]
            device.is_spent, device.is_cordoned = is_spent, is_cordoned
            self.ask()

    @rule(seconds=st.sampled_from((0.25, 5.0, 30.0, 61.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.ask_at:
            self.ask()

    def ask(self) -> None:
        candidate, usable = self.world.best(), self.world.usable()
        spent = [key for key, device in self.world.devices.items() if device.is_spent]
        verdict = self.replacement.decide(
            Outlook(self.in_force, self.world.cost(self.in_force)),
            Outlook(candidate, self.world.cost(candidate)),
            NUM_LAYERS,
            self.now,
            usable=[*usable, *(worker_id for one in self.in_force for worker_id in one.worker_ids)],
            spent=spent,
        )
        self.ask_at = verdict.at
        if verdict.action in (Action.REPLACE, Action.REPLACE_NOW):
            self.put_in_force(candidate)

    def put_in_force(self, candidate: tuple[Placement, ...]) -> None:
        assert gap_of(candidate, NUM_LAYERS, self.world.usable()) == ""
        if self.in_force:
            assert candidate != self.in_force
            assert self.now - max(self.replaced_at, default=-math.inf) >= HOLD_S
        self.replaced_at.append(self.now)
        self.in_force = candidate
        self.replacement.changed(self.now)

    @invariant()
    def nobody_waits_while_layers_could_be_held(self) -> None:
        assert bool(self.in_force) or not self.world.usable()
        assert gap_of(self.in_force, NUM_LAYERS, self.world.devices) in ("", "no placement at all")

    @invariant()
    def no_gain_is_left_for_ever(self) -> None:
        if self.ask_at == math.inf and self.in_force and self.world.usable():
            assert self.world.cost(self.world.best()) > (1 - MIN_GAIN) * self.world.cost(self.in_force) - 1e-9


TestReplacementOverTime = ReplacementMachine.TestCase
TestReplacementOverTime.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
