"""Rotary angles as the papers and reference programs state them, pair by pair, for the numpy reference to judge by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Angles:
    """rates: radians a position of each pair, [D / 2]. magnitude: by which cos and sin are multiplied."""

    rates: NDArray[np.float64]
    magnitude: float = 1.0


def plain(head_dim: int, base: float) -> Angles:
    return Angles(base ** (-np.arange(0, head_dim, 2) / head_dim))


def linear(angles: Angles, factor: float) -> Angles:
    return Angles(angles.rates / factor)


def llama3(angles: Angles, *, scaling: dict[str, Any]) -> Angles:
    """Source: meta-llama's model.py, apply_scaling: by wavelengths, one pair after the other."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    rates = []
    for rate in angles.rates:
        wavelength = 2 * math.pi / rate
        if wavelength < context / high:
            rates.append(rate)
        elif wavelength > context / low:
            rates.append(rate / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            rates.append((1 - smooth) * rate / factor + smooth * rate)
    return Angles(np.array(rates))


def yarn(angles: Angles, *, base: float, scaling: dict[str, Any]) -> Angles:
    """Source: arXiv 2309.00071, 3.2 and 3.4, with the ends of the ramp at whole pairs, for its recommended 1 and 32."""
    half, factor, context = len(angles.rates), scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        """The pair that turns so many times over the context."""
        return half * math.log(context / (2 * math.pi * turns)) / math.log(base)

    first, last = max(0, math.floor(pair_of(32))), min(2 * half - 1, math.ceil(pair_of(1)))
    rates = []
    for pair, rate in enumerate(angles.rates):
        stretched = min(1.0, max(0.0, (pair - first) / (last - first)))
        rates.append(rate / factor * stretched + rate * (1 - stretched))
    return Angles(np.array(rates), 0.1 * math.log(factor) + 1)
