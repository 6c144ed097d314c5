"""Turns a model file's tensors into the packed weights that onnxruntime multiplies by, losing nothing where it can.

Decides the kind of each packed weight (see `modelstore.manifest.Linear`) from the types of its source tensors. All block
types keep every value they stand for, in embeddings too; F32, F16 and BF16 are rounded as `requantize` does. Knows neither
files nor layers; `packing` calls it some rows at a time, and peak memory is about that of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from modelstore.block_types import (
    BLOCK_TYPES,
    FLOAT_TYPES,
    SUPPORTED_TYPES,
    BlockType,
    Bytes,
    Floats,
    float_values,
)
from modelstore.requantize import (
    BLOCK,
    FLOAT32,
    INT4_ZERO,
    INT8_ZERO,
    changes,
    join_nibbles,
    kind_of,
    pair_nibbles,
    round_rows,
)
from modelstore.source import SourceTensor
from shoal.errors import BadModelFile, UnsupportedModel

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
    """Whether the parts can be stacked by rows into one packed weight: same kind and block, same row length."""
    return len({(_kind_and_block(part.type, "plain"), part.shape[1]) for part in parts}) == 1


def is_exact(type_name: str, precision: str) -> bool:
    """Whether packing keeps all that a tensor of this type stands for."""
    return type_name in BLOCK_TYPES or precision == "float32"


def pack_linear(parts: Sequence[SourceTensor], *, precision: str = "int8") -> PackedLinear:
    """Pack tensors [N_i, K], stacked by rows, into one weight [sum N_i, K].

    precision: what floats become, see `requantize`. The tensors have passed `require_packable`.
    """
    assert can_fuse(parts), "parts of different kinds are packed one by one"
    kind, block = _kind_and_block(parts[0].type, precision)
    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if kind == "float32":
        weight = np.concatenate([to_float32(part) for part in parts])
        return PackedLinear(kind, n, k, 0, {"w": np.ascontiguousarray(weight.T)})  # [K, N]
    pieces = [_pack(part, precision) for part in parts]
    arrays = {name: _stack(name, [piece[name] for piece in pieces]) for name in pieces[0]}
    return PackedLinear(kind, n, k, block, arrays)


def pack_embedding(tensor: SourceTensor, *, precision: str = "int8") -> PackedLinear:
    """Pack an embedding [V, E] so that rows can be looked up and, if the head is tied, multiplied by."""
    kind, block = _kind_and_block(tensor.type, precision)
    arrays: dict[str, Array] = {"w": to_float32(tensor)} if kind == "float32" else _pack(tensor, precision)  # w: [V, E]
    return PackedLinear(kind, tensor.shape[0], tensor.shape[1], block, arrays)


def require_packable(tensor: SourceTensor) -> None:
    """Raise UnsupportedModel for a type that cannot be packed, BadModelFile for values that are no numbers.

    Of a matrix that has scales only these are read.
    """
    if tensor.type not in SUPPORTED_TYPES:
        known = ", ".join(SUPPORTED_TYPES)
        raise UnsupportedModel(f"tensor {tensor.name} is {tensor.type}; this version reads {known}")
    if not _is_finite(tensor):
        raise BadModelFile(f"tensor {tensor.name} has values that are infinite or no numbers: the file is damaged")


def unpermute_rotary(tensor: SourceTensor, num_heads: int, head_dim: int) -> SourceTensor:
    """Reorder query or key rows from a GGUF's interleaved rotary pairs to half-split order."""
    return replace(tensor, raw=tensor.raw[half_split_rows(num_heads, head_dim)])


def half_split_rows(num_heads: int, head_dim: int) -> NDArray[np.intp]:
    """Of each row in half-split order, where it is among interleaved rotary pairs: [heads D]."""
    return np.arange(num_heads * head_dim).reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def rounded_anew(tensor: SourceTensor, precision: str) -> bool:
    """Whether a matrix that its file has quantised would be rounded to a precision, were it not kept as it is."""
    return tensor.type in BLOCK_TYPES and len(tensor.shape) == 2 and changes(precision, BLOCK_TYPES[tensor.type].bits)


def as_floats(tensor: SourceTensor) -> SourceTensor:
    """The same values as if its file had them as floats."""
    return replace(tensor, type="F32", raw=to_float32(tensor).view(np.uint8))


