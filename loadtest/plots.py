"""Draws a run: distributions, timeline, errors, ramp; each as an SVG element to be put into a page.

Owns how figures look, but no colours: those are the page's, by CSS variables, so that a page may be light or dark. Curves of
anything are drawn as files of their own. The only importer of matplotlib, with no state of it shared (no pyplot); imported
by `report` when a page is wanted, and by whoever wants curves.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from loadtest.plan import Record, RunResult
from loadtest.ramp import Ramp
from loadtest.statistics import gaps_s, ttft_s
from loadtest.tables import format_rate
from shoal.types import QosClass

# Colours that stand for variables of the page: matplotlib takes none, and no figure has these by chance.
_INK, _FAINT, _SURFACE = "#010203", "#010204", "#010205"
_SERIES = {QosClass.LATENCY: "#010211", QosClass.BALANCED: "#010212", QosClass.THROUGHPUT: "#010213"}
_REASONS = ("#010221", "#010222", "#010223", "#010224")
_TO_CSS = {
    _INK: "var(--ink)",
    _FAINT: "var(--faint)",
    _SURFACE: "var(--surface)",
    **{colour: f"var(--{qos.value})" for qos, colour in _SERIES.items()},
    **{colour: f"var(--reason-{number})" for number, colour in enumerate(_REASONS, start=1)},
}
# Told apart without colours too, on paper or by eyes that see them alike.
_DASHES: Mapping[QosClass, str] = {QosClass.LATENCY: "-", QosClass.BALANCED: "--", QosClass.THROUGHPUT: "-."}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
}

# In inches of 72 points; a page scales them.
HALF, WIDE = 5.6, 11.4
# More points than a plot is wide in pixels say nothing more.
MAX_POINTS = 400
NUM_BINS = 120
# Labels of rates that fit beside each other on a wide plot.
MAX_RATE_TICKS = 16
# Zero, as between tokens of one message, has no place on a logarithmic axis.
MIN_SHOWN_S = 1e-4

# Of a picture that is no part of a page: plain, for not every viewer knows variables.
_FILE_COLOURS = {
    "var(--ink)": "#1c2430",
    "var(--faint)": "#c9d0d9",
    "var(--latency)": "#1f5fd0",
    "var(--balanced)": "#b4530a",
    "var(--throughput)": "#17794a",
}
_FILE_PAPER = '<rect width="100%" height="100%" style="fill: #ffffff"/>'

Floats = npt.NDArray[np.float64]
Panel = Callable[[Axes], None]


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG element, and in words what it shows."""

    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a line. is_marked: each is a measurement of its own."""

    label: str
    points: Sequence[tuple[float, float]]
    is_marked: bool = True


@dataclass(frozen=True, slots=True)
class Curves:
    """Up to three lines over one axis. is_log: of x, or of both axes. is_share: y goes from 0 to 1. marks: places on x."""

    title: str
    x_label: str
    curves: Sequence[Curve]
    is_log_x: bool = False
    is_log_y: bool = False
    is_share: bool = False
    marks: Sequence[float] = ()


def draw_curves(name: str, panels: Sequence[Curves]) -> str:
    """Draw lines, panels one below the other; return an SVG document."""
    drawn = [_curves_panel(one) for one in panels]
    svg = _draw(name, (HALF * 1.4, 0.5 + 2.5 * len(panels)), drawn, is_one_axis=False)
    svg = re.sub(r' role="img" aria-hidden="true"', "", svg, count=1)
    for variable, colour in _FILE_COLOURS.items():
        svg = svg.replace(variable, colour)
    return svg.replace(">", f">{_FILE_PAPER}", 1)


def _curves_panel(sheet: Curves) -> Panel:
    def draw(axes: Axes) -> None:
        for curve, colour, dash in zip(sheet.curves, _SERIES.values(), _DASHES.values(), strict=False):
            x, y = [x for x, _ in curve.points], [y for _, y in curve.points]
            axes.plot(x, y, dash + ("o" if curve.is_marked else ""), markersize=4, color=colour, label=curve.label)
        if sheet.is_log_x:
            axes.set_xscale("log")
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_locator(FixedLocator(_rate_ticks([x for one in sheet.curves for x, _ in one.points])))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        elif all(float(x).is_integer() for one in sheet.curves for x, _ in one.points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if sheet.is_log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        else:
            most = max((y for one in sheet.curves for _, y in one.points), default=0.0)
            axes.set_ylim(0, 1.03 if sheet.is_share else most * 1.08 or 1.0)
        if sheet.is_share:
            axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        for at in sheet.marks:
            axes.axvline(at, color=_FAINT, linewidth=1, linestyle=":")
        axes.set_title(sheet.title)
        axes.set_xlabel(sheet.x_label)
        if len(sheet.curves) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=3)

    return draw


def draw_run(result: RunResult) -> list[Picture]:
    """All pictures of a run that has records."""
    return [
        _distribution(result, "ttft", "Time to first token", lambda record: [ttft_s(record)], "ttft_s"),
        _distribution(result, "gap", "Time between tokens", gaps_s, "tpot_s"),
        _timeline(result),
    ]


def draw_ramp(ramp: Ramp, good_share: float) -> Picture:
    """Good share by rate, with the share that is asked for."""

    def draw(axes: Axes) -> None:
        for holds, marker in ((True, "o"), (False, "x")):
            probes = [probe for probe in ramp.probes if probe.holds is holds]
            axes.plot(
                [probe.rate_per_s for probe in probes],
                [probe.good_share for probe in probes],
                marker,
                color=_SERIES[QosClass.LATENCY],
                label="holds" if holds else "does not hold",
            )
        axes.axhline(good_share, color=_INK, linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(_rate_ticks([probe.rate_per_s for probe in ramp.probes])))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: format_rate(rate)))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_ylim(-0.03, 1.03)
        axes.set_xlabel("requests a second")
        axes.set_title("Share of requests that met their SLO")
        axes.legend(loc="lower left")

    caption = (
        f"Share of good requests at each rate; the dotted line is what is asked for, {_percent(good_share, None)}. Where a "
        "rate was cut short, those that were never sent count as missed."
    )
    return Picture(_draw("ramp", (WIDE, 2.9), [draw]), caption)


def _distribution(
    result: RunResult,
    name: str,
    title: str,
    samples_of: Callable[[Record], Iterable[float | None]],
    objective: str,
) -> Picture:
    """Cumulative distribution per class, on a logarithmic axis of time, with the classes' objectives."""

    def draw(axes: Axes) -> None:
        shown: list[Floats] = []
        for qos, records in _by_class(result):
            samples = [
                sample for record in records if record.is_ok for sample in samples_of(record) if sample is not None
            ]
            if not samples:
                continue
            values, shares = _cumulated(samples)
            shown.append(values)
            label = f"{qos.value} ({len(samples)})"
            axes.step(values, shares, where="post", label=label, color=_SERIES[qos], linestyle=_DASHES[qos])
            limit_s = getattr(result.slos[qos], objective) if qos in result.slos else None
            if limit_s is not None:
                axes.axvline(limit_s, linewidth=1.2, linestyle=":", color=_SERIES[qos])
                axes.text(limit_s, 1.03, "SLO", color=_SERIES[qos], fontsize=8, ha="center")
        _time_axis(axes, shown)
        axes.set_ylim(0, 1.0)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 0.9, 0.99]))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_title(title, pad=16)
        if shown:
            axes.figure.legend(loc="outside lower center", ncols=3)
        else:
            axes.text(0.5, 0.5, "no samples", transform=axes.transAxes, ha="center")

    slo = "the dotted lines are the SLOs" + (", which are for the mean of an answer" if objective == "tpot_s" else "")
    return Picture(_draw(name, (HALF, 3.6), [draw]), f"{title}: share of samples up to a time, by class; {slo}.")


