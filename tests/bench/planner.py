"""How long planning takes, by the number of devices, and whether what it finds is the best there is: pure, no device.

Called by `run`, and by itself: `python -m tests.bench.planner`, where more and larger fleets can be held against all
pipelines that are possible, as with `--instances 36 --devices 6 --layers 12`, which takes half a minute each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

from orchestrator.core.demand import Demand
from orchestrator.core.grouping import place_all, plan
from orchestrator.core.pipelines import best_candidate
from orchestrator.core.solver import MAX_EXACT_DEVICES, Solver
from shoal.types import Objective
from tests.bench.context import Bench
from tests.bench.figures import Figure
from tests.support.brute_force import best_of_all, large_fleet, random_fleet

TIMES_TABLE = "Planner: milliseconds of a plan for 16 streams, unequal devices and links, 30 layers"
EQUALITY_TABLE = "Planner: against every pipeline that is possible, both objectives"
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32)
NUM_LAYERS = 30
NUM_FLEETS = 6
# Fleets, devices and layers at most: some seconds of looking at all there is.
COMPARED = ((200, 4, 8), (4, 5, 10))
STREAMS = (1, 3, 8, 16, 40)
KV_TOKENS = 512
# Sums of the same times in another order.
EQUAL = 1e-6
LARGE_STREAMS = 64

Rows = list[dict[str, object]]


def planner(bench: Bench) -> list[Figure]:
    """The figure, and both tables."""
    bench.tables[TIMES_TABLE] = list(times())
    bench.tables[EQUALITY_TABLE] = [compared(*sizes) for sizes in COMPARED]
    raw: Rows = [{**measure_large(), "counts": True} for _ in range(3)]
    slowest_s = statistics.median(max(float(str(row[one.value])) for one in Objective) for row in raw)
    most_s = max(float(str(row["as many as pay"])) for row in raw)
    note = f"pure core, the slowest objective; {most_s:.1f} s where the number of pipelines is left open"
    return [Figure("planner", slowest_s, len(raw), 0, raw, note)]


def measure_large() -> dict[str, object]:
    """Seconds of a plan for a hundred devices and eighty layers, by objective, and with as many pipelines as pay."""
    model, fleet = large_fleet()
    demands = {one.value: Demand(LARGE_STREAMS, objective=one) for one in Objective}
    demands["as many as pay"] = Demand(LARGE_STREAMS, replicas=0)
    return {name: _seconds(partial(place_all, model, fleet, demand)) for name, demand in demands.items()}


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
    """How many plans for random fleets are as good as the best pipeline that is possible."""
    num_equal, num_possible, worst = 0, 0, 1.0
    for seed in range(num_fleets):
        model, fleet = random_fleet(
            seed, max_devices=max_devices, max_layers=max_layers, is_tight=seed % 2 > 0, is_full=max_devices > 4
        )
        num_streams, solver = STREAMS[seed % len(STREAMS)], Solver(model, fleet)
        best = best_of_all(model, fleet, KV_TOKENS, num_streams)
        lone, many = solver.for_latency(KV_TOKENS), solver.for_throughput(num_streams, KV_TOKENS)
        if best is None or lone is None or many is None:
            num_equal += best is None and lone is None and many is None
            worst = worst if best is None else 0.0
            continue
        num_possible += 1
        share = min(best[0] / lone.route.total_s, many.tokens_per_s / best[1])
        num_equal += share > 1 - EQUAL
        worst = min(worst, share)
    return {
        "fleets": num_fleets,
        "of which can hold the model": num_possible,
        "devices, at most": max_devices,
        "layers, at most": max_layers,
        "as good as the best": num_equal,
        "worst, of the best": f"{worst:.6f}",
    }


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
