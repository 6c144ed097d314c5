"""The end of `shoal load`: figures on stdout, files where they were asked for, the exit code.

Called by `cli.load_run`; what reports hold is decided in `loadtest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.terminal import note, say, write_json
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from loadtest.ramp import Ramp
    from loadtest.report import Report
    from loadtest.runner import Outcome
    from loadtest.tables import Table

STDOUT = Path("-")


@dataclass(frozen=True, slots=True)
class Files:
    """Where the report goes; None: not written. has_records: every request by itself is in the JSON."""

    json: Path | None = None
    html: Path | None = None
    has_records: bool = False


def check_files(files: Files) -> None:
    """Before a long run: that its report can be written. Raises ConfigError."""
    from loadtest.report import NEEDS_MATPLOTLIB, can_draw, check_writable

    for path in (files.json, files.html):
        if path is None or path == STDOUT:
            continue
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written: there is no folder {path.parent}")
        check_writable(path)
    if files.html is not None and files.json is None and not can_draw():
        raise ConfigError(NEEDS_MATPLOTLIB)


def finish(files: Files, outcome: Outcome, ramp: Ramp | None = None, good_share: float = 1.0) -> None:
    """Write and show the report of a run; exit code 1 if no request ended well, or no rate held."""
    from loadtest.report import make_report

    report = make_report(
        outcome,
        created_at=datetime.now(UTC),
        shoal_version=version("shoal"),
        ramp=ramp,
        good_share=good_share,
    )
    # Files first: a pipe that somebody closes shall not cost them. But a full disk shall not cost the figures.
    try:
        _write(files, report)
    finally:
        if files.json != STDOUT:
            _show(report)
    if not report.statistics.overall.num_ok or (ramp is not None and not ramp.best_per_s):
        raise typer.Exit(1)


def _write(files: Files, report: Report) -> None:
    from loadtest.report import NEEDS_MATPLOTLIB, can_draw, to_jsonable, write_html, write_report

    if files.json == STDOUT:
        write_json(to_jsonable(report, with_records=files.has_records))
    elif files.json is not None:
        write_report(files.json, report, with_records=files.has_records)
        note(f"wrote {files.json}")
    if files.html is not None and can_draw():
        write_html(files.html, report)
        note(f"wrote {files.html}")
    elif files.html is not None:
        note(f"no {files.html}: {NEEDS_MATPLOTLIB}", style="")


def _show(report: Report) -> None:
    """Figures that fit 80 columns, and before them what a reader has to know."""
    from loadtest import tables
    from loadtest.report import warnings

    result, statistics = report.result, report.statistics
    say(result.target)
    say(f"{result.plan.description}, seed {result.plan.seed}, took {result.duration_s:.1f} s")
    for warning in warnings(report):
        say(f"! {warning}")
    if statistics.slos:
        say(tables.slo_line(statistics))
    if report.ramp is not None:
        say(_rich(tables.probes(report.ramp.probes)))
        say(tables.ramp_line(report.ramp))
    groups = [statistics.overall, *statistics.by_class]
    # With one class, all and the class are the same.
    say(_rich(tables.figures(groups[-1:] if len(groups) == 2 else groups, is_brief=True)))
    errors = tables.errors(result.records)
    if errors.rows:
        say(_rich(errors))


def _rich(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(table.header):
        # Messages, the one kind of cell that is long, come last.
        is_message = title == "first message"
        shown.add_column(title, justify="left" if index == 0 or is_message else "right", no_wrap=not is_message)
    for row in table.rows:
        shown.add_row(*row)
    return shown
