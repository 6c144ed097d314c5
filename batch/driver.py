"""Has all prompts of a file answered that its answers do not have yet, so many at a time.

Owns tasks, retries and the order of writing: an answer counts when it is on the disk. What cannot be answered becomes a line
with an error; what may be answered later is asked again, and while nobody answers anything the batch gives up, to be gone on
with another time. Knows no connection: `ask` is the SDK's, or somebody's on another machine. Called by `shoal batch`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from batch.answers import AnswerFile
from batch.prompts import Prompt, Refusal
from shoal.errors import ConfigError, Overloaded, RequestCancelled, RequestNotFound, ShoalError
from shoal.generation import Generation
from shoal.types import FinishReason

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 15.0
# A prompt that never gets an answer though others do may be the reason itself.
MAX_ASKS = 50
# Not for the caller to repeat in general, but what a batch asks has no effect but its answer.
_ASKED_AGAIN = (RequestCancelled, RequestNotFound)
PROGRESS_S = 0.25

Ask = Callable[[Prompt], Awaitable[Generation]]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is. num_kept: answers of an earlier run; num_failed: lines with an error, of this one and earlier."""

    num_prompts: int
    num_done: int
    num_kept: int
    num_failed: int
    num_running: int
    num_tokens: int
    elapsed_s: float


def unanswered(
    lines: Iterable[Prompt | Refusal], file: AnswerFile, *, is_error_kept: bool = True
) -> list[Prompt | Refusal]:
    """The lines that the file has no answer to. Raises ConfigError if it has answers to other prompts.

    is_error_kept: whether an error is an answer; where it is none, its line may have changed.
    """
    left = []
    known = set()
    for line in lines:
        known.add(line.line)
        kept = file.kept.get(line.line)
        if kept is None or (kept.is_error and not is_error_kept):
            left.append(line)
        elif kept.digest != line.digest:
            again = ", or ask errors again with --retry-errors" if kept.is_error else ""
            raise ConfigError(
                f"the answers are to other prompts: line {line.line} ({line.id}) has changed; give another --out{again}",
                field="out",
            )
    if stray := file.kept.keys() - known:
        raise ConfigError(
            f"the answers are to other prompts: there is no line {min(stray)} any more; give another --out", field="out"
        )
    return left


class Batch:
    """One run.

    Invariant: a line is in _left, with one of the tasks, in _to_write, with the writer or in the file; never in two of them.
    """

    def __init__(
        self,
        left: list[Prompt | Refusal],
        file: AnswerFile,
        ask: Ask,
        *,
        concurrency: int,
        patience_s: float,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """patience_s: how long it is tried while nobody answers anything."""
        self._left: Iterator[Prompt | Refusal] = iter(left)
        self._file = file
        self._ask = ask
        self._concurrency = concurrency
        self._patience_s = patience_s
        self._on_progress = on_progress
        self._num_prompts = len(file.kept) + len(left)
        self._num_kept = self._num_done = len(file.kept)
        self._num_failed = sum(kept.is_error for kept in file.kept.values())
        self._num_running = 0
        self._num_tokens = 0
        self._started_at = time.monotonic()
        # Since when nobody answers; None while somebody does, be it that the queue is full.
        self._failing_since: float | None = None
        self._to_write: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue(maxsize=2 * concurrency)

    async def run(self) -> None:
        """Answer all that is left. Raises the ShoalError that kept everything from being answered for patience_s."""
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write())
                telling = group.create_task(self._tell())
                fault = await self._work_all()
                await self._to_write.put(None)
                await writing
                telling.cancel()
        except* ShoalError as errors:
            raise _first(errors) from None
        self._on_progress(self.progress())
        if fault is not None:
            raise fault

    async def _work_all(self) -> ShoalError | None:
        """Return why it was given up, if it was: what was answered until then is still to be written."""
        fault = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work())
        except* ShoalError as errors:
            fault = _first(errors)
        return fault

    def progress(self) -> Progress:
        return Progress(
            num_prompts=self._num_prompts,
            num_done=self._num_done,
            num_kept=self._num_kept,
            num_failed=self._num_failed,
            num_running=self._num_running,
            num_tokens=self._num_tokens,
            elapsed_s=time.monotonic() - self._started_at,
        )

    async def _work(self) -> None:
        # One iterator for all: each takes the next that nobody has.
        for line in self._left:
            self._num_running += 1
            await self._to_write.put(await self._answer(line))
            self._num_running -= 1

    async def _answer(self, line: Prompt | Refusal) -> Mapping[str, Any]:
        if isinstance(line, Refusal):
            return _failed(line, line.error)
        for num_asks in range(1, MAX_ASKS + 1):
            try:
                generation = await self._ask(line)
                if generation.finish_reason is FinishReason.CANCELLED:
                    raise RequestCancelled("the orchestrator ended the answer early")
            except ShoalError as error:
                if num_asks == MAX_ASKS or not (error.is_retryable or isinstance(error, _ASKED_AGAIN)):
                    return _failed(line, error)
                self._check_patience(error)
                await asyncio.sleep(
                    max(min(FIRST_RETRY_S * 2 ** min(num_asks, 10), LONGEST_RETRY_S), error.retry_after_s)
                )
            else:
                self._failing_since = None
                self._num_tokens += generation.completion_tokens
                return _answered(line, generation)
        raise AssertionError("the last time returns")

    def _check_patience(self, error: ShoalError) -> None:
        """Raise the error if it goes on for too long; a queue that is full is one that moves."""
        if isinstance(error, Overloaded):
            self._failing_since = None
            return
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since > self._patience_s:
            raise error

    async def _write(self) -> None:
        """Write what has come, all of it at once: the disk is waited for as rarely as it is slow."""
        is_open = True
        while is_open:
            answers: list[Mapping[str, Any] | None] = [await self._to_write.get()]
            while not self._to_write.empty():
                answers.append(self._to_write.get_nowait())
            is_open = None not in answers
            there = [answer for answer in answers if answer is not None]
            await asyncio.to_thread(self._file.append, there)
            self._num_done += len(there)
            self._num_failed += sum("error" in answer for answer in there)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._on_progress(self.progress())


def _answered(prompt: Prompt, generation: Generation) -> dict[str, Any]:
    return {
        "line": prompt.line,
        "id": prompt.id,
        "text": generation.text,
        "finish_reason": generation.finish_reason.value,
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.completion_tokens,
        "model": generation.model,
        "seed": generation.seed,
        "prompt_digest": prompt.digest,
    }


def _failed(line: Prompt | Refusal, error: ShoalError) -> dict[str, Any]:
    told = {"reason": error.reason, "field": error.field, "message": error.message}
    return {"line": line.line, "id": line.id, "error": told, "prompt_digest": line.digest}


def _first(errors: BaseExceptionGroup[ShoalError]) -> ShoalError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
