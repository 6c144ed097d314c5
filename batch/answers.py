"""The file of answers: a JSON object a line, appended and forced to the disk, so that a batch goes on where it was killed.

Owns the file. A line that is whole is an answer, once; a last line that is not was being written when the process died, and
is cut off. When all is answered the lines are put in the order of the prompts, in one step. Called by `driver`.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from modelstore.blob_writer import sync_folder
from shoal.errors import ConfigError, StorageFull

# Of every line: by it, an answer that was cut off is told from another file's last line, which is not ours to remove.
_START = b'{"line": '


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
        self._path = path
        self._file: IO[bytes] | None = None
        self.kept: dict[int, Kept] = {}
        # Bytes of a line that was cut off.
        self.num_repaired = 0

    def __enter__(self) -> Self:
        """Open, lock, repair and read it. Raises ConfigError if somebody else writes to it, or it is something else."""
        try:
            self._file = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror or error}", field="out") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(f"{self._path}: is no regular file; give another --out", field="out")
            self._lock(self._file)
            self._read(self._file)
            # The file may be new, and its name is to be there after a power cut, too.
            sync_folder(self._path.absolute().parent)
        except BaseException:
            self._file.close()
            raise
        return self

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._path}: another batch writes to it; wait for its end, or give another --out", field="out"
            ) from None

    def _read(self, file: IO[bytes]) -> None:
        file.seek(0)
        end = 0
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                if raw[: len(_START)] != _START[: len(raw)]:
                    raise self._refusal(number)
                self.num_repaired = len(raw)
                file.truncate(end)
                os.fsync(file.fileno())
                break
            self._take(number, raw)
            end += len(raw)

    def _take(self, number: int, raw: bytes) -> None:
        try:
            answer = json.loads(raw)
            line, kept = answer["line"], _kept(answer)
            is_new = type(line) is int and line not in self.kept
        except (ValueError, KeyError, TypeError):
            is_new = False
        if not is_new:
            raise self._refusal(number)
        self.kept[line] = kept

    def _refusal(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._path}:{number}: is no line of a batch's answers, or is there twice; give another --out",
            field="out",
        )

    def append(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Write answers and wait for the disk; only then are they kept. Raises StorageFull."""
        assert self._file is not None
        answers = list(answers)
        assert not any(answer["line"] in self.kept for answer in answers)
        try:
            # Past any buffer: what a full disk has not taken must not be tried again when the file is closed.
            rest = b"".join(_encode(answer) for answer in answers)
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageFull(
                f"{self._path}: cannot be written: {error.strerror}; make room, and start the batch again to go on"
            ) from error
        self.kept.update((answer["line"], _kept(answer)) for answer in answers)

    def drop_errors(self) -> int:
        """Take out the answers that are errors, so that their lines are asked again; return how many there were."""
        lines = self._lines()
        kept = [raw for raw in lines if "error" not in json.loads(raw)]
        if len(kept) < len(lines):
            self._replace(kept)
            # The lock was on the file that is no more.
            self.__exit__(None, None, None)
            self.kept.clear()
            self.__enter__()
        return len(lines) - len(kept)

    def sort(self) -> None:
        """Put the lines in the order of the prompts."""
        lines = self._lines()
        ordered = sorted(lines, key=lambda raw: int(json.loads(raw)["line"]))
        if ordered != lines:
            self._replace(ordered)

    def _lines(self) -> list[bytes]:
        with self._path.open("rb") as file:
            return list(file)

    def _replace(self, lines: list[bytes]) -> None:
        """The file is the old one or the new one, whenever the process dies."""
        beside = self._path.with_name(self._path.name + ".sorting")
        with beside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        sync_folder(self._path.absolute().parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def _kept(answer: Mapping[str, Any]) -> Kept:
    return Kept(str(answer["prompt_digest"]), "error" in answer, int(answer.get("completion_tokens", 0)))


def _encode(answer: Mapping[str, Any]) -> bytes:
    # Half a character, as a refused line may have one in a name, is written as JSON's own escape.
    return json.dumps(answer, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
