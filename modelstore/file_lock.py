"""Locks between processes on a file that stays behind empty; the system frees them when their holder ends or dies.

Used by the store and by `pull`, so that two imports or downloads of one name do not write into each other's files, and
nobody removes what somebody else is about to use.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a path; calls on_wait once if somebody else has it."""
    with _locked(path, fcntl.LOCK_EX, on_wait):
        yield


@contextmanager
def shared_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a path beside others that share it."""
    with _locked(path, fcntl.LOCK_SH, on_wait):
        yield


@contextmanager
def _locked(path: Path, kind: int, on_wait: Callable[[], None]) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, kind)
        yield
