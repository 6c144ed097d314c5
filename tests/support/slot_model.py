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
    """The run that holds a slot, and what remained of all it fed after each token; of tokens amid a block it may be lost."""

    run_id: int
    states: list[int | None] = field(default_factory=list)
    trail_id: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.states)

    @property
    def state(self) -> int:
        state = self.states[-1] if self.states else _SEED
        assert state is not None
        return state

    @property
    def block_states(self) -> list[int | None]:
        return self.states[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]

    def feed(self, token_ids: Seq[int]) -> None:
        for token_id in token_ids:
            self.states.append((self.state * _FACTOR + token_id) % _MODULUS)

    def fill(self, block_states: Seq[int]) -> None:
        """Hold these blocks and nothing else."""
        self.states = []
        for state in block_states:
            self.states += [*[None] * (BLOCK_TOKENS - 1), state]

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

    max_blocks: no more of a prompt are restored than that, whatever is kept. trails: by their ids, what slots held last;
    trail_lag: tokens by which a restored trail is shorter.
    """

    def __init__(self) -> None:
        self.trails: dict[bytes, list[int | None]] = {}
        self.trail_lag = 0
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
        trail = self.trails.get(restore.trail_id, [])
        if restore.trail_id and len(trail) - self.trail_lag > slot.num_tokens:
            slot.states = trail[: min(len(trail) - self.trail_lag, restore.num_tokens)]
        num_blocks = min(len(slot.block_states), self.max_blocks)
        blocks = flow_pb2.RestoredBlocks(
            num_blocks=num_blocks,
            codec="f32" if num_blocks else "",
            is_exact=True,
            num_tokens=slot.num_tokens if num_blocks == len(slot.block_states) else num_blocks * BLOCK_TOKENS,
        )
        return flow_pb2.Restored(sequence_id=restore.sequence_id, restored=blocks)

    def forget(self, forget: flow_pb2.ForgetBlocks) -> None:
        for name in forget.block_hashes:
            self.kept.pop(name, None)

    def _start(self, row: flow_pb2.StepRow) -> None:
        """Take the slot for a run, or what a restore has filled from the row's position on."""
        slot = self._slots.setdefault(row.slot, _Slot(row.sequence_id))
        assert slot.run_id == row.sequence_id, "the slot was not cancelled before it was used again"
        assert row.position <= slot.num_tokens, "a run starts behind what was restored"
        is_decode = row.num_tokens == 1 and row.sample
        assert row.position % BLOCK_TOKENS == 0 or is_decode, "a prompt does not start at a block"
        slot.states = slot.states[: row.position]
        slot.trail_id = row.start.trail_id
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
            if slot.trail_id:
                self.trails[slot.trail_id] = list(slot.states)
            self.kept |= dict(zip(self._names[row.slot], _known(slot.block_states), strict=False))
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


def _known(states: Seq[int | None]) -> list[int]:
    assert None not in states, "a block is kept that was never computed"
    return [state for state in states if state is not None]