def _timeline(result: RunResult) -> Picture:
    """Tokens, requests under way and, if there are any, errors: one above the other, on one axis of time."""
    edges = np.linspace(0.0, result.duration_s or 1.0, NUM_BINS + 1)
    panels: list[Panel] = [_tokens(result, edges), _under_way(result, edges)]
    caption = "Tokens that came, by class; requests that were sent and had not ended, in grey those without a token yet"
    if any(record.error for record in result.records):
        panels.append(_failures(result, edges))
        caption += "; requests that failed, by reason"
    return Picture(_draw("timeline", (WIDE, 0.6 + 2.3 * len(panels)), panels), f"{caption}.")


def _tokens(result: RunResult, edges: Floats) -> Panel:
    def draw(axes: Axes) -> None:
        classes = _by_class(result)
        bin_s = edges[1] - edges[0]
        counts = [
            _histogram(edges, [at_s for record in records for at_s in record.token_at_s]) for _, records in classes
        ]
        axes.stackplot(
            (edges[:-1] + edges[1:]) / 2,
            [count / bin_s for count in counts],
            colors=[_SERIES[qos] for qos, _ in classes],
            labels=[qos.value for qos, _ in classes],
            alpha=0.75,
            linewidth=0,
        )
        _over_time(axes, edges, "Tokens a second")

    return draw


