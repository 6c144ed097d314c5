"""`shoal batch` as a user has it: a file of prompts in, answers out, however often it was killed on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.local import LocalFleet
from tests.support.commands import run_shoal, start_shoal, until

pytestmark = pytest.mark.e2e

NUM_PROMPTS = 24


def write_prompts(path: Path, *more: str) -> None:
    lines = [json.dumps({"id": f"p{n}", "prompt": f"Fish number {n}", "ignore_eos": True}) for n in range(NUM_PROMPTS)]
    path.write_text("\n".join([*lines, *more]) + "\n", encoding="utf-8")


def answers_in(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_batch_that_was_killed_half_way_goes_on_and_has_every_answer_once(fleet: LocalFleet, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    write_prompts(prompts, "not a prompt")
    command = ["batch", str(prompts), "--out", str(out), "--server", fleet.address, "--max-tokens", "8"]

    with start_shoal(*command, "--concurrency", "4", home=tmp_path) as driver:
        until(lambda: num_lines(out), lambda count: count >= NUM_PROMPTS // 3)
        driver.process.kill()
        driver.wait()
    num_kept = num_lines(out)
    with out.open("ab") as file:
        file.write(b'{"line": 99, "id')
    done = run_shoal(*command, home=tmp_path)

    assert num_kept < NUM_PROMPTS
    assert "cut off in the middle" in done.err
    assert f"{num_kept} of {NUM_PROMPTS + 1} are answered already" in done.err
    answers = answers_in(out)
    assert [answer["line"] for answer in answers] == list(range(1, NUM_PROMPTS + 2))
    assert all(answer["completion_tokens"] == 8 for answer in answers[:-1])
    assert answers[-1]["error"]["reason"] == "INVALID_REQUEST"  # type: ignore[index]
    assert done.code == 1


def test_a_batch_without_a_fleet_says_so_and_goes_on_later(fleet: LocalFleet, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "Hi"}\n')

    lost = run_shoal(
        "batch", str(prompts), "--out", str(out), "--server", "127.0.0.1:1", "--patience", "0", home=tmp_path
    )
    done = run_shoal(
        "batch", str(prompts), "--out", str(out), "--server", fleet.address, "--max-tokens", "2", home=tmp_path
    )

    assert lost.code == 1
    assert "nobody answers at 127.0.0.1:1" in lost.err
    assert done.code == 0
    assert len(answers_in(out)) == 1
