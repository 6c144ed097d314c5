"""Reads a file of prompts: one JSON object a line, with an id, a text or a chat, and how it is to be answered.

A line that is not as it should be becomes a Refusal, which is an answer like any other: it stops nobody else. Knows nothing
of who answers. Called by `shoal batch`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError, InvalidRequest, ShoalError

# A prompt is at most as long as a context: what is far longer is not a file of prompts.
MAX_LINE_BYTES = 16 * 2**20
# Options of a line, as the SDK calls them, and their types. A batch has a class, and no sessions: those have an order.
OPTIONS: Mapping[str, tuple[type, ...]] = {
    "model": (str,),
    "max_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "seed": (int,),
    "stop": (str, list),
    "ignore_eos": (bool,),
    "tenant": (str,),
}
_DIGEST_CHARS = 12


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line that can be asked. line: its number from 1 on. digest: of its bytes: a line that was edited is another one."""

    line: int
    id: str
    digest: str
    text: str | None
    messages: Sequence[Mapping[str, str]] | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line that cannot be asked, and why."""

    line: int
    id: str
    digest: str
    error: ShoalError


def read_prompts(path: Path) -> Iterator[Prompt | Refusal]:
    """Yield the lines of a file that are not blank. Raises ConfigError if it cannot be read."""
    ids: set[str] = set()
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes: not prompts", field="prompts"
                    )
                if raw.strip():
                    line = _parse(number, raw)
                    yield _unique(line, ids)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", field="prompts") from error


def _unique(line: Prompt | Refusal, ids: set[str]) -> Prompt | Refusal:
    if line.id in ids:
        error = InvalidRequest("id", f"{line.id!r} is the id of an earlier line, too; give each its own, or none")
        return Refusal(line.line, line.id, line.digest, error)
    ids.add(line.id)
    return line


def _parse(number: int, raw: bytes) -> Prompt | Refusal:
    digest = hashlib.sha256(raw.strip()).hexdigest()[:_DIGEST_CHARS]
    line_id = f"line-{number}"
    try:
        content = _content(raw)
        line_id = _id(content, line_id)
        text, messages = _input(content)
        return Prompt(number, line_id, digest, text, messages, _options(content))
    except InvalidRequest as error:
        return Refusal(number, line_id, digest, error)


def _content(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("line", f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("line", 'is not a JSON object such as {"id": "1", "prompt": "Hello"}')
    return content


def _id(content: Mapping[str, Any], default: str) -> str:
    given = content.get("id", default)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise InvalidRequest("id", f"{given!r} is not allowed; it must be a text that is not empty, or a whole number")
    if not str(given).isprintable():
        raise InvalidRequest("id", f"{given!r} has characters that cannot be shown")
    return str(given)


def _input(content: Mapping[str, Any]) -> tuple[str | None, list[dict[str, str]] | None]:
    text, messages = content.get("prompt"), content.get("messages")
    if (text is None) == (messages is None):
        raise InvalidRequest("prompt", "give either a prompt, to be continued, or messages, to be answered")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest("prompt", "must be a text")
    if messages is not None and not _are_messages(messages):
        raise InvalidRequest("messages", 'must be a list of objects such as {"role": "user", "content": "Hello"}')
    return text, messages


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(value, str) for value in message.values())
        for message in messages
    )


def _options(content: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in content.items() if name not in ("id", "prompt", "messages")}
    for name, value in options.items():
        if name not in OPTIONS:
            raise InvalidRequest(name, f"is not an option of a line; there are {', '.join(OPTIONS)}")
        # True is an int to isinstance.
        if type(value) not in OPTIONS[name]:
            raise InvalidRequest(name, f"{value!r} is not {_named(OPTIONS[name])}")
    if isinstance(options.get("stop"), list) and not all(isinstance(text, str) for text in options["stop"]):
        raise InvalidRequest("stop", "must be a text or a list of texts")
    return options


def _named(types: tuple[type, ...]) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list of texts"}
    return names[types[-1]]
