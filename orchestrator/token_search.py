"""Finds tokens that text spells out, before the text between them is cut into words.

Decides which one is found where several begin (the longest), which white space vanishes with it, and what contents are
written with while a template is checked for them. Knows no vocabulary; the tokenizer asks it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence, Set

from shoal.errors import BadModelFile

# The stand-ins are surrogates: no text that arrived as UTF-8 has any, and they never reach a vocabulary.
_FIRST_STAND_IN, _NUM_STAND_INS = 0xD800, 0x800


class TokenSearch:
    """A set of tokens to look for, by their text. Takes time in the length of the text alone, however many there are."""

    def __init__(
        self, ids: Mapping[str, int], lstrip_ids: Set[int] = frozenset(), rstrip_ids: Set[int] = frozenset()
    ) -> None:
        """lstrip_ids, rstrip_ids: of tokens that take the white space before or behind them along.

        Raises BadModelFile for more tokens one inside the other than can be told apart.
        """
        self._ids = ids
        self._lstrip_ids = lstrip_ids
        self._rstrip_ids = rstrip_ids
        try:
            self._pattern = re.compile(f"({_branches(sorted(ids))})" if ids else "((?!))")
        except RecursionError as error:
            raise BadModelFile(
                "the tokenizer has control tokens that begin alike too often: get the file again"
            ) from error

    def cut(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield pieces of the text, each with the token that follows it; None behind the last."""
        before: int | None = None
        parts = self._pattern.split(text)
        for plain, found in itertools.zip_longest(parts[::2], parts[1::2]):
            token_id = None if found is None else self._ids[found]
            piece = plain.lstrip() if before in self._rstrip_ids else plain
            yield piece.rstrip() if token_id in self._lstrip_ids else piece, token_id
            before = token_id

    def found_in(self, text: str) -> Sequence[str]:
        """The tokens that are in the text, in their order."""
        found: list[str] = self._pattern.findall(text)
        return found


def stand_ins(tokens: Mapping[str, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Translations of the characters that tokens begin or end with into stand-ins, and back.

    Raises BadModelFile if there are more such characters than stand-ins.
    """
    edges = sorted({ord(edge) for token in tokens for edge in (token[0], token[-1])})
    if len(edges) > _NUM_STAND_INS:
        raise BadModelFile(
            f"the tokenizer's control tokens begin and end with {len(edges)} characters: get the file again"
        )
    guard = {edge: _FIRST_STAND_IN + index for index, edge in enumerate(edges)}
    return guard, {stand_in: edge for edge, stand_in in guard.items()}


def _branches(words: Sequence[str]) -> str:
    """A pattern of the longest of these words, sorted and none empty, with what several begin with written once."""
    branches = []
    for _, group in itertools.groupby(words, key=lambda word: word[0]):
        alike = list(group)
        start = _common_start(alike[0], alike[-1])
        rests = [word[len(start) :] for word in alike if len(word) > len(start)]
        is_word = len(rests) < len(alike)
        branches.append(re.escape(start) + (f"(?:{_branches(rests)}){'?' if is_word else ''}" if rests else ""))
    return "|".join(branches)


def _common_start(first: str, last: str) -> str:
    """What the first and the last of sorted words begin with, and so all between."""
    size = next((index for index, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return first[: min(len(first), len(last))] if size is None else first[:size]
