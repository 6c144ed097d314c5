"""What targets make of what servers say: one suite for both kinds, then what each has of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from loadtest.answers import Arrival, End, Event
from loadtest.plan import PlannedRequest
from loadtest.targets import OpenAiTarget, ShoalTarget, Target, without_credentials
from shoal.errors import ConfigError, ModelNotFound, Overloaded, ShoalError
from shoal.types import QosClass
from shoal.v1 import types_pb2
from tests.support import fake_server, openai_server
from tests.support.fake_server import HELLO, FakeServer, accepted, delta, finished
from tests.support.load_runs import planned
from tests.support.openai_server import BREAK, DONE, ROLE, OpenAiServer, Plain, event, finish, token, usage

WAIT_S = 20.0
HEL = (accepted(), delta(0, "Hel", [10]))
# What happens, as each of the two servers does it.
SITUATIONS: dict[str, tuple[fake_server.Script, openai_server.Script]] = {
    "answers": (HELLO, openai_server.HELLO),
    "hangs": ((*HEL, fake_server.HANG), (token("Hel"), openai_server.HANG)),
    "ends early": (HEL, (token("Hel"),)),
    "is full": (
        (Overloaded("no room", retry_after_s=2.0),),
        openai_server.error(429, (("retry-after", "2"),), message="no room"),
    ),
    "lacks the model": ((ModelNotFound("no room"),), openai_server.error(404, message="no room")),
    "fails in mid answer": (
        (*HEL, Overloaded("no room")),
        (token("Hel"), event({"error": {"message": "no room", "code": 429}})),
    ),
}
Serve = Callable[[str], Any]


@pytest.fixture(params=["shoal", "openai"])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Serve a situation; yields a target, and the server's events `is_hanging` and `is_released`."""

    @asynccontextmanager
    async def serve_shoal(situation: str) -> AsyncIterator[tuple[Target, Any]]:
        with FakeServer(SITUATIONS[situation][0]) as server:
            target = ShoalTarget(server.address)
            yield target, server.orchestrator
            await target.close()

    @asynccontextmanager
    async def serve_openai(situation: str) -> AsyncIterator[tuple[Target, Any]]:
        with OpenAiServer(SITUATIONS[situation][1]) as server:
            target = OpenAiTarget(server.base_url, model="tiny")
            yield target, server
            await target.close()

    return serve_shoal if request.param == "shoal" else serve_openai


async def ask(target: Target, request: PlannedRequest | None = None) -> list[Event]:
    async with asyncio.timeout(WAIT_S), aclosing(target.ask(request or planned())) as events:
        return [event async for event in events]


async def fault(target: Target) -> tuple[list[Event], ShoalError]:
    """What came before the error, and the error."""
    seen: list[Event] = []
    try:
        async with asyncio.timeout(WAIT_S), aclosing(target.ask(planned())) as events:
            async for one in events:
                seen.append(one)  # noqa: PERF401 - kept also when an error comes
    except ShoalError as error:
        return seen, error
    raise AssertionError(f"no error, but {seen}")


async def test_an_answer_is_its_arrivals_and_an_end_with_the_counts(serve: Serve) -> None:
    async with serve("answers") as (target, _):
        *arrivals, end = await ask(target)

    assert arrivals == [Arrival(1), Arrival(1)]
    assert isinstance(end, End)
    assert (end.prompt_tokens, end.completion_tokens) == (3, 2)
    assert end.finish in ("stop", "length")


async def test_a_target_answers_again_and_again(serve: Serve) -> None:
    async with serve("answers") as (target, _):
        assert await ask(target) == await ask(target)


async def test_who_stops_listening_ends_the_call_on_the_server(serve: Serve) -> None:
    async with serve("hangs") as (target, server):
        async with aclosing(target.ask(planned())) as events:
            assert await anext(events) == Arrival(1)
            assert await asyncio.to_thread(server.is_hanging.wait, WAIT_S)

        assert await asyncio.to_thread(server.is_released.wait, WAIT_S)


