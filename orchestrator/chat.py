"""A model's chat template: turns messages into the text the model was trained on.

Decides what a conversation is, and what of its text goes on from an answer; `template_sandbox` runs the template. Knows text
only, no token ids; the tokenizer calls it and decides what in the text may become a control token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.template_sandbox import FIELD, run_template
from shoal.errors import InvalidRequest

# Stands for the turns that are tokens already; templates change white space and markup, but not a word of letters.
MARK = "shoalmark"
ROLES = ("system", "user", "assistant")

# Of a template's source and the names it may use, the text it writes; or InvalidRequest.
RunTemplate = Callable[[str, Mapping[str, object]], str]


class ChatTemplate:
    """A template and the names it may use. run: how it is run; one that is not bounded will do for tests."""

    def __init__(self, source: str | None, *, bos_token: str, eos_token: str, run: RunTemplate = run_template) -> None:
        self._source = source
        self._bos_token = bos_token
        self._eos_token = eos_token
        self._run = run

    def render(self, messages: Sequence[Mapping[str, str]], *, opens_answer: bool = True) -> str:
        """Return the text that ends where the assistant's answer begins, or, if that is not opened, with the messages.

        Raises InvalidRequest if the messages are not a conversation or the template refuses them.
        """
        _validate(messages)
        return self._render(messages, opens_answer)

    def render_turn(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text that goes on from an answer: the end of its turn, these messages, where the next answer begins.

        It is what the template writes after the answer of a conversation that stands for the real one. Raises InvalidRequest
        also for a template that does not write that answer as it is, and for a system message: it came first.
        """
        _validate(messages)
        if any(message["role"] == "system" for message in messages):
            raise InvalidRequest(FIELD, "a system message comes with the first turn of a session; this is a later one")
        mark = MARK
        while any(mark in message["content"] for message in messages):
            mark += "x"
        stand_in = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        _, *after = self._render([*stand_in, *messages], True).split(mark)
        if len(after) != 1:
            raise InvalidRequest(
                FIELD,
                "the model's chat template does not keep answers as they are, so a session cannot go on with messages; "
                "send the turn in prompt, as text or tokens",
            )
        return after[0]

    def _render(self, messages: Sequence[Mapping[str, str]], opens_answer: bool) -> str:
        if self._source is None:
            raise InvalidRequest(
                FIELD,
                "this model has no chat template; send plain text in prompt instead (`shoal generate --raw`), "
                "or import it again with --chat-template",
            )
        names = {
            "messages": [{"role": message["role"], "content": message["content"]} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": opens_answer,
            "bos_token": self._bos_token,
            "eos_token": self._eos_token,
        }
        return self._run(self._source, names)


def _validate(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise InvalidRequest(FIELD, "there are none; send at least one")
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            raise InvalidRequest(FIELD, f"message {index} has the role {role!r}; it must be one of {', '.join(ROLES)}")
    if not any(message["content"] for message in messages):
        raise InvalidRequest(FIELD, "the content of every message is empty; send some text")
