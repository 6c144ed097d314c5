"""QoS on emulated devices: what a long prompt, other classes and many streams do to those who are being answered.

The devices are emulated slower than this machine, so that its cores are not what is measured; the cores that were busy stand
beside every run. Called by `run`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from shoal.types import DeviceMode, QosClass
from tests.bench.context import NUM_STREAMS, Bench, decode_prompts
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import BOX, System
from tests.bench.pairs import Load, Pair, PairSet, Run, collect
from tests.bench.scheduling import measure_schedule

# Two or three of them keep about one of this machine's two cores busy.
SLOW = replace(BOX, name="slow", speed=0.4, poll_ms=0.0, is_emulated=True)
KEPT = replace(SLOW, name="kept", mode=DeviceMode.LATENCY)
P99 = 99
SHORT_PROMPT = 32
# No device of this speed is as fast: streams that ask for this are to lose as little as possible.
UNATTAINABLE_MS = 20.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, of the streams that run, of what comes in between; rounds of every comparison."""

    running: int = 4
    window: int = 40
    long_prompt: int = 1800
    latency_requests: int = 24
    latency_prompt: int = 24
    latency_answer: int = 4
    batch_prompt: int = SHORT_PROMPT
    batch_answer: int = 48
    window_s: float = 12.0
    rounds: int = 3


QUICK = Sizes(window=12, long_prompt=300, latency_requests=6, window_s=6.0, rounds=1)


def _slow_stages(bench: Bench, name: str, speed: float = SLOW.speed) -> AbstractContextManager[System]:
    return bench.two_stages(name, profiles=[replace(SLOW, speed=speed)] * 2)


def stall(bench: Bench) -> list[Figure]:
    """Gaps of running streams while a long prompt arrives, against those before and after it.

    The streams ask for the least gap there is. With the target of their class gaps may grow to it: that run is in the note.
    """
    sizes = QUICK if bench.is_quick else Sizes()
    with _slow_stages(bench, "stall", 0.5) as system:
        rounds = [system.run(_stall_round(bench, system, sizes, UNATTAINABLE_MS)) for _ in range(sizes.rounds)]
        usual = system.run(_stall_round(bench, system, sizes, None))
    pairs = PairSet(tuple(rounds))
    prefill_s = pairs.typical(lambda pair: pair.candidate.details["prefill_s"])
    note = (
        f"{sizes.running} streams that ask for {UNATTAINABLE_MS:.0f} ms; p99 gap "
        f"{1e3 * pairs.typical(lambda pair: pair.baseline):.0f} ms without; the prompt of {sizes.long_prompt} tokens took "
        f"{prefill_s:.0f} s; with the class's target of 100 ms: p99 gap {1e3 * usual.candidate.value:.0f} ms, "
        f"{usual.candidate.details['prefill_s']:.0f} s; {_busy(pairs)}"
    )
    return [from_pairs("stall", pairs, lambda pair: pair.ratio, note)]


async def _stall_round(bench: Bench, system: System, sizes: Sizes, target_ms: float | None) -> Pair:
    prompts = decode_prompts(bench, sizes.running, sizes.batch_prompt)
    token_at: list[list[float]] = [[] for _ in prompts]
    streams = [
        asyncio.create_task(system.read(prompt, 1600, QosClass.BALANCED, times, inter_token_target_ms=target_ms))
        for prompt, times in zip(prompts, token_at, strict=True)
    ]
    try:
        await _until(token_at, bench.sizes.skip)
        before = await _window(system, token_at, sizes.window)
        system.meter.start()
        sent_at = time.perf_counter()
        times: list[float] = []
        await system.read(bench.prompt(sizes.long_prompt), 1, QosClass.BALANCED, times)
        details = {"prefill_s": times[0] - sent_at}
        during = Run(_p99_gap(token_at, sent_at, times[0]), system.meter.stop(), details)
        return Pair(before, during, await _window(system, token_at, sizes.window))
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def _until(token_at: Sequence[Sequence[float]], count: int) -> None:
    while min(len(times) for times in token_at) < count:
        await asyncio.sleep(0.02)


async def _window(system: System, token_at: Sequence[Sequence[float]], num_tokens: int) -> Run:
    system.meter.start()
    start = time.perf_counter()
    await _until(token_at, min(len(times) for times in token_at) + num_tokens)
    return Run(_p99_gap(token_at, start, time.perf_counter()), system.meter.stop())


def _p99_gap(token_at: Sequence[Sequence[float]], start: float, stop: float) -> float:
    gaps = [
        after - before
        for times in token_at
        for before, after in itertools.pairwise(times)
        if start <= before and after <= stop
    ]
    return float(np.percentile(gaps, P99))


def mixed(bench: Bench) -> list[Figure]:
    """LATENCY requests and THROUGHPUT streams, each alone and both together, with a device kept for the former."""
    sizes = QUICK if bench.is_quick else Sizes()
    with bench.fleet("mixed", profiles=[KEPT, SLOW, SLOW], num_workers=3) as system:
        system.ask([bench.prompt(sizes.latency_prompt)], bench.sizes.skip, QosClass.LATENCY)
        system.ask(decode_prompts(bench, 2, sizes.batch_prompt), bench.sizes.skip, QosClass.THROUGHPUT)
        together = [_mixed_round(bench, system, sizes) for _ in range(sizes.rounds)]
    ttft = PairSet(tuple(pair for pair, _ in together))
    rate = PairSet(tuple(pair for _, pair in together))
    ttft_note = (
        f"p99 of {sizes.latency_requests} first tokens, alone {1e3 * ttft.typical(lambda pair: pair.baseline):.0f} ms; "
        f"{NUM_STREAMS} THROUGHPUT streams beside them; {_busy(ttft)}"
    )
    rate_note = f"THROUGHPUT tokens alone; pure {rate.typical(lambda pair: pair.baseline):.1f} tok/s; {_busy(rate)}"
    return [
        from_pairs("latency_under_load", ttft, lambda pair: pair.ratio, ttft_note),
        from_pairs("mixed_throughput", rate, lambda pair: pair.ratio, rate_note),
    ]