async def test_a_cancelled_listener_ends_the_call_too(serve: Serve) -> None:
    async with serve("hangs") as (target, server):
        task = asyncio.create_task(ask(target))
        assert await asyncio.to_thread(server.is_hanging.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert await asyncio.to_thread(server.is_released.wait, WAIT_S)


async def test_an_answer_that_ends_without_saying_why_is_an_error(serve: Serve) -> None:
    async with serve("ends early") as (target, _):
        seen, error = await fault(target)

    assert (seen, error.reason) == ([Arrival(1)], "CANCELLED")


async def test_a_full_server_is_overloaded_and_says_when_to_come_back(serve: Serve) -> None:
    async with serve("is full") as (target, _):
        seen, error = await fault(target)

    assert (seen, error.reason, error.retry_after_s) == ([], "OVERLOADED", 2.0)
    assert "no room" in error.message


async def test_a_model_that_is_not_there_is_told_as_such(serve: Serve) -> None:
    async with serve("lacks the model") as (target, _):
        assert (await fault(target))[1].reason == "MODEL_NOT_FOUND"


async def test_an_error_in_mid_answer_comes_after_what_had_come(serve: Serve) -> None:
    async with serve("fails in mid answer") as (target, _):
        seen, error = await fault(target)

    assert (seen, error.reason) == ([Arrival(1)], "OVERLOADED")


@pytest.mark.parametrize(
    "target", [lambda: ShoalTarget("127.0.0.1:1"), lambda: OpenAiTarget("http://127.0.0.1:1", model="tiny")]
)
async def test_where_nobody_listens_the_connection_fails(target: Callable[[], Target]) -> None:
    made = target()

    seen, error = await fault(made)
    with pytest.raises(ShoalError, match=r"nobody answers at .*127\.0\.0\.1:1"):
        await OpenAiTarget("http://127.0.0.1:1").describe() if isinstance(made, OpenAiTarget) else await made.describe()

    assert (seen, error.reason) == ([], "CONNECTION_FAILED")
    await made.close()


# Shoal


async def test_shoal_is_asked_for_just_what_was_planned() -> None:
    request = planned(max_tokens=9, qos=QosClass.LATENCY, tenant="gold", max_tokens_per_s=4.0)
    with FakeServer() as server:
        target = ShoalTarget(server.address, model="tiny")
        await ask(target, request)
        await target.close()

    sent = server.orchestrator.requests[0]
    assert [(message.role, message.content) for message in sent.chat.messages] == [("user", "once upon a time")]
    assert (sent.model, sent.max_tokens, sent.ignore_eos) == ("tiny", 9, True)
    assert (sent.qos_class, sent.tenant, sent.max_tokens_per_s) == (types_pb2.QOS_CLASS_LATENCY, "gold", 4.0)


async def test_shoal_continues_a_prompt_as_it_is_where_no_chat_is_wanted() -> None:
    with FakeServer() as server:
        target = ShoalTarget(server.address, is_chat=False)
        await ask(target)
        await target.close()

    assert server.orchestrator.requests[0].prompt == "once upon a time"


async def test_shoal_says_how_many_tokens_came_and_who_served() -> None:
    script = (accepted(), delta(0, "", [5, 6, 7]), finished(completion_tokens=3, pipeline_id="p2", num_preemptions=1))
    with FakeServer(script) as server:
        target = ShoalTarget(server.address)
        events = await ask(target)
        described = await target.describe()
        await target.close()

    assert events == [Arrival(3), End("stop", 3, 3, "p2", 1)]
    assert described == f"tiny at {server.address} (Shoal)"


async def test_an_orchestrator_that_goes_away_in_mid_answer_is_a_lost_connection() -> None:
    with ExitStack() as running:
        server = running.enter_context(FakeServer(SITUATIONS["hangs"][0]))
        target = ShoalTarget(server.address, resume_s=0.0)
        task = asyncio.create_task(fault(target))
        await asyncio.to_thread(server.orchestrator.is_hanging.wait, WAIT_S)
        await asyncio.to_thread(running.close)
        seen, error = await task
        await target.close()

    assert (seen, error.reason) == ([Arrival(1)], "CONNECTION_FAILED")


# OpenAI


async def ask_openai(script: openai_server.Script, request: PlannedRequest | None = None) -> list[Event]:
    with OpenAiServer(script) as server:
        target = OpenAiTarget(server.base_url, model="tiny")
        try:
            return await ask(target, request)
        finally:
            await target.close()


async def fault_openai(script: openai_server.Script) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        await ask_openai(script)
    return caught.value


async def test_a_server_of_openai_s_kind_is_asked_to_stream_a_chat_of_the_planned_length() -> None:
    with OpenAiServer() as server:
        target = OpenAiTarget(server.base_url, model="tiny", api_key="secret")
        await ask(target, planned(max_tokens=9, tenant="gold"))
        await target.close()

    (asked,) = server.requests
    assert (asked.path, asked.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert asked.headers["accept-encoding"] == "identity"
    assert asked.body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "once upon a time"}],
        "user": "gold",
        "max_tokens": 9,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_prompt_without_a_chat_goes_to_completions() -> None:
    with OpenAiServer((event({"choices": [{"text": "Hel", "finish_reason": "length"}]}), DONE)) as server:
        target = OpenAiTarget(server.base_url, model="tiny", is_chat=False)
        events = await ask(target)
        await target.close()

    assert (server.requests[0].path, server.requests[0].body["prompt"]) == ("/v1/completions", "once upon a time")
    assert events == [Arrival(1), End("length", 0, 1)]


