"""How long planning takes, by the number of devices, and whether what it finds is the best there is: pure, no device.

Called by `run`, and by itself: `python -m tests.bench.planner`, where more fleets can be held against all pipelines that
are possible, as with `--instances 300 --devices 6 --layers 12`: 636,576 pipelines of the largest, 0.1 s each.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.grouping import place_all, plan
from orchestrator.core.pipelines import best_candidate
from orchestrator.core.solver import MAX_EXACT_DEVICES, Candidate, Solver
from shoal.types import Objective
from tests.bench.context import Bench
from tests.bench.figures import Figure
from tests.support.brute_force import (
    Best,
    best_of_all,
    fits,
    large_fleet,
    pipe_of,
    random_fleet,
    token_s,
    tokens_per_s,
    with_twins,
)

TIMES_TABLE = "Planner: milliseconds of a plan for 16 streams, unequal devices and links, 30 layers"
EQUALITY_TABLE = "Planner: against every pipeline that is possible, both objectives"
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32)
NUM_LAYERS = 30
NUM_FLEETS = 6
# Fleets, devices and layers at most: some seconds of looking at all there is.
COMPARED = ((200, 4, 8), (40, 6, 12))
STREAMS = (1, 3, 8, 16, 40)
KV_TOKENS = 512
# Sums of the same times in another order.
EQUAL = 1e-6
LARGE_STREAMS = 64
OPEN = "as many as pay"
OPEN_UNEQUAL = "as many as pay, all unequal"

Rows = list[dict[str, object]]


def planner(bench: Bench) -> list[Figure]:
    """The figure, and both tables."""
    bench.tables[TIMES_TABLE] = list(times())
    bench.tables[EQUALITY_TABLE] = [compared(*sizes) for sizes in COMPARED]
    raw: Rows = [{**measure_large(), "counts": True} for _ in range(3)]
    slowest_s = statistics.median(max(float(str(row[one.value])) for one in Objective) for row in raw)
    open_s, unequal_s = (statistics.median(float(str(row[name])) for row in raw) for name in (OPEN, OPEN_UNEQUAL))
    note = (
        f"pure core, the slowest objective; {open_s:.2f} s where the number of pipelines is left open, "
        f"{unequal_s:.2f} if no two devices are alike"
    )
    return [Figure("planner", slowest_s, len(raw), 0, raw, note)]


def measure_large() -> dict[str, object]:
    """Seconds of a plan for a hundred devices and eighty layers, by objective, and with as many pipelines as pay.

    For that also where no two devices or links are alike, and no pipeline of few devices has the memory.
    """
    model, fleet = large_fleet()
    demands = {one.value: Demand(LARGE_STREAMS, objective=one) for one in Objective}
    demands[OPEN] = Demand(LARGE_STREAMS, replicas=0)
    taken: dict[str, object] = {
        name: _seconds(partial(place_all, model, fleet, demand)) for name, demand in demands.items()
    }
    model, fleet = random_fleet(1, max_devices=100, max_layers=80, is_tight=True, is_full=True)
    taken[OPEN_UNEQUAL] = _seconds(partial(place_all, model, fleet, demands[OPEN]))
    return taken


def times(sizes: Iterable[int] = SIZES) -> Iterable[dict[str, object]]:
    """By the number of devices, over some fleets, with little memory and with enough."""
    for num_devices in sizes:
        taken = []
        for seed in range(NUM_FLEETS):
            model, fleet = random_fleet(
                seed, max_devices=num_devices, max_layers=NUM_LAYERS, is_tight=seed % 2 > 0, is_full=True
            )
            if best_candidate(Solver(model, fleet, is_exact=False), Demand(1)) is None:
                continue
            taken.append(1e3 * _seconds(partial(plan, model, fleet, (), Demand(16))))
        yield {
            "devices": num_devices,
            "search": "exact" if num_devices <= MAX_EXACT_DEVICES else "heuristic",
            "fleets": len(taken),
            "median": f"{statistics.median(taken):.1f}",
            "most": f"{max(taken):.1f}",
        }


def compared(num_fleets: int, max_devices: int, max_layers: int) -> dict[str, object]:
    """How many plans for random fleets are as good as the best pipeline that is possible, and as the best single device.

    Half of the fleets are as large as may be, the others up to that; half have little memory, a third devices that are
    alike. What a plan gives is
    computed anew from its devices and cuts, by the formulas of the reference.
    """
    shares, of_alone, num_impossible = list[float](), list[float](), 0
    for seed in range(num_fleets):
        model, fleet = random_fleet(
            seed, max_devices=max_devices, max_layers=max_layers, is_tight=seed % 2 > 0, is_full=seed % 4 > 1
        )
        fleet = fleet if seed % 3 else with_twins(fleet)
        num_streams, solver = STREAMS[seed % len(STREAMS)], Solver(model, fleet)
        best = best_of_all(model, fleet, KV_TOKENS, num_streams)
        lone, many = solver.for_latency(KV_TOKENS), solver.for_throughput(num_streams, KV_TOKENS)
        if best is None:
            num_impossible += lone is None and many is None
            continue
        judged = _judged(model, fleet, num_streams, best, (lone, many))
        shares.append(judged[0])
        of_alone.append(judged[1])
    return {
        "fleets": num_fleets,
        "devices, at most": max_devices,
        "layers, at most": max_layers,
        "can hold the model": len(shares),
        "the others, seen to be impossible": f"{num_impossible} of {num_fleets - len(shares)}",
        "as good as the best": sum(share > 1 - EQUAL for share in shares),
        "within 1 %": sum(share > 0.99 for share in shares),
        "worst, of the best": f"{min(shares):.6f}",
        "no worse than the best device": sum(share > 1 - EQUAL for share in of_alone),
    }


def _judged(
    model: ModelFootprint,
    fleet: FleetFigures,
    num_streams: int,
    best: Best,
    found: tuple[Candidate | None, Candidate | None],
) -> tuple[float, float]:
    """What is found for a lone stream and for many, as a share of the best of all, and of the best single device."""
    lone, many = (None if one is None else pipe_of(fleet, one.route) for one in found)
    if lone is None or many is None or not fits(model, lone, KV_TOKENS) or not fits(model, many, KV_TOKENS):
        return 0.0, 0.0
    lone_s, rate = token_s(model, fleet, lone), tokens_per_s(model, fleet, many, num_streams)
    of_best = min(best.token_s / lone_s, rate / best.tokens_per_s)
    is_alone = best.alone_tokens_per_s > 0
    return of_best, min(best.alone_token_s / lone_s, rate / best.alone_tokens_per_s) if is_alone else math.inf


def _seconds(work: Callable[[], object]) -> float:
    """Of processor time: others may have the cores too."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.planner", description="Time and check the planner.")
    parser.add_argument(
        "--instances", type=int, help="random fleets to hold against all pipelines; nothing else is done"
    )
    parser.add_argument("--devices", type=int, default=6, help="of these, at most (default 6)")
    parser.add_argument("--layers", type=int, default=12, help="of these, at most (default 12)")
    options = parser.parse_args()
    rows: Iterable[dict[str, object]]
    if options.instances:
        rows = [compared(options.instances, options.devices, options.layers)]
    else:
        rows = [*times(), *(compared(*sizes) for sizes in COMPARED), measure_large()]
    for row in rows:
        sys.stdout.write(", ".join(f"{name}: {value}" for name, value in row.items()) + "\n")


if __name__ == "__main__":
    main()
