"""The text of an answer as it grows: what is certain after each token, and whether a stop string ended it.

Owns the bytes of an unfinished character and the text that may yet become a stop string; lets out neither. The deltas
joined are the text of the whole answer, however it is cut into tokens and wherever it ends. The engine keeps one stream
a sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.tokenizer import TokenBytes, Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is now certain, and whether the answer ends with it."""

    text: str
    is_stopped: bool


class TextStream:
    """The text of one answer, pushed token by token.

    The stop string that is complete first ends the text, before its first character; of those complete at the same
    character it is the longest. This way the text depends neither on the order of the stops nor on the cut into tokens.

    Invariants: no part of `_held` was let out; `_held` is the longest end of the text that begins a stop string.
    """

    __slots__ = ("_bytes", "_decoder", "_held", "_is_stopped", "_matchers")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, after: int | None = None) -> None:
        """after: the token that the answer comes after; behind some, text begins with a space that is none of its own."""
        self._bytes = TokenBytes(tokenizer, has_space=after is not None and tokenizer.has_space_after(after))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""
        self._is_stopped = False

    def push(self, token_id: int) -> TextDelta:
        """Take the next token; after a stop nothing more comes out."""
        if self._is_stopped:
            return TextDelta("", True)
        text = self._decoder.decode(self._bytes.push(token_id))
        return TextDelta(self._release(text), self._is_stopped)

    def finish(self) -> str:
        """Return what is left when no token follows; an unfinished character becomes U+FFFD."""
        if self._is_stopped:
            return ""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._is_stopped = True
        self._held = ""
        return text

    def _release(self, text: str) -> str:
        """Return what can be let out once text is appended."""
        known = self._held + text
        num_held = 0
        for index, character in enumerate(text) if self._matchers else ():
            num_held = max(matcher.advance(character) for matcher in self._matchers)
            num_stopped = max((len(matcher.stop) for matcher in self._matchers if matcher.is_complete), default=0)
            if num_stopped:
                certain = known[: len(self._held) + index + 1 - num_stopped]
                self._is_stopped = True
                self._held = ""
                return certain
        if not text:
            return ""
        self._held = known[len(known) - num_held :]
        return known[: len(known) - num_held]


class _StopMatcher:
    """How far the text's end has got into one stop string, in constant amortised time a character.

    Source: Knuth, Morris, Pratt (1977). Invariant: `stop[:_matched]` is the longest beginning of `stop` that the text
    ends with.
    """

    __slots__ = ("_fallback", "_matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self._matched = 0
        # _fallback[n]: the longest shorter beginning of stop that stop[:n] ends with.
        self._fallback = [0, 0]
        for character in stop[1:]:
            self._fallback.append(self._longest(self._fallback[-1], character))

    @property
    def is_complete(self) -> bool:
        return self._matched == len(self.stop)

    def advance(self, character: str) -> int:
        """Take the text's next character; return how many characters at its end may belong to the stop string."""
        self._matched = self._longest(self._matched, character)
        return self._matched

    def _longest(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched]
        return matched + 1 if self.stop[matched] == character else 0
