"""What a run amounts to: latencies, goodput, rates, fairness, and whether the harness itself was the bottleneck.

Decides how each figure is made of the Records of a RunResult. Latencies are of requests that ended well and count from when
they were due; errors count against goodput. Pure numbers: knows neither targets nor reports. Called by `report`, `ramp` and
the command line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtest.plan import Record, RunResult, Slo
from shoal.types import QosClass

# Below this the highest percentile lies between the two slowest samples, and says little of the next run.
MIN_P99_SAMPLES = 100

# An event loop's timers are good to a few milliseconds; beyond that, a share of what is measured is what matters.
MAX_LAG_S = 0.01
MAX_LAG_SHARE = 0.05
# One core is all that an event loop can use; at this share of it, requests queue in the harness.
MAX_CPU_SHARE = 0.9
CLIENT_RULE = (
    f"the harness is the bottleneck if the p99 of its lag (sent - due) or of its event loop's lag is above "
    f"{MAX_LAG_S * 1000:g} ms and above {MAX_LAG_SHARE:.0%} of the median time to first token, or if it took more than "
    f"{MAX_CPU_SHARE:.0%} of a core"
)

# What a token of an answer costs in tokens of a prompt. Source: VTC (arXiv 2401.00588), as the orchestrator's tenants.
ANSWER_WEIGHT = 2


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples in seconds, summed up: exact percentiles, linear between neighbours.

    is_p99_rough: there are fewer than MIN_P99_SAMPLES.
    """

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    is_p99_rough: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Figures of the requests of a class, tenant or stream, or of all; None where there is no sample.

    errors: number by reason. gap: between neighbouring tokens, 0 for those of one message. tpot: a figure a request.
    num_good: of those that ended well and missed no objective. num_judged: of classes that have an SLO; good_share: of
    these, None where there is none. tokens_per_s: tokens that reached the client by the run's duration.
    steady_tokens_per_s: those between the first and the last arrival of the run, without the tail in which it empties.
    """

    name: str
    num_requests: int
    num_ok: int
    errors: dict[str, int]
    num_preemptions: int
    prompt_tokens: int
    completion_tokens: int
    ttft: Spread | None
    tpot: Spread | None
    gap: Spread | None
    e2e: Spread | None
    num_good: int
    num_judged: int
    good_share: float | None
    goodput_per_s: float
    tokens_per_s: float
    steady_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class TenantShare:
    """service: prompt tokens and, ANSWER_WEIGHT times, answer tokens. share: of the service of all tenants."""

    tenant: str
    prompt_tokens: int
    completion_tokens: int
    service: int
    share: float


@dataclass(frozen=True, slots=True)
class Fairness:
    """jain_index: 1 if all tenants got the same, 1 / tenants if one got all; None if nobody got anything.

    Source: Jain, Chiu and Hawe, DEC-TR-301 (1984).
    """

    tenants: tuple[TenantShare, ...]
    jain_index: float | None


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether the figures are of the server or of the harness. lag: sent - due. reasons: what broke the rule."""

    lag: Spread | None
    loop_lag: Spread | None
    cpu_share: float
    is_client_limited: bool
    reasons: tuple[str, ...]
    rule: str = CLIENT_RULE


@dataclass(frozen=True, slots=True)
class Statistics:
    """All figures of a run. slos: by class, what good means. num_planned: more than requests if the run ended early."""

    duration_s: float
    num_planned: int
    slos: dict[str, Slo]
    overall: Group
    by_class: tuple[Group, ...]
    by_tenant: tuple[Group, ...]
    by_stream: tuple[Group, ...]
    fairness: Fairness
    client: ClientHealth

    def to_jsonable(self) -> dict[str, Any]:
        """Return dicts, lists, texts and finite numbers, under the names of the fields."""
        return {name: _as_json(value) for name, value in asdict(self).items()}


def summarize(result: RunResult) -> Statistics:
    """Make all figures of a run."""
    records = result.records

    def groups(name_of: Callable[[Record], str], names: Iterable[str]) -> tuple[Group, ...]:
        return tuple(
            summarize_group(name, [record for record in records if name_of(record) == name], result) for name in names
        )

    present = {record.request.qos for record in records}
    return Statistics(
        duration_s=result.duration_s,
        num_planned=len(result.plan.requests),
        slos={qos.value: slo for qos, slo in result.slos.items()},
        overall=summarize_group("overall", records, result),
        by_class=groups(lambda record: record.request.qos.value, [qos.value for qos in QosClass if qos in present]),
        by_tenant=groups(tenant_of, sorted({tenant_of(record) for record in records})),
        by_stream=groups(
            lambda record: record.request.stream, dict.fromkeys(record.request.stream for record in records)
        ),
        fairness=_fairness(records),
        client=client_health(result),
    )


