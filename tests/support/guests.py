"""Sequences driven through a chain of shards, alone or together, in the ways that must not change a bit of what they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.shards import Floats, ShardChain
from worker.shard import ShardRow


def continue_greedily(
    chain: ShardChain, token_ids: Sequence[int], steps: int, *, slot: int = 0, chunk: int = 64
) -> Floats:
    """The logits [steps, V] of a sequence that is alone: after its prompt, then after each token chosen."""
    found = [chain.prefill(token_ids, slot=slot, chunk=chunk)]
    for position in range(len(token_ids), len(token_ids) + steps - 1):
        found.append(chain.decode(int(found[-1].argmax()), position, slot=slot))
    return np.stack(found)


@dataclass
class Guest:
    """A sequence of a mixed run: it arrives at a step, and its prompt is taken in chunks."""

    slot: int
    token_ids: list[int]
    arrives: int
    chunk: int
    position: int = 0
    logits: list[Floats] = field(default_factory=list)

    def next_tokens(self, chain: ShardChain) -> list[int]:
        if self.position < len(self.token_ids):
            return self.token_ids[self.position : self.position + chain.before_border(self.chunk, self.position)]
        return [int(self.logits[-1].argmax())]


def run_together(chain: ShardChain, guests: Sequence[Guest], steps: int) -> None:
    """Run all guests that have arrived in each step, prompts and answers mixed."""
    for step in range(steps):
        present = [guest for guest in guests if guest.arrives <= step]
        pieces = [guest.next_tokens(chain) for guest in present]
        ends = [guest.position + len(piece) for guest, piece in zip(present, pieces, strict=True)]
        wants = [end >= len(guest.token_ids) for guest, end in zip(present, ends, strict=True)]
        rows = [
            ShardRow(guest.slot, guest.position, len(piece), want)
            for guest, piece, want in zip(present, pieces, wants, strict=True)
        ]
        logits = iter(chain.run(rows, [token for piece in pieces for token in piece]))
        for guest, end, want in zip(present, ends, wants, strict=True):
            guest.position = end
            if want:
                guest.logits.append(next(logits))
