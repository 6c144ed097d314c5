"""Stored blocks: what was packed comes back, and whatever else was stored is a reason, never a payload."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kv import BlockHash, BlockKey
from shoal.types import LayerRange
from worker.kv.block import HEADER_BYTES, BlockForm, BlockLabel, Mismatch, Payload, pack, unpack

CODECS = frozenset({"f32", "int8"})
PAYLOAD = Random(4).randbytes(300)
LABEL = BlockLabel(
    key=BlockKey(bytes(range(32))),
    model_digest="ab" * 32,
    layers=LayerRange(3, 9),
    num_kv_heads=3,
    num_tokens=64,
    head_dim=16,
    position=128,
)
OTHERS = {
    Mismatch.OTHER_KEY: replace(LABEL, key=BlockKey(bytes(range(1, 33)))),
    Mismatch.OTHER_MODEL: replace(LABEL, model_digest="ab" * 31 + "ac"),
    Mismatch.OTHER_POSITION: replace(LABEL, position=64),
}


def test_a_payload_comes_back_with_its_codec_and_is_not_copied() -> None:
    data = pack(LABEL, "int8", PAYLOAD, is_exact=True)
    found = unpack(data, LABEL, CODECS)
    assert isinstance(found, Payload)
    assert (found.codec, bytes(found.data)) == ("int8", PAYLOAD)
    assert found.data.obj is data
    assert len(data) == HEADER_BYTES + len(PAYLOAD)


@given(
    st.binary(max_size=200),
    st.sampled_from(["f32", "int8"]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 40),
    st.booleans(),
)
def test_every_payload_comes_back(payload: bytes, codec: str, position: int, start: int, is_exact: bool) -> None:
    label = replace(LABEL, position=position, layers=LayerRange(start, start + 1))
    found = unpack(memoryview(pack(label, codec, memoryview(payload), is_exact=is_exact)), label, CODECS)
    assert found == Payload(codec, memoryview(payload), is_exact)


def test_a_header_is_a_whole_number_of_cache_lines() -> None:
    assert HEADER_BYTES == 128


@pytest.mark.parametrize("reason", OTHERS)
def test_a_sound_block_of_another_label_is_a_mismatch(reason: Mismatch) -> None:
    assert unpack(pack(OTHERS[reason], "f32", PAYLOAD, is_exact=True), LABEL, CODECS) is reason


@pytest.mark.parametrize("layers", [LayerRange(2, 9), LayerRange(3, 8), LayerRange(4, 10), LayerRange(0, 6)])
def test_a_block_of_another_cut_is_a_mismatch(layers: LayerRange) -> None:
    assert (
        unpack(pack(replace(LABEL, layers=layers), "f32", PAYLOAD, is_exact=True), LABEL, CODECS)
        is Mismatch.OTHER_LAYERS
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(LABEL, num_kv_heads=4),
        replace(LABEL, num_tokens=32),
        replace(LABEL, head_dim=8),
        # As many values as the block that is expected.
        replace(LABEL, num_kv_heads=16, head_dim=3),
    ],
)
def test_a_block_of_another_shape_is_a_mismatch(other: BlockLabel) -> None:
    assert unpack(pack(other, "f32", PAYLOAD, is_exact=True), LABEL, CODECS) is Mismatch.OTHER_SHAPE


@pytest.mark.parametrize("codec", ["k4v4", "INT8", "int", "int80"])
def test_a_codec_that_the_reader_does_not_allow_is_a_mismatch(codec: str) -> None:
    assert unpack(pack(LABEL, codec, PAYLOAD, is_exact=True), LABEL, CODECS) is Mismatch.OTHER_CODEC


def test_a_reader_that_wants_exact_bytes_takes_no_lossy_ones() -> None:
    assert unpack(pack(LABEL, "int8", PAYLOAD, is_exact=True), LABEL, {"f32"}) is Mismatch.OTHER_CODEC


@pytest.mark.parametrize(("at", "reason"), [(0, Mismatch.NOT_A_BLOCK), (4, Mismatch.OTHER_VERSION)])
def test_what_is_no_block_of_this_version_is_a_mismatch(at: int, reason: Mismatch) -> None:
    data = bytearray(pack(LABEL, "f32", PAYLOAD, is_exact=True))
    data[at] += 1
    assert unpack(memoryview(data), LABEL, CODECS) is reason


def test_no_flipped_bit_is_accepted() -> None:
    sound = pack(LABEL, "f32", PAYLOAD, is_exact=True)
    for bit in range(len(sound) * 8):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        assert isinstance(unpack(memoryview(data), LABEL, CODECS), Mismatch), f"bit {bit}"


def test_a_flipped_bit_in_what_the_reader_compares_counts_as_damage() -> None:
    data = bytearray(pack(LABEL, "f32", PAYLOAD, is_exact=True))
    for at in (30, 70, 100, HEADER_BYTES - 1, HEADER_BYTES, len(data) - 1):
        data[at] ^= 16
        assert unpack(memoryview(data), LABEL, CODECS) is Mismatch.BAD_CHECKSUM
        data[at] ^= 16


def test_no_block_that_was_cut_is_accepted() -> None:
    sound = pack(LABEL, "f32", PAYLOAD, is_exact=True)
    assert {unpack(sound[:num_bytes], LABEL, CODECS) for num_bytes in range(len(sound))} == {Mismatch.TRUNCATED}


@pytest.mark.parametrize("more", [b"\0", b"x", bytes(HEADER_BYTES), pack(LABEL, "f32", PAYLOAD, is_exact=True)])
def test_bytes_behind_the_payload_are_a_mismatch(more: bytes) -> None:
    assert unpack(pack(LABEL, "f32", PAYLOAD, is_exact=True) + more, LABEL, CODECS) is Mismatch.TRAILING_BYTES


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1), st.binary(min_size=1, max_size=64))
def test_overwritten_bytes_are_never_accepted_as_something_else(at: int, patch: bytes) -> None:
    sound = pack(LABEL, "f32", PAYLOAD, is_exact=True)
    data = sound[:at] + patch + sound[at + len(patch) :]
    found = unpack(data, LABEL, CODECS)
    assert isinstance(found, Mismatch) or data == sound


@given(st.binary(max_size=400))
def test_any_other_bytes_are_a_mismatch(data: bytes) -> None:
    assert isinstance(unpack(data, LABEL, CODECS), Mismatch)


@pytest.mark.parametrize("codec", ["", "k4-v4", "int8\0", "entropy coded", "ä", "a" * 21])
def test_a_codec_s_name_that_would_not_come_back_is_refused(codec: str) -> None:
    with pytest.raises(ValueError, match="a codec is named by"):
        pack(LABEL, codec, PAYLOAD, is_exact=True)


def test_a_label_of_no_block_is_refused() -> None:
    for change in ({"key": b"short"}, {"model_digest": "ab"}, {"num_tokens": 0}, {"head_dim": 0}, {"position": -1}):
        with pytest.raises(ValueError):
            replace(LABEL, **change)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 2), (1, 3), (3, 4), (2, 9), (5, 5), (4, 9), (0, None)])
def test_a_part_of_a_prompt_s_blocks_is_as_in_the_whole(start: int, stop: int | None) -> None:
    form = BlockForm("ab" * 32, LayerRange(3, 9), num_kv_heads=3, head_dim=16)
    names = [BlockHash(bytes([number]) * 32) for number in range(4)]

    whole = form.chain(names)

    assert form.chain(names, start, stop) == whole[start:stop]
    assert [block.parent for block in whole] == [None, *(block.key for block in whole[:-1])]
    assert [block.is_newest for block in whole] == [False, False, False, True]