async def test_the_first_model_that_a_server_lists_is_taken() -> None:
    with OpenAiServer() as server:
        target = OpenAiTarget(server.base_url.replace("http://", "http://me:secret@"))
        described = await target.describe()
        await ask(target)
        await target.close()

    assert described == f"tiny at {server.base_url} (OpenAI)"
    assert server.requests[0].body["model"] == "tiny"


@pytest.mark.parametrize("body", [b"{}", b'{"data": []}', b"[]", b"<html>"])
async def test_a_server_that_lists_no_models_needs_one_named(body: bytes) -> None:
    with OpenAiServer(models=Plain(body=body)) as server:
        target = OpenAiTarget(server.base_url)
        with pytest.raises(ShoalError, match="name one with --model"):
            await target.describe()
        await target.close()


async def test_one_connection_serves_request_after_request() -> None:
    with OpenAiServer() as server:
        target = OpenAiTarget(server.base_url, model="tiny")
        for _ in range(3):
            await ask(target)
        await target.close()

    assert (len(server.requests), server.num_connections) == (3, 1)


async def test_comments_and_blank_lines_and_unknown_fields_are_passed_over() -> None:
    script = (b": hello\n\n\n\nid: 1\nevent: message\nretry: 5\n", token("Hel"), b":\n", finish(), b"\n\n", DONE)

    assert await ask_openai(script) == [Arrival(1), End("length", 0, 1)]


async def test_an_event_may_come_in_pieces_that_cut_a_character() -> None:
    whole = token("für") + finish("stop") + DONE
    at = whole.index("ü".encode() if "ü".encode() in whole else b"\\u00fc") + 1

    assert await ask_openai((whole[:at], whole[at:])) == [Arrival(1), End("stop", 0, 1)]


async def test_what_follows_done_is_not_part_of_the_answer() -> None:
    assert await ask_openai((token("Hel"), finish(), DONE, token("lo"))) == [Arrival(1), End("length", 0, 1)]


async def test_a_server_may_leave_out_done() -> None:
    assert await ask_openai((token("Hel"), finish())) == [Arrival(1), End("length", 0, 1)]


async def test_a_chunk_without_text_is_no_token_and_the_server_s_count_holds() -> None:
    events = await ask_openai((ROLE, token(""), token("Hel"), finish(), usage(7, 4), DONE))

    assert events == [Arrival(1), End("length", 7, 4)]


async def test_thinking_aloud_counts_as_tokens() -> None:
    thought = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})

    assert await ask_openai((thought, token("Hel"), finish(), DONE)) == [Arrival(1), Arrival(1), End("length", 0, 2)]


async def test_a_broken_connection_is_told_as_such() -> None:
    error = await fault_openai((token("Hel"), BREAK))

    assert error.reason == "CONNECTION_FAILED"
    assert "broke" in error.message


