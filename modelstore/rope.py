"""The rotary tables of a model: cos and sin of each position's angles, with what stretches a context already in them.

Decides the frequencies by base and `RopeScaling`. Knows no blobs; `packing` writes what it makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from modelstore.manifest import ModelConfig, RopeScaling

Doubles = NDArray[np.float64]
# Angles at a time take about this much.
CHUNK_BYTES = 2 << 20


def frequencies(head_dim: int, base: float, scaling: RopeScaling, factors: Doubles | None = None) -> Doubles:
    """Radians a position of each pair, [D / 2]. factors: what the file divides each by, of scaling "factors"."""
    half = head_dim // 2
    plain: Doubles = base ** (-np.arange(half, dtype=np.float64) / half)
    match scaling.kind:
        case "none":
            return plain
        case "linear":
            return plain / scaling.factor
        case "factors":
            assert factors is not None, "a model with scaling by factors has them"
            return plain / factors
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, head_dim, base, scaling)
    raise AssertionError(f"rotary scaling {scaling.kind} passed the reader")


def table(
    config: ModelConfig, step_frequencies: Doubles, magnitude: float, *, is_sine: bool
) -> Iterator[NDArray[np.float32]]:
    """cos or sin of position x frequency, times magnitude, float32 [context, D / 2], in pieces of rows."""
    step = max(1, CHUNK_BYTES // (8 * len(step_frequencies)))
    function = np.sin if is_sine else np.cos
    for start in range(0, config.context_tokens, step):
        positions = np.arange(start, min(start + step, config.context_tokens), dtype=np.float64)
        values = function(np.outer(positions, step_frequencies))
        yield (values if magnitude == 1.0 else values * magnitude).astype(np.float32)


def _llama3(plain: Doubles, scaling: RopeScaling) -> Doubles:
    """Source: Llama 3.1's reference code: slow pairs are divided by the factor, fast ones kept, between them a ramp."""
    turns = scaling.original_context_tokens * plain / (2 * math.pi)
    keep = np.clip((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor), 0, 1)
    result: Doubles = plain * (keep + (1 - keep) / scaling.factor)
    return result


def _yarn(plain: Doubles, head_dim: int, base: float, scaling: RopeScaling) -> Doubles:
    """Source: arXiv 2309.00071, 3.2, with whole pairs as ends of the ramp, as transformers and llama.cpp have it."""
    fast, slow = (
        head_dim * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.high_factor, scaling.low_factor)
    )
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), head_dim - 1)
    ramp = np.clip((np.arange(len(plain)) - first) / max(last - first, 0.001), 0, 1)
    result: Doubles = plain * ((1 - ramp) + ramp / scaling.factor)
    return result
