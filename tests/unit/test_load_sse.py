"""How bytes become server-sent events, wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import MAX_EVENT_BYTES, EventTooLong, SseParser


def parse(*chunks: bytes) -> list[str]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_lines_may_end_in_three_ways(line_end: bytes) -> None:
    # The last CR may be half a line end: only the next byte tells.
    stream = line_end.join([b"data: one", b"", b"data: two", b"data: more", b"", b": over"])

    assert parse(stream) == ["one", "two\nmore"]


def test_only_one_space_after_the_colon_is_not_data() -> None:
    assert parse(b"data:  x\n\ndata:x\n\ndata\n\n") == [" x", "x", ""]


def test_an_event_without_data_is_none() -> None:
    assert parse(b"event: ping\n\n: comment\n\n\n\n") == []


def test_an_event_that_is_not_closed_is_not_told() -> None:
    assert parse(b"data: x\n") == []


def test_a_byte_order_mark_may_come_first() -> None:
    assert parse(b"\xef\xbb\xbfdata: x\n\n") == ["x"]


def test_line_separators_inside_text_do_not_end_a_line() -> None:
    assert parse("data: a\u2028b\x85c\x0bd\n\n".encode()) == ["a\u2028b\x85c\x0bd"]


def test_an_endless_event_is_given_up() -> None:
    parser = SseParser()
    with pytest.raises(EventTooLong):
        parser.feed(b"data: " + b"x" * MAX_EVENT_BYTES)


def test_many_lines_of_one_event_count_together() -> None:
    parser = SseParser()
    line = b"data: " + b"x" * (MAX_EVENT_BYTES // 2) + b"\n"
    parser.feed(line)
    with pytest.raises(EventTooLong):
        parser.feed(line + line)


LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@given(
    texts=st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=4),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    size=st.integers(1, 7),
)
def test_events_do_not_depend_on_where_the_stream_is_cut(texts: list[list[str]], line_end: bytes, size: int) -> None:
    lines = [line for text in texts for line in (*(b"data: " + line.encode() for line in text), b"")]
    stream = b"".join(line + line_end for line in lines) + b":"
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)]

    assert parse(*chunks) == ["\n".join(text) for text in texts]
