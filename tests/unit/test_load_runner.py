"""Runs on a clock that jumps: what is sent when, what is written down, and how a run ends early. Exact times throughout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import meter
from loadtest.answers import Arrival, End, Event
from loadtest.dispatch import Dispatch
from loadtest.meter import MAX_LAGS, Meter
from loadtest.plan import Plan, PlannedRequest, Record
from loadtest.runner import INTERRUPTED, RUN_TIMEOUT, Ending, Outcome, Progress, Watch, run
from shoal.errors import Overloaded
from tests.support.load_runs import SLOS, make_plan, planned
from tests.support.virtual_time import VirtualLoop, run_virtually


@dataclass(slots=True)
class FakeTarget:
    """Answers with tokens at given times after it was asked; refuses some requests; notes when it was asked what."""

    token_after_s: tuple[float, ...] = (0.5, 0.6, 0.7)
    refused: tuple[int, ...] = ()
    tokens_each: int = 1
    end: End = field(default_factory=lambda: End("length"))
    end_after_s: float = 0.0
    asked: list[tuple[float, int]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    most_at_once: int = 0
    _now_at_once: int = 0

    async def describe(self) -> str:
        return "a fake"

    async def close(self) -> None: ...

    async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        self.asked.append((round(asked_at - 1000.0, 6), request.number))
        self._now_at_once += 1
        self.most_at_once = max(self.most_at_once, self._now_at_once)
        try:
            if request.number in self.refused:
                raise Overloaded("no room")
            for after_s in self.token_after_s:
                await asyncio.sleep(asked_at + after_s - loop.time())
                yield Arrival(self.tokens_each)
            await asyncio.sleep(self.end_after_s)
            yield self.end
        except asyncio.CancelledError:
            self.cancelled.append(request.number)
            raise
        finally:
            self._now_at_once -= 1


def run_plan(plan: Plan, target: FakeTarget, **options: Any) -> Outcome:
    return run_virtually(run(plan, target, **options))


def times(*times_s: float) -> tuple[float, ...]:
    return cast(tuple[float, ...], pytest.approx(times_s))


def test_an_open_loop_sends_each_request_when_it_is_due_however_slow_the_others_are() -> None:
    target = FakeTarget(token_after_s=(60.0,))

    run_plan(make_plan(planned(0, 0.25), planned(1, 1.0), planned(2, 1.0), planned(3, 7.125)), target)

    assert target.asked == [(0.25, 0), (1.0, 1), (1.0, 2), (7.125, 3)]


def test_requests_need_not_be_planned_in_the_order_in_which_they_are_due() -> None:
    target = FakeTarget()

    run_plan(make_plan(planned(0, 3.0), planned(1, 1.0)), target)

    assert target.asked == [(1.0, 1), (3.0, 0)]


def test_a_record_has_all_times_after_the_start_of_the_run() -> None:
    outcome = run_plan(make_plan(planned(0, 2.0)), FakeTarget(end=End("length", 9, 3, "p2", 1), end_after_s=0.25))

    (record,) = outcome.result.records
    assert (record.due_s, record.sent_at_s, record.ended_at_s) == times(2.0, 2.0, 2.95)
    assert record.token_at_s == times(2.5, 2.6, 2.7)
    assert (record.finish, record.prompt_tokens, record.completion_tokens) == ("length", 9, 3)
    assert (record.served_by, record.num_preemptions, record.is_ok) == ("p2", 1, True)


def test_a_result_says_what_was_run_against_what() -> None:
    plan = make_plan(planned(0, 2.0))

    outcome = run_plan(plan, FakeTarget(), target_name="a fake", command="shoal load", slos=SLOS)

    result = outcome.result
    assert (result.plan, result.target, result.command, result.slos) == (plan, "a fake", "shoal load", SLOS)
    assert outcome.ending is Ending.COMPLETE
    assert result.duration_s == pytest.approx(2.7)
    assert result.machine


def test_a_request_that_is_sent_late_is_late_from_when_it_was_due() -> None:
    class BlockingTarget(FakeTarget):
        async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
            if request.number == 0:
                cast(VirtualLoop, asyncio.get_running_loop()).block(2.0)
            async for event in super().ask(request):
                yield event

    outcome = run_plan(make_plan(planned(0, 1.0), planned(1, 1.5)), BlockingTarget())

    late = outcome.result.records[1]
    assert (late.due_s, late.sent_at_s, late.token_at_s[0]) == times(1.5, 3.0, 3.5)
    assert max(outcome.result.loop_lag_s) == pytest.approx(2.0, abs=meter.LAG_PERIOD_S)


def test_the_same_plan_and_answers_give_the_same_records() -> None:
    plan = make_plan(*(planned(number, number * 0.13) for number in range(20)))

    assert run_plan(plan, FakeTarget()).result.records == run_plan(plan, FakeTarget()).result.records


def test_a_turn_waits_for_the_answer_before_it() -> None:
    target = FakeTarget()
    plan = make_plan(planned(0, 0.0), planned(1, 0.1, after=0), planned(2, 5.0, after=1), planned(3, 0.2))

    records = run_plan(plan, target).result.records

    assert target.asked == [(0.0, 0), (0.2, 3), (0.7, 1), (5.0, 2)]
    assert [record.due_s for record in records] == pytest.approx([0.0, 0.7, 5.0, 0.2])


def test_a_turn_is_sent_though_the_answer_before_it_failed() -> None:
    outcome = run_plan(make_plan(planned(0, 0.0), planned(1, 0.0, after=0)), FakeTarget(refused=(0,)))

    assert [record.error for record in outcome.result.records] == ["OVERLOADED", ""]


def test_a_closed_loop_keeps_so_many_requests_under_way() -> None:
    target = FakeTarget(token_after_s=(1.0,))

    records = run_plan(make_plan(*map(planned, range(5)), concurrency=2), target).result.records

    assert target.asked == [(0.0, 0), (0.0, 1), (1.0, 2), (1.0, 3), (2.0, 4)]
    assert [record.due_s for record in records] == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0])


def test_in_a_closed_loop_a_turn_that_has_to_wait_lets_others_pass() -> None:
    target = FakeTarget(token_after_s=(1.0,))

    run_plan(make_plan(planned(0), planned(1, after=0), planned(2), planned(3), concurrency=2), target)

    assert target.asked == [(0.0, 0), (0.0, 2), (1.0, 1), (1.0, 3)]


def test_what_waits_for_a_place_counts_from_when_it_was_due() -> None:
    target = FakeTarget(token_after_s=(2.0,))

    records = run_plan(make_plan(planned(0, 0.0), planned(1, 0.5), concurrency=1), target).result.records

    assert target.asked == [(0.0, 0), (2.0, 1)]
    assert records[1].due_s == pytest.approx(0.5)


def test_a_refusal_is_a_record_like_any_other() -> None:
    outcome = run_plan(make_plan(planned(0, 0.0), planned(1, 1.0)), FakeTarget(refused=(0,)))

    refused, answered = outcome.result.records
    assert (refused.error, refused.message, refused.token_at_s) == ("OVERLOADED", "no room", ())
    assert answered.is_ok
    assert outcome.ending is Ending.COMPLETE


def test_several_tokens_of_one_message_share_their_time() -> None:
    target = FakeTarget(token_after_s=(1.0, 2.0), tokens_each=2, end=End("length", 0, 4))

    (record,) = run_plan(make_plan(planned(0, 0.0, max_tokens=4)), target).result.records

    assert record.token_at_s == times(1.0, 1.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("claimed", "max_tokens", "expected"),
    [
        (0, 9, (0.5, 0.6, 0.7)),
        (5, 9, (0.5, 0.5, 0.6, 0.7, 0.7)),
        (2, 9, (0.5, 0.7)),
        (1, 9, (0.5,)),
        (10**9, 4, (0.5, 0.6, 0.6, 0.7)),
        (3, 1, (0.5, 0.6, 0.7)),
    ],
)
def test_the_server_s_count_of_tokens_is_shared_out_over_what_came(
    claimed: int, max_tokens: int, expected: tuple[float, ...]
) -> None:
    target = FakeTarget(end=End("length", 0, claimed))

    (record,) = run_plan(make_plan(planned(0, 0.0, max_tokens=max_tokens)), target).result.records

    assert sorted(record.token_at_s) == list(record.token_at_s)
    assert record.token_at_s == times(*expected)


def test_a_run_that_takes_too_long_ends_with_what_there_is() -> None:
    target = FakeTarget(token_after_s=(1.0, 10.0))

    outcome = run_plan(make_plan(planned(0, 0.0), planned(1, 2.0), planned(2, 9.0)), target, timeout_s=2.5)

    assert outcome.ending is Ending.TIMEOUT
    assert [(record.request.number, record.error) for record in outcome.result.records] == [
        (0, RUN_TIMEOUT),
        (1, RUN_TIMEOUT),
    ]
    assert outcome.result.records[0].token_at_s == times(1.0)
    assert outcome.result.records[0].ended_at_s == pytest.approx(2.5)
    assert sorted(target.cancelled) == [0, 1]


def test_a_run_that_is_told_to_stop_ends_with_what_there_is() -> None:
    target = FakeTarget(token_after_s=(1.0,))

    async def main() -> Outcome:
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(1.5, stopping.set)
        return await run(make_plan(*map(planned, range(9)), concurrency=1), target, stopping=stopping)

    outcome = run_virtually(main())

    assert outcome.ending is Ending.INTERRUPTED
    assert [record.error for record in outcome.result.records] == ["", INTERRUPTED]
    assert target.cancelled == [1]


def test_a_run_may_be_stopped_before_anything_was_sent() -> None:
    async def main() -> Outcome:
        stopping = asyncio.Event()
        stopping.set()
        return await run(make_plan(planned(0, 5.0)), FakeTarget(), stopping=stopping)

    outcome = run_virtually(main())

    assert (outcome.ending, outcome.result.records, outcome.result.duration_s) == (Ending.INTERRUPTED, (), 0.0)


def test_a_plan_of_nothing_is_complete_at_once() -> None:
    assert run_plan(make_plan(), FakeTarget()).ending is Ending.COMPLETE


def test_progress_is_told_on_the_way() -> None:
    told: list[Progress] = []
    target = FakeTarget(token_after_s=tuple(0.1 * step for step in range(1, 101)), refused=(1,))

    run_plan(make_plan(planned(0, 0.0), planned(1, 0.0)), target, watch=Watch(on_progress=told.append))

    first = told[0]
    assert (first.num_planned, first.num_running, first.num_ok, first.num_failed, first.num_tokens) == (2, 1, 0, 1, 2)
    assert (first.elapsed_s, first.tokens_per_s, first.ttft_s) == times(0.25, 8.0, 0.1)
    # Ten a second, but for where a look and a token fall on one moment.
    assert [progress.tokens_per_s for progress in told[8:]] == pytest.approx([10.0] * len(told[8:]), abs=0.51)


def test_every_record_is_told_as_it_is_made() -> None:
    told: list[Record] = []
    outcome = run_plan(
        make_plan(planned(0, 0.0), planned(1, 3.0)), FakeTarget(), timeout_s=3.1, watch=Watch(on_record=told.append)
    )

    assert tuple(told) == outcome.result.records


def test_a_bug_of_a_target_is_not_swallowed() -> None:
    class BrokenTarget(FakeTarget):
        async def ask(self, request: PlannedRequest) -> AsyncGenerator[Event, None]:
            yield Arrival(1)
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        run_plan(make_plan(planned(0, 0.0), planned(1, 9.0)), BrokenTarget())

    assert caught.group_contains(ZeroDivisionError)


# The meter


def test_the_lags_of_a_long_run_stay_bounded_and_keep_the_worst() -> None:
    async def main() -> tuple[float, ...]:
        meter = Meter()
        for _ in range(3 * MAX_LAGS):
            meter.add_lag(0.001)
        meter.add_lag(7.0)
        for _ in range(2 * MAX_LAGS):
            meter.add_lag(0.0)
        meter.stop()
        return meter.lags_s

    lags_s = run_virtually(main())

    assert len(lags_s) < MAX_LAGS
    assert max(lags_s) == 7.0


# Dispatch


def plans() -> st.SearchStrategy[Plan]:
    @st.composite
    def make(draw: Callable[..., Any]) -> Plan:
        count = draw(st.integers(0, 12))
        requests = [
            planned(
                number,
                draw(st.one_of(st.none(), st.integers(0, 9).map(float))),
                after=draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None,
            )
            for number in range(count)
        ]
        return make_plan(*requests, concurrency=draw(st.integers(0, 3)))

    return make()


@given(plan=plans(), data=st.data())
def test_every_request_is_handed_out_once_ripe_and_within_bounds(plan: Plan, data: st.DataObject) -> None:
    dispatch = Dispatch(plan)
    now_s, running, ended = 0.0, set[int](), dict[int, float]()
    handed: set[int] = set()
    while not dispatch.is_done:
        for due in dispatch.take(now_s):
            request = due.request
            assert request.number not in handed
            assert request.after is None or request.after in ended
            assert (
                max(request.due_s or 0.0, ended.get(-1 if request.after is None else request.after, 0.0)) <= due.due_s
            )
            assert due.due_s <= now_s
            handed.add(request.number)
            running.add(request.number)
        dispatch.check_invariants()
        assert not plan.concurrency or len(running) <= plan.concurrency
        at_s = dispatch.next_at_s()
        assert running or at_s is not None, "nothing runs and nothing will come"
        if running and (at_s is None or data.draw(st.booleans())):
            number = data.draw(st.sampled_from(sorted(running)))
            running.remove(number)
            ended[number] = now_s
            dispatch.end(number, now_s)
        else:
            assert at_s is not None
            now_s = max(now_s, at_s) if not (running and at_s <= now_s) else now_s + 1.0

    assert handed == {request.number for request in plan.requests}
    assert dispatch.num_left == 0


@pytest.mark.parametrize(
    "requests",
    [
        (planned(0), planned(0)),
        (planned(0, after=5),),
        (planned(1, after=1),),
        (planned(0, after=1), planned(1)),
    ],
)
def test_a_plan_that_can_never_be_carried_out_is_refused(requests: tuple[PlannedRequest, ...]) -> None:
    with pytest.raises(ValueError, match="request"):
        Dispatch(make_plan(*requests))


def test_ten_thousand_requests_are_dispatched_without_looking_at_all_of_them_each_time() -> None:
    class Counted(float):
        looks = 0

        def __lt__(self, other: float) -> bool:
            Counted.looks += 1
            return float(self) < float(other)

    num = 10_000
    dispatch = Dispatch(make_plan(*(planned(number, Counted(number)) for number in range(num))))
    Counted.looks = 0
    for number in range(num):
        assert [due.request.number for due in dispatch.take(float(number))] == [number]
        dispatch.end(number, float(number))

    assert Counted.looks < num * 50
