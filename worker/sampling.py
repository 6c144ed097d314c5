"""Chooses the next token of a sequence from its logits, and remembers what it chose for the penalties.

Owns the order of operations: logit bias, penalties, temperature, top-k, top-p, min-p, draw. Randomness is
counter-based: the number drawn depends on seed and position only, so a sequence that is resumed, moved or batched with
others draws the same tokens. Knows no batches, slots or messages; the last stage keeps one Sampler a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InternalError
from shoal.types import SamplingParams

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

# Sorting the whole vocabulary costs milliseconds, and a model's draw almost always falls among its first few hundred
# tokens: so many are sorted first, and HEAD_GROWTH times as many whenever that was not enough.
HEAD_TOKENS = 256
HEAD_GROWTH = 8

# Below this the distribution is its maximum, and dividing by it would only overflow. Source: vLLM's sampler.
MIN_TEMPERATURE = 1e-5

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; log probabilities are of the raw logits, before bias, penalties, temperature and filters.

    logprob: None unless num_logprobs was given. top: the num_logprobs most likely tokens, most likely first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Samples one sequence.

    Invariants: `generated` is every token restored or sampled, in order; a tally counts exactly the tokens that its
    penalty applies to (repetition: prompt and generated; presence and frequency: generated).
    """

    __slots__ = ("_bias_ids", "_bias_values", "_generated", "_params", "_seen", "_used")

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int] = (), generated: Sequence[int] = ()
    ) -> None:
        """Start after the prompt and what was `generated` earlier, if this worker takes the sequence over."""
        self._params = params
        self._generated = list(generated)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.intp)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._seen = _Tally([*prompt_token_ids, *generated]) if params.repetition_penalty != 1.0 else None
        has_use_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._used = _Tally(generated) if has_use_penalty else None

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self._generated)

    def sample(self, logits: Logits, position: int) -> Sampled:
        """Choose and record the token at `position` of the sequence (counted from the first prompt token).

        Raises InternalError if a logit is not finite. Of equal logits the lowest id counts as the most likely.
        """
        _require_finite(logits, position)
        adjusted = self._adjust(logits)  # [V]
        if self._params.temperature < MIN_TEMPERATURE:
            token_id = int(adjusted.argmax())
        else:
            token_id = _draw(adjusted, self._params, draw_uniform(self._params.seed, position))
        self._record(token_id)
        return _report(logits, token_id, self._params.num_logprobs)

    def _adjust(self, logits: Logits) -> Logits:
        """Return the logits with bias and penalties: a copy, or the argument itself if there are none.

        Source: Keskar et al. 2019 (CTRL) for the repetition penalty, divided out of positive logits and multiplied into
        negative ones as Hugging Face does it; OpenAI's API for presence and frequency; vLLM for the order.
        """
        if self._seen is None and self._used is None and self._bias_ids.size == 0:
            return logits
        adjusted = logits.copy()
        adjusted[self._bias_ids] += self._bias_values
        if self._seen is not None:
            penalty = self._params.repetition_penalty
            seen = adjusted[self._seen.ids].astype(np.float64)
            penalised = np.where(seen > 0.0, seen / penalty, seen * penalty)
            # A penalty near 0 takes a logit beyond float32, and an infinite one has no distribution.
            adjusted[self._seen.ids] = np.clip(penalised, -_LARGEST, _LARGEST)
        if self._used is not None:
            adjusted[self._used.ids] -= (
                self._params.presence_penalty + self._params.frequency_penalty * self._used.counts
            )
        return adjusted

    def _record(self, token_id: int) -> None:
        self._generated.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self._used is not None:
            self._used.add(token_id)


