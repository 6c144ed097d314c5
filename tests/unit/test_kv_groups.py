"""How blocks are cut into values and joined again, also for stages with other layers, and what is no block."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types import LayerRange
from tests.support.kv_blocks import layer_payload, make_blocks, pack_stage
from worker.kv.block import Mismatch, StageBlock, pack, unpack
from worker.kv.codec import KVCodec
from worker.kv.groups import MAX_VALUE_BYTES, Entry, choose, cut, join, read_entry, read_manifest

CODECS = {codec.value for codec in KVCodec}


def block(start: int = 0, stop: int = 10) -> StageBlock:
    return make_blocks(1, LayerRange(start, stop))[0]


def cut_sound(of: StageBlock, codec: KVCodec = KVCodec.LOSSLESS, *, is_exact: bool | None = None) -> dict[Entry, bytes]:
    values = cut(of, pack_stage(of, codec, is_exact=is_exact))
    assert not isinstance(values, Mismatch)
    return dict(values)


def layers_of(entries: Sequence[Entry]) -> list[str]:
    return [str(entry.layers) for entry in entries]


def test_values_are_of_as_many_layers_as_fit() -> None:
    values = cut_sound(block())

    assert layers_of(list(values)) == ["[0, 7)", "[7, 10)"]
    assert all(len(value) == entry.num_bytes <= MAX_VALUE_BYTES for entry, value in values.items())


def test_stages_with_other_layers_make_the_same_values_where_they_can() -> None:
    assert layers_of(list(cut_sound(block(4, 16)))) == ["[4, 7)", "[7, 14)", "[14, 16)"]
    assert cut_sound(block(0, 14)).items() & cut_sound(block(7, 20)).items()


def test_a_layer_that_is_too_large_is_a_value_of_its_own() -> None:
    large = make_blocks(1, LayerRange(0, 3), head_dim=512)[0]

    assert layers_of(list(cut_sound(large))) == ["[0, 1)", "[1, 2)", "[2, 3)"]


def test_a_damaged_block_is_not_cut() -> None:
    packed = bytearray(pack_stage(block()))
    packed[-1] ^= 1

    assert cut(block(), bytes(packed)) is Mismatch.BAD_CHECKSUM


def test_a_payload_of_another_length_than_its_codec_s_is_not_cut() -> None:
    assert cut(block(), pack(block().label, "f32", b"", is_exact=True)) is Mismatch.OTHER_SHAPE


@pytest.mark.parametrize("codec", KVCodec)
def test_what_was_cut_is_joined_to_the_same_bytes(codec: KVCodec) -> None:
    values = cut_sound(block(), codec)
    chosen = choose(list(values), LayerRange(0, 10))
    assert chosen is not None

    assert join(block(), chosen, [values[entry] for entry in chosen]) == pack_stage(block(), codec)


@given(st.integers(0, 19), st.integers(1, 20), st.lists(st.integers(1, 29), min_size=1, max_size=3, unique=True))
def test_any_layers_are_joined_from_whatever_stages_wrote(start: int, count: int, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 40]
    values: dict[Entry, bytes] = {}
    for first, last in itertools.pairwise(bounds):
        values |= cut_sound(block(first, last))
    wanted = block(start, start + count)

    chosen = choose(list(values), wanted.label.layers)
    assert chosen is not None
    assert join(wanted, chosen, [values[entry] for entry in chosen]) == pack_stage(wanted)


def test_layers_that_nobody_wrote_are_not_there() -> None:
    values = [*cut_sound(block(0, 5)), *cut_sound(block(6, 10))]

    assert choose(values, LayerRange(0, 10)) is None
    assert choose(values, LayerRange(6, 10)) is not None


def test_values_of_different_codecs_are_not_mixed() -> None:
    values = [*cut_sound(block(0, 5)), *cut_sound(block(5, 10), KVCodec.INT8)]

    assert choose(values, LayerRange(0, 10)) is None


def test_the_most_precise_codec_that_has_all_layers_is_chosen() -> None:
    values = [*cut_sound(block(0, 5)), *cut_sound(block(0, 10), KVCodec.INT8), *cut_sound(block(0, 10), KVCodec.K4V4)]

    assert {entry.codec for entry in choose(values, LayerRange(0, 10)) or ()} == {"int8"}
    assert {entry.codec for entry in choose(values, LayerRange(0, 5)) or ()} == {"f32"}


def test_lossless_copies_of_what_was_lossy_make_an_inexact_block() -> None:
    values = cut_sound(block(0, 7)) | cut_sound(block(7, 10), is_exact=False)
    chosen = choose(list(values), LayerRange(0, 10))
    assert chosen is not None
    joined = join(block(), chosen, [values[entry] for entry in chosen])
    assert isinstance(joined, bytes)
    payload = unpack(joined, block().label, CODECS)

    assert not isinstance(payload, Mismatch)
    assert not payload.is_exact
    assert payload.data[: len(layer_payload(block(), 0))] == layer_payload(block(), 0)


def test_a_value_that_was_replaced_by_another_codec_s_is_told() -> None:
    exact, coarse = cut_sound(block()), cut_sound(block(0, 7), KVCodec.INT8)
    chosen = list(exact)

    wrong = join(block(), chosen, [next(iter(coarse.values())), exact[chosen[1]]])

    assert wrong == (chosen[1], "mixed_codecs")


@given(st.data())
def test_a_flipped_bit_or_a_cut_value_is_told_and_never_joined(data: st.DataObject) -> None:
    values = cut_sound(block())
    chosen = list(values)
    damaged = bytearray(values[chosen[0]])
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
        damaged[bit // 8] ^= 1 << bit % 8
    else:
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]

    wrong = join(block(), chosen, [bytes(damaged), values[chosen[1]]])

    assert isinstance(wrong, tuple)
    assert wrong[0] == chosen[0]


def test_a_manifest_says_what_was_written() -> None:
    entries = list(cut_sound(block()))

    assert read_manifest({entry.field: entry.content for entry in entries}) == entries


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (b"0-5", b""),
        (b"0-5", b"f32"),
        (b"0-5", b"f32:2:10"),
        (b"0-5", b"zip:1:10"),
        (b"0-5", b"f32:1:-3"),
        (b"5-5", b"f32:1:10"),
        (b"x-5", b"f32:1:10"),
        (b"", b"f32:1:10"),
        (b"0-99999999999", b"f32:1:10"),
        (b"\xff", b"\xff\xff:1:1"),
    ],
)
def test_what_no_worker_wrote_is_no_entry(name: bytes, content: bytes) -> None:
    assert read_entry(name, content) is None


@given(st.binary(max_size=12), st.binary(max_size=16))
def test_no_bytes_in_a_manifest_are_an_error(name: bytes, content: bytes) -> None:
    entry = read_entry(name, content)

    assert entry is None or read_entry(entry.field, entry.content) == entry
