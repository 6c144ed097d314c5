"""Both clients where a stream breaks off: what they ask for, what their readers get, and when they give up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from shoal import AsyncClient, Client
from shoal.errors import ConnectionFailed, DeadlineExceeded, NotReady, ProtocolMismatch, RequestCancelled, WorkerLost
from shoal.generation import Delta
from shoal.types import FinishReason
from shoal.v1 import inference_pb2
from tests.support.fake_server import ENDLESS, HANG, FakeServer, Script, accepted, delta, finished
from tests.support.server_thread import WAIT_S
from tests.unit.conftest import Serve

BROKEN: Script = (accepted(), delta(0, "Hel", [10]), NotReady("going down"))
REST: Script = (accepted(), delta(1, "lo", [11]), finished(num_recoveries=2, has_changed_kernels=True))
ASKED = inference_pb2.ResumeRequest(request_id="r-1", num_tokens=1)


def breaking(serve: Serve, *rest: Script, first: Script = BROKEN) -> FakeServer:
    server = serve(first)
    server.orchestrator.resume_scripts.extend(rest)
    return server


@contextmanager
def ending_server() -> Iterator[tuple[FakeServer, Callable[[], None]]]:
    """A server in the midst of an answer, and what ends it."""
    server = FakeServer(ENDLESS)
    with ExitStack() as running:
        running.enter_context(server)
        yield server, running.close


def pieces(deltas: list[Delta]) -> list[tuple[int, str]]:
    return [(one.index, one.text) for one in deltas]


def test_an_answer_goes_on_where_its_stream_broke_off(serve: Serve) -> None:
    server = breaking(serve, REST)
    with Client(server.address) as client, client.stream("hi") as stream:
        assert pieces(list(stream)) == [(0, "Hel"), (1, "lo")]

    assert (stream.result.text, stream.result.finish_reason) == ("Hello", FinishReason.STOP)
    assert (stream.result.num_resumes, stream.result.num_recoveries, stream.result.has_changed_kernels) == (1, 2, True)
    assert server.orchestrator.resumes == [ASKED]


async def test_an_answer_goes_on_where_its_async_stream_broke_off(serve: Serve) -> None:
    server = breaking(serve, REST)
    async with AsyncClient(server.address) as client, client.stream("hi") as stream:
        assert pieces([one async for one in stream]) == [(0, "Hel"), (1, "lo")]

    assert (stream.result.text, stream.result.num_resumes) == ("Hello", 1)
    assert server.orchestrator.resumes == [ASKED]


def test_it_goes_on_as_often_as_it_breaks_off(serve: Serve) -> None:
    middle: Script = (accepted(), delta(1, "l", [11]), NotReady("again"))
    server = breaking(serve, (NotReady("not yet"),), middle, (accepted(), delta(2, "o", [12]), finished()))
    with Client(server.address) as client:
        answer = client.generate("hi", tenant="gold")

    assert (answer.text, answer.num_resumes) == ("Hello", 2)
    assert [(one.tenant, one.num_tokens) for one in server.orchestrator.resumes] == [
        ("gold", 1),
        ("gold", 1),
        ("gold", 2),
    ]


def test_a_stream_without_an_end_is_gone_on_with(serve: Serve) -> None:
    server = breaking(serve, REST, first=(accepted(), delta(0, "Hel", [10])))
    with Client(server.address) as client:
        assert client.generate("hi").text == "Hello"


def test_an_answer_of_which_only_the_end_was_missing_is_complete(serve: Serve) -> None:
    server = breaking(serve, (accepted(), finished()))
    with Client(server.address) as client:
        assert client.generate("hi").text == "Hel"


def test_an_orchestrator_that_is_killed_and_started_again_goes_on() -> None:
    with ending_server() as (server, end), Client(server.address) as client:
        deltas = iter(client.stream("hi"))
        taken = [next(deltas)]
        end()
        with FakeServer(port=int(server.address.rpartition(":")[2])) as again:
            again.orchestrator.resume_scripts.append(REST)
            taken.extend(deltas)

    assert pieces(taken) == [(0, "Hel"), (1, "lo")]
    assert again.orchestrator.resumes == [ASKED]


@pytest.mark.parametrize(
    "rest",
    [(accepted(), delta(0, "Hel", [10]), finished()), (accepted(), delta(2, "o", [12]), finished())],
    ids=["one again", "one left out"],
)
def test_a_token_that_is_not_the_next_is_noticed(serve: Serve, rest: Script) -> None:
    with Client(breaking(serve, rest).address) as client, pytest.raises(ProtocolMismatch):
        client.generate("hi")


def test_where_nothing_can_be_resumed_the_error_is_what_broke_it(serve: Serve) -> None:
    server = breaking(serve)
    with Client(server.address) as client, pytest.raises(NotReady, match="going down"):
        client.generate("hi")

    assert len(server.orchestrator.resumes) == 1


async def test_where_nothing_can_be_resumed_the_error_of_the_async_client_is_what_broke_it(serve: Serve) -> None:
    async with AsyncClient(breaking(serve).address) as client:
        with pytest.raises(NotReady, match="going down"):
            await client.generate("hi")


def test_an_error_that_ended_the_answer_is_not_taken_for_a_break(serve: Serve) -> None:
    server = breaking(serve, REST, first=(accepted(), delta(0, "Hel", [10]), WorkerLost("gone")))
    with Client(server.address) as client, pytest.raises(WorkerLost):
        client.generate("hi")

    assert server.orchestrator.resumes == []


def test_what_was_not_accepted_is_not_resumed(serve: Serve) -> None:
    server = breaking(serve, REST, first=(NotReady("no pipeline"),))
    with Client(server.address) as client, pytest.raises(NotReady, match="no pipeline"):
        client.generate("hi")

    assert server.orchestrator.resumes == []


def test_a_client_that_does_not_want_it_resumes_nothing(serve: Serve) -> None:
    server = breaking(serve, REST)
    with Client(server.address, resume_s=0.0) as client, pytest.raises(NotReady):
        client.generate("hi")

    assert server.orchestrator.resumes == []


def test_an_orchestrator_that_stays_away_ends_the_attempts() -> None:
    with ending_server() as (server, end), Client(server.address, resume_s=0.2) as client:
        deltas = iter(client.stream("hi"))
        next(deltas)
        end()
        with pytest.raises(ConnectionFailed):
            next(deltas)


def test_the_deadline_of_an_answer_is_that_of_its_rest(serve: Serve) -> None:
    server = breaking(serve, (accepted(), HANG))
    with Client(server.address) as client, pytest.raises(DeadlineExceeded):
        client.generate("hi", deadline_s=0.5)

    asked, rest = server.orchestrator.deadlines_s
    assert asked is not None
    assert rest is not None
    assert rest <= asked


def test_cancelling_while_nobody_answers_ends_the_loop_quietly() -> None:
    with ending_server() as (server, end), Client(server.address, resume_s=1000.0) as client:
        stream = client.stream("hi")
        deltas = iter(stream)
        next(deltas)
        end()
        reading = threading.Thread(target=lambda: rest.extend(deltas))
        rest: list[Delta] = []
        reading.start()
        stream.cancel()
        reading.join(WAIT_S)

        assert not reading.is_alive()
    assert (rest, stream.result.text, stream.result.finish_reason) == ([], "Hel", FinishReason.CANCELLED)


async def test_cancelling_an_async_stream_while_nobody_answers_ends_the_loop_quietly(serve: Serve) -> None:
    server = breaking(serve, *[(NotReady("not yet"),)] * 1000)
    async with AsyncClient(server.address, resume_s=1000.0) as client:
        stream = client.stream("hi")
        deltas = aiter(stream)
        assert (await anext(deltas)).text == "Hel"
        reading = asyncio.create_task(anext(deltas, None))
        async with asyncio.timeout(WAIT_S):
            while not server.orchestrator.resumes:
                await asyncio.sleep(0.001)
        stream.cancel()

        assert await asyncio.wait_for(reading, WAIT_S) is None


async def test_a_stream_that_another_one_took_over_is_not_taken_back(serve: Serve) -> None:
    taken: Any = RequestCancelled("another stream goes on with this answer")
    server = breaking(serve, REST, first=(accepted(), delta(0, "Hel", [10]), taken))
    async with AsyncClient(server.address) as client:
        with pytest.raises(RequestCancelled):
            await client.generate("hi")

    assert server.orchestrator.resumes == []
