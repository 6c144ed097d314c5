"""A plan with its reasons: predictions, standby, what binds, what else was possible, and what a plan costs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.core.demand import Demand
from orchestrator.core.figures import (
    DeviceFigures,
    FleetFigures,
    LayerTimes,
    LinkEnds,
    LinkFigures,
    declared_fleet,
    declared_link,
    declared_times,
)
from orchestrator.core.grouping import place_all
from orchestrator.core.placement import Placement, place_split
from orchestrator.core.planning import FleetPlan, explain, plan_pipelines, to_plain
from orchestrator.core.predictions import cost_s, predict
from shoal.types import DeviceProfile, LinkProfile, Objective, WorkerId
from tests.support.builders import MIB, make_model, make_profile, make_workers

MODEL = make_model(num_layers=10)
# A layer takes 1 ms for one or two rows, 2 ms for four, and the head 5 ms for any; a pass 1 ms beside.
TIMES = LayerTimes(((1, 0.001), (2, 0.001), (4, 0.002)), ((1, 0.005),), prefill_token_s=0.0001, pass_s=0.001)
LINK = LinkFigures(delay_s=0.002, bytes_per_s=2304e3)


def make_fleet(*profiles: DeviceProfile, link: LinkFigures = LINK) -> FleetFigures:
    devices = (
        DeviceFigures(worker_id, profile, TIMES, is_declared=False) for worker_id, profile in make_workers(*profiles)
    )
    return FleetFigures(tuple(devices), default_link=link)


def split(fleet: FleetFigures, demand: Demand, *layers: int) -> Placement:
    return place_split(MODEL, fleet.devices, demand, layers)


class TestTimes:
    @pytest.mark.parametrize(("rows", "seconds"), [(1, 0.001), (2, 0.001), (3, 0.0015), (4, 0.002), (8, 0.004)])
    def test_rows_that_were_not_measured_lie_on_the_line_between_or_beyond(self, rows: int, seconds: float) -> None:
        assert TIMES.layer_at(rows) == pytest.approx(seconds)

    def test_one_measurement_stands_for_all_rows(self) -> None:
        assert TIMES.head_at(16) == 0.005

    def test_a_slower_device_is_declared_to_take_longer_for_all(self) -> None:
        fast, slow = (declared_times(make_profile(speed=speed), MODEL) for speed in (1.0, 0.5))
        assert slow == fast.scaled(2.0)

    def test_a_declared_link_has_its_delay_and_rate(self) -> None:
        link = declared_link(LinkProfile(delay_ms=5.0, rate_mbit_s=8.0), hop_s=0.001)
        assert link == LinkFigures(0.006, 1e6)
        assert declared_link(LinkProfile()).bytes_per_s == math.inf


class TestPrediction:
    def test_a_lone_device_has_no_links_between_tokens(self) -> None:
        fleet, demand = make_fleet(make_profile()), Demand(num_streams=1)
        found = predict(MODEL, fleet, split(fleet, demand, 10), demand)
        assert found.solo_token_s == pytest.approx(0.001 + 10 * 0.001 + 0.005)

    def test_a_token_of_two_devices_goes_there_and_back(self) -> None:
        fleet, demand = make_fleet(make_profile(), make_profile()), Demand(num_streams=1)
        found = predict(MODEL, fleet, split(fleet, demand, 5, 5), demand)
        # Each link: 2 ms of delay, and a row of 2304 bytes in 1 ms.
        assert found.solo_token_s == pytest.approx(2 * 0.001 + 10 * 0.001 + 0.005 + 2 * 0.003)

    def test_the_first_token_waits_for_all_chunks_at_the_slowest_place(self) -> None:
        fleet = make_fleet(make_profile(), make_profile(), link=LinkFigures(0.002))
        demand = Demand(num_streams=1, prompt_tokens=128)
        found = predict(MODEL, fleet, split(fleet, demand, 6, 4), demand)
        chunk = 64 * 0.0001
        assert found.first_token_s == pytest.approx(
            (0.001 + 6 * chunk) + 0.002 + (0.001 + 4 * chunk) + (0.001 + 6 * chunk) + 0.005 + 2 * 0.002
        )

    def test_many_streams_are_as_fast_as_the_slowest_stage(self) -> None:
        fleet = make_fleet(make_profile(), make_profile(), link=LinkFigures(0.0))
        demand = Demand(num_streams=8)
        found = predict(MODEL, fleet, split(fleet, demand, 7, 3), demand)
        assert found.rows == 4
        assert found.stages[0].pass_s == pytest.approx(0.001 + 7 * 0.002)
        assert found.tokens_per_s == pytest.approx(4 / 0.015)
        assert [round(one.busy, 2) for one in found.stages] == [1.0, 0.8]
        assert found.bound_by.startswith("device w0")

    def test_a_link_that_is_occupied_longer_than_a_stage_binds(self) -> None:
        fleet = make_fleet(make_profile(), make_profile(), link=LinkFigures(0.0, 2304e2))
        demand = Demand(num_streams=8)
        found = predict(MODEL, fleet, split(fleet, demand, 7, 3), demand)
        assert found.bound_by.startswith(("link w0 > w1", "links"))
        assert found.tokens_per_s <= 4 / 0.04

    def test_streams_that_have_no_room_for_kv_do_not_count(self) -> None:
        room = MODEL.need_bytes(0, 10, 3 * 512)
        fleet, demand = make_fleet(make_profile(memory_bytes=room)), Demand(num_streams=16)
        assert predict(MODEL, fleet, split(fleet, demand, 10), demand).num_streams == 3


def planned(*profiles: DeviceProfile, demand: Demand | None = None) -> FleetPlan:
    fleet = replace(declared_fleet(MODEL, make_workers(*profiles)), default_link=LinkFigures(0.001, 1e7))
    return plan_pipelines(MODEL, fleet, demand or Demand(num_streams=16))


class TestPlan:
    def test_devices_without_layers_are_on_standby(self) -> None:
        found = planned(make_profile(), make_profile(speed=0.01))
        assert (found.placements[0].worker_ids, found.standby) == (("w0",), ("w1",))

    def test_plans_of_each_number_of_devices_are_compared(self) -> None:
        found = planned(*[make_profile()] * 3)
        ones = {one.what: one for one in found.alternatives}
        assert [len(ones[what].worker_ids[0]) for what in ("1 device", "2 devices", "3 devices")] == [1, 2, 3]
        assert sum(one.is_chosen for one in found.alternatives) == 1

    def test_no_single_pipeline_is_better_than_the_plan(self) -> None:
        found = planned(make_profile(), make_profile(speed=0.6), make_profile(speed=0.3))
        singles = [one.outcome.tokens_per_s for one in found.alternatives if one.what.endswith(("device", "devices"))]
        assert found.outcome.tokens_per_s >= max(singles) * (1 - 1e-9)

    def test_pipelines_that_are_asked_for_are_the_plan_that_is_told_of_as_possible(self) -> None:
        found = planned(*[make_profile()] * 3, demand=Demand(num_streams=8, replicas=2, is_shared=True))
        assert found.outcome.num_streams == 8
        (chosen,) = [one for one in found.alternatives if one.is_chosen]
        assert (chosen.what, chosen.outcome) == ("2 pipelines", found.outcome)

    def test_streams_that_each_pipeline_has_are_not_divided(self) -> None:
        found = planned(*[make_profile()] * 2, demand=Demand(num_streams=8, replicas=2))
        assert [one.num_streams for one in found.pipelines] == [8, 8]

    def test_memory_that_keeps_a_plan_from_more_is_told(self) -> None:
        room = MODEL.need_bytes(0, 10, 1024)
        assert planned(make_profile(memory_bytes=room)).bound_by.startswith("memory: with enough of it")
        assert not planned(make_profile(memory_bytes=4096 * MIB)).bound_by.startswith("memory")

    @pytest.mark.parametrize("objective", Objective)
    def test_it_can_be_told_as_json(self, objective: Objective) -> None:
        found = planned(*[make_profile()] * 3, demand=Demand(num_streams=16, objective=objective))
        plain = json.loads(json.dumps(to_plain(found), allow_nan=False))
        assert plain["objective"] == objective.value
        assert [one["worker_id"] for one in plain["pipelines"][0]["stages"]] == list(found.placements[0].worker_ids)

    def test_placements_that_were_not_planned_can_be_explained_too(self) -> None:
        fleet, demand = make_fleet(make_profile(), make_profile()), Demand(num_streams=16)
        found = explain(MODEL, fleet, demand, [split(fleet, demand, 1, 9)])
        assert not any(one.is_chosen for one in found.alternatives)
        assert found.outcome.tokens_per_s < max(one.outcome.tokens_per_s for one in found.alternatives)


class TestCost:
    @pytest.mark.parametrize("objective", Objective)
    def test_the_plan_costs_no_more_than_another_cut(self, objective: Objective) -> None:
        fleet = make_fleet(*[make_profile()] * 3, link=LinkFigures(0.001))
        demand = Demand(num_streams=16, objective=objective)
        best = cost_s(MODEL, fleet, place_all(MODEL, fleet, demand), demand)
        assert best <= cost_s(MODEL, fleet, [split(fleet, demand, 1, 1, 8)], demand)

    def test_what_devices_that_are_gone_hold_does_not_count(self) -> None:
        fleet, demand = make_fleet(make_profile(), make_profile()), Demand(num_streams=16)
        placements = [split(fleet, demand, 5, 5)]
        gone = replace(fleet, devices=fleet.devices[:1])
        assert cost_s(MODEL, gone, placements, demand) == math.inf
        assert cost_s(MODEL, fleet, [], demand) == math.inf

    def test_a_second_pipeline_halves_the_cost_of_a_token(self) -> None:
        fleet, demand = make_fleet(make_profile(), make_profile()), Demand(num_streams=16)
        both: Sequence[Placement] = [
            place_split(MODEL, fleet.devices[:1], demand, [10]),
            place_split(MODEL, fleet.devices[1:], demand, [10]),
        ]
        assert cost_s(MODEL, fleet, both, demand) == pytest.approx(cost_s(MODEL, fleet, both[:1], demand) / 2)


def test_a_device_without_direct_links_is_reached_by_way_of_the_orchestrator() -> None:
    hidden = replace(make_profile(), allow_direct_links=False)
    fleet, demand = make_fleet(make_profile(), hidden), Demand(num_streams=1)
    known: dict[LinkEnds, LinkFigures] = {(None, WorkerId(name)): LinkFigures(0.01) for name in ("w0", "w1")}
    relayed = predict(MODEL, replace(fleet, links=known), split(fleet, demand, 5, 5), demand)
    assert relayed.solo_token_s == pytest.approx(0.017 + 2 * 0.02)
