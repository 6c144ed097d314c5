"""Turns blocks of KV into bytes and back: bit-exact, in 8 bits a value, or in 4.

Owns the layout of the bytes and the error that each codec makes. Knows no tiers, no keys and no header: who stores a block
chooses the codec, and keeps it and the shape beside the bytes. Pure functions of arrays, called by whichever thread moves
blocks; a block may be a view of the arena, read and written in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InternalError

Block = NDArray[np.float32]  # [L, 2, K, T, D]
BlockShape = tuple[int, int, int, int, int]
Index = tuple[Any, ...]

# Values that share a scale and a low. Source: KIVI, Liu et al. 2024, for groups and for the axes they lie along.
GROUP = 32
_TOKEN_AXIS, _SIZE_AXIS = -2, -1
_MAX_CODE_8, _MAX_CODE_4 = 127, 15
_MAX_HALF = float(np.finfo(np.float16).max)


class KVCodec(Enum):
    """How a block [L, 2 (keys, values), K, T, D] is written. All numbers are little-endian and all arrays row-major.

    A block is its layers one after the other, so the bytes of a layer range are those of its layers, joined. A layer is:

    - LOSSLESS: float32 [2, K, T, D].
    - INT8: int8 codes [2, K, T, D], then float16 scales [2, K, T]. A value is code x scale; a code is in [-127, 127].
    - K4V4: bytes [K, T, D], each a key's code in its low four bits and the code of the value at the same place in its high
      four; then, all float16, key scales and key lows [K, ceil(T / 32), D], value scales and value lows
      [K, T, ceil(D / 32)]. A value is code x scale + low. Group g of keys is tokens [32 g, 32 g + 32) of one channel, and
      of values those channels of one token; the last group has what is left.

    Decoding multiplies in float32, and then adds in float32. Scales are rounded up and lows down to float16, so that the
    codes reach every value and a value is off by at most half of its scale.
    """

    LOSSLESS = "f32"
    INT8 = "int8"
    K4V4 = "k4v4"


# The largest magnitude that is sure to fit: a scale of INT8 and a low of K4V4 must be finite in float16.
_MAX_MAGNITUDE = {KVCodec.LOSSLESS: math.inf, KVCodec.INT8: _MAX_CODE_8 * _MAX_HALF, KVCodec.K4V4: _MAX_HALF}


def encoded_bytes(codec: KVCodec, shape: Sequence[int]) -> int:
    """The bytes that a block of this shape takes. Raises InternalError for what is no block's shape."""
    num_layers, _, num_heads, num_tokens, head_dim = _checked(shape)
    num_values = num_heads * num_tokens * head_dim  # of keys, or of values
    match codec:
        case KVCodec.LOSSLESS:
            layer_bytes = 2 * num_values * 4
        case KVCodec.INT8:
            layer_bytes = 2 * num_values + 2 * num_heads * num_tokens * 2
        case KVCodec.K4V4:
            num_key_scales = num_heads * _num_groups(num_tokens) * head_dim
            num_value_scales = num_heads * num_tokens * _num_groups(head_dim)
            layer_bytes = num_values + 2 * (num_key_scales + num_value_scales) * 2
    return num_layers * layer_bytes


def fitting_codec(block: Block, codec: KVCodec) -> KVCodec:
    """The codec itself, or LOSSLESS for a block that it cannot hold: with values not finite, or too large for float16."""
    if codec is KVCodec.LOSSLESS:
        return codec
    # A NaN is the largest and the least of whatever it is among, and no comparison with it holds.
    largest = float(np.maximum(block.max(), -block.min()))
    return codec if largest <= _MAX_MAGNITUDE[codec] else KVCodec.LOSSLESS


