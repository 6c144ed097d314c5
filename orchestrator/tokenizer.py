"""Text to token ids and token ids to bytes, from a model's own tokenizer data.

Decides which control tokens a request's text may become: those a raw prompt spells out, and those the chat template
writes, never those a chat message's content spells out. What lies between them, `byte_level` or `sentence_pieces` cuts.
Knows nothing of requests, streams or stop strings (`text`); the engine's front calls it, never the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from modelstore.manifest import TokenizerData
from modelstore.tokenizer_rules import BYTE_LEVEL, SENTENCE_PIECES, UNUSED, USER_DEFINED, control_ids, require_kind
from orchestrator.byte_level import ByteLevelBpe
from orchestrator.chat import ChatTemplate, RunTemplate
from orchestrator.sentence_pieces import SentencePieces
from orchestrator.template_sandbox import run_template
from orchestrator.token_search import TokenSearch, stand_ins
from shoal.errors import BadModelFile

# Source: llama.cpp's list, of the families that are served.
END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
    "</s>",
    "<eos>",
)


class Tokenizer:
    """A model's vocabulary, both ways. Immutable once built.

    Control tokens are no part of the vocabulary the BPE knows: text that was not searched for them cannot become one,
    whatever it holds. stop_ids: the tokens that end an answer.
    """

    def __init__(self, data: TokenizerData, run: RunTemplate = run_template) -> None:
        """run: how the chat template is run.

        Raise UnsupportedModel for a kind that is not built here, BadModelFile for data that is no tokenizer.
        """
        _check(data)
        self._data = data
        self._bos_id = data.bos_id if data.add_bos else None
        self._eos_id = data.eos_id if data.add_eos else None
        control = control_ids(data)
        self._hidden_ids = frozenset(control.values())
        self._control = TokenSearch(control, frozenset(data.lstrip_ids), frozenset(data.rstrip_ids))
        self._guard, self._unguard = stand_ins(control)
        self._plain: ByteLevelBpe | SentencePieces = (
            ByteLevelBpe(data) if data.kind == BYTE_LEVEL else SentencePieces(data)
        )
        self._chat = ChatTemplate(
            data.chat_template,
            bos_token=_token_text(data, data.bos_id),
            eos_token=_token_text(data, data.eos_id),
            run=run,
        )
        named = [control[name] for name in END_OF_TURN_TOKENS if name in control]
        self.stop_ids = frozenset([*named, *data.end_ids, *([] if data.eos_id is None else [data.eos_id])])

    @property
    def vocab_size(self) -> int:
        return len(self._data.tokens)

    @cached_property
    def max_token_bytes(self) -> int:
        """No token stands for more bytes of text than this."""
        return self._plain.growth * max(len(token.encode()) for token in self._data.tokens)

    def encode(self, text: str, *, add_special: bool, goes_on: bool = False) -> list[int]:
        """Return the ids of a raw prompt; control tokens it spells out are parsed, as people paste whole templates.

        add_special: put the begin-of-text token in front, and the end-of-text token behind, if the model wants them and the
        text does not have them. goes_on: whether other text comes before it, so that it is not the first.
        """
        token_ids = self._encode_parsed(text, goes_on=goes_on)
        if add_special and self._bos_id is not None and token_ids[:1] != [self._bos_id]:
            token_ids = [self._bos_id, *token_ids]
        if add_special and self._eos_id is not None and token_ids[-1:] != [self._eos_id]:
            token_ids.append(self._eos_id)
        return token_ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, opens_answer: bool = True) -> list[int]:
        """Return the ids of a conversation in the model's chat template; contents never become control tokens.

        opens_answer: end where the assistant's answer begins. Raises InvalidRequest for messages that are no conversation,
        or that the template refuses.
        """
        return self._encode_rendered(messages, partial(self._chat.render, opens_answer=opens_answer))

    def encode_turn(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids that go on from an answer without its stop token; raises InvalidRequest as encode_chat does."""
        return self._encode_rendered(messages, self._chat.render_turn, goes_on=True)

    def _encode_rendered(
        self,
        messages: Sequence[Mapping[str, str]],
        render: Callable[[Sequence[Mapping[str, str]]], str],
        *,
        goes_on: bool = False,
    ) -> list[int]:
        text = render(messages)
        guarded_messages = [{**message, "content": message["content"].translate(self._guard)} for message in messages]
        if guarded_messages == [dict(message) for message in messages]:
            return self._encode_parsed(text, goes_on=goes_on)
        # Contents hold characters that control tokens begin or end with. Rendered once more with stand-ins for those,
        # all control tokens are the template's own. If they are the same ones, the contents made none and the text is
        # taken as it is: a template may look for its own tags in contents, and must see them.
        guarded = render(guarded_messages)
        if self._control.found_in(text) == self._control.found_in(guarded):
            return self._encode_parsed(text, goes_on=goes_on)
        return self._encode_parsed(guarded, goes_on=goes_on, restore=self._unguard)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to the text: nothing for control tokens, and for ids that pad the vocabulary."""
        if token_id >= len(self._data.tokens) or token_id in self._hidden_ids:
            return b""
        token, kind = self._data.tokens[token_id], self._kind_of(token_id)
        if kind == UNUSED:
            return b""
        return token.encode() if kind == USER_DEFINED else self._plain.token_bytes(token, kind)

    def has_space_after(self, token_id: int | None) -> bool:
        """Whether text that comes after a token (None: that begins) got a space in front that is none of its own."""
        if token_id is None:
            return self._data.space_prefix != "never"
        if self._data.space_prefix != "each":
            return False
        is_user_defined = self._kind_of(token_id) == USER_DEFINED and " " not in self._data.tokens[token_id]
        return is_user_defined or token_id in self._hidden_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return a whole text, control tokens left out; bytes that are not UTF-8 become U+FFFD."""
        text = TokenBytes(self, has_space=self.has_space_after(None))
        return b"".join(map(text.push, token_ids)).decode("utf-8", "replace")

    def _kind_of(self, token_id: int) -> int:
        return self._data.token_types[token_id] if token_id < len(self._data.tokens) else UNUSED

    def _encode_parsed(self, text: str, *, goes_on: bool, restore: Mapping[int, int] | None = None) -> list[int]:
        # The text between two control tokens is always encoded in one piece: words are cut across the joint of template
        # and content (a newline and the spaces a content begins with, say), and models were trained on just that cut.
        token_ids: list[int] = []
        for index, (part, token_id) in enumerate(self._control.cut(text)):
            if part:
                plain = part if restore is None else part.translate(restore)
                token_ids += self._plain.encode(plain, has_space_before=self._has_space_before(index, goes_on))
            if token_id is not None:
                token_ids.append(token_id)
        return token_ids

    def _has_space_before(self, index: int, goes_on: bool) -> bool:
        """Whether the text behind that many control tokens gets a space in front."""
        if index == 0:
            return self._data.space_prefix != "never" and not goes_on
        return self._data.space_prefix == "each"


