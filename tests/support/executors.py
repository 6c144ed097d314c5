"""Executors for what is done beside the event loop, without threads: at once, or when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class InlineExecutor(Executor):
    """Does everything at once."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        run(future, lambda: work(*args, **kwargs))
        return future


class HeldExecutor(Executor):
    """Does what it was given when it is told to, in order."""

    def __init__(self) -> None:
        self._held: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._held.append((future, lambda: work(*args, **kwargs)))
        return future

    @property
    def num_held(self) -> int:
        return len(self._held)

    def do_next(self) -> None:
        run(*self._held.popleft())


def run(future: Future[Any], work: Callable[[], Any]) -> None:
    """Have a future hold what comes of some work."""
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - as executors do
        future.set_exception(error)
