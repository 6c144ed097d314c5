"""Answers of whole fleets in one process: the same bits whichever way the layers are cut and the frames go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from orchestrator.core.batch import Batch
from orchestrator.pipeline import Pipeline
from orchestrator.tokenizer import Tokenizer
from shoal.generation import Generation
from shoal.types import FinishReason, LayerRange, LinkProfile
from tests.support.fleet import LocalFleet, make_device, start_fleet
from tests.support.shards import TinyModel, make_tokens
from tests.support.tiny_gguf import EOS_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Hot enough that a random model does not repeat itself.
DRAWN: dict[str, Any] = {"temperature": 8.0, "seed": 11, "ignore_eos": True}
LONG_PROMPT = make_tokens(150, 280, seed=4)
QUESTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "hello world", "max_tokens": 18, "num_logprobs": 5},
    "drawn": {"prompt": "hello world", "max_tokens": 34, "num_logprobs": 2, **DRAWN},
    "a long prompt": {"prompt": LONG_PROMPT, "max_tokens": 8, "num_logprobs": 3, **DRAWN},
    "one token": {"prompt": [7], "max_tokens": 6, "num_logprobs": 3, **DRAWN},
    "penalised": {
        "prompt": "the the the",
        "max_tokens": 10,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "num_logprobs": 1,
        **DRAWN,
    },
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "num_logprobs": 1, **DRAWN},
    "solo": {"prompt": "hello world", "max_tokens": 18, "qos_class": "latency", "num_logprobs": 5, **DRAWN},
    "solo greedy": {"prompt": LONG_PROMPT, "max_tokens": 8, "qos_class": "latency", "num_logprobs": 5},
}
# How frames get from stage to stage, the number of devices, and the options of the fleet.
DIRECT, HIDDEN = make_device(), make_device(allow_direct_links=False)
SLOW_LINK = LinkProfile(delay_ms=1.0, rate_mbit_s=500.0)
FAR = make_device(link=SLOW_LINK, is_emulated=True)
FAR_HIDDEN = make_device(link=SLOW_LINK, is_emulated=True, allow_direct_links=False)
FLEETS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "ring": ("socket", [DIRECT] * 2, {}),
    "ring of three": ("socket", [DIRECT] * 3, {"split": "2,1,1"}),
    "hub": ("relay", [HIDDEN] * 2, {}),
    "hub of three": ("relay", [HIDDEN] * 3, {"split": "2,1,1"}),
    "hub for one hidden": ("relay", [HIDDEN, DIRECT], {}),
    "grpc": ("grpc", [DIRECT] * 2, {"use_sockets": False}),
    "grpc hub": ("relay", [HIDDEN] * 2, {"use_sockets": False}),
    "split 1,3": ("socket", [DIRECT] * 2, {"split": "1,3"}),
    "split 3,1": ("socket", [DIRECT] * 2, {"split": "3,1"}),
    "split 1,1,1,1": ("socket", [DIRECT] * 4, {"split": "1,1,1,1"}),
    "no bursts": ("socket", [DIRECT] * 2, {"burst_steps": 1}),
    "slow links": ("socket", [FAR] * 2, {}),
    "slow hub": ("relay", [FAR_HIDDEN] * 2, {}),
    "slow grpc": ("grpc", [FAR] * 2, {"use_sockets": False}),
    "small chunks": ("socket", [DIRECT] * 2, {"chunk_tokens": 17}),
}


async def ask(fleet: LocalFleet, question: dict[str, Any]) -> Generation:
    return await fleet.client.generate(**question)


def content(answer: Generation) -> tuple[object, ...]:
    """All that must not depend on the fleet."""
    return answer.token_ids, answer.logprobs, answer.text, answer.finish_reason, answer.prompt_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(fleet_model: TinyModel, home: Path) -> AsyncIterator[LocalFleet]:
    async with start_fleet(fleet_model.store.root, home, [DIRECT]) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ring(fleet_model: TinyModel, home: Path) -> AsyncIterator[LocalFleet]:
    async with start_fleet(fleet_model.store.root, home, [DIRECT] * 2) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(one: LocalFleet) -> dict[str, tuple[object, ...]]:
    return {name: content(await ask(one, question)) for name, question in QUESTIONS.items()}


@pytest.mark.parametrize("kind", FLEETS)
async def test_every_fleet_gives_the_answers_of_one_device_bit_for_bit(
    fleet_model: TinyModel, home: Path, expected: dict[str, tuple[object, ...]], kind: str
) -> None:
    link, devices, options = FLEETS[kind]
    async with start_fleet(fleet_model.store.root, home, devices, **options) as fleet:
        answers = {name: content(await ask(fleet, question)) for name, question in QUESTIONS.items()}
        status = await fleet.client.status()

    assert answers == expected
    assert {device.link_to_next for device in status.devices} == {link}


async def test_the_questions_have_different_answers_of_their_full_length(
    expected: dict[str, tuple[object, ...]],
) -> None:
    assert len({answer[0] for answer in expected.values()}) == len(QUESTIONS)
    assert all(answer[3] is FinishReason.LENGTH for answer in expected.values())


async def test_an_answer_says_who_computed_which_layers(ring: LocalFleet) -> None:
    answer = await ring.client.generate("hello", max_tokens=2)

    assert [(stage.worker_id, stage.device) for stage in answer.pipeline] == [("w0", "box"), ("w1", "box")]
    assert answer.pipeline[0].layers.start == 0
    assert answer.pipeline[1].layers == LayerRange(answer.pipeline[0].layers.stop, 4)


async def test_a_stream_is_the_same_alone_and_among_others_that_come_and_go(ring: LocalFleet) -> None:
    question = {"prompt": "hello world", "max_tokens": 60, "num_logprobs": 3, **DRAWN}
    alone = content(await ask(ring, question))
    others: list[asyncio.Task[Generation]] = []

    def start_other(seed: int, num_prompt: int) -> None:
        prompt = make_tokens(num_prompt, 280, seed=seed)
        options = {**DRAWN, "seed": seed, "max_tokens": 5 + seed}
        others.append(asyncio.create_task(ring.client.generate(prompt, **options)))

    start_other(1, 90)
    async with ring.client.stream(**question) as stream:
        async for delta in stream:
            if delta.index % 7 == 0:
                start_other(delta.index, 3 + delta.index)
    async with asyncio.timeout(30):
        await asyncio.gather(*others)

    assert content(stream.result) == alone
    assert len(others) > 4


async def test_streams_at_the_same_time_are_each_the_same_as_alone(ring: LocalFleet) -> None:
    questions = [
        {
            "prompt": make_tokens(5 + 9 * seed, 280, seed=seed),
            "max_tokens": 20,
            "num_logprobs": 2,
            **DRAWN,
            "seed": seed,
        }
        for seed in range(8)
    ]
    alone = [content(await ask(ring, question)) for question in questions]

    together = await asyncio.gather(*(ask(ring, question) for question in questions))

    assert [content(answer) for answer in together] == alone


async def test_solo_streams_among_others_are_the_same_as_alone(ring: LocalFleet) -> None:
    solo = content(await ask(ring, QUESTIONS["solo"]))

    first, second, _ = await asyncio.gather(
        ask(ring, QUESTIONS["solo"]), ask(ring, QUESTIONS["solo"]), ask(ring, QUESTIONS["drawn"])
    )

    assert content(first) == content(second) == solo


@pytest.mark.parametrize(("qos_class", "is_solo"), [("latency", True), ("balanced", False), ("throughput", False)])
async def test_only_latency_requests_decode_alone(
    ring: LocalFleet, monkeypatch: pytest.MonkeyPatch, qos_class: Any, is_solo: bool
) -> None:
    forward, batches = Pipeline.forward, []

    def note(pipeline: Pipeline, batch: Batch, find: Any) -> None:
        batches.append(batch)
        forward(pipeline, batch, find)

    monkeypatch.setattr(Pipeline, "forward", note)
    await ring.client.generate("hello", max_tokens=4, qos_class=qos_class)

    assert {batch.is_solo for batch in batches if batch.num_decode_rows} == {is_solo}


async def test_text_is_the_same_streamed_and_whole_wherever_the_answer_ends(
    ring: LocalFleet, fleet_model: TinyModel
) -> None:
    tokenizer = Tokenizer(fleet_model.manifest.tokenizer)
    whole = await ring.client.generate("hello", max_tokens=30, **DRAWN)
    for max_tokens in range(1, 31):
        async with ring.client.stream("hello", max_tokens=max_tokens, **DRAWN) as stream:
            pieces = [delta.text async for delta in stream]
        token_ids = whole.token_ids[:max_tokens]

        assert stream.result.token_ids == token_ids
        assert "".join(pieces) == stream.result.text == decoded(tokenizer, token_ids)
        assert stream.result.finish_reason is FinishReason.LENGTH


def decoded(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")


async def test_deltas_are_numbered_from_nought_without_gaps(ring: LocalFleet) -> None:
    async with ring.client.stream("hello", max_tokens=20, **DRAWN) as stream:
        deltas = [delta async for delta in stream]

    assert [delta.index for delta in deltas] == list(range(20))


async def test_an_answer_ends_before_its_stop_string(ring: LocalFleet) -> None:
    whole = await ring.client.generate("hello", max_tokens=40, **DRAWN)
    stop = whole.text[10:13]

    answer = await ring.client.generate("hello", max_tokens=40, stop=[stop, "never found"], **DRAWN)

    assert answer.text == whole.text[: whole.text.index(stop)]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.completion_tokens < 40


async def test_an_end_of_turn_token_ends_an_answer_and_is_not_text(ring: LocalFleet) -> None:
    answer = await ring.client.generate("hello", max_tokens=9, logit_bias={EOS_ID: 100.0})

    assert (answer.token_ids, answer.text, answer.finish_reason) == ((EOS_ID,), "", FinishReason.STOP)


async def test_end_of_turn_tokens_can_be_passed_over(ring: LocalFleet) -> None:
    answer = await ring.client.generate("hello", max_tokens=9, logit_bias={EOS_ID: 100.0}, ignore_eos=True)

    assert (answer.completion_tokens, answer.finish_reason) == (9, FinishReason.LENGTH)


async def test_a_seed_reproduces_an_answer_and_another_gives_another(ring: LocalFleet) -> None:
    first, again, other = [
        await ring.client.generate("hello", max_tokens=20, temperature=8.0, seed=seed) for seed in (5, 5, 6)
    ]

    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_the_seed_that_was_drawn_is_told_and_reproduces_the_answer(ring: LocalFleet) -> None:
    first = await ring.client.generate("hello", max_tokens=20, temperature=8.0)
    again = await ring.client.generate("hello", max_tokens=20, temperature=8.0, seed=first.seed)
    other = await ring.client.generate("hello", max_tokens=20, temperature=8.0)

    assert first.token_ids == again.token_ids
    assert first.seed != other.seed


async def test_a_full_context_ends_an_answer_as_too_long(ring: LocalFleet) -> None:
    answer = await ring.client.generate(make_tokens(250, 280), max_tokens=100, ignore_eos=True)

    assert (answer.completion_tokens, answer.finish_reason) == (6, FinishReason.LENGTH)


async def test_logprobs_are_there_only_if_asked_for(ring: LocalFleet) -> None:
    without = await ring.client.generate("hello", max_tokens=3)
    bare = await ring.client.generate("hello", max_tokens=3, num_logprobs=0)
    full = await ring.client.generate("hello", max_tokens=3, num_logprobs=4)

    assert without.logprobs == ()
    assert [len(entry.top) for entry in bare.logprobs] == [0, 0, 0]
    assert [len(entry.top) for entry in full.logprobs] == [4, 4, 4]
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in full.logprobs)


async def test_an_idle_fleet_holds_nothing(ring: LocalFleet) -> None:
    await ring.client.generate("hello", max_tokens=3)

    status = await ring.until(lambda status: status.num_running == 0, bound_s=1.0)

    (pipeline,) = status.pipelines
    assert (pipeline.used_slots, pipeline.used_kv_tokens, status.num_waiting) == (0, 0, 0)
    assert pipeline.completion_tokens_total > 0
    assert all(device.decode_ms > 0 for device in status.devices)
