"""Pipelines that the searches find against all that there are: over choice, order and cuts, for both objectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures, FleetFigures, LayerTimes, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import place_all
from orchestrator.core.solver import Solver
from shoal.types import DeviceProfile, Objective, WorkerId
from tests.support.brute_force import best_of_all, large_fleet, random_fleet

KV_TOKENS = 512
# Sums of the same times in another order.
EQUAL = 1e-6
STREAMS = (1, 3, 8, 16, 40)


def check_against_all(model: ModelFootprint, fleet: FleetFigures, num_streams: int) -> None:
    best = best_of_all(model, fleet, KV_TOKENS, num_streams)
    solver = Solver(model, fleet)
    lone, many = solver.for_latency(KV_TOKENS), solver.for_throughput(num_streams, KV_TOKENS)
    if best is None:
        assert lone is None
        assert many is None
        assert not solver.is_possible(KV_TOKENS)
        return
    assert lone is not None
    assert many is not None
    assert solver.is_possible(KV_TOKENS)
    assert lone.route.total_s == pytest.approx(best[0], rel=EQUAL)
    assert many.tokens_per_s == pytest.approx(best[1], rel=EQUAL)


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_better_than_what_is_found_for_small_fleets(seed: int, is_tight: bool) -> None:
    model, fleet = random_fleet(seed, max_devices=4, max_layers=8, is_tight=is_tight)
    check_against_all(model, fleet, STREAMS[seed % 5])


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("seed", [1000, 1001, 1002])
def test_nothing_is_better_for_five_devices_and_ten_layers(seed: int, is_tight: bool) -> None:
    """Six of them: of six devices and twelve layers, all 650,000 pipelines take half a minute to look at."""
    model, fleet = random_fleet(seed, max_devices=5, max_layers=10, is_tight=is_tight, is_full=True)
    check_against_all(model, fleet, 16)


@pytest.mark.parametrize("seed", range(20))
def test_the_search_for_large_fleets_is_never_worse_than_the_best_device_and_seldom_than_the_best_plan(
    seed: int,
) -> None:
    model, fleet = random_fleet(seed, max_devices=6, max_layers=12, is_tight=False)
    exact, good = Solver(model, fleet), Solver(model, fleet, is_exact=False)
    assert not good.is_exact
    found, best, alone = (
        solver.for_throughput(16, KV_TOKENS, number) for solver, number in ((good, None), (exact, None), (exact, 1))
    )
    assert best is not None
    assert found is not None
    assert found.tokens_per_s <= best.tokens_per_s * (1 + EQUAL)
    assert alone is None or found.tokens_per_s >= alone.tokens_per_s * (1 - EQUAL)


@pytest.mark.parametrize("objective", Objective)
def test_a_hundred_devices_get_eighty_layers(objective: Objective) -> None:
    model, fleet = large_fleet()
    placements = place_all(model, fleet, Demand(num_streams=64, objective=objective, replicas=0))
    by_id = {device.worker_id: device for device in fleet.devices}
    held = [worker_id for one in placements for worker_id in one.worker_ids]
    assert len(held) == len(set(held))
    for placement in placements:
        assert placement.stages[0].layers.start == 0
        assert placement.stages[-1].layers.stop == 80
        assert all(stage.need_bytes <= by_id[stage.worker_id].shard_bytes for stage in placement.stages)
    if objective is not Objective.LATENCY:
        assert len(placements) > 1


@pytest.mark.parametrize("num_devices", [9, 12])
@pytest.mark.parametrize("seed", range(6))
def test_no_number_of_stages_is_better_than_the_plan_of_a_fleet_that_is_too_large_for_every_order(
    seed: int, num_devices: int
) -> None:
    model, fleet = random_fleet(seed, max_devices=num_devices, max_layers=20, is_tight=seed % 2 > 0, is_full=True)
    solver = Solver(model, fleet)
    assert not solver.is_exact
    plan, lone = solver.for_throughput(64, KV_TOKENS), solver.for_latency(KV_TOKENS)
    assert plan is not None
    assert lone is not None
    for number in range(1, num_devices + 1):
        many, ring = solver.for_throughput(64, KV_TOKENS, number), solver.for_latency(KV_TOKENS, number)
        assert many is None or many.tokens_per_s <= plan.tokens_per_s * (1 + EQUAL)
        assert ring is None or ring.route.total_s >= lone.route.total_s * (1 - EQUAL)


@pytest.mark.parametrize("is_tight", [False, True])
def test_the_search_for_large_fleets_finds_nearly_the_best_where_both_can_look(is_tight: bool) -> None:
    shares = []
    for seed in range(100, 112):
        model, fleet = random_fleet(seed, max_devices=6, max_layers=12, is_tight=is_tight, is_full=True)
        exact, good = Solver(model, fleet), Solver(model, fleet, is_exact=False)
        best, found = exact.for_throughput(16, KV_TOKENS), good.for_throughput(16, KV_TOKENS)
        lone, ring = exact.for_latency(KV_TOKENS), good.for_latency(KV_TOKENS)
        if best is not None:
            assert found is not None
            assert lone is not None
            assert ring is not None
            shares += [found.tokens_per_s / best.tokens_per_s, lone.route.total_s / ring.route.total_s]
    assert min(shares) > 0.8
    assert sum(shares) / len(shares) > 0.97


def test_fast_devices_that_take_few_rows_do_not_hide_the_plan_without_them() -> None:
    """The four that are fastest with one row allow batches of two; the others are better at sixteen."""
    model, fleet = random_fleet(1, max_devices=6, max_layers=12, is_tight=False, is_full=True)
    times = LayerTimes(((1, 0.001), (16, 0.0016)), ((1, 0.0),), prefill_token_s=0.0001)
    devices = tuple(
        DeviceFigures(
            WorkerId(f"w{index}"),
            DeviceProfile("d", "phone", 2**34, max_batch=2 if index < 4 else 16),
            times if index >= 4 else times.scaled(0.9),
        )
        for index in range(9)
    )
    many = Solver(model, replace(fleet, devices=devices, links={}, default_link=LinkFigures(0.0))).for_throughput(
        64, KV_TOKENS, 4
    )
    assert many is not None
    assert many.rows == 16
    assert min(many.route.order) >= 4


def test_the_same_fleet_gets_the_same_plan() -> None:
    model, fleet = random_fleet(3, max_devices=6, max_layers=12, is_tight=False)
    first, second = Solver(model, fleet), Solver(model, fleet)
    assert first.for_throughput(16, KV_TOKENS) == second.for_throughput(16, KV_TOKENS)
    assert first.for_latency(KV_TOKENS) == second.for_latency(KV_TOKENS)
