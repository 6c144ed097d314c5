"""A decoder of the llama family in plain numpy and float32, to judge ours by.

Reads a GGUF through the `gguf` package and its own dequantisation, applies rotary embeddings to the file's interleaved
pairs, and runs one whole prompt at a time without any cache. Shares no code with what it judges.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class ReferenceDecoder:
    """Computes the logits of every position of a prompt."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

        def field(name: str) -> float:
            return float(reader.fields[f"llama.{name}"].contents())

        self._num_layers = int(field("block_count"))
        self._num_heads = int(field("attention.head_count"))
        self._num_kv_heads = int(field("attention.head_count_kv"))
        self._epsilon = np.float32(field("attention.layer_norm_rms_epsilon"))
        self._rope_base = field("rope.freq_base")
        self._head_dim = self._weight("blk.0.attn_q.weight").shape[0] // self._num_heads

    def logits(self, token_ids: list[int]) -> Floats:
        x = self._weight("token_embd.weight")[token_ids]  # [T, E]
        for layer in range(self._num_layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        result: Floats = self._norm(x, "output_norm") @ self._weight(head).T
        return result

    def _weight(self, name: str) -> Floats:
        tensor = self._tensors[name]
        # A plain array, and one row, since rows are dequantised in small pieces, which takes several times as long.
        stored = np.asarray(tensor.data)
        weight: Floats = dequantize(stored.reshape(1, -1), tensor.tensor_type).astype(np.float32, copy=False)
        return weight.reshape(*stored.shape[:-1], -1)

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self._epsilon)
        normed: Floats = x * scale * self._weight(f"{name}.weight")
        return normed

    def _project(self, layer: int, name: str, x: Floats) -> Floats:
        projected: Floats = x @ self._weight(f"blk.{layer}.{name}.weight").T
        return projected

    def _heads(self, layer: int, name: str, x: Floats, num_heads: int) -> Floats:
        heads: Floats = self._project(layer, name, x).reshape(len(x), num_heads, self._head_dim).swapaxes(0, 1)
        return heads

    def _attention(self, layer: int, x: Floats) -> Floats:
        q = self._rotate(self._heads(layer, "attn_q", x, self._num_heads))  # [H, T, D]
        k = self._rotate(self._heads(layer, "attn_k", x, self._num_kv_heads))  # [K, T, D]
        v = self._heads(layer, "attn_v", x, self._num_kv_heads)
        group = self._num_heads // self._num_kv_heads
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        scores = q @ k.swapaxes(1, 2) / np.float32(np.sqrt(self._head_dim))
        scores += np.triu(np.full((len(x), len(x)), -np.inf, np.float32), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        joined = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)  # [T, H D]
        return self._project(layer, "attn_output", joined)

    def _rotate(self, x: Floats) -> Floats:
        """Turn the pairs (2i, 2i + 1) of each head by position x base^(-2i / D)."""
        frequencies = self._rope_base ** (-np.arange(0, self._head_dim, 2) / self._head_dim)
        angles = np.arange(x.shape[1])[:, None] * frequencies  # [T, D/2]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    def _feed_forward(self, layer: int, x: Floats) -> Floats:
        gate = self._project(layer, "ffn_gate", x)
        up = self._project(layer, "ffn_up", x)
        return self._project(layer, "ffn_down", gate / (1 + np.exp(-gate)) * up)


def perplexity(logits: Floats, token_ids: list[int]) -> float:
    """exp of the mean negative log probability of each token given those before it; logits [T, V] of the same tokens."""
    scores = logits[:-1].astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    chosen = scores[np.arange(len(scores)), token_ids[1:]] - np.log(np.exp(scores).sum(axis=1))
    return float(np.exp(-chosen.mean()))
