"""A file of JSON lines that a killed process leaves behind, and that the next one goes on with.

Owns that lines are whole and on the disk, that one process has the file, and that another file is not written to. Knows
nothing of what lines say. Used by `answers` and by `shoal plan --sweep`.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from modelstore.file_lock import sync_folder
from shoal.errors import ConfigError, StorageFull


class LineFile:
    """Lines with their ends, as bytes."""

    def __init__(self, path: Path, *, start: bytes, writer: str, refusal: str) -> None:
        """writer: who writes such files, in a word; refusal: what is wrong with a line that is none of ours.

        start: of every line; by it, one that was cut off is told from another file's last line, which is not ours to remove.
        """
        self._path = path
        self._start = start
        self._writer = writer
        self._refusal = refusal
        self._file: IO[bytes] | None = None

    def open(self, take: Callable[[bytes], None]) -> int:
        """Open, lock and repair it; returns how many bytes of a line that was cut off were removed.

        take: is given each line, and raises ValueError, KeyError or TypeError for one that is none of ours. Raises
        ConfigError if somebody else writes to the file, or it is something else.
        """
        try:
            self._file = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror or error}", field="out") from error
        try:
            if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                raise ConfigError(f"{self._path}: is no regular file; give another --out", field="out")
            self._lock(self._file)
            num_repaired = self._read(self._file, take)
            # The file may be new, and its name is to be there after a power cut, too.
            sync_folder(self._path.absolute().parent)
        except BaseException:
            self._file.close()
            raise
        return num_repaired

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another one may have replaced it in between.
            is_ours = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except BlockingIOError:
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{self._path}: another {self._writer} writes to it; wait for its end, or give another --out",
                field="out",
            )

    def _read(self, file: IO[bytes], take: Callable[[bytes], None]) -> int:
        file.seek(0)
        end = 0
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                if raw[: len(self._start)] != self._start[: len(raw)]:
                    raise self._refused(number)
                file.truncate(end)
                os.fsync(file.fileno())
                return len(raw)
            try:
                take(raw)
            except (ValueError, KeyError, TypeError):
                raise self._refused(number) from None
            end += len(raw)
        return 0

    def _refused(self, number: int) -> ConfigError:
        return ConfigError(f"{self._path}:{number}: {self._refusal}; give another --out", field="out")

    def append(self, lines: bytes) -> None:
        """Write lines and wait for the disk. Raises StorageFull."""
        assert self._file is not None
        try:
            # Past any buffer: what a full disk has not taken must not be tried again when the file is closed.
            while lines:
                lines = lines[os.write(self._file.fileno(), lines) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageFull(
                f"{self._path}: cannot be written: {error.strerror}; make room, and start the {self._writer} again to go on"
            ) from error

    def lines(self) -> list[bytes]:
        with self._path.open("rb") as file:
            return list(file)

    def replace(self, lines: Sequence[bytes]) -> None:
        """The file is the old one or the new one, whenever the process dies; closed, since the lock is on the old one."""
        beside = self._path.with_name(self._path.name + ".sorting")
        with beside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        sync_folder(self._path.absolute().parent)
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
