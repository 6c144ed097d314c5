"""Llama 2 and 3, Mistral and SmolLM: the plain decoder, with a window over all layers in Mistral's first version.

Read by `modelstore.architectures`.
"""

from __future__ import annotations

from dataclasses import replace

from modelstore.architectures.decoder import (
    OTHER_BIASES,
    QKV_BIASES,
    Architecture,
    Shapes,
    read_gguf_config,
    read_hf_config,
    with_one_window,
)
from modelstore.architectures.fields import Fields
from modelstore.manifest import ModelConfig

# Source: transformers, MistralConfig: what a config.json that says nothing of it means.
MISTRAL_WINDOW = 4096


def _read_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    return with_one_window(read_gguf_config(fields, shapes), fields, "attention.sliding_window")


def _read_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.require_one_of("hidden_act", ("silu",), "silu")
    config = read_hf_config(fields, shapes, name="llama")
    if fields.find("model_type", str, "llama") != "mistral":
        return config
    if not fields.is_stated("sliding_window"):
        return replace(config, windows=(MISTRAL_WINDOW,) * config.num_layers)
    return with_one_window(config, fields, "sliding_window")


LLAMA = Architecture(
    name="llama",
    hf_names=("LlamaForCausalLM", "MistralForCausalLM"),
    read_gguf=_read_gguf,
    read_hf=_read_hf,
    optional_tensors=QKV_BIASES | OTHER_BIASES,
    has_paired_rotary=True,
)
