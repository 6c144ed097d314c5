"""The block types of GGUF files: how values are laid out in bytes, and what codes and scales they are made of.

Owns every layout, so that nobody else knows where a bit lies: each type becomes codes, scales and minima by blocks, with
w = scale (code - zero) + minimum. Works on bare bytes; knows neither tensors nor files nor how weights are multiplied by.
`gguf` asks it for sizes, `quantize` for values.
Source: ggml-common.h and ggml-quants.c (the structs block_* and dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
# A scale for each block, and a minimum if the type has one: both [N, B].
Scales = tuple[Floats, Floats | None]

# Bytes of a value.
FLOAT_TYPES = {"F32": 4, "F16": 2, "BF16": 2}

# Source: ggml-common.h, kvalues_iq4nl; as bytes with 128 added.
_IQ4_NL_CODES = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)
_PAIRS = np.arange(0, 8, 2, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one type keeps its values.

    values, num_bytes: of a stored block, which has one or many scales. block: values a scale. bits: that a code needs, 4
    or 8. zero: the code of 0. codes: stored blocks uint8 [N, S, num_bytes] -> codes uint8 [N, B, block]. scales: the
    same -> scales and minima.
    """

    values: int
    num_bytes: int
    block: int
    bits: int
    zero: int
    has_minimum: bool
    codes: Callable[[Bytes], Bytes]
    scales: Callable[[Bytes], Scales]

    def stored(self, raw: Bytes) -> Bytes:
        """Rows of bytes [N, bytes] by stored blocks."""
        return raw.reshape(raw.shape[0], -1, self.num_bytes)  # [N, S, num_bytes]


def bytes_of_row(type_name: str, num_values: int) -> int:
    """What a row takes; num_values is a multiple of `values_of_block`."""
    if type_name in FLOAT_TYPES:
        return num_values * FLOAT_TYPES[type_name]
    kind = BLOCK_TYPES[type_name]
    return num_values // kind.values * kind.num_bytes


def values_of_block(type_name: str) -> int:
    """Rows have a multiple of so many values."""
    return 1 if type_name in FLOAT_TYPES else BLOCK_TYPES[type_name].values


def float_values(type_name: str, raw: Bytes) -> Floats:
    """The values of rows [N, bytes] of a type in FLOAT_TYPES, [N, K]; a view for F32 where that is possible."""
    raw = np.ascontiguousarray(raw)
    match type_name:
        case "F32":
            return raw.view(np.float32)
        case "F16":
            return raw.view(np.float16).astype(np.float32)
        case _:
            # The upper half of a float32.
            return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _half(stored: Bytes, offset: int) -> Floats:
    """The float16 at a byte offset of each stored block."""
    return np.ascontiguousarray(stored[..., offset : offset + 2]).view(np.float16)[..., 0].astype(np.float32)  # [N, S]


def _one_scale(stored: Bytes) -> Scales:
    return _half(stored, 0), None


def _scale_and_minimum(stored: Bytes) -> Scales:
    return _half(stored, 0), _half(stored, 2)


def _nibbles(packed: Bytes) -> Bytes:
    """Values i and i + half from byte i: [..., half] -> [..., 2 half]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _codes_q4_0(stored: Bytes) -> Bytes:
    return _nibbles(stored[..., 2:])


def _codes_q4_1(stored: Bytes) -> Bytes:
    return _nibbles(stored[..., 4:])


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of four bytes as the fifth bit of value i: [..., 4] -> [..., 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _codes_q5_0(stored: Bytes) -> Bytes:
    return _nibbles(stored[..., 6:]) | _fifth_bits(stored[..., 2:6])


def _codes_q5_1(stored: Bytes) -> Bytes:
    return _nibbles(stored[..., 8:]) | _fifth_bits(stored[..., 4:8])


def _codes_q8_0(stored: Bytes) -> Bytes:
    # Adding 128 modulo 256 turns a signed byte into one with zero point 128.
    return stored[..., 2:] ^ np.uint8(128)


def _codes_iq4_nl(stored: Bytes) -> Bytes:
    codes: Bytes = _IQ4_NL_CODES[_codes_q4_0(stored)]
    return codes


def _by_block(values: NDArray[np.generic], block: int) -> Bytes:
    """[N, S, ...] whose last axes run through the stored block's values in order -> [N, B, block]."""
    return values.reshape(values.shape[0], -1, block)  # type: ignore[return-value]


def _bit_pairs(packed: Bytes) -> Bytes:
    """Two bits each of 64 bytes: 32 bytes hold 4 x 32 values, the first 32 in their lowest bits. -> [N, S, 2, 4, 32]."""
    halves = packed.reshape(*packed.shape[:-1], 2, 1, 32)
    return (halves >> _PAIRS[:, None]) & np.uint8(3)


def _codes_q2_k(stored: Bytes) -> Bytes:
    return _by_block(_bit_pairs(stored[..., 16:80]), 16)


