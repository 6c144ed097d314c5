"""Tokens that text spells out: which one is found, and that many of them make no long search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.token_search import TokenSearch, stand_ins
from shoal.errors import BadModelFile

NAMES = st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=12, unique=True)


def search(*names: str) -> TokenSearch:
    return TokenSearch({name: index for index, name in enumerate(names)})


@given(names=NAMES, text=st.text("ab<", max_size=40))
def test_at_each_place_the_longest_token_is_found(names: list[str], text: str) -> None:
    expected = []
    place = 0
    while place < len(text):
        longest = max((name for name in names if text.startswith(name, place)), key=len, default="")
        expected += [longest] if longest else []
        place += len(longest) or 1
    assert list(search(*names).found_in(text)) == expected


@given(names=NAMES, text=st.text("ab<", max_size=40))
def test_nothing_is_lost_or_added(names: list[str], text: str) -> None:
    pieces = search(*names).cut(text)
    assert "".join(plain + ("" if found is None else names[found]) for plain, found in pieces) == text


def test_without_tokens_nothing_is_found() -> None:
    assert list(TokenSearch({}).cut("a")) == [("a", None)]


def test_names_are_no_patterns() -> None:
    assert list(search("a.|[").cut("ab|[ a.|[")) == [("ab|[ ", 0), ("", None)]


def test_white_space_goes_with_the_tokens_that_take_it() -> None:
    tokens = TokenSearch({"L": 0, "R": 1}, lstrip_ids=frozenset({0}), rstrip_ids=frozenset({1}))
    assert list(tokens.cut(" a \nL b R\n c ")) == [(" a", 0), (" b ", 1), ("c ", None)]


def test_what_many_tokens_begin_with_is_looked_at_once() -> None:
    tokens = {f"<unused{index}>": index for index in range(10_000)}
    pattern = TokenSearch(tokens)._pattern.pattern
    assert pattern.count("<unused") == 1
    assert len(pattern) < sum(map(len, tokens))


def test_tokens_too_deep_in_each_other_are_refused() -> None:
    with pytest.raises(BadModelFile, match="begin alike"):
        search(*("a" * length for length in range(1, 3000)))


def test_stand_ins_are_one_for_each_edge_and_lead_back() -> None:
    guard, unguard = stand_ins({"<x>": 0, "[x>": 1})
    assert len(guard) == 3
    assert "<[>x".translate(guard).translate(unguard) == "<[>x"
    assert all(0xD800 <= stand_in < 0xE000 for stand_in in guard.values())


def test_more_edges_than_stand_ins_are_refused() -> None:
    with pytest.raises(BadModelFile, match="characters"):
        stand_ins({chr(0x4E00 + index): index for index in range(0x801)})