def _mixed_round(bench: Bench, system: System, sizes: Sizes) -> tuple[Pair, Pair]:
    alone = system.run(_latency_alone(bench, system, sizes))
    pure = system.run(_throughput(bench, system, sizes))
    ttft, rate = system.run(_both(bench, system, sizes))
    pure_again = system.run(_throughput(bench, system, sizes))
    alone_again = system.run(_latency_alone(bench, system, sizes))
    return Pair(alone, ttft, alone_again), Pair(pure, rate, pure_again)


async def _latency_alone(bench: Bench, system: System, sizes: Sizes) -> Run:
    system.meter.start()
    ttft_s = await _ask_latency(bench, system, sizes)
    return Run(float(np.percentile(ttft_s, P99)), system.meter.stop())


async def _ask_latency(bench: Bench, system: System, sizes: Sizes) -> list[float]:
    """One after the other, each with a prompt of its own."""
    ttft_s = []
    for number in range(sizes.latency_requests):
        times: list[float] = []
        sent_at = time.perf_counter()
        prompt = bench.prompt(sizes.latency_prompt, number)
        await system.read(prompt, sizes.latency_answer, QosClass.LATENCY, times)
        ttft_s.append(times[0] - sent_at)
    return ttft_s


async def _throughput(bench: Bench, system: System, sizes: Sizes) -> Run:
    """The rate of streams that are always NUM_STREAMS, once they are under way."""
    async with _Load(bench, system, sizes) as load:
        system.meter.start()
        rate = await load.rate_over(sizes.window_s)
        return Run(rate, system.meter.stop())


async def _both(bench: Bench, system: System, sizes: Sizes) -> tuple[Run, Run]:
    async with _Load(bench, system, sizes) as load:
        system.meter.start()
        start, count = time.perf_counter(), load.count
        ttft_s = await _ask_latency(bench, system, sizes)
        rate = (load.count - count) / (time.perf_counter() - start)
        busy = system.meter.stop()
        return Run(float(np.percentile(ttft_s, P99)), busy), Run(rate, busy)


class _Load:
    """Keeps NUM_STREAMS THROUGHPUT answers in the making while its block runs."""

    def __init__(self, bench: Bench, system: System, sizes: Sizes) -> None:
        self._bench, self._system, self._sizes = bench, system, sizes
        self._token_at: list[float] = []
        self._streams: list[asyncio.Task[None]] = []

    @property
    def count(self) -> int:
        return len(self._token_at)

    async def rate_over(self, window_s: float) -> float:
        start, count = time.perf_counter(), self.count
        await asyncio.sleep(window_s)
        return (self.count - count) / (time.perf_counter() - start)

    async def _stream(self, number: int) -> None:
        for turn in itertools.count():
            prompt = self._bench.prompt(self._sizes.batch_prompt, number + NUM_STREAMS * turn)
            # Of different lengths at first, so that they do not all end together.
            num_tokens = self._sizes.batch_answer + (3 * number if turn == 0 else 0)
            await self._system.read(prompt, num_tokens, QosClass.THROUGHPUT, self._token_at)

    async def __aenter__(self) -> _Load:
        self._streams = [asyncio.create_task(self._stream(number)) for number in range(NUM_STREAMS)]
        while self.count < NUM_STREAMS * self._bench.sizes.skip:
            await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)


def sixteen_emulated(bench: Bench) -> list[Figure]:
    """What sixteen streams get together, of what one gets, where each device has processor enough."""
    sizes = bench.sizes

    def one() -> Run:
        measured = system.ask([bench.prompt(SHORT_PROMPT)], sizes.answer // 2)
        return Run(measured.streams[0].tokens_per_s(sizes.skip), measured.load)

    def many() -> Run:
        prompts = decode_prompts(bench, NUM_STREAMS, SHORT_PROMPT)
        measured = system.ask(prompts, sizes.answer, QosClass.THROUGHPUT)
        return Run(measured.shared_tokens_per_s(sizes.skip), measured.load)

    with _slow_stages(bench, "sixteen-slow") as system:
        pairs = collect(bench.long_plan, one, many)
    note = f"one stream {pairs.typical(lambda pair: pair.baseline):.1f} tok/s; {_busy(pairs)}"
    return [from_pairs("sixteen_emulated", pairs, lambda pair: pair.ratio, note)]


def schedule(bench: Bench) -> list[Figure]:
    """The time of one decision with a full house, three times."""
    raw: list[dict[str, object]] = [{**measure_schedule(), "counts": True} for _ in range(3)]
    median = statistics.median(float(str(row["median_us"])) for row in raw)
    worst = max(float(str(row["p99_us"])) for row in raw)
    return [Figure("schedule", median, len(raw), 0, raw, f"pure core, no device; p99 {worst:.0f} us")]


def _busy(pairs: PairSet) -> str:
    loads: list[Load] = [pair.candidate.load for pair in pairs.pairs]
    return f"at most {max(load.busy_cores for load in loads):.2f} cores busy"
