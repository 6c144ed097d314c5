"""Stages modelled only by what their slots hold: enough to see whether a scheduler keeps the promises they rely on.

A token is drawn from a hash of all tokens in the slot. So a prompt cut wrongly, or an answer computed again from other
tokens than before, shows as another text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile

from orchestrator.core.batch import Batch, BatchRow, EndedSequence, SampledId
from orchestrator.core.restores import Restore
from orchestrator.core.sequence import RestoredPrefix, RunId, Sequence
from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import SlotId
from tests.support.builders import STOP_ID

VOCABULARY = 1000
# One token in so many ends an answer.
STOP_EVERY = 16


def draw(tokens: Seq[int]) -> int:
    """The token that follows these."""
    number = hash(tuple(tokens))
    return STOP_ID if number % STOP_EVERY == 0 else STOP_ID + 1 + number // STOP_EVERY % VOCABULARY


def answer_of(sequence: Sequence) -> list[int]:
    """The whole answer, as it must come whatever happens meanwhile."""
    answer: list[int] = []
    while len(answer) < sequence.max_tokens and not (answer and answer[-1] in sequence.stop_ids):
        answer.append(draw([*sequence.prompt_token_ids, *answer]))
    return answer


@dataclass
class ModelStages:
    """What the slots of all stages hold: run and tokens, in the order frames reach them; and blocks, by their names."""

    owners: dict[SlotId, RunId] = field(default_factory=dict)
    tokens: dict[SlotId, list[int]] = field(default_factory=dict)
    names: dict[SlotId, tuple[BlockHash, ...]] = field(default_factory=dict)
    kept: dict[BlockHash, list[int]] = field(default_factory=dict)
    trails: dict[bytes, list[int]] = field(default_factory=dict)

    def cancel(self, ended: Seq[EndedSequence]) -> None:
        for one in ended:
            assert self.owners.pop(one.slot) == one.run_id
            del self.tokens[one.slot]
            self.names.pop(one.slot, None)

    def restore(self, restore: Restore) -> RestoredPrefix:
        """Fill a slot with as many leading blocks as are kept, and with what the trail goes on with."""
        assert restore.slot not in self.owners, f"slot {restore.slot} is taken"
        kept = list(takewhile(lambda one: one in self.kept, restore.block_hashes))
        self.owners[restore.slot] = restore.run_id
        self.tokens[restore.slot] = [token_id for one in kept for token_id in self.kept[one]]
        trail = self.trails.get(restore.trail_id, [])[: restore.num_tokens]
        if len(kept) == len(restore.block_hashes) and len(trail) > len(self.tokens[restore.slot]):
            self.tokens[restore.slot] = list(trail)
        return RestoredPrefix(len(kept), codec="f32" if kept else "", num_tokens=len(self.tokens[restore.slot]))

    def run(self, batch: Batch, find: Callable[[RunId], Sequence | None] = lambda _: None) -> list[SampledId]:
        """Compute a batch as it was sent, and draw its tokens; `find`: whose run it is, for the names of its blocks."""
        for row in batch.rows:
            if row.is_start:
                self._start(row, find(row.run_id))
            assert self.owners[row.slot] == row.run_id, f"slot {row.slot} is another run's"
            assert len(self.tokens[row.slot]) == row.position
            assert len(row.token_ids) == row.num_tokens
            self.tokens[row.slot] += row.token_ids
            self._keep(row)
            sequence = find(row.run_id)
            if sequence is not None and sequence.trail_id:
                self.trails[sequence.trail_id] = list(self.tokens[row.slot])
        return [self._draw(row) for row in batch.rows if row.is_sampled]

    def _start(self, row: BatchRow, sequence: Sequence | None) -> None:
        """Take the slot, unless a restore did, and forget what is in it from the row's position on."""
        if row.slot not in self.owners:
            self.owners[row.slot], self.tokens[row.slot] = row.run_id, []
        del self.tokens[row.slot][row.position :]
        self.names[row.slot] = () if sequence is None else sequence.block_hashes

    def _keep(self, row: BatchRow) -> None:
        """Keep the blocks that a row has completed, if they have names."""
        names = self.names.get(row.slot, ())
        for index in range(
            row.position // BLOCK_TOKENS, min((row.position + row.num_tokens) // BLOCK_TOKENS, len(names))
        ):
            self.kept[names[index]] = self.tokens[row.slot][index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]

    def go_on(self, batch: Batch, drawn: Seq[SampledId], stop_ids: Mapping[RunId, frozenset[int]]) -> list[SampledId]:
        """The next step of a burst: rows that were not cancelled and have not drawn a stop token feed what they drew."""
        token_ids = {one.run_id: one.token_id for one in drawn if one.token_id not in stop_ids.get(one.run_id, ())}
        rows = [row for row in batch.rows if row.run_id in token_ids and self.owners.get(row.slot) == row.run_id]
        for row in rows:
            self.tokens[row.slot].append(token_ids[row.run_id])
        return [self._draw(row) for row in rows]

    def _draw(self, row: BatchRow) -> SampledId:
        return SampledId(row.run_id, draw(self.tokens[row.slot]))
