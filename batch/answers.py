"""The file of answers: a JSON object a line, appended and forced to the disk, so that a batch goes on where it was killed.

Owns what is in it: a line is an answer, and each is there once. When all is answered the lines are put in the order of the
prompts, in one step. How a file of lines outlives its writer is `line_file`'s. Called by `driver`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batch.line_file import LineFile


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer that is in the file."""

    digest: str
    is_error: bool
    completion_tokens: int


class AnswerFile:
    """Answers by the number of their line.

    Invariants: a line number is in the file at most once; every answer in `kept` is on the disk; one process has the file.
    """

    def __init__(self, path: Path) -> None:
        refusal = "is no line of a batch's answers, or is there twice"
        self._file = LineFile(path, start=b'{"line": ', writer="batch", refusal=refusal)
        self.kept: dict[int, Kept] = {}
        # Bytes of a line that was cut off.
        self.num_repaired = 0

    def __enter__(self) -> Self:
        """Open, lock, repair and read it. Raises ConfigError if somebody else writes to it, or it is something else."""
        self.num_repaired += self._file.open(self._take)
        return self

    def _take(self, raw: bytes) -> None:
        answer = json.loads(raw)
        line, kept = answer["line"], _kept(answer)
        if type(line) is not int or line in self.kept:
            raise ValueError
        self.kept[line] = kept

    def append(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Write answers and wait for the disk; only then are they kept. Raises StorageFull."""
        answers = list(answers)
        assert not any(answer["line"] in self.kept for answer in answers)
        self._file.append(b"".join(_encode(answer) for answer in answers))
        self.kept.update((answer["line"], _kept(answer)) for answer in answers)

    def drop_errors(self) -> int:
        """Take out the answers that are errors, so that their lines are asked again; return how many there were."""
        lines = self._file.lines()
        kept = [raw for raw in lines if "error" not in json.loads(raw)]
        if len(kept) < len(lines):
            self._file.replace(kept)
            self.kept.clear()
            self._file.open(self._take)
        return len(lines) - len(kept)

    def sort(self) -> None:
        """Put the lines in the order of the prompts; the last thing that is done to them."""
        lines = self._file.lines()
        ordered = sorted(lines, key=lambda raw: int(json.loads(raw)["line"]))
        if ordered != lines:
            self._file.replace(ordered)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _kept(answer: Mapping[str, Any]) -> Kept:
    return Kept(str(answer["prompt_digest"]), "error" in answer, int(answer.get("completion_tokens", 0)))


def _encode(answer: Mapping[str, Any]) -> bytes:
    # Half a character, as a refused line may have one in a name, is written as JSON's own escape.
    return json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
