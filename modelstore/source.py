"""A model as its file has it, whatever the format: what readers hand out and packing takes.

Tensors go by the names they have in GGUF files (`blk.0.attn_q.weight`), so that a reader of another format translates its
names, and nobody else knows two. Plain data and one protocol; readers (`gguf`) make it, `packing` and `quantize` use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from modelstore.manifest import ModelConfig, TokenizerData


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """A tensor as a file holds it. raw: uint8 [N, bytes of a row]; a vector is one row. shape: (N, K) or (N,)."""

    name: str
    type: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


def commonest_type(tensors: Iterable[SourceTensor]) -> str:
    """The type most bytes of the layers' matrices have."""
    num_bytes = Counter[str]()
    for tensor in tensors:
        if len(tensor.shape) == 2 and tensor.name.startswith("blk."):
            num_bytes[tensor.type] += tensor.raw.nbytes
    return num_bytes.most_common(1)[0][0]


class SourceModel(Protocol):
    """An open, validated model. Its arrays are valid for as long as somebody holds them."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tokenizer(self) -> TokenizerData: ...

    @property
    def license(self) -> str:
        """As the file states it; empty if it does not."""

    @property
    def quantization(self) -> str:
        """The type most of the weight bytes have."""

    @property
    def has_paired_rotary(self) -> bool:
        """Whether neighbouring query and key rows are rotated together; if not, row i with row i + D / 2."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...

    def release(self) -> None:
        """Let the system take back the memory of all that has been read so far; it can be read again.

        To be called before each piece that is read. Raises BadModelFile if a file has become shorter.
        """

    def close(self) -> None: ...
