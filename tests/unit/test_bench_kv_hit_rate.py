"""The replay of a trace: what counts as a hit, and that the shipped trace reaches what the benchmark asks for."""

from __future__ import annotations

from loadtest.traces import Trace, TraceEntry
from tests.bench.figures import GOALS
from tests.bench.kv_hit_rate import BLOCK, LeastRecentlyUsed, WorkerMemory, hit_rate, replay
from tests.support.clock import FakeClock

PLENTY = 100 * len(BLOCK)


def trace(*prompts: tuple[int, tuple[int, ...]], tenants: str = "") -> Trace:
    """Prompts of so many tokens with these hash ids, one a second."""
    entries = (
        TraceEntry(1000.0 * number, tokens, 1, ids, tenant=tenants[number : number + 1])
        for number, (tokens, ids) in enumerate(prompts)
    )
    return Trace(tuple(entries), block_tokens=64)


def test_leading_blocks_that_came_before_are_hits() -> None:
    done = replay(trace((192, (0, 1, 2)), (200, (0, 1, 3, 4))), WorkerMemory, PLENTY)
    assert (done.prompt_tokens, done.hit_tokens, done.num_blocks) == (392, 128, 4)


def test_blocks_after_a_missing_one_are_no_hits() -> None:
    assert replay(trace((192, (0, 1, 2)), (192, (9, 1, 2))), WorkerMemory, PLENTY).hit_tokens == 0


def test_the_block_that_would_leave_less_than_two_tokens_is_computed() -> None:
    assert replay(trace((129, (0, 1, 2)), (129, (0, 1, 2))), WorkerMemory, PLENTY).hit_tokens == 64
    assert replay(trace((130, (0, 1, 2)), (130, (0, 1, 2))), WorkerMemory, PLENTY).hit_tokens == 128


def test_a_partial_block_is_not_kept() -> None:
    assert replay(trace((100, (0, 1)), (200, (0, 1, 2, 3))), WorkerMemory, PLENTY).hit_tokens == 64


def test_tenants_do_not_share() -> None:
    prompts = (192, (0, 1, 2)), (192, (0, 1, 2))
    assert replay(trace(*prompts, tenants="ab"), WorkerMemory, PLENTY).hit_tokens == 0
    assert replay(trace(*prompts, tenants="aa"), WorkerMemory, PLENTY).hit_tokens == 128


def test_a_small_memory_loses_the_tail_first() -> None:
    for kind in (WorkerMemory, LeastRecentlyUsed):
        again = replay(trace((320, (0, 1, 2, 3, 4)), (64, (9,)), (320, (0, 1, 2, 3, 4))), kind, 4 * len(BLOCK))
        assert again.hit_tokens == 192, kind


def test_least_recently_used_loses_what_others_pushed_out() -> None:
    cache = LeastRecentlyUsed(2 * len(BLOCK), FakeClock().now)
    first, second, third = (trace((66, (number,))) for number in range(3))
    prompts = [*first.entries, *second.entries, *first.entries, *third.entries, *first.entries, *second.entries]
    done = replay(Trace(tuple(prompts), 64), lambda *_: cache, 0)
    assert done.hit_tokens == 2 * 64


def test_the_shipped_trace_reaches_the_goal_at_a_quarter_of_its_footprint() -> None:
    (figure,) = hit_rate()
    assert figure.value is not None
    assert GOALS["kv_hit_rate"].gate <= figure.value < 1.0
    assert figure.verdict == "aim reached"
    at_all = figure.raw[-1]
    assert (at_all["share"], at_all["of_unbounded"], at_all["lru_of_unbounded"]) == (1.0, 1.0, 1.0)