class _Tally:
    """Distinct tokens and how often each came, as arrays that index logits.

    Invariants: ids has no token twice; counts[i] belongs to ids[i].
    """

    __slots__ = ("_row_of", "counts", "ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.ids, counts = np.unique(np.array(token_ids, dtype=np.intp), return_counts=True)
        self.counts = counts.astype(np.float32)
        self._row_of = {token_id: row for row, token_id in enumerate(self.ids.tolist())}

    def add(self, token_id: int) -> None:
        row = self._row_of.get(token_id)
        if row is not None:
            self.counts[row] += 1.0
            return
        self._row_of[token_id] = len(self.ids)
        self.ids = np.append(self.ids, token_id)
        self.counts = np.append(self.counts, np.float32(1.0))


def draw_uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, position).

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x64), as numpy implements it.
    """
    bits = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _require_finite(logits: Logits, position: int) -> None:
    if np.isfinite(logits).all():
        return
    bad = np.flatnonzero(~np.isfinite(logits))
    raise InternalError(
        f"the model gave {bad.size} logits that are NaN or infinite at position {position} (the first is "
        f"{logits[bad[0]]} for token {bad[0]}): the shard's weights or its runtime are faulty; reload the model or use "
        "another device"
    )


def _draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    """Pick a token by inverting the CDF of the kept tokens, sorted by (probability descending, id ascending).

    Every filter keeps a head of that order, so only as much of it is sorted as is needed to decide.
    """
    limit = min(params.top_k or logits.size, logits.size)
    num_head = limit if params.top_k else min(HEAD_TOKENS, limit)
    peak = logits.max()
    whole_mass = _mass(logits, peak, params.temperature) if num_head < limit else 0.0
    while True:
        head = _most_likely(logits, num_head)
        is_whole = num_head == limit
        weights = np.exp((logits[head].astype(np.float64) - float(peak)) / params.temperature)  # [head]
        cdf = np.cumsum(weights)
        total = float(cdf[-1]) if is_whole else whole_mass
        mass = _kept_mass(weights, cdf, total, is_whole, params)
        if mass is not None:
            target = min(uniform * mass, math.nextafter(mass, 0.0))
            rank = int(np.searchsorted(cdf, target, side="right"))
            if rank < head.size:
                return int(head[rank])
        num_head = min(num_head * HEAD_GROWTH, limit)


def _kept_mass(
    weights: NDArray[np.float64], cdf: NDArray[np.float64], total: float, is_whole: bool, params: SamplingParams
) -> float | None:
    """Return the weight of the tokens that top-p and min-p keep, or None if their cut lies beyond the head.

    Source: Holtzman et al. 2020 for top-p (the fewest most likely tokens that reach top_p together); Nguyen et al. 2024
    for min-p (at least min_p times as likely as the most likely). Both always keep the most likely token.
    """
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return total
    cuts = [cdf.size] if is_whole else []
    if params.top_p < 1.0:
        cuts.append(int(np.searchsorted(cdf, params.top_p * total)) + 1)
    num_likely = int(np.count_nonzero(weights >= params.min_p * weights[0]))
    if num_likely < cdf.size:
        cuts.append(num_likely)
    num_kept = min(cuts, default=cdf.size + 1)
    return float(cdf[num_kept - 1]) if num_kept <= cdf.size else None


def _most_likely(logits: Logits, count: int) -> Ids:
    """Return the ids of the `count` highest logits, highest first, the lower id first among equals."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    if count < logits.size:
        least = np.partition(logits, logits.size - count)[logits.size - count]
        # All that tie with the last place come along: argpartition would take any of them, not the lowest ids.
        ids = np.flatnonzero(logits >= least)
    else:
        ids = np.arange(logits.size)
    return _sorted_descending(logits[ids], ids)[:count]


def _sorted_descending(values: Logits, ids: Ids) -> Ids:
    """Return ids by (value descending, id ascending).

    Sorts one whole number a token, value above and id below: several times as fast as a stable argsort, and as exact.
    """
    # Adding 0 makes -0 equal to 0. A float's bits sort as an int once those below the sign of a negative are flipped.
    bits = (values + np.float32(0.0)).view(np.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (~rising).astype(np.int64) << 32 | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def _mass(logits: Logits, peak: np.float32, temperature: float = 1.0) -> float:
    """Return the sum of exp((logits - peak) / temperature).

    In single precision, ten times as fast: it is off by at most a few parts in 10^7, and the CDF is not made of it.
    """
    with np.errstate(over="ignore"):
        scaled = (logits - peak) / np.float32(temperature)  # [V]
    return float(np.exp(scaled).sum(dtype=np.float64))


def _report(logits: Logits, token_id: int, num_logprobs: int | None) -> Sampled:
    """Make the result; the log probabilities are those of the raw logits, as is vLLM's default (`raw_logprobs`)."""
    if num_logprobs is None:
        return Sampled(token_id)
    peak = logits.max()
    log_total = float(peak) + math.log(_mass(logits, peak))
    top = tuple((int(id_), float(logits[id_]) - log_total) for id_ in _most_likely(logits, num_logprobs))
    return Sampled(token_id, float(logits[token_id]) - log_total, top)
