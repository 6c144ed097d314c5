"""Qwen 2 and 2.5: biases of queries, keys and values, and a window over the upper layers where a model uses one.

Read by `modelstore.architectures`.
"""

from __future__ import annotations

from dataclasses import replace

from modelstore.architectures.decoder import (
    LAYER_TENSORS,
    QKV_BIASES,
    Architecture,
    Shapes,
    read_gguf_config,
    read_hf_config,
    windows_of_types,
)
from modelstore.architectures.fields import MAX_CONTEXT_TOKENS, Fields
from modelstore.manifest import ModelConfig


def upper_windows(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Source: transformers, Qwen2Config: layers from max_window_layers on see a window, if use_sliding_window."""
    if not fields.find("use_sliding_window", bool, False) or "sliding_window" not in fields:
        return (0,) * num_layers
    window = fields.count("sliding_window", MAX_CONTEXT_TOKENS)
    typed = windows_of_types(fields, num_layers, window)
    if typed is not None:
        return typed
    first = fields.find("max_window_layers", int, 28)
    return tuple(window if index >= first else 0 for index in range(num_layers))


def _read_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.require_one_of("hidden_act", ("silu",), "silu")
    config = read_hf_config(fields, shapes, name="qwen2")
    return replace(config, windows=upper_windows(fields, config.num_layers))


QWEN2 = Architecture(
    name="qwen2",
    hf_names=("Qwen2ForCausalLM",),
    read_gguf=read_gguf_config,
    read_hf=_read_hf,
    tensors=LAYER_TENSORS | QKV_BIASES,
)
