"""What a fleet of real processes answers: the same however it is asked, by however many devices, in whatever company."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from launch.local import LocalFleet
from modelstore.manifest import Manifest
from orchestrator.tokenizer import Tokenizer
from shoal import AsyncClient, Client
from shoal.generation import Generation
from shoal.types import FinishReason
from tests.e2e.conftest import StartFleet
from tests.support.commands import WAIT_S
from tests.support.english import TEXT

pytestmark = pytest.mark.e2e

PROMPT = "The largest animals of the sea are"
# More than a burst, and as few as still run when the last one begins.
NUM_TOKENS = 18
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": PROMPT},
    {"prompt": TEXT[:900], "num_logprobs": 2},
    {"prompt": "Dear Sir,", "temperature": 1.0, "seed": 3},
    {"messages": [{"role": "user", "content": "What do fish eat?"}], "temperature": 0.7, "top_k": 40, "seed": 4},
    {"prompt": TEXT[300:600], "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"prompt": "1, 2, 3, 4,", "temperature": 0.9, "min_p": 0.05, "seed": 5, "num_logprobs": 0},
)


def essence(answer: Generation) -> tuple[object, ...]:
    """What must be the same whenever the same is asked."""
    return answer.text, answer.token_ids, answer.logprobs, answer.finish_reason, answer.prompt_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 18])
def test_streamed_text_joined_is_the_whole_text(client: Client, max_tokens: int) -> None:
    prompt = "Emojis: 🐟🐠🐡, and Chinese: 鱼在水里游。"
    whole = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)

    with client.stream(prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
        deltas = list(stream)

    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == whole.token_ids
    assert (whole.finish_reason, whole.completion_tokens) == (FinishReason.LENGTH, max_tokens)


def test_a_longer_answer_begins_with_the_shorter_one(client: Client) -> None:
    short, long = (client.generate(PROMPT, max_tokens=count, ignore_eos=True) for count in (10, 30))

    assert long.token_ids[:10] == short.token_ids
    assert long.text.startswith(short.text)


def test_three_devices_answer_bit_for_bit_as_one_does(client: Client, start_fleet: StartFleet) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "num_logprobs": 5}
    with Client(start_fleet("tablet").address, timeout_s=WAIT_S) as single:
        for prompt in (PROMPT, TEXT[:700]):
            expected, answer = (one.generate(prompt, **options) for one in (single, client))

            assert (len(expected.pipeline), len(answer.pipeline)) == (1, 3)
            assert len(expected.logprobs) == 24
            assert essence(answer) == essence(expected)


async def ask_all_staggered(address: str) -> list[Generation]:
    """Ask each as soon as the one before has begun to answer."""

    async def ask(request: dict[str, Any], has_begun: asyncio.Event) -> Generation:
        stream = client.stream(**request, max_tokens=NUM_TOKENS, ignore_eos=True)
        async for delta in stream:
            if delta.index >= 2:
                has_begun.set()
        return stream.result

    async with AsyncClient(address, timeout_s=WAIT_S) as client, asyncio.TaskGroup() as group:
        tasks = []
        for request in REQUESTS:
            has_begun = asyncio.Event()
            tasks.append(group.create_task(ask(request, has_begun)))
            await has_begun.wait()
        assert (await client.status()).num_running > 1
    return [task.result() for task in tasks]


async def test_answers_that_start_while_others_run_are_those_of_the_same_prompts_alone(
    fleet: LocalFleet, client: Client
) -> None:
    alone = [client.generate(**request, max_tokens=NUM_TOKENS, ignore_eos=True) for request in REQUESTS]

    together = await ask_all_staggered(fleet.address)

    assert [essence(answer) for answer in together] == [essence(answer) for answer in alone]


def test_a_conversation_is_answered_as_a_whole(client: Client, real_model: Manifest) -> None:
    history = [
        {"role": "user", "content": "My dog is called Rex."},
        {"role": "assistant", "content": "Rex is a fine name for a dog!"},
        {"role": "user", "content": "What is my dog called?"},
    ]
    rendered = Tokenizer(real_model.tokenizer).encode_chat(history)

    answer, expected, last_alone = (
        client.chat(history, max_tokens=16),
        client.generate(rendered, max_tokens=16),
        client.chat(history[-1:], max_tokens=16),
    )

    assert essence(answer) == essence(expected)
    assert answer.prompt_tokens > last_alone.prompt_tokens
    assert answer.token_ids != last_alone.token_ids


def test_a_full_context_ends_an_answer_as_length(start_fleet: StartFleet) -> None:
    with Client(start_fleet("phone", context_tokens=64).address, timeout_s=WAIT_S) as client:
        answer = client.generate(PROMPT, max_tokens=500, ignore_eos=True)

    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.prompt_tokens + answer.completion_tokens == 64
