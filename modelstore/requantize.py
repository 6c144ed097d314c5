"""Rounds float weights to blocks of 8 or 4 bits, and says for each weight of a model which of them it gets.

Decides scales by least squares rather than by the largest value alone, and where zero lies for asymmetric blocks. Rows that
are no whole number of blocks are filled up with zeros. Knows neither files nor layers' arithmetic: gets float32 rows and
hands out arrays as `modelstore.manifest.Linear` names them. `quantize` and `packing` call it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.errors import InvalidRequest

BLOCK = 32
INT8_ZERO = 128
INT4_ZERO = 8

FLOAT32, INT8, INT4, INT4_ASYM = "float32", "int8", "int4", "int4-asym"
PRECISIONS = (FLOAT32, INT8, INT4, INT4_ASYM)
_BITS = {INT8: 8, INT4: 4, INT4_ASYM: 4}

# The largest value of a block lands on -8 divided by one of these, times 8. Measured on normal values: an error of 0.0840 of
# the values with the middle one, 0.0810 with these seven, 0.0809 with 25 of them.
_DIVISORS = tuple(np.linspace(7.0, 9.4, 7, dtype=np.float32))
# Shares of a block's range that the 16 steps cover. Measured likewise: 0.0792 with all of the range, 0.0770 with these.
_SHARES = tuple(np.linspace(0.75, 1.05, 7, dtype=np.float32))

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Array = Bytes | Floats


@dataclass(frozen=True, slots=True)
class Precisions:
    """What the weights of a model become that its file has as floats.

    layers: one precision for all layers, or one for each. ends: of the embedding and of a head of its own. is_forced: also
    of weights that the file has quantised, if they get fewer bits than they have, or float32.
    """

    layers: str | tuple[str, ...] = INT8
    ends: str = INT8
    is_forced: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a precision that is none."""
        for precision in (self.ends, *((self.layers,) if isinstance(self.layers, str) else self.layers)):
            if precision not in PRECISIONS:
                raise InvalidRequest("precision", f"{precision} is none of {', '.join(PRECISIONS)}")

    def of_layer(self, index: int) -> str:
        return self.layers if isinstance(self.layers, str) else self.layers[index]


def uniform(precision: str, *, is_forced: bool = False) -> Precisions:
    """One precision for all layers; the ends stay at 8 bits where layers get fewer."""
    return Precisions(precision, FLOAT32 if precision == FLOAT32 else INT8, is_forced)


def changes(precision: str, source_bits: int) -> bool:
    """Whether weights of so many bits a value, scales left out, get fewer of them, or become floats."""
    return precision == FLOAT32 or _BITS[precision] < source_bits


def padded_blocks(values: Floats) -> Floats:
    """Rows [N, K] as blocks [N, ceil(K / 32), 32], the last one filled up with zeros."""
    missing = -values.shape[1] % BLOCK
    if missing:
        values = np.pad(values, ((0, 0), (0, missing)))
    return values.reshape(values.shape[0], -1, BLOCK)


def round_rows(values: Floats, precision: str) -> dict[str, Array]:
    """Round rows [N, K] to a precision of 8 or 4 bits; the arrays of kind_of(precision)."""
    blocks = padded_blocks(values)
    if precision == INT8:
        return _round_to_int8(blocks)
    return _round_to_int4(blocks) if precision == INT4 else _round_to_int4_asym(blocks)


def kind_of(precision: str) -> str:
    """The kind of packed weight that a precision gives, see `modelstore.manifest.Linear`."""
    return INT4 if precision == INT4_ASYM else precision


def _round_to_int8(blocks: Floats) -> dict[str, Array]:
    scale = np.abs(blocks).max(axis=2) / np.float32(127)  # [N, B]
    steps = np.rint(blocks / np.where(scale == 0, np.float32(1), scale)[..., None])
    # A scale so small that it is rounded itself would lead past 8 bits.
    return {"q": np.clip(steps + INT8_ZERO, 0, 255).astype(np.uint8), "scale": scale}


def _round_to_int4(blocks: Floats) -> dict[str, Array]:
    """Each block's scale is the best of some; its sign is such that the largest value has the step more below zero."""
    blocks, size = _normalised(blocks)
    top = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)  # [N, B, 1]
    best = _Best(blocks)
    for divisor in _DIVISORS:
        steps = np.rint(blocks * (-divisor * top))
        np.clip(steps, -INT4_ZERO, 15 - INT4_ZERO, out=steps)
        best.offer(steps, np.float32(INT4_ZERO))
    return {"q": best.packed(), "scale": best.scale * size}


