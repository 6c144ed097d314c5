"""Which devices make a pipeline together, which stand alone, and what is made anew while others are served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import grouping
from orchestrator.core.demand import MIN_CONTEXT_TOKENS, Demand
from orchestrator.core.figures import LinkFigures, declared_fleet
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.pipelines import place_one
from orchestrator.core.placement import Placement, Worker
from shoal.errors import ConfigError, PlacementImpossible
from shoal.types import DeviceMode, DeviceProfile, LayerRange, Objective, PipelineId, WorkerId
from tests.support.builders import MIB, make_model, make_profile, make_workers

MODEL = make_model()
# The model takes 286 MiB, KV for the least context 23 MiB.
WHOLE = 1024 * MIB
HALF = 250 * MIB
THIRD = 200 * MIB
TINY = 140 * MIB
RULES = Demand(num_streams=16)
TWO_REPLICAS = Demand(num_streams=16, replicas=2)
P1, P2, P3 = PipelineId("p1"), PipelineId("p2"), PipelineId("p3")


def device(mode: DeviceMode = DeviceMode.MIXED, *, memory_bytes: int = WHOLE, speed: float = 1.0) -> DeviceProfile:
    return replace(make_profile(memory_bytes=memory_bytes, speed=speed), mode=mode)


def latency(*, memory_bytes: int = WHOLE, speed: float = 1.0) -> DeviceProfile:
    return device(DeviceMode.LATENCY, memory_bytes=memory_bytes, speed=speed)


def place_all(model: ModelFootprint, workers: Sequence[Worker], demand: Demand) -> tuple[Placement, ...]:
    return grouping.place_all(model, declared_fleet(model, workers), demand)


def plan(
    model: ModelFootprint, workers: Sequence[Worker], in_force: Sequence[Placement], demand: Demand
) -> grouping.Plan:
    return grouping.plan(model, declared_fleet(model, workers), in_force, demand)


def members(placements: Sequence[Placement]) -> dict[str, tuple[str, ...]]:
    """Who is in each pipeline, by name: the order of stages is for the searches to choose."""
    return {one.pipeline_id: tuple(sorted(one.worker_ids)) for one in placements}


def modes(placements: Sequence[Placement]) -> list[DeviceMode]:
    return [one.mode for one in placements]


def grouped(*profiles: DeviceProfile, rules: Demand = RULES) -> tuple[Placement, ...]:
    return place_all(MODEL, make_workers(*profiles), rules)


class TestKeptForLatency:
    def test_devices_of_other_modes_make_one_pipeline(self) -> None:
        assert members(grouped(device(), device(DeviceMode.THROUGHPUT))) == {"p1": ("w0", "w1")}

    def test_one_that_holds_the_model_stands_alone_beside_the_shared_pipeline(self) -> None:
        placements = grouped(latency(), device(), device())
        assert members(placements) == {"p1": ("w1", "w2"), "p2": ("w0",)}
        assert modes(placements) == [DeviceMode.MIXED, DeviceMode.LATENCY]
        assert placements[1].stages[0].layers == LayerRange(0, 30)

    def test_one_that_cannot_hold_the_model_is_like_the_others(self) -> None:
        assert members(grouped(latency(memory_bytes=HALF), device())) == {"p1": ("w0", "w1")}

    def test_one_that_holds_it_but_no_conversation_is_like_the_others(self) -> None:
        room = MODEL.need_bytes(0, 30, MIN_CONTEXT_TOKENS)
        assert members(grouped(latency(memory_bytes=room), device())) == {"p1": ("w1",), "p2": ("w0",)}
        assert members(grouped(latency(memory_bytes=room - 1), device())) == {"p1": ("w0", "w1")}

    def test_with_none_but_those_each_is_a_pipeline(self) -> None:
        placements = grouped(latency(), latency(), latency())
        assert members(placements) == {"p1": ("w0",), "p2": ("w1",), "p3": ("w2",)}
        assert modes(placements) == [DeviceMode.LATENCY] * 3

    def test_the_slowest_is_drafted_if_the_others_cannot_hold_the_model(self) -> None:
        placements = grouped(device(memory_bytes=HALF), latency(speed=1.0), latency(speed=0.5))
        assert members(placements) == {"p1": ("w0", "w2"), "p2": ("w1",)}
        assert modes(placements) == [DeviceMode.MIXED, DeviceMode.LATENCY]

    def test_of_equally_slow_ones_the_first_by_name_is_drafted(self) -> None:
        assert members(grouped(device(memory_bytes=HALF), latency(), latency()))["p1"] == ("w0", "w1")

    def test_nobody_is_drafted_for_devices_that_get_no_layer_even_so(self) -> None:
        placements = grouped(device(memory_bytes=TINY), latency(), latency())
        assert members(placements) == {"p1": ("w1",), "p2": ("w2",)}
        assert modes(placements) == [DeviceMode.LATENCY] * 2

    def test_a_split_says_how_many_devices_the_shared_pipeline_has(self) -> None:
        rules = Demand(num_streams=16, split=(10, 20))
        assert members(grouped(device(), latency(), latency(), rules=rules)) == {"p1": ("w0", "w1"), "p2": ("w2",)}
        assert members(grouped(latency(), latency(), rules=rules)) == {"p1": ("w0", "w1")}

    def test_devices_that_together_cannot_hold_it_are_told_so(self) -> None:
        with pytest.raises(PlacementImpossible, match="lacks"):
            grouped(device(memory_bytes=TINY), latency(memory_bytes=TINY))

    def test_without_devices_the_message_says_how_to_start_one(self) -> None:
        with pytest.raises(PlacementImpossible, match="shoal worker --join"):
            grouped()


class TestReplicas:
    def test_each_has_all_layers(self) -> None:
        placements = grouped(*[device()] * 4, rules=TWO_REPLICAS)
        assert [one.stages[0].layers.start for one in placements] == [0, 0]
        assert [one.stages[-1].layers.stop for one in placements] == [30, 30]

    def test_speeds_are_dealt_evenly(self) -> None:
        speeds = [device(speed=speed) for speed in (4.0, 3.0, 2.0, 1.0)]
        assert members(grouped(*speeds, rules=TWO_REPLICAS)) == {"p1": ("w0", "w3"), "p2": ("w1", "w2")}

    def test_equally_fast_devices_are_dealt_by_memory(self) -> None:
        wide, tight = device(), device(memory_bytes=HALF)
        assert members(grouped(wide, tight, wide, tight, rules=TWO_REPLICAS)) == {
            "p1": ("w0", "w1"),
            "p2": ("w2", "w3"),
        }

    def test_memory_comes_before_speed_where_else_one_group_could_not_hold_the_model(self) -> None:
        profiles = [
            device(memory_bytes=THIRD, speed=2.0),
            device(memory_bytes=WHOLE, speed=1.9),
            device(memory_bytes=WHOLE, speed=0.5),
            device(memory_bytes=THIRD, speed=0.4),
        ]
        assert members(grouped(*profiles, rules=TWO_REPLICAS)) == {"p1": ("w0", "w2"), "p2": ("w1", "w3")}

    def test_there_are_fewer_where_the_devices_do_not_suffice(self) -> None:
        rules = Demand(num_streams=16, replicas=3)
        assert len(grouped(*[device()] * 2, rules=rules)) == 2
        assert len(grouped(*[device(memory_bytes=HALF)] * 3, rules=rules)) == 1

    def test_a_pipeline_is_for_throughput_if_all_its_devices_are(self) -> None:
        gathers = device(DeviceMode.THROUGHPUT)
        assert modes(grouped(gathers, gathers)) == [DeviceMode.THROUGHPUT]
        assert modes(grouped(gathers, device())) == [DeviceMode.MIXED]

    def test_a_device_without_a_layer_has_no_say_in_the_mode(self) -> None:
        idle = device(speed=0.001)
        placements = grouped(device(DeviceMode.THROUGHPUT), idle)
        assert (members(placements), modes(placements)) == ({"p1": ("w0",)}, [DeviceMode.THROUGHPUT])

    def test_a_split_is_of_one_pipeline(self) -> None:
        with pytest.raises(ConfigError, match="replicas = 2 asks for more") as refused:
            Demand(num_streams=16, split=(15, 15), replicas=2)
        assert refused.value.field == "split"


def planned(
    workers: Sequence[Worker], in_force: Sequence[Placement], *busy: PipelineId, rules: Demand = RULES
) -> tuple[Placement, ...]:
    return plan(MODEL, workers, in_force, rules).choose(busy)


class TestWhileOthersAreServed:
    def test_a_device_that_joins_gets_its_share_if_nobody_is_served(self) -> None:
        workers = make_workers(device(), device())
        before = place_all(MODEL, workers[:1], RULES)
        assert members(planned(workers, before)) == {"p1": ("w0", "w1")}

    def test_a_device_that_joins_waits_while_its_pipeline_serves(self) -> None:
        workers = make_workers(device(), device())
        before = place_all(MODEL, workers[:1], RULES)
        assert planned(workers, before, P1) == before

    def test_a_device_kept_for_latency_is_placed_at_once(self) -> None:
        workers = make_workers(device(), latency())
        before = place_all(MODEL, workers[:1], RULES)
        assert planned(workers, before, P1) == (*before, *place_all(MODEL, workers, RULES)[1:])

    def test_a_placement_that_need_not_change_keeps_its_id(self) -> None:
        workers = make_workers(latency(), device(), latency())
        before = place_all(MODEL, workers[1:], RULES)
        assert members(before) == {"p1": ("w1",), "p2": ("w2",)}
        after = planned(workers, before, P1, P2)
        assert members(after) == {"p1": ("w1",), "p3": ("w0",), "p2": ("w2",)}
        assert set(before) < set(after)

    def test_ids_are_kept_also_where_all_is_placed_anew(self) -> None:
        workers = make_workers(latency(), device(), latency())
        before = place_all(MODEL, workers[1:], RULES)
        after = planned(workers, before)
        assert after == plan(MODEL, workers, before, RULES).best
        assert set(before) < set(after)

    def test_the_rest_of_a_lost_pipeline_makes_a_new_one_beside_a_busy_one(self) -> None:
        workers = make_workers(*[device()] * 4)
        before = place_all(MODEL, workers, TWO_REPLICAS)
        lost, left = before
        after = planned([one for one in workers if one[0] != lost.worker_ids[0]], [left], P2, rules=TWO_REPLICAS)
        assert members(after) == {"p2": left.worker_ids, "p1": lost.worker_ids[1:]}
        assert left in after

    def test_a_pipeline_that_a_worker_leaves_is_replaced_by_free_ones_at_once(self) -> None:
        workers = make_workers(device(), device())
        before = place_all(MODEL, workers[:1], RULES)
        assert members(planned(workers[1:], before, P1)) == {"p1": ("w0",), "p2": ("w1",)}

    def test_free_devices_that_cannot_hold_the_model_wait(self) -> None:
        workers = make_workers(device(), device(), device(memory_bytes=TINY))
        before = place_all(MODEL, workers[:2], RULES)
        assert planned(workers[1:], before, P1) == before

    def test_a_busy_pipeline_that_stays_does_not_hold_up_the_change_of_an_idle_one(self) -> None:
        workers = make_workers(device(), latency(), device())
        before = place_all(MODEL, workers[:2], RULES)
        assert members(planned(workers, before, P2)) == {"p1": ("w0", "w2"), "p2": ("w1",)}
        assert members(planned(workers, before, P1, P2)) == {"p1": ("w0",), "p2": ("w1",)}

    def test_devices_that_can_no_longer_hold_the_model_are_told_so(self) -> None:
        with pytest.raises(PlacementImpossible):
            plan(MODEL, make_workers(device(memory_bytes=TINY)), (), RULES)


profiles_strategy = st.lists(
    st.builds(
        device,
        st.sampled_from(DeviceMode),
        memory_bytes=st.sampled_from((TINY, 180 * MIB, HALF, 330 * MIB, WHOLE)),
        speed=st.sampled_from((0.25, 0.5, 1.0, 2.0)),
    ),
    min_size=1,
    max_size=5,
)
rules_strategy = st.builds(
    Demand, num_streams=st.integers(1, 4), context_tokens=st.sampled_from((0, 600)), replicas=st.integers(1, 3)
)
SMALL = make_model(num_layers=6, layer_bytes=15 * MIB)


def can_hold(workers: Sequence[Worker]) -> bool:
    try:
        place_one(SMALL, declared_fleet(SMALL, workers), Demand(num_streams=1))
    except PlacementImpossible:
        return False
    return True


def check_groups(placements: Sequence[Placement], workers: Sequence[Worker]) -> None:
    """Every worker in one pipeline at most, every pipeline whole, within memory, and of the mode its devices say."""
    profiles = dict(workers)
    named = [worker_id for one in placements for worker_id in one.worker_ids]
    assert len(named) == len(set(named))
    assert len({one.pipeline_id for one in placements}) == len(placements)
    for placement in placements:
        ends = [stage.layers.stop for stage in placement.stages]
        assert [stage.layers.start for stage in placement.stages] == [0, *ends[:-1]]
        assert ends[-1] == SMALL.num_layers
        assert all(stage.need_bytes <= profiles[stage.worker_id].memory_bytes for stage in placement.stages)
        found = {profiles[worker_id].mode for worker_id in placement.worker_ids}
        if placement.mode is DeviceMode.LATENCY:
            assert len(placement.stages) == 1
            assert found == {DeviceMode.LATENCY}
        assert (placement.mode is DeviceMode.THROUGHPUT) == (found == {DeviceMode.THROUGHPUT})


@given(profiles=profiles_strategy, rules=rules_strategy)
def test_whatever_can_serve_does_in_whole_pipelines_within_memory(profiles: list[DeviceProfile], rules: Demand) -> None:
    workers = make_workers(*profiles)
    if not can_hold(workers):
        with pytest.raises(PlacementImpossible):
            place_all(SMALL, workers, rules)
        return
    placements = place_all(SMALL, workers, rules)
    check_groups(placements, workers)
    shared = [one for one in placements if one.mode is not DeviceMode.LATENCY]
    alone = [one for one in placements if one.mode is DeviceMode.LATENCY]
    assert len(shared) <= rules.replicas
    assert list(placements) == shared + alone
    able = {id_ for id_, profile in workers if profile.mode is DeviceMode.LATENCY and can_hold([(id_, profile)])}
    others = [worker for worker in workers if worker[0] not in able]
    # At most one is drafted, and only if nothing else helps.
    assert len(able) - len(alone) == (bool(shared) and not can_hold(others))
    assert bool(shared) or not can_hold(others)
    assert all(not able.issuperset(one.worker_ids) for one in shared)


@given(profiles=profiles_strategy, rules=rules_strategy, data=st.data())
def test_what_is_busy_stays_and_what_is_free_never_breaks_it(
    profiles: list[DeviceProfile], rules: Demand, data: st.DataObject
) -> None:
    workers = make_workers(*profiles)
    some = data.draw(st.lists(st.sampled_from(workers), unique=True, min_size=1))
    if not (can_hold(workers) and can_hold(some)):
        return
    before = place_all(SMALL, sorted(some, key=lambda one: one[0]), rules)
    in_force = data.draw(st.lists(st.sampled_from(before), unique=True))
    busy = data.draw(st.sets(st.sampled_from([one.pipeline_id for one in in_force] or [P3])))
    after = plan(SMALL, workers, in_force, rules).choose(busy)
    check_groups(after, workers)
    assert all(one in after for one in in_force if one.pipeline_id in busy)
    best = plan(SMALL, workers, in_force, rules).best
    assert {one.worker_ids for one in best} == {one.worker_ids for one in place_all(SMALL, workers, rules)}
    assert after == best or all(one in after for one in in_force)
    # Done once, there is nothing left to do.
    assert plan(SMALL, workers, after, rules).choose(busy) == after


def test_dealing_makes_replicas_about_equally_fast() -> None:
    """For every choice of five speeds, the two replicas differ by no more than the fastest and the slowest device do."""
    for speeds in combinations((0.5, 0.7, 1.0, 1.3, 1.6, 2.0), 5):
        workers = make_workers(*(device(speed=speed) for speed in speeds))
        by_id = {worker_id: profile.speed for worker_id, profile in workers}
        first, second = (
            sum(by_id[one] for one in group.worker_ids) for group in place_all(MODEL, workers, TWO_REPLICAS)
        )
        assert abs(first - second) <= max(speeds) - min(speeds)


def test_a_worker_s_name_decides_nothing_but_order() -> None:
    workers = [(WorkerId(name), device(speed=speed)) for name, speed in (("b", 1.0), ("a", 1.0), ("c", 2.0))]
    placements = place_all(MODEL, sorted(workers, key=lambda one: one[0]), TWO_REPLICAS)
    assert members(placements) == {"p1": ("a", "b"), "p2": ("c",)}


class TestObjectives:
    def test_for_latency_the_fastest_device_serves_and_the_others_stand_by(self) -> None:
        demand = Demand(num_streams=16, objective=Objective.LATENCY)
        assert members(grouped(device(speed=0.5), device(speed=2.0), device(), rules=demand)) == {"p1": ("w1",)}

    def test_further_pipelines_for_latency_are_of_who_is_left(self) -> None:
        demand = Demand(num_streams=16, objective=Objective.LATENCY, replicas=2)
        assert members(grouped(device(speed=0.5), device(speed=2.0), device(), rules=demand)) == {
            "p1": ("w1",),
            "p2": ("w2",),
        }

    def test_a_mixed_plan_keeps_one_for_lone_streams_beside_one_for_many(self) -> None:
        demand = Demand(num_streams=16, objective=Objective.MIXED)
        placements = grouped(device(speed=0.5), device(speed=2.0), device(speed=0.5), rules=demand)
        assert members(placements) == {"p1": ("w0", "w2"), "p2": ("w1",)}
        assert modes(placements) == [DeviceMode.MIXED, DeviceMode.LATENCY]

    def test_a_mixed_plan_of_devices_that_do_not_suffice_for_both_is_for_many(self) -> None:
        demand = Demand(num_streams=16, objective=Objective.MIXED)
        placements = grouped(device(memory_bytes=HALF), device(memory_bytes=HALF), rules=demand)
        assert members(placements) == {"p1": ("w0", "w1")}
        assert modes(placements) == [DeviceMode.MIXED]

    @pytest.mark.parametrize(("memory_bytes", "num_pipelines"), [(WHOLE, 4), (300 * MIB, 2)])
    def test_without_a_number_there_are_as_many_replicas_as_give_most_tokens(
        self, memory_bytes: int, num_pipelines: int
    ) -> None:
        fleet = declared_fleet(MODEL, make_workers(*[device(memory_bytes=memory_bytes)] * 4))
        far_apart = replace(fleet, default_link=LinkFigures(0.02, 1e5))
        placements = grouping.place_all(MODEL, far_apart, Demand(num_streams=16, replicas=0))
        assert len(placements) == num_pipelines


class TestStreams:
    """Sixteen of them."""

    ROOM = MODEL.need_bytes(0, 30, 8 * 1024)

    @pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
    @pytest.mark.parametrize(("is_shared", "num_each"), [(False, 16), (True, 8)])
    def test_each_pipeline_has_all_of_them_or_its_part(
        self, objective: Objective, is_shared: bool, num_each: int
    ) -> None:
        rules = replace(TWO_REPLICAS, objective=objective, is_shared=is_shared)
        assert [one.slots for one in grouped(device(), device(), rules=rules)] == [num_each] * 2

    @pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
    def test_a_context_is_promised_to_those_of_a_pipeline_alone(self, objective: Objective) -> None:
        shared = Demand(16, 1024, objective, replicas=2, is_promised=True, is_shared=True)
        two = [device(memory_bytes=self.ROOM)] * 2
        assert len(grouped(*two, rules=shared)) == 2
        with pytest.raises(PlacementImpossible):
            grouped(*two[1:], rules=replace(shared, replicas=1))

    @pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.LATENCY])
    def test_fewer_pipelines_than_are_wanted_have_more_of_them_each(self, objective: Objective) -> None:
        rules = Demand(12, objective=objective, replicas=3, is_shared=True)
        assert [one.slots for one in grouped(device(), device(), rules=rules)] == [6, 6]


def test_a_fleet_that_joins_in_another_order_gets_the_same_plan() -> None:
    workers = make_workers(*(device(speed=speed) for speed in (1.0, 0.7, 1.0, 0.7, 0.9)))
    expected = place_all(MODEL, workers, RULES)
    assert place_all(MODEL, workers[::-1], RULES) == expected
    assert place_all(MODEL, [workers[at] for at in (3, 0, 4, 1, 2)], RULES) == expected
