"""How precisely a block is kept, by policy, by where it stands and by how its device fares."""

from __future__ import annotations

import itertools

import pytest

from shoal.types import DeviceLimits, KVPolicy, Telemetry
from worker.kv.codec import KVCodec
from worker.kv.policy import CODECS, Standing, Strain, coarser, host_codec, is_hot, lower_codec

STANDINGS = [Standing(*flags) for flags in itertools.product([False, True], repeat=3)]
STRAINS = [Strain(*flags) for flags in itertools.product([False, True], repeat=2)]


@pytest.mark.parametrize("standing", STANDINGS, ids=str)
@pytest.mark.parametrize("strain", STRAINS, ids=str)
def test_the_exact_policy_never_loses_a_bit(standing: Standing, strain: Strain) -> None:
    assert host_codec(KVPolicy.EXACT, standing, strain) is KVCodec.LOSSLESS
    assert lower_codec(KVPolicy.EXACT, standing, strain) is KVCodec.LOSSLESS


@pytest.mark.parametrize("policy", [KVPolicy.BALANCED, KVPolicy.COMPACT])
@pytest.mark.parametrize("standing", [one for one in STANDINGS if one.is_first or one.is_newest], ids=str)
@pytest.mark.parametrize("strain", STRAINS, ids=str)
def test_attention_sinks_and_the_newest_tokens_stay_exact(policy: KVPolicy, standing: Standing, strain: Strain) -> None:
    assert host_codec(policy, standing, strain) is KVCodec.LOSSLESS
    assert lower_codec(policy, standing, strain) is KVCodec.LOSSLESS


@pytest.mark.parametrize(
    ("standing", "strain", "codec"),
    [
        (Standing(), Strain(), KVCodec.LOSSLESS),
        (Standing(is_cold=True), Strain(), KVCodec.INT8),
        (Standing(), Strain(is_full=True), KVCodec.INT8),
        (Standing(), Strain(is_hot=True), KVCodec.INT8),
        (Standing(), Strain(is_full=True, is_hot=True), KVCodec.INT8),
        (Standing(is_cold=True), Strain(is_full=True), KVCodec.K4V4),
        (Standing(is_cold=True), Strain(is_hot=True), KVCodec.K4V4),
    ],
    ids=str,
)
def test_the_balanced_policy_gets_coarser_with_coldness_and_once_more_with_strain(
    standing: Standing, strain: Strain, codec: KVCodec
) -> None:
    assert host_codec(KVPolicy.BALANCED, standing, strain) is codec


@pytest.mark.parametrize("strain", STRAINS, ids=str)
def test_the_compact_policy_keeps_four_bits_whatever_happens(strain: Strain) -> None:
    assert host_codec(KVPolicy.COMPACT, Standing(), strain) is KVCodec.K4V4
    assert lower_codec(KVPolicy.COMPACT, Standing(), strain) is KVCodec.K4V4


def test_below_memory_a_block_counts_as_cold_and_full_memory_does_not_matter() -> None:
    assert lower_codec(KVPolicy.BALANCED, Standing(), Strain(is_full=True)) is KVCodec.INT8
    assert lower_codec(KVPolicy.BALANCED, Standing(), Strain(is_hot=True)) is KVCodec.K4V4


def test_the_coarser_of_two_codecs_has_fewer_bits() -> None:
    for finer, rougher in itertools.combinations(CODECS, 2):
        assert coarser(finer, rougher) is coarser(rougher, finer) is rougher
        assert coarser(finer, finer) is finer


@pytest.mark.parametrize(
    ("telemetry", "hot"),
    [
        (Telemetry(), False),
        (Telemetry(temperature_c=69.9), False),
        (Telemetry(temperature_c=70.0), True),
        (Telemetry(clock=0.99), True),
    ],
    ids=str,
)
def test_a_device_is_hot_from_its_limit_on_or_when_its_clock_falls(telemetry: Telemetry, hot: bool) -> None:
    assert is_hot(DeviceLimits(hot_c=70.0), telemetry) is hot


def test_a_device_without_a_limit_is_never_too_warm() -> None:
    assert not is_hot(DeviceLimits(), Telemetry(temperature_c=120.0))
