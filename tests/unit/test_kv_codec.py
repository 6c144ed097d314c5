"""Blocks of KV come back bit-exact or within half a step, take the bytes that were promised, and are read as documented."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InternalError
from worker.kv.codec import (
    GROUP,
    Block,
    BlockShape,
    KVCodec,
    decode,
    decode_into,
    encode,
    encoded_bytes,
    fitting_codec,
)

LOSSY = [KVCodec.INT8, KVCodec.K4V4]
# The models of the catalogue, the tail of a session, and sizes that no group divides.
SHAPES: list[BlockShape] = [
    (18, 2, 3, 64, 64),
    (1, 2, 1, 1, 16),
    (2, 2, 3, 33, 48),
    (3, 2, 2, 7, 256),
    (1, 2, 5, 95, 80),
]
# Building a block may take as long as a busy machine likes.
unhurried = settings(deadline=None)
# Float16 has no finer step near 0.
TINY = 2.0**-24


def make_block(
    shape: BlockShape = (2, 2, 3, 64, 64), *, seed: int = 0, spread: float = 1.0, offset: float = 0.0
) -> Block:
    """Noise around an offset of each channel, and tokens of very different sizes, as keys and values have."""
    generator = np.random.default_rng(seed)
    channels = generator.normal(0.0, offset, (shape[0], 2, shape[2], 1, shape[4])) if offset else 0.0
    sizes = np.exp(generator.normal(0.0, 1.0, (*shape[:4], 1)))
    return ((generator.normal(0.0, spread, shape) * sizes) + channels).astype(np.float32)


def blocks() -> st.SearchStrategy[Block]:
    shapes = st.tuples(
        st.integers(1, 3),
        st.just(2),
        st.integers(1, 3),
        st.integers(1, 70),
        st.integers(1, 6).map(lambda sixteenths: 16 * sixteenths),
    )
    spreads = st.sampled_from([0.0, 1e-42, 1e-9, 1e-4, 1.0, 30.0])
    offsets = st.sampled_from([0.0, 1e-7, 1.0, 22_500.0 / 5])
    return st.builds(
        lambda shape, seed, spread, offset: make_block(shape, seed=seed, spread=spread, offset=offset),
        shapes,
        st.integers(0, 2**32 - 1),
        spreads,
        offsets,
    )


def half_steps_int8(block: Block) -> np.ndarray:
    """Half of the step that the largest value of each token and head asks for, with what rounding it to float16 adds."""
    steps = np.abs(block).max(axis=-1, keepdims=True).astype(np.float64) / 127
    return np.broadcast_to((steps * (1 + 2**-9) + TINY) / 2, block.shape)


def half_steps_4_bit(block: Block) -> np.ndarray:
    """Half of a fifteenth of each group's range, which rounding its low to float16 may have made wider."""
    result = np.empty(block.shape)
    for half, axis in ((0, -2), (1, -1)):
        values, target = block[:, half].astype(np.float64), result[:, half]
        for start in range(0, values.shape[axis], GROUP):
            index: tuple[Any, ...] = (..., slice(start, start + GROUP), *[slice(None)] * (-1 - axis))
            low = values[index].min(axis=axis, keepdims=True)
            wide = values[index].max(axis=axis, keepdims=True) - low + np.abs(low) * 2**-10 + TINY
            # The last term: sums of float32 near a large low are rounded.
            target[index] = (wide / 15 * (1 + 2**-9) + TINY) / 2 + np.abs(values[index]) * 2**-22
    return result


@unhurried
@given(blocks())
def test_lossless_gives_back_every_bit(block: Block) -> None:
    assert decode(encode(block, KVCodec.LOSSLESS), KVCodec.LOSSLESS, block.shape).tobytes() == block.tobytes()


@unhurried
@given(blocks())
def test_int8_is_off_by_at_most_half_a_step(block: Block) -> None:
    errors = np.abs(decode(encode(block, KVCodec.INT8), KVCodec.INT8, block.shape) - block.astype(np.float64))
    assert (errors <= half_steps_int8(block)).all()


@unhurried
@given(blocks())
def test_k4v4_is_off_by_at_most_half_a_step(block: Block) -> None:
    errors = np.abs(decode(encode(block, KVCodec.K4V4), KVCodec.K4V4, block.shape) - block.astype(np.float64))
    assert (errors <= half_steps_4_bit(block)).all()


@unhurried
@given(blocks(), st.sampled_from(KVCodec))
def test_a_block_takes_the_bytes_it_was_said_to_take(block: Block, codec: KVCodec) -> None:
    assert len(encode(block, codec)) == encoded_bytes(codec, block.shape)


