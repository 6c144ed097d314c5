"""Builders of what the load harness is given and gives: requests, plans, records, results, with defaults.

Used by the tests of targets, runner, ramp, report and command line.
"""

from __future__ import annotations

from typing import Any

from loadtest.plan import Plan, PlannedRequest, Record, RunResult, Slo
from shoal.types import QosClass

SLOS = {QosClass.LATENCY: Slo(ttft_s=0.5, tpot_s=0.05), QosClass.BALANCED: Slo(ttft_s=2.0, tpot_s=0.1)}


def planned(number: int = 0, due_s: float | None = None, **fields: Any) -> PlannedRequest:
    defaults: dict[str, Any] = {"prompt": "once upon a time", "prompt_tokens": 4, "max_tokens": 3}
    return PlannedRequest(number=number, due_s=due_s, **{**defaults, **fields})


def make_plan(*requests: PlannedRequest, concurrency: int = 0) -> Plan:
    return Plan(requests, concurrency, seed=7, description="made by hand")


def make_record(
    number: int = 0,
    due_s: float = 0.0,
    *,
    ttft_s: float = 0.2,
    gap_s: float = 0.02,
    num_tokens: int = 5,
    lag_s: float = 0.001,
    error: str = "",
    request: PlannedRequest | None = None,
    **fields: Any,
) -> Record:
    """An answer with even gaps; one that failed has no tokens."""
    count = 0 if error else num_tokens
    token_at_s = tuple(due_s + ttft_s + index * gap_s for index in range(count))
    return Record(
        request=request or planned(number, due_s, max_tokens=num_tokens, **fields),
        due_s=due_s,
        sent_at_s=due_s + lag_s,
        ended_at_s=token_at_s[-1] if token_at_s else due_s + ttft_s,
        token_at_s=token_at_s,
        prompt_tokens=4,
        completion_tokens=count,
        finish="" if error else "length",
        error=error,
        message=f"it said {error}" if error else "",
    )


def make_result(*records: Record, **fields: Any) -> RunResult:
    defaults: dict[str, Any] = {
        "plan": make_plan(*(record.request for record in records)),
        "target": "tiny at 127.0.0.1:1 (Shoal)",
        "duration_s": max((record.ended_at_s for record in records), default=0.0),
        "slos": SLOS,
        "loop_lag_s": (0.0, 0.001, 0.002),
        "cpu_share": 0.25,
        "machine": "Linux, 2 cores",
        "command": "shoal load server",
    }
    return RunResult(records=records, **{**defaults, **fields})
