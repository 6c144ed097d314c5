"""What tiny random models are made of: the tensors of each architecture, and values that keep activations in bounds.

Both writers, of GGUF files and of Hugging Face's folders, take the same values from here: the same arguments give the same
model. Values are as GGUF has them, in the row order of its llama files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "phi3")


DEFAULT_VOCAB = 288


class ShapeOptions(TypedDict, total=False):
    """Those of TinyShape, which both writers take."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int | Sequence[int]
    vocab: int
    is_tied: bool
    architecture: str
    has_biases: bool


@dataclass(frozen=True, slots=True)
class TinyShape:
    """head_dim: 0 for hidden / heads. ffn: one for all layers, or one each. has_biases: also where an architecture can do
    without.
    """

    num_layers: int = 3
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 0
    ffn: int | Sequence[int] = 96
    vocab: int = DEFAULT_VOCAB
    is_tied: bool = True
    architecture: str = "llama"
    has_biases: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // self.num_heads)

    @property
    def ffns(self) -> tuple[int, ...]:
        """The feed forward width of each layer."""
        return (self.ffn,) * self.num_layers if isinstance(self.ffn, int) else tuple(self.ffn)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors in the order llama.cpp writes them, (rows, columns)."""
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, self.hidden)}
        for layer in range(self.num_layers):
            shapes.update({f"blk.{layer}.{part}": shape for part, shape in self._layer_shapes(layer).items()})
        shapes["output_norm.weight"] = (self.hidden,)
        if not self.is_tied:
            shapes["output.weight"] = (self.vocab, self.hidden)
        return shapes

    def random_tensors(self, seed: int) -> Iterator[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        for name, dims in self.tensor_shapes().items():
            yield name, _random_values(rng, name, dims)

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, ffn, query_rows = self.hidden, self.ffns[layer], self.num_heads * self.head_dim
        key_rows = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "ffn_down.weight": (hidden, ffn),
            "ffn_gate.weight": (ffn, hidden),
            "ffn_up.weight": (ffn, hidden),
            "ffn_norm.weight": (hidden,),
            "attn_k.weight": (key_rows, hidden),
            "attn_output.weight": (hidden, query_rows),
            "attn_q.weight": (query_rows, hidden),
            "attn_v.weight": (key_rows, hidden),
        }
        if self.architecture == "qwen2" or self.has_biases:
            shapes |= {"attn_q.bias": (query_rows,), "attn_k.bias": (key_rows,), "attn_v.bias": (key_rows,)}
        if self.has_biases and self.architecture == "llama":
            shapes |= {"attn_output.bias": (hidden,), "ffn_gate.bias": (ffn,), "ffn_up.bias": (ffn,)}
            shapes |= {"ffn_down.bias": (hidden,)}
        if self.architecture in ("qwen3", "gemma3"):
            shapes |= {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}
        if self.architecture == "gemma3":
            shapes |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
        if self.architecture == "phi3":
            for apart in ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight"):
                del shapes[apart]
            shapes |= {"attn_qkv.weight": (query_rows + 2 * key_rows, hidden), "ffn_up.weight": (2 * ffn, hidden)}
        return shapes


def _random_values(rng: np.random.Generator, name: str, dims: tuple[int, ...]) -> np.ndarray:
    """Norm weights near 1, biases of a size that matters; matrices scaled so that activations do not vanish or blow up."""
    noise = rng.standard_normal(dims, dtype=np.float32)
    if name.endswith(".bias"):
        return (0.5 * noise).astype(np.float32)
    if len(dims) == 1:
        return (1.0 + 0.1 * noise).astype(np.float32)
    scale = 1.0 if name == "token_embd.weight" else dims[1] ** -0.5
    return (noise * np.float32(scale)).astype(np.float32)
