"""Byte-level BPE written again, slowly and without a library: what the tokenizer is compared with.

Source: encoder.py of GPT-2; digits are cut off one by one before its pattern, as SmolLM2's tokenizer does.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator

from modelstore.manifest import TokenizerData

_PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
_SHIFTED = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = [chr(byte if byte in _PRINTABLE else 256 + _SHIFTED.index(byte)) for byte in range(256)]


def encode(data: TokenizerData, text: str) -> list[int]:
    """The ids of text in which control tokens are not parsed."""
    ids = {token: token_id for token_id, token in enumerate(data.tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(data.merges)}
    pieces = _cut_digits(text) if data.pre == "smollm" else [text]
    return [ids[part] for piece in pieces for word in _words(piece) for part in _merge(word, ids, ranks)]


def _merge(word: str, ids: dict[str, int], ranks: dict[tuple[str, ...], int]) -> list[str]:
    parts = [character for character in (BYTE_CHARACTERS[byte] for byte in word.encode()) if character in ids]
    while True:
        ranked = [(ranks[pair], index) for index, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
        if not ranked:
            return parts
        _, index = min(ranked)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


def _cut_digits(text: str) -> list[str]:
    pieces = [""]
    for character in text:
        if _kind(character) == "number":
            pieces += [character, ""]
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece]


def _kind(character: str) -> str:
    if character.isspace() and character not in "\x1c\x1d\x1e\x1f":
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "other")


def _words(text: str) -> Iterator[str]:
    """'s|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|spaces before a space or the end|spaces"""
    start = 0
    while start < len(text):
        stop = start + _length(text[start:])
        yield text[start:stop]
        start = stop


def _length(text: str) -> int:
    for suffix in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if text.startswith(suffix):
            return len(suffix)
    kinds = [_kind(character) for character in text]
    lead = 1 if text[0] == " " and kinds[1:2] not in ([], ["space"]) else 0
    stop = lead
    while stop < len(text) and kinds[stop] == kinds[lead]:
        stop += 1
    is_before_word = kinds[lead] == "space" and stop < len(text) and stop > 1
    return stop - 1 if is_before_word else stop
