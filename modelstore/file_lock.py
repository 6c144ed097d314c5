"""Locks between processes on a file that stays behind empty, freed when their holder ends or dies; and names kept on disk.

Used by the store and by `pull`, so that two imports or downloads of one name do not write into each other's files, and
nobody removes what somebody else is about to use.
"""

from __future__ import annotations

import fcntl
import os
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


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on disk, so that a rename outlives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
