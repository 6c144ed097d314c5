"""`shoal plan`: who would hold which layers, how fast that would be, and what else is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.ask import DEFAULT_SERVER, Server
from cli.models import open_store
from cli.simulate import (
    ChurnRate,
    Fleet,
    Plot,
    Rate,
    Seconds,
    Seed,
    Simulate,
    SimulationOptions,
    synthetic_fleets,
)
from cli.simulate import simulate as play
from cli.sweep import Sweep, SweepOptions, axes_of, digest_of, run_sweep, sweep_options, with_sweep
from cli.terminal import format_bytes, say, write_json
from shoal.errors import ConfigError, ModelNotFound
from simulation.grid import DEFAULT_PROMPT, DEFAULT_STREAMS, PLUS, STREAMS_A_DEVICE, Cell

if TYPE_CHECKING:
    from rich.table import Table

    from modelstore.manifest import Manifest
    from orchestrator.core.demand import Demand
    from orchestrator.core.figures import FleetFigures
    from orchestrator.core.planning import FleetPlan, Outcome
    from orchestrator.core.predictions import Prediction, StagePrediction
    from shoal.types import DeviceProfile, WorkerId

TIMEOUT_S = 10.0
# Of a bar of all layers, and of one of a device's memory.
LAYER_CELLS = 30
MEMORY_CELLS = 16
MODEL = "smollm2-135m"

Devices = Annotated[
    str, typer.Option(help="Devices to plan for, as phone,phone,tablet:latency; empty: those of the running fleet.")
]
Profiles = Annotated[
    Path | None, typer.Option(help="A folder of device profiles to plan for, each a device.", exists=True)
]
Goal = Annotated[Literal["latency", "throughput", "mixed"], typer.Option(help="What the plan is to be good for.")]
Context = Annotated[int, typer.Option(min=0, help="Tokens promised to each stream; 0: what there is memory for.")]
Home = Annotated[Path | None, typer.Option(help="Where models are kept. [env SHOAL_HOME]", show_default=False)]
Streams = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100_000,
        help=f"Streams at the same time, of all pipelines together. [default: {DEFAULT_STREAMS}, or with --fleet "
        f"{STREAMS_A_DEVICE} a device]",
        show_default=False,
    ),
]
Prompt = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Tokens of the prompt whose first token is predicted. [default: {DEFAULT_PROMPT}]",
        show_default=False,
    ),
]
Replicas = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=64,
        help="Pipelines, with --fleet of each site; 0: as many as give most tokens. [default: 1, or with --fleet 0]",
        show_default=False,
    ),
]


@with_sweep
def plan(
    devices: Devices = "",
    profiles: Profiles = None,
    model: Annotated[str, typer.Option(help="A stored model. [default: the fleet's, or smollm2-135m]")] = "",
    objective: Goal = "throughput",
    context: Context = 0,
    streams: Streams = None,
    replicas: Replicas = None,
    prompt: Prompt = None,
    simulate: Simulate = False,
    fleet: Fleet = 0,
    rate: Rate = 0.0,
    seconds: Seconds = 0.0,
    churn: ChurnRate = 0.0,
    seed: Seed = 1,
    plot: Plot = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    home: Home = None,
    server: Server = DEFAULT_SERVER,
    **values: Any,
) -> None:
    """Plan who holds which layers: of devices that run, or of some that you think of; and how that would do under load."""
    asked, swept = SimulationOptions(fleet, rate, seconds, churn, seed, plot), sweep_options(**values)
    subjects = Subjects(devices, profiles, model, home, server)
    cell = Cell(
        fleet, "", objective, streams or 0, replicas, context, prompt or 0, rate, churn, seconds, seed, simulate
    )
    if swept.words:
        _sweep(cell, swept, subjects, plot, is_json=json)
        return
    swept.check_unused()
    if not simulate:
        asked.check_unused()
    _plan_one(cell, subjects, asked, is_json=json)


def _plan_one(cell: Cell, subjects: Subjects, options: SimulationOptions, *, is_json: bool) -> None:
    """Plan, or play what is planned. cell: of prompt and streams 0 for nothing said."""
    from simulation.sweep import demand_of

    prompt, demand = cell.prompt or None, demand_of(replace(cell, prompt=cell.prompt or DEFAULT_PROMPT))
    if cell.fleet:
        _check_one_way(subjects.devices, subjects.profiles, is_synthetic=True)
        manifest = _allowing(open_store(subjects.home).open(subjects.model or MODEL), cell.context, prompt)
        play(manifest, *synthetic_fleets(manifest, options), demand, options, is_json=is_json)
        return
    manifest, figures, source = _subject(subjects)
    _allowing(manifest, cell.context, prompt)
    if cell.is_played:
        play(manifest, [figures], source, demand, options, is_json=is_json)
        return
    _plan(manifest, figures, source, demand, is_json=is_json)


def _plan(manifest: Manifest, fleet: FleetFigures, source: str, demand: Demand, *, is_json: bool) -> None:
    from orchestrator.core.planning import plan_pipelines, to_plain
    from orchestrator.shards import footprint

    found = plan_pipelines(footprint(manifest), fleet, demand)
    if is_json:
        write_json({"model": manifest.name, **to_plain(found)})
        return
    _show(found, manifest, source)


def _allowing(manifest: Manifest, context: int, prompt: int | None) -> Manifest:
    """The model, if it has room for so many tokens; 0 and None: nothing was said. Raises ConfigError with the numbers."""
    most = manifest.config.context_tokens
    if context > most:
        raise ConfigError(
            f"context = {context} is more than {manifest.name} can have: its context is {most} tokens", field="context"
        )
    if prompt is not None and prompt >= (context or most):
        raise ConfigError(
            f"prompt = {prompt} leaves no room for an answer: the context is {context or most} tokens, so it may have up to "
            f"{(context or most) - 1}",
            field="prompt",
        )
    return manifest


def _check_one_way(devices: str, profiles: Path | None, *, is_synthetic: bool = False) -> None:
    """Raise ConfigError if devices are said in two ways."""
    if bool(devices) + (profiles is not None) + is_synthetic > 1:
        raise ConfigError("devices, profiles and fleet are ways to say the same: give one of them", field="devices")


@dataclass(frozen=True, slots=True)
class Subjects:
    """Which devices and which model, as given."""

    devices: str
    profiles: Path | None
    model: str
    home: Path | None
    server: str


def _subject(asked: Subjects) -> tuple[Manifest, FleetFigures, str]:
    """The model, the figures of the devices, and where these are from."""
    from orchestrator.shards import footprint
    from orchestrator.what_if import fleet_of_messages, fleet_of_profiles

    _check_one_way(asked.devices, asked.profiles)
    store, model, server = open_store(asked.home), asked.model, asked.server
    if asked.devices or asked.profiles:
        manifest = store.open(model or MODEL)
        named = _named_profiles(asked.devices.split(",") if asked.devices else _files(asked.profiles))
        count = "1 device" if len(named) == 1 else f"{len(named)} devices"
        return manifest, fleet_of_profiles(footprint(manifest), named), f"{count} as declared"
    from shoal.client import Client

    with Client(server, timeout_s=TIMEOUT_S) as client:
        reported, served = client.plan(), client.status().model
    if model and model != served:
        raise ModelNotFound(f"the fleet at {server} serves {served}, and has times for that alone: leave out --model")
    fleet = fleet_of_messages(reported.devices)
    return store.open(served), fleet, f"the fleet at {server}"


def _sweep(base: Cell, options: SweepOptions, asked: Subjects, plot: Path | None, *, is_json: bool) -> None:
    """Plan for each cell of a grid; base: what holds where the grid says nothing, of prompt and streams 0 for nothing."""
    from launch.profiles import load_profile
    from orchestrator.shards import footprint
    from orchestrator.what_if import fleet_of_profiles
    from simulation.sweep import Subject
    from simulation.synthetic import KIND_SHARES

    axes, cells = axes_of(options, base, plot)
    _check_one_way(asked.devices, asked.profiles, is_synthetic=any(cell.fleet for cell in cells))
    given: dict[str, FleetFigures] = {}
    if all(cell.fleet or cell.devices for cell in cells):
        manifest = open_store(asked.home).open(asked.model or MODEL)
    else:
        manifest, given[""], _ = _subject(asked)
    model = footprint(manifest)
    for text in {cell.devices for cell in cells if cell.devices}:
        given[text] = fleet_of_profiles(model, _named_profiles(text.split(PLUS)))
    for cell in cells:
        _allowing(manifest, cell.context, cell.prompt or None)
    cells = tuple(replace(cell, prompt=cell.prompt or DEFAULT_PROMPT) for cell in cells)
    profiles = {kind: load_profile(kind) for kind in KIND_SHARES}
    subject = Subject(model, manifest.config.attention_tokens, profiles, given)
    sweep = Sweep(manifest.name, digest_of(manifest.digest, subject), axes, cells)
    run_sweep(sweep, subject, options, plot, is_json=is_json)


def _files(folder: Path | None) -> list[str]:
    files = sorted(str(path) for path in folder.glob("*.toml")) if folder else []
    if not files:
        raise ConfigError(f"there is no .toml file in {folder}", field="profiles")
    return files


def _named_profiles(devices: Sequence[str]) -> list[tuple[WorkerId, DeviceProfile]]:
    """Named as `shoal up` would name them."""
    from launch.roster import named_devices

    return named_devices([device.strip() for device in devices])


def _show(found: FleetPlan, manifest: Manifest, source: str) -> None:
    say(f"{manifest.name}, {manifest.config.num_layers} layers, on {source}, for {found.objective.value}", style="bold")
    for one in found.pipelines:
        _show_pipeline(one, manifest.config.num_layers)
    if found.standby:
        say(f"\non standby: {', '.join(found.standby)} (no layers: the plan is no better with them)")
    say(f"\nbound by {found.bound_by}")
    say("\nwhat is possible", style="bold")
    say(_alternatives(found))
    if any(part.is_declared for one in found.pipelines for part in one.stages):
        say(
            "* declared by a profile, not measured: `shoal plan` beside a running fleet uses measured times",
            style="dim",
        )


def _show_pipeline(one: Prediction, num_layers: int) -> None:
    placement = one.placement
    say(f"\npipeline {placement.pipeline_id} ({placement.mode.value})", style="bold")
    say(_stage_table(one, num_layers))
    first, token, solo = _time(one.first_token_s), _time(one.token_s), _time(one.solo_token_s)
    say(
        f"first token of a prompt of {one.prompt_tokens} after {first}; then {token} a token ({solo} for class latency)"
    )
    together = "1 stream" if one.num_streams == 1 else f"{one.num_streams} streams together, in batches of {one.rows}"
    say(f"{one.tokens_per_s:.1f} tokens/s with {together}")
    say(f"room for {placement.kv_tokens} tokens of KV, {placement.context_tokens} of them a stream at most")


def _stage_table(one: Prediction, num_layers: int) -> Table:
    """A row a stage, in order: its layers on the bar of all layers, its memory filled."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("device", "layers", "", "memory", ""):
        table.add_column(title, no_wrap=True)
    table.add_column("busy", justify="right", no_wrap=True)
    for part in one.stages:
        stage = part.stage
        table.add_row(
            stage.worker_id + "*" * part.is_declared,
            _layer_bar(stage.layers.start, stage.layers.stop, num_layers),
            str(stage.layers),
            _memory_bar(part),
            f"{format_bytes(stage.need_bytes)} of {format_bytes(part.memory_bytes)}",
            f"{part.busy:.0%}",
        )
    return table


