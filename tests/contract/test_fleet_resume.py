"""Answers whose stream broke off, in whole fleets in one process: through another stream, and by the next orchestrator."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from launch.redis_server import EmbeddedRedis
from shoal.errors import InvalidRequest, RequestCancelled, RequestNotFound, SessionBusy, ShoalError
from shoal.generation import Answer, Delta, Generation
from shoal.redis_link import AsyncRedisLink
from shoal.rpc import error_from_rpc
from shoal.types import FinishReason
from shoal.v1 import inference_pb2, inference_pb2_grpc
from tests.support.fleet import LOOK_S, WAIT_S, LocalFleet, make_device, start_fleet
from tests.support.redis import redis_server, running_redis
from tests.support.shards import TinyModel, make_tokens
from tests.support.streams import SLOW, Reader

__all__ = ["redis_server"]

FAST = make_device()
PROMPT = make_tokens(20, 280, seed=3)
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True, "request_id": "mine"}
# On a slow device not at its end before something has been done to it, however busy the machine is.
LONGER: dict[str, Any] = {**LONG, "max_tokens": 150}
# What came and when is not what is compared.
COURSE = ("ttft_ms", "tokens_per_s", "queue_ms", "num_resumes", "num_recoveries", "cache", "request_id", "pipeline_id")


@pytest.fixture
def store(fleet_model: TinyModel) -> Path:
    return fleet_model.store.root


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@asynccontextmanager
async def fleet_of(store: Path, home: Path, *devices: Any, **options: Any) -> AsyncIterator[LocalFleet]:
    async with start_fleet(store, home, devices or [FAST], **{"drain_s": 0.0, **options}) as fleet:
        yield fleet


class Resumed:
    """A stream of a plain client that goes on with an answer; raises typed errors."""

    def __init__(self, fleet: LocalFleet, num_tokens: int, *, request_id: str = "mine", tenant: str = "") -> None:
        self._channel = grpc.aio.insecure_channel(fleet.address)
        request = inference_pb2.ResumeRequest(request_id=request_id, tenant=tenant, num_tokens=num_tokens)
        self.call = inference_pb2_grpc.InferenceServiceStub(self._channel).Resume(request, timeout=WAIT_S)

    async def responses(self) -> list[inference_pb2.GenerateResponse]:
        try:
            return [message.response async for message in self.call]
        except grpc.RpcError as error:
            raise error_from_rpc(error, "here") from None
        finally:
            await self._channel.close(None)

    async def rest(self) -> tuple[list[Delta], Generation]:
        answer, deltas = _AnswerFrom(), list[Delta]()
        for response in await self.responses():
            delta = answer.add(response)
            if delta is not None:
                deltas.append(delta)
        return deltas, answer.to_generation()

    async def error(self) -> ShoalError:
        with pytest.raises(ShoalError) as raised:
            await self.responses()
        return raised.value


class _AnswerFrom(Answer):
    """An answer of which the first tokens are not there."""

    def _add_delta(self, message: inference_pb2.Delta) -> Delta:
        self._token_ids[:] = range(message.index)
        return super()._add_delta(message)


def same(answer: Generation, expected: Generation) -> bool:
    return facts(answer) == facts(expected)


def facts(answer: Generation) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in answer.__slots__ if name not in COURSE}


async def broken_off(fleet: LocalFleet, num_tokens: int = 3, **options: Any) -> list[Delta]:
    """A request whose client got so many tokens and then lost its connection."""
    client = fleet.another_client()
    deltas: list[Delta] = []
    async for delta in client.stream(PROMPT, **{**LONG, **options}):
        deltas.append(delta)
        if len(deltas) == num_tokens:
            break
    await client.close()
    await fleet.until(lambda status: status.num_running == 0)
    return deltas


async def test_a_client_whose_connection_broke_gets_the_rest(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        expected = await fleet.client.generate(PROMPT, **LONG)
        first = await broken_off(fleet)
        rest, answer = await Resumed(fleet, len(first)).rest()

    assert [delta.index for delta in first + rest] == list(range(40))
    assert "".join(delta.text for delta in first + rest) == expected.text
    assert tuple(token_id for delta in first + rest for token_id in delta.token_ids) == expected.token_ids
    assert (answer.finish_reason, answer.completion_tokens) == (FinishReason.LENGTH, 40)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_logprobs": 2, "temperature": 1.5, "seed": 5}, {"stop": ["e", " t", "zz"]}],
    ids=["greedy", "sampled with logprobs", "stop strings"],
)
async def test_wherever_a_stream_broke_off_text_and_logprobs_go_on_without_a_seam(
    store: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        whole, expected = [], None
        async with fleet.client.stream("hello", **{**LONG, **options}) as stream:
            whole = [delta async for delta in stream]
            expected = stream.result
        for num_known in range(len(whole) + 1):
            rest, answer = await Resumed(fleet, num_known).rest()

            assert rest == whole[num_known:]
            assert (answer.finish_reason, answer.prompt_tokens) == (expected.finish_reason, expected.prompt_tokens)
            assert (answer.completion_tokens, answer.seed) == (len(whole), expected.seed)
            assert answer.pipeline == expected.pipeline


async def test_a_stream_that_is_still_open_gives_way_to_the_one_that_goes_on(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, SLOW) as fleet:
        expected = await fleet.client.generate(PROMPT, **LONGER)
        reader = Reader(fleet.client.stream(PROMPT, **LONGER))
        await reader.has_started()
        rest, _ = await Resumed(fleet, 1).rest()
        error = await reader.error()

    assert isinstance(error, RequestCancelled)
    assert "another stream goes on" in error.message
    assert tuple(token_id for delta in rest for token_id in delta.token_ids) == expected.token_ids[1:]


@pytest.mark.parametrize("is_complete", [True, False])
async def test_of_many_streams_at_once_each_ends_whole_or_told_that_another_goes_on(
    store: Path, tmp_path: Path, is_complete: bool
) -> None:
    async with fleet_of(store, tmp_path, FAST if is_complete else SLOW) as fleet:
        first = Reader(fleet.client.stream(PROMPT, **LONG))
        await first.has_started()
        if is_complete:
            await first.result()

        streams = []
        for _ in range(12):
            streams.append(asyncio.create_task(Resumed(fleet, 0).responses()))
            await asyncio.sleep(0.01)
        async with asyncio.timeout(WAIT_S / 2):
            outcomes = await asyncio.gather(*streams, return_exceptions=True)
        await asyncio.wait({first.task})

    whole = [one for one in outcomes if isinstance(one, list)]
    assert whole
    assert all(one[-1].HasField("finished") for one in whole)
    assert all(isinstance(one, RequestCancelled) for one in outcomes if not isinstance(one, list))


async def test_nobody_resumes_what_is_not_his(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await broken_off(fleet, tenant="gold")

        assert isinstance(await Resumed(fleet, 3).error(), RequestNotFound)
        assert isinstance(await Resumed(fleet, 3, tenant="silver").error(), RequestNotFound)
        assert isinstance(await Resumed(fleet, 3, tenant="gold", request_id="other").error(), RequestNotFound)
        rest, _ = await Resumed(fleet, 3, tenant="gold").rest()
    assert len(rest) == 37


async def test_who_claims_to_know_more_than_there_is_is_told_and_breaks_nothing(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path) as fleet:
        await broken_off(fleet)
        error = await Resumed(fleet, 41).error()
        rest, _ = await Resumed(fleet, 3).rest()

    assert isinstance(error, InvalidRequest)
    assert (error.field, error.message) == ("num_tokens", "num_tokens: 41 is out of range; the answer has 40")
    assert len(rest) == 37


async def restarted(fleet: LocalFleet, reader: Reader) -> Generation:
    """What a client has of an answer during which the orchestrator was ended and started again."""
    await fleet.restart_orchestrator()
    return await reader.result()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "num_logprobs": 1},
        {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"stop": ["zz", "qq"], "logit_bias": {5: 3.0}},
        {"qos_class": "latency"},
        {"kv_reuse": "none"},
    ],
    ids=["greedy", "sampled with a seed of the server", "penalties", "stop strings", "solo", "no kv is kept"],
)
async def test_the_next_orchestrator_goes_on_with_the_same_text(
    store: Path, tmp_path: Path, redis_url: str, options: dict[str, Any]
) -> None:
    async with fleet_of(store, tmp_path, SLOW, SLOW, redis_url=redis_url, split="2,2") as fleet:
        client = fleet.another_client(resume_s=WAIT_S)
        reader = Reader(client.stream(PROMPT, **{**LONGER, **options}))
        await reader.has_started()
        answer = await restarted(fleet, reader)
        expected = await client.generate(PROMPT, **{**LONGER, "seed": answer.seed, **options})
        await client.close()

    assert answer.num_resumes == 1
    assert same(answer, expected)


async def test_several_streams_go_on_and_so_does_one_that_was_waiting(
    store: Path, tmp_path: Path, redis_url: str
) -> None:
    async with fleet_of(store, tmp_path, SLOW, redis_url=redis_url, max_sequences=2) as fleet:
        client = fleet.another_client(resume_s=WAIT_S)
        prompts = [make_tokens(10 + number, 280, seed=number) for number in range(3)]
        streams = [client.stream(prompt, **{**LONGER, "request_id": f"r{at}"}) for at, prompt in enumerate(prompts)]
        readers = [Reader(stream) for stream in streams]
        # Which of them waits is as they came.
        await fleet.until(lambda status: (status.num_running, status.num_waiting) == (2, 1))
        await fleet.restart_orchestrator()
        answers = [await reader.result() for reader in readers]
        expected = [await client.generate(prompt, **LONGER) for prompt in prompts]
        await client.close()

    assert [answer.token_ids for answer in answers] == [one.token_ids for one in expected]
    assert [answer.text for answer in answers] == [one.text for one in expected]


async def test_without_redis_an_answer_ends_with_its_orchestrator(store: Path, tmp_path: Path) -> None:
    async with fleet_of(store, tmp_path, SLOW) as fleet:
        client = fleet.another_client(resume_s=WAIT_S)
        reader = Reader(client.stream(PROMPT, **LONGER))
        await reader.has_started()
        await fleet.restart_orchestrator()
        error = await reader.error()
        await client.close()

    assert error.reason in ("NOT_READY", "CONNECTION_FAILED")


async def test_a_turn_that_another_orchestrator_finished_is_a_turn_of_its_session(
    store: Path, tmp_path: Path, redis_url: str
) -> None:
    async with fleet_of(store, tmp_path, SLOW, redis_url=redis_url) as fleet:
        client = fleet.another_client(resume_s=WAIT_S)
        first = await client.generate(PROMPT, session_id="talk", max_tokens=3, ignore_eos=True)
        reader = Reader(client.stream(PROMPT, session_id="talk", **LONGER))
        await reader.has_started()
        await fleet.restart_orchestrator()
        with pytest.raises(SessionBusy):
            await client.generate(PROMPT, session_id="talk")
        second = await reader.result()
        third = await client.generate(PROMPT, session_id="talk", max_tokens=3)
        (session,) = [one for one in await client.sessions() if one.session_id == "talk"]
        whole = [*PROMPT, *first.token_ids, *PROMPT]
        expected = await client.generate(whole, **LONGER)
        await client.close()

    assert second.token_ids == expected.token_ids
    assert third.prompt_tokens == len(whole) + 150 + len(PROMPT)
    assert session.num_turns == 3


async def test_what_ended_while_its_client_was_away_is_fetched_from_the_next_orchestrator(
    store: Path, tmp_path: Path, redis_url: str
) -> None:
    async with fleet_of(store, tmp_path, redis_url=redis_url) as fleet:
        async with fleet.client.stream(PROMPT, **LONG) as stream:
            whole = [delta async for delta in stream]
        await fleet.restart_orchestrator()
        rest, answer = await Resumed(fleet, 38).rest()

    assert rest == whole[38:]
    assert answer.pipeline == stream.result.pipeline


@pytest.mark.parametrize("trouble", ["killed", "hangs"])
async def test_redis_that_dies_delays_no_answer_and_fails_none(store: Path, tmp_path: Path, trouble: str) -> None:
    with running_redis() as server:
        async with fleet_of(store, tmp_path, redis_url=server.url) as fleet:
            expected = await fleet.client.generate(PROMPT, seed=1, **LONG)
            if trouble == "killed":
                server.kill()
            else:
                server.process.send_signal(signal.SIGSTOP)
            answer = await fleet.client.generate(PROMPT, seed=1, **LONG)
            first = await broken_off(fleet, request_id="again")
            rest, _ = await Resumed(fleet, 3, request_id="again").rest()

    assert same(answer, expected)
    assert tuple(one for delta in first + rest for one in delta.token_ids) == expected.token_ids


async def test_redis_that_comes_back_gets_what_is_needed_to_go_on(store: Path, tmp_path: Path) -> None:
    with running_redis() as server:
        async with fleet_of(store, tmp_path, SLOW, redis_url=server.url) as fleet:
            client = fleet.another_client(resume_s=WAIT_S)
            server.kill()
            reader = Reader(client.stream(PROMPT, **{**LONG, "max_tokens": 200}))
            await reader.has_started()
            server.restart()
            async with asyncio.timeout(WAIT_S):
                while not await has_journal(server.url):
                    await asyncio.sleep(LOOK_S)
            answer = await restarted(fleet, reader)
            await client.close()

    assert (answer.num_resumes, answer.completion_tokens) == (1, 200)


async def has_journal(url: str) -> bool:
    link = AsyncRedisLink(url)
    try:
        assert await link.connect(WAIT_S)
        replies = await link.call(("KEYS", "shoal:request:*"), timeout_s=WAIT_S)
        return bool(replies and replies[0])
    finally:
        await link.close()
