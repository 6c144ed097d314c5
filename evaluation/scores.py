"""How well logits predict a text, and how far two sets of logits are from each other.

Pure arithmetic on arrays of a few rows; knows neither models nor texts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Of each predicted token [P].

    losses: -log of its probability, in nats. divergences: KL of the reference's distribution from this one. agrees:
    whether both have the same first choice.
    """

    losses: Doubles
    divergences: Doubles
    agrees: NDArray[np.bool_]

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    @property
    def divergence(self) -> float:
        return float(self.divergences.mean())

    @property
    def agreement(self) -> float:
        return float(self.agrees.mean())


@dataclass(frozen=True, slots=True)
class Loss:
    """How much a perplexity is above the reference's, as a share of it; error: standard error, of paired tokens."""

    share: float
    error: float


def loss_of(losses: Doubles, reference: Doubles) -> Loss:
    """Compare what the same tokens cost in nats."""
    differences = losses - reference
    share = math.expm1(float(differences.mean()))
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return Loss(share, (1 + share) * error)


def log_probabilities(logits: Floats) -> Floats:
    """Of logits [R, V]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    result: Floats = shifted - log_sums.astype(np.float32)
    return result


def token_losses(log_p: Floats, targets: NDArray[np.int64]) -> Doubles:
    """Of log probabilities [R, V] and the tokens [R] that came."""
    losses: Doubles = np.negative(log_p[np.arange(len(targets)), targets], dtype=np.float64)
    return losses


def divergences(log_p: Floats, log_q: Floats) -> Doubles:
    """KL(p || q) of each row, never below 0."""
    terms = np.exp(log_p) * (log_p - log_q)
    sums: Doubles = terms.sum(axis=1, dtype=np.float64)
    return np.maximum(sums, 0.0)
