"""The figures that are measured, with the gate and the aim of each, and the verdict on a measured one.

Knows no process and no clock; what is measured comes from `decode`, `prefill`, `links`, `classes`, `batches`,
`planned`, `planner`, `real_models` and `processes`, and goes to `report`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.bench.pairs import MIN_COUNTED, Pair, PairSet


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is and shall be. is_upper: gate and aim are upper bounds."""

    title: str
    gate: float
    aim: float
    unit: str = "x"
    is_upper: bool = False

    def is_met(self, value: float, bound: float) -> bool:
        return value <= bound if self.is_upper else value >= bound


GOALS = {
    "one_worker": Goal("one worker, decode, 1 stream (SHARED), of the baseline", 0.90, 0.97),
    "two_stages_shared": Goal("two stages, one thread each, decode, 1 stream (SHARED), of the baseline", 0.80, 0.95),
    "two_stages_solo": Goal("the same in SOLO class, of the plain M = 1 graph", 0.80, 0.95),
    "hop": Goal("message hop while decoding, median, loopback", 1.0, 0.4, "ms", is_upper=True),
    "sixteen_streams": Goal("two stages, 16 streams, aggregate decode, of the baseline at 16", 1.5, 1.85),
    "prefill": Goal("two stages, prefill of 512 tokens in chunks of 64, of the baseline", 1.35, 1.8),
    "burst": Goal("1 stream over links of 5 ms and 20 Mbit/s: burst, of orchestrator in the loop", 1.1, 1.2),
    "first_token": Goal("short prompt to first token, idle system, beyond the compute", 8.0, 4.0, "ms", is_upper=True),
    "stall": Goal(
        "p99 gap of running streams while a prompt of 1,800 tokens arrives, of the gap without",
        1.5,
        1.25,
        is_upper=True,
    ),
    "latency_under_load": Goal(
        "LATENCY: p99 time to first token under full THROUGHPUT load, of that alone", 1.5, 1.2, is_upper=True
    ),
    "mixed_throughput": Goal("THROUGHPUT tokens/s beside LATENCY requests, of those alone", 0.85, 0.95),
    "sixteen_emulated": Goal("two slow stages, one thread each: 16 streams, of what one stream gets", 3.5, 4.5),
    "schedule": Goal("schedule() with 1,000 running and 10,000 waiting, median", 200.0, 100.0, "us", is_upper=True),
    "batch": Goal("`shoal batch` of 200 prompts, tokens/s, of the load harness's offline scenario", 0.9, 0.98),
    "kv_held": Goal(
        "time to first token, 1,024-token prefix held in workers' memory, of cold prefill", 0.10, 0.08, is_upper=True
    ),
    "kv_restarted": Goal("the same from embedded Valkey, all workers started anew", 0.25, 0.15, is_upper=True),
    "kv_write_behind": Goal("steady decode while KV is written behind, of that without a cache", 0.97, 0.99),
    "kv_hung": Goal(
        "time to first token with a hung Redis (SIGSTOP), of a fleet without a cache", 1.1, 1.02, is_upper=True
    ),
    "kv_killed": Goal("the same with a killed one", 1.1, 1.02, is_upper=True),
    "kv_hit_rate": Goal(
        "hits on the trace of conversations in a quarter of its footprint, of an unbounded cache's", 0.7, 0.9
    ),
    "prediction": Goal(
        "time of a token as predicted, how far from measured: one stream, unequal devices and links",
        0.10,
        0.05,
        is_upper=True,
    ),
    "planner": Goal("a plan for 100 devices and 80 layers", 1.0, 0.5, "s", is_upper=True),
    "plan_gain": Goal("tokens/s of the plan, of a split in proportion to memory, unequal fleet", 1.3, 2.0),
    "models_smollm2": Goal(
        "SmolLM2 135M as served: perplexity, above that of its file's weights in float32",
        0.01,
        0.005,
        "",
        is_upper=True,
    ),
    "models_gemma3": Goal("Gemma 3 270M, the same", 0.01, 0.005, "", is_upper=True),
    "models_gemma3_speed": Goal("Gemma 3 270M, decode, weight bytes a second, of SmolLM2's", 0.85, 1.0),
    "start": Goal("`shoal up` to ready, model pulled, three devices", 5.0, 3.0, "s", is_upper=True),
    "memory": Goal("worker memory, worst worker, of the gate's bound", 1.0, 1.0, "x", is_upper=True),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as measured.

    value: None if nothing counted. num_counted: measurements that count. num_discarded: those that do not, for other
    load on the machine. raw: each of them. note: what a reader of the table has to know. goal: instead of that in GOALS,
    where bounds depend on what was measured.
    """

    name: str
    value: float | None
    num_counted: int
    num_discarded: int
    raw: list[dict[str, object]] = field(default_factory=list)
    note: str = ""
    own_goal: Goal | None = None

    @property
    def goal(self) -> Goal:
        return self.own_goal or GOALS[self.name]

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        if self.num_counted < MIN_COUNTED:
            return f"does not count: {self.num_counted} quiet of {self.num_counted + self.num_discarded}"
        if self.goal.is_met(self.value, self.goal.aim):
            return "aim reached"
        return "gate passed" if self.goal.is_met(self.value, self.goal.gate) else "gate missed"


def from_pairs(name: str, pairs: PairSet, value: Callable[[Pair], float], note: str = "") -> Figure:
    """The median of a value of the pairs that count; if too few do, the note says what all showed."""
    raw = [
        {
            "before": pair.before.value,
            "candidate": pair.candidate.value,
            "after": pair.after.value,
            "value": value(pair),
            "busy_cores": [run.load.busy_cores for run in (pair.before, pair.candidate, pair.after)],
            "foreign_cores": [run.load.foreign_cores for run in (pair.before, pair.candidate, pair.after)],
            "details": pair.candidate.details,
            "counts": pair.counts,
        }
        for pair in pairs.pairs
    ]
    if not pairs.is_enough:
        note += f"; all pairs, beside other load: {statistics.median(map(value, pairs.pairs)):.3g}"
    return Figure(name, pairs.median(value), len(pairs.counted), pairs.num_discarded, raw, note)
