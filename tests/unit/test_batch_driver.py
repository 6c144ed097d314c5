"""A batch: what is asked, asked again, written down, and given up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from batch import driver
from batch.answers import AnswerFile
from batch.driver import Ask, Batch, Progress, unanswered
from batch.prompts import Prompt, Refusal
from shoal.errors import ConfigError, ConnectionFailed, ContextExceeded, InvalidRequest, Overloaded, RequestCancelled
from shoal.generation import Generation
from shoal.types import FinishReason


def make_prompt(line: int, digest: str = "d") -> Prompt:
    return Prompt(line, f"line-{line}", digest, f"prompt {line}", None, {})


def make_generation(text: str, finish: FinishReason = FinishReason.STOP) -> Generation:
    return Generation(text, (1, 2), finish, 3, 2, 0.0, 0.0, (), "request", "model", 7)


async def echo(prompt: Prompt) -> Generation:
    await asyncio.sleep(0)
    return make_generation(f"to {prompt.text}")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[AnswerFile]:
    with AnswerFile(tmp_path / "answers.jsonl") as file:
        yield file


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FIRST_RETRY_S", 0.0)


def answers_of(folder: Path) -> dict[int, dict[str, object]]:
    lines = (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    assert len({answer["line"] for answer in answers}) == len(answers)
    return {answer["line"]: answer for answer in answers}


async def run(
    left: list[Prompt | Refusal], file: AnswerFile, ask: Ask, *, concurrency: int = 2, patience_s: float = 60.0
) -> Progress:
    batch = Batch(left, file, ask, concurrency=concurrency, patience_s=patience_s)
    await batch.run()
    return batch.progress()


async def test_every_prompt_is_answered_once(tmp_path: Path, file: AnswerFile) -> None:
    progress = await run([make_prompt(line) for line in range(1, 8)], file, echo)

    answers = answers_of(tmp_path)
    assert {line: answer["text"] for line, answer in answers.items()} == {n: f"to prompt {n}" for n in range(1, 8)}
    assert (progress.num_done, progress.num_failed, progress.num_tokens) == (7, 0, 14)


async def test_no_more_are_asked_at_once_than_wanted(file: AnswerFile) -> None:
    running, most = 0, 0

    async def ask(prompt: Prompt) -> Generation:
        nonlocal running, most
        running += 1
        most = max(most, running)
        answer = await echo(prompt)
        running -= 1
        return answer

    await run([make_prompt(line) for line in range(1, 20)], file, ask, concurrency=3)

    assert most == 3


async def test_a_bad_line_and_a_refused_prompt_become_errors_and_the_rest_is_answered(
    tmp_path: Path, file: AnswerFile
) -> None:
    async def ask(prompt: Prompt) -> Generation:
        if prompt.line == 2:
            raise ContextExceeded("too long", field="prompt")
        return await echo(prompt)

    bad = Refusal(1, "line-1", "d", InvalidRequest("line", "is not JSON"))
    progress = await run([bad, make_prompt(2), make_prompt(3)], file, ask)

    answers = answers_of(tmp_path)
    assert answers[1]["error"] == {"reason": "INVALID_REQUEST", "field": "line", "message": "line: is not JSON"}
    assert answers[2]["error"] == {"reason": "CONTEXT_EXCEEDED", "field": "prompt", "message": "too long"}
    assert answers[3]["text"] == "to prompt 3"
    assert (progress.num_done, progress.num_failed) == (3, 2)


@pytest.mark.parametrize("error", [Overloaded("full"), RequestCancelled("going down")])
async def test_what_may_be_answered_later_is_asked_again(tmp_path: Path, file: AnswerFile, error: Exception) -> None:
    faults = [error, error]

    async def ask(prompt: Prompt) -> Generation:
        if faults:
            raise faults.pop()
        return await echo(prompt)

    await run([make_prompt(1)], file, ask)

    assert answers_of(tmp_path)[1]["text"] == "to prompt 1"


async def test_half_an_answer_of_an_orchestrator_that_goes_is_not_kept(tmp_path: Path, file: AnswerFile) -> None:
    halves = [make_generation("to pro", FinishReason.CANCELLED)]

    async def ask(prompt: Prompt) -> Generation:
        return halves.pop() if halves else await echo(prompt)

    await run([make_prompt(1)], file, ask)

    assert answers_of(tmp_path)[1]["text"] == "to prompt 1"


async def test_a_batch_gives_up_when_nobody_answers_and_keeps_what_it_has(tmp_path: Path, file: AnswerFile) -> None:
    async def ask(prompt: Prompt) -> Generation:
        if prompt.line > 2:
            raise ConnectionFailed("nobody there")
        return await echo(prompt)

    with pytest.raises(ConnectionFailed, match="nobody there"):
        await run([make_prompt(line) for line in range(1, 5)], file, ask, concurrency=1, patience_s=0.0)

    assert answers_of(tmp_path).keys() == {1, 2}


async def test_patience_is_for_silence_alone_a_full_queue_and_an_answer_end_it(
    tmp_path: Path, file: AnswerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now))
    steps: list[Exception | None] = [
        ConnectionFailed("away"), Overloaded("full"), ConnectionFailed("away"), None, ConnectionFailed("away"), None,
    ]  # fmt: skip

    async def ask(prompt: Prompt) -> Generation:
        nonlocal now
        now += 100.0
        if fault := steps.pop(0):
            raise fault
        return await echo(prompt)

    await run([make_prompt(1), make_prompt(2)], file, ask, concurrency=1, patience_s=60.0)

    assert {line: answer["text"] for line, answer in answers_of(tmp_path).items()} == {
        1: "to prompt 1",
        2: "to prompt 2",
    }


async def test_who_is_told_when_to_come_again_does_not_come_before(
    file: AnswerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, slept_s = [Overloaded("full", retry_after_s=3.0)], []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        slept_s.append(delay_s)
        await sleep(0)

    async def ask(prompt: Prompt) -> Generation:
        if faults:
            raise faults.pop()
        return make_generation("Hi")

    monkeypatch.setattr(asyncio, "sleep", note)
    await run([make_prompt(1)], file, ask)

    assert [delay_s for delay_s in slept_s if delay_s != driver.PROGRESS_S] == [3.0]


async def test_errors_of_an_earlier_run_are_counted_with_those_of_this_one(file: AnswerFile) -> None:
    bad: list[Prompt | Refusal] = [Refusal(n, f"line-{n}", "d", InvalidRequest("line", "is not JSON")) for n in (1, 2)]
    await run(bad[:1], file, echo)

    assert (await run(unanswered(bad, file), file, echo)).num_failed == 2


async def test_a_prompt_that_fails_while_others_are_answered_becomes_an_error_at_last(
    tmp_path: Path, file: AnswerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "MAX_ASKS", 3)
    num_asks = 0

    async def ask(prompt: Prompt) -> Generation:
        nonlocal num_asks
        num_asks += 1
        raise Overloaded("full")

    await run([make_prompt(1)], file, ask)

    assert num_asks == 3
    assert answers_of(tmp_path)[1]["error"] == {"reason": "OVERLOADED", "field": "", "message": "full"}


async def test_a_second_run_asks_only_what_is_left(tmp_path: Path, file: AnswerFile) -> None:
    prompts: list[Prompt | Refusal] = [make_prompt(line) for line in range(1, 4)]
    await run(prompts[:2], file, echo)
    left = unanswered(prompts, file)

    progress = await run(left, file, echo)

    assert [line.line for line in left] == [3]
    assert answers_of(tmp_path).keys() == {1, 2, 3}
    assert (progress.num_kept, progress.num_done) == (2, 3)


@pytest.mark.parametrize("prompts", [[make_prompt(1, "other")], []], ids=["edited", "removed"])
async def test_answers_to_other_prompts_are_not_gone_on_with(file: AnswerFile, prompts: list[Prompt | Refusal]) -> None:
    await run([make_prompt(1)], file, echo)

    with pytest.raises(ConfigError, match="answers are to other prompts"):
        unanswered(prompts, file)


def test_an_error_is_asked_again_where_that_is_wanted_also_if_its_line_was_mended_since(file: AnswerFile) -> None:
    error = {"reason": "INVALID_REQUEST"}
    file.append(
        [
            {"line": 1, "id": "line-1", "error": error, "prompt_digest": "before"},
            {"line": 2, "id": "line-2", "text": "Hi", "prompt_digest": "d"},
        ]
    )
    lines = [make_prompt(1, "after"), make_prompt(2)]

    with pytest.raises(ConfigError, match=r"line 1 \(line-1\) has changed; .* --retry-errors"):
        unanswered(lines, file)
    assert unanswered(lines, file, is_error_kept=False) == lines[:1]


def test_other_answers_are_refused_also_where_errors_are_asked_again(file: AnswerFile) -> None:
    file.append([{"line": 1, "id": "line-1", "text": "Hi", "prompt_digest": "other"}])

    with pytest.raises(ConfigError, match="the answers are to other prompts"):
        unanswered([make_prompt(1)], file, is_error_kept=False)
