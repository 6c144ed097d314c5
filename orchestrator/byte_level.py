"""Byte-level BPE: text as bytes, merged into tokens within words. The `tokenizers` library does it.

Owns what a model's splitting becomes in that library, and the characters that bytes are written with. Knows no control
tokens: none is in the vocabulary it is given. The tokenizer calls it.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from modelstore.manifest import Splitting, TokenizerData
from modelstore.pre_tokenizers import DIGIT_PATTERN, GPT2_PATTERN, PRE_TOKENIZERS
from modelstore.tokenizer_rules import USER_DEFINED, parsed_merges, plain_tokens
from shoal.errors import InvalidRequest, UnsupportedModel


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a token. Source: `bytes_to_unicode` of GPT-2's encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
# Composed characters have up to this many bytes for one byte of the text they came of, and the other way round.
NFC_GROWTH = 3


class ByteLevelBpe:
    """A byte-level vocabulary, both ways. Immutable once built."""

    def __init__(self, data: TokenizerData) -> None:
        """Raise UnsupportedModel for a splitting that is not known, BadModelFile for merges that make no sense."""
        splitting = data.splitting or PRE_TOKENIZERS.get(data.pre)
        if splitting is None:
            supported = ", ".join(sorted(PRE_TOKENIZERS))
            raise UnsupportedModel(f"pre-tokenizer {data.pre!r} is not supported; supported are {supported}")
        vocabulary = plain_tokens(data)
        merges = list(parsed_merges(data.merges, vocabulary, "the tokenizer's merges"))
        # Bytes that are no token (SmolLM2 lacks a few that English text never has) vanish, as where the model was trained.
        self._bpe = tokenizers.Tokenizer(
            models.BPE(vocab=vocabulary, merges=merges, ignore_merges=splitting.whole_words)
        )
        self._bpe.pre_tokenizer = _pre_tokenizer(splitting)
        if splitting.is_nfc:
            self._bpe.normalizer = normalizers.NFC()
        self.growth = NFC_GROWTH if splitting.is_nfc else 1
        self._bpe.add_tokens(
            [
                AddedToken(
                    token, normalized=False, lstrip=token_id in data.lstrip_ids, rstrip=token_id in data.rstrip_ids
                )
                for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True))
                if kind == USER_DEFINED and token in vocabulary
            ]
        )

    def encode(self, text: str, *, has_space_before: bool) -> list[int]:
        """Return the ids of text in which control tokens are not parsed; byte-level text has no space put in front.

        Raises InvalidRequest for a text that the model's patterns find no end in: the library tries so long, and no longer.
        """
        try:
            token_ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            # What the library's Rust code gives up with is no Exception, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise InvalidRequest("input", f"the model's tokenizer gave up on this text: {error}") from error
        return token_ids

    def token_bytes(self, token: str, kind: int) -> bytes:
        """What a token of normal text stands for."""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            # Not written in the byte alphabet: the token stands for itself, as in the reference implementation.
            return token.encode()


def _pre_tokenizer(splitting: Splitting) -> pre_tokenizers.PreTokenizer:
    # The library has GPT-2's pattern built in, with the writing of bytes, which is the last step.
    *splits, last = splitting.patterns or ("",)
    has_gpt2 = last == GPT2_PATTERN
    patterns = splits if has_gpt2 else splitting.patterns
    steps = [_split(pattern) for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_gpt2)
    return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == DIGIT_PATTERN:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")