def summarize_group(name: str, records: Sequence[Record], result: RunResult) -> Group:
    """Make the figures of some of a run's records."""
    answered = [record for record in records if record.is_ok]
    slos = [result.slos.get(record.request.qos, Slo()) for record in records]
    verdicts = [is_good(record, slo) for record, slo in zip(records, slos, strict=True)]
    num_good = sum(verdicts)
    judged = [verdict for verdict, slo in zip(verdicts, slos, strict=True) if slo != Slo()]
    duration_s = result.duration_s
    token_at_s = np.array([at_s for record in records for at_s in record.token_at_s], dtype=np.float64)
    return Group(
        name=name,
        num_requests=len(records),
        num_ok=len(answered),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        num_preemptions=sum(record.num_preemptions for record in records),
        prompt_tokens=sum(map(_prompt_tokens, answered)),
        completion_tokens=len(token_at_s),
        ttft=spread(ttft_s(record) for record in answered),
        tpot=spread(tpot_s(record) for record in answered),
        gap=spread(gap_s for record in answered for gap_s in gaps_s(record)),
        e2e=spread(e2e_s(record) for record in answered),
        num_good=num_good,
        num_judged=len(judged),
        good_share=sum(judged) / len(judged) if judged else None,
        goodput_per_s=num_good / duration_s if duration_s > 0 else 0.0,
        tokens_per_s=int((token_at_s <= duration_s).sum()) / duration_s if duration_s > 0 else 0.0,
        steady_tokens_per_s=_steady_rate(token_at_s, result.records),
    )


def client_health(result: RunResult) -> ClientHealth:
    """Judge the harness itself by CLIENT_RULE."""
    lag = spread(record.sent_at_s - record.due_s for record in result.records)
    loop_lag = spread(result.loop_lag_s)
    ttft = spread(ttft_s(record) for record in result.records if record.is_ok)
    limit_s = max(MAX_LAG_S, MAX_LAG_SHARE * ttft.p50_s if ttft else 0.0)
    reasons = [
        f"p99 of {what} is {measured.p99_s * 1000:.1f} ms, above {limit_s * 1000:.1f} ms"
        for what, measured in (("the lag of sending", lag), ("the event loop's lag", loop_lag))
        if measured and measured.p99_s > limit_s
    ]
    if result.cpu_share > MAX_CPU_SHARE:
        reasons.append(f"the harness took {result.cpu_share:.0%} of a core, above {MAX_CPU_SHARE:.0%}")
    return ClientHealth(lag, loop_lag, result.cpu_share, bool(reasons), tuple(reasons))


def ttft_s(record: Record) -> float | None:
    """Time from due to the first token; None if there was none."""
    return record.token_at_s[0] - record.due_s if record.token_at_s else None


def tpot_s(record: Record) -> float | None:
    """Time per output token after the first, up to the end; None for fewer than two tokens."""
    num_tokens = len(record.token_at_s)
    return (record.ended_at_s - record.token_at_s[0]) / (num_tokens - 1) if num_tokens > 1 else None


def gaps_s(record: Record) -> list[float]:
    """Times between neighbouring tokens."""
    return [later - earlier for earlier, later in pairwise(record.token_at_s)]


def e2e_s(record: Record) -> float:
    """Time from due to the end."""
    return record.ended_at_s - record.due_s


def is_good(record: Record, slo: Slo) -> bool:
    """Whether a request ended well and met its objectives; an empty answer counts as there when it ended."""
    first_s = ttft_s(record)
    checks = (
        (slo.ttft_s, e2e_s(record) if first_s is None else first_s),
        (slo.tpot_s, tpot_s(record)),
        (slo.e2e_s, e2e_s(record)),
    )
    return record.is_ok and all(limit is None or value is None or value <= limit for limit, value in checks)


def tenant_of(record: Record) -> str:
    """The tenant as the server names it."""
    return record.request.tenant or "default"


def spread(samples: Iterable[float | None]) -> Spread | None:
    """Sum up the samples that are there; None if none is."""
    values = np.array([sample for sample in samples if sample is not None], dtype=np.float64)
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Spread(
        count=len(values),
        mean_s=float(values.mean()),
        p50_s=float(p50),
        p90_s=float(p90),
        p99_s=float(p99),
        max_s=float(values.max()),
        is_p99_rough=len(values) < MIN_P99_SAMPLES,
    )


def _steady_rate(token_at_s: npt.NDArray[np.float64], records: Sequence[Record]) -> float | None:
    """Tokens between the first and the last arrival of the run, per second; None if there is no such time."""
    arrivals_s = [record.due_s for record in records]
    first_s, last_s = min(arrivals_s, default=0.0), max(arrivals_s, default=0.0)
    if first_s == last_s:
        return None
    return int(((token_at_s > first_s) & (token_at_s <= last_s)).sum()) / (last_s - first_s)


def _prompt_tokens(record: Record) -> int:
    # Not every server says.
    return record.prompt_tokens or record.request.prompt_tokens


def _fairness(records: Sequence[Record]) -> Fairness:
    prompt_tokens: Counter[str] = Counter()
    completion_tokens: Counter[str] = Counter()
    for record in records:
        prompt_tokens[tenant_of(record)] += _prompt_tokens(record) if record.is_ok else 0
        completion_tokens[tenant_of(record)] += len(record.token_at_s)
    services = {name: prompt_tokens[name] + ANSWER_WEIGHT * completion_tokens[name] for name in sorted(prompt_tokens)}
    total = sum(services.values())
    squares = sum(service**2 for service in services.values())
    tenants = (
        TenantShare(name, prompt_tokens[name], completion_tokens[name], service, service / total if total else 0.0)
        for name, service in services.items()
    )
    return Fairness(tuple(tenants), total**2 / (len(services) * squares) if total else None)


def _as_json(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _as_json(entry) for key, entry in value.items()}
    return [_as_json(entry) for entry in value] if isinstance(value, list | tuple) else value
