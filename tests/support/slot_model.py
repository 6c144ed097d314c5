"""A model for pipelines that tests play by frames: it draws tokens from nothing but what the slots of a pipeline were fed.

A token depends on every token fed before it, so one that was lost, doubled or wrong changes all that follow, and a sequence
that goes on elsewhere has the same text only if prompt and answer were fed again as they were.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from shoal.v1 import flow_pb2

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 10, 80
_SEED, _FACTOR, _MODULUS = 7, 31, 65521


@dataclass(slots=True)
class _Slot:
    """The run that holds a slot, how many tokens it fed, and what remains of them."""

    run_id: int
    num_tokens: int = 0
    state: int = _SEED

    def feed(self, token_ids: Seq[int]) -> None:
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            self.state = (self.state * _FACTOR + token_id) % _MODULUS

    def draw(self) -> int:
        return FIRST_TOKEN_ID + self.state % NUM_TOKEN_IDS


def answer_to(prompt_token_ids: Seq[int], num_tokens: int) -> list[int]:
    """The answer that nothing disturbs."""
    slot = _Slot(run_id=0)
    slot.feed(prompt_token_ids)
    answer: list[int] = []
    for _ in range(num_tokens):
        answer.append(slot.draw())
        slot.feed(answer[-1:])
    return answer


class SlotModel:
    """The slots of a pipeline, by the frames that went through all its stages."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def cancel(self, cancel: flow_pb2.Cancel) -> None:
        for ref in cancel.sequences:
            assert self._slots.pop(ref.slot).run_id == ref.sequence_id, "another run holds the slot"

    def step(self, step: flow_pb2.Step) -> tuple[flow_pb2.StepResult, flow_pb2.Step | None]:
        """What the last stage reports of a step, and within a burst the one that it feeds back to the first stage."""
        token_ids, drawn, following = list(step.token_ids), [], []
        for row in step.rows:
            fed, token_ids = token_ids[: row.num_tokens], token_ids[row.num_tokens :]
            if row.HasField("start"):
                assert row.slot not in self._slots, "the slot was not cancelled before it was used again"
                self._slots[row.slot] = _Slot(row.sequence_id)
            slot = self._slots.get(row.slot)
            if slot is None or slot.run_id != row.sequence_id:
                continue
            assert row.position == slot.num_tokens, "a token was fed twice, or not at all"
            slot.feed(fed)
            if row.sample:
                drawn.append(flow_pb2.SampledToken(sequence_id=slot.run_id, token_id=slot.draw()))
                following.append(
                    flow_pb2.StepRow(
                        sequence_id=slot.run_id, slot=row.slot, position=slot.num_tokens, num_tokens=1, sample=True
                    )
                )
        left = step.burst_steps if drawn else 0
        result = flow_pb2.StepResult(step=step.step, tokens=drawn, burst_steps=left)
        if not left:
            return result, None
        ids = [token.token_id for token in drawn]
        return result, flow_pb2.Step(step=step.step, rows=following, token_ids=ids, burst_steps=left - 1)
