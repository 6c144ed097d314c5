"""Makes tensors of every block type for tests, and reads them as the format's own package does.

The package packs only the simpler types; blocks of the others are random bytes whose scales are set so that the values
are about normal. What a packed weight stands for is computed here as the operators' documentation states it.
"""

from __future__ import annotations

import zlib
from functools import cache

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from modelstore.quantize import PackedLinear
from modelstore.source import SourceTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

FLOATS = ("F32", "F16", "BF16")
# Where a block has its float16 scale, and where its float16 minimum, if it has one.
HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
BLOCKS = tuple(HALVES)
# The minimum, per scale, that puts the mean of random values at 0.
_CENTRE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def block_sizes(type_name: str) -> tuple[int, int]:
    """Values and bytes of a stored block."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(values), int(num_bytes)


def set_halves(raw: Bytes, type_name: str, values: dict[int, Floats | float]) -> None:
    """Overwrite float16 numbers in rows of blocks [N, bytes]; values: for each offset one number, or [N, S] of them."""
    stored = raw.reshape(len(raw), -1, block_sizes(type_name)[1])
    for offset, value in values.items():
        halves = np.broadcast_to(np.asarray(value, np.float16), stored.shape[:2])
        stored[..., offset : offset + 2] = np.ascontiguousarray(halves)[..., None].view(np.uint8)


def random_blocks(rng: np.random.Generator, type_name: str, n: int, k: int, spread: float = 1.0) -> Bytes:
    """Rows [N, bytes] of random codes and factors whose values have this standard deviation."""
    values, num_bytes = block_sizes(type_name)
    raw = rng.integers(0, 256, (n, k // values * num_bytes), dtype=np.uint8)
    set_scale(raw, type_name, spread / _spread_at_1(type_name))
    return raw


def set_scale(raw: Bytes, type_name: str, scale: float) -> None:
    offsets = HALVES[type_name]
    set_halves(raw, type_name, dict(zip(offsets, (scale, scale * _CENTRE.get(type_name, 0.0)), strict=False)))


@cache
def _spread_at_1(type_name: str) -> float:
    values, num_bytes = block_sizes(type_name)
    raw = np.random.default_rng(0).integers(0, 256, (64, 4096 // values * num_bytes), dtype=np.uint8)
    set_scale(raw, type_name, 1.0)
    return float(dequantized(raw, type_name).std())


def pack_values(values: Floats, type_name: str) -> Bytes:
    """Values [N, K] as rows of a type; of a type that the package cannot pack, random ones of the same spread."""
    kind = GGMLQuantizationType[type_name]
    try:
        packed: Bytes = gguf.quants.quantize(values, kind).view(np.uint8).reshape(len(values), -1)
    except NotImplementedError:
        rng = np.random.default_rng(zlib.crc32(values.tobytes()))
        return random_blocks(rng, type_name, len(values), values.shape[1], float(values.std()))
    return packed


def make_tensor(type_name: str, n: int = 6, k: int = 256, seed: int = 0, offset: float = 0.0) -> SourceTensor:
    values = np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32) + np.float32(offset)
    return make_tensor_of(values, type_name)


def make_tensor_of(values: Floats, type_name: str) -> SourceTensor:
    return SourceTensor("blk.0.w", type_name, values.shape, pack_values(values, type_name))


def dequantized(raw: Bytes, type_name: str) -> Floats:
    """What the format's own package reads from rows of blocks."""
    values: Floats = gguf.quants.dequantize(raw, GGMLQuantizationType[type_name])
    return values.reshape(len(raw), -1)


def true_values(tensor: SourceTensor) -> Floats:
    raw = np.ascontiguousarray(tensor.raw)
    # The package wants these two as what they are.
    kinds = {"F32": np.float32, "F16": np.float16}
    return dequantized(raw.view(kinds[tensor.type]) if tensor.type in kinds else raw, tensor.type).astype(np.float32)


def packed_values(packed: PackedLinear) -> Floats:
    """What MatMulNBits multiplies by, as its documentation states it, with what the graph adds to it."""
    arrays = packed.arrays
    if packed.kind == "float32":
        return arrays["w"].T.astype(np.float32)
    q = arrays["q"].view(np.uint8)
    zero: NDArray[np.generic] = np.full(arrays["scale"].shape, 128)
    if packed.kind.startswith("int4"):
        q = np.stack([q & 15, q >> 4], axis=-1).reshape(*q.shape[:-1], -1)
        zero = np.full(arrays["scale"].shape, 8)
    if "zero" in arrays:
        packed_zero = arrays["zero"].view(np.uint8)
        pairs = np.stack([packed_zero & 15, packed_zero >> 4], axis=-1).reshape(packed.n, -1)
        zero = pairs[:, : zero.shape[1]]
    values = (q.astype(np.float32) - zero[..., None].astype(np.float32)) * arrays["scale"][..., None]
    if "correction" in arrays:
        values = values + arrays["correction"].T[..., None]
    result: Floats = values.reshape(packed.n, -1)[:, : packed.k].astype(np.float32)
    return result
