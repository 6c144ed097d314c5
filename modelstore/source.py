"""A model as its file has it, whatever the format: what readers hand out and packing takes.

Tensors go by the names they have in GGUF files (`blk.0.attn_q.weight`), so that a reader of another format translates its
names, and nobody else knows two. Owns what open models of all formats do alike; readers (`gguf`, `huggingface`) build on it,
`packing` and `quantize` use it.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from modelstore.manifest import ModelConfig, TokenizerData
from modelstore.mapped_file import release


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """A tensor as a file holds it. raw: uint8 [N, bytes of a row]; a vector is one row. shape: (N, K) or (N,)."""

    name: str
    type: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


class SourceModel:
    """An open, validated model. Its arrays are valid for as long as somebody holds them, close() or not.

    license: as the file states it; empty if it does not. has_paired_rotary: whether neighbouring query and key rows are
    rotated together; if not, row i with row i + D / 2.
    """

    path: Path
    config: ModelConfig
    tokenizer: TokenizerData
    license: str
    has_paired_rotary: bool
    tensors: Mapping[str, SourceTensor]
    _maps: Mapping[Path, mmap.mmap]

    @property
    def quantization(self) -> str:
        """The type most bytes of the layers' matrices have."""
        num_bytes = Counter[str]()
        for tensor in self.tensors.values():
            if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
                num_bytes[tensor.type] += tensor.raw.nbytes
        return num_bytes.most_common(1)[0][0]

    def release(self) -> None:
        """Let the system take back the memory of all that has been read so far; it can be read again.

        To be called before each piece that is read. Raises BadModelFile if a file has become shorter.
        """
        release(self._maps)

    def close(self) -> None:
        """Forget the tensors; a mapping ends when nobody holds an array of it."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
