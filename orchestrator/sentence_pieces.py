"""SentencePiece's BPE: text as characters, merged by scores, with bytes for what has no token. Google's library does it.

Owns the form in which that library takes a vocabulary, and where a space is put in front of text. Control tokens are of a
kind that text never becomes. The tokenizer calls it.
"""

from __future__ import annotations

import struct
from collections.abc import Set
from functools import cache

import sentencepiece

from modelstore.manifest import TokenizerData
from modelstore.tokenizer_rules import BYTE, CONTROL, SPACE_MARK, UNKNOWN, USER_DEFINED, control_ids, plain_tokens
from orchestrator.token_search import TokenSearch
from shoal.errors import BadModelFile

# Numbers of fields and values in sentencepiece_model.proto; of TrainerSpec those whose defaults do not fit here.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BPE, _BYTE_FALLBACK = 3, 2, 35
_ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES, _ESCAPE_SPACES = 3, 4, 5
_FLOAT = struct.Struct("<f")


class SentencePieces:
    """A SentencePiece vocabulary, both ways. Immutable once built."""

    growth = 1

    def __init__(self, data: TokenizerData) -> None:
        """Raise BadModelFile if the library does not take the vocabulary."""
        self._num_tokens = len(data.tokens)
        self._has_double_prefix = data.has_double_prefix
        found = _found_before(data)
        self._search = TokenSearch(found, frozenset(data.lstrip_ids), frozenset(data.rstrip_ids)) if found else None
        self._has_space_behind = data.space_prefix == "each"
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_model(data, {*control_ids(data).values(), *found.values()}))
        except RuntimeError as error:
            raise BadModelFile(f"the tokenizer is no SentencePiece vocabulary ({str(error)[-200:]})") from error

    def encode(self, text: str, *, has_space_before: bool) -> list[int]:
        """Return the ids of text in which control tokens are not parsed; has_space_before: whether it gets one in front."""
        if self._search is None:
            return self._pieces(text, has_space_before)
        token_ids: list[int] = []
        for index, (plain, token_id) in enumerate(self._search.cut(text)):
            if plain:
                token_ids += self._pieces(plain, self._has_space_behind if index else has_space_before)
            if token_id is not None:
                token_ids.append(token_id)
        return token_ids

    def token_bytes(self, token: str, kind: int) -> bytes:
        """What a token of normal text stands for."""
        if kind == BYTE:
            return bytes([int(token[3:5], 16)])
        return token.replace(SPACE_MARK, " ").encode()

    def _pieces(self, text: str, has_space_before: bool) -> list[int]:
        if has_space_before and (self._has_double_prefix or not text.startswith((" ", SPACE_MARK))):
            text = " " + text
        token_ids: list[int] = self._processor.EncodeAsIds(text)
        # Only a vocabulary without a token for unknown text has one more, which stands for it.
        return [token_id for token_id in token_ids if token_id < self._num_tokens]


def _found_before(data: TokenizerData) -> dict[str, int]:
    """User-defined tokens to look for before text gets spaces in front, which it does behind them, too.

    Those with spaces are found after that; so are all, if nothing depends on it.
    """
    strips = {*data.lstrip_ids, *data.rstrip_ids}
    return {
        token: token_id
        for token, token_id in plain_tokens(data).items()
        if token
        and data.token_types[token_id] == USER_DEFINED
        and (token_id in strips or (data.space_prefix != "never" and " " not in token))
    }


def _model(data: TokenizerData, special: Set[int]) -> bytes:
    """A vocabulary as sentencepiece_model.proto has it, written as bytes: messages would take many times as long.

    special: tokens that text does not become here.
    """
    unknown_id = _unknown_id(data)
    pieces = []
    for token_id, (token, kind, score) in enumerate(zip(data.tokens, data.token_types, data.scores, strict=True)):
        if kind == USER_DEFINED:
            token = token.replace(" ", SPACE_MARK)
        if token_id == unknown_id:
            kind = UNKNOWN
        elif token_id in special or not token:
            kind = CONTROL
        pieces.append(_piece(token or f"\1{token_id}", score, kind))
    if unknown_id == len(data.tokens):
        # The library wants one; it comes last, so that the others keep their ids.
        pieces.append(_piece("\1", 0.0, UNKNOWN))
    trainer = _number(_MODEL_TYPE, _BPE) + _number(_BYTE_FALLBACK, int(BYTE in data.token_types))
    normalizer = _number(_ADD_DUMMY_PREFIX, 0) + _number(_REMOVE_EXTRA_SPACES, 0) + _number(_ESCAPE_SPACES, 1)
    return b"".join([*pieces, _inner(_TRAINER, trainer), _inner(_NORMALIZER, normalizer)])


def _unknown_id(data: TokenizerData) -> int:
    """The token that is of this kind, if none is the one of this name; one more than there are if there is neither."""
    for token_id, kind in enumerate(data.token_types):
        if kind == UNKNOWN:
            return token_id
    return control_ids(data).get("<unk>", len(data.tokens))


def _piece(token: str, score: float, kind: int) -> bytes:
    text = token.encode()
    return _inner(_PIECES, b"\x0a%b%b\x15%b\x18%c" % (_varint(len(text)), text, _FLOAT.pack(score), kind))


def _inner(field: int, content: bytes) -> bytes:
    return b"%c%b%b" % (field << 3 | 2, _varint(len(content)), content)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


@cache
def _varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _varint(value >> 7)
