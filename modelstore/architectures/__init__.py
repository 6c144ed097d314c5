"""Which architectures can be served: the one list of them, by their names in GGUF and in Hugging Face's files.

Decides what a model is taken for; one that is not listed is refused with the list. Readers ask it; how one is added:
docs/adding-a-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelstore.architectures.decoder import Architecture
from modelstore.architectures.fields import Fields
from modelstore.architectures.gemma3 import GEMMA3
from modelstore.architectures.llama import LLAMA
from modelstore.architectures.phi3 import PHI3
from modelstore.architectures.qwen2 import QWEN2
from modelstore.architectures.qwen3 import QWEN3
from shoal.errors import UnsupportedModel

ARCHITECTURES: Mapping[str, Architecture] = {known.name: known for known in (LLAMA, QWEN2, QWEN3, GEMMA3, PHI3)}


def find_gguf(keys: Mapping[str, Any]) -> Architecture:
    """The architecture of a GGUF file's keys; raises UnsupportedModel listing what is supported, BadModelFile."""
    name = Fields(keys).get("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def find_hf(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json; raises UnsupportedModel listing what is supported, BadModelFile."""
    names = Fields(config, where="config.json:").get("architectures", list)
    known = {hf_name: found for found in ARCHITECTURES.values() for hf_name in found.hf_names}
    for name in names:
        if isinstance(name, str) and name in known:
            return known[name]
    asked = ", ".join(map(str, names)) or "none"
    raise UnsupportedModel(f"architecture {asked} is not supported; supported are {', '.join(known)}")
