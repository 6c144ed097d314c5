"""Runs a chat template: a small program that came with a model's files, and so is not trusted.

Decides what it may use: text and the names it is given, in jinja2's immutable sandbox; and that whatever goes wrong in it is
the request's error, told in the template's own words. How long it may take and how much memory, `template_process` decides.
Knows text only, no token ids. `chat` calls it, or the process; who brings a template of their own has it checked here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.errors import InvalidRequest

FIELD = "chat.messages"
# Of what a template says when it refuses.
MAX_REASON_CHARS = 300
# What a template may write, far above any prompt.
MAX_TEXT_CHARS = 16 << 20

_HALF = re.compile("[\ud800-\udfff]")
# What a template's own code can raise: jinja2's errors, and Python's from the expressions in it.
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def run_template(source: str, names: Mapping[str, object]) -> str:
    """Return what a template writes, with these names defined. Raises InvalidRequest if it refuses or fails."""
    try:
        text = _compiled(source).render(names)
    except _FAULTS as error:
        raise refused(str(error) or type(error).__name__) from error
    if len(text) > MAX_TEXT_CHARS:
        raise refused(f"it writes {len(text)} characters, at most {MAX_TEXT_CHARS} are taken")
    # An escape in a template can write halves of characters; those in what it was given stand for something.
    if (halves := _halves(text)) and not halves <= _halves(json.dumps(names, ensure_ascii=False)):
        raise refused("it writes half a character, which is no text")
    return text


def check_template(source: str) -> None:
    """Run nothing; raises InvalidRequest for a text that is no template."""
    try:
        _compiled(source)
    except _FAULTS as error:
        raise InvalidRequest("chat_template", f"is no template: {str(error) or type(error).__name__}") from error


def _halves(text: str) -> set[str]:
    return set(_HALF.findall(text))


def refused(reason: str) -> InvalidRequest:
    """The error of a template that gives no text; the reason, which may be the template's own, as it can be shown."""
    shown = "".join(character if character.isprintable() else " " for character in reason[:MAX_REASON_CHARS])
    return InvalidRequest(FIELD, f"the model's chat template refused these messages: {shown}")


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    """Source: `apply_chat_template` of Hugging Face transformers, which templates are written for: the block options, the
    loop controls, and the names that are always defined.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


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