def _layer_bar(start: int, stop: int, num_layers: int) -> str:
    cells = min(num_layers, LAYER_CELLS)
    begin = start * cells // num_layers
    end = max(stop * cells // num_layers, begin + 1)
    return "·" * begin + "█" * (end - begin) + "·" * (cells - end)


def _memory_bar(part: StagePrediction) -> str:
    """What weights and runtime take, then KV, then what is free."""
    stage, cells = part.stage, MEMORY_CELLS
    filled = min(round(stage.need_bytes / part.memory_bytes * cells), cells)
    fixed = min(round(part.fixed_bytes / part.memory_bytes * cells), filled)
    return "█" * fixed + "▒" * (filled - fixed) + "·" * (cells - filled)


def _alternatives(found: FleetPlan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("plan", no_wrap=True)
    for title in ("first token", "a token", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("devices", overflow="ellipsis", no_wrap=True, max_width=44)
    if not any(other.is_chosen for other in found.alternatives):
        table.add_row(
            "this plan", *_cells(found.outcome), _members([one.placement.worker_ids for one in found.pipelines])
        )
    for other in found.alternatives:
        what = other.what + " (this plan)" * other.is_chosen
        table.add_row(what, *_cells(other.outcome), _members(other.worker_ids))
    return table


def _cells(outcome: Outcome) -> tuple[str, str, str]:
    return _time(outcome.first_token_s), _time(outcome.token_s), f"{outcome.tokens_per_s:.1f}"


def _members(pipelines: Sequence[Sequence[str]]) -> str:
    """Stages in order; pipelines apart."""
    return " | ".join(" > ".join(worker_ids) for worker_ids in pipelines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
