"""Distributions of whole numbers: lengths of prompts and answers, numbers of turns.

Decides nothing; draws from a generator that is given. Called by `workloads`, `traces` and `scenarios`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np


class Shape(Enum):
    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Amount:
    """A distribution of whole numbers; minimum and maximum are among them.

    Lognormal: `median` and the deviation `sigma` of the logarithm; what falls outside the bounds becomes the bound.
    """

    shape: Shape
    minimum: int
    maximum: int
    median: float = 0.0
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator) -> int:
        match self.shape:
            case Shape.FIXED:
                return self.minimum
            case Shape.UNIFORM:
                return int(rng.integers(self.minimum, self.maximum, endpoint=True))
            case Shape.LOGNORMAL:
                drawn = round(self.median * math.exp(self.sigma * rng.standard_normal()))
                return min(max(drawn, self.minimum), self.maximum)


def fixed(number: int) -> Amount:
    return Amount(Shape.FIXED, number, number)
