"""A model's chat template: turns messages into the text the model was trained on.

Templates come with model files, so they run in jinja2's immutable sandbox, and whatever goes wrong in one is the
request's error, told in the template's own words. Knows text only, no token ids; the tokenizer calls it and decides
what in the text may become a control token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import InvalidRequest

FIELD = "chat.messages"
# Stands for the turns that are tokens already; templates change white space and markup, but not a word of letters.
MARK = "shoalmark"
ROLES = ("system", "user", "assistant")

# What a template's own code can raise: jinja2's errors, and Python's from the expressions in it.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A template and the names it may use. Source: `apply_chat_template` of Hugging Face transformers, which templates
    are written for: the block options, the loop controls, and the names that are always defined.
    """

    def __init__(self, source: str | None, *, bos_token: str, eos_token: str) -> None:
        self._source = source
        self._bos_token = bos_token
        self._eos_token = eos_token

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
        try:
            return self._template.render(
                messages=[{"role": message["role"], "content": message["content"]} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=opens_answer,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(FIELD, f"the model's chat template refused these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._source is None:
            raise InvalidRequest(FIELD, "this model has no chat template; send plain text in prompt instead")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)


def _validate(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise InvalidRequest(FIELD, "there are none; send at least one")
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            raise InvalidRequest(FIELD, f"message {index} has the role {role!r}; it must be one of {', '.join(ROLES)}")
    if not any(message["content"] for message in messages):
        raise InvalidRequest(FIELD, "the content of every message is empty; send some text")


class _Generation(Extension):
    """Marks what a model wrote, for training; here its content is just text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
