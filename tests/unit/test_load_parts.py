"""An open-loop plan among several harnesses: nothing is asked twice or by nobody, and the report is that of one run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from loadtest.answers import Arrival, End, Event
from loadtest.parts import Part, merge, run_part, shifted, split, together
from loadtest.plan import PlannedRequest
from loadtest.runner import INTERRUPTED, Ending, Outcome, Progress
from shoal.errors import ConfigError
from tests.support.load_runs import SLOS, make_plan, make_record, make_result, planned


class QuickTarget:
    """Answers at once."""

    async def describe(self) -> str:
        return "quick"

    async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        yield Arrival(request.max_tokens)
        yield End("length", completion_tokens=request.max_tokens)

    async def close(self) -> None: ...


class SlowTarget(QuickTarget):
    """Answers with a first token, and then no more."""

    async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        yield Arrival(1)
        await asyncio.sleep(60.0)


def do(part: Part, start_at_s: float) -> Outcome:
    return asyncio.run(run_part(part, start_at_s, lambda _: None, asyncio.Event()))


def numbers(requests: tuple[PlannedRequest, ...]) -> list[int]:
    return [request.number for request in requests]


def test_parts_are_the_whole_plan_in_turn() -> None:
    plan = make_plan(*(planned(number, due_s=number / 10) for number in range(7)))

    parts = split(plan, 3)

    assert [numbers(part.requests) for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]


def test_the_turns_of_a_conversation_stay_together() -> None:
    plan = make_plan(planned(0, 0.0), planned(1, 0.1), planned(2, 0.2, after=1), planned(3, 0.3, after=2))

    assert [numbers(part.requests) for part in split(plan, 2)] == [[0], [1, 2, 3]]


def test_there_are_no_more_parts_than_there_is_to_ask() -> None:
    assert len(split(make_plan(planned(0, 0.0)), 4)) == 1


def test_a_closed_loop_is_not_shared_out() -> None:
    with pytest.raises(ConfigError, match="times of their own"):
        split(make_plan(planned(0), concurrency=1), 2)


def test_what_parts_saw_is_one_run_of_the_plan() -> None:
    plan = make_plan(*(planned(number, due_s=0.0) for number in range(5)))
    start_at = time.time()

    outcomes = [do(Part(part, QuickTarget, SLOS), start_at) for part in split(plan, 2)]
    merged = merge(plan, outcomes, "shoal load server --ray 2")

    assert numbers(tuple(record.request for record in merged.result.records)) == [0, 1, 2, 3, 4]
    assert merged.ending is Ending.COMPLETE
    assert (merged.result.plan, merged.result.slos, merged.result.target) == (plan, SLOS, "quick")
    assert merged.result.machine.startswith("2 harnesses on ")
    assert merged.result.duration_s == max(record.ended_at_s for record in merged.result.records)


def test_a_harness_waits_until_all_are_to_begin() -> None:
    start_at = time.time() + 0.2

    do(Part(make_plan(planned(0, due_s=0.0)), QuickTarget), start_at)

    assert time.time() >= start_at


def test_the_busiest_harness_says_whether_harnesses_kept_up() -> None:
    result = make_result(make_record(0))
    outcomes = [Outcome(replace(result, cpu_share=share), Ending.COMPLETE) for share in (0.2, 0.9)]

    assert merge(result.plan, outcomes).result.cpu_share == 0.9


def test_a_run_of_which_one_part_was_cut_off_was_cut_off() -> None:
    result = make_result(make_record(0))
    outcomes = [Outcome(result, Ending.COMPLETE), Outcome(result, Ending.TIMEOUT)]

    assert merge(result.plan, outcomes).ending is Ending.TIMEOUT


def test_a_run_of_which_one_part_was_lost_is_known_in_part_whatever_else_ended_it() -> None:
    result = make_result(make_record(0))

    assert merge(result.plan, [Outcome(result, Ending.INTERRUPTED)], num_lost=1).ending is Ending.LOST


def test_a_harness_measures_from_the_time_at_which_all_were_to_begin() -> None:
    plan = make_plan(planned(0, due_s=0.0))

    outcome = do(Part(plan, QuickTarget), time.time() - 5.0)

    (record,) = outcome.result.records
    assert record.due_s == 0.0
    assert record.sent_at_s >= 5.0


def test_a_harness_that_begins_late_reports_the_waiting() -> None:
    result = make_result(make_record(0, due_s=1.0, ttft_s=0.2))

    (record,) = shifted(result, 0.5).records

    assert record.due_s == 1.0
    assert record.token_at_s[0] - record.due_s == pytest.approx(0.7)
    assert record.sent_at_s == pytest.approx(1.501)


def test_a_turn_that_waited_for_the_one_before_does_not_wait_twice() -> None:
    record = make_record(1, due_s=2.0, request=planned(1, 1.0, after=0))
    result = make_result(replace(record))

    (late,) = shifted(result, 0.5).records

    assert late.token_at_s[0] - late.due_s == pytest.approx(record.token_at_s[0] - record.due_s)


async def test_a_part_that_is_stopped_gives_what_there_is() -> None:
    stopping, seen = asyncio.Event(), list[Progress]()

    def show(progress: Progress) -> None:
        seen.append(progress)
        stopping.set()

    outcome = await run_part(Part(make_plan(planned(0, due_s=0.0)), SlowTarget), time.time(), show, stopping)

    (record,) = outcome.result.records
    assert outcome.ending is Ending.INTERRUPTED
    assert (record.error, record.completion_tokens) == (INTERRUPTED, 1)
    assert (seen[0].num_running, seen[0].num_tokens) == (1, 1)


def test_how_far_several_harnesses_are_is_shown_as_one() -> None:
    one = Progress(2.0, 4, num_running=1, num_ok=2, num_failed=1, num_tokens=30, tokens_per_s=10.0, ttft_s=0.25)
    other = Progress(3.0, 3, num_running=2, num_ok=1, num_failed=0, num_tokens=12, tokens_per_s=5.0, ttft_s=0.5)
    silent = Progress(0.0, 3, num_running=0, num_ok=0, num_failed=0, num_tokens=0, tokens_per_s=0.0, ttft_s=None)

    assert together([one, other, silent], 10) == Progress(3.0, 10, 3, 3, 1, 42, 15.0, 0.375)
    assert together([], 10) == Progress(0.0, 10, 0, 0, 0, 0, 0.0, None)