def to_float32(tensor: SourceTensor) -> Floats:
    """Expand a tensor to the values it stands for, in its own shape."""
    raw = tensor.raw.reshape(-1, tensor.raw.shape[-1])
    return _expand(raw, tensor.type).reshape(tensor.shape)


def packed_bytes(tensor: SourceTensor, precision: str) -> int:
    """What a tensor takes once it is packed, a few percent more at most; precision: as of `pack_linear`."""
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    kind, block = _kind_and_block(tensor.type, precision)
    n, k = tensor.shape
    if kind == FLOAT32:
        return 4 * n * k
    # Codes, and as four bytes each a scale and with a minimum its correction; a zero point takes less than one.
    numbers = 9 if kind.endswith("_cz") else 5
    return n * -(-k // block) * (block // (1 if kind.startswith("int8") else 2) + numbers)


def _kind_and_block(type_name: str, precision: str) -> tuple[str, int]:
    if type_name in FLOAT_TYPES:
        return kind_of(precision), 0 if precision == FLOAT32 else BLOCK
    block_type = BLOCK_TYPES[type_name]
    return f"int{block_type.bits}{'_cz' if block_type.has_minimum else ''}", block_type.block


def _is_finite(tensor: SourceTensor) -> bool:
    raw = tensor.raw.reshape(-1, tensor.raw.shape[-1])
    if tensor.type in FLOAT_TYPES:
        return bool(np.isfinite(float_values(tensor.type, raw)).all())
    block_type = BLOCK_TYPES[tensor.type]
    # A scale of infinity times a factor of zero is no number, which is what is looked for.
    with np.errstate(invalid="ignore"):
        scale, minimum = block_type.scales(block_type.stored(raw))
    return bool(np.isfinite(scale).all()) and (minimum is None or bool(np.isfinite(minimum).all()))


def _stack(name: str, pieces: list[Array]) -> Array:
    if len(pieces) == 1:
        return pieces[0]
    axis = 1 if name == "correction" else 0
    stacked: NDArray[Any] = np.concatenate(cast(list[NDArray[Any]], pieces), axis=axis)
    return stacked


def _pack(tensor: SourceTensor, precision: str) -> dict[str, Array]:
    if tensor.type in FLOAT_TYPES:
        return round_rows(to_float32(tensor), precision)
    block_type = BLOCK_TYPES[tensor.type]
    stored = block_type.stored(tensor.raw)
    codes = block_type.codes(stored)
    scale, minimum = block_type.scales(stored)
    if minimum is not None:
        return _pack_with_minimum(block_type, codes, scale, minimum)
    shift = (INT4_ZERO if block_type.bits == 4 else INT8_ZERO) - block_type.zero
    if shift:
        codes = codes + np.uint8(shift)
    return {"q": pair_nibbles(codes) if block_type.bits == 4 else codes, "scale": scale}


def _pack_with_minimum(block_type: BlockType, codes: Bytes, scale: Floats, minimum: Floats) -> dict[str, Array]:
    """w = d q + m becomes d (q - z) + c with the integer z nearest to -m / d and c = m + z d: exact, on the fast kernel.

    Codes of 8 bits are moved by 128 - z, so that z itself needs no array.
    """
    ratio = np.divide(-minimum, scale, out=np.zeros_like(scale), where=scale != 0)
    least, most = (0, 15) if block_type.bits == 4 else (-96, INT8_ZERO)
    zero: Floats = np.clip(np.rint(ratio), least, most)
    correction: Floats = np.ascontiguousarray((minimum + zero * scale).T)  # [B, N]
    if block_type.bits == 4:
        packed_zero = join_nibbles(zero.astype(np.uint8))
        return {"q": pair_nibbles(codes), "scale": scale, "zero": packed_zero, "correction": correction}
    shift = (INT8_ZERO - zero).astype(np.uint8)
    return {"q": codes + shift[..., None], "scale": scale, "correction": correction}


def _expand(raw: Bytes, type_name: str) -> Floats:
    """The values of rows [N, bytes] as float32 [N, K]."""
    if type_name in FLOAT_TYPES:
        return float_values(type_name, raw)
    block_type = BLOCK_TYPES[type_name]
    stored = block_type.stored(raw)
    scale, minimum = block_type.scales(stored)
    values = (block_type.codes(stored).astype(np.float32) - np.float32(block_type.zero)) * scale[..., None]
    if minimum is not None:
        values += minimum[..., None]
    return values.reshape(raw.shape[0], -1)
