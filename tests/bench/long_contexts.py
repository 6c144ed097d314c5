"""How much slower decode gets as the context grows, and how much of a step is attention then: two tables, no figure.

The rate is that of one stream on two stages. The share is measured in one shard of this process, by a line through the times
of a step over the tokens held: what rises with them is attention. Called by `run`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.bench import attention
from tests.bench.context import Bench
from tests.bench.fleet import System

# Middles of what is measured; the last ends at the end of the context.
CONTEXTS = (128, 512, 1024, 2048)
ANSWER_TOKENS = 64
TITLE = "Decode of one stream by context"


def decode_by_context(bench: Bench) -> None:
    """Add the table of CONTEXTS, and a note on the two ends."""
    with bench.two_stages("long-contexts") as system:
        rates = {context: _rate(bench, system, context) for context in CONTEXTS}
    fixed_s, token_s = _line(bench.home_of_models, bench.model)
    first, last = CONTEXTS[0], CONTEXTS[-1]
    rows: list[dict[str, object]] = []
    for context, rate in rates.items():
        attention_s = token_s * context
        rows.append(
            {
                "context": context,
                "tok/s": f"{rate:.1f}",
                "slower than at 128": f"{rates[first] / rate - 1:.0%}",
                "attention, of a step": f"{attention_s / (fixed_s + attention_s):.0%}",
            }
        )
    bench.tables[TITLE] = rows
    share = rows[-1]["attention, of a step"]
    bench.notes.append(
        f"Decode from context {first} to {last}: {rates[first]:.1f} to {rates[last]:.1f} tok/s, a token takes "
        f"{rates[first] / rates[last]:.2f} times as long; at {last}, {share} of a step is attention."
    )
    bench.say(bench.notes[-1])


def _rate(bench: Bench, system: System, context: int) -> float:
    """The better of some runs: other load only ever slows them."""
    prompt = bench.prompt(min(context - ANSWER_TOKENS // 2, CONTEXTS[-1] - ANSWER_TOKENS))
    runs = 1 if bench.is_quick else 3
    return max(system.ask([prompt], ANSWER_TOKENS).streams[0].tokens_per_s(1) for _ in range(runs))


def _line(home: Path, model: str) -> tuple[float, float]:
    """Seconds of a step of one row without tokens held, and of each token held."""
    shard = attention.open_filled(home, model, num_slots=1)
    try:
        times_s = [attention.measure(shard, 1, 0, position) for position in attention.POSITIONS]
    finally:
        shard.close()
    slope, fixed_s = np.polyfit(attention.POSITIONS, times_s, 1)
    return float(fixed_s), float(slope)
