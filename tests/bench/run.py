"""Runs the benchmark: `python -m tests.bench.run [--only NAME] [--out PATH] [--quick]`.

Composes fleets, figures and the report. Everything it starts is stopped again, also when it fails or is told to end.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from modelstore.pull import pull
from modelstore.store import ModelStore
from shoal.config import OrchestratorConfig, default_home
from shoal.errors import ShoalError
from tests.bench import (
    batches,
    classes,
    decode,
    kv_cache,
    kv_codecs,
    kv_hit_rate,
    links,
    long_contexts,
    machine,
    planned,
    planner,
    prefill,
    processes,
    real_models,
)
from tests.bench.baseline_process import BaselineProcess
from tests.bench.context import Bench
from tests.bench.figures import GOALS, Figure
from tests.bench.fleet import System
from tests.bench.report import Report, to_markdown, write

RESULTS = Path("docs/results/bench.json")
# Not figures but tables: sockets against gRPC, with the breakdown of a token; decode by context; codecs of KV.
TRANSPORTS, CONTEXTS, CODECS = "transports", "contexts", "kv_codecs"
NAMES = (*GOALS, TRANSPORTS, CONTEXTS, CODECS)

# On the fleet of two stages, in this order: the hop is read while only single streams have been decoded.
TWO_STAGES: dict[str, Callable[[Bench, System], list[Figure]]] = {
    "two_stages_shared": decode.two_stages_shared,
    "two_stages_solo": decode.two_stages_solo,
    "first_token": prefill.first_token,
    "prefill": prefill.prefill,
    "sixteen_streams": decode.sixteen_streams,
}

# On fleets of their own, or on none.
ALONE: tuple[tuple[tuple[str, ...], Callable[[Bench], list[Figure]]], ...] = (
    (("burst",), links.burst),
    ((TRANSPORTS,), links.transports),
    (("stall",), classes.stall),
    (("latency_under_load", "mixed_throughput"), classes.mixed),
    (("sixteen_emulated",), classes.sixteen_emulated),
    (("schedule",), classes.schedule),
    (("batch",), batches.batch),
    (("kv_held",), kv_cache.held),
    (("kv_restarted",), kv_cache.restarted),
    (("kv_write_behind",), kv_cache.write_behind),
    (("kv_hung", "kv_killed"), kv_cache.dead_redis),
    (("kv_hit_rate",), lambda bench: kv_hit_rate.hit_rate()),
    (("planner",), planner.planner),
    (("prediction",), planned.prediction),
    (("plan_gain",), planned.plan_gain),
    (("models_smollm2",), real_models.smollm2),
    (("models_gemma3", "models_gemma3_speed"), real_models.gemma3),
    (("start",), processes.start),
)

TABLES: dict[str, Callable[[Bench], None]] = {
    CONTEXTS: long_contexts.decode_by_context,
    CODECS: kv_codecs.add_table,
}


def measure(bench: Bench, wanted: frozenset[str]) -> Iterator[Figure]:
    """Measure what is wanted, fleet by fleet; figures that come along are given too."""
    found: list[processes.Footprint] = []
    if wanted & {"one_worker", "memory"}:
        with bench.one_worker() as system:
            if "one_worker" in wanted:
                yield from decode.one_worker(bench, system)
            if "memory" in wanted:
                found += processes.footprints(bench, system)
    two_stages = [name for name in TWO_STAGES if name in wanted or (name == "two_stages_shared" and "hop" in wanted)]
    if two_stages or "memory" in wanted:
        with bench.two_stages("two-stages") as system:
            for name in two_stages:
                bench.say(f"measuring {name}")
                yield from TWO_STAGES[name](bench, system)
            if "memory" in wanted:
                found += processes.footprints(bench, system)
    if found:
        yield from processes.memory(found)
    for names, measure_alone in ALONE:
        if wanted.intersection(names):
            bench.say(f"measuring {', '.join(names)}")
            yield from measure_alone(bench)
    for name, add_table in TABLES.items():
        if name in wanted:
            bench.say(f"measuring {name}")
            add_table(bench)


def main() -> None:
    options = _parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, home = time.monotonic(), default_home()
    model = OrchestratorConfig().model
    pull(ModelStore(home), model)
    figures: list[Figure] = []
    failure = ""
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder,
        BaselineProcess(home, model) as baseline,
        asyncio.Runner() as runner,
    ):
        bench = Bench(home, Path(folder), model, baseline, runner, _say, quick=options.quick)
        try:
            for figure in measure(bench, frozenset(options.only or NAMES)):
                _say(f"{figure.name}: {figure.value} {figure.goal.unit} ({figure.verdict}; {figure.note})")
                figures.append(figure)
        except ShoalError as error:
            failure = error.message
    figures.sort(key=lambda one: list(GOALS).index(one.name))
    command = shlex.join(["python", "-m", "tests.bench.run", *sys.argv[1:]])
    report = Report(machine.describe(), command, time.monotonic() - started, figures, bench.notes, bench.tables)
    _say(to_markdown(report).partition("\n## Every measurement")[0])
    if failure:
        sys.exit(f"the run ended early, nothing is written: {failure}")
    # A part of a run, or a run with short measurements, is no result to keep.
    out = options.out or (None if options.only or options.quick else RESULTS)
    if out is not None:
        write(report, out)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description="Measure Shoal on this machine.")
    parser.add_argument("--only", action="append", choices=NAMES, help="measure this only; may be given again")
    parser.add_argument("--out", type=Path, help=f"JSON file of the results (default {RESULTS}, for a whole run)")
    parser.add_argument("--quick", action="store_true", help="one short pair a figure, to see that it works")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
