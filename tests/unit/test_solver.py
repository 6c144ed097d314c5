"""Pipelines that the searches find against all that there are: over choice, order and cuts, for both objectives."""

from __future__ import annotations

import math
import random
from dataclasses import astuple, replace
from itertools import combinations, pairwise

import pytest

from orchestrator.core.cuts import cut
from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures, FleetFigures, LayerTimes, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import place_all
from orchestrator.core.solver import Solver
from shoal.types import DeviceProfile, Objective, WorkerId
from tests.support.brute_force import (
    best_of_all,
    best_one_by_one,
    fits,
    large_fleet,
    pipe_of,
    random_fleet,
    stage_times,
    token_s,
    tokens_per_s,
    with_twins,
)

KV_TOKENS = 512
# Sums of the same times in another order.
EQUAL = 1e-6
STREAMS = (1, 3, 8, 16, 40)


def check_against_all(model: ModelFootprint, fleet: FleetFigures, num_streams: int) -> None:
    """What a route gives is computed anew from its devices and cuts: the solver may be wrong about that too."""
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
    ring, pipe = pipe_of(fleet, lone.route), pipe_of(fleet, many.route)
    assert fits(model, ring, KV_TOKENS)
    assert fits(model, pipe, KV_TOKENS)
    assert token_s(model, fleet, ring) == pytest.approx(best.token_s, rel=EQUAL)
    assert tokens_per_s(model, fleet, pipe, num_streams) == pytest.approx(best.tokens_per_s, rel=EQUAL)
    assert lone.route.total_s == pytest.approx(best.token_s, rel=EQUAL)
    assert many.tokens_per_s == pytest.approx(best.tokens_per_s, rel=EQUAL)


@pytest.mark.parametrize("seed", range(60))
def test_the_reference_by_arrays_is_the_one_that_looks_at_one_pipeline_after_the_other(seed: int) -> None:
    model, fleet = random_fleet(seed, max_devices=4, max_layers=6, is_tight=seed % 2 > 0)
    one_by_one, by_arrays = (
        best(model, fleet, KV_TOKENS, STREAMS[seed % 5]) for best in (best_one_by_one, best_of_all)
    )
    assert (one_by_one is None) == (by_arrays is None)
    if one_by_one and by_arrays:
        assert astuple(by_arrays) == pytest.approx(astuple(one_by_one))


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_better_than_what_is_found_for_small_fleets(seed: int, is_tight: bool) -> None:
    model, fleet = random_fleet(seed, max_devices=4, max_layers=8, is_tight=is_tight)
    check_against_all(model, fleet, STREAMS[seed % 5])


@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_nothing_is_better_for_six_devices_and_twelve_layers(seed: int, is_tight: bool) -> None:
    model, fleet = random_fleet(seed, max_devices=6, max_layers=12, is_tight=is_tight, is_full=True)
    check_against_all(model, fleet, STREAMS[seed % 5])


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_better_where_devices_are_alike(seed: int) -> None:
    model, fleet = random_fleet(seed, max_devices=6, max_layers=12, is_tight=seed % 2 > 0, is_full=True)
    check_against_all(model, with_twins(fleet), STREAMS[seed % 5])


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("seed", range(80))
def test_no_cut_of_an_order_is_better_than_the_one_that_is_found(seed: int, is_limited: bool) -> None:
    """Layers differ much in bytes: how many fit depends on which."""
    draw = random.Random(seed)
    model, fleet = random_fleet(seed, max_devices=4, max_layers=10, is_tight=seed % 2 > 0, is_full=True)
    base = model.layer_bytes[0]
    model = replace(model, layer_bytes=tuple(draw.choice((base // 3, base, 2 * base)) for _ in range(10)))
    order = draw.sample(range(4), 1 + seed % 4)
    costs = Solver(model, fleet).costs(1, KV_TOKENS)
    devices = tuple(fleet.devices[index] for index in order)
    every = [
        (devices, (0, *inner, model.num_layers)) for inner in combinations(range(1, model.num_layers), len(order) - 1)
    ]
    able = [pipe for pipe in every if fits(model, pipe, KV_TOKENS)]
    slowest = sorted(max(stage_times(model, pipe, 1)) for pipe in able)
    limit_s = slowest[len(slowest) // 2] * (1 + EQUAL) if slowest and is_limited else math.inf
    is_slow_link = any(costs.sending_s[one][other] > limit_s for one, other in pairwise(order))
    within = [token_s(model, fleet, pipe) for pipe in able if max(stage_times(model, pipe, 1)) <= limit_s]
    enter_s, leave_s = [0.0] * 4, [row[order[0]] for row in costs.hop_s]
    found = cut(costs, order, limit_s, enter_s=enter_s, leave_s=leave_s)
    if not within or is_slow_link:
        assert found is None
        return
    assert found is not None
    assert fits(model, pipe_of(fleet, found), KV_TOKENS)
    assert found.slowest_s <= limit_s
    assert found.total_s == pytest.approx(min(within))
    assert cut(costs, order, limit_s, found.total_s, enter_s=enter_s, leave_s=leave_s) is None
    assert cut(costs, order, limit_s, found.total_s * (1 + EQUAL), enter_s=enter_s, leave_s=leave_s) is not None


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
    assert min(shares) > 0.88
    assert sum(shares) / len(shares) > 0.99


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
