"""What links cost: a burst against the orchestrator in the loop, plain sockets against gRPC.

Also takes a token's time apart. Needs two fleets at a time, one of which is idle. Called by `run`.
"""

from __future__ import annotations

from shoal.types import LinkProfile
from tests.bench.context import Bench
from tests.bench.decode import stream_run
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import System
from tests.bench.pairs import PairSet, Plan, Run, collect

EMULATED = LinkProfile(delay_ms=5.0, rate_mbit_s=20.0)
BURST_STEPS = 16
NUM_STAGES = 2


def burst(bench: Bench) -> list[Figure]:
    loop_fleet = bench.two_stages("emulated-loop", link=EMULATED, burst_steps=1)
    burst_fleet = bench.two_stages("emulated-burst", link=EMULATED, burst_steps=BURST_STEPS)
    with loop_fleet as loop, burst_fleet as bursting:
        pairs = _compare(bench, bench.plan, loop, bursting)
    note = f"orchestrator in the loop {pairs.typical(lambda pair: pair.baseline):.1f} tok/s"
    return [from_pairs("burst", pairs, lambda pair: pair.ratio, note)]


def transports(bench: Bench) -> list[Figure]:
    """No figure of its own: two tables, for the decision about plain socket links and for whoever looks for time."""
    for burst_steps in (BURST_STEPS, 1):
        with (
            bench.two_stages(f"grpc-{burst_steps}", use_sockets=False, burst_steps=burst_steps) as grpc,
            bench.two_stages(f"sockets-{burst_steps}", use_sockets=True, burst_steps=burst_steps) as sockets,
        ):
            pairs = _compare(bench, bench.long_plan, grpc, sockets)
        _add_comparison(bench, pairs, burst_steps)
    return []


def _compare(bench: Bench, plan: Plan, one: System, other: System) -> PairSet:
    """Pairs of one stream on two fleets that are both up; whichever is not asked is idle."""
    prompt, sizes = bench.prompt(bench.sizes.prompt), bench.sizes
    for system in (one, other):
        system.meter.add(one.process_ids + other.process_ids)
        system.ask([prompt], sizes.skip)
    return collect(
        plan,
        lambda: stream_run(one, prompt, sizes.answer, sizes.skip),
        lambda: stream_run(other, prompt, sizes.answer, sizes.skip),
    )


def _add_comparison(bench: Bench, pairs: PairSet, burst_steps: int) -> None:
    grpc = [run for pair in pairs.counted for run in (pair.before, pair.after)]
    sockets = [pair.candidate for pair in pairs.counted]
    if not sockets:
        bench.notes.append(f"Sockets against gRPC, burst_steps {burst_steps}: no quiet pair of {len(pairs.pairs)}.")
        return
    ratio = pairs.median(lambda pair: pair.ratio) or 0.0
    bench.notes.append(
        f"Plain sockets against gRPC, one stream, burst_steps {burst_steps}: {ratio:.3f} x "
        f"({len(sockets)} pairs count, {pairs.num_discarded} discarded)."
    )
    table = bench.tables.setdefault("One stream, milliseconds a token", [])
    for name, runs in (("gRPC", grpc), ("sockets", sockets)):
        table.append({"links": name, "burst_steps": burst_steps, **_breakdown(runs, burst_steps)})


def _breakdown(runs: list[Run], burst_steps: int) -> dict[str, object]:
    """rest: what neither stages nor hops on the path of a token take of the median gap between two."""
    middle = {name: _median([run.details[name] for run in runs]) for name in runs[0].details}
    # In a burst the last stage hands over to the first itself.
    num_hops = NUM_STAGES if burst_steps > 1 else NUM_STAGES + 1
    hops_ms = num_hops * middle["hop_ms"]
    return {
        "token": f"{middle['token_ms']:.2f}",
        "median gap": f"{middle['median_gap_ms']:.2f}",
        "stages": f"{middle['stages_ms']:.2f}",
        "one hop": f"{middle['hop_ms']:.2f}",
        "hops on the path": f"{hops_ms:.2f}",
        "rest (orchestrator)": f"{middle['median_gap_ms'] - middle['stages_ms'] - hops_ms:.2f}",
        "orchestrator's CPU": f"{middle['orchestrator_cpu_ms']:.2f}",
        "client's CPU": f"{middle['client_cpu_ms']:.2f}",
    }


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
