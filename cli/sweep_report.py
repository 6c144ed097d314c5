"""What a sweep has found: a table of cells with all seeds of one together, a CSV file, a picture.

Shows figures and makes none. Called by `cli.sweep`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cli.terminal import console, say
from shoal.errors import ConfigError, StorageFull
from simulation.grid import Axis, Cell

if TYPE_CHECKING:
    from rich.table import Table

    from simulation.sweep import Failed, Figures

    Results = Mapping[int, Figures | Failed]

# A picture tells so many lines apart.
MAX_LINES = 3
# Wider than any terminal: what a table is measured by.
FAR = 10_000


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _share(value: float) -> str:
    return f"{value:.0%}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "num_devices": ("devices", _count),
    "num_pipelines": ("pipelines", _count),
    "tokens_per_s": ("tokens/s", _rate),
    "goodput_per_s": ("good/s", _rate),
    "good_share": ("good", _share),
    "first_token_s": ("first token", _time),
    "token_s": ("a token", _time),
    "ttft_p50_s": ("first token: p50", _time),
    "ttft_p95_s": ("p95", _time),
    "gap_p50_s": ("between tokens: p50", _time),
    "gap_p99_s": ("p99", _time),
    "busy": ("busy", _share),
}
_DRAWN = {"tokens_per_s": "Tokens a second", "goodput_per_s": "Requests a second within their targets"}
_DRAWN_OF_PLANS = {"tokens_per_s": "Tokens a second", "first_token_s": "Seconds to the first token"}


def show(model: str, axes: Sequence[Axis], cells: Sequence[Cell], results: Results) -> None:
    """A row for each combination of values: means over its seeds, and by how much these are more or less.

    Where the terminal is too narrow, the latter is on a line of its own.
    """
    names = [axis.name for axis in axes]
    shown = [name for name in _COLUMNS if any(name in one for one in results.values() if isinstance(one, dict))]
    rows: list[tuple[list[str], list[str]]] = []
    for values, of_seeds in _combinations(names, cells, results):
        figures = [one for one in of_seeds if isinstance(one, dict)]
        failed = [one for one in of_seeds if not isinstance(one, dict)]
        summed = [_summed(name, figures) for name in shown] if figures else []
        if failed:
            of_all = f"{len(failed)} of {len(of_seeds)} " if len(of_seeds) > 1 else ""
            summed = [*summed[:-1], f"{of_all}failed"] if summed else [f"{of_all}failed"]
        rows.append(([_plain(value) for value in values], summed))
    titles = [_COLUMNS[name][0] for name in shown]
    table = _table(names, titles, rows, gap=1)
    screen = console()
    if screen.measure(table, options=screen.options.update(width=FAR)).maximum > screen.width:
        folded = [(values, [cell.replace(" ±", "\n±") for cell in summed]) for values, summed in rows]
        table = _table(names, [title.replace(" ", "\n") for title in titles], folded, gap=0)
    say(f"{model}: {len(results)} of {len(cells)} cells", style="bold")
    say(table)


def _table(
    names: Sequence[str], titles: Sequence[str], rows: Sequence[tuple[list[str], list[str]]], *, gap: int
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap, 0, 0), show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True, min_width=len(name))
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    for values, summed in rows:
        table.add_row(*values, *summed)
    return table


def _combinations(
    names: Sequence[str], cells: Sequence[Cell], results: Results
) -> Iterator[tuple[tuple[object, ...], list[Figures | Failed]]]:
    found: dict[tuple[object, ...], list[Figures | Failed]] = {}
    for index in sorted(results):
        found.setdefault(tuple(getattr(cells[index], name) for name in names), []).append(results[index])
    return iter(found.items())


def _summed(name: str, figures: Sequence[Figures]) -> str:
    values = _numbers(name, figures)
    if not values:
        return "-"
    shown = _COLUMNS[name][1]
    half = shown((max(values) - min(values)) / 2)
    return shown(statistics.fmean(values)) + (f" ±{half}" if half != shown(0.0) else "")


def _numbers(name: str, figures: Sequence[Figures]) -> list[float]:
    return [value for one in figures if isinstance(value := one.get(name), int | float)]


def write_csv(path: Path, cells: Sequence[Cell], results: Results) -> None:
    """A line for each cell: its settings, its figures, and what went wrong."""
    names = list(dict.fromkeys(name for one in results.values() if isinstance(one, dict) for name in one))
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*asdict(Cell()), *names, "error"])
            for index in sorted(results):
                one = results[index]
                figures = one if isinstance(one, dict) else {}
                error = "" if isinstance(one, dict) else one.message
                writer.writerow([*asdict(cells[index]).values(), *(figures.get(name) for name in names), error])
    except OSError as error:
        raise StorageFull(f"{path}: cannot be written: {error.strerror}") from error


def axis_of_x(axes: Sequence[Axis]) -> Axis:
    """The numbers with most values. Raises ConfigError if none has several."""
    numeric = [axis for axis in axes if axis.is_numeric and len(axis.values) > 1]
    if not numeric:
        raise ConfigError("a plot needs a sweep over numbers, as streams=1,8,64", field="plot")
    return max(numeric, key=lambda axis: len(axis.values))


def write_plot(path: Path, axes: Sequence[Axis], cells: Sequence[Cell], results: Results) -> None:
    """Means over seeds, a line for each combination of the other values; more than MAX_LINES: the first ones."""
    from loadtest.plots import Curve, Curves, draw_curves

    across = axis_of_x(axes)
    others = [axis.name for axis in axes if axis is not across]
    drawn = _DRAWN if cells[0].is_played else _DRAWN_OF_PLANS
    panels = []
    for name, title in drawn.items():
        lines: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        for values, of_seeds in _combinations([across.name, *others], cells, results):
            numbers = _numbers(name, [one for one in of_seeds if isinstance(one, dict)])
            if numbers:
                lines.setdefault(values[1:], []).append((float(str(values[0])), statistics.fmean(numbers)))
        curves = [
            Curve(
                ", ".join(f"{name}={_plain(value)}" for name, value in zip(others, values, strict=True)), sorted(points)
            )
            for values, points in list(lines.items())[:MAX_LINES]
        ]
        rest = f"; {MAX_LINES} of {len(lines)} lines" if len(lines) > MAX_LINES else ""
        panels.append(Curves(title + rest, across.name, curves))
    path.write_text(draw_curves("sweep", panels), encoding="utf-8")
