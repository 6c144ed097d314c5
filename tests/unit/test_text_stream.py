"""Streamed text is the whole text: no split characters, no parts of stop strings, whatever the tokens are."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.text import TextDelta, TextStream
from orchestrator.tokenizer import Tokenizer
from tests.support.vocabulary import byte_id, make_tokenizer_data

TOKENIZER = Tokenizer(make_tokenizer_data())
END = 2

# A busy machine is no fault of the code.
unhurried = settings(deadline=None)

ANY_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)
# Bytes that begin, continue and break characters, and two letters that make stop strings likely.
TORN_IDS = st.lists(st.sampled_from([*map(byte_id, b"ab\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xed\xc0\xff\xf4"), END]))
STOPS = st.lists(st.text("ab\ufffdé€", min_size=1, max_size=4), max_size=3)


def stream_text(token_ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[str, list[TextDelta]]:
    stream = TextStream(TOKENIZER, stop)
    deltas = [stream.push(token_id) for token_id in token_ids]
    return "".join(delta.text for delta in deltas) + stream.finish(), deltas


def whole_text(token_ids: Sequence[int], stop: Sequence[str]) -> str:
    """The text cut at the stop that is complete first, the longest of those: searched for in every beginning."""
    text = TOKENIZER.decode(token_ids)
    for end in range(len(text) + 1):
        ending = [len(candidate) for candidate in stop if text[:end].endswith(candidate)]
        if ending:
            return text[: end - max(ending)]
    return text


def ids_of(text: str) -> list[int]:
    return [byte_id(byte) for byte in text.encode()]


@unhurried
@given(token_ids=st.one_of(ANY_IDS, TORN_IDS), stop=STOPS)
def test_deltas_joined_are_the_whole_text_wherever_the_answer_ends(token_ids: list[int], stop: list[str]) -> None:
    for length in range(len(token_ids) + 1):
        assert stream_text(token_ids[:length], stop)[0] == whole_text(token_ids[:length], stop)


@unhurried
@given(token_ids=st.one_of(ANY_IDS, TORN_IDS), stop=STOPS)
def test_what_was_let_out_is_a_beginning_of_every_longer_answer(token_ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, stop)
    shown = ""
    for token_id in token_ids:
        shown += stream.push(token_id).text
        assert whole_text(token_ids, stop).startswith(shown)


@unhurried
@given(token_ids=TORN_IDS, stop=STOPS)
def test_nothing_is_held_that_cannot_become_a_stop_string(token_ids: list[int], stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, stop)
    shown = ""
    for index, token_id in enumerate(token_ids):
        delta = stream.push(token_id)
        shown += delta.text
        if delta.is_stopped:
            return
        held = TOKENIZER.decode(token_ids[: index + 1])[len(shown) :].rstrip("\ufffd")
        assert not held or any(candidate.startswith(held) for candidate in stop)


def test_a_character_comes_out_with_its_last_byte() -> None:
    _, deltas = stream_text(ids_of("€"))
    assert [delta.text for delta in deltas] == ["", "", "€"]


def test_an_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    text, deltas = stream_text(ids_of("a€")[:-1])
    assert [delta.text for delta in deltas] == ["a", "", ""]
    assert text == "a\ufffd"


def test_a_control_token_inside_a_character_leaves_it_whole() -> None:
    first, *rest = ids_of("é")
    assert stream_text([first, END, *rest])[0] == "é"


def test_a_stop_string_over_several_tokens_never_comes_out() -> None:
    text, deltas = stream_text(ids_of("one\nUser:"), ["\nUser:"])
    assert text == "one"
    assert [delta.is_stopped for delta in deltas] == [False] * 8 + [True]


def test_what_only_looked_like_a_stop_string_comes_out_when_it_cannot_be_one() -> None:
    _, deltas = stream_text(ids_of("aab"), ["aac"])
    assert [delta.text for delta in deltas] == ["", "", "aab"]


def test_what_looks_like_a_stop_string_at_the_end_comes_out() -> None:
    assert stream_text(ids_of("xaa"), ["aac"])[0] == "xaa"


def test_a_stop_string_that_overlaps_itself_is_found() -> None:
    assert stream_text(ids_of("aabaabaac"), ["aabaac"])[0] == "aab"


def test_text_behind_a_stop_string_in_the_same_token_is_dropped() -> None:
    hello = TOKENIZER.encode("hello", add_special=False)
    text, deltas = stream_text(hello, ["l"])
    assert deltas == [TextDelta("he", True)]
    assert text == "he"


def test_of_stop_strings_that_end_at_one_character_the_longest_is_cut_off() -> None:
    assert stream_text(ids_of("xabc"), ["c", "abc", "bc"])[0] == "x"


def test_a_stop_string_may_end_with_a_replacement_at_the_end() -> None:
    assert stream_text(ids_of("xaé")[:-1], ["a\ufffd"])[0] == "x"


def test_nothing_comes_out_after_a_stop() -> None:
    stream = TextStream(TOKENIZER, ["b"])
    assert [stream.push(token_id) for token_id in ids_of("abc")] == [
        TextDelta("a", False),
        TextDelta("", True),
        TextDelta("", True),
    ]
    assert stream.finish() == ""


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(TOKENIZER, [""])