def _round_to_int4_asym(blocks: Floats) -> dict[str, Array]:
    """Each block has a scale and a whole zero point, so that its 16 steps lie where its values are."""
    blocks, size = _normalised(blocks)
    low = np.minimum(blocks.min(axis=2), 0)  # [N, B]
    width = np.maximum(blocks.max(axis=2), 0) - low
    best = _Best(blocks)
    for share in _SHARES:
        inverse = _inverse(width * (share / 15))  # [N, B]
        zero = np.clip(np.rint(-low * share * inverse), 0, 15)
        steps = np.rint(blocks * inverse[..., None])
        np.clip(steps, -zero[..., None], 15 - zero[..., None], out=steps)
        best.offer(steps, zero)
    return {"q": best.packed(), "scale": best.scale * size, "zero": join_nibbles(best.zero.astype(np.uint8))}


def _normalised(blocks: Floats) -> tuple[Floats, Floats]:
    """Blocks whose largest value is 1 or -1, so that no sum is too large or small, and the sizes they had."""
    size: Floats = np.abs(blocks).max(axis=2)  # [N, B]
    unit = np.divide(blocks, np.where(size == 0, np.float32(1), size)[..., None], dtype=np.float32)
    return unit, size


class _Best:
    """Of roundings offered, for each block the one with the least squared error, its scale by least squares.

    With steps q and values x, the best scale is qx / qq, and leaves an error of xx - qx^2 / qq: its second part is the gain.
    """

    def __init__(self, blocks: Floats) -> None:
        self._blocks = blocks
        self._gain = np.full(blocks.shape[:2], -1, np.float32)
        self.scale: Floats = np.zeros(blocks.shape[:2], np.float32)
        self.zero: Floats = np.zeros(blocks.shape[:2], np.float32)

    def offer(self, steps: Floats, zero: Floats | np.float32) -> None:
        along = np.einsum("nbk,nbk->nb", steps, self._blocks)
        squares = np.einsum("nbk,nbk->nb", steps, steps)
        scale = along * _inverse(squares)
        gain = scale * along
        is_better = gain > self._gain
        np.copyto(self._gain, gain, where=is_better)
        np.copyto(self.scale, scale, where=is_better)
        np.copyto(self.zero, zero, where=is_better)

    def packed(self) -> Bytes:
        """The steps [N, B, 16], each value rounded anew to the scale that was found; two a byte, the first low."""
        steps = np.rint(self._blocks * _inverse(self.scale)[..., None]) + self.zero[..., None]
        return pair_nibbles(np.clip(steps, 0, 15).astype(np.uint8))


def pair_nibbles(values: Bytes) -> Bytes:
    """Values 2 i and 2 i + 1 of 4 bits in byte i, the first low, as MatMulNBits wants them: [..., b] -> [..., b / 2]."""
    pairs = np.ascontiguousarray(values).view("<u2")
    joined: Bytes = (pairs | (pairs >> np.uint16(4))).astype(np.uint8)
    return joined


def join_nibbles(values: Bytes) -> Bytes:
    """The same of rows [N, B]; an odd last value is joined with 0."""
    if values.shape[1] % 2:
        values = np.concatenate([values, np.zeros_like(values[:, :1])], axis=1)
    return pair_nibbles(values)


def restored(arrays: dict[str, Array], num_values: int) -> Floats:
    """The values [N, K] that rounded rows stand for."""
    q, scale = arrays["q"], arrays["scale"]
    num_rows, num_blocks = scale.shape
    if q.shape[2] == BLOCK:
        steps = q.astype(np.float32) - INT8_ZERO
    else:
        steps = _nibbles(q).reshape(num_rows, num_blocks, BLOCK)
        steps -= _nibbles(arrays["zero"])[:, :num_blocks, None] if "zero" in arrays else np.float32(INT4_ZERO)
    values: Floats = (steps * scale[..., None]).reshape(num_rows, -1)[:, :num_values]
    return values


def _nibbles(pairs: Array) -> Floats:
    """What join_nibbles joined, as numbers, a row for each of the first axis."""
    stored = pairs.astype(np.uint8, copy=False)
    return np.stack([stored & 0x0F, stored >> 4], axis=-1).reshape(len(stored), -1).astype(np.float32)


def _inverse(values: Floats) -> Floats:
    """1 / x, and 0 where x is 0."""
    inverse: Floats = np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)
    return inverse
