"""The report of a run: JSON for programs, and one HTML file for people that needs nothing beside it.

Owns the format of the JSON and what the page says. Figures come from `statistics`, rows of text from `tables`, pictures from
`plots` (imported when a page is wanted: matplotlib is an extra). Called by the command line.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from loadtest import tables
from loadtest.plan import Plan, Record, RunResult
from loadtest.ramp import MIN_PROBE_REQUESTS, Ramp, RampEnd
from loadtest.runner import INTERRUPTED, RUN_TIMEOUT, Ending, Outcome
from loadtest.statistics import MIN_P99_SAMPLES, Statistics, summarize
from loadtest.targets import INSTALL_HINT
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from loadtest.plots import Picture

NEEDS_MATPLOTLIB = f"a page has pictures by matplotlib, which is not there; {INSTALL_HINT}"
FORMAT = "shoal-load-report"
# Rises whenever a field changes its meaning or goes; new fields alone do not raise it.
FORMAT_VERSION = 2
_HOW_IT_ENDED = {
    Ending.INTERRUPTED: "ended before it was interrupted",
    Ending.TIMEOUT: "ended before its time was up",
    Ending.LOST: "are known to have ended, for a harness was lost with what it saw",
}


@dataclass(frozen=True, slots=True)
class Report:
    """A run with its figures. created_at: with a time zone. good_share: what the ramp asked for, if there is one."""

    outcome: Outcome
    statistics: Statistics
    created_at: datetime
    shoal_version: str
    ramp: Ramp | None = None
    good_share: float = 1.0

    @property
    def result(self) -> RunResult:
        return self.outcome.result


def make_report(
    outcome: Outcome, *, created_at: datetime, shoal_version: str, ramp: Ramp | None = None, good_share: float = 1.0
) -> Report:
    return Report(outcome, summarize(outcome.result), created_at, shoal_version, ramp, good_share)


def warnings(report: Report) -> list[str]:
    """What a reader has to know before the figures: each a sentence."""
    statistics = report.statistics
    said = _shortfalls(report)
    if not statistics.overall.num_ok:
        said.append("No request ended well.")
    said += [
        f"Some of this is the harness's doing, not the server's: {reason}." for reason in statistics.client.reasons
    ]
    rough = [group.name for group in statistics.by_class if group.ttft is not None and group.ttft.is_p99_rough]
    if report.ramp is not None and (few := _few_requests(report.ramp)):
        said.append(few)
    if rough:
        classes = ", ".join(rough)
        said.append(
            f"Fewer than {MIN_P99_SAMPLES} answers of class {classes}: their p99 is little more than the slowest."
        )
    return said


def _shortfalls(report: Report) -> list[str]:
    if (
        report.ramp is not None
        and report.ramp.end in (RampEnd.NONE_HOLDS, RampEnd.NO_PLAN)
        and not report.ramp.best_per_s
    ):
        return ["No rate held its objectives; the figures are of the last one, which was cut short when that was sure."]
    if report.outcome.ending is Ending.COMPLETE:
        return []
    num_planned = len(report.result.plan.requests)
    num_ended = sum(record.error not in (RUN_TIMEOUT, INTERRUPTED) for record in report.result.records)
    return [
        f"This is a part of what was planned: {num_ended} of {num_planned} requests {_HOW_IT_ENDED[report.outcome.ending]}."
    ]


def _few_requests(ramp: Ramp) -> str:
    probe = ramp.decisive
    if probe is None or probe.num_requests >= MIN_PROBE_REQUESTS:
        return ""
    return (
        f"The ramp's result rests on {probe.num_requests} requests: fewer than {MIN_PROBE_REQUESTS} prove little of a share "
        "of 99 %; ask for more by --requests or --duration."
    )


def to_jsonable(report: Report, *, with_records: bool = False) -> dict[str, Any]:
    """All of a report as JSON's values; with_records: with an entry for each request, its text left out."""
    result = report.result
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "created_at": report.created_at.isoformat(timespec="seconds"),
        "shoal_version": report.shoal_version,
        "command": result.command,
        "machine": result.machine,
        "target": result.target,
        "ending": report.outcome.ending.value,
        "warnings": warnings(report),
        "plan": _plan_fields(result.plan),
        "statistics": report.statistics.to_jsonable(),
        "served_by": _counts_by_pipeline(result),
        "ramp": None if report.ramp is None else _ramp_fields(report.ramp, report.good_share),
    }
    return fields | ({"records": [_record_fields(record) for record in result.records]} if with_records else {})


def write_report(path: Path, report: Report, *, with_records: bool = False) -> None:
    write_whole(path, json.dumps(to_jsonable(report, with_records=with_records), indent=1, allow_nan=False) + "\n")


