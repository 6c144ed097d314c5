"""A decoder in plain numpy and float32, to judge ours by, for all architectures.

Runs one whole prompt at a time, without any cache, one head layout a file format. Shares no code with what it judges;
`reference_files` reads models for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.reference_files import Floats, FusedReference, GgufReference, HfReference, ModelFile
from tests.support.reference_rope import Angles

# Rows of logits that are turned into probabilities at a time.
_PIECE = 64


class ReferenceDecoder:
    """Computes the logits of every position of a prompt, of a GGUF file or of a folder of Hugging Face's."""

    def __init__(self, path: Path) -> None:
        self._file: ModelFile = GgufReference(path) if path.is_file() else HfReference(path)
        if not self._file.has("blk.0.attn_q.weight"):
            self._file = FusedReference(self._file)
        self._numbers = self._file.numbers

    def logits(self, token_ids: list[int]) -> Floats:
        numbers = self._numbers
        table = self._file.tensor("token_embd.weight")
        x = table[token_ids]  # [T, E]
        if numbers.is_gemma:
            x = x * np.float32(np.sqrt(x.shape[1]))
        for layer in range(numbers.num_layers):
            attended = self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + self._norm_if_any(attended, f"blk.{layer}.post_attention_norm")
            fed = self._feed_forward(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
            x = x + self._norm_if_any(fed, f"blk.{layer}.post_ffw_norm")
        head = self._file.tensor("output.weight") if self._file.has("output.weight") else table
        result: Floats = self._norm(x, "output_norm") @ head.T
        return _capped(result, numbers.logit_cap)

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._numbers.epsilon))
        normed: Floats = x * scale * self._file.tensor(f"{name}.weight")
        return normed

    def _norm_if_any(self, x: Floats, name: str) -> Floats:
        return self._norm(x, name) if self._file.has(f"{name}.weight") else x

    def _project(self, layer: int, name: str, x: Floats) -> Floats:
        projected: Floats = x @ self._file.tensor(f"blk.{layer}.{name}.weight").T
        bias = f"blk.{layer}.{name}.bias"
        return projected + self._file.tensor(bias) if self._file.has(bias) else projected

    def _heads(self, layer: int, name: str, x: Floats, num_heads: int) -> Floats:
        """[heads, T, D]."""
        heads: Floats = self._project(layer, name, x).reshape(len(x), num_heads, self._numbers.head_dim).swapaxes(0, 1)
        return self._norm_if_any(heads, f"blk.{layer}.{name}_norm")

    def _attention(self, layer: int, x: Floats) -> Floats:
        numbers, window = self._numbers, self._numbers.windows[layer]
        angles = numbers.local_angles if window else numbers.angles
        q = self._rotate(self._heads(layer, "attn_q", x, numbers.num_heads), angles)
        k = self._rotate(self._heads(layer, "attn_k", x, numbers.num_kv_heads), angles)
        v = self._heads(layer, "attn_v", x, numbers.num_kv_heads)
        group = numbers.num_heads // numbers.num_kv_heads
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        scale = numbers.score_scale or numbers.head_dim**-0.5
        scores = _capped(q @ k.swapaxes(1, 2) * np.float32(scale), numbers.score_cap)
        age = np.arange(len(x))[:, None] - np.arange(len(x))  # [T, T]
        scores = np.where((age < 0) | ((age >= window) & bool(window)), np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        joined = (weights @ v).swapaxes(0, 1).reshape(len(x), -1)  # [T, H D]
        return self._project(layer, "attn_output", joined)

    def _rotate(self, x: Floats, angles: Angles) -> Floats:
        """Turn pairs of each head: neighbours, or i with i + D / 2."""
        turned = np.arange(x.shape[1])[:, None] * angles.rates  # [T, D/2]
        cos, sin = (np.float32(angles.magnitude) * f(turned).astype(np.float32) for f in (np.cos, np.sin))
        half = x.shape[2] // 2
        first, second = (x[..., 0::2], x[..., 1::2]) if self._file.is_paired else (x[..., :half], x[..., half:])
        parts = [first * cos - second * sin, first * sin + second * cos]
        return np.stack(parts, axis=-1).reshape(x.shape) if self._file.is_paired else np.concatenate(parts, axis=-1)

    def _feed_forward(self, layer: int, x: Floats) -> Floats:
        gate = self._project(layer, "ffn_gate", x)
        up = self._project(layer, "ffn_up", x)
        return self._project(layer, "ffn_down", (_gelu(gate) if self._numbers.is_gemma else _silu(gate)) * up)


def _silu(x: Floats) -> Floats:
    result: Floats = x / (1 + np.exp(-x))
    return result


def _gelu(x: Floats) -> Floats:
    """The approximation by tanh, which Gemma was trained with."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    result: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


def _capped(x: Floats, cap: float) -> Floats:
    if not cap:
        return x
    result: Floats = np.float32(cap) * np.tanh(x / np.float32(cap))
    return result


def perplexity(logits: Floats, token_ids: list[int]) -> float:
    """exp of the mean negative log probability of each token given those before it; logits [T, V] of the same tokens."""
    total, count = 0.0, len(token_ids) - 1
    for start in range(0, count, _PIECE):
        scores = logits[start : min(start + _PIECE, count)].astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        chosen = scores[np.arange(len(scores)), token_ids[start + 1 : start + 1 + len(scores)]]
        total -= float((chosen - np.log(np.exp(scores).sum(axis=1))).sum())
    return float(np.exp(total / count))
