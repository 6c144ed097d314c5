"""Reads a model in Hugging Face's layout: config.json, weights as safetensors, tokenizer and generation settings.

Translates names and values into the canonical ones, which are GGUF's: norms get what an architecture leaves out of them.
Decides which tensors are passed over. Checked before anything is believed, like GGUF files; tensors are views on mapped
files. Knows nothing of packing or storing; `formats` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from modelstore.architectures import find_hf
from modelstore.architectures.decoder import Architecture
from modelstore.architectures.fields import MAX_LAYERS, Fields
from modelstore.block_types import FLOAT_TYPES, float_values
from modelstore.hf_folder import CONFIG, HfFolder
from modelstore.mapped_file import TensorPlace
from modelstore.safetensors_file import SafetensorsFile
from modelstore.source import SourceModel, SourceTensor
from modelstore.tokenizer_hf import read_tokenizer
from shoal.errors import BadModelFile, UnsupportedModel

# Of buffers that older versions saved: rotary frequencies, which follow from the configuration.
PASSED_OVER = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_LICENSE = re.compile(r"^(license|license_name):[ \t]*[\"']?([^\"'\n]{1,100}?)[\"']?[ \t]*$", re.MULTILINE)
_CARD_HEAD_BYTES = 64 << 10


class HfModel(SourceModel):
    """A validated, mapped model folder.

    Raises BadModelFile for what is damaged and UnsupportedModel for what is sound but cannot be served, naming the key
    or tensor.
    """

    has_paired_rotary = False

    def __init__(self, path: Path) -> None:
        self.path = path
        folder = HfFolder(path)
        content = folder.read_json(CONFIG)
        if content is None:
            raise BadModelFile(f"{path} has no {CONFIG}: is it the folder of a model?")
        architecture = require_supported(content)
        files, found = _open_weights(folder)
        self._maps = {file.path: file.mapped for file in files}
        tensors = _canonical(found, architecture, content)
        shapes = {name: place.shape for name, (_, place) in tensors.items()}
        if "output.weight" not in shapes and content.get("tie_word_embeddings") is None:
            content["tie_word_embeddings"] = True
        self.config = architecture.config_of_hf(content, shapes)
        architecture.require(self.config, shapes)
        self.tokenizer = read_tokenizer(folder, content, self.config.vocab_size)
        self.license = _read_license(folder)
        self.tensors = {
            name: _view(name, file, place, architecture.hf_norm_offset) for name, (file, place) in tensors.items()
        }


_Found = tuple[SafetensorsFile, TensorPlace]


def require_supported(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json; raises UnsupportedModel, also for weights quantised in ways of their own."""
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
        raise UnsupportedModel(
            f"{CONFIG}: quantization_config says that the weights are quantised ({method}), which cannot be read: "
            "get the model in BF16 or as a GGUF file"
        )
    return find_hf(config)


def _open_weights(folder: HfFolder) -> tuple[list[SafetensorsFile], dict[str, _Found]]:
    """Map the weight files; return them and all their tensors by the names that they have there."""
    paths, places = folder.weight_files()
    files = {name: SafetensorsFile(path) for name, path in paths.items()}
    found: dict[str, _Found] = {}
    for name, file in files.items():
        for tensor, place in file.places.items():
            if tensor in found:
                raise BadModelFile(f"tensor {tensor} is in two files, {name} is one: get the model again")
            found[tensor] = (file, place)
    for tensor, name in places.items():
        if tensor not in files[name].places:
            raise BadModelFile(f"tensor {tensor} is not in {name}, where the index has it: get the model again")
    return list(files.values()), found


def _canonical(found: Mapping[str, _Found], architecture: Architecture, config: Mapping[str, Any]) -> dict[str, _Found]:
    """The tensors by canonical names; those that an architecture does not know keep theirs."""
    num_layers = Fields(config, where=f"{CONFIG}:").count("num_hidden_layers", MAX_LAYERS)
    names = architecture.canonical_names(num_layers)
    tensors: dict[str, _Found] = {}
    for name, (file, place) in found.items():
        if PASSED_OVER.fullmatch(name):
            continue
        if place.type not in FLOAT_TYPES:
            raise UnsupportedModel(
                f"tensor {name} is of type {place.type}; supported are {', '.join(FLOAT_TYPES)}: get the model in one "
                "of these or as a GGUF file"
            )
        if len(place.shape) not in (1, 2) or 0 in place.shape:
            raise BadModelFile(f"tensor {name} has shape {place.shape}; a decoder has vectors and matrices only")
        tensors[names.get(name, name)] = (file, place)
    return tensors


def _view(name: str, file: SafetensorsFile, place: TensorPlace, norm_offset: float) -> SourceTensor:
    tensor = SourceTensor(name, place.type, place.shape, place.view(file.content))
    if norm_offset and name.endswith("norm.weight"):
        values = float_values(tensor.type, tensor.raw) + np.float32(norm_offset)
        tensor = replace(tensor, type="F32", raw=values.view(np.uint8).reshape(1, -1))
    return tensor


def _read_license(folder: HfFolder) -> str:
    """What the head of a model's card says; empty if there is none."""
    path = folder.find("README.md")
    if path is None:
        return ""
    with path.open("rb") as file:
        text = file.read(_CARD_HEAD_BYTES).decode(errors="replace")
    head = text.split("\n---", 1)[0] if text.startswith("---") else ""
    stated: dict[str, str] = dict(_LICENSE.findall(head))
    name = stated.get("license", "")
    return stated.get("license_name", name) if name in ("", "other") else name
