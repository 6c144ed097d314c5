"""Decides how precisely a KV block is kept: in 32 bits a value, in 8 or in 4.

Pure: a device's policy, where the block stands in its prefix, and how the device fares give a codec. Precision falls with
coldness, when memory is short, and on a hot device, within the policies that allow it. Knows no tiers and no bytes; `cache`
asks before it writes a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.types import DeviceLimits, KVPolicy, Telemetry
from worker.kv.codec import KVCodec

# From fine to coarse.
CODECS = (KVCodec.LOSSLESS, KVCodec.INT8, KVCodec.K4V4)
# Longer than somebody takes to read an answer and to type the next question (assumption).
COLD_AFTER_S = 300.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a block stands.

    is_first: it begins its sequence, so it holds the attention sinks that every later token looks at (Source: StreamingLLM,
    Xiao et al. 2023). is_newest: none continues it yet. is_cold: it was not used for COLD_AFTER_S in which
    others were.
    """

    is_first: bool = False
    is_newest: bool = False
    is_cold: bool = False


@dataclass(frozen=True, slots=True)
class Strain:
    """What makes a device keep less. is_full: new blocks cost old ones their place."""

    is_full: bool = False
    is_hot: bool = False


def host_codec(policy: KVPolicy, standing: Standing, strain: Strain) -> KVCodec:
    """The codec of a block in memory."""
    if policy is KVPolicy.EXACT or standing.is_first or standing.is_newest:
        return KVCodec.LOSSLESS
    least = CODECS.index(KVCodec.K4V4) if policy is KVPolicy.COMPACT else 0
    coarseness = least + standing.is_cold + (strain.is_full or strain.is_hot)
    return CODECS[min(coarseness, len(CODECS) - 1)]


def lower_codec(policy: KVPolicy, standing: Standing, strain: Strain) -> KVCodec:
    """The codec of a block in the tier below: there it is cold, and this device's memory does not matter."""
    cold = Standing(is_first=standing.is_first, is_newest=standing.is_newest, is_cold=True)
    return host_codec(policy, cold, Strain(is_hot=strain.is_hot))


def coarser(one: KVCodec, other: KVCodec) -> KVCodec:
    return max(one, other, key=CODECS.index)


def is_hot(limits: DeviceLimits, telemetry: Telemetry) -> bool:
    """Whether heat takes some of a device's clock, or its temperature is in its profile's range for HOT."""
    is_in_range = telemetry.temperature_c is not None and 0.0 < limits.hot_c <= telemetry.temperature_c
    return is_in_range or telemetry.clock < 1.0
