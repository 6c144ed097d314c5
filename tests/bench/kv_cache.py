"""What kept KV saves, and what keeping it costs: time to first token and decode, with Redis, without, and with a dead one.

All on fleets of two stages on the default model, beside no other load. Cold runs forbid the use of kept KV for themselves
alone, so that both kinds are measured on the same processes. Called by `run`.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from launch.redis_server import EmbeddedRedis
from shoal.types import KVReuse, KVTierStatus
from tests.bench.context import Bench
from tests.bench.figures import Figure, from_pairs
from tests.bench.fleet import BOX, System
from tests.bench.pairs import MAX_FLEET_BUSY_CORES, PairSet, Run, collect

KEEPER = replace(BOX, name="keeper", host_kv_bytes=1024 * 2**20)
REDIS_BYTES = 1024 * 2**20
PREFIX_TOKENS = 1024
# The prefix is what can be kept of it: whole blocks.
PROMPT_TOKENS = PREFIX_TOKENS + 8
REPEATS = 3
# Enough for writes, and for connections that come back, to show in the status.
SETTLE_S, MAX_SETTLES = 1.5, 16
# Answers while blocks of the prompt before them are being written.
ANSWER_TOKENS = 96
ASKED_OF_DEAD = 4
# A killed server is started again a second or two later.
REVIVAL_S, MAX_REVIVALS = 0.05, 600
REDIS = "redis"


def held(bench: Bench) -> list[Figure]:
    """The first token after a prefix that workers hold in memory."""
    prompt = bench.prompt(PROMPT_TOKENS)
    with _keepers(bench, "kv-held") as system:
        system.ask([prompt], 1)
        _settle(system)
        pairs = _collect(bench, _cold(system, prompt), lambda: _first_tokens(system, [prompt] * REPEATS))
    return [from_pairs("kv_held", pairs, lambda pair: pair.ratio, _first_token_note(pairs))]


def restarted(bench: Bench) -> list[Figure]:
    """The same after all processes but Valkey were started anew; each prefix is asked for once."""
    prompts = [bench.prompt(PROMPT_TOKENS, number) for number in range(bench.plan.tries)]
    with _valkey(bench, "kv-restarted") as redis:
        with _keepers(bench, "kv-restarted", redis.url) as system:
            for prompt in prompts:
                system.ask([prompt], 1)
                _settle(system)
        with _keepers(bench, "kv-restarted", redis.url) as system:
            _count_as_ours(system, redis)
            fresh = iter(prompts)
            # What has never computed anything knows no speeds, and what was never connected asks nobody.
            system.ask([bench.prompt(PROMPT_TOKENS, len(prompts))], 1, kv_reuse=KVReuse.NONE)
            _connect(system)
            pairs = _collect(bench, _cold(system, prompts[0]), lambda: _first_tokens(system, [next(fresh)]))
    return [from_pairs("kv_restarted", pairs, lambda pair: pair.ratio, _first_token_note(pairs))]


def write_behind(bench: Bench) -> list[Figure]:
    """Decode right after a prompt whose blocks are still being copied and written, against one that keeps none."""
    numbers = itertools.count()
    with _valkey(bench, "kv-written") as redis, _keepers(bench, "kv-written", redis.url) as system:
        _count_as_ours(system, redis)
        _connect(system)

        def baseline() -> Run:
            _settle(system)
            return _decode(system, bench.prompt(PROMPT_TOKENS, next(numbers)), kv_reuse=KVReuse.NONE)

        def candidate() -> Run:
            before = _writes(system)
            run = _decode(system, bench.prompt(PROMPT_TOKENS, next(numbers)))
            _settle(system)
            return replace(run, details={"written": _writes(system) - before, **run.details})

        pairs = _collect(bench, baseline, candidate)
    written = pairs.typical(lambda pair: pair.candidate.details["written"])
    note = (
        f"{ANSWER_TOKENS} tokens after a new prompt of {PROMPT_TOKENS}; the stages wrote {written:.0f} blocks to "
        f"Valkey; without {pairs.typical(lambda pair: pair.baseline):.1f} tok/s"
    )
    return [from_pairs("kv_write_behind", pairs, lambda pair: pair.ratio, note)]


def dead_redis(bench: Bench) -> list[Figure]:
    """New prompts right after Redis stopped answering, and right after it was killed, against a fleet without a cache."""
    figures = []
    with (
        bench.two_stages("kv-none") as plain,
        _valkey(bench, "kv-dead") as redis,
        _keepers(bench, "kv-dead", redis.url) as system,
    ):
        for one in (plain, system):
            one.meter.add(plain.process_ids + system.process_ids)
            one.ask([bench.prompt(bench.sizes.prompt)], 1)
        numbers = itertools.count(1)
        for name, end, revive in (("kv_hung", _stop, _go_on), ("kv_killed", _kill, _start_again)):
            pairs = _compare_dead(bench, plain, system, redis, numbers, end, revive)
            worst = max(pair.candidate.details["worst_s"] / pair.baseline for pair in pairs.pairs)
            note = (
                f"mean of {ASKED_OF_DEAD} new prompts of {bench.sizes.prompt} tokens each time, the first of them at once; "
                f"worst single one of all {worst:.2f}; without a cache {pairs.typical(lambda pair: pair.baseline):.3f} s"
            )
            figures.append(from_pairs(name, pairs, lambda pair: pair.ratio, note))
    return figures


def _compare_dead(
    bench: Bench,
    plain: System,
    system: System,
    redis: EmbeddedRedis,
    numbers: Iterator[int],
    end: Callable[[EmbeddedRedis], None],
    revive: Callable[[EmbeddedRedis], None],
) -> PairSet:
    def prompts() -> list[list[int]]:
        return [bench.prompt(bench.sizes.prompt, next(numbers)) for _ in range(ASKED_OF_DEAD)]

    def candidate() -> Run:
        _connect(system)
        end(redis)
        try:
            return _first_tokens(system, prompts(), mean=statistics.mean)
        finally:
            revive(redis)

    return _collect(bench, lambda: _first_tokens(plain, prompts(), mean=statistics.mean), candidate)


def _collect(bench: Bench, baseline: Callable[[], Run], candidate: Callable[[], Run]) -> PairSet:
    return collect(bench.plan, baseline, candidate, max_busy_cores=MAX_FLEET_BUSY_CORES)


def _cold(system: System, prompt: Sequence[int]) -> Callable[[], Run]:
    return lambda: _first_tokens(system, [prompt], kv_reuse=KVReuse.NONE)


def _first_tokens(
    system: System,
    prompts: Sequence[Sequence[int]],
    mean: Callable[[list[float]], float] = statistics.median,
    **options: Any,
) -> Run:
    """Ask one after the other; the mean time to the first token, and the least that came out of caches."""
    system.meter.start()
    streams = [system.ask([prompt], 1, **options).streams[0] for prompt in prompts]
    load = system.meter.stop()
    times_s = [stream.ttft_s for stream in streams]
    details = {
        "worst_s": max(times_s),
        "cached_tokens": float(min(stream.cached_tokens for stream in streams)),
        "from_redis_tokens": float(min(stream.from_redis_tokens for stream in streams)),
    }
    return Run(mean(times_s), load, details)


def _first_token_note(pairs: PairSet) -> str:
    cached, from_redis = (
        pairs.typical(lambda pair, name=name: pair.candidate.details[name])  # type: ignore[misc]
        for name in ("cached_tokens", "from_redis_tokens")
    )
    cold_s, kept_ms = pairs.typical(lambda pair: pair.baseline), pairs.typical(lambda pair: 1e3 * pair.candidate.value)
    return (
        f"cold {cold_s:.2f} s, kept {kept_ms:.0f} ms; {cached:.0f} tokens reused, {from_redis:.0f} of them from Redis"
    )


def _decode(system: System, prompt: Sequence[int], **options: Any) -> Run:
    measured = system.ask([prompt], ANSWER_TOKENS, **options)
    return Run(measured.streams[0].tokens_per_s(1), measured.load)


@contextmanager
def _valkey(bench: Bench, name: str) -> Iterator[EmbeddedRedis]:
    redis = EmbeddedRedis(bench.home(name) / "redis", REDIS_BYTES)
    redis.start()
    try:
        yield redis
    finally:
        redis.stop()


def _keepers(bench: Bench, name: str, redis_url: str = "") -> AbstractContextManager[System]:
    return bench.two_stages(name, profiles=[KEEPER] * 2, redis_url=redis_url)


def _count_as_ours(system: System, redis: EmbeddedRedis) -> None:
    assert redis.pid is not None
    system.meter.add([redis.pid])


def _tiers(system: System, tier: str) -> list[KVTierStatus]:
    return [one for device in system.status().devices for one in device.telemetry.kv_tiers if one.tier == tier]


def _writes(system: System) -> float:
    return float(sum(one.puts for one in _tiers(system, REDIS)))


def _settle(system: System) -> None:
    """Wait until nothing is being kept any more, or for half a minute."""
    seen: list[tuple[int, int, int]] = []
    for _ in range(MAX_SETTLES):
        system.wait(SETTLE_S)
        tiers = [one for device in system.status().devices for one in device.telemetry.kv_tiers]
        now = [(one.num_blocks, one.puts, one.dropped_writes) for one in tiers]
        if now == seen:
            return
        seen = now


def _connect(system: System) -> None:
    """Wait until all workers ask Redis again, or for half a minute: what is measured then shows that they do not."""
    for _ in range(MAX_SETTLES):
        states = {one.state for one in _tiers(system, REDIS)}
        if states == {"ok"}:
            return
        system.wait(SETTLE_S)


def _stop(redis: EmbeddedRedis) -> None:
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)


def _go_on(redis: EmbeddedRedis) -> None:
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGCONT)


def _kill(redis: EmbeddedRedis) -> None:
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGKILL)


def _start_again(redis: EmbeddedRedis) -> None:
    for _ in range(MAX_REVIVALS):
        if redis.revive():
            return
        time.sleep(REVIVAL_S)
