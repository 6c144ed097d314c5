"""When a link that may be away is asked, and when it is tried again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.breaker import FIRST_WAIT_S, LONGEST_WAIT_S, MAX_TIMEOUTS, Breaker, LinkState


def connected() -> Breaker:
    breaker = Breaker()
    breaker.succeed()
    return breaker


def test_it_begins_connecting_and_may_be_tried_at_once() -> None:
    breaker = Breaker()

    assert breaker.state is LinkState.CONNECTING
    assert breaker.wait_s(1000.0) == 0.0


def test_a_single_late_answer_changes_nothing() -> None:
    breaker = connected()

    assert not breaker.time_out(1.0)
    assert breaker.state is LinkState.OK


def test_timeouts_in_a_row_open_it_once() -> None:
    breaker = connected()

    changes = [breaker.time_out(1.0) for _ in range(MAX_TIMEOUTS + 2)]

    assert changes == [False] * (MAX_TIMEOUTS - 1) + [True, False, False]
    assert breaker.state is LinkState.OPEN


def test_an_answer_between_timeouts_starts_the_count_anew() -> None:
    breaker = connected()
    for _ in range(MAX_TIMEOUTS - 1):
        breaker.time_out(1.0)

    assert not breaker.succeed()
    assert not breaker.time_out(2.0)


def test_a_broken_connection_opens_it_at_once() -> None:
    breaker = connected()

    assert breaker.fail(0.0)
    assert breaker.state is LinkState.OPEN
    assert breaker.wait_s(0.0) == FIRST_WAIT_S


def test_each_trial_that_fails_doubles_the_wait_up_to_the_longest() -> None:
    breaker = connected()
    waits = []
    for _ in range(8):
        breaker.fail(0.0)
        waits.append(breaker.wait_s(0.0))

    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_WAIT_S, LONGEST_WAIT_S]


def test_the_wait_ends_by_time() -> None:
    breaker = connected()
    breaker.fail(10.0)

    assert breaker.wait_s(10.06) == pytest.approx(0.04)
    assert breaker.wait_s(11.0) == 0.0


def test_a_trial_that_succeeds_closes_it_and_the_next_failure_waits_shortly() -> None:
    breaker = connected()
    for _ in range(5):
        breaker.fail(0.0)

    assert breaker.succeed()
    assert breaker.state is LinkState.OK
    breaker.fail(0.0)
    assert breaker.wait_s(0.0) == FIRST_WAIT_S


def test_one_that_was_turned_off_stays_so() -> None:
    breaker = connected()

    assert breaker.turn_off()
    assert not any((breaker.succeed(), breaker.fail(1.0), breaker.time_out(1.0), breaker.turn_off()))
    assert breaker.state is LinkState.OFF


@given(st.lists(st.sampled_from(["succeed", "time_out", "fail", "turn_off"]), max_size=40))
def test_whatever_happens_its_invariants_hold_and_changes_are_told(events: list[str]) -> None:
    breaker = Breaker()
    for now, event in enumerate(events):
        before = breaker.state
        act: dict[str, Callable[[], bool]] = {
            "succeed": breaker.succeed,
            "turn_off": breaker.turn_off,
            "time_out": partial(breaker.time_out, now),
            "fail": partial(breaker.fail, now),
        }
        changed = act[event]()
        assert changed == (breaker.state is not before)
        breaker.check_invariants()
