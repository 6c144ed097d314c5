"""When requests are due in an open loop: Poisson, burstier or steadier, constant; from a seed.

Decides nothing but times in seconds after the start of a run, rising, in whole microseconds: the last bits of a logarithm
differ between machines, and must not make schedules differ. Knows neither what is asked nor any clock. Called by `scenarios`
and `traces`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from loadtest.seeds import Purpose, generator
from shoal.errors import ConfigError

POISSON = 1.0
CONSTANT = math.inf

# As many as a run of days has; more is a mistake in a rate or a duration, and would fill the memory.
MAX_REQUESTS = 1_000_000

_DECIMALS = 6
# Gaps that are drawn at once while it is not known how many a duration needs.
_CHUNK = 1024


def make_arrivals(
    rate_per_s: float,
    *,
    seed: int,
    burstiness: float = POISSON,
    num_requests: int | None = None,
    duration_s: float | None = None,
) -> tuple[float, ...]:
    """Draw the times of a number of arrivals, or of those before a duration has passed; give one of the two.

    Gaps are gamma distributed with mean 1 / rate_per_s and shape burstiness: 1 is Poisson, less comes in bursts, more is
    steadier, infinite is constant. Fewer arrivals of the same seed are the first of more; a rate stretches the schedule
    and does not draw it anew. Raises ConfigError for values out of range.
    Source: `vllm bench serve --burstiness`.
    """
    _check(rate_per_s, burstiness, num_requests, duration_s)
    end = math.inf if duration_s is None else duration_s * rate_per_s
    gaps = _unit_gaps(burstiness, seed, MAX_REQUESTS + 1 if num_requests is None else num_requests, end)
    times = np.round(np.cumsum(gaps) / rate_per_s, _DECIMALS)
    kept = times if duration_s is None else times[times < duration_s]
    if len(kept) > MAX_REQUESTS:
        raise ConfigError(
            f"{rate_per_s} requests per second for {duration_s} s are more than {MAX_REQUESTS} requests; lower one of "
            "the two",
            field="duration_s",
        )
    return tuple(kept.tolist())


def _unit_gaps(burstiness: float, seed: int, most: int, end: float) -> npt.NDArray[np.float64]:
    """Gaps of mean 1 until there are `most`, or their sum is past `end`."""
    rng = generator(seed, Purpose.ARRIVALS)
    chunks: list[npt.NDArray[np.float64]] = []
    num_drawn, reached = 0, 0.0
    while num_drawn < most and reached < end:
        size = min(_CHUNK, most - num_drawn)
        chunk = np.ones(size) if burstiness == CONSTANT else rng.standard_gamma(burstiness, size) / burstiness
        chunks.append(chunk)
        num_drawn += size
        reached += float(chunk.sum())
    return np.concatenate(chunks)


def _check(rate_per_s: float, burstiness: float, num_requests: int | None, duration_s: float | None) -> None:
    if (num_requests is None) == (duration_s is None):
        raise ConfigError("give a number of requests or a duration, one of the two", field="num_requests")
    checks = (
        ("rate_per_s", rate_per_s, 0.0 < rate_per_s < math.inf, "a number above 0"),
        ("burstiness", burstiness, burstiness > 0.0, "above 0; 1 is Poisson, less is burstier, inf is constant"),
        (
            "num_requests",
            num_requests,
            num_requests is None or 1 <= num_requests <= MAX_REQUESTS,
            f"a whole number from 1 to {MAX_REQUESTS}",
        ),
        ("duration_s", duration_s, duration_s is None or 0.0 < duration_s < math.inf, "a number of seconds above 0"),
    )
    for name, value, is_valid, allowed in checks:
        if not is_valid:
            raise ConfigError(f"{name} = {value} is not allowed; it must be {allowed}", field=name)
