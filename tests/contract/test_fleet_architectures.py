"""Fleets serve models of every architecture: three devices, one of them lost, answer what one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.generation import Generation
from tests.support.architectures import options_of
from tests.support.fleet import make_device, start_fleet
from tests.support.shards import make_tiny_model, make_tokens
from tests.support.streams import SLOW, Reader

# Hot enough that a random model does not repeat itself; the prompt is longer than tiny models' windows.
QUESTION: dict[str, Any] = {
    "prompt": make_tokens(70, 280, seed=4),
    "max_tokens": 60,
    "temperature": 8.0,
    "seed": 11,
    "ignore_eos": True,
    "num_logprobs": 3,
}


def content(answer: Generation) -> tuple[object, ...]:
    return answer.token_ids, answer.logprobs, answer.text


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("mistral", "gguf"),
        ("qwen2", "hf"),
        ("qwen3", "hf"),
        ("gemma3", "gguf"),
        ("gemma3 of wide heads", "hf"),
        ("pruned", "hf"),
    ],
)
async def test_three_devices_of_which_one_is_lost_answer_what_one_does(
    tmp_path: Path, variant: str, layout: str
) -> None:
    options = {**options_of(variant), "layout": layout, "weight_type": "Q4_1" if layout == "gguf" else "BF16"}
    store = make_tiny_model(tmp_path / "model", **options).store.root
    async with start_fleet(store, tmp_path, [make_device()]) as fleet:
        expected = content(await fleet.client.generate(**QUESTION))

    split = f"1,2,{options['num_layers'] - 3}"
    async with start_fleet(store, tmp_path, [SLOW] * 3, split=split) as fleet:
        fleet.add_worker("w3", SLOW)
        await fleet.until(lambda status: any(device.layers is None for device in status.devices))
        reader = Reader(fleet.client.stream(**QUESTION))
        await reader.has_started()
        await fleet.workers["w1"].vanish()
        answer = await reader.result()

    assert content(answer) == expected
    assert [stage.worker_id for stage in answer.pipeline] == ["w0", "w3", "w2"]
    assert answer.num_recoveries == 1