def write_html(path: Path, report: Report) -> None:
    """Raises ConfigError if matplotlib is not installed."""
    write_whole(path, to_html(report))


def can_draw() -> bool:
    """Whether the pictures of a page can be drawn here."""
    return find_spec("matplotlib") is not None


def to_html(report: Report) -> str:
    """The page. Raises ConfigError if matplotlib is not installed."""
    if not can_draw():
        raise ConfigError(NEEDS_MATPLOTLIB)
    from loadtest import plots

    result, statistics = report.result, report.statistics
    pictures = plots.draw_run(result) if result.records else []
    groups = [statistics.overall, *statistics.by_class]
    return page_template("loadtest", "report.html").render(
        report=report,
        date=report.created_at.strftime("%Y-%m-%d %H:%M %Z"),
        result=result,
        statistics=statistics,
        warnings=warnings(report),
        pictures=[_shown(picture) for picture in pictures],
        by_class=tables.figures(groups),
        by_tenant=tables.figures(statistics.by_tenant),
        by_stream=tables.figures(statistics.by_stream),
        objectives=tables.objectives(statistics),
        errors=tables.errors(result.records),
        served_by=tables.served_by(result.records),
        fairness=tables.fairness(statistics),
        client=tables.client(statistics),
        ramp_table=tables.probes(report.ramp.probes) if report.ramp else None,
        ramp_picture=_shown(plots.draw_ramp(report.ramp, report.good_share)) if report.ramp else None,
        tiles=_tiles(report),
    )


def page_template(package: str, name: str) -> Template:
    """One of a package's templates. What servers and users say is text in it, never markup."""
    environment = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def _shown(picture: Picture) -> tuple[Markup, str]:
    # Not escaped: it was made here, by a library that escapes what it is given.
    return Markup(picture.svg), picture.caption


def _tiles(report: Report) -> list[tuple[str, str]]:
    """The few figures that come first."""
    overall, ramp = report.statistics.overall, report.ramp
    found = [("requests/s that hold", tables.format_rate(ramp.best_per_s))] if ramp else []
    return [
        *found,
        ("met their SLO", tables.format_met(overall)),
        ("TTFT p99", tables.format_s(overall.ttft.p99_s if overall.ttft else None)),
        ("TPOT p99", tables.format_s(overall.tpot.p99_s if overall.tpot else None)),
        ("tokens/s in all", tables.format_rate(overall.tokens_per_s)),
        ("failed", f"{overall.num_requests - overall.num_ok} of {overall.num_requests}"),
    ]


def _plan_fields(plan: Plan) -> dict[str, Any]:
    return {
        "description": plan.description,
        "seed": plan.seed,
        "concurrency": plan.concurrency,
        "num_requests": len(plan.requests),
    }


def _counts_by_pipeline(result: RunResult) -> dict[str, int]:
    counts = Counter(record.served_by for record in result.records if record.served_by)
    return dict(sorted(counts.items()))


def _ramp_fields(ramp: Ramp, good_share: float) -> dict[str, Any]:
    return {
        "best_per_s": ramp.best_per_s,
        "end": ramp.end.value,
        "reason": ramp.reason,
        "good_share": good_share,
        "probes": [dataclasses.asdict(probe) for probe in ramp.probes],
    }


def _record_fields(record: Record) -> dict[str, Any]:
    request = record.request
    return {
        "number": request.number,
        "class": request.qos.value,
        "tenant": request.tenant,
        "stream": request.stream,
        "after": request.after,
        "max_tokens": request.max_tokens,
        "due_s": record.due_s,
        "sent_at_s": record.sent_at_s,
        "ended_at_s": record.ended_at_s,
        "token_at_s": list(record.token_at_s),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "finish": record.finish,
        "error": record.error,
        "message": record.message,
        "served_by": record.served_by,
        "num_preemptions": record.num_preemptions,
    }


def check_writable(path: Path) -> None:
    """Find out, without changing what is there, whether a report can be written. Raises ConfigError."""
    problem = ""
    try:
        if path.is_dir():
            problem = "it is a folder"
        elif _is_replaced(path):
            draft = _draft_of(path)
            draft.touch()
            draft.unlink()
        elif not os.access(path, os.W_OK):
            problem = "it is not open to writing"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(f"{path} cannot be written: {problem}")


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: whoever reads it finds the old one or the whole new one."""
    if not _is_replaced(path):
        path.write_text(text, encoding="utf-8")
        return
    draft = _draft_of(path)
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _is_replaced(path: Path) -> bool:
    """Whether a new file takes the place of what is there: never of a device, a pipe or a link, which others use too."""
    return not path.is_symlink() and (path.is_file() or not path.exists())


def _draft_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")
