"""Prefill of a long prompt against the baseline, and the first token of a short one beyond the compute it needs."""

from __future__ import annotations

import statistics

from tests.bench.context import Bench
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import System
from tests.bench.pairs import Run, collect

CHUNK_TOKENS = 64
# Long enough that every process sleeps when the request comes.
PAUSE_S = 0.1


def prefill(bench: Bench, system: System) -> list[Figure]:
    """The whole time to the first token, as the client sees it, against the baseline's time for the same chunks."""
    prompt = bench.prompt(bench.sizes.long_prompt)

    def baseline() -> Run:
        return bench.run_baseline(system.meter, "seconds", "prefill", prompt=prompt, chunk_tokens=CHUNK_TOKENS)

    def candidate() -> Run:
        measured = system.ask([prompt], 1)
        return Run(measured.streams[0].ttft_s, measured.load)

    pairs = collect(bench.plan, baseline, candidate)
    note = f"baseline {len(prompt) / pairs.typical(lambda pair: pair.baseline):.0f} tok/s"
    return [from_pairs("prefill", pairs, lambda pair: pair.inverse_ratio, note)]


def first_token(bench: Bench, system: System) -> list[Figure]:
    """The client's time to the first token less the compute: the same prompt in the same two shards in one process.

    Both pause before each prompt, so that both compute with caches as cold as an idle system has.
    """
    prompt, repeats = bench.prompt(bench.sizes.short_prompt), bench.sizes.short_repeats

    def baseline() -> Run:
        return bench.run_baseline(
            system.meter, "seconds", "first_token", prompt=prompt, cut=bench.cut, repeats=repeats, pause_s=PAUSE_S
        )

    def candidate() -> Run:
        system.meter.start()
        ttft_s = []
        for _ in range(repeats):
            system.wait(PAUSE_S)
            ttft_s.append(system.ask([prompt], 1).streams[0].ttft_s)
        return Run(statistics.median(ttft_s), system.meter.stop())

    pairs = collect(bench.plan, baseline, candidate)
    compute_ms = 1e3 * pairs.typical(lambda pair: pair.baseline)
    note = f"two stages, {len(prompt)} tokens, whose compute takes {compute_ms:.1f} ms in one process"
    return [from_pairs("first_token", pairs, lambda pair: 1e3 * pair.difference, note)]
