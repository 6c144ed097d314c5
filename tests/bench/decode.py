"""Decode on loopback: one worker and two stages against the baseline, one stream and sixteen, and the message hop."""

from __future__ import annotations

import itertools

from shoal.types import QosClass
from tests.bench.context import NUM_STREAMS, Bench, decode_prompts
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import Measured, System
from tests.bench.pairs import Run, collect


def one_worker(bench: Bench, system: System) -> list[Figure]:
    return [_one_stream(bench, system, "one_worker", is_shared=True)[0]]


def two_stages_shared(bench: Bench, system: System) -> list[Figure]:
    """Also gives the hop, from the status after each run."""
    return _one_stream(bench, system, "two_stages_shared", is_shared=True)


def two_stages_solo(bench: Bench, system: System) -> list[Figure]:
    return [_one_stream(bench, system, "two_stages_solo", is_shared=False)[0]]


def _one_stream(bench: Bench, system: System, name: str, *, is_shared: bool) -> list[Figure]:
    prompt, sizes = bench.prompt(bench.sizes.prompt), bench.sizes

    def baseline() -> Run:
        return bench.run_baseline(
            system.meter,
            "tokens_per_s",
            "decode",
            prompt=prompt,
            num_rows=1,
            num_steps=sizes.answer,
            is_shared=is_shared,
        )

    qos = QosClass.BALANCED if is_shared else QosClass.LATENCY
    system.ask([prompt], sizes.skip, qos)
    pairs = collect(bench.plan, baseline, lambda: stream_run(system, prompt, sizes.answer, sizes.skip, qos))
    note = f"baseline {pairs.typical(lambda pair: pair.baseline):.1f} tok/s"
    return [
        from_pairs(name, pairs, lambda pair: pair.ratio, note),
        from_pairs(
            "hop", pairs, lambda pair: pair.candidate.details["hop_ms"], "read after each run of two stages, SHARED"
        ),
    ]


def stream_run(system: System, prompt: list[int], num_tokens: int, skip: int, qos: QosClass = QosClass.BALANCED) -> Run:
    """The decode rate of one stream, with where a token's time went."""
    measured = system.ask([prompt], num_tokens, qos)
    return Run(measured.streams[0].tokens_per_s(skip), measured.load, _details(system, measured, skip))


def _details(system: System, measured: Measured, skip: int) -> dict[str, float]:
    status, stream = system.status(), measured.streams[0]
    assert status.pipeline is not None
    times = stream.token_at[skip:]
    gaps_ms = sorted((after - before) * 1e3 for before, after in itertools.pairwise(times))
    return {
        "token_ms": 1e3 / stream.tokens_per_s(skip),
        "median_gap_ms": gaps_ms[len(gaps_ms) // 2],
        "stages_ms": sum(device.decode_ms for device in status.devices),
        "hop_ms": status.pipeline.hop_ms,
        **measured.cpu_ms,
    }


def sixteen_streams(bench: Bench, system: System) -> list[Figure]:
    sizes = bench.sizes
    prompts = decode_prompts(bench, NUM_STREAMS, sizes.many_prompt)

    def baseline() -> Run:
        # In the middle of what the streams decode at.
        start = bench.prompt(sizes.many_prompt + (sizes.many_answer - sizes.many_baseline_steps) // 2)
        return bench.run_baseline(
            system.meter, "tokens_per_s", "decode",
            prompt=start, num_rows=NUM_STREAMS, num_steps=sizes.many_baseline_steps, is_shared=True,
        )  # fmt: skip

    def candidate() -> Run:
        measured = system.ask(prompts, sizes.many_answer, QosClass.THROUGHPUT)
        return Run(measured.shared_tokens_per_s(sizes.skip), measured.load, measured.cpu_ms)

    pairs = collect(bench.long_plan, baseline, candidate)
    client_ms = pairs.typical(lambda pair: pair.candidate.details["client_cpu_ms"])
    note = (
        f"baseline {pairs.typical(lambda pair: pair.baseline):.0f} tok/s; the client takes {client_ms:.2f} ms a token"
    )
    return [from_pairs("sixteen_streams", pairs, lambda pair: pair.ratio, note)]