@pytest.mark.parametrize(
    "data",
    [
        b"no json", b"[1]", b'{"choices": 3}', b'{"usage": {"prompt_tokens": "many"}}', b"1",
        pytest.param(b"[" * 100_000, id="deep"), b'{"usage": {"prompt_tokens": Infinity}}',
    ],
)  # fmt: skip
async def test_a_chunk_that_is_none_is_a_protocol_mismatch(data: bytes) -> None:
    assert (await fault_openai((event(data),))).reason == "PROTOCOL_MISMATCH"


async def test_a_server_that_does_not_stream_is_told_as_such() -> None:
    error = await fault_openai(Plain(body=b'{"choices": [{"message": {"content": "Hello"}}]}'))

    assert error.reason == "PROTOCOL_MISMATCH"
    assert "does not stream" in error.message


@pytest.mark.parametrize(
    ("status", "fields", "reason"),
    [
        (400, {"message": "no", "param": "max_tokens"}, "INVALID_REQUEST"),
        (400, {"message": "no", "code": "context_length_exceeded"}, "CONTEXT_EXCEEDED"),
        (401, {"message": "no"}, "INVALID_REQUEST"),
        (404, {"message": "no"}, "MODEL_NOT_FOUND"),
        (413, {"message": "no"}, "INVALID_REQUEST"),
        (429, {}, "OVERLOADED"),
        (503, {"message": "no"}, "NOT_READY"),
        (503, {"message": "no", "type": "overloaded_error"}, "OVERLOADED"),
        (504, {"message": "no"}, "DEADLINE_EXCEEDED"),
        (500, {"message": "no"}, "INTERNAL"),
        (302, {"message": "no"}, "PROTOCOL_MISMATCH"),
    ],
)
async def test_a_status_has_a_reason(status: int, fields: dict[str, Any], reason: str) -> None:
    error = await fault_openai(openai_server.error(status, **fields))

    assert error.reason == reason
    assert f"says {status}: {fields.get('message', 'no message')}" in error.message


@pytest.mark.parametrize("body", [b"upstream\n  is gone", b'"upstream is gone"', b'{"detail": "upstream is gone"}'])
async def test_an_error_may_have_any_shape(body: bytes) -> None:
    error = await fault_openai(Plain(500, body))

    assert error.message.endswith("says 500: upstream is gone")


async def test_an_error_that_is_nested_too_deeply_is_one_all_the_same() -> None:
    assert (await fault_openai(Plain(500, b"[" * 100_000))).reason == "INTERNAL"


@pytest.mark.parametrize(
    "body", [b"", b'{"detail": "Not Found"}', b"404 page not found", b"{}"], ids=["none", "detail", "text", "empty"]
)
async def test_a_path_that_is_not_there_is_told_from_a_model_that_is_not(body: bytes) -> None:
    error = await fault_openai(Plain(404, body))

    assert error.reason == "INVALID_REQUEST"
    assert "there is no such path; does the URL end as it should, usually in /v1?" in error.message


async def test_a_time_to_come_back_may_be_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)

    error = await fault_openai(openai_server.error(429, (("retry-after", soon),)))

    assert 0 < error.retry_after_s <= 3600


async def test_a_time_to_come_back_that_nobody_can_read_is_none() -> None:
    assert (await fault_openai(openai_server.error(429, (("retry-after", "soon"),)))).retry_after_s == 0.0


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", "http://[x", "/v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        OpenAiTarget(url)


async def test_a_path_is_kept_and_a_missing_one_is_the_usual() -> None:
    with OpenAiServer() as server:
        root = server.base_url.removesuffix("/v1")
        for url in (f"{root}/", f"{root}/api/v3/"):
            target = OpenAiTarget(url, model="tiny")
            await ask(target)
            await target.close()

    assert [asked.path for asked in server.requests] == ["/v1/chat/completions", "/api/v3/chat/completions"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@host:8000/v1?key=1", "http://host:8000/v1"),
        ("https://host/a@b", "https://host/a@b"),
        ("me:secret@host", "host"),
    ],
)
def test_no_credentials_are_shown(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
