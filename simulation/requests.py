"""Requests of a simulated run: when they come, how long they and their answers are, and what an answer's tokens are.

Draws from the seed alone, in the order in which requests come. Knows neither pipelines nor whether there are any.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.sequence import Sequence
from shoal.types import NumericClass, QosClass, SamplingParams, SequenceId
from simulation.settings import Settings, targets_of

STOP_ID = 0
_STOP_IDS = frozenset({STOP_ID})
_SAMPLING = SamplingParams()


@dataclass(slots=True, eq=False)
class Request:
    """num_answer: tokens that the answer will have, which nobody knows. stream: which of a closed loop asks, or None.

    num_tokens: of the answer, delivered so far. last_at: of the newest, or of the arrival. num_losses: how often its
    pipeline was lost since its newest token.
    """

    sequence: Sequence
    num_answer: int
    stream: int | None
    last_at: float
    num_tokens: int = 0
    num_losses: int = 0

    def token_id(self, index: int) -> int:
        """The answer's token of a number: the same whoever computes it, and however often."""
        return STOP_ID if index + 1 == self.num_answer else index + 1


class Traffic:
    """What comes to one site."""

    def __init__(self, settings: Settings, site: int, rate_per_s: float) -> None:
        self._load = settings.load
        self._rate_per_s = rate_per_s
        self._arrivals = settings.random("arrivals", site)
        self._lengths = settings.random("lengths", site)
        self._number = 0
        self._classes = list(self._load.class_shares)
        self._weights = list(self._load.class_shares.values())
        # A model with a short context is asked for less.
        self._longest = settings.model.context_tokens // 2
        # Which ids a prompt has does not matter.
        self._prompt = tuple(range(1, self._load.prompts.most + 1))

    def next_gap_s(self) -> float:
        """Until the next arrival of an open loop."""
        return self._arrivals.expovariate(self._rate_per_s)

    def draw(self, now: float, stream: int | None = None) -> Request:
        """Make the next request."""
        self._number += 1
        qos = self._lengths.choices(self._classes, self._weights)[0]
        num_prompt = min(self._load.prompts.draw(self._lengths), self._longest)
        num_answer = self._load.answers.draw(self._lengths)
        sequence = Sequence(
            sequence_id=SequenceId(self._number),
            prompt_token_ids=self._prompt[:num_prompt],
            sampling=_SAMPLING,
            max_tokens=self._load.answers.most,
            stop_ids=_STOP_IDS,
            numeric=NumericClass.SOLO if qos is QosClass.LATENCY else NumericClass.SHARED,
            qos=qos,
            arrived_at=now,
            targets=targets_of(qos),
            trail_id=self._number.to_bytes(8, "big"),
        )
        return Request(sequence, num_answer, stream, now)
