"""When a stream that broke is gone on with, and which error its reader gets where it is not."""

from __future__ import annotations

import pytest

from shoal.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotReady,
    ProtocolMismatch,
    RequestCancelled,
    RequestNotFound,
    ShoalError,
    WorkerLost,
)
from shoal.resumption import FIRST_WAIT_S, LONGEST_WAIT_S, Resumption

BROKEN = ConnectionFailed("the connection broke")


def refused(resumption: Resumption, error: ShoalError, now: float = 0.0) -> ShoalError:
    with pytest.raises(ShoalError) as raised:
        resumption.on_error(error, now)
    return raised.value


@pytest.mark.parametrize("error", [BROKEN, NotReady("it shuts down")])
def test_a_stream_that_broke_is_gone_on_with(error: ShoalError) -> None:
    assert Resumption(10.0).on_error(error, 0.0) == FIRST_WAIT_S


@pytest.mark.parametrize("kind", [WorkerLost, DeadlineExceeded, RequestCancelled, InternalError])
def test_an_answer_that_ended_with_an_error_is_not_gone_on_with(kind: type[ShoalError]) -> None:
    error = kind("it is over")

    assert refused(Resumption(10.0), error) is error


def test_a_stream_without_an_end_is_gone_on_with_whatever_is_said_of_it() -> None:
    assert Resumption(10.0).on_error(RequestCancelled("no end"), 0.0, is_break=True) == FIRST_WAIT_S


def test_attempts_become_rarer_and_end_when_time_is_up() -> None:
    resumption, now = Resumption(3.0), 100.0
    waits: list[float] = []
    given_up: ShoalError | None = None
    while given_up is None:
        try:
            waits.append(resumption.on_error(ConnectionFailed("nobody answers") if waits else BROKEN, now))
            now += waits[-1]
        except ShoalError as error:
            given_up = error

    assert given_up is BROKEN
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (FIRST_WAIT_S, LONGEST_WAIT_S)
    assert 103.0 - LONGEST_WAIT_S < now <= 103.0


def test_none_is_made_where_none_is_wanted() -> None:
    assert refused(Resumption(0.0), BROKEN) is BROKEN


@pytest.mark.parametrize("kind", [RequestNotFound, ProtocolMismatch, InternalError])
def test_where_nothing_can_be_resumed_the_reader_gets_what_broke_the_stream(kind: type[ShoalError]) -> None:
    resumption = Resumption(10.0)
    resumption.on_error(BROKEN, 0.0)

    assert refused(resumption, kind("no")) is BROKEN


@pytest.mark.parametrize("error", [WorkerLost("gone"), DeadlineExceeded("late"), InvalidRequest("num_tokens", "9")])
def test_an_error_that_ended_the_answer_meanwhile_reaches_the_reader(error: ShoalError) -> None:
    resumption = Resumption(10.0)
    resumption.on_error(BROKEN, 0.0)

    assert refused(resumption, error) is error


def test_a_stream_that_went_on_has_all_the_time_again() -> None:
    resumption = Resumption(1.0)
    for now in (0.0, 50.0, 100.0):
        assert resumption.on_error(BROKEN, now) == FIRST_WAIT_S
        resumption.on_response()
        resumption.on_response()

    assert resumption.num_resumes == 3


def test_a_stream_that_never_broke_was_never_resumed() -> None:
    resumption = Resumption(1.0)
    resumption.on_response()

    assert resumption.num_resumes == 0
