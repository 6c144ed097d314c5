"""Writes what was measured: one JSON file with everything, one Markdown file to read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.figures import Figure, Goal
from tests.bench.pairs import MAX_BASELINE_BUSY_CORES, MAX_FLEET_BUSY_CORES, MAX_FOREIGN_CORES, MIN_COUNTED

RULE = (
    "Baseline: the same full graph in one process, no gRPC, one thread, the same context of about 256 tokens. A figure is "
    "the median over pairs (baseline, measured, baseline). A pair counts only if at most "
    f"{MAX_BASELINE_BUSY_CORES} cores were busy during its baselines ({MAX_FLEET_BUSY_CORES} where they are a fleet of two "
    "stages with its KV kept or not) and other processes took at most "
    f"{MAX_FOREIGN_CORES} of a core in any part of it (/proc/stat); others are discarded, whatever they showed. With "
    f"fewer than {MIN_COUNTED} pairs a figure does not count. The rule was fixed before anything was measured. Client and "
    "benchmark run on the same cores and are part of what is measured."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """A whole run. machine: what it ran on. tables: what is beside the figures, by title."""

    machine: Mapping[str, str]
    command: str
    duration_s: float
    figures: Sequence[Figure]
    notes: Sequence[str] = ()
    tables: Mapping[str, list[dict[str, object]]] = dataclasses.field(default_factory=dict)


def write(report: Report, path: Path) -> None:
    """Write PATH as JSON, and beside it the same with the suffix .md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_fields(report), indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(to_markdown(report), encoding="utf-8")


def to_fields(report: Report) -> dict[str, object]:
    figures = [
        {
            "name": figure.name,
            "value": figure.value,
            "verdict": figure.verdict,
            **dataclasses.asdict(figure.goal),
            "note": figure.note,
            "counted": figure.num_counted,
            "discarded": figure.num_discarded,
            "raw": figure.raw,
        }
        for figure in report.figures
    ]
    return {**dataclasses.asdict(report), "rule": RULE, "figures": figures}


def to_markdown(report: Report) -> str:
    lines = ["# Benchmark", "", f"`{report.command}`, {report.duration_s / 60:.1f} minutes.", "", RULE, ""]
    lines += [*table([{"machine": name, "": text} for name, text in report.machine.items()]), ""]
    lines += [*table([_row(figure) for figure in report.figures]), ""]
    lines += [line for note in report.notes for line in (f"- {note}",)]
    for title, rows in report.tables.items():
        lines += ["", f"## {title}", "", *table(rows)]
    lines += ["", "## Every measurement"]
    for figure in report.figures:
        lines += ["", f"### {figure.name}", "", *table([_flat(row) for row in figure.raw])]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """A Markdown table; the columns are those of the first row."""
    if not rows:
        return ["nothing"]
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(str(row.get(name, "")) for name in names) + " |" for row in rows]


def _row(figure: Figure) -> dict[str, object]:
    goal = figure.goal
    return {
        "figure": goal.title,
        "measured": "-" if figure.value is None else f"{figure.value:.3g} {goal.unit}",
        "gate": _bound(goal, goal.gate),
        "aim": _bound(goal, goal.aim),
        "verdict": figure.verdict,
        "counted / discarded": f"{figure.num_counted} / {figure.num_discarded}",
        "note": figure.note,
    }


def _bound(goal: Goal, bound: float) -> str:
    return f"{'<=' if goal.is_upper else '>='} {bound:.3g} {goal.unit}"


def _flat(row: Mapping[str, object]) -> dict[str, object]:
    """Values as they are read, lists and mappings included."""
    return {name: _shown(value) for name, value in row.items()}


def _shown(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
        case list():
            return ", ".join(_shown(item) for item in value)
        case dict():
            return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
        case _:
            return str(value)
