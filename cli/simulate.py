"""`shoal plan --simulate`: what a fleet would do under load, played in virtual time by the schedulers that would run it.

Puts devices, load and churn together for `simulation`, shows how far it is, and what came of it; for figures of plans alone
see `cli.plan`, which calls this.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal import note, say, to_jsonable, waiting, write_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from modelstore.manifest import Manifest
    from orchestrator.core.demand import Demand
    from orchestrator.core.figures import FleetFigures
    from simulation.results import ClassFigures, RecoveryFigures, Results, Spread
    from simulation.run import Progress
    from simulation.settings import Settings

# In a log, a line for each tenth.
NUM_LOGGED = 10

Simulate = Annotated[bool, typer.Option("--simulate", help="Play the plan under load, in virtual time.")]
Fleet = Annotated[
    int, typer.Option(min=0, max=10_000, help="With --simulate or --sweep: so many devices of mixed kinds.")
]
Rate = Annotated[
    float, typer.Option(min=0, help="With --simulate: requests a second; 0: each stream asks again when answered.")
]
Seconds = Annotated[
    float, typer.Option(min=0, max=86_400, help="With --simulate: how long to play; 0: some seconds' work.")
]
ChurnRate = Annotated[
    float, typer.Option("--churn", min=0, max=3600, help="With --simulate: how often an hour each device leaves.")
]
Seed = Annotated[int, typer.Option(min=0, help="With --simulate: the same seed, the same run.")]
Plot = Annotated[Path | None, typer.Option(help="With --simulate or --sweep: draw it to an .svg file.")]


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """As given; 0 and None: not given."""

    fleet: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    churn: float = 0.0
    seed: int = 1
    plot: Path | None = None

    def check_unused(self) -> None:
        """Raise ConfigError if anything was asked for that only a simulation has."""
        if self != SimulationOptions(seed=self.seed):
            raise ConfigError(
                "fleet, rate, seconds, churn and plot are of a simulation: add --simulate", field="simulate"
            )


def check_plot(path: Path) -> None:
    """Before a long run: that its picture can be drawn. Raises ConfigError."""
    from loadtest.report import NEEDS_MATPLOTLIB, can_draw

    if path.suffix != ".svg" or not path.absolute().parent.is_dir():
        raise ConfigError(f"plot = {path} must be an .svg file in a folder that there is", field="plot")
    if not can_draw():
        raise ConfigError(NEEDS_MATPLOTLIB, field="plot")


def synthetic_fleets(manifest: Manifest, options: SimulationOptions) -> tuple[list[FleetFigures], str]:
    """The sites of a fleet of that many devices, and what it is made of."""
    from launch.profiles import load_profile
    from orchestrator.shards import footprint
    from orchestrator.what_if import fleet_of_profiles
    from simulation.synthetic import KIND_SHARES, in_sites, make_devices

    profiles = {kind: load_profile(kind) for kind in KIND_SHARES}
    devices = make_devices(profiles, options.fleet, options.seed)
    kinds = Counter(profile.name for _, profile in devices)
    model = footprint(manifest)
    fleets = [fleet_of_profiles(model, site) for site in in_sites(devices)]
    return fleets, f"{len(devices)} devices ({', '.join(f'{count} {kind}' for kind, count in kinds.most_common())})"


def simulate(
    manifest: Manifest,
    fleets: Sequence[FleetFigures],
    source: str,
    demand: Demand,
    options: SimulationOptions,
    *,
    is_json: bool,
) -> None:
    """Plan, play and show."""
    from simulation.results import results_of
    from simulation.run import plan_sites, play
    from simulation.settings import some_seconds

    if options.plot is not None:
        check_plot(options.plot)
    began = perf_counter()
    with _progress() as tell:
        settings = _settings(manifest, demand, options)
        sites = plan_sites(settings, fleets, tell)
        if not options.seconds:
            predictions = [one for site in sites for one in site.predictions]
            settings = replace(settings, duration_s=some_seconds(predictions, options.churn))
        played = play(settings, sites, tell)
    results = results_of(settings, sites, played)
    if options.plot is not None:
        options.plot.write_text(_picture(results))
    if is_json:
        plain = to_jsonable(results)
        assert isinstance(plain, dict)
        write_json({"model": manifest.name, **plain})
        return
    _show(results, manifest, source, settings)
    note(f"played in {perf_counter() - began:.1f} s; the same seed ({options.seed}) gives the same again")


def _settings(manifest: Manifest, demand: Demand, options: SimulationOptions) -> Settings:
    from orchestrator.shards import footprint
    from simulation.settings import MIN_SECONDS, Churn, Load, Settings

    load = Load(rate_per_s=options.rate) if options.rate else Load(num_streams=demand.num_streams)
    return Settings(
        model=footprint(manifest),
        demand=demand,
        load=load,
        duration_s=options.seconds or MIN_SECONDS,
        churn=Churn(options.churn),
        seed=options.seed,
        attention_tokens=manifest.config.attention_tokens,
    )


@contextmanager
def _progress() -> Iterator[Progress]:
    """Say on stderr how far it is: all the time where somebody watches, else now and then."""
    with waiting("planning") as update:
        told = -1

        def tell(share: float, text: str) -> None:
            nonlocal told
            if sys.stderr.isatty():
                update(f"{share:.0%}, {text}")
            elif int(share * NUM_LOGGED) != told:
                told = int(share * NUM_LOGGED)
                update(f"{share:.0%}, {text}")

        yield tell


def _show(results: Results, manifest: Manifest, source: str, settings: Settings) -> None:
    say(f"{manifest.name}, {manifest.config.num_layers} layers, on {source}", style="bold")
    sites = f" at {results.num_sites} sites, each with an orchestrator" if results.num_sites > 1 else ""
    stages = ", ".join(f"{count} of {number}" for number, count in results.stages.items())
    say(
        f"{_count(results.num_pipelines, 'pipeline')}{sites}; by stages: {stages}; {results.num_standby} device(s) stand by"
    )
    load = settings.load
    asking = (
        f"{load.rate_per_s:g} requests a second" if load.rate_per_s else f"{load.num_streams} streams that ask again"
    )
    say(
        f"{asking}; prompts of {load.prompts.median:g} tokens ({load.prompts.least}-{load.prompts.most}), answers of "
        f"{load.answers.median:g} ({load.answers.least}-{load.answers.most})"
    )
    say(f"{results.duration_s:g} s, of which the first {results.warm_s:g} s do not count\n")
    say(_class_table(results))
    good = f", {results.good_share:.0%} of all" if results.good_share is not None else ""
    predicted = results.predicted_tokens_per_s
    share = (
        f", {results.tokens_per_s / predicted:.0%} of the {predicted:,.0f} predicted for answers alone"
        if predicted
        else ""
    )
    say(
        f"\n{results.tokens_per_s:,.0f} tokens/s of answers{share}; {results.prompt_tokens_per_s:,.0f} of prompts beside"
    )
    say(f"{results.goodput_per_s:,.1f} requests a second within their targets{good}")
    say(f"devices compute {results.busy:.0%} of the time, the busiest of each pipeline {results.busiest:.0%}")
    if results.recovery is not None:
        _show_recovery(results.recovery)
    _show_ends(results.ends)
    say(f"bound by {results.bound_by}")


def _show_ends(ends: dict[str, int]) -> None:
    words = {
        "finished": "answered", "refused": "refused as all queues were full", "no_capacity": "found no pipeline",
        "waiting": "had not begun at the end", "lost": "lost",
    }  # fmt: skip
    told = [f"{count:,} {words[name]}" for name, count in ends.items() if count or name == "lost"]
    say(f"requests: {', '.join(told)}")


def _show_recovery(recovery: RecoveryFigures) -> None:
    say(
        f"{_count(recovery.num_left, 'device')} left: {_count(recovery.num_pipelines, 'pipeline')} lost, "
        f"{recovery.num_repaired} repaired by a device that stood by, {recovery.num_built} made anew"
    )
    gap = recovery.gap
    stood = (
        f"; streams stood still for {_time(gap.p50_s)}, p95 {_time(gap.p95_s)}, at most {_time(gap.max_s)}"
        if gap
        else ""
    )
    say(f"{_count(recovery.num_moved, 'answer')} went on elsewhere at once, {recovery.num_parked} waited{stood}")


def _class_table(results: Results) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("class", no_wrap=True)
    for title in ("requests", "good", "first token: p50", "p95", "target", "between tokens: p50", "p99", "target"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in results.classes:
        table.add_row(*_class_row(one))
    return table


def _class_row(one: ClassFigures) -> tuple[str, ...]:
    return (
        one.qos.value,
        f"{one.num_judged:,}",
        "-" if one.good_share is None else f"{one.good_share:.0%}",
        *_two(one.ttft, "p95_s"),
        "-" if one.ttft_s is None else _time(one.ttft_s),
        *_two(one.gap, "p99_s"),
        "-" if one.inter_token_s is None else _time(one.inter_token_s),
    )


def _two(spread: Spread | None, high: str) -> tuple[str, str]:
    return ("-", "-") if spread is None else (_time(spread.p50_s), _time(getattr(spread, high)))


def _picture(results: Results) -> str:
    """Tokens a second over time, with the losses of pipelines."""
    from loadtest.plots import Curve, Curves, draw_curves

    points = [(second + 0.5, float(count)) for second, count in enumerate(results.tokens_by_s)]
    title = f"Tokens a second, {results.num_devices} devices"
    if results.losses_at_s:
        title += "; dotted: a pipeline is lost"
    curve = Curve("tokens/s", points, is_marked=False)
    return draw_curves("simulated", [Curves(title, "seconds", [curve], marks=results.losses_at_s)])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