class TokenBytes:
    """What tokens in a row add to a text, without the spaces that were put in front of text and are none of its own.

    has_space: whether the first one may bring such a space.
    """

    __slots__ = ("_has_space", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, has_space: bool) -> None:
        self._tokenizer = tokenizer
        self._has_space = has_space

    def push(self, token_id: int) -> bytes:
        added = self._tokenizer.token_bytes(token_id)
        text = added.removeprefix(b" ") if self._has_space else added
        self._has_space = self._tokenizer.has_space_after(token_id) or (self._has_space and not added)
        return text


def _check(data: TokenizerData) -> None:
    """Raise for what building a tokenizer relies on: manifests may be older than the rules of the readers."""
    require_kind(data.kind)
    if len(data.tokens) != len(data.token_types):
        raise BadModelFile(
            f"the tokenizer has {len(data.tokens)} tokens but {len(data.token_types)} token types; get the file again"
        )
    if data.kind == SENTENCE_PIECES and len(data.tokens) != len(data.scores):
        raise BadModelFile(
            f"the tokenizer has {len(data.tokens)} tokens but {len(data.scores)} scores; get the file again"
        )
    for token_id in (data.bos_id, data.eos_id, *data.end_ids):
        if token_id is not None and not 0 <= token_id < len(data.tokens):
            raise BadModelFile(
                f"the tokenizer's begin or end token is {token_id}, but it has {len(data.tokens)} tokens; "
                "get the file again"
            )


def _token_text(data: TokenizerData, token_id: int | None) -> str:
    return "" if token_id is None else data.tokens[token_id]
