"""Packed weights stand for the values their GGUF tensors stand for, by the definition of each kind."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from modelstore.gguf import SourceTensor
from modelstore.quantize import (
    PackedLinear,
    can_fuse,
    pack_embedding,
    pack_linear,
    to_float32,
    unpermute_rotary,
)
from shoal.errors import UnsupportedModel

Floats = NDArray[np.float32]
QUANTIZED = ("Q4_0", "Q4_1", "Q8_0")
TYPES = ("F32", "F16", *QUANTIZED)


def make_tensor(type_name: str, n: int = 6, k: int = 96, seed: int = 0, offset: float = 0.0) -> SourceTensor:
    values = np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32) + np.float32(offset)
    return make_tensor_of(values, type_name)


def make_tensor_of(values: Floats, type_name: str) -> SourceTensor:
    kind = gguf.GGMLQuantizationType[type_name]
    raw = gguf.quants.quantize(values, kind).view(np.uint8).reshape(len(values), -1)
    return SourceTensor("blk.0.w", type_name, values.shape, raw)


def true_values(tensor: SourceTensor) -> Floats:
    """What the format's own package reads."""
    kind = gguf.GGMLQuantizationType[tensor.type]
    raw = (
        tensor.raw if tensor.type in QUANTIZED else tensor.raw.view(np.float32 if tensor.type == "F32" else np.float16)
    )
    values: Floats = gguf.quants.dequantize(raw, kind).reshape(tensor.shape)
    return values


def packed_values(packed: PackedLinear) -> Floats:
    """What MatMulNBits multiplies by, element by element, as its documentation states it."""
    if packed.kind == "float32":
        return packed.arrays["w"].T.astype(np.float32)
    values = np.empty((packed.n, packed.k), np.float32)
    for row in range(packed.n):
        for column in range(packed.k):
            values[row, column] = packed_value(packed, row, *divmod(column, packed.block))
    return values


def packed_value(packed: PackedLinear, row: int, block: int, index: int) -> float:
    arrays = packed.arrays
    if packed.kind == "int8":
        return (int(arrays["q"][row, block, index]) - 128) * float(arrays["scale"][row, block])
    q = int(arrays["q"][row, block, index // 2]) >> (4 * (index % 2)) & 15
    if packed.kind == "int4":
        return (q - 8) * float(arrays["scale"][row, block])
    zero = int(arrays["zero"][row, block // 2]) >> (4 * (block % 2)) & 15
    return (q - zero) * float(arrays["scale"][row, block]) + float(arrays["correction"][block, row])


@pytest.mark.parametrize("type_name", TYPES)
def test_to_float32_reads_what_the_format_says(type_name: str) -> None:
    tensor = make_tensor(type_name)
    assert np.array_equal(to_float32(tensor), true_values(tensor))


@pytest.mark.parametrize(("type_name", "kind"), [("Q4_0", "int4"), ("Q4_1", "int4_cz"), ("Q8_0", "int8")])
def test_quantised_types_keep_every_value(type_name: str, kind: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_linear([tensor])
    assert packed.kind == kind
    np.testing.assert_allclose(packed_values(packed), true_values(tensor), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [40.0, -40.0])
def test_q4_1_blocks_far_from_zero_keep_every_value(offset: float) -> None:
    tensor = make_tensor("Q4_1", offset=offset)
    np.testing.assert_allclose(packed_values(pack_linear([tensor])), true_values(tensor), rtol=1e-6)


def test_a_constant_q4_1_block_has_no_scale_and_keeps_its_value() -> None:
    tensor = make_tensor_of(np.full((2, 32), 0.75, np.float32), "Q4_1")
    assert np.array_equal(packed_values(pack_linear([tensor])), np.full((2, 32), 0.75, np.float32))


@pytest.mark.parametrize("type_name", ["F32", "F16"])
def test_float_matrices_become_8_bit_blocks_within_half_a_step(type_name: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_linear([tensor])
    half_steps = np.repeat(packed.arrays["scale"] / 2, packed.block, axis=1)
    assert packed.kind == "int8"
    assert (np.abs(packed_values(packed) - true_values(tensor)) <= half_steps * 1.001).all()


def test_a_block_of_zeros_stays_zero() -> None:
    packed = pack_linear([make_tensor_of(np.zeros((2, 64), np.float32), "F32")])
    assert not packed_values(packed).any()


@pytest.mark.parametrize("type_name", ["F32", "F16"])
def test_float_matrices_are_kept_if_asked(type_name: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_linear([tensor], precision="float32")
    assert packed.arrays["w"].shape == (96, 6)
    assert packed.arrays["w"].flags.c_contiguous
    assert np.array_equal(packed_values(packed), true_values(tensor))


@pytest.mark.parametrize("type_name", TYPES)
def test_fused_parts_are_stacked_by_rows(type_name: str) -> None:
    parts = [make_tensor(type_name, n=n, seed=n) for n in (4, 2, 3)]
    fused = packed_values(pack_linear(parts))
    assert np.array_equal(fused, np.concatenate([packed_values(pack_linear([part])) for part in parts]))


def test_parts_of_different_kinds_or_widths_cannot_be_fused() -> None:
    assert can_fuse([make_tensor("F16"), make_tensor("F32")])
    assert not can_fuse([make_tensor("Q4_0"), make_tensor("Q4_1")])
    assert not can_fuse([make_tensor("Q4_0"), make_tensor("Q4_0", k=64)])


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
def test_an_embedding_of_whole_steps_fits_8_bits_exactly(type_name: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_embedding(tensor)
    assert packed.kind == "int8"
    np.testing.assert_allclose(packed_values(packed), true_values(tensor), rtol=1e-6)


def test_a_q4_1_embedding_is_rounded_to_8_bits() -> None:
    tensor = make_tensor("Q4_1")
    packed = pack_embedding(tensor)
    assert packed.kind == "int8"
    assert np.abs(packed_values(packed) - true_values(tensor)).max() < 0.02


def test_a_float_embedding_is_kept_by_rows_if_asked() -> None:
    tensor = make_tensor("F16")
    assert np.array_equal(pack_embedding(tensor, precision="float32").arrays["w"], true_values(tensor))


def test_rotary_rows_are_moved_from_pairs_to_halves() -> None:
    values = np.repeat(np.arange(8, dtype=np.float32)[:, None], 32, axis=1)
    moved = to_float32(unpermute_rotary(make_tensor_of(values, "F32"), num_heads=2, head_dim=4))
    assert moved[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_row_of_broken_blocks_is_refused_with_its_length() -> None:
    tensor = make_tensor_of(np.ones((2, 40), np.float32), "F32")
    with pytest.raises(UnsupportedModel, match=r"40 values.*float32"):
        pack_linear([tensor])
    with pytest.raises(UnsupportedModel, match="40 values"):
        pack_embedding(tensor)
    assert pack_linear([tensor], precision="float32").kind == "float32"


def test_an_unknown_type_is_refused_with_its_name() -> None:
    with pytest.raises(UnsupportedModel, match="Q6_K"):
        pack_linear([SourceTensor("blk.0.w", "Q6_K", (2, 32), np.zeros((2, 8), np.uint8))])


@pytest.mark.parametrize("type_name", TYPES)
def test_packing_takes_little_more_memory_than_its_result(type_name: str) -> None:
    tensor = make_tensor(type_name, n=2048, k=2048)
    tracemalloc.start()
    packed = pack_linear([tensor])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The pieces that floats are rounded in take some tens of MiB whatever the size.
    assert peak < 2.5 * sum(array.nbytes for array in packed.arrays.values()) + (40 << 20)
