"""Says what comes of prompts that a scheduler cuts in several ways, on a model whose heads have 256 values.

A program, so that the C library of its process can be another than the tests': `python -m tests.support.wide_heads FOLDER
BORDER` prints, for each prompt, a digest of the logits after each way of cutting it. Run by the test of such heads.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.scheduler import Scheduler
from tests.support.architectures import options_of
from tests.support.builders import make_limits, make_sequence, sampled_ids
from tests.support.shards import Floats, ShardChain, make_tiny_model, make_tokens, open_chain
from worker.shard import ShardRow

VARIANT = "gemma3 of wide heads"
# With the sixth, one that sees all of the prompt, and one after it.
NUM_LAYERS = 7
CONTEXT_TOKENS = 512
# A token alone behind a border, a prompt that ends inside a block of keys on each of the processors, and a short one.
PROMPTS = (289, 300, 70)
# Prompt tokens of a step: the most there are, and what decode rows or gaps may leave of them.
ROOMS = (64, 32, 20, 11, 8)
STEPS = 3


def chunk_sizes(limits: SchedulerLimits, num_prompt: int) -> list[int]:
    """How a scheduler cuts a prompt that is alone."""
    scheduler = Scheduler(limits)
    scheduler.submit(make_sequence(num_prompt=num_prompt), 0.0)
    sizes: list[int] = []
    while sum(sizes) < num_prompt:
        batch = scheduler.schedule(0.0)
        assert batch is not None
        sizes.append(batch.num_tokens)
        scheduler.commit(batch.step, sampled_ids(batch), 0, 0.0)
    return sizes


def logits_of(chain: ShardChain, token_ids: list[int], sizes: list[int], neighbour: int) -> Floats:
    """The logits [STEPS, V] of a prompt in chunks and of an answer, beside a decode row for each token of a neighbour."""
    position, found = 0, list[Floats]()
    for number in range(len(sizes) + STEPS - 1):
        piece = token_ids[position : position + sizes[number]] if number < len(sizes) else [int(found[-1].argmax())]
        wants_logits = position + len(piece) >= len(token_ids)
        rows, values = [ShardRow(1, position, len(piece), wants_logits)], piece
        if neighbour:
            rows, values = [ShardRow(0, number, 1, wants_logits=True), *rows], [neighbour, *piece]
        logits = chain.run(rows, values)
        position += len(piece)
        if wants_logits:
            found.append(logits[-1])
    for slot in (0, 1):
        chain.release(slot)
    return np.stack(found)


def main(folder: Path, border: int) -> None:
    options = {**options_of(VARIANT), "num_layers": NUM_LAYERS, "context": CONTEXT_TOKENS}
    model = make_tiny_model(folder, weight_type="F32", layout="hf", precision="float32", **options)
    chain = open_chain(model.manifest, model.blob_directory, num_slots=2, slot_tokens=CONTEXT_TOKENS)
    digests: dict[int, list[str]] = {}
    for num_prompt in PROMPTS:
        token_ids = make_tokens(num_prompt, model.manifest.config.vocab_size, seed=num_prompt)
        for room in ROOMS:
            limits = make_limits(
                kv_tokens=CONTEXT_TOKENS, context_tokens=CONTEXT_TOKENS, chunk_tokens=room, chunk_border=border
            )
            sizes = chunk_sizes(limits, num_prompt)
            for neighbour in (0, 5):
                logits = logits_of(chain, token_ids, sizes, neighbour)
                digests.setdefault(num_prompt, []).append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])
    json.dump(digests, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
