"""Texts in windows: what is predicted, what is left out, what is no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.text import Text, cut_text, cut_tokens, read_text, shipped_text
from shoal.errors import InvalidRequest


def test_each_window_begins_as_a_prompt_does() -> None:
    text = cut_tokens([5, 6, 7, 8, 9], [1], window_tokens=3, max_tokens=100)
    assert [window.tolist() for window in text.windows] == [[1, 5, 6], [1, 7, 8], [1, 9]]


class BeginningTokenizer:
    """A token of its own at the begin of a prompt, and one for each character."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [1] * add_special + [ord(character) for character in text]


def test_the_begin_of_a_prompt_is_not_read_as_text_too() -> None:
    tokenizer: Any = BeginningTokenizer()
    text = cut_text("abc", tokenizer, window_tokens=3, max_tokens=100)
    assert [window.tolist() for window in text.windows] == [[1, 97, 98], [1, 99]]


def test_the_longest_window_need_not_be_the_first() -> None:
    assert Text((np.arange(2), np.arange(4), np.arange(3))).longest == 4


def test_the_last_token_of_a_window_predicts_nothing() -> None:
    text = cut_tokens([5, 6, 7, 8], [1], window_tokens=3, max_tokens=100)
    assert text.predicting_rows.tolist() == [0, 1, 3, 4]
    assert text.targets.tolist() == [5, 6, 7, 8]


def test_a_rest_of_one_token_is_no_window() -> None:
    assert cut_tokens([5, 6, 7], [], window_tokens=2, max_tokens=100).num_tokens == 2


def test_what_is_too_long_is_cut_and_counted() -> None:
    text = cut_tokens(range(10), [], window_tokens=4, max_tokens=6)
    assert (text.num_tokens, text.num_left_out) == (6, 4)


@pytest.mark.parametrize("tokens", [[], [7]])
def test_a_text_with_nothing_to_predict_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="nothing to predict"):
        cut_tokens(tokens, [], window_tokens=8, max_tokens=100)


def test_every_other_window_is_held_out() -> None:
    text = cut_tokens(range(12), [], window_tokens=3, max_tokens=100)
    assert [window[0] for window in text.part(1, 2).windows] == [3, 9]


def test_a_shorter_text_has_whole_windows_but_for_a_first_one_that_is_too_long() -> None:
    text = Text((np.arange(4), np.arange(4), np.arange(4)))
    assert [len(window) for window in text.shortened(9).windows] == [4, 4]
    assert [len(window) for window in text.shortened(3).windows] == [3]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match=r"a\.bin cannot be read as UTF-8 text"):
        read_text(path)


def test_the_shipped_text_is_a_few_pages() -> None:
    assert 10_000 < len(shipped_text()) < 20_000


def test_a_text_without_an_end_is_refused_at_a_bound() -> None:
    with pytest.raises(InvalidRequest, match=r"/dev/zero has more than [0-9,]+ characters: give a part of it"):
        read_text(Path("/dev/zero"))


@pytest.mark.parametrize("prefix", [[1], [1, 2]])
def test_a_context_that_the_begin_of_a_text_fills_is_refused(prefix: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="a context of 1 tokens is too short"):
        cut_tokens([5, 6, 7], prefix, window_tokens=1, max_tokens=100)
