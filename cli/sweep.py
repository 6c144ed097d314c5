"""`shoal plan --sweep`: one plan or simulated run for each cell of a grid, here or as tasks on a Ray cluster.

Owns options, the file that a sweep goes on with, and what is shown. Cells are made and played by `simulation`, processes and
tasks by `launch`. Called by `cli.plan`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Self

import typer

from batch.line_file import LineFile
from cli.on_ray import THIS_MACHINE, needing_ray
from cli.parameters import with_parameters
from cli.simulate import check_plot
from cli.sweep_report import axis_of_x, show, write_csv, write_plot
from cli.terminal import following, note, write_json
from shoal.errors import ConfigError, ShoalError
from simulation.grid import Axis, Cell, cells_of, read_axes

if TYPE_CHECKING:
    from shoal.errors import LaunchFailed
    from simulation.sweep import Failed, Figures, Subject, Task

INTERRUPTED = 130
DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """As given; no words: no sweep. jobs, 0: as many as there are cores. num_on_ray, 0: here."""

    words: tuple[str, ...] = ()
    num_seeds: int = 1
    jobs: int = 0
    num_on_ray: int = 0
    ray_address: str = THIS_MACHINE
    out: Path | None = None
    csv: Path | None = None

    def check_unused(self) -> None:
        """Raise ConfigError if anything was asked for that only a sweep has."""
        if self != SweepOptions():
            raise ConfigError("seeds, jobs, ray, ray-address, out and csv are of a sweep: add --sweep", field="sweep")


def sweep_options(
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Plan for each of these values, as streams=1,8,64, or a .toml file of such lists; may be given again.",
            metavar="NAME=VALUE,...",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="With --sweep: so many runs a cell.", min=1, max=1000)] = 1,
    jobs: Annotated[
        int, typer.Option(help="With --sweep: cells at once; 0: as many as there are cores.", min=0, max=1024)
    ] = 0,
    ray: Annotated[
        int,
        typer.Option("--ray", help="With --sweep: so many cells at once as tasks of a Ray cluster.", min=0, max=4096),
    ] = 0,
    ray_address: Annotated[
        str, typer.Option(help="With --ray: the cluster's head, HOST:PORT; auto: of this machine.")
    ] = THIS_MACHINE,
    out: Annotated[
        Path | None,
        typer.Option(help="With --sweep: keep cells in this file; one that exists is gone on with.", dir_okay=False),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="With --sweep: write cells as CSV.", dir_okay=False)] = None,
) -> SweepOptions:
    return SweepOptions(tuple(sweep or ()), seeds, jobs, ray, ray_address, out, csv)


# The options of sweep_options(), which makes SweepOptions of their values.
with_sweep = with_parameters(list(inspect.signature(sweep_options, eval_str=True).parameters.values()))


@dataclass(frozen=True, slots=True)
class Sweep:
    """A grid. model, digest: what is planned for, by name and by everything in it."""

    model: str
    digest: str
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]


def axes_of(options: SweepOptions, base: Cell, plot: Path | None) -> tuple[tuple[Axis, ...], tuple[Cell, ...]]:
    """The grid, with everything checked that can be before a long run. Raises ConfigError."""
    axes = read_axes(options.words)
    cells = cells_of(base, axes, options.num_seeds)
    if plot is not None:
        check_plot(plot)
        axis_of_x(axes)
    for name, path in (("csv", options.csv), ("out", options.out)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.absolute().parent}", field=name)
    return axes, tuple(cells)


def digest_of(model_digest: str, subject: Subject) -> str:
    """Of everything that figures depend on but the cell: the planner's version, too."""
    parts = (version("shoal"), model_digest, subject.attention_tokens, subject.profiles, sorted(subject.given.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:DIGEST_CHARS]


def run_sweep(sweep: Sweep, subject: Subject, options: SweepOptions, plot: Path | None, *, is_json: bool) -> None:
    """Plan or play what is not kept yet, and show all; what there is after Ctrl-C, too."""
    began = perf_counter()
    with _Kept(options.out, sweep.digest) as kept:
        results = {index: kept.found[cell] for index, cell in enumerate(sweep.cells) if cell in kept.found}
        if results:
            note(f"{options.out}: {len(results)} of {len(sweep.cells)} cells are there already")
        is_whole = _run_rest(sweep, subject, options, results, kept)
    if is_json:
        write_json(_plain(sweep, results))
    else:
        show(sweep.model, sweep.axes, sweep.cells, results)
    if options.csv is not None:
        write_csv(options.csv, sweep.cells, results)
    if plot is not None:
        write_plot(plot, sweep.axes, sweep.cells, results)
    note(f"{len(results)} of {len(sweep.cells)} cells after {perf_counter() - began:.1f} s")
    if not is_whole:
        note("interrupted" + ("" if options.out is None else f"; the same command goes on with {options.out}"))
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if any(_is_failed(one) for one in results.values()) else 0)


