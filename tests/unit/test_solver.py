"""Pipelines that the searches find against all that there are: over choice, order and cuts, for both objectives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import place_all
from orchestrator.core.solver import Solver
from shoal.types import Objective, WorkerId
from tests.support.brute_force import all_pipes, random_fleet, token_s, tokens_per_s

KV_TOKENS = 512
# Sums of the same times in another order.
EQUAL = 1e-6
STREAMS = (1, 3, 8, 16, 40)


def check_against_all(model: ModelFootprint, fleet: FleetFigures, num_streams: int) -> None:
    pipes = list(all_pipes(model, fleet, KV_TOKENS))
    solver = Solver(model, fleet)
    lone, many = solver.for_latency(KV_TOKENS), solver.for_throughput(num_streams, KV_TOKENS)
    if not pipes:
        assert lone is None
        assert many is None
        assert not solver.is_possible(KV_TOKENS)
        return
    assert lone is not None
    assert many is not None
    assert solver.is_possible(KV_TOKENS)
    assert lone.route.total_s == pytest.approx(min(token_s(model, fleet, pipe) for pipe in pipes), rel=EQUAL)
    best = max(tokens_per_s(model, fleet, pipe, num_streams) for pipe in pipes)
    assert many.tokens_per_s == pytest.approx(best, rel=EQUAL)


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


def large_fleet() -> tuple[ModelFootprint, FleetFigures]:
    """A hundred devices, of which none holds eighty layers by itself."""
    draw = random.Random(7)
    model, small = random_fleet(11, max_devices=6, max_layers=12, is_tight=False, is_full=True)
    model = replace(model, layer_bytes=(20 * 2**20,) * 80)
    devices = tuple(
        replace(
            draw.choice(small.devices),
            worker_id=WorkerId(f"w{index:03}"),
            profile=replace(small.devices[0].profile, memory_bytes=draw.choice((1, 2, 3)) * 2**30),
        )
        for index in range(100)
    )
    return model, FleetFigures(devices, {}, LinkFigures(0.001, 1e7))


def test_the_same_fleet_gets_the_same_plan() -> None:
    model, fleet = random_fleet(3, max_devices=6, max_layers=12, is_tight=False)
    first, second = Solver(model, fleet), Solver(model, fleet)
    assert first.for_throughput(16, KV_TOKENS) == second.for_throughput(16, KV_TOKENS)
    assert first.for_latency(KV_TOKENS) == second.for_latency(KV_TOKENS)
