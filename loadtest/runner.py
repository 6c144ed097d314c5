"""Sends a plan to a target and writes down when what came, until all is done, time is up, or it is told to stop.

Owns the clock of a run and its tasks. What is sent when is decided in `dispatch`, the harness itself is measured by `meter`.
Knows no connection and no statistics. Called by the command line and by `ramp`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from statistics import median

from loadtest.answers import Arrival, End
from loadtest.dispatch import Dispatch, Due
from loadtest.meter import Meter, machine
from loadtest.plan import Plan, PlannedRequest, Record, RunResult, Slo
from loadtest.targets import Target
from shoal.errors import ShoalError
from shoal.types import QosClass

# Reasons of our own, beside those of shoal.errors: the run ended before the answer did.
RUN_TIMEOUT = "RUN_TIMEOUT"
INTERRUPTED = "INTERRUPTED"

PROGRESS_S = 0.25
# Tokens a second, as shown on the way, are over so many looks.
RATE_LOOKS = 8
RATE_S = RATE_LOOKS * PROGRESS_S
RECENT_TTFTS = 64
MAX_MESSAGE_CHARS = 300


class Ending(Enum):
    """Why a run ended; but for COMPLETE, its records are only a part of what was planned."""

    COMPLETE = "complete"
    TIMEOUT = "timeout"
    INTERRUPTED = "interrupted"
    # Of several harnesses one, with what it saw; the others went on.
    LOST = "lost"


_REASONS = {Ending.TIMEOUT: RUN_TIMEOUT, Ending.INTERRUPTED: INTERRUPTED}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave. Requests that were under way when it ended early are in it as errors, those not sent are not."""

    result: RunResult
    ending: Ending


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    tokens_per_s: of the last RATE_S. ttft_s: median of the latest answers, None before the first.
    """

    elapsed_s: float
    num_planned: int
    num_running: int
    num_ok: int
    num_failed: int
    num_tokens: int
    tokens_per_s: float
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Watch:
    """What is told while a run goes on: progress a few times a second, and each record as it is made."""

    on_progress: Callable[[Progress], None] = lambda _: None
    on_record: Callable[[Record], None] = lambda _: None


async def run(
    plan: Plan,
    target: Target,
    *,
    target_name: str = "",
    command: str = "",
    slos: Mapping[QosClass, Slo] | None = None,
    timeout_s: float | None = None,
    stopping: asyncio.Event | None = None,
    watch: Watch | None = None,
) -> Outcome:
    """Send all requests of a plan and wait for their ends, or until timeout_s or `stopping`: then cancel the rest."""
    run = _Run(plan, target, watch or Watch())
    ending = await run.drive(timeout_s, stopping or asyncio.Event())
    records = tuple(sorted(run.records, key=lambda record: record.request.number))
    duration_s = max((record.ended_at_s for record in records), default=0.0)
    result = RunResult(
        plan=plan,
        target=target_name,
        records=records,
        duration_s=duration_s,
        slos=dict(slos or {}),
        loop_lag_s=run.meter.lags_s,
        cpu_share=run.meter.cpu_s / duration_s if duration_s else 0.0,
        machine=machine(),
        command=command,
    )
    return Outcome(result, ending)


class _Answer:
    """A request under way, and when tokens of it came."""

    __slots__ = ("due", "sent_at_s", "token_at_s")

    def __init__(self, due: Due, sent_at_s: float) -> None:
        self.due = due
        self.sent_at_s = sent_at_s
        self.token_at_s: list[float] = []

    def complete(self, end: End, now_s: float) -> Record:
        most = self.due.request.max_tokens
        return Record(
            request=self.due.request,
            due_s=self.due.due_s,
            sent_at_s=self.sent_at_s,
            ended_at_s=now_s,
            # No more than was asked for or came: a server's count is but a claim.
            token_at_s=_share_out(self.token_at_s, min(end.completion_tokens, max(most, len(self.token_at_s)))),
            prompt_tokens=end.prompt_tokens,
            completion_tokens=end.completion_tokens,
            finish=end.finish,
            served_by=end.served_by,
            num_preemptions=end.num_preemptions,
        )

    def fail(self, reason: str, message: str, now_s: float) -> Record:
        return Record(
            request=self.due.request,
            due_s=self.due.due_s,
            sent_at_s=self.sent_at_s,
            ended_at_s=now_s,
            token_at_s=tuple(self.token_at_s),
            completion_tokens=len(self.token_at_s),
            error=reason,
            message=message[:MAX_MESSAGE_CHARS],
        )


def _share_out(token_at_s: list[float], num_tokens: int) -> tuple[float, ...]:
    """Arrival times for as many tokens as the server counted, where it did not say which came with which message.

    The first and the last stay where they are, so that times to first token and per token are true.
    """
    last = len(token_at_s) - 1
    if num_tokens in (0, last + 1) or last < 0:
        return tuple(token_at_s)
    if num_tokens == 1:
        return (token_at_s[0],)
    return tuple(token_at_s[round(index * last / (num_tokens - 1))] for index in range(num_tokens))


class _Tally:
    """Counts of a run so far, and a short memory for what is shown of it."""

    __slots__ = ("_looks", "_num_planned", "_ttfts_s", "num_failed", "num_ok", "num_tokens")

    def __init__(self, num_planned: int) -> None:
        self._num_planned = num_planned
        self.num_ok = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._ttfts_s: deque[float] = deque(maxlen=RECENT_TTFTS)
        # (time, tokens until then)
        self._looks: deque[tuple[float, int]] = deque([(0.0, 0)], maxlen=RATE_LOOKS + 1)

    def add_ttft(self, ttft_s: float) -> None:
        self._ttfts_s.append(ttft_s)

    def add_record(self, record: Record) -> None:
        if record.is_ok:
            self.num_ok += 1
        else:
            self.num_failed += 1

    def look(self, num_running: int, now_s: float) -> Progress:
        self._looks.append((now_s, self.num_tokens))
        (from_s, from_tokens), (to_s, to_tokens) = self._looks[0], self._looks[-1]
        return Progress(
            elapsed_s=now_s,
            num_planned=self._num_planned,
            num_running=num_running,
            num_ok=self.num_ok,
            num_failed=self.num_failed,
            num_tokens=self.num_tokens,
            tokens_per_s=(to_tokens - from_tokens) / (to_s - from_s) if to_s > from_s else 0.0,
            ttft_s=median(self._ttfts_s) if self._ttfts_s else None,
        )


class _Run:
    """One run: its tasks, its clock, what it has seen.

    Invariant: each request that was sent is either in _answers or, once it has ended, in records; never in both.
    """

    __slots__ = (
        "_answers", "_dispatch", "_ending", "_loop", "_reached_s", "_start_s", "_tally", "_target", "_tasks", "_wake",
        "_watch", "meter", "records",
    )  # fmt: skip

    def __init__(self, plan: Plan, target: Target, watch: Watch) -> None:
        self._dispatch = Dispatch(plan)
        self._target = target
        self._watch = watch
        self._tally = _Tally(len(plan.requests))
        self._answers: dict[int, _Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: Ending | None = None
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._reached_s = 0.0
        self.records: list[Record] = []
        self.meter = Meter()

    def _now_s(self) -> float:
        return self._loop.time() - self._start_s

    async def drive(self, timeout_s: float | None, stopping: asyncio.Event) -> Ending:
        """Run to the end, and say why it was the end."""
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(self._await_stop(stopping)), group.create_task(self._tell())]
            limit = self._loop.call_later(timeout_s, self._stop, Ending.TIMEOUT) if timeout_s is not None else None
            try:
                await self._send_all(group)
            finally:
                self.meter.stop()
                if limit is not None:
                    limit.cancel()
                for task in (*watching, *self._tasks):
                    task.cancel()
        return self._ending or Ending.COMPLETE

    async def _send_all(self, group: asyncio.TaskGroup) -> None:
        while self._ending is None and not self._dispatch.is_done:
            self._wake.clear()
            for due in self._dispatch.take(max(self._now_s(), self._reached_s)):
                task = group.create_task(self._ask(due))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await self._sleep_until(self._dispatch.next_at_s())
        if self._ending is not None:
            self._give_up(self._ending)

    async def _sleep_until(self, at_s: float | None) -> None:
        """Sleep until a time of the run or until something happens: a timer of the loop, good to a millisecond."""
        timer = None if at_s is None else self._loop.call_at(self._start_s + at_s, self._reach, at_s)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _reach(self, at_s: float) -> None:
        # The clock may read a rounding error less than the time for which its timer rang.
        self._reached_s = at_s
        self._wake.set()

    async def _ask(self, due: Due) -> None:
        answer = self._answers[due.request.number] = _Answer(due, max(due.due_s, self._now_s()))
        try:
            async with aclosing(self._target.ask(due.request)) as events:
                async for event in events:
                    if isinstance(event, Arrival):
                        self._arrive(answer, event.num_tokens)
                    else:
                        self._end(due.request, answer.complete(event, self._now_s()))
            assert due.request.number not in self._answers, "a target ended an answer without an End"
        except ShoalError as error:
            # A fault after the end of an answer, as it was being tidied up, is none of the answer.
            if due.request.number in self._answers:
                self._end(due.request, answer.fail(error.reason, error.message, self._now_s()))

    def _arrive(self, answer: _Answer, num_tokens: int) -> None:
        now_s = self._now_s()
        if not answer.token_at_s:
            self._tally.add_ttft(now_s - answer.due.due_s)
        answer.token_at_s.extend([now_s] * num_tokens)
        self._tally.num_tokens += num_tokens

    def _end(self, request: PlannedRequest, record: Record) -> None:
        del self._answers[request.number]
        self.records.append(record)
        self._tally.add_record(record)
        self._dispatch.end(request.number, record.ended_at_s)
        self._wake.set()
        self._watch.on_record(record)

    async def _await_stop(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        self._stop(Ending.INTERRUPTED)

    def _stop(self, ending: Ending) -> None:
        self._ending = self._ending or ending
        self._wake.set()

    def _give_up(self, ending: Ending) -> None:
        """Write down what is under way as it is; the tasks are cancelled by whoever called."""
        message = "the run ended before the answer did"
        for answer in tuple(self._answers.values()):
            self._end(answer.due.request, answer.fail(_REASONS[ending], message, self._now_s()))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._watch.on_progress(self._tally.look(len(self._answers), self._now_s()))
