"""Every block type is read bit for bit as the format's own package reads it, whatever the bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelstore.block_types import BLOCK_TYPES, FLOAT_TYPES, SUPPORTED_TYPES, bytes_of_row, values_of_block
from modelstore.quantize import pack_embedding, pack_linear, require_packable, to_float32
from modelstore.source import SourceTensor
from shoal.errors import BadModelFile
from tests.support.blocks import (
    BLOCKS,
    FLOATS,
    HALVES,
    Bytes,
    Floats,
    block_sizes,
    dequantized,
    make_tensor,
    packed_values,
    random_blocks,
    set_halves,
    true_values,
)

# Zeros of both signs, the smallest and largest subnormal, the smallest normal, and the largest of float16.
EXTREMES = [0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14 - 2.0**-24, 2.0**-14, 65504.0, -65504.0]


def as_tensor(raw: Bytes, type_name: str) -> SourceTensor:
    values, num_bytes = block_sizes(type_name)
    return SourceTensor("blk.3.w", type_name, (len(raw), raw.shape[1] // num_bytes * values), raw)


def assert_same_bits(found: Floats, expected: Floats) -> None:
    assert np.array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def assert_near(packed: Floats, tensor: SourceTensor) -> None:
    """Equal but for the rounding of one float32 sum, whose terms may be far larger than what they add up to."""
    block_type = BLOCK_TYPES[tensor.type]
    scale, minimum = block_type.scales(block_type.stored(tensor.raw))
    largest = np.abs(scale) * 255 + (0 if minimum is None else np.abs(minimum))
    bound = np.repeat(largest, block_type.block, axis=1) * 2.0**-22
    assert (np.abs(packed.astype(np.float64) - true_values(tensor)) <= bound).all()


def has_only_numbers(raw: Bytes, type_name: str) -> bool:
    stored = raw.reshape(len(raw), -1, block_sizes(type_name)[1])
    halves = [np.ascontiguousarray(stored[..., at : at + 2]).view(np.float16) for at in HALVES[type_name]]
    return all(np.isfinite(half).all() for half in halves)


def draw_blocks(data: st.DataObject, type_name: str) -> Bytes:
    """One to three rows of two stored blocks: any bytes at all."""
    num_bytes = 2 * block_sizes(type_name)[1]
    rows = data.draw(st.lists(st.binary(min_size=num_bytes, max_size=num_bytes), min_size=1, max_size=3))
    return np.stack([np.frombuffer(row, np.uint8) for row in rows])


def test_the_types_are_those_the_tests_know() -> None:
    assert set(BLOCK_TYPES) == set(BLOCKS)
    assert set(FLOAT_TYPES) == set(FLOATS)


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_sizes_are_those_of_the_format(type_name: str) -> None:
    values, num_bytes = block_sizes(type_name)
    assert values_of_block(type_name) == values
    assert bytes_of_row(type_name, 3 * values) == 3 * num_bytes


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_random_rows_are_read_bit_for_bit(type_name: str) -> None:
    tensor = make_tensor(type_name, n=5, k=512)
    assert_same_bits(to_float32(tensor), true_values(tensor))


@pytest.mark.parametrize("type_name", BLOCKS)
@pytest.mark.parametrize("scale", EXTREMES)
def test_extreme_scales_are_read_and_packed(type_name: str, scale: float) -> None:
    raw = random_blocks(np.random.default_rng(1), type_name, 3, 512)
    set_halves(raw, type_name, {HALVES[type_name][0]: scale})
    tensor = as_tensor(raw, type_name)
    require_packable(tensor)
    assert_same_bits(to_float32(tensor), true_values(tensor))
    assert_near(packed_values(pack_linear([tensor])), tensor)


@pytest.mark.parametrize("type_name", [name for name in BLOCKS if len(HALVES[name]) == 2])
@pytest.mark.parametrize("minimum", EXTREMES)
def test_extreme_minima_are_read_and_packed(type_name: str, minimum: float) -> None:
    raw = random_blocks(np.random.default_rng(2), type_name, 3, 512)
    set_halves(raw, type_name, {HALVES[type_name][1]: minimum})
    tensor = as_tensor(raw, type_name)
    assert_same_bits(to_float32(tensor), true_values(tensor))
    assert_near(packed_values(pack_linear([tensor])), tensor)


@pytest.mark.parametrize("type_name", BLOCKS)
@settings(deadline=None)
@given(data=st.data())
def test_any_bytes_are_read_and_packed_or_refused_by_name(type_name: str, data: st.DataObject) -> None:
    tensor = as_tensor(draw_blocks(data, type_name), type_name)
    if not has_only_numbers(tensor.raw, type_name):
        with pytest.raises(BadModelFile, match=r"tensor blk\.3\.w has values that are infinite or no numbers"):
            require_packable(tensor)
        return
    require_packable(tensor)
    assert_same_bits(to_float32(tensor), dequantized(tensor.raw, type_name))
    assert_near(packed_values(pack_linear([tensor])), tensor)
    assert_near(packed_values(pack_embedding(tensor)), tensor)


@pytest.mark.parametrize("type_name", BLOCKS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_single_scale_or_minimum_that_is_no_number_is_refused_by_name(type_name: str, value: float) -> None:
    for offset in HALVES[type_name]:
        raw = random_blocks(np.random.default_rng(3), type_name, 2, 512)
        scales = np.ones((2, 512 // block_sizes(type_name)[0]), np.float32)
        scales[1, -1] = value
        set_halves(raw, type_name, {offset: scales})
        with pytest.raises(BadModelFile, match=r"tensor blk\.3\.w"):
            require_packable(as_tensor(raw, type_name))


@pytest.mark.parametrize("type_name", FLOATS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_float_that_is_no_number_is_refused_by_name(type_name: str, value: float) -> None:
    values = np.zeros((2, 64), np.float32)
    values[1, 63] = value
    kind = gguf.GGMLQuantizationType[type_name]
    raw = gguf.quants.quantize(values, kind).view(np.uint8).reshape(2, -1)
    with pytest.raises(BadModelFile, match=r"tensor blk\.3\.w"):
        require_packable(SourceTensor("blk.3.w", type_name, (2, 64), raw))


@pytest.mark.parametrize("type_name", FLOATS)
def test_subnormal_floats_stay_within_8_bits(type_name: str) -> None:
    values = np.linspace(-190, 190, 64, dtype=np.float32).reshape(1, 64) * np.float32(2.0**-149)
    kind = gguf.GGMLQuantizationType[type_name]
    raw = gguf.quants.quantize(values, kind).view(np.uint8).reshape(1, -1)
    tensor = SourceTensor("blk.3.w", type_name, (1, 64), raw)
    assert np.abs(packed_values(pack_linear([tensor])) - true_values(tensor)).max() <= 2.0**-142
