"""Qwen 3, dense: a norm of each query and key head before they are rotated, and heads wider than hidden / heads.

Read by `modelstore.architectures`.
"""

from __future__ import annotations

from dataclasses import replace

from modelstore.architectures.decoder import (
    LAYER_TENSORS,
    QK_NORMS,
    QKV_BIASES,
    Architecture,
    Shapes,
    read_gguf_config,
    read_hf_config,
)
from modelstore.architectures.fields import Fields
from modelstore.architectures.qwen2 import upper_windows
from modelstore.manifest import ModelConfig

# Source: transformers, Qwen3Config: what a config.json that says nothing of it means.
HEAD_DIM = 128


def _read_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.require_one_of("hidden_act", ("silu",), "silu")
    config = read_hf_config(fields, shapes, name="qwen3", head_dim=HEAD_DIM)
    return replace(config, windows=upper_windows(fields, config.num_layers))


QWEN3 = Architecture(
    name="qwen3",
    hf_names=("Qwen3ForCausalLM",),
    read_gguf=read_gguf_config,
    read_hf=_read_hf,
    tensors=LAYER_TENSORS | QK_NORMS,
    optional_tensors=QKV_BIASES,
)
