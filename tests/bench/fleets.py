"""What fleets that nobody has would do, by their size, their load and how often devices leave: tables, and plots of them.

Runs in virtual time, so the figures do not depend on the machine, only how long they take: `python -m tests.bench.fleets`
takes ten minutes. Needs the default model in SHOAL_HOME. Figures are explained in docs/simulation.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.models import open_store
from cli.simulate import SimulationOptions, synthetic_fleets
from loadtest.plots import Curve, Curves, draw_curves
from modelstore.manifest import Manifest
from orchestrator.core.demand import Demand
from orchestrator.shards import footprint
from simulation.results import Results, results_of
from simulation.run import plan_sites, play
from simulation.settings import Churn, Load, Settings

MODEL = "smollm2-135m"
SIZES = (10, 25, 50, 100, 250, 500, 1000)
# Streams a device: what targets allow, and more than that.
FEW, MANY = 4, 10
LOADED_DEVICES = 100
RATES = (10.0, 20.0, 40.0, 60.0, 80.0, 120.0)
LEAVING = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
CHURN_STREAMS = 400
SEED = 1


@dataclass(frozen=True, slots=True)
class Run:
    """A point of a curve. x: what is varied. took_s: of this machine."""

    x: float
    results: Results
    took_s: float


def run(
    manifest: Manifest, num_devices: int, load: Load, seconds: float, per_hour: float = 0.0
) -> tuple[Results, float]:
    """As `shoal plan --simulate --fleet` does it; also how long it took."""
    began = time.process_time()
    fleets, _ = synthetic_fleets(manifest, SimulationOptions(fleet=num_devices, seed=SEED))
    # What a plan is for does not change with an open loop's rate.
    num_streams = load.num_streams or CHURN_STREAMS
    settings = Settings(
        model=footprint(manifest),
        demand=Demand(num_streams, replicas=0, is_shared=True),
        load=load,
        duration_s=seconds,
        churn=Churn(per_hour),
        seed=SEED,
        attention_tokens=manifest.config.attention_tokens,
    )
    sites = plan_sites(settings, fleets, lambda share, text: None)
    played = play(settings, sites, lambda share, text: None)
    return results_of(settings, sites, played), time.process_time() - began


def sweep(points: Sequence[float], work: Callable[[float], tuple[Results, float]]) -> list[Run]:
    """A run for each point, told as it is done."""
    runs = []
    for x in points:
        runs.append(Run(x, *work(x)))
        sys.stdout.write(_row(runs[-1]) + "\n")
        sys.stdout.flush()
    return runs


HEADER = (
    "| {what} | pipelines | tokens/s, of that predicted | good requests/s | good | first token p50, p95 | gap p50, p99 "
    "| busy | pipelines lost | stood still p50, p95 | took |"
)


def _row(one: Run) -> str:
    """A row of a table."""
    results, recovery = one.results, one.results.recovery
    gap = recovery.gap if recovery else None
    ttft, token_gap = results.ttft, results.gap
    cells = (
        f"{one.x:g}",
        str(results.num_pipelines),
        f"{results.tokens_per_s:,.0f}, {results.tokens_per_s / results.predicted_tokens_per_s:.0%}",
        f"{results.goodput_per_s:.1f}",
        f"{results.good_share or 0.0:.1%}",
        f"{ttft.p50_s:.2f}, {ttft.p95_s:.2f} s" if ttft else "",
        f"{token_gap.p50_s * 1e3:.0f}, {token_gap.p99_s * 1e3:.0f} ms" if token_gap else "",
        f"{results.busy:.0%}",
        str(recovery.num_pipelines) if recovery else "",
        f"{gap.p50_s:.1f}, {gap.p95_s:.1f} s" if gap else "",
        f"{one.took_s:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def by_devices(manifest: Manifest) -> str:
    """Fleets of all sizes, with few and with many streams a device."""
    runs = {
        each: sweep(SIZES, lambda x, each=each: run(manifest, int(x), Load(num_streams=each * int(x)), 20.0))  # type: ignore[misc]
        for each in (FEW, MANY)
    }
    tokens = [
        Curve(f"{each} streams a device", [(one.x, one.results.tokens_per_s) for one in found])
        for each, found in runs.items()
    ]
    predicted = [(one.x, one.results.predicted_tokens_per_s) for one in runs[MANY]]
    good = [
        Curve(f"{each} streams a device", [(one.x, one.results.goodput_per_s) for one in found])
        for each, found in runs.items()
    ]
    curves = [*tokens, Curve(f"{MANY}, predicted for answers alone", predicted)]
    return draw_curves(
        "fleets_by_devices",
        [
            Curves("Tokens/s", "devices", curves, is_log_x=True, is_log_y=True),
            Curves("Requests a second within targets", "devices", good, is_log_x=True, is_log_y=True),
        ],
    )


def by_load(manifest: Manifest) -> str:
    """One fleet, more and more requests."""
    runs = sweep(RATES, lambda x: run(manifest, LOADED_DEVICES, Load(rate_per_s=x), 30.0))
    share = Curve("good", [(one.x, one.results.good_share or 0.0) for one in runs])
    tokens = Curve("tokens/s", [(one.x, one.results.tokens_per_s) for one in runs])
    title = f"Share of requests within their targets, {LOADED_DEVICES} devices"
    return draw_curves(
        "fleets_by_load",
        [
            Curves(title, "requests a second", [share], is_share=True),
            Curves("Tokens a second", "requests a second", [tokens]),
        ],
    )


def by_churn(manifest: Manifest) -> str:
    """One fleet, whose devices leave ever more often."""
    load = Load(num_streams=CHURN_STREAMS // 2)
    runs = sweep(LEAVING, lambda x: run(manifest, LOADED_DEVICES, load, 60.0, x))
    gaps = [(one.x, one.results.recovery.gap) for one in runs if one.results.recovery]
    stood = Curves(
        "How long streams stand still when a device leaves, seconds",
        "times an hour that each device leaves",
        [
            Curve("median", [(x, gap.p50_s) for x, gap in gaps if gap]),
            Curve("p95", [(x, gap.p95_s) for x, gap in gaps if gap]),
        ],
    )
    tokens = Curve("tokens/s", [(one.x, one.results.tokens_per_s) for one in runs])
    title = f"Tokens a second, {LOADED_DEVICES} devices"
    return draw_curves("fleets_by_churn", [Curves(title, "times an hour that each device leaves", [tokens]), stood])


PARTS = {"devices": by_devices, "load": by_load, "churn": by_churn}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleets", description="Simulate fleets of all sizes.")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the plots")
    parser.add_argument("--only", choices=sorted(PARTS), help="one part")
    options = parser.parse_args()
    manifest = open_store(None).open(MODEL)
    for name, part in PARTS.items():
        if options.only in (None, name):
            sys.stdout.write(HEADER.format(what=name) + "\n")
            (options.out / f"fleets_by_{name}.svg").write_text(part(manifest))


if __name__ == "__main__":
    main()
