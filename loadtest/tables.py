"""Figures of a run as rows of text: what the command line prints and the report shows, said alike in both.

Decides names, order, units and rounding. Pure. Called by `report` and the command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loadtest.plan import Record, Slo
from loadtest.ramp import Probe, Ramp
from loadtest.statistics import Group, Spread, Statistics
from shoal.types import QosClass

NONE = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of as many cells as the header has; the first column says what a row is about."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def format_s(seconds: float | None) -> str:
    """A time in the unit that suits it, with three digits at most: 4.2 ms, 123 ms, 1.23 s, 123 s."""
    if seconds is None:
        return NONE
    milliseconds = seconds * 1000
    if milliseconds < 9.95:
        return f"{milliseconds:.2f} ms" if milliseconds < 0.995 else f"{milliseconds:.1f} ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s" if seconds < 99.95 else f"{seconds:.0f} s"


def format_rate(per_s: float | None) -> str:
    if per_s is None:
        return NONE
    return f"{per_s:.2f}" if per_s < 9.995 else f"{per_s:.1f}" if per_s < 99.95 else f"{per_s:.0f}"


def format_share(share: float) -> str:
    """Per cent, rounded down: 100 % only where it is all."""
    return f"{int(share * 1000 + 1e-9) / 10:g} %"


def format_met(group: Group) -> str:
    """The share that met its SLO; nothing where nothing was asked for."""
    return NONE if group.good_share is None else format_share(group.good_share)


def format_slo(slo: Slo) -> str:
    limits = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("e2e", slo.e2e_s))
    return ", ".join(f"{name} <= {format_s(limit)}" for name, limit in limits if limit is not None) or "none"


_PERCENTILES: dict[str, Callable[[Spread], float]] = {
    "mean": lambda spread: spread.mean_s,
    "p50": lambda spread: spread.p50_s,
    "p90": lambda spread: spread.p90_s,
    "p99": lambda spread: spread.p99_s,
    "max": lambda spread: spread.max_s,
}
# What each is called, and what of it is said where room is short.
_SPREADS: tuple[tuple[str, Callable[[Group], Spread | None], tuple[str, ...]], ...] = (
    ("TTFT", lambda group: group.ttft, ("p50", "p90", "p99")),
    ("TPOT", lambda group: group.tpot, ("p50", "p90", "p99")),
    ("gap", lambda group: group.gap, ("p50", "p90", "p99")),
    ("e2e", lambda group: group.e2e, ("p50", "p99")),
)


def figures(groups: Sequence[Group], *, is_brief: bool = False) -> Table:
    """A column a group, a row a figure; brief: without what is of use to few."""
    rows = [
        ("requests", *(str(group.num_requests) for group in groups)),
        ("failed", *(str(group.num_requests - group.num_ok) for group in groups)),
        ("met its SLO", *(format_met(group) for group in groups)),
    ]
    for name, spread_of, brief in _SPREADS:
        for percentile in brief if is_brief else _PERCENTILES:
            cells = (_cell(spread_of(group), percentile) for group in groups)
            rows.append((f"{name} {percentile}", *cells))
    rows.append(("tokens/s", *(format_rate(group.tokens_per_s) for group in groups)))
    if not is_brief:
        rows += _further_rows(groups)
    elif any(group.num_preemptions for group in groups):
        rows.append(("preempted", *(str(group.num_preemptions) for group in groups)))
    return Table(("", *(group.name for group in groups)), tuple(rows))


def _further_rows(groups: Sequence[Group]) -> list[tuple[str, ...]]:
    return [
        ("tokens/s, steady", *(format_rate(group.steady_tokens_per_s) for group in groups)),
        ("good requests/s", *(format_rate(group.goodput_per_s) for group in groups)),
        ("prompt tokens", *(str(group.prompt_tokens) for group in groups)),
        ("answer tokens", *(str(group.completion_tokens) for group in groups)),
        ("preempted", *(str(group.num_preemptions) for group in groups)),
    ]


def _cell(spread: Spread | None, percentile: str) -> str:
    return NONE if spread is None else format_s(_PERCENTILES[percentile](spread))


def objectives(statistics: Statistics) -> Table:
    return Table(("class", "objective"), tuple((name, format_slo(slo)) for name, slo in statistics.slos.items()))


def slo_line(statistics: Statistics) -> str:
    """The SLOs in force for what was asked, in a line: SLO: latency TTFT 500 ms, TPOT 30 ms; throughput none."""
    present = [group.name for group in statistics.by_class]
    told = (f"{name} {format_slo(slo).replace('<= ', '')}" for name, slo in statistics.slos.items() if name in present)
    return f"SLO: {'; '.join(told) or 'none'}"


def ramp_line(ramp: Ramp) -> str:
    """What a ramp found, why it ended, and on how many requests that rests."""
    reason = f": {ramp.reason}" if ramp.reason else ""
    rests = f"; this rests on {ramp.decisive.num_requests} requests" if ramp.decisive else ""
    return f"highest rate that holds: {format_rate(ramp.best_per_s)} requests/s ({ramp.end.value}{reason}){rests}"


def errors(records: Iterable[Record]) -> Table:
    """Number and first message of each reason, the most frequent first."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for record in records:
        if record.error:
            counts[record.error] += 1
            first.setdefault(record.error, record.message)
    rows = ((reason, str(count), first[reason]) for reason, count in counts.most_common())
    return Table(("reason", "requests", "first message"), tuple(rows))


def served_by(records: Iterable[Record]) -> Table:
    """How many requests of each class each pipeline served; no rows where the server does not tell."""
    counts = Counter((record.served_by, record.request.qos) for record in records if record.served_by)
    pipelines = sorted({pipeline for pipeline, _ in counts})
    classes = [qos for qos in QosClass if any(served is qos for _, served in counts)]
    rows = ((pipeline, *(str(counts[pipeline, qos]) for qos in classes)) for pipeline in pipelines)
    return Table(("pipeline", *(qos.value for qos in classes)), tuple(rows))


def fairness(statistics: Statistics) -> Table:
    rows = (
        (tenant.tenant, str(tenant.prompt_tokens), str(tenant.completion_tokens), format_share(tenant.share))
        for tenant in statistics.fairness.tenants
    )
    return Table(("tenant", "prompt tokens", "answer tokens", "share of service"), tuple(rows))


def probes(tried: Iterable[Probe]) -> Table:
    rows = (
        (
            format_rate(probe.rate_per_s),
            format_share(probe.good_share),
            "yes" if probe.holds else "no",
            str(probe.num_requests),
            format_s(probe.duration_s),
            _remark(probe),
        )
        for probe in tried
    )
    return Table(("requests/s", "good", "holds", "requests", "took", "remark"), tuple(rows))


def _remark(probe: Probe) -> str:
    remarks = (("cut short", probe.was_cut_short), ("limited by the harness", probe.is_client_limited))
    return ", ".join(text for text, applies in remarks if applies)


def client(statistics: Statistics) -> Table:
    """How the harness itself did."""
    health = statistics.client
    lags = (("lag of sending", health.lag), ("event loop's lag", health.loop_lag))
    rows = [(name, *(_cell(lag, percentile) for percentile in ("p50", "p99", "max"))) for name, lag in lags]
    return Table(
        ("", "p50", "p99", "max"), (*rows, ("share of a core", f"{health.cpu_share:.0%}".replace("%", " %"), "", ""))
    )