def _scales_q2_k(stored: Bytes) -> Scales:
    packed = stored[..., :16]
    scale = _half(stored, 80)[..., None] * (packed & 0x0F)  # [N, S, 16]
    minimum = _half(stored, 82)[..., None] * (packed >> 4)
    return _joined(scale), _joined(-minimum)


def _codes_q3_k(stored: Bytes) -> Bytes:
    third_bits = (stored[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)  # [N, S, 8, 32]
    pairs = _bit_pairs(stored[..., 32:96])
    return _by_block(pairs | (third_bits.reshape(pairs.shape) << np.uint8(2)), 16)


def _scales_q3_k(stored: Bytes) -> Scales:
    low = _nibbles(stored[..., 96:104])  # [N, S, 16]
    high = (stored[..., None, 104:108] >> _PAIRS[:, None]) & np.uint8(3)  # [N, S, 4, 4]
    factors = (low | (high.reshape(low.shape) << np.uint8(4))).astype(np.float32) - 32
    return _joined(_half(stored, 108)[..., None] * factors), None


def _scales_of_k(stored: Bytes) -> Scales:
    """Of Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes."""
    low, mid, high = stored[..., 4:8], stored[..., 8:12], stored[..., 12:16]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)  # [N, S, 8]
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    scales, minima = (_half(stored, at)[..., None] * part for at, part in ((0, scale), (2, minimum)))
    return _joined(scales), _joined(-minima)


def _nibbles_of_k(packed: Bytes) -> Bytes:
    """128 bytes; 32 of them hold 64 values, the first 32 in their lower halves. -> [N, 8 S, 32]."""
    return _by_block(_nibbles(packed.reshape(*packed.shape[:-1], 4, 32)), 32)


def _codes_q4_k(stored: Bytes) -> Bytes:
    return _nibbles_of_k(stored[..., 16:])


def _codes_q5_k(stored: Bytes) -> Bytes:
    fifth_bits = (stored[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)  # [N, S, 8, 32]
    return _nibbles_of_k(stored[..., 48:]) | _by_block(fifth_bits << np.uint8(4), 32)


def _codes_q6_k(stored: Bytes) -> Bytes:
    low = stored[..., :128].reshape(*stored.shape[:-1], 2, 64)
    nibbles = _nibbles(low).reshape(*stored.shape[:-1], 2, 4, 32)
    return _by_block(nibbles | (_bit_pairs(stored[..., 128:192]) << np.uint8(4)), 16)


def _scales_q6_k(stored: Bytes) -> Scales:
    factors = np.ascontiguousarray(stored[..., 192:208]).view(np.int8)  # [N, S, 16]
    return _joined(_half(stored, 208)[..., None] * factors), None


def _codes_iq4_xs(stored: Bytes) -> Bytes:
    packed = stored[..., 8:].reshape(*stored.shape[:-1], 8, 16)
    codes: Bytes = _IQ4_NL_CODES[_by_block(_nibbles(packed), 32)]
    return codes


def _scales_iq4_xs(stored: Bytes) -> Scales:
    """Eight scales of 6 bits: the lower four of each in four bytes, the upper two in two."""
    low = np.stack([stored[..., 4:8] & 15, stored[..., 4:8] >> 4], axis=-1).reshape(*stored.shape[:-1], 8)
    high = ((stored[..., 2:4, None] >> _PAIRS) & np.uint8(3)).reshape(low.shape)
    factors = (low | (high << np.uint8(4))).astype(np.float32) - 32
    return _joined(_half(stored, 0)[..., None] * factors), None


def _joined(scales: Floats) -> Floats:
    return scales.astype(np.float32, copy=False).reshape(scales.shape[0], -1)  # [N, S, n] -> [N, B]


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, 32, 4, 8, False, _codes_q4_0, _one_scale),
    "Q4_1": BlockType(32, 20, 32, 4, 0, True, _codes_q4_1, _scale_and_minimum),
    "Q5_0": BlockType(32, 22, 32, 8, 16, False, _codes_q5_0, _one_scale),
    "Q5_1": BlockType(32, 24, 32, 8, 0, True, _codes_q5_1, _scale_and_minimum),
    "Q8_0": BlockType(32, 34, 32, 8, 128, False, _codes_q8_0, _one_scale),
    "Q2_K": BlockType(256, 84, 16, 4, 0, True, _codes_q2_k, _scales_q2_k),
    "Q3_K": BlockType(256, 110, 16, 4, 4, False, _codes_q3_k, _scales_q3_k),
    "Q4_K": BlockType(256, 144, 32, 4, 0, True, _codes_q4_k, _scales_of_k),
    "Q5_K": BlockType(256, 176, 32, 8, 0, True, _codes_q5_k, _scales_of_k),
    "Q6_K": BlockType(256, 210, 16, 8, 32, False, _codes_q6_k, _scales_q6_k),
    "IQ4_NL": BlockType(32, 18, 32, 8, 128, False, _codes_iq4_nl, _one_scale),
    "IQ4_XS": BlockType(256, 136, 32, 8, 128, False, _codes_iq4_xs, _scales_iq4_xs),
}
SUPPORTED_TYPES = (*FLOAT_TYPES, *BLOCK_TYPES)
