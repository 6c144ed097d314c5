"""Makes all random numbers of the load harness from one seed: an independent stream of them for each purpose.

Decides which generator is used (PCG64) and that purposes do not disturb each other: another rate changes the arrivals and
leaves lengths and texts as they were. Knows nothing of what is drawn. Called by whatever makes plans and traces.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from shoal.errors import ConfigError

MAX_SEED = 2**64 - 1


class Purpose(Enum):
    """What numbers are drawn for; a value must never change its meaning, or old seeds give other plans."""

    ARRIVALS = 1
    STREAM_ORDER = 2
    LENGTHS = 3
    TEXT = 4
    TRACE = 5


def generator(seed: int, purpose: Purpose, *keys: int) -> np.random.Generator:
    """Make the generator of a purpose; keys tell apart several of one purpose. Raises ConfigError for no valid seed."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed = {seed} is not allowed; it must be a whole number from 0 to {MAX_SEED}", field="seed")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose.value, *keys))))