def _run_rest(
    sweep: Sweep, subject: Subject, options: SweepOptions, results: dict[int, Figures | Failed], kept: _Kept
) -> bool:
    """Fill in the results that are missing; whether none is after that."""
    from simulation.sweep import Failed, Task

    missing = [index for index in range(len(sweep.cells)) if index not in results]
    if not missing:
        return True
    tasks = [Task(subject, sweep.cells[index]) for index in missing]
    doing = "playing" if sweep.cells[0].is_played else "planning"
    with following(doing) as tell, closing(_each(tasks, options)) as done:
        try:
            for place, result in done:
                index = missing[place]
                found = Failed(result.reason, result.message) if isinstance(result, ShoalError) else result
                results[index] = found
                kept.keep(sweep.cells[index], found)
                if isinstance(found, Failed):
                    note(f"{_named(sweep, index)}: {found.message}", style="red")
                tell(partial(_far, len(results), len(sweep.cells), sum(map(_is_failed, results.values()))))
        except KeyboardInterrupt:
            return False
    return True


def _each(tasks: Sequence[Task], options: SweepOptions) -> Generator[tuple[int, Figures | Failed | LaunchFailed]]:
    from simulation.sweep import work

    if not options.num_on_ray:
        from launch import pool

        return pool.each(work, tasks, options.jobs or pool.num_cores())
    with needing_ray():
        from launch.ray_cluster.work import each
    return each(options.ray_address, work, tasks, options.num_on_ray)


def _far(num_done: int, num_cells: int, num_failed: int) -> str:
    return f"{num_done} of {num_cells} cells" + (f", {num_failed} failed" if num_failed else "")


def _named(sweep: Sweep, index: int) -> str:
    cell = sweep.cells[index]
    return ", ".join([*(f"{axis.name}={getattr(cell, axis.name)}" for axis in sweep.axes), f"seed={cell.seed}"])


def _is_failed(result: Figures | Failed) -> bool:
    return not isinstance(result, dict)


def _plain(sweep: Sweep, results: Mapping[int, Figures | Failed]) -> dict[str, object]:
    return {
        "model": sweep.model,
        "axes": {axis.name: axis.values for axis in sweep.axes},
        "cells": [{"cell": asdict(sweep.cells[index]), **_outcome(results[index])} for index in sorted(results)],
    }


def _outcome(result: Figures | Failed) -> dict[str, object]:
    return {"figures": result} if isinstance(result, dict) else {"error": asdict(result)}


class _Kept:
    """Cells of earlier runs, and where those of this one go. found: those with figures; errors are tried again."""

    def __init__(self, path: Path | None, subject: str) -> None:
        self.found: dict[Cell, Figures | Failed] = {}
        self._subject = subject
        self._file: LineFile | None = None
        if path is not None:
            self._file = LineFile(path, start=b'{"subject": ', writer="sweep", refusal="is no cell of a sweep")

    def __enter__(self) -> Self:
        if self._file is not None:
            self._file.open(self._take)
        return self

    def _take(self, raw: bytes) -> None:
        content = json.loads(raw)
        subject, cell, figures = content["subject"], Cell(**content["cell"]), content.get("figures")
        if subject == self._subject and isinstance(figures, dict):
            self.found[cell] = figures

    def keep(self, cell: Cell, result: Figures | Failed) -> None:
        if self._file is not None:
            line = {"subject": self._subject, "cell": asdict(cell), **_outcome(result)}
            self._file.append(json.dumps(line).encode() + b"\n")

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
