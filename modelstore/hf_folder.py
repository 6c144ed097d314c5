"""A folder in the layout of Hugging Face's models: finds its files without being led out of it, and its weight files.

Decides which links are followed: those that stay inside, and those of the hub's own cache, whose snapshots are links to
blobs beside them. Says what to do with weights in formats that are not read. Knows nothing of what the files mean; called
by `huggingface` and by the reader of tokenizer files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelstore.strict_json import parse_object, read_bytes
from shoal.errors import BadModelFile, UnsupportedModel

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES = 1 << 20
# One line a tensor; far more than the tensors of a thousand layers take.
MAX_INDEX_BYTES = 8 << 20
MAX_SHARDS = 1000
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class HfFolder:
    """The files of one folder, by name. Raises BadModelFile for a name or link that leads out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        root = path.resolve()
        self._roots = [root]
        if root.parent.name == "snapshots":
            self._roots.append(root.parent.parent / "blobs")

    def find(self, name: str) -> Path | None:
        """Where a file is, or None if there is none."""
        if not _FILE_NAME.fullmatch(name):
            raise BadModelFile(f"{name[:100]!r} is no name of a file in {self.path}: get the model again")
        path = self.path / name
        if not path.exists() and not path.is_symlink():
            return None
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise BadModelFile(f"{path} is a link that leads nowhere: get the file again") from error
        if not any(target.is_relative_to(root) for root in self._roots):
            raise BadModelFile(f"{path} is a link out of its folder, to {target}: put the file itself there")
        if not target.is_file():
            raise BadModelFile(f"{path} is no file")
        return target

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """The bytes of a file, or None if there is none; raises BadModelFile if there are more than max_bytes."""
        path = self.find(name)
        return None if path is None else read_bytes(path, max_bytes)

    def read_json(self, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
        """The object in a file, or None if there is no such file."""
        content = self.read(name, max_bytes)
        return None if content is None else parse_object(content, name)

    def weight_files(self) -> tuple[dict[str, Path], dict[str, str]]:
        """The files of the weights by name, and which of them has which tensor, as far as an index says so."""
        single = self.find(WEIGHTS)
        if single is not None:
            return {WEIGHTS: single}, {}
        index = self.read_json(INDEX, MAX_INDEX_BYTES)
        if index is None:
            raise self._no_weights()
        places = index.get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise BadModelFile(f"{INDEX} has no weight_map that says which file has which tensor: get it again")
        names = sorted(set(places.values()))
        if len(names) > MAX_SHARDS:
            raise BadModelFile(f"{INDEX} names {len(names)} files, at most {MAX_SHARDS} are read")
        return {name: self._shard(name) for name in names}, places

    def _shard(self, name: str) -> Path:
        path = self.find(name)
        if path is None:
            raise BadModelFile(f"{name} is missing, which {INDEX} names: download that file too")
        if not name.endswith(".safetensors"):
            raise BadModelFile(f"{INDEX} names {name}, which is no safetensors file")
        return path

    def _no_weights(self) -> BadModelFile | UnsupportedModel:
        """What to tell of a folder without the files that are read."""
        pickles = self._names(".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
        if (self.path / "adapter_config.json").exists():
            return UnsupportedModel(f"{self.path} has an adapter, not a model: merge it into its base model first")
        if gguf := self._names(".gguf"):
            return BadModelFile(f"{self.path} has GGUF files: name one of them, as {self.path / gguf[0]}")
        if self._names("consolidated.safetensors"):
            return UnsupportedModel(f"{self.path} has consolidated weights: get the model's {WEIGHTS} files too")
        if pickles:
            return UnsupportedModel(
                f"{self.path} has its weights in {pickles[0]}, a format that can run code: get the model's {WEIGHTS}, or "
                "load it with transformers and save it with save_pretrained(folder, safe_serialization=True)"
            )
        return BadModelFile(f"{self.path} has neither {WEIGHTS} nor {INDEX}: is it complete?")

    def _names(self, *endings: str) -> Sequence[str]:
        return sorted(path.name for path in self.path.iterdir() if path.name.endswith(endings))