@pytest.mark.parametrize(("codec", "most"), [(KVCodec.LOSSLESS, 1.0), (KVCodec.INT8, 0.26), (KVCodec.K4V4, 0.16)])
def test_a_full_block_is_as_small_as_promised(codec: KVCodec, most: float) -> None:
    for layers, heads, size in [(18, 3, 64), (30, 3, 64), (4, 8, 128), (4, 1, 256)]:
        shape = (layers, 2, heads, 64, size)
        assert encoded_bytes(codec, shape) <= most * 4 * np.prod(shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", KVCodec)
def test_the_bytes_of_a_range_are_those_of_its_layers_joined(codec: KVCodec, shape: BlockShape) -> None:
    block = make_block(shape, offset=2.0)
    assert encode(block, codec) == b"".join(encode(layer[None], codec) for layer in block)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", KVCodec)
def test_a_view_of_the_arena_is_read_and_written_in_place(codec: KVCodec, shape: BlockShape) -> None:
    num_layers, _, num_heads, num_tokens, head_dim = shape
    arena = np.full((num_layers, 2, 3, num_heads, num_tokens + 9, head_dim), 7.0, np.float32)
    view = arena[:, :, 1, :, 4 : 4 + num_tokens]
    block = make_block(shape, offset=2.0)
    data = encode(block, codec)
    decode_into(data, codec, view)
    assert view.tobytes() == decode(data, codec, shape).tobytes()
    if codec is KVCodec.LOSSLESS:
        assert encode(view, codec) == data
    view[...] = 7.0
    assert (arena == 7.0).all()


@pytest.mark.parametrize("codec", KVCodec)
def test_a_strided_block_is_written_as_its_copy_is(codec: KVCodec) -> None:
    wide = make_block((2, 2, 3, 128, 64), offset=2.0)
    assert encode(wide[..., ::2, :], codec) == encode(wide[..., ::2, :].copy(), codec)


@pytest.mark.parametrize("codec", KVCodec)
def test_bytes_may_lie_anywhere_in_a_larger_value(codec: KVCodec) -> None:
    block = make_block((1, 2, 1, 5, 16))
    data = encode(block, codec)
    shifted = memoryview(b"x" + data + b"y")[1:-1]
    assert decode(shifted, codec, block.shape).tobytes() == decode(data, codec, block.shape).tobytes()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 0.0625, 22_496.0])
def test_what_is_constant_and_fits_float16_comes_back_exactly(codec: KVCodec, value: float) -> None:
    if codec is KVCodec.INT8 and value != 0.0:
        value *= 127 / 128  # The scale then is a float16.
    block = np.full((1, 2, 2, 40, 16), value, np.float32)
    assert (decode(encode(block, codec), codec, block.shape) == block).all()


@pytest.mark.parametrize("codec", KVCodec)
def test_the_largest_values_that_occur_fit(codec: KVCodec) -> None:
    block = make_block(spread=0.1)
    block[0, 0, 0, 3, 5], block[1, 1, 2, 60, 63] = 22_500.0, -22_500.0
    assert fitting_codec(block, codec) is codec
    restored = decode(encode(block, codec), codec, block.shape)
    assert abs(restored[0, 0, 0, 3, 5] - 22_500.0) <= 22_500.0 / 15
    # Only what shares a scale with an outlier pays for it.
    assert np.abs(restored[1, 0] - block[1, 0]).max() < 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("half", [0, 1])
def test_what_float16_cannot_hold_is_refused_and_fits_lossless(codec: KVCodec, half: int, value: float) -> None:
    block = make_block()
    block[1, half, 2, 33, 40] = value
    with pytest.raises(InternalError, match=f"was to be stored as {codec.value}.*store it as f32"):
        encode(block, codec)
    assert fitting_codec(block, codec) is KVCodec.LOSSLESS
    assert decode(encode(block, KVCodec.LOSSLESS), KVCodec.LOSSLESS, block.shape).tobytes() == block.tobytes()


