"""What a pass takes by rows, prompt tokens and tokens held: the figures behind `SchedulerLimits.work_of`.

One shard of the default model's first layers, one thread, no processes beside this one. Prints a markdown table; run it with
`python -m tests.bench.attention`.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

from modelstore.graph import build_shard_graph
from modelstore.pull import pull
from modelstore.store import ModelStore
from shoal.config import OrchestratorConfig, default_home
from shoal.types import LayerRange
from tests.support.shards import make_shape
from worker.shard import Shard, ShardBatch, ShardRow, open_shard

LAYERS = LayerRange(0, 18)
NUM_SLOTS, SLOT_TOKENS = 4, 2048
FILL_TOKENS = 64
# Tokens held, the most first: slots are filled once and rolled back from then on.
POSITIONS = (1800, 1024, 512, 64)
ROWS = (0, 2)
CHUNKS = (0, 2, 4, 8, 16, 32, 64)
REPEATS = 9


def measure(shard: Shard, num_rows: int, num_chunk: int, position: int) -> float:
    """Median seconds of a pass: decode rows, and a chunk in a slot of its own, all at this position."""
    rows = [ShardRow(slot, position, 1, wants_logits=False) for slot in range(num_rows)]
    if num_chunk:
        rows.append(ShardRow(num_rows, position, num_chunk, wants_logits=False))
    batch = ShardBatch(tuple(rows), np.ones(num_rows + num_chunk, np.int64))
    took_s = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        shard.run(batch)
        took_s.append(time.perf_counter() - started)
    return statistics.median(took_s)


def open_filled(home: Path, model: str, *, num_slots: int) -> Shard:
    """Open a shard of a model that `home` has, with slots that hold tokens up to the largest of POSITIONS."""
    store = ModelStore(home)
    manifest = store.open(model)
    shape = make_shape(manifest, LAYERS, num_slots=num_slots, slot_tokens=SLOT_TOKENS)
    shard = open_shard(shape, build_shard_graph(manifest, LAYERS), store.root / "blobs")
    for start in range(0, POSITIONS[0] + FILL_TOKENS, FILL_TOKENS):
        for slot in range(num_slots):
            row = ShardRow(slot, start, FILL_TOKENS, wants_logits=False)
            shard.run(ShardBatch((row,), np.ones(FILL_TOKENS, np.int64)))
    return shard


def main() -> None:
    home, model = default_home(), OrchestratorConfig().model
    store = ModelStore(home)
    pull(store, model)
    config = store.open(model).config
    shard = open_filled(home, model, num_slots=NUM_SLOTS)
    lines = [
        f"Milliseconds of a pass through {len(LAYERS)} layers of {model}, one thread, by tokens held; attention counts as "
        f"much as the rest of a layer at {config.attention_tokens:.0f}.",
        "",
        "| decode rows | prompt tokens |" + "".join(f" {position} |" for position in POSITIONS),
        "|---|---|" + "---|" * len(POSITIONS),
    ]
    shapes = [(num_rows, num_chunk) for num_rows in ROWS for num_chunk in CHUNKS if num_rows or num_chunk]
    taken = {(*one, position): measure(shard, *one, position) for position in POSITIONS for one in shapes}
    for num_rows, num_chunk in shapes:
        cells = (f" {1e3 * taken[num_rows, num_chunk, position]:.1f} |" for position in POSITIONS)
        lines.append(f"| {num_rows} | {num_chunk} |" + "".join(cells))
    sys.stdout.write("\n".join(lines) + "\n")
    shard.close()


if __name__ == "__main__":
    main()
