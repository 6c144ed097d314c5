"""Phi 3 and 3.5 of short context: the plain decoder with queries, keys and values in one tensor, and gate and up in another.

Those of 128k tokens have rotary factors by length (longrope), and are refused by that name. Read by
`modelstore.architectures`.
"""

from __future__ import annotations

from modelstore.architectures.decoder import (
    LAYER_TENSORS,
    Architecture,
    Shapes,
    TensorSpec,
    read_gguf_config,
    read_hf_config,
    with_one_window,
)
from modelstore.architectures.fields import Fields
from modelstore.manifest import ModelConfig

APART = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight")
TENSORS = {
    **{name: spec for name, spec in LAYER_TENSORS.items() if name not in APART},
    "attn_qkv.weight": TensorSpec("self_attn.qkv_proj.weight", "PE"),
    "ffn_up.weight": TensorSpec("mlp.gate_up_proj.weight", "GE"),
}


def _read_gguf(fields: Fields, shapes: Shapes) -> ModelConfig:
    return with_one_window(read_gguf_config(fields, shapes), fields, "attention.sliding_window")


def _read_hf(fields: Fields, shapes: Shapes) -> ModelConfig:
    fields.require_one_of("hidden_act", ("silu",), "silu")
    return with_one_window(read_hf_config(fields, shapes, name="phi3"), fields, "sliding_window")


PHI3 = Architecture(
    name="phi3",
    hf_names=("Phi3ForCausalLM",),
    read_gguf=_read_gguf,
    read_hf=_read_hf,
    tensors=TENSORS,
)
