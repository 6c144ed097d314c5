"""A sequence: what a request became, its tokens, and its state while it is computed.

Owns the state machine of one sequence and the arithmetic of its positions. It does not know of batches, other
sequences or the clock: the scheduler, its only writer, tells it what happened and when; the engine reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shoal.errors import InternalError
from shoal.types import FinishReason, NumericClass, QosClass, SamplingParams, SequenceId, SlotId


class SequenceState(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.PREFILL, SequenceState.FINISHED}),
    SequenceState.PREFILL: frozenset({SequenceState.DECODE, SequenceState.FINISHED}),
    SequenceState.DECODE: frozenset({SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making.

    max_tokens: the most answer tokens; the scheduler lowers it to what the context leaves. num_dispatched: prompt
    tokens that batches already carry or have carried. finish_reason: None while it runs, and if an error ended it.

    Invariants: a slot is held exactly in PREFILL and DECODE; answer tokens exist only once the whole prompt is
    dispatched; never more than max_tokens of them.
    """

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    numeric: NumericClass
    qos: QosClass
    arrived_at: float
    state: SequenceState = SequenceState.WAITING
    slot: SlotId | None = None
    num_dispatched: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None

    @property
    def num_tokens_max(self) -> int:
        """Tokens that KV is reserved for."""
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def num_prompt_left(self) -> int:
        return len(self.prompt_token_ids) - self.num_dispatched

    @property
    def num_output_left(self) -> int:
        return self.max_tokens - len(self.output_token_ids)

    @property
    def decode_position(self) -> int:
        """Tokens in the slot before the newest answer token is fed."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) - 1

    def move_to(self, state: SequenceState) -> None:
        """Change state; raises InternalError with the sequence's story if the table does not allow it."""
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"{self.story()}: cannot become {state.value}")
        self.state = state

    def append(self, token_id: int) -> FinishReason | None:
        """Take an answer token; says why the sequence is at its end with it, or None."""
        self.output_token_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_left == 0 else None

    def story(self) -> str:
        return (
            f"sequence {self.sequence_id} is {self.state.value} in slot {self.slot}: arrived {self.arrived_at}, "
            f"admitted {self.admitted_at}, first token {self.first_token_at}, "
            f"{self.num_dispatched} of {len(self.prompt_token_ids)} prompt tokens dispatched, "
            f"{len(self.output_token_ids)} of {self.max_tokens} answer tokens"
        )

    def check_invariants(self) -> None:
        is_running = self.state in (SequenceState.PREFILL, SequenceState.DECODE)
        assert (self.slot is not None) == is_running, self.story()
        assert 0 <= self.num_prompt_left <= len(self.prompt_token_ids), self.story()
        assert not self.output_token_ids or self.num_prompt_left == 0, self.story()
        assert self.num_output_left >= 0, self.story()
