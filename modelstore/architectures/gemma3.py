"""Gemma 3, text: norms on both sides of attention and feed forward, and of each head; five layers with a window to one
that sees all, each kind with its rotary base; scaled embeddings; gelu.

Read by `modelstore.architectures`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from modelstore.architectures.decoder import (
    LAYER_TENSORS,
    QK_NORMS,
    Architecture,
    Shapes,
    TensorSpec,
    read_gguf_config,
    read_hf_config,
    windows_of_types,
)
from modelstore.architectures.fields import MAX_CONTEXT_TOKENS, MAX_LAYERS, MAX_WIDTH, Fields
from modelstore.architectures.rope_scaling import scaling_of_hf
from modelstore.manifest import ModelConfig

TENSORS = {
    **LAYER_TENSORS,
    **QK_NORMS,
    "post_attention_norm.weight": TensorSpec("post_attention_layernorm.weight", "E"),
    "ffn_norm.weight": TensorSpec("pre_feedforward_layernorm.weight", "E"),
    "post_ffw_norm.weight": TensorSpec("post_feedforward_layernorm.weight", "E"),
}
# Source: transformers, Gemma3TextConfig, and llama.cpp, which has some of these for files that do not state them.
GLOBAL_EVERY = 6
ROPE_BASE, LOCAL_ROPE_BASE = 1e6, 1e4
HEAD_DIM, WINDOW = 256, 4096
# The 27B model, told by its layers, scales scores by the width of its heads if all of hidden were shared among them.
LAYERS_OF_27B = 62


def _read_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    config = read_gguf_config(fields, shapes)
    is_27b = config.num_layers == LAYERS_OF_27B
    window = fields.count("attention.sliding_window", MAX_CONTEXT_TOKENS, WINDOW)
    every = fields.count("attention.sliding_window_pattern", MAX_LAYERS, GLOBAL_EVERY)
    return _gemma(
        replace(
            config,
            rope_base=fields.positive("rope.freq_base", ROPE_BASE),
            local_rope_base=fields.positive("rope.freq_base_swa", LOCAL_ROPE_BASE),
            windows=_five_of_six(config.num_layers, window, every),
            attention_scale=(config.hidden_size / config.num_heads) ** -0.5 if is_27b else 0.0,
            logit_softcap=fields.positive("final_logit_softcapping", 0.0),
        )
    )


def _read_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.require_one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    config = read_hf_config(fields, shapes, name="gemma3", rope_base=ROPE_BASE, head_dim=HEAD_DIM, is_head_tied=True)
    window = fields.count("sliding_window", MAX_CONTEXT_TOKENS, WINDOW)
    every = fields.count(
        "sliding_window_pattern", MAX_LAYERS, fields.count("_sliding_window_pattern", MAX_LAYERS, GLOBAL_EVERY)
    )
    scalar = fields.count("query_pre_attn_scalar", MAX_WIDTH, HEAD_DIM)
    rope = fields.inner("rope_parameters")
    whole, local = rope.inner("full_attention"), rope.inner("sliding_attention")
    scaling = scaling_of_hf(whole, config.context_tokens) if "rope_type" in whole else config.rope_scaling
    return _gemma(
        replace(
            config,
            rope_base=whole.positive("rope_theta", config.rope_base),
            local_rope_base=local.positive("rope_theta", fields.positive("rope_local_base_freq", LOCAL_ROPE_BASE)),
            rope_scaling=scaling,
            windows=windows_of_types(fields, config.num_layers, window)
            or _five_of_six(config.num_layers, window, every),
            attention_scale=0.0 if scalar == config.head_dim else scalar**-0.5,
            attention_softcap=fields.positive("attn_logit_softcapping", 0.0),
            logit_softcap=fields.positive("final_logit_softcapping", 0.0),
        )
    )


def _gemma(config: ModelConfig) -> ModelConfig:
    return replace(config, embedding_scale=math.sqrt(config.hidden_size), activation="gelu_tanh")


def _five_of_six(num_layers: int, window: int, every: int) -> tuple[int, ...]:
    return tuple(window if (index + 1) % every else 0 for index in range(num_layers))


GEMMA3 = Architecture(
    name="gemma3",
    hf_names=("Gemma3ForCausalLM",),
    read_gguf=_read_gguf,
    read_hf=_read_hf,
    tensors=TENSORS,
    hf_norm_offset=1.0,
)
