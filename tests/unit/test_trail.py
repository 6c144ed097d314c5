"""Segments of trails: how long they are, what they are called, and which of them make up what a stage wants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.types import LayerRange
from tests.support.kv_blocks import MODEL_DIGEST
from worker.kv.block import BlockForm
from worker.kv.trail import MAX_SEGMENT_BYTES, Segment, TrailPart, choose, read_field, segment_tokens

NUM_LAYERS = 6
TRAIL = b"t" * 16


def make_form(num_layers: int, num_kv_heads: int = 3, head_dim: int = 64) -> BlockForm:
    return BlockForm(MODEL_DIGEST, LayerRange(0, num_layers), num_kv_heads, head_dim)


@pytest.mark.parametrize(
    ("num_layers", "tokens"), [(30, 4), (15, 8), (10, 8), (1, 8), (180, 1)], ids="{} layers".format
)
def test_a_segment_is_of_as_many_tokens_as_a_value_of_redis_should_hold(num_layers: int, tokens: int) -> None:
    assert segment_tokens(make_form(num_layers)) == tokens


def test_a_token_that_is_too_large_is_a_segment_of_its_own() -> None:
    large = make_form(200, num_kv_heads=8, head_dim=128)

    assert segment_tokens(large) == 1
    assert MAX_SEGMENT_BYTES < 200 * 2 * 8 * 128 * 4


def test_a_field_names_layers_and_tokens() -> None:
    segment = Segment(LayerRange(10, 20), 64, 80)

    assert segment.field == b"10-20:64-80"
    assert read_field(segment.field) == segment


@pytest.mark.parametrize(
    "field", [b"", b"1-2", b"1-2:3", b"2-1:0-8", b"0-2:8-8", b"a-2:0-8", b"0-2:0-8-9", b"0-2:-1-8", b"0-2:0-1234567890"]
)
def test_a_field_that_nobody_wrote_is_none(field: bytes) -> None:
    assert read_field(field) is None


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    bounds = st.tuples(
        st.integers(0, NUM_LAYERS - 1), st.integers(1, NUM_LAYERS), st.integers(0, 30), st.integers(1, 16)
    )
    found = []
    for first, count, start, tokens in draw(st.lists(bounds, max_size=24)):
        layers = LayerRange(first, min(NUM_LAYERS, first + count))
        found.append(Segment(layers, start, start + tokens))
    return found


@given(found=segments(), start=st.integers(0, 20), length=st.integers(1, 30), first=st.integers(0, 4))
def test_what_is_chosen_covers_every_token_up_to_where_something_is_missing(
    found: list[Segment], start: int, length: int, first: int
) -> None:
    layers = LayerRange(first, NUM_LAYERS)
    part = TrailPart(TRAIL, BlockForm(MODEL_DIGEST, layers, 1, 16), start, start + length)

    chosen, stop = choose(found, part)

    def is_there(of: list[Segment], token: int) -> bool:
        return all(
            any(one.layers.start <= layer < one.layers.stop and one.start <= token < one.stop for one in of)
            for layer in range(layers.start, layers.stop)
        )

    missing = [token for token in range(part.start, part.stop) if not is_there(found, token)]
    assert stop == min([*missing, part.stop])
    assert all(is_there(chosen, token) for token in range(part.start, stop))
    # However many of them are read, in order: all before the first that is not is there.
    for count, unread in enumerate(chosen):
        assert all(is_there(chosen[:count], token) for token in range(part.start, min(unread.start, stop)))
