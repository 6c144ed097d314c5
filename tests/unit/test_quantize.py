"""Packed weights stand for the values their GGUF tensors stand for, by the definition of each kind."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from modelstore.block_types import BLOCK_TYPES, SUPPORTED_TYPES
from modelstore.quantize import can_fuse, pack_embedding, pack_linear, require_packable, to_float32, unpermute_rotary
from modelstore.source import SourceTensor
from shoal.errors import UnsupportedModel
from tests.support.blocks import FLOATS, make_tensor, make_tensor_of, packed_values, true_values

KIND_AND_BLOCK = {
    "Q4_0": ("int4", 32),
    "Q4_1": ("int4_cz", 32),
    "Q5_0": ("int8", 32),
    "Q5_1": ("int8_cz", 32),
    "Q8_0": ("int8", 32),
    "Q2_K": ("int4_cz", 16),
    "Q3_K": ("int4", 16),
    "Q4_K": ("int4_cz", 32),
    "Q5_K": ("int8_cz", 32),
    "Q6_K": ("int8", 16),
    "IQ4_NL": ("int8", 32),
    "IQ4_XS": ("int8", 32),
}


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_quantised_types_keep_every_value_in_few_bytes(type_name: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_linear([tensor])
    assert (packed.kind, packed.block) == KIND_AND_BLOCK[type_name]
    assert packed.arrays["q"].nbytes == 6 * 256 * (1 if packed.kind.startswith("int8") else 0.5)
    np.testing.assert_allclose(packed_values(packed), true_values(tensor), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("offset", [40.0, -40.0])
def test_q4_1_blocks_far_from_zero_keep_every_value(offset: float) -> None:
    tensor = make_tensor("Q4_1", offset=offset)
    np.testing.assert_allclose(packed_values(pack_linear([tensor])), true_values(tensor), rtol=1e-6)


def test_a_constant_q4_1_block_has_no_scale_and_keeps_its_value() -> None:
    tensor = make_tensor_of(np.full((2, 32), 0.75, np.float32), "Q4_1")
    assert np.array_equal(packed_values(pack_linear([tensor])), np.full((2, 32), 0.75, np.float32))


@pytest.mark.parametrize("type_name", FLOATS)
def test_float_matrices_become_8_bit_blocks_within_half_a_step(type_name: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_linear([tensor])
    half_steps = np.repeat(packed.arrays["scale"] / 2, packed.block, axis=1)
    assert packed.kind == "int8"
    assert (np.abs(packed_values(packed) - true_values(tensor)) <= half_steps * 1.001).all()


def test_a_block_of_zeros_stays_zero() -> None:
    packed = pack_linear([make_tensor_of(np.zeros((2, 64), np.float32), "F32")])
    assert not packed_values(packed).any()


@pytest.mark.parametrize("type_name", FLOATS)
def test_float_matrices_are_kept_if_asked(type_name: str) -> None:
    tensor = make_tensor(type_name)
    packed = pack_linear([tensor], precision="float32")
    assert packed.arrays["w"].shape == (256, 6)
    assert packed.arrays["w"].flags.c_contiguous
    assert np.array_equal(packed_values(packed), true_values(tensor))


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_fused_parts_are_stacked_by_rows(type_name: str) -> None:
    parts = [make_tensor(type_name, n=n, seed=n) for n in (4, 2, 3)]
    fused = packed_values(pack_linear(parts))
    assert np.array_equal(fused, np.concatenate([packed_values(pack_linear([part])) for part in parts]))


def test_parts_of_different_kinds_or_widths_cannot_be_fused() -> None:
    assert can_fuse([make_tensor("F16"), make_tensor("F32")])
    assert not can_fuse([make_tensor("Q4_0"), make_tensor("Q4_1")])
    assert not can_fuse([make_tensor("Q4_0"), make_tensor("Q4_0", k=64)])
    assert not can_fuse([make_tensor("Q8_0"), make_tensor("Q6_K")])


def test_parts_of_different_types_that_pack_alike_are_fused() -> None:
    parts = [make_tensor("Q5_0", n=4), make_tensor("Q8_0", n=2), make_tensor("IQ4_NL", n=2)]
    assert can_fuse(parts)
    expected = np.concatenate([true_values(part) for part in parts])
    np.testing.assert_allclose(packed_values(pack_linear(parts)), expected, rtol=1e-6)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_embeddings_of_block_types_keep_every_value(type_name: str) -> None:
    tensor = make_tensor(type_name)
    np.testing.assert_allclose(packed_values(pack_embedding(tensor)), true_values(tensor), rtol=1e-6, atol=2e-6)


def test_a_float_embedding_is_kept_by_rows_if_asked() -> None:
    tensor = make_tensor("F16")
    assert np.array_equal(pack_embedding(tensor, precision="float32").arrays["w"], true_values(tensor))


def test_rotary_rows_are_moved_from_pairs_to_halves() -> None:
    values = np.repeat(np.arange(8, dtype=np.float32)[:, None], 32, axis=1)
    moved = to_float32(unpermute_rotary(make_tensor_of(values, "F32"), num_heads=2, head_dim=4))
    assert moved[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_the_last_block_of_a_row_of_floats_is_filled_up() -> None:
    tensor = make_tensor_of(np.random.default_rng(0).standard_normal((2, 40), dtype=np.float32), "F32")
    for packed in (pack_linear([tensor]), pack_embedding(tensor)):
        assert packed.arrays["q"].shape == (2, 2, 32)
        np.testing.assert_allclose(packed_values(packed), true_values(tensor), atol=0.02)


def test_an_unknown_type_is_refused_with_its_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.w is IQ1_S; this version reads F32, F16, BF16, Q4_0"):
        require_packable(SourceTensor("blk.0.w", "IQ1_S", (2, 32), np.zeros((2, 8), np.uint8)))


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_packing_takes_little_more_memory_than_its_result(type_name: str) -> None:
    tensor = make_tensor(type_name, n=2048, k=2048)
    tracemalloc.start()
    packed = pack_linear([tensor])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Codes are held as bytes twice, scales some times.
    assert peak < sum(array.nbytes for array in packed.arrays.values()) + 3 * 2048 * 2048
