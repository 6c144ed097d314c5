"""Reads GGUF files: a model's configuration, tokenizer and tensors, checked before anything is believed.

Decides nothing itself: `gguf_parts` finds the files of a model, `gguf_header` reads their headers, `architectures` say what
a model must contain. Tensors are views on the mapped files. Knows nothing of packing or storing; the store calls it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from modelstore.architectures import find_gguf
from modelstore.gguf_header import MIN_FILE_BYTES, read_header
from modelstore.gguf_parts import find_parts, require_agreement
from modelstore.mapped_file import map_file
from modelstore.source import SourceModel, SourceTensor
from modelstore.tokenizer_gguf import read_tokenizer


class GgufFile(SourceModel):
    """A validated, mapped GGUF model, of one file or, given any of them, of all its parts.

    Raises BadModelFile for what is damaged and UnsupportedModel for what is sound but cannot be served, naming the key
    or tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = find_parts(path)
        self._maps = {part: map_file(part, MIN_FILE_BYTES, "a GGUF file") for part in parts}
        headers = [read_header(mapped, part.name) for part, mapped in self._maps.items()]
        require_agreement(parts, headers)
        keys = headers[0].keys
        architecture = find_gguf(keys)
        shapes = {place.name: place.shape for header in headers for place in header.places}
        self.config = architecture.config_of_gguf(keys, shapes)
        architecture.require(self.config, shapes)
        self.has_paired_rotary = architecture.has_paired_rotary
        self.tokenizer = read_tokenizer(keys, self.config.vocab_size)
        license_name = keys.get("general.license")
        self.license = license_name if isinstance(license_name, str) else ""
        self.tensors = {
            place.name: SourceTensor(place.name, place.type, place.shape, place.view(np.frombuffer(mapped, np.uint8)))
            for mapped, header in zip(self._maps.values(), headers, strict=True)
            for place in header.places
        }
