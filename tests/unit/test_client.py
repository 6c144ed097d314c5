"""Both clients against a scripted orchestrator: what they send, what they make of the answers, and how they stop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from shoal import AsyncClient, Client
from shoal.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidRequest,
    NotReady,
    ProtocolMismatch,
    RequestCancelled,
)
from shoal.generation import Generation, StageSummary
from shoal.types import FinishReason, LayerRange, QosClass
from shoal.v1 import inference_pb2, types_pb2
from tests.support.fake_server import ENDLESS, accepted, delta, finished
from tests.support.server_thread import WAIT_S
from tests.unit.conftest import Serve

HELLO_GENERATION = Generation(
    text="Hello",
    token_ids=(10, 11),
    finish_reason=FinishReason.STOP,
    prompt_tokens=3,
    completion_tokens=2,
    ttft_ms=12.5,
    tokens_per_s=40.0,
    pipeline=(StageSummary("phone-1", "phone", LayerRange(0, 30)),),
    request_id="r-1",
    model="tiny",
    seed=7,
)


def sent(serve: Serve, *args: Any, **options: Any) -> inference_pb2.GenerateRequest:
    server = serve()
    with Client(server.address) as client:
        client.generate(*args, **options)
    return server.orchestrator.requests[0]


def test_generate_returns_the_whole_answer(serve: Serve) -> None:
    with Client(serve().address) as client:
        assert client.generate("hi") == HELLO_GENERATION


async def test_async_generate_returns_the_whole_answer(serve: Serve) -> None:
    async with AsyncClient(serve().address) as client:
        assert await client.generate("hi") == HELLO_GENERATION


def test_a_stream_yields_deltas_and_then_has_the_answer(serve: Serve) -> None:
    with Client(serve().address) as client, client.stream("hi") as stream:
        assert [(delta.index, delta.token_ids, delta.text) for delta in stream] == [(0, (10,), "Hel"), (1, (11,), "lo")]
        assert stream.result == HELLO_GENERATION


async def test_an_async_stream_yields_deltas_and_then_has_the_answer(serve: Serve) -> None:
    async with AsyncClient(serve().address) as client, client.stream("hi") as stream:
        assert [delta.text async for delta in stream] == ["Hel", "lo"]
        assert stream.result == HELLO_GENERATION


def test_the_result_of_a_stream_that_was_not_read_is_refused(serve: Serve) -> None:
    with Client(serve().address) as client, client.stream("hi") as stream, pytest.raises(RuntimeError):
        _ = stream.result


def test_all_options_arrive(serve: Serve) -> None:
    request = sent(
        serve,
        "Once",
        model="tiny",
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={4: -2.0},
        seed=2**63,
        stop=["a", "b"],
        ignore_eos=True,
        num_logprobs=2,
        qos_class="latency",
        request_id="mine",
        tenant="gold",
        max_tokens_per_s=12.5,
        ttft_target_ms=250.0,
        inter_token_target_ms=40.0,
    )

    assert request == inference_pb2.GenerateRequest(
        model="tiny",
        prompt="Once",
        max_tokens=5,
        stop=["a", "b"],
        ignore_eos=True,
        request_id="mine",
        tenant="gold",
        max_tokens_per_s=12.5,
        ttft_target_ms=250.0,
        inter_token_target_ms=40.0,
        qos_class=types_pb2.QOS_CLASS_LATENCY,
        sampling=types_pb2.SamplingParams(
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            logit_bias={4: -2.0},
            seed=2**63,
            num_logprobs=2,
        ),
    )


def test_what_is_not_asked_for_is_absent_and_left_to_the_server(serve: Serve) -> None:
    assert sent(serve, "Once") == inference_pb2.GenerateRequest(prompt="Once")


def test_a_prompt_of_token_ids_goes_out_as_tokens(serve: Serve) -> None:
    assert list(sent(serve, [1, 2, 3]).tokens.token_ids) == [1, 2, 3]


def test_an_empty_prompt_is_sent_for_the_server_to_refuse(serve: Serve) -> None:
    assert sent(serve, "").WhichOneof("input") == "prompt"
    assert sent(serve, []).WhichOneof("input") == "tokens"
    assert sent(serve, messages=[]).WhichOneof("input") == "chat"


def test_one_stop_string_is_not_taken_for_a_list_of_letters(serve: Serve) -> None:
    assert list(sent(serve, "Once", stop="END").stop) == ["END"]


def test_a_qos_class_may_be_given_as_enum(serve: Serve) -> None:
    assert sent(serve, "Once", qos_class=QosClass.THROUGHPUT).qos_class == types_pb2.QOS_CLASS_THROUGHPUT


def test_chat_sends_the_messages(serve: Serve) -> None:
    server = serve()
    with Client(server.address) as client:
        client.chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])

    messages = server.orchestrator.requests[0].chat.messages
    assert [(message.role, message.content) for message in messages] == [("system", "Be brief."), ("user", "Hi")]


async def test_async_chat_sends_the_messages(serve: Serve) -> None:
    server = serve()
    async with AsyncClient(server.address) as client:
        await client.chat([{"role": "user", "content": "Hi"}])

    assert server.orchestrator.requests[0].chat.messages[0].content == "Hi"


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((5,), {}),
        ((), {}),
        (("hi",), {"messages": []}),
        ((), {"messages": ["hi"]}),
        ((), {"messages": [{"role": "user"}]}),
        (("hi",), {"temperature": "hot"}),
        (("hi",), {"max_tokens": 1.5}),
        (("hi",), {"seed": True}),
        (("hi",), {"stop": [5]}),
        (("hi",), {"model": None}),
        (("hi",), {"logit_bias": {"a": 1.0}}),
        (("hi",), {"temprature": 1.0}),
    ],
)
def test_a_wrong_python_type_is_a_type_error(args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError):
        client.generate(*args, **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"logit_bias": {-1: 0.0}}, "sampling.logit_bias"),
        ({"qos_class": "fastest"}, "qos_class"),
        ({"stop": "\ud800"}, "stop"),
    ],
)
def test_a_value_that_no_message_can_carry_is_an_invalid_request(options: dict[str, Any], field: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.generate("hi", **options)

    assert caught.value.field == field


def test_logprobs_come_with_their_tokens(serve: Serve) -> None:
    top = [types_pb2.TokenLogprob(token_id=10, logprob=-0.5), types_pb2.TokenLogprob(token_id=3, logprob=-1.0)]
    logprobs = [types_pb2.TokenLogprobs(logprob=-0.5, top=top)]
    script = (accepted(), delta(0, "x", [10], logprobs=logprobs), finished())
    with Client(serve(script).address) as client:
        (entry,) = client.generate("hi").logprobs

    assert (entry.token_id, entry.logprob, entry.top) == (10, -0.5, ((10, -0.5), (3, -1.0)))


def test_an_error_of_the_server_is_raised_as_it_was_there(serve: Serve) -> None:
    with (
        Client(serve([InvalidRequest("sampling.top_p", "2")]).address) as client,
        pytest.raises(InvalidRequest) as caught,
    ):
        client.generate("hi")

    assert caught.value.field == "sampling.top_p"


async def test_an_error_of_the_server_is_raised_by_the_async_client(serve: Serve) -> None:
    async with AsyncClient(serve(status=NotReady("no workers yet")).address) as client:
        with pytest.raises(NotReady, match="no workers yet"):
            await client.status()


def test_an_error_in_mid_answer_leaves_the_text_so_far(serve: Serve) -> None:
    script = (accepted(), delta(0, "Hel", [10]), NotReady("going down"))
    with Client(serve(script).address) as client, client.stream("hi") as stream:
        with pytest.raises(NotReady):
            list(stream)
        assert stream.text == "Hel"


def test_a_missing_token_is_noticed(serve: Serve) -> None:
    script = (accepted(), delta(0, "Hel", [10]), delta(2, "o", [12]), finished())
    with Client(serve(script).address) as client, pytest.raises(ProtocolMismatch):
        client.generate("hi")


def test_an_answer_without_an_end_is_noticed(serve: Serve) -> None:
    with Client(serve([accepted(), delta(0, "Hel", [10])]).address) as client, pytest.raises(RequestCancelled):
        client.generate("hi")


def test_nobody_listening_says_where_and_what_to_do() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1: .*shoal up"):
        client.status()


async def test_nobody_listening_says_where_and_what_to_do_in_asyncio() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1: .*shoal up"):
            await client.generate("hi")


def test_an_answer_that_takes_too_long_is_a_deadline_exceeded(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client(server.address, timeout_s=0.2) as client, pytest.raises(DeadlineExceeded):
        client.generate("hi")

    assert server.orchestrator.is_released.wait(WAIT_S)


def test_leaving_the_loop_ends_the_call_on_the_server(serve: Serve) -> None:
    server = serve(ENDLESS)
    with Client(server.address) as client:
        stream = client.stream("hi")
        for _ in stream:
            break

        assert server.orchestrator.is_released.wait(WAIT_S)
        assert (stream.result.text, stream.result.finish_reason) == ("Hel", FinishReason.CANCELLED)


async def test_leaving_the_async_loop_ends_the_call_on_the_server(serve: Serve) -> None:
    server = serve(ENDLESS)
    async with AsyncClient(server.address) as client:
        async with client.stream("hi") as stream:
            async for _ in stream:
                break
        assert await asyncio.to_thread(server.orchestrator.is_released.wait, WAIT_S)
        assert (stream.result.text, stream.result.finish_reason) == ("Hel", FinishReason.CANCELLED)


def test_closing_the_client_ends_its_streams_quietly(serve: Serve) -> None:
    server = serve(ENDLESS)
    client = Client(server.address)
    stream = client.stream("hi")
    texts = []
    for event in stream:
        texts.append(event.text)
        client.close()

    assert texts == ["Hel"]
    assert server.orchestrator.is_released.wait(WAIT_S)


async def test_cancelling_from_another_task_ends_the_iteration_quietly(serve: Serve) -> None:
    has_begun = asyncio.Event()
    texts: list[str] = []
    async with AsyncClient(serve(ENDLESS).address) as client:
        stream = client.stream("hi")

        async def read() -> None:
            async for event in stream:
                texts.append(event.text)
                has_begun.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        stream.cancel()
        await reading

    assert texts == ["Hel"]


async def test_cancelling_the_task_that_reads_cancels_the_call_and_the_task(serve: Serve) -> None:
    server = serve(ENDLESS)
    async with AsyncClient(server.address) as client:
        generating = asyncio.create_task(client.generate("hi"))
        assert await asyncio.to_thread(server.orchestrator.is_hanging.wait, WAIT_S)
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating

        assert await asyncio.to_thread(server.orchestrator.is_released.wait, WAIT_S)


def test_a_deadline_of_a_request_goes_before_the_one_of_the_client(serve: Serve) -> None:
    server = serve()
    with Client(server.address, timeout_s=1000.0) as client:
        client.generate("hi", deadline_s=30.0)
        client.generate("hi")

    first, second = server.orchestrator.deadlines_s
    assert first is not None
    assert second is not None
    # Time limits travel rounded up.
    assert first <= 31.0 < 900.0 < second <= 1100.0


async def test_a_deadline_of_a_request_goes_before_the_one_of_the_async_client(serve: Serve) -> None:
    server = serve()
    async with AsyncClient(server.address) as client:
        await client.generate("hi", deadline_s=30.0)
        await client.generate("hi")

    first, second = server.orchestrator.deadlines_s
    assert first is not None
    assert first <= 31.0
    assert second is None


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_deadline_that_is_no_time_is_an_invalid_request(deadline_s: float) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as raised:
        client.stream("hi", deadline_s=deadline_s)

    assert raised.value.field == "deadline_s"


@pytest.mark.parametrize(
    "program",
    [
        "from shoal import Client; c = Client({address!r}); s = iter(c.stream('hi')); print(next(s).text)",
        "from shoal import Client\nwith Client({address!r}) as c:\n for d in c.stream('hi'): print(d.text); break",
        "import asyncio\nfrom shoal import AsyncClient\nasync def f():\n async with AsyncClient({address!r}) as c:\n"
        "  async for d in c.stream('hi'): print(d.text); break\nasyncio.run(f())",
    ],
    ids=["not closed", "closed", "asyncio"],
)
def test_a_program_that_stops_in_mid_answer_ends_without_noise(serve: Serve, program: str) -> None:
    command = [sys.executable, "-c", program.format(address=serve(ENDLESS).address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "Hel\n", "")


def test_importing_the_package_alone_is_cheap() -> None:
    command = [sys.executable, "-c", "import shoal, sys; print('grpc' in sys.modules)"]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


async def test_a_flood_of_calls_is_taken_and_not_cut_off(serve: Serve) -> None:
    """How many are too many is for the scheduler to say, with a hint when to come again."""
    async with AsyncClient(serve().address) as client:
        await client.list_models()
        answers = await asyncio.gather(*(client.generate("hi") for _ in range(1500)))

    assert {answer.text for answer in answers} == {"Hello"}
