"""Text to token ids and token ids to bytes, from a model's own tokenizer data.

Decides which control tokens a request's text may become: those a raw prompt spells out, and those the chat template
writes, never those a chat message's content spells out. Byte-level BPE itself is the `tokenizers` library's. Knows
nothing of requests, streams or stop strings (`text`); the engine's front calls it, never the scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from modelstore.manifest import TokenizerData
from orchestrator.chat import ChatTemplate
from shoal.errors import BadModelFile, UnsupportedModel

# GGUF's token types that matter here; UNKNOWN is handled as control, as llama.cpp does.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>")

# Source: tokenizer.json of Meta-Llama-3.
_LLAMA_BPE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama_bpe() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA_BPE_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "llama-bpe": _llama_bpe,
    "smollm": _smollm,
}
# Families whose tokenizer takes a word that is in the vocabulary whole, whatever the merges say.
_WHOLE_WORD_FAMILIES = frozenset({"llama-bpe"})


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a token. Source: `bytes_to_unicode` of GPT-2's encoder.py."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


class Tokenizer:
    """A model's vocabulary, both ways. Immutable once built.

    Control tokens are no part of the vocabulary the BPE knows: text that was not searched for them cannot become one,
    whatever it holds. stop_ids: the tokens that end an answer.
    """

    def __init__(self, data: TokenizerData) -> None:
        """Raise UnsupportedModel for a kind that is not built here, BadModelFile for data that is no tokenizer."""
        _check(data)
        self._tokens = data.tokens
        self._types = data.token_types
        self._bos_id = data.bos_id if data.add_bos else None
        ends = {token_id for token_id in (data.bos_id, data.eos_id) if token_id is not None}
        self._control_ids = {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(data.tokens, data.token_types, strict=True))
            if token and (kind in (_UNKNOWN, _CONTROL) or token_id in ends)
        }
        self._hidden_ids = frozenset(self._control_ids.values())
        self._control_pattern = _any_of(self._control_ids)
        self._guard, self._unguard = _guards(self._control_ids)
        self._bpe = _build_bpe(data, self._control_ids)
        self._chat = ChatTemplate(
            data.chat_template, bos_token=_token_text(data, data.bos_id), eos_token=_token_text(data, data.eos_id)
        )
        names = {self._control_ids[name] for name in END_OF_TURN_TOKENS if name in self._control_ids}
        self.stop_ids = frozenset(names if data.eos_id is None else names | {data.eos_id})

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @cached_property
    def max_token_bytes(self) -> int:
        """No token stands for more bytes of text than this."""
        return max(len(token.encode()) for token in self._tokens)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Return the ids of a raw prompt; control tokens it spells out are parsed, as people paste whole templates.

        add_special: put the begin-of-text token in front if the model wants one and the text does not have it.
        """
        token_ids = self._encode_parsed(text)
        if add_special and self._bos_id is not None and token_ids[:1] != [self._bos_id]:
            return [self._bos_id, *token_ids]
        return token_ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, opens_answer: bool = True) -> list[int]:
        """Return the ids of a conversation in the model's chat template; contents never become control tokens.

        opens_answer: end where the assistant's answer begins. Raises InvalidRequest for messages that are no conversation,
        or that the template refuses.
        """
        return self._encode_rendered(messages, partial(self._chat.render, opens_answer=opens_answer))

    def encode_turn(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids that go on from an answer without its stop token; raises InvalidRequest as encode_chat does."""
        return self._encode_rendered(messages, self._chat.render_turn)

    def _encode_rendered(
        self, messages: Sequence[Mapping[str, str]], render: Callable[[Sequence[Mapping[str, str]]], str]
    ) -> list[int]:
        text = render(messages)
        guarded_messages = [{**message, "content": message["content"].translate(self._guard)} for message in messages]
        if guarded_messages == [dict(message) for message in messages]:
            return self._encode_parsed(text)
        # Contents hold characters that control tokens begin or end with. Rendered once more with stand-ins for those,
        # all control tokens are the template's own. If they are the same ones, the contents made none and the text is
        # taken as it is: a template may look for its own tags in contents, and must see them.
        guarded = render(guarded_messages)
        if self._control_pattern.findall(text) == self._control_pattern.findall(guarded):
            return self._encode_parsed(text)
        return self._encode_parsed(guarded, self._unguard)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to the text: nothing for control tokens, and for ids that pad the vocabulary."""
        if token_id >= len(self._tokens) or token_id in self._hidden_ids:
            return b""
        token = self._tokens[token_id]
        if self._types[token_id] == _UNUSED:
            return b""
        if self._types[token_id] == _USER_DEFINED:
            return token.encode()
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            # Not written in the byte alphabet: the token stands for itself, as in the reference implementation.
            return token.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a whole answer, control tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def _encode_parsed(self, text: str, restore: Mapping[int, int] | None = None) -> list[int]:
        # The text between two control tokens is always encoded in one piece: words are cut across the joint of template
        # and content (a newline and the spaces a content begins with, say), and models were trained on just that cut.
        token_ids: list[int] = []
        for index, part in enumerate(self._control_pattern.split(text)):
            if index % 2:
                token_ids.append(self._control_ids[part])
            elif part:
                plain = part if restore is None else part.translate(restore)
                token_ids += self._bpe.encode(plain, add_special_tokens=False).ids
        return token_ids


def _check(data: TokenizerData) -> None:
    if data.kind != "gpt2":
        raise UnsupportedModel(f"tokenizer kind {data.kind!r} is not supported; supported is gpt2 (byte-level BPE)")
    if data.pre not in _PRE_TOKENIZERS:
        supported = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedModel(f"pre-tokenizer {data.pre!r} is not supported; supported are {supported}")
    if len(data.tokens) != len(data.token_types):
        raise BadModelFile(
            f"the tokenizer has {len(data.tokens)} tokens but {len(data.token_types)} token types; get the file again"
        )

    for token_id in (data.bos_id, data.eos_id):
        if token_id is not None and not 0 <= token_id < len(data.tokens):
            raise BadModelFile(
                f"the tokenizer's begin or end token is {token_id}, but it has {len(data.tokens)} tokens; "
                "get the file again"
            )


def _build_bpe(data: TokenizerData, control_ids: Mapping[str, int]) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(data.tokens) if token not in control_ids}
    # Bytes that are no token (SmolLM2 lacks a few that English text never has) vanish, as where the model was trained.
    bpe = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_parse_merges(data.merges, vocabulary),
            ignore_merges=data.pre in _WHOLE_WORD_FAMILIES,
        )
    )
    bpe.pre_tokenizer = _PRE_TOKENIZERS[data.pre]()
    user_defined = (token for token, kind in zip(data.tokens, data.token_types, strict=True) if kind == _USER_DEFINED)
    bpe.add_tokens([AddedToken(token, normalized=False) for token in user_defined if token in vocabulary])
    return bpe


def _parse_merges(merges: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise BadModelFile(f"the tokenizer merges {merge!r}, which is not made of its tokens; get the file again")
        pairs.append((left, right))
    return pairs


def _any_of(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """A pattern, with one group, of the longest token that begins at a place; of nothing if there are no tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if tokens else re.compile("((?!))")


def _guards(tokens: Mapping[str, int]) -> tuple[dict[int, int], dict[int, int]]:
    """Translations of the characters that tokens begin or end with into stand-ins, and back.

    The stand-ins are surrogates: no text that arrived as UTF-8 has any, and they never reach the BPE.
    """
    edges = sorted({ord(edge) for token in tokens for edge in (token[0], token[-1])})
    guard = {edge: 0xD800 + index for index, edge in enumerate(edges)}
    return guard, {stand_in: edge for edge, stand_in in guard.items()}


def _token_text(data: TokenizerData, token_id: int | None) -> str:
    return "" if token_id is None else data.tokens[token_id]
