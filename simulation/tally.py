"""What happens in a simulated run, counted: tokens, times, ends of requests, losses of pipelines.

Only what falls into the window of a run counts: tokens and gaps by their own time, requests by when they came, losses and
what follows from them always. All sites of a run have one. Judges nothing but targets; `results` makes figures.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from shoal.types import QosClass
from simulation.requests import Request
from simulation.settings import Settings


class End(Enum):
    """How a request ends. REFUSED: all queues are full. NO_CAPACITY: no pipeline is there, or came in time.

    WAITING: it had no slot yet when the run was over. LOST: anything else, which must not be.
    """

    FINISHED = "finished"
    REFUSED = "refused"
    NO_CAPACITY = "no_capacity"
    WAITING = "waiting"
    LOST = "lost"


def _floats() -> array[float]:
    return array("f")


@dataclass(slots=True)
class ClassTally:
    """Of one class. num_judged: requests that ended, or had waited too long at the end; num_good: within their targets."""

    num_judged: int = 0
    num_good: int = 0
    ttft_s: array[float] = field(default_factory=_floats)
    gap_s: array[float] = field(default_factory=_floats)


@dataclass(slots=True)
class Losses:
    """Of pipelines. num_repaired: whose stage another device took; num_built: pipelines made of whoever was free.

    num_moved, num_parked: running answers that went on elsewhere at once, or had to wait. gap_s: of streams, from the last
    token before to the first one after. at_s: when they were noticed.
    """

    num_left: int = 0
    num_pipelines: int = 0
    num_repaired: int = 0
    num_built: int = 0
    num_moved: int = 0
    num_parked: int = 0
    gap_s: array[float] = field(default_factory=_floats)
    at_s: array[float] = field(default_factory=_floats)


class Tally:
    """Invariant: tokens of an answer are counted once and in order, or the run ends with an error."""

    def __init__(self, settings: Settings) -> None:
        self._from_s, self._to_s = settings.warm_s, settings.duration_s
        self.by_class = {qos: ClassTally() for qos in QosClass}
        self.losses = Losses()
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        # Of the whole run, by the second in which they came.
        self.tokens_by_s: Counter[int] = Counter()
        # Of all requests, whenever they came.
        self.ends: Counter[End] = Counter()

    def _counts(self, at: float) -> bool:
        return self._from_s <= at <= self._to_s

    def token(self, request: Request, index: int, now: float) -> None:
        """Count a token of an answer."""
        sequence = request.sequence
        assert index == request.num_tokens, f"token {index} after {request.num_tokens}: {sequence.story()}"
        one = self.by_class[sequence.qos]
        self.tokens_by_s[int(now)] += 1
        if self._counts(now):
            self.num_tokens += 1
            if index:
                one.gap_s.append(now - request.last_at)
            else:
                self.num_prompt_tokens += len(sequence.prompt_token_ids)
        if index == 0 and self._counts(sequence.arrived_at):
            one.ttft_s.append(now - sequence.arrived_at)
        if request.num_losses:
            if index:
                self.losses.gap_s.append(now - request.last_at)
            request.num_losses = 0
        request.num_tokens, request.last_at = index + 1, now

    def end(self, request: Request, end: End, now: float) -> None:
        """Count the end of a request."""
        sequence = request.sequence
        self.ends[end] += 1
        if end is End.FINISHED:
            # What the context leaves may be less.
            assert request.num_tokens == min(request.num_answer, sequence.max_tokens), (
                f"not the whole answer: {sequence.story()}"
            )
        if not self._counts(sequence.arrived_at):
            return
        one, targets = self.by_class[sequence.qos], sequence.targets
        waited_s = now - sequence.arrived_at
        if end is End.WAITING and (targets.ttft_s is None or waited_s <= targets.ttft_s):
            return
        one.num_judged += 1
        one.num_good += end is End.FINISHED and _is_good(request)


def _is_good(request: Request) -> bool:
    """Whether the first token, and the others on average, came as soon as they were to."""
    sequence = request.sequence
    targets, first_at = sequence.targets, sequence.first_token_at
    assert first_at is not None, sequence.story()
    gap_s = (request.last_at - first_at) / max(request.num_tokens - 1, 1)
    return (targets.ttft_s is None or first_at - sequence.arrived_at <= targets.ttft_s) and (
        targets.inter_token_s is None or gap_s <= targets.inter_token_s
    )