def encode(block: Block, codec: KVCodec) -> bytes:
    """Write a block, which may be any view. Raises InternalError if it is no block, or one that `codec` cannot hold.

    LOSSLESS holds any bits; of the others, `fitting_codec` says beforehand whether they will do.
    """
    shape = _checked_array(block)
    if codec is KVCodec.LOSSLESS:
        return np.asarray(block, "<f4").tobytes()
    rows = np.empty((shape[0], encoded_bytes(codec, shape) // shape[0]), np.uint8)
    # What overflows float16 is found as a scale that is not finite.
    with np.errstate(all="ignore"):
        if codec is KVCodec.INT8:
            _encode_int8(block, *_int8_fields(rows, shape))
        else:
            _encode_k4v4(block, *_k4v4_fields(rows, shape))
    return rows.tobytes()


def decode(data: bytes | memoryview, codec: KVCodec, shape: Sequence[int]) -> Block:
    """Read a block of this shape into a new array. Raises InternalError as `decode_into` does."""
    out: Block = np.empty(_checked(shape), np.float32)
    decode_into(data, codec, out)
    return out


def decode_into(data: bytes | memoryview, codec: KVCodec, out: Block) -> None:
    """Read a block into an array of its shape, which may be a view of the arena.

    Raises InternalError, and writes nothing, if `data` has another length than a block of that shape, or `out` is no block.
    """
    shape = _checked_array(out)
    payload = np.frombuffer(data, np.uint8)
    expected = encoded_bytes(codec, shape)
    if payload.size != expected:
        raise InternalError(
            f"a KV block {list(shape)} takes {expected} bytes as {codec.value}, and {payload.size} were given"
        )
    rows = payload.reshape(shape[0], -1)
    match codec:
        case KVCodec.LOSSLESS:
            out[...] = payload.view("<f4").reshape(shape)
        case KVCodec.INT8:
            _decode_int8(out, *_int8_fields(rows, shape))
        case KVCodec.K4V4:
            _decode_k4v4(out, *_k4v4_fields(rows, shape))


def _checked(shape: Sequence[int]) -> BlockShape:
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise InternalError(
            f"a KV block has the axes [layer, 2, kv_head, token, head_dim], none of them empty; this one is {list(shape)}"
        )
    num_layers, halves, num_heads, num_tokens, head_dim = shape
    return num_layers, halves, num_heads, num_tokens, head_dim


def _checked_array(block: Block) -> BlockShape:
    if block.dtype != np.float32:
        raise InternalError(f"a KV block is an array of float32; this one is of {block.dtype}")
    return _checked(block.shape)


def _num_groups(size: int) -> int:
    return -(-size // GROUP)


def _int8_fields(rows: NDArray[np.uint8], shape: BlockShape) -> Iterator[NDArray[Any]]:
    """Views of codes and scales in the bytes of a block, [L, bytes of a layer]."""
    _, _, num_heads, num_tokens, head_dim = shape
    return _fields(rows, ("i1", (2, num_heads, num_tokens, head_dim)), ("<f2", (2, num_heads, num_tokens)))


def _k4v4_fields(rows: NDArray[np.uint8], shape: BlockShape) -> Iterator[NDArray[Any]]:
    """Views of pairs of codes, and of scales and lows of keys, then of values."""
    _, _, num_heads, num_tokens, head_dim = shape
    of_keys = ("<f2", (num_heads, _num_groups(num_tokens), head_dim))
    of_values = ("<f2", (num_heads, num_tokens, _num_groups(head_dim)))
    return _fields(rows, ("u1", (num_heads, num_tokens, head_dim)), of_keys, of_keys, of_values, of_values)


def _fields(rows: NDArray[np.uint8], *fields: tuple[str, tuple[int, ...]]) -> Iterator[NDArray[Any]]:
    start = 0
    for dtype, sizes in fields:
        stop = start + np.dtype(dtype).itemsize * math.prod(sizes)
        yield rows[:, start:stop].view(dtype).reshape(len(rows), *sizes, copy=False)
        start = stop


def _encode_int8(block: Block, codes: NDArray[np.int8], scales: NDArray[np.float16]) -> None:
    largest = np.maximum(block.max(axis=-1), -block.min(axis=-1))  # [L, 2, K, T]
    scales[...] = _half_above(largest / np.float32(_MAX_CODE_8))
    _require_finite(KVCodec.INT8, block, scales)
    inverses = _inverse(scales)[..., None]
    scratch = np.empty(block.shape[1:], np.float32)
    for layer, target in enumerate(codes):
        np.multiply(block[layer], inverses[layer], out=scratch)
        np.rint(scratch, out=scratch)
        target[...] = scratch


def _decode_int8(out: Block, codes: NDArray[np.int8], scales: NDArray[np.float16]) -> None:
    factors = scales.astype(np.float32)[..., None]  # [L, 2, K, T, 1]
    for layer, target in enumerate(out):
        target[...] = codes[layer]
        target *= factors[layer]


def _encode_k4v4(
    block: Block,
    pairs: NDArray[np.uint8],
    key_scales: NDArray[np.float16],
    key_lows: NDArray[np.float16],
    value_scales: NDArray[np.float16],
    value_lows: NDArray[np.float16],
) -> None:
    keys = _codes_4(block[:, 0], key_scales, key_lows, _TOKEN_AXIS)
    values = _codes_4(block[:, 1], value_scales, value_lows, _SIZE_AXIS)
    _require_finite(KVCodec.K4V4, block, key_scales, key_lows, value_scales, value_lows)
    np.left_shift(values, np.uint8(4), out=values)
    np.bitwise_or(keys, values, out=pairs)


def _codes_4(values: Block, scales: NDArray[np.float16], lows: NDArray[np.float16], axis: int) -> NDArray[np.uint8]:
    """The codes [L, K, T, D] of keys or values; fills in their scales and lows."""
    codes = np.empty(values.shape, np.uint8)
    for (part, groups), (targets, _) in zip(_grouped(values, axis), _grouped(codes, axis), strict=True):
        low = _half_below(part.min(axis=axis))
        scale = _half_above((part.max(axis=axis) - low) / np.float32(_MAX_CODE_4))
        lows[groups], scales[groups] = low, scale
        inverses = np.expand_dims(_inverse(scale), axis)
        offsets = np.expand_dims(low.astype(np.float32), axis)
        scratch = np.empty(part.shape[1:], np.float32)
        for layer, target in enumerate(targets):
            np.subtract(part[layer], offsets[layer], out=scratch)
            np.multiply(scratch, inverses[layer], out=scratch)
            np.rint(scratch, out=scratch)
            target[...] = scratch
    return codes


def _decode_k4v4(
    out: Block,
    pairs: NDArray[np.uint8],
    key_scales: NDArray[np.float16],
    key_lows: NDArray[np.float16],
    value_scales: NDArray[np.float16],
    value_lows: NDArray[np.float16],
) -> None:
    codes, scratch = np.empty(pairs.shape[1:], np.uint8), np.empty(pairs.shape[1:], np.float32)  # [K, T, D]
    halves = (
        (np.bitwise_and, np.uint8(_MAX_CODE_4), _parts(out[:, 0], scratch, key_scales, key_lows, _TOKEN_AXIS)),
        (np.right_shift, np.uint8(4), _parts(out[:, 1], scratch, value_scales, value_lows, _SIZE_AXIS)),
    )
    # Half a layer at a time, and into `out` only at the end: what one operation wrote the next finds in the cache.
    for layer, pair in enumerate(pairs):
        for unpack, operand, parts in halves:
            unpack(pair, operand, out=codes)
            scratch[...] = codes
            for part in parts:
                np.multiply(part.scratch, part.scales[layer], out=part.scratch)
                np.add(part.scratch, part.lows[layer], out=part.target[layer])


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys or values cut into groups: a layer's scratch, where all layers go, and their scales and lows to match."""

    scratch: Block
    target: Block
    scales: Block
    lows: Block


def _parts(
    out: Block, scratch: Block, scales: NDArray[np.float16], lows: NDArray[np.float16], axis: int
) -> list[_Part]:
    """Cut `out` [L, K, T, D] and the scratch of a layer [K, T, D] alike."""
    return [
        _Part(
            scratch=part,
            target=target,
            scales=np.expand_dims(scales[groups].astype(np.float32), axis),
            lows=np.expand_dims(lows[groups].astype(np.float32), axis),
        )
        for (part, groups), (target, _) in zip(_grouped(scratch, axis), _grouped(out, axis), strict=True)
    ]


def _grouped(values: NDArray[Any], axis: int) -> Iterator[tuple[NDArray[Any], Index]]:
    """Views in which an axis is cut in two, [.., groups, values of a group, ..]: full groups, then one of what is left.

    With each comes the index of its groups in an array of scales.
    """
    size, place = values.shape[axis], values.ndim + axis
    num_full = size // GROUP
    for first, last, length in ((0, num_full, GROUP), (num_full, _num_groups(size), size % GROUP)):
        if first == last:
            continue
        piece = values[_along(axis, first * GROUP, first * GROUP + (last - first) * length)]
        sizes = (*values.shape[:place], last - first, length, *values.shape[place + 1 :])
        yield piece.reshape(sizes, copy=False), _along(axis, first, last)


def _along(axis: int, start: int, stop: int) -> Index:
    """The index of [start, stop) of an axis that is counted from the end."""
    return (..., slice(start, stop), *[slice(None)] * (-1 - axis))


def _half_above(values: Block) -> NDArray[np.float16]:
    """The least float16 that is not below: infinite for what is too large."""
    halves = values.astype(np.float16)
    return np.where(halves < values, np.nextafter(halves, np.float16(np.inf)), halves)


def _half_below(values: Block) -> NDArray[np.float16]:
    return -_half_above(-values)


def _inverse(scales: NDArray[np.float16]) -> Block:
    """One over each scale, and 0 for a scale of 0, whose group is constant."""
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide > 0)


def _require_finite(codec: KVCodec, block: Block, *fields: NDArray[np.float16]) -> None:
    if all(np.isfinite(field).all() for field in fields):
        return
    raise InternalError(
        f"a KV block with values from {block.min()} to {block.max()} was to be stored as {codec.value}, which holds finite "
        f"values of at most {_MAX_MAGNITUDE[codec]:.0f}; store it as {KVCodec.LOSSLESS.value}"
    )
