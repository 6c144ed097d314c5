"""Plans or plays one cell of a sweep, wherever it is sent: in this process, in another one, or on another machine.

A function of values that can be sent, so that a cell's figures depend on nothing else. What is wrong with a cell is its
result. Called through `launch`, for the command line.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.demand import Demand
from orchestrator.core.figures import FleetFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.predictions import Prediction
from orchestrator.what_if import fleet_of_profiles
from shoal.errors import ShoalError
from shoal.types import DeviceProfile, Objective
from simulation.grid import Cell
from simulation.results import Results, results_of
from simulation.run import PlannedSite, plan_sites, play
from simulation.settings import MIN_SECONDS, Churn, Load, Settings, some_seconds
from simulation.synthetic import in_sites, make_devices

# None: there is no such figure, as of a class that nobody asked for.
Figures = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Subject:
    """What all cells have in common. profiles: of drawn devices, by kind; given: devices by how a cell names them."""

    model: ModelFootprint
    attention_tokens: float
    profiles: Mapping[str, DeviceProfile]
    given: Mapping[str, FleetFigures]


@dataclass(frozen=True, slots=True)
class Task:
    """What is sent."""

    subject: Subject
    cell: Cell


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a cell has no figures."""

    reason: str
    message: str


def work(task: Task) -> Figures | Failed:
    """Plan, and play if that is asked for."""
    try:
        return _figures(task.subject, task.cell)
    except ShoalError as error:
        return Failed(error.reason, error.message)


def _figures(subject: Subject, cell: Cell) -> Figures:
    settings, fleets = _settings(subject, cell), _fleets(subject, cell)
    sites = plan_sites(settings, fleets, _tell_nobody)
    if not cell.is_played:
        return _planned(sites)
    if not cell.seconds:
        predictions = [one for site in sites for one in site.predictions]
        settings = replace(settings, duration_s=some_seconds(predictions, cell.churn))
    return _played(results_of(settings, sites, play(settings, sites, _tell_nobody)))


def demand_of(cell: Cell) -> Demand:
    """What a cell's pipelines are planned for."""
    return Demand(
        num_streams=cell.num_streams,
        context_tokens=cell.context,
        objective=Objective(cell.objective),
        replicas=cell.num_replicas,
        is_promised=cell.context > 0,
        is_shared=True,
        prompt_tokens=cell.prompt,
    )


def _settings(subject: Subject, cell: Cell) -> Settings:
    return Settings(
        model=subject.model,
        demand=demand_of(cell),
        load=Load(rate_per_s=cell.rate) if cell.rate else Load(num_streams=cell.num_streams),
        duration_s=cell.seconds or MIN_SECONDS,
        churn=Churn(cell.churn),
        seed=cell.seed,
        attention_tokens=subject.attention_tokens,
    )


def _fleets(subject: Subject, cell: Cell) -> Sequence[FleetFigures]:
    if not cell.fleet:
        return [subject.given[cell.devices]]
    devices = make_devices(subject.profiles, cell.fleet, cell.seed)
    return [fleet_of_profiles(subject.model, site) for site in in_sites(devices)]


def _tell_nobody(share: float, text: str) -> None:
    """How far one cell is, nobody sees: cells are many, and elsewhere."""


def _planned(sites: Sequence[PlannedSite]) -> Figures:
    predictions: list[Prediction] = [one for site in sites for one in site.predictions]
    return {
        **_counted(sum(len(site.fleet.devices) for site in sites), predictions),
        "tokens_per_s": sum(one.tokens_per_s for one in predictions),
        "first_token_s": statistics.median(one.first_token_s for one in predictions),
        "token_s": statistics.median(one.token_s for one in predictions),
    }


def _counted(num_devices: int, predictions: Sequence[Prediction]) -> Figures:
    num_used = sum(len(one.stages) for one in predictions)
    return {"num_devices": num_devices, "num_pipelines": len(predictions), "num_standby": num_devices - num_used}


def _played(results: Results) -> Figures:
    ttft, gap = results.ttft, results.gap
    return {
        "num_devices": results.num_devices,
        "num_pipelines": results.num_pipelines,
        "num_standby": results.num_standby,
        "predicted_tokens_per_s": results.predicted_tokens_per_s,
        "tokens_per_s": results.tokens_per_s,
        "goodput_per_s": results.goodput_per_s,
        "good_share": results.good_share,
        "ttft_p50_s": ttft.p50_s if ttft else None,
        "ttft_p95_s": ttft.p95_s if ttft else None,
        "gap_p50_s": gap.p50_s if gap else None,
        "gap_p99_s": gap.p99_s if gap else None,
        "busy": results.busy,
        "num_lost": results.ends["lost"],
        "duration_s": results.duration_s,
        "bound_by": results.bound_by,
    }
