"""Processes and the streams between them, in virtual time: what a stream carries comes in order, late, or not at all.

A stream that breaks loses the end of what is under way; each end learns of it by itself, later. What comes to a process that
is stopped waits; what comes to one that was killed is lost, and its own timers with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Generic, Protocol, TypeVar

Action = Callable[[], None]
Message = TypeVar("Message")


class Agenda(Protocol):
    """What lets things happen later."""

    random: Random

    def now(self) -> float: ...

    def after(self, delay_s: float, action: Action) -> None: ...


class Process:
    """One life of a process.

    Invariants: nothing happens in one that is dead or stopped; what comes while it is stopped happens later, in order.
    """

    def __init__(self, agenda: Agenda, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.num_done = 0
        self._agenda = agenda
        self._late: deque[Action] = deque()

    def do(self, action: Action) -> None:
        """Have something happen in it now, or as soon as it goes on."""
        if not self.is_alive:
            return
        if self.is_stopped or self._late:
            self._late.append(action)
        else:
            self.num_done += 1
            action()

    def after(self, delay_s: float, action: Action) -> None:
        self._agenda.after(delay_s, lambda: self.do(action))

    def stop(self) -> None:
        self.is_stopped = True

    def go_on(self) -> None:
        """Do all that has come meanwhile, as far as it does not stop or die again."""
        self.is_stopped = False
        for _ in range(len(self._late)):
            if self._late and self.is_alive and not self.is_stopped:
                self.num_done += 1
                self._late.popleft()()

    def kill(self) -> None:
        self.is_alive = False
        self._late.clear()


class Stream(Generic[Message]):
    """One way from a process to another.

    Invariant: messages arrive in the order in which they were sent, each at most once; none after one that was lost.
    """

    def __init__(
        self,
        agenda: Agenda,
        target: Process,
        arrived: Callable[[Message], None],
        ended: Action,
        delay_s: Callable[[], float],
    ) -> None:
        """arrived, ended: happen in the target; the latter at most once, and nothing arrives after it."""
        self.is_broken = False
        self._agenda = agenda
        self._target = target
        self._arrived = arrived
        self._ended = ended
        self._delay_s = delay_s
        self._last_at = 0.0
        self._num_sent = self._num_arrived = 0
        # What is sent after so many is lost.
        self._num_kept: int | None = None
        self._is_over = False

    def send(self, message: Message) -> None:
        """Send, unless it is broken: then the message is lost."""
        if self.is_broken:
            return
        self._num_sent += 1
        number = self._num_sent
        self._last_at = max(self._last_at, self._agenda.now() + self._delay_s())

        def arrive() -> None:
            if self._is_over or (self._num_kept is not None and number > self._num_kept):
                return
            self._num_arrived = number
            self._arrived(message)

        self._agenda.after(self._last_at - self._agenda.now(), lambda: self._target.do(arrive))

    def close(self, delay_s: float = 0.0) -> None:
        """End it in order: all that was sent arrives before the end."""
        self._end(self._num_sent, delay_s)

    def cut(self, delay_s: float) -> None:
        """Break it: some of what is under way is lost, and the target hears of it so much later, or when it looks."""
        under_way = self._num_sent - self._num_arrived
        self._end(self._num_sent - self._agenda.random.randint(0, max(under_way, 0)), delay_s)

    def _end(self, num_kept: int, delay_s: float) -> None:
        if self.is_broken:
            return
        self.is_broken, self._num_kept = True, num_kept
        at = max(self._last_at, self._agenda.now() + delay_s)
        self._agenda.after(at - self._agenda.now(), lambda: self._target.do(self._over))

    def _over(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._ended()

    def leave(self) -> None:
        """The target wants nothing more of it, nor to hear of its end."""
        self._is_over = True
        self.is_broken = True
