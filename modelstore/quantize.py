"""Turns a model file's tensors into the packed weights that onnxruntime multiplies by, losing nothing where it can.

Decides the kind of each packed weight (see `modelstore.manifest.Linear`) from the types of its source tensors. Q4_0, Q4_1
and Q8_0 keep every value they stand for; F32 and F16 become 8-bit blocks unless asked not to. Knows neither files nor
layers; the store calls it tensor by tensor, and peak memory is about that of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from modelstore.gguf import SourceTensor
from shoal.errors import UnsupportedModel

BLOCK = 32
INT8_ZERO = 128
INT4_ZERO = 8

_PLAIN_DTYPES = {"F32": np.float32, "F16": np.float16}
_KIND_OF_TYPE = {"Q4_0": "int4", "Q4_1": "int4_cz", "Q8_0": "int8"}
# Rows expanded to float32 at a time take about this much.
_CHUNK_BYTES = 8 << 20

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Array = Bytes | Floats


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight [n, k] ready to be written; `arrays` are named and shaped as `modelstore.manifest.Linear` says."""

    kind: str
    n: int
    k: int
    block: int
    arrays: dict[str, Array]


def can_fuse(parts: Sequence[SourceTensor]) -> bool:
    """Whether the parts can be stacked by rows into one packed weight: same kind, same row length."""
    return len({(_KIND_OF_TYPE.get(part.type, "plain"), part.shape[1]) for part in parts}) == 1


def pack_linear(parts: Sequence[SourceTensor], *, precision: str = "int8") -> PackedLinear:
    """Pack tensors [N_i, K], stacked by rows, into one weight [sum N_i, K].

    precision: what F32 and F16 become, "int8" or "float32". Raises UnsupportedModel for a type or row length that cannot
    be packed.
    """
    assert can_fuse(parts), "parts of different kinds are packed one by one"
    kind = _kind(parts[0], precision)
    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if kind == "float32":
        weight = np.concatenate([to_float32(part) for part in parts])
        return PackedLinear(kind, n, k, 0, {"w": np.ascontiguousarray(weight.T)})  # [K, N]
    pieces = [_PACKERS[kind](part) for part in parts]
    arrays = {name: _stack(name, [piece[name] for piece in pieces]) for name in pieces[0]}
    return PackedLinear(kind, n, k, BLOCK, arrays)


def pack_embedding(tensor: SourceTensor, *, precision: str = "int8") -> PackedLinear:
    """Pack an embedding [V, E] so that rows can be looked up and, if the head is tied, multiplied by.

    Lookups need 8-bit or float32 rows: Q4_0 fits 8 bits exactly; Q4_1 is rounded to 8 bits, as F32 and F16 are.
    """
    if tensor.type in _PLAIN_DTYPES and precision == "float32":
        return PackedLinear("float32", tensor.shape[0], tensor.shape[1], 0, {"w": to_float32(tensor)})  # [V, E]
    _require_whole_blocks(tensor)
    return PackedLinear("int8", tensor.shape[0], tensor.shape[1], BLOCK, _pack_int8(tensor))


def unpermute_rotary(tensor: SourceTensor, num_heads: int, head_dim: int) -> SourceTensor:
    """Reorder query or key rows from a GGUF's interleaved rotary pairs to half-split order."""
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
    return replace(tensor, raw=tensor.raw[rows])


def to_float32(tensor: SourceTensor) -> Floats:
    """Expand a tensor to the values it stands for, in its own shape."""
    raw = tensor.raw.reshape(-1, tensor.raw.shape[-1])
    return _expand(raw, tensor.type).reshape(tensor.shape)


def _kind(tensor: SourceTensor, precision: str) -> str:
    if tensor.type not in _KIND_OF_TYPE and tensor.type not in _PLAIN_DTYPES:
        known = ", ".join((*_PLAIN_DTYPES, *_KIND_OF_TYPE))
        raise UnsupportedModel(f"tensor {tensor.name} is {tensor.type}; this version reads {known}")
    kind = _KIND_OF_TYPE.get(tensor.type, precision)
    if kind != "float32":
        _require_whole_blocks(tensor)
    return kind


def _require_whole_blocks(tensor: SourceTensor) -> None:
    if tensor.shape[1] % BLOCK:
        raise UnsupportedModel(
            f"tensor {tensor.name} has rows of {tensor.shape[1]} values, not a multiple of the block of {BLOCK}: "
            "import a float model of this shape with precision float32"
        )


def _stack(name: str, pieces: list[Array]) -> Array:
    if len(pieces) == 1:
        return pieces[0]
    axis = 1 if name == "correction" else 0
    stacked: NDArray[Any] = np.concatenate(cast(list[NDArray[Any]], pieces), axis=axis)
    return stacked