@pytest.mark.parametrize(("codec", "largest"), [(KVCodec.INT8, 8_319_008.0), (KVCodec.K4V4, 65_504.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_block_that_fits_can_be_written(codec: KVCodec, largest: float, sign: int) -> None:
    block = make_block()
    block[:, :, 0, :, 0] = sign * largest
    block[0, 0, 1, 0] = -sign * largest
    assert fitting_codec(block, codec) is codec
    assert np.isfinite(decode(encode(block, codec), codec, block.shape)).all()
    block[1, 1, 2, 0, 0] = -sign * np.nextafter(np.float32(largest), np.float32(np.inf))
    assert fitting_codec(block, codec) is KVCodec.LOSSLESS


def test_lossless_fits_whatever_there_is() -> None:
    assert fitting_codec(np.full((1, 2, 1, 1, 16), np.nan, np.float32), KVCodec.LOSSLESS) is KVCodec.LOSSLESS


@pytest.mark.parametrize("codec", KVCodec)
@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused_and_nothing_is_written(codec: KVCodec, change: int) -> None:
    shape = (1, 2, 2, 5, 16)
    data = encode(make_block(shape), codec)
    wrong = data[:change] if change < 0 else data + b"\0"
    out = np.full(shape, 7.0, np.float32)
    with pytest.raises(InternalError, match=rf"takes {len(data)} bytes as {codec.value}, and {len(wrong)} were given"):
        decode_into(wrong, codec, out)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "shape", [(), (2, 3, 64, 64), (1, 3, 2, 64, 64), (0, 2, 1, 64, 64), (1, 2, 1, 0, 64), (1, 2, 1, 64, -64)]
)
@pytest.mark.parametrize("codec", KVCodec)
def test_what_is_no_shape_of_a_block_is_refused(codec: KVCodec, shape: tuple[int, ...]) -> None:
    with pytest.raises(InternalError, match=r"axes \[layer, 2, kv_head, token, head_dim\]"):
        encoded_bytes(codec, shape)
    with pytest.raises(InternalError, match=r"axes \[layer, 2, kv_head, token, head_dim\]"):
        decode(b"", codec, shape)
    if all(size >= 0 for size in shape):
        with pytest.raises(InternalError, match=r"axes \[layer, 2, kv_head, token, head_dim\]"):
            encode(np.zeros(shape, np.float32), codec)


@pytest.mark.parametrize("codec", KVCodec)
def test_another_type_than_float32_is_refused(codec: KVCodec) -> None:
    block = np.zeros((1, 2, 1, 2, 16), np.float64)
    with pytest.raises(InternalError, match="float64"):
        encode(block, codec)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="float64"):
        decode_into(bytes(encoded_bytes(codec, block.shape)), codec, block)  # type: ignore[arg-type]


class SlowReader:
    """Takes numbers from bytes one by one, as the layout is documented."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def take(self, kind: str, *sizes: int) -> np.ndarray:
        count = int(np.prod(sizes))
        numbers = struct.unpack_from(f"<{count}{kind}", self._data, self._place)
        self._place += struct.calcsize(f"<{count}{kind}")
        return np.array(numbers).reshape(sizes)

    def ends(self) -> bool:
        return self._place == len(self._data)


@pytest.mark.parametrize("shape", [(2, 2, 2, 33, 48), (1, 2, 1, 64, 32), (2, 2, 1, 3, 16)])
def test_int8_is_laid_out_as_documented(shape: BlockShape) -> None:
    data = encode(make_block(shape, offset=2.0), KVCodec.INT8)
    decoded, reader = decode(data, KVCodec.INT8, shape), SlowReader(data)
    for layer in range(shape[0]):
        codes, scales = reader.take("b", *shape[1:]), reader.take("e", *shape[1:4])
        np.testing.assert_array_equal(decoded[layer], (codes * scales[..., None]).astype(np.float32))
    assert reader.ends()


@pytest.mark.parametrize("shape", [(2, 2, 2, 33, 48), (1, 2, 1, 64, 32), (2, 2, 1, 3, 16)])
def test_k4v4_is_laid_out_as_documented(shape: BlockShape) -> None:
    num_layers, _, num_heads, num_tokens, head_dim = shape
    of_keys, of_values = (num_heads, -(-num_tokens // 32), head_dim), (num_heads, num_tokens, -(-head_dim // 32))
    data = encode(make_block(shape, offset=2.0), KVCodec.K4V4)
    decoded, reader = decode(data, KVCodec.K4V4, shape), SlowReader(data)
    for layer in range(num_layers):
        pairs = reader.take("B", num_heads, num_tokens, head_dim)
        key_scales, key_lows = reader.take("e", *of_keys), reader.take("e", *of_keys)
        value_scales, value_lows = reader.take("e", *of_values), reader.take("e", *of_values)
        for head, token, channel in itertools.product(range(num_heads), range(num_tokens), range(head_dim)):
            pair = int(pairs[head, token, channel])
            key_group, value_group = (head, token // 32, channel), (head, token, channel // 32)
            key = np.float32(pair % 16 * key_scales[key_group]) + np.float32(key_lows[key_group])
            value = np.float32(pair // 16 * value_scales[value_group]) + np.float32(value_lows[value_group])
            assert decoded[layer, 0, head, token, channel] == key
            assert decoded[layer, 1, head, token, channel] == value
    assert reader.ends()


def test_keys_are_grouped_by_channel_and_values_by_token() -> None:
    """Channels, or tokens, of very different sizes: each kind is near-exact along its own axis only."""
    sizes = np.geomspace(1e-3, 1e3, 64, dtype=np.float32)
    noise = np.random.default_rng(0).uniform(-1, 1, (1, 1, 1, 64, 64)).astype(np.float32)
    block = np.concatenate([noise * sizes, noise * sizes[:, None]], axis=1)
    relative = np.abs(decode(encode(block, KVCodec.K4V4), KVCodec.K4V4, block.shape) - block)
    assert (relative[0, 0] <= sizes / 15 * 1.01).all()
    assert (relative[0, 1] <= sizes[:, None] / 15 * 1.01).all()
