"""Opens a model by its path, whatever its format.

Decides what a path is; what cannot be read is refused with what to do. The store calls it.
"""

from __future__ import annotations

from pathlib import Path

from modelstore.gguf import GgufFile
from modelstore.huggingface import HfModel
from modelstore.source import SourceModel
from shoal.errors import BadModelFile, UnsupportedModel

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Files that are named in place of the folder that they are in.
PARTS_OF_FOLDER = (".safetensors", ".json")


def open_model(path: Path) -> SourceModel:
    """A GGUF file, the first of a split one, or a folder in Hugging Face's layout.

    Raises BadModelFile and UnsupportedModel.
    """
    if path.is_dir():
        return HfModel(path)
    if not path.is_file():
        raise BadModelFile(f"{path} is neither a file nor a folder")
    if path.name.endswith(PARTS_OF_FOLDER):
        return HfModel(path.absolute().parent)
    if path.name.endswith(PICKLES):
        raise UnsupportedModel(
            f"{path.name} is a PyTorch file, a format that can run code: get the model as safetensors or as a GGUF file"
        )
    return GgufFile(path)
