"""Measures recovery: `python -m tests.chaos.run --fault kill --runs 50`; prints what was lost, what differed, and gaps.

A middle stage's process is killed or frozen, or the orchestrator is killed and started again, in every run, in mid-stream.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch.profiles import load_profile
from modelstore.pull import pull
from modelstore.store import ModelStore
from shoal.config import OrchestratorConfig, default_home
from tests.bench.machine import describe
from tests.chaos.losses import Fault, LossyFleet, Outcome, lossy_fleet, make_streams


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    return sorted(values)[max(math.ceil(len(values) * share) - 1, 0)]


def measure(fleet: LossyFleet, options: argparse.Namespace) -> list[Outcome]:
    expected = make_streams(options.streams, options.tokens)
    fleet.answer(expected)
    problems = [one.problem for one in expected if one.problem]
    if problems:
        sys.exit(f"without any fault: {problems}")
    draw, outcomes = random.Random(options.seed), []
    for number in range(options.runs):
        after = draw.randrange(2, options.tokens // 2)
        streams = make_streams(options.streams, options.tokens)
        fault = Fault(options.fault)
        outcome = fleet.suffer(streams, expected, fault, after, kills_redis=options.kill_redis)
        outcomes.append(outcome)
        gap_s = max(outcome.gaps_s, default=0.0)
        detected = "" if outcome.detected_s is None else f", detected after {outcome.detected_s * 1e3:.0f} ms"
        wrong = "; ".join(outcome.wrong) or "identical"
        wrong += "" if outcome.had_standby else ", nobody stood by"
        sys.stdout.write(f"run {number + 1}: at token {after}{detected}, longest gap {gap_s:.2f} s, {wrong}\n")
        sys.stdout.flush()
    return outcomes


def to_text(outcomes: Sequence[Outcome], options: argparse.Namespace) -> str:
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    detected = [outcome.detected_s for outcome in outcomes if outcome.detected_s is not None]
    num_ended = sum(bool(one.problem) for outcome in outcomes for one in outcome.streams)
    num_wrong = sum(len(outcome.wrong) for outcome in outcomes)
    num_streams = len(outcomes) * options.streams
    lines = [
        f"{len(outcomes)} runs of {options.streams} streams of {options.tokens} tokens, fault: {options.fault}"
        f"{', no Redis' if options.no_redis else ', Redis killed too' if options.kill_redis else ''}",
        f"{num_ended} of {num_streams} streams ended by an error, {num_wrong} differ from the undisturbed answers",
    ]
    if gaps:
        lines.append(
            f"longest gap of a stream: median {statistics.median(gaps):.2f} s, p95 {percentile(gaps, 0.95):.2f} s, "
            f"most {max(gaps):.2f} s"
        )
    if detected:
        lines.append(
            f"detected after: median {statistics.median(detected) * 1e3:.0f} ms, most {max(detected) * 1e3:.0f} ms"
        )
    machine = ", ".join(f"{name} {value}" for name, value in describe().items())
    return "\n".join([*lines, f"{machine}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--fault", choices=[fault.value for fault in Fault], default=Fault.KILL.value)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--profiles",
        help="devices such as phone,tablet,laptop,phone with layers cut as is best, in place of three stages and a stand-by",
    )
    redis = parser.add_mutually_exclusive_group()
    redis.add_argument("--no-redis", action="store_true", help="nothing is checkpointed outside of workers' memory")
    redis.add_argument(
        "--kill-redis", action="store_true", help="Redis is killed in the same moment, and started again"
    )
    options = parser.parse_args()
    model, home = OrchestratorConfig().model, default_home()
    pull(ModelStore(home), model)
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as folder:
        for name in ("models", "blobs"):
            (Path(folder) / name).symlink_to(home / name)
        profiles = [load_profile(name) for name in options.profiles.split(",")] if options.profiles else []
        with lossy_fleet(Path(folder), profiles=profiles, has_redis=not options.no_redis) as fleet:
            outcomes = measure(fleet, options)
    sys.stdout.write(to_text(outcomes, options))
    if any(outcome.wrong for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