def _half(blocks: Bytes, offset: int) -> Floats:
    """The float16 at a byte offset of each block, as float32."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)[..., 0].astype(np.float32)


def _blocks(raw: Bytes, block_bytes: int) -> Bytes:
    return raw.reshape(raw.shape[0], -1, block_bytes)  # [N, B, block_bytes]


def _pair_nibbles(nibbles: Bytes) -> Bytes:
    """GGUF keeps elements i and i + 16 in byte i of a block; MatMulNBits wants 2i and 2i + 1."""
    paired = np.empty(nibbles.shape, np.uint8)
    even, odd = nibbles[..., 0::2], nibbles[..., 1::2]
    paired[..., :8] = (even & 0x0F) | (odd << 4)
    paired[..., 8:] = (even >> 4) | (odd & 0xF0)
    return paired


def _pack_q4_0(tensor: SourceTensor) -> dict[str, Array]:
    blocks = _blocks(tensor.raw, 18)
    return {"q": _pair_nibbles(blocks[..., 2:]), "scale": _half(blocks, 0)}


def _pack_q4_1(tensor: SourceTensor) -> dict[str, Array]:
    """w = d q + m becomes d (q - z) + c with the integer z nearest to -m / d and c = m + z d: exact, on the fast kernel."""
    blocks = _blocks(tensor.raw, 20)
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    ratio = np.divide(-minimum, scale, out=np.zeros_like(scale), where=scale != 0)
    zero: Floats = np.clip(np.rint(ratio), 0, 15)
    correction: Floats = np.ascontiguousarray((minimum + zero * scale).T)  # [B, N]
    return {
        "q": _pair_nibbles(blocks[..., 4:]),
        "scale": scale,
        "zero": _join_nibbles(zero.astype(np.uint8)),
        "correction": correction,
    }


def _join_nibbles(values: Bytes) -> Bytes:
    """Two 4-bit values a byte, the first low; an odd last one is joined with 0."""
    if values.shape[1] % 2:
        values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    return values[:, 0::2] | (values[:, 1::2] << np.uint8(4))


def _pack_int8(tensor: SourceTensor) -> dict[str, Array]:
    match tensor.type:
        case "Q8_0":
            blocks = _blocks(tensor.raw, 34)
            # Adding 128 modulo 256 turns a signed byte into one with zero point 128.
            return {"q": blocks[..., 2:] ^ np.uint8(INT8_ZERO), "scale": _half(blocks, 0)}
        case "Q4_0":
            blocks = _blocks(tensor.raw, 18)
            q = _nibbles(blocks[..., 2:])
            q += np.uint8(INT8_ZERO - INT4_ZERO)
            return {"q": q, "scale": _half(blocks, 0)}
        case _:
            return _round_to_int8(tensor)


def _round_to_int8(tensor: SourceTensor) -> dict[str, Array]:
    n, k = tensor.shape
    q = np.empty((n, k // BLOCK, BLOCK), np.uint8)
    scale = np.empty((n, k // BLOCK), np.float32)
    for rows in _row_chunks(n, k):
        values = _expand(tensor.raw[rows], tensor.type).reshape(-1, k // BLOCK, BLOCK)
        step = np.abs(values).max(axis=2) / np.float32(127)
        scale[rows] = step
        safe = np.where(step == 0, np.float32(1), step)
        q[rows] = (np.rint(values / safe[..., None]) + INT8_ZERO).astype(np.uint8)
    return {"q": q, "scale": scale}


def _row_chunks(n: int, k: int) -> Iterator[slice]:
    step = max(1, _CHUNK_BYTES // (4 * k))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _nibbles(nibbles: Bytes) -> Bytes:
    return np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)  # [N, B, 32]


def _expand(raw: Bytes, type_name: str) -> Floats:
    """The values of rows [N, bytes] as float32 [N, K]."""
    if type_name in _PLAIN_DTYPES:
        return np.ascontiguousarray(raw).view(_PLAIN_DTYPES[type_name]).astype(np.float32)
    blocks = _blocks(raw, {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[type_name])
    scale = _half(blocks, 0)[..., None]
    match type_name:
        case "Q4_0":
            values = (_nibbles(blocks[..., 2:]).astype(np.float32) - INT4_ZERO) * scale
        case "Q4_1":
            values = _nibbles(blocks[..., 4:]) * scale + _half(blocks, 2)[..., None]
        case _:
            values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8) * scale
    return values.reshape(raw.shape[0], -1)


_PACKERS = {"int4": _pack_q4_0, "int4_cz": _pack_q4_1, "int8": _pack_int8}
