"""Texts that models are judged by: the one that comes with the package, or a user's, cut into windows of token ids.

Decides how much of a text is taken and that each window begins as a prompt does. Knows no model but its tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.tokenizer import Tokenizer
from shoal.errors import InvalidRequest

# Far more than judging takes minutes for; as tokens they take 70 bytes each.
MAX_TEXT_CHARS = 4 << 20
# A prediction needs a token before it.
MIN_WINDOW_TOKENS = 2

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Windows of token ids, each judged by itself. num_left_out: tokens that cutting the text left out behind them."""

    windows: tuple[Ids, ...]
    num_left_out: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(window) for window in self.windows)

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return max(len(window) for window in self.windows)

    @property
    def token_ids(self) -> Ids:
        """All windows, one behind the other [T]."""
        return np.concatenate(self.windows)

    @property
    def predicting_rows(self) -> Ids:
        """The rows [P] of token_ids that have a next token in their window."""
        last = np.cumsum([len(window) for window in self.windows]) - 1
        return np.delete(np.arange(self.num_tokens), last)

    @property
    def targets(self) -> Ids:
        """What comes next, for each of predicting_rows [P]."""
        following: Ids = self.token_ids[self.predicting_rows + 1]
        return following

    def part(self, start: int, step: int) -> Text:
        """Every step-th window from this one on."""
        return Text(self.windows[start::step])

    def shortened(self, max_tokens: int) -> Text:
        """As many windows as do not exceed so many tokens; of the first one, no more than that."""
        kept: list[Ids] = []
        for window in self.windows:
            if kept and sum(map(len, kept)) + len(window) > max_tokens:
                break
            kept.append(window[:max_tokens])
        return Text(tuple(kept))


def shipped_text() -> str:
    """A few pages of prose, dialogue, instructions, code and figures, written for this."""
    return files("evaluation").joinpath("calibration.txt").read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """Raises InvalidRequest for a file that is no text, or too much of it."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("text", f"{path} cannot be read as UTF-8 text: {error}") from error
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest("text", f"{path} has more than {MAX_TEXT_CHARS:,} characters: give a part of it")
    return text


def cut_text(text: str, tokenizer: Tokenizer, *, window_tokens: int, max_tokens: int) -> Text:
    """Cut a text into windows. Raises InvalidRequest if there is nothing in it to predict."""
    prefix = tokenizer.encode("", add_special=True)
    return cut_tokens(tokenizer.encode(text, add_special=False), prefix, window_tokens, max_tokens)


def cut_tokens(token_ids: Sequence[int], prefix: Sequence[int], window_tokens: int, max_tokens: int) -> Text:
    """Cut tokens into windows of at most window_tokens, each with the prefix in front; a rest of one token is left out.

    Raises InvalidRequest if there is nothing to predict.
    """
    taken = token_ids[:max_tokens]
    step = window_tokens - len(prefix)
    if step < 1:
        raise InvalidRequest("model", f"a context of {window_tokens} tokens is too short to judge a text by")
    pieces = [[*prefix, *taken[start : start + step]] for start in range(0, len(taken), step)]
    windows = tuple(np.array(piece, np.int64) for piece in pieces if len(piece) >= MIN_WINDOW_TOKENS)
    if not windows:
        raise InvalidRequest("text", f"a text of {len(token_ids)} tokens has nothing to predict: give a longer one")
    return Text(windows, len(token_ids) - len(taken))
