"""A file of prompts answered by `shoal batch`, against the same prompts asked at once by the load harness.

Both ask over connections of this process, in class throughput; what is compared is the whole file, from the first question
to the last answer, which for a batch is on the disk then. Called by `run`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from batch.answers import AnswerFile
from batch.asking import Asker
from batch.driver import Batch, unanswered
from batch.prompts import read_prompts
from cli.batch import DEFAULT_CONCURRENCY, DEFAULT_PATIENCE_S
from loadtest import scenarios
from loadtest.plan import Plan
from loadtest.runner import run
from loadtest.targets import ShoalTarget
from loadtest.workloads import parse_workload
from shoal.errors import InternalError
from shoal.types import QosClass
from tests.bench.context import Bench
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import System
from tests.bench.pairs import MAX_FLEET_BUSY_CORES, Run, collect

NUM_PROMPTS, NUM_QUICK_PROMPTS = 200, 32
# Shorter than a block of KV: who asks for the second time finds nothing that is kept.
PROMPT_TOKENS, ANSWER_TOKENS = 32, 16
WORKLOAD = f"""
name = "short-batch"
[[stream]]
name = "short-batch"
qos = "throughput"
prompt_tokens = {PROMPT_TOKENS}
output_tokens = {ANSWER_TOKENS}
"""


def batch(bench: Bench) -> list[Figure]:
    """Tokens a second of a batch, of the harness's offline scenario."""
    number = NUM_QUICK_PROMPTS if bench.is_quick else NUM_PROMPTS
    plan = scenarios.offline(parse_workload(WORKLOAD, "short-batch"), seed=1, num_requests=number)
    with TemporaryDirectory(prefix="shoal-bench-batch-") as name, bench.two_stages("batch") as system:
        prompts = Path(name) / "prompts.jsonl"
        _write(prompts, plan)
        outs = (Path(name) / f"answers-{run_number}.jsonl" for run_number in itertools.count())
        pairs = collect(
            bench.long_plan,
            lambda: _offline(system, plan),
            lambda: _batch(system, prompts, outs),
            max_busy_cores=MAX_FLEET_BUSY_CORES,
        )
    note = (
        f"{number} prompts of {PROMPT_TOKENS} tokens, answers of {ANSWER_TOKENS}; offline "
        f"{pairs.typical(lambda pair: pair.baseline):.0f} tok/s with all at once, the batch with {DEFAULT_CONCURRENCY}"
    )
    return [from_pairs("batch", pairs, lambda pair: pair.ratio, note)]


def _write(prompts: Path, plan: Plan) -> None:
    lines = ({"prompt": one.prompt, "max_tokens": one.max_tokens, "ignore_eos": True} for one in plan.requests)
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _offline(system: System, plan: Plan) -> Run:
    async def ask_all() -> float:
        target = ShoalTarget(system.address, is_chat=False)
        try:
            result = (await run(plan, target)).result
        finally:
            await target.close()
        if not all(record.is_ok for record in result.records):
            raise InternalError("a request of the offline scenario failed")
        return sum(record.completion_tokens for record in result.records) / result.duration_s

    system.meter.start()
    value = system.run(ask_all())
    return Run(value, system.meter.stop())


def _batch(system: System, prompts: Path, outs: Iterator[Path]) -> Run:
    async def answer_all() -> float:
        asker = Asker(system.address, {"qos_class": QosClass.THROUGHPUT})
        began = perf_counter()
        with AnswerFile(next(outs)) as file:
            left = unanswered(read_prompts(prompts), file)
            running = Batch(left, file, asker.ask, concurrency=DEFAULT_CONCURRENCY, patience_s=DEFAULT_PATIENCE_S)
            try:
                await running.run()
            finally:
                await asker.close()
            file.sort()
        if running.progress().num_failed:
            raise InternalError("a line of the batch failed")
        return running.progress().num_tokens / (perf_counter() - began)

    system.meter.start()
    value = system.run(answer_all())
    return Run(value, system.meter.stop())