def _under_way(result: RunResult, edges: Floats) -> Panel:
    def draw(axes: Axes) -> None:
        records = result.records
        sent = _counted([record.sent_at_s for record in records], edges)
        ended = _counted([record.ended_at_s for record in records], edges)
        first = _counted(
            [record.token_at_s[0] if record.token_at_s else record.ended_at_s for record in records], edges
        )
        axes.fill_between(edges, sent - first, step="post", color=_FAINT, label="waiting for the first token")
        axes.step(edges, sent - ended, where="post", color=_INK, linewidth=1.2, label="under way")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _over_time(axes, edges, "Requests")

    return draw


def _failures(result: RunResult, edges: Floats) -> Panel:
    reasons = sorted({record.error for record in result.records if record.error})
    # The last colour is for all further ones.
    named, others = reasons[: len(_REASONS) - 1], reasons[len(_REASONS) - 1 :]
    groups = [*((reason, [reason]) for reason in named), *([("others", others)] if others else [])]

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(edges) - 1)
        width = edges[1] - edges[0]
        for (name, members), colour in zip(groups, _REASONS, strict=False):
            height = _histogram(edges, [record.ended_at_s for record in result.records if record.error in members])
            axes.bar(edges[:-1], height, width, bottom, align="edge", color=colour, label=name, linewidth=0)
            bottom += height
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _over_time(axes, edges, "Requests that failed")

    return draw


def _by_class(result: RunResult) -> list[tuple[QosClass, list[Record]]]:
    records = {qos: [record for record in result.records if record.request.qos is qos] for qos in QosClass}
    return [(qos, found) for qos, found in records.items() if found]


def _cumulated(samples: Sequence[float]) -> tuple[Floats, Floats]:
    """Values and the share of samples up to each; thinned out evenly by share, the largest kept."""
    values = np.maximum(np.sort(np.asarray(samples, dtype=np.float64)), MIN_SHOWN_S)
    shares = np.arange(1, len(values) + 1) / len(values)
    kept = np.unique(np.linspace(0, len(values) - 1, min(MAX_POINTS, len(values))).round().astype(int))
    return np.concatenate([values[:1], values[kept]]), np.concatenate([[0.0], shares[kept]])


def _histogram(edges: Floats, times_s: Sequence[float]) -> Floats:
    return np.histogram(times_s, edges)[0].astype(np.float64)


def _counted(times_s: Sequence[float], edges: Floats) -> npt.NDArray[np.int64]:
    """How many times are up to each edge."""
    return np.searchsorted(np.sort(times_s), edges, side="right").astype(np.int64)


def _time_axis(axes: Axes, shown: Sequence[Floats]) -> None:
    axes.set_xscale("log")
    low = min((float(values[0]) for values in shown), default=0.01)
    high = max((float(values[-1]) for values in shown), default=1.0)
    left, right = axes.get_xlim() if shown else (low, high)
    axes.set_xlim(min(left, low / 1.3), max(right, high * 1.3))
    # Ticks at 1, 2, 5, or only at 1 where those would be too many.
    is_wide = high / low > 300
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _plain_time(seconds)))


def _rate_ticks(rates_per_s: Sequence[float]) -> list[float]:
    """The rates that were tried, without those so near to another that their labels would overlap."""
    ticks: list[float] = []
    rates = sorted(rates_per_s)
    least_ratio = (rates[-1] / rates[0]) ** (1 / MAX_RATE_TICKS) if rates else 1.0
    for rate in rates:
        if not ticks or rate >= ticks[-1] * least_ratio:
            ticks.append(rate)
    return ticks


def _percent(share: float, _: object) -> str:
    return f"{share * 100:g} %"


def _plain_time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 0.9999 else f"{seconds * 1000:g} ms"


def _over_time(axes: Axes, edges: Floats, title: str) -> None:
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.set_xlabel("seconds after the start")
    axes.label_outer()
    # Beside the title, where no data can be.
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, ncols=4)


def _draw(name: str, size: tuple[float, float], panels: Sequence[Panel], *, is_one_axis: bool = True) -> str:
    """Draw onto fresh axes, one below the other, of one x axis if they share it; return the SVG element."""
    text = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        rows = figure.subplots(len(panels), 1, sharex=is_one_axis, squeeze=False)
        for panel, axes in zip(panels, rows[:, 0], strict=True):
            panel(axes)
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return _embed(text.getvalue(), name)


def _embed(document: str, name: str) -> str:
    """Make an SVG document an element of a page: without what is only for files, its ids unlike those of other pictures."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    # The page says which font, and how wide: only the proportions are the picture's.
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', r'\1role="img" aria-hidden="true"', svg, count=1)
    for colour, variable in _TO_CSS.items():
        svg = svg.replace(colour, variable)
    return svg
