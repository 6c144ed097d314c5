"""Tiny models of each architecture, and of shapes that few models have: options of the tiny writers, by name."""

from __future__ import annotations

from typing import Any

# Layers that see all have another rotary base than those with a window, as the real ones.
GEMMA3: dict[str, Any] = {"architecture": "gemma3", "num_kv_heads": 1, "window": 20, "rope_base": 1e6}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases everywhere": {"has_biases": True},
    "mistral": {"window": 20},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "head_dim": 32},
    "qwen3 with biases": {"architecture": "qwen3", "has_biases": True},
    "gemma3": {**GEMMA3, "num_layers": 7, "head_dim": 32},
    "gemma3 of wide heads": {**GEMMA3, "num_heads": 2, "head_dim": 256},
    "phi3": {"architecture": "phi3", "window": 20},
    "pruned": {"ffn": (96, 32, 160, 64)},
    "three heads": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 96},
    "odd vocabulary": {"vocab": 301, "is_tied": False},
}


def options_of(variant: str) -> dict[str, Any]:
    return {"num_layers": 4, **VARIANTS[variant]}
