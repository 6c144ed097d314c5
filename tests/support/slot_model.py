"""A model for pipelines that tests play by frames: it draws tokens from nothing but what the slots of a pipeline were fed.

A token depends on every token fed before it, so one that was lost, doubled or wrong changes all that follow, and a sequence
that goes on elsewhere has the same text only if prompt and answer were fed again as they were.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile

from shoal.kv import BLOCK_TOKENS
from shoal.v1 import flow_pb2

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 10, 80
_SEED, _FACTOR, _MODULUS = 7, 31, 65521


@dataclass(slots=True)
class _Slot:
    """The run that holds a slot, how many tokens it fed, and what remains of them: at the ends of blocks, and now."""

    run_id: int
    num_tokens: int = 0
    state: int = _SEED
    block_states: list[int] = field(default_factory=list)

    def feed(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            self.num_tokens += 1
            self.state = (self.state * _FACTOR + token_id) % _MODULUS
            if self.num_tokens % BLOCK_TOKENS == 0:
                self.block_states.append(self.state)

    def fill(self, block_states: Seq[int]) -> None:
        """Hold these blocks and nothing else."""
        self.block_states = list(block_states)
        self.num_tokens = len(block_states) * BLOCK_TOKENS
        self.state = block_states[-1] if block_states else _SEED

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
    """The slots of a pipeline, by the frames that went through all its stages; and in `kept` the blocks by their names.

    max_blocks: no more of a prompt are restored than that, whatever is kept.
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self._names: dict[int, Seq[bytes]] = {}
        self.kept: dict[bytes, int] = {}
        self.max_blocks = 1000

    def cancel(self, cancel: flow_pb2.Cancel) -> None:
        for ref in cancel.sequences:
            assert self._slots.pop(ref.slot).run_id == ref.sequence_id, "another run holds the slot"

    def restore(self, restore: flow_pb2.Restore) -> flow_pb2.Restored:
        """Take the slot and fill it; it may hold more blocks than are reported."""
        assert restore.slot not in self._slots, "the slot was not cancelled before it was used again"
        slot = self._slots[restore.slot] = _Slot(restore.sequence_id)
        slot.fill([self.kept[name] for name in takewhile(self.kept.__contains__, restore.block_hashes)])
        num_blocks = min(len(slot.block_states), self.max_blocks)
        blocks = flow_pb2.RestoredBlocks(num_blocks=num_blocks, codec="f32" if num_blocks else "", is_exact=True)
        return flow_pb2.Restored(sequence_id=restore.sequence_id, restored=blocks)

    def forget(self, forget: flow_pb2.ForgetBlocks) -> None:
        for name in forget.block_hashes:
            self.kept.pop(name, None)

    def _start(self, row: flow_pb2.StepRow) -> None:
        """Take the slot for a run, or what a restore has filled from the row's position on."""
        slot = self._slots.setdefault(row.slot, _Slot(row.sequence_id))
        assert slot.run_id == row.sequence_id, "the slot was not cancelled before it was used again"
        assert row.position % BLOCK_TOKENS == 0, "a run does not start at a block"
        assert row.position <= slot.num_tokens, "a run starts behind what was restored"
        slot.fill(slot.block_states[: row.position // BLOCK_TOKENS])
        self._names[row.slot] = list(row.start.block_hashes)

    def step(self, step: flow_pb2.Step) -> tuple[flow_pb2.StepResult, flow_pb2.Step | None]:
        """What the last stage reports of a step, and within a burst the one that it feeds back to the first stage."""
        token_ids, drawn, following = list(step.token_ids), [], []
        for row in step.rows:
            fed, token_ids = token_ids[: row.num_tokens], token_ids[row.num_tokens :]
            if row.HasField("start"):
                self._start(row)
            slot = self._slots.get(row.slot)
            if slot is None or slot.run_id != row.sequence_id:
                continue
            assert row.position == slot.num_tokens, "a token was fed twice, or not at all"
            slot.feed(fed)
            self.kept |= dict(zip(self._names[row.slot], slot.block_states, strict=False))
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
