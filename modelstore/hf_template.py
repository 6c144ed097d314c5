"""Finds the chat template of a model in Hugging Face's layout, and of a user who brings one.

Decides which of several counts: the file for it before the settings, and of named ones `default`. Templates are text here,
they are run by the orchestrator's `chat`. Called by `tokenizer_hf` and where models are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelstore.chat_templates import CHAT_TEMPLATES
from modelstore.hf_folder import HfFolder
from modelstore.strict_json import read_bytes
from modelstore.tokenizer_rules import MAX_TEMPLATE_BYTES
from shoal.errors import BadModelFile, InvalidRequest

TEMPLATE_FILE, TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
DEFAULT = "default"


def read_template(folder: HfFolder, settings: Mapping[str, Any]) -> str | None:
    """The template, or None if the model has none. settings: of tokenizer_config.json; raises BadModelFile."""
    content = folder.read(TEMPLATE_FILE, MAX_TEMPLATE_BYTES)
    if content is not None:
        return _decode(content, TEMPLATE_FILE)
    stated = settings.get("chat_template")
    if stated is None:
        stated = (folder.read_json(TEMPLATE_JSON, 2 * MAX_TEMPLATE_BYTES) or {}).get("chat_template")
    if isinstance(stated, list):
        stated = _default_of(stated)
    if stated is not None and not isinstance(stated, str):
        raise BadModelFile("tokenizer_config.json: chat_template is neither text nor a list of named texts")
    return stated or None


def user_template(wanted: str) -> str:
    """The template of a name, as "chatml", or of a file; raises InvalidRequest or BadModelFile."""
    if wanted in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[wanted]
    path = Path(wanted)
    if not path.exists():
        names = ", ".join(sorted(CHAT_TEMPLATES))
        raise InvalidRequest("chat_template", f"{wanted!r} is neither a file nor one of {names}")
    return _decode(read_bytes(path, MAX_TEMPLATE_BYTES), path.name)


def _default_of(templates: list[Any]) -> Any:
    named = {str(entry.get("name")): entry.get("template") for entry in templates if isinstance(entry, Mapping)}
    return next(iter(named.values())) if len(named) == 1 else named.get(DEFAULT)


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise BadModelFile(f"{name} is no UTF-8 text: get the file again") from error
