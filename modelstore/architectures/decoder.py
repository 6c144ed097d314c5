"""What the decoders of all supported architectures have in common: their tensors, and how headers state their numbers.

An architecture is this table of tensors with a few added or renamed, and what it reads differently. Checks each model's
tensors against its table, so that one asking for arithmetic the graphs lack is refused by name, never served wrongly.
Pure: no files, no formats beyond names. The files beside it build on it; readers call what they make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelstore.architectures.fields import MAX_CONTEXT_TOKENS, MAX_LAYERS, MAX_WIDTH, Fields
from modelstore.architectures.rope_scaling import scaling_of_gguf, scaling_of_hf
from modelstore.manifest import ModelConfig
from shoal.errors import BadModelFile, UnsupportedModel

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a layer: its name there in Hugging Face's files, and the sizes of its axes.

    axes, one letter each: E hidden, Q all query heads, K all KV heads, D one head, F feed forward, P fused Q + 2 K,
    G fused gate and up.
    """

    hf_name: str
    axes: str


# By GGUF names, which are the canonical ones, behind "blk.N.".
LAYER_TENSORS = {
    "attn_norm.weight": TensorSpec("input_layernorm.weight", "E"),
    "attn_q.weight": TensorSpec("self_attn.q_proj.weight", "QE"),
    "attn_k.weight": TensorSpec("self_attn.k_proj.weight", "KE"),
    "attn_v.weight": TensorSpec("self_attn.v_proj.weight", "KE"),
    "attn_output.weight": TensorSpec("self_attn.o_proj.weight", "EQ"),
    "ffn_norm.weight": TensorSpec("post_attention_layernorm.weight", "E"),
    "ffn_gate.weight": TensorSpec("mlp.gate_proj.weight", "FE"),
    "ffn_up.weight": TensorSpec("mlp.up_proj.weight", "FE"),
    "ffn_down.weight": TensorSpec("mlp.down_proj.weight", "EF"),
}
QKV_BIASES = {
    "attn_q.bias": TensorSpec("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": TensorSpec("self_attn.k_proj.bias", "K"),
    "attn_v.bias": TensorSpec("self_attn.v_proj.bias", "K"),
}
OTHER_BIASES = {
    "attn_output.bias": TensorSpec("self_attn.o_proj.bias", "E"),
    "ffn_gate.bias": TensorSpec("mlp.gate_proj.bias", "F"),
    "ffn_up.bias": TensorSpec("mlp.up_proj.bias", "F"),
    "ffn_down.bias": TensorSpec("mlp.down_proj.bias", "E"),
}
QK_NORMS = {
    "attn_q_norm.weight": TensorSpec("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": TensorSpec("self_attn.k_norm.weight", "D"),
}
END_TENSORS = {
    "token_embd.weight": TensorSpec("model.embed_tokens.weight", "VE"),
    "output_norm.weight": TensorSpec("model.norm.weight", "E"),
    "output.weight": TensorSpec("lm_head.weight", "VE"),
}
ROPE_FACTORS = "rope_freqs.weight"
# One of a prompt, one of its answer.
MIN_CONTEXT_TOKENS = 2
# Of onnxruntime's GroupQueryAttention with rotary embedding inside, as measured with 1.32: docs/adr/0028.
HEAD_MULTIPLE, MAX_EXACT_HEAD, WIDE_HEAD = 16, 128, 256


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. name: as GGUF files call it. hf_names: as a config.json's "architectures" do.

    read_gguf, read_hf: make the configuration of checked values; shapes by canonical names. tensors: of each layer;
    optional_tensors: those that a model may have. hf_norm_offset: to be added to norms of Hugging Face's files.
    has_paired_rotary: of its GGUF files.
    """

    name: str
    hf_names: tuple[str, ...]
    read_gguf: Callable[[Fields, Shapes], ModelConfig]
    read_hf: Callable[[Fields, Shapes], ModelConfig]
    tensors: Mapping[str, TensorSpec] = field(default_factory=lambda: LAYER_TENSORS)
    optional_tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    hf_norm_offset: float = 0.0
    has_paired_rotary: bool = False

    def config_of_gguf(self, keys: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
        """Build the configuration; raises BadModelFile naming the key that is missing or makes no sense."""
        fields = Fields(keys, prefix=f"{self.name}.")
        if fields.find("expert_count", int, 0):
            raise UnsupportedModel(f"mixtures of experts are not supported; supported are dense {self.name} models")
        return _require_operators(self.read_gguf(fields, shapes))

    def config_of_hf(self, config: Mapping[str, Any], shapes: Shapes) -> ModelConfig:
        """The same of a config.json."""
        return _require_operators(self.read_hf(Fields(config, where="config.json:"), shapes))

    def expected_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """All tensors that must be there, by canonical names, (rows, columns)."""
        ends = {name: spec for name, spec in END_TENSORS.items() if name != "output.weight" or not config.is_head_tied}
        return {**_sized(ends, "", config, 0), **_layer_shapes(self.tensors, config)}

    def optional_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Tensors that may be there; a tied head may be stored twice."""
        shapes = _layer_shapes(self.optional_tensors, config)
        return {
            **shapes,
            ROPE_FACTORS: (config.head_dim // 2,),
            "output.weight": (config.vocab_size, config.hidden_size),
        }

    def require(self, config: ModelConfig, shapes: Shapes) -> None:
        """Raise BadModelFile for a missing or misshapen tensor, UnsupportedModel for one this architecture has not."""
        expected, optional = self.expected_shapes(config), self.optional_shapes(config)
        for name in expected:
            if name not in shapes:
                raise BadModelFile(f"tensor {name} is missing: the file is incomplete, get it again")
        for name, shape in {**optional, **expected}.items():
            if name in shapes and shapes[name] != shape:
                raise BadModelFile(f"tensor {name} has shape {shapes[name]}, the configuration asks for {shape}")
        extra = sorted(set(shapes) - set(expected) - set(optional))
        if extra:
            raise UnsupportedModel(f"tensor {extra[0]} is not part of a {self.name} decoder, so it cannot be computed")

    def canonical_names(self, num_layers: int) -> dict[str, str]:
        """The canonical name of each tensor that a Hugging Face model of so many layers may have, by its name there."""
        names = {spec.hf_name: name for name, spec in END_TENSORS.items()}
        for name, spec in {**self.tensors, **self.optional_tensors}.items():
            names.update({f"model.layers.{i}.{spec.hf_name}": f"blk.{i}.{name}" for i in range(num_layers)})
        return names


def read_gguf_config(fields: Fields, shapes: Shapes) -> ModelConfig:
    """The numbers that all architectures state alike in GGUF files."""
    num_layers = fields.count("block_count", MAX_LAYERS)
    hidden_size = fields.count("embedding_length", MAX_WIDTH)
    num_heads = fields.uniform_count("attention.head_count", num_layers, MAX_WIDTH)
    num_kv_heads = fields.uniform_count("attention.head_count_kv", num_layers, MAX_WIDTH, num_heads)
    head_dim = fields.count("attention.key_length", MAX_WIDTH, max(1, hidden_size // num_heads))
    _require_groups(fields, "attention.head_count", num_heads, num_kv_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        _require_head_size(fields, name, head_dim)
    return ModelConfig(
        architecture=fields.prefix.rstrip("."),
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_sizes=fields.counts("feed_forward_length", num_layers, MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(shapes),
        context_tokens=fields.count("context_length", MAX_CONTEXT_TOKENS),
        rope_base=fields.positive("rope.freq_base", 10000.0),
        rms_epsilon=fields.positive("attention.layer_norm_rms_epsilon"),
        is_head_tied="output.weight" not in shapes,
        windows=(0,) * num_layers,
        rope_scaling=scaling_of_gguf(fields, has_factors=ROPE_FACTORS in shapes),
    )


def read_hf_config(
    fields: Fields,
    shapes: Shapes,
    *,
    name: str,
    rope_base: float = 10000.0,
    head_dim: int = 0,
    is_head_tied: bool = False,
) -> ModelConfig:
    """The numbers that all architectures state alike in a config.json.

    rope_base, head_dim (0: hidden / heads), is_head_tied: what it means where it says nothing of them.
    """
    num_layers = fields.count("num_hidden_layers", MAX_LAYERS)
    hidden_size = fields.count("hidden_size", MAX_WIDTH)
    num_heads = fields.count("num_attention_heads", MAX_WIDTH)
    num_kv_heads = fields.count("num_key_value_heads", MAX_WIDTH, num_heads)
    head_dim = fields.count("head_dim", MAX_WIDTH, head_dim or max(1, hidden_size // num_heads))
    _require_groups(fields, "num_attention_heads", num_heads, num_kv_heads)
    if fields.positive("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"{fields.label('partial_rotary_factor')} is not 1: rotating a part is not supported")
    context_tokens = fields.count("max_position_embeddings", MAX_CONTEXT_TOKENS)
    # Newer files have base and scaling in one place.
    rope = fields.inner("rope_parameters")
    return ModelConfig(
        architecture=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_sizes=fields.counts("intermediate_size", num_layers, MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_vocab_size(shapes),
        context_tokens=context_tokens,
        rope_base=rope.positive("rope_theta", fields.positive("rope_theta", rope_base)),
        rms_epsilon=fields.positive("rms_norm_eps", 1e-6),
        is_head_tied=fields.find("tie_word_embeddings", bool, is_head_tied),
        windows=(0,) * num_layers,
        rope_scaling=scaling_of_hf(rope if "rope_type" in rope else fields.inner("rope_scaling"), context_tokens),
    )


def with_one_window(config: ModelConfig, fields: Fields, name: str) -> ModelConfig:
    """With the window of this name over all layers, if there is one."""
    if name not in fields:
        return config
    return replace(config, windows=(fields.count(name, MAX_CONTEXT_TOKENS),) * config.num_layers)


def windows_of_types(fields: Fields, num_layers: int, window: int) -> tuple[int, ...] | None:
    """Of a config.json's layer_types: this window where a layer slides; None without such a list."""
    if "layer_types" not in fields:
        return None
    types = fields.get("layer_types", list)
    known = {"sliding_attention": window, "full_attention": 0}
    if len(types) != num_layers or not all(isinstance(kind, str) and kind in known for kind in types):
        raise UnsupportedModel(f"{fields.label('layer_types')} must be {num_layers} of {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def _layer_shapes(specs: Mapping[str, TensorSpec], config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(config.num_layers):
        shapes.update(_sized(specs, f"blk.{index}.", config, index))
    return shapes


def _sized(specs: Mapping[str, TensorSpec], prefix: str, config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    query_rows, key_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ffn_size = config.ffn_sizes[layer]
    sizes = {"E": config.hidden_size, "V": config.vocab_size, "D": config.head_dim, "Q": query_rows, "K": key_rows}
    sizes |= {"F": ffn_size, "P": query_rows + 2 * key_rows, "G": 2 * ffn_size}
    return {prefix + name: tuple(sizes[axis] for axis in spec.axes) for name, spec in specs.items()}


def _vocab_size(shapes: Shapes) -> int:
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise BadModelFile("tensor token_embd.weight is missing or no matrix")
    return shapes["token_embd.weight"][0]


def _require_groups(fields: Fields, name: str, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise BadModelFile(f"{fields.label(name)} is {num_heads}, not a multiple of {num_kv_heads} KV heads")


def _require_operators(config: ModelConfig) -> ModelConfig:
    """Raise UnsupportedModel for what onnxruntime's attention cannot compute on a CPU, or not the same for any company."""
    if config.context_tokens < MIN_CONTEXT_TOKENS:
        raise BadModelFile("the context is 1 token, which has no room for a prompt and an answer")
    for base in (config.rope_base, config.local_rope_base):
        if 0 < base <= 1:
            raise BadModelFile(f"the rotary base is {base}; it must be above 1")
    if config.head_dim % HEAD_MULTIPLE:
        raise UnsupportedModel(
            f"heads of {config.head_dim} values are not supported, only multiples of {HEAD_MULTIPLE}"
        )
    is_wide, is_capped = config.head_dim > MAX_EXACT_HEAD, config.attention_softcap > 0
    if is_wide and (is_capped or config.head_dim != WIDE_HEAD):
        raise UnsupportedModel(
            f"attention {'with a soft cap ' if is_capped else ''}over heads of {config.head_dim} values is not supported, "
            f"only of up to {MAX_EXACT_HEAD}{'' if is_capped else f' or of {WIDE_HEAD}'}: its last bits would depend on how "
            "a prompt is cut"
        )
    return config


def _require_head_size(fields: Fields, name: str, head_dim: int) -> None:
    """Key, value and rotated width must be one number."""
    width = fields.find(name, int, head_dim)
    if width != head_dim:
        raise UnsupportedModel(
            f"{fields.label(name)} is {width}, other than the head size {head_dim}, which is not supported"
        )
