"""What the keys and tensors of a GGUF file must say for a plain llama decoder, and what they become in a manifest.

Decides which models are supported: one that asks for arithmetic the shard graphs lack is refused here by name, never
served wrongly. Pure: gets keys and shapes already read by `gguf`, which is its only caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from modelstore.manifest import ModelConfig, TokenizerData
from shoal.errors import BadModelFile, UnsupportedModel

Keys = Mapping[str, str | int | float | bool | list[str] | NDArray[np.generic]]
Shapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T", str, int, float, bool, list[str])

SUPPORTED_ARCHITECTURE = "llama"
SUPPORTED_TOKENIZER = "gpt2"
# Bounds far above any model of the family, so that a damaged number cannot ask for absurd memory.
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_CONTEXT_TOKENS = 1 << 20


def require_llama(keys: Keys) -> None:
    """Raise UnsupportedModel naming the architecture unless it is llama with plain rotary embedding, and one file."""
    architecture = _get(keys, "general.architecture", str)
    if architecture != SUPPORTED_ARCHITECTURE:
        raise UnsupportedModel(f"architecture {architecture} is not supported; supported is {SUPPORTED_ARCHITECTURE}")
    if _find(keys, "split.count", int, 1) > 1:
        raise UnsupportedModel("this is one part of a split model; merge the parts with llama-gguf-split --merge first")
    if _find(keys, "llama.expert_count", int, 0):
        raise UnsupportedModel("mixtures of experts are not supported; supported are dense llama models")
    scaling = [key for key in keys if key.startswith("llama.rope.scal")]
    if scaling and _find(keys, "llama.rope.scaling.type", str, "unknown") != "none":
        raise UnsupportedModel(f"rotary scaling is not supported, and {scaling[0]} = {keys[scaling[0]]} asks for it")


def read_config(keys: Keys, shapes: Shapes) -> ModelConfig:
    """Build the configuration; raises BadModelFile naming the key that is missing or makes no sense."""
    hidden_size = _bounded(keys, "llama.embedding_length", MAX_WIDTH)
    num_heads = _bounded(keys, "llama.attention.head_count", MAX_WIDTH)
    num_kv_heads = _bounded(keys, "llama.attention.head_count_kv", MAX_WIDTH, default=num_heads)
    head_dim = _bounded(keys, "llama.attention.key_length", MAX_WIDTH, default=max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise BadModelFile(f"key llama.attention.head_count is {num_heads}, not a multiple of {num_kv_heads} KV heads")
    _require_plain_heads(keys, head_dim)
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise BadModelFile("tensor token_embd.weight is missing or no matrix")
    return ModelConfig(
        architecture=SUPPORTED_ARCHITECTURE,
        num_layers=_bounded(keys, "llama.block_count", MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=_bounded(keys, "llama.feed_forward_length", MAX_WIDTH),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=shapes["token_embd.weight"][0],
        context_tokens=_bounded(keys, "llama.context_length", MAX_CONTEXT_TOKENS),
        rope_base=_positive(keys, "llama.rope.freq_base", 10000.0),
        rms_epsilon=_positive(keys, "llama.attention.layer_norm_rms_epsilon"),
        is_head_tied="output.weight" not in shapes,
    )


def require_shapes(config: ModelConfig, shapes: Shapes) -> None:
    """Raise BadModelFile for a missing or misshapen tensor, UnsupportedModel for one that a plain decoder has not."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in shapes:
            raise BadModelFile(f"tensor {name} is missing: the file is incomplete, get it again")
        if shapes[name] != shape:
            raise BadModelFile(f"tensor {name} has shape {shapes[name]}, the configuration asks for {shape}")
    if "rope_freqs.weight" in shapes:
        raise UnsupportedModel("tensor rope_freqs.weight scales rotary frequencies, as in Llama 3: not supported")
    extra = sorted(set(shapes) - set(expected))
    if extra:
        raise UnsupportedModel(f"tensor {extra[0]} is not part of a plain llama decoder, so it cannot be computed")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All tensors of a model by their GGUF names, (rows, columns)."""
    hidden, query_rows = config.hidden_size, config.num_heads * config.head_dim
    key_rows = config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (query_rows, hidden),
        "attn_k": (key_rows, hidden),
        "attn_v": (key_rows, hidden),
        "attn_output": (hidden, query_rows),
        "ffn_norm": (hidden,),
        "ffn_gate": (config.ffn_size, hidden),
        "ffn_up": (config.ffn_size, hidden),
        "ffn_down": (hidden, config.ffn_size),
    }
    ends: dict[str, tuple[int, ...]] = {"token_embd": (config.vocab_size, hidden), "output_norm": (hidden,)}
    if not config.is_head_tied:
        ends["output"] = (config.vocab_size, hidden)
    shapes = {f"blk.{i}.{part}.weight": shape for i in range(config.num_layers) for part, shape in layer.items()}
    return {**{f"{part}.weight": shape for part, shape in ends.items()}, **shapes}


def read_tokenizer(keys: Keys, vocab_size: int) -> TokenizerData:
    """Build the tokenizer data; raises UnsupportedModel for a kind other than gpt2, BadModelFile for a bad key."""
    kind = _get(keys, "tokenizer.ggml.model", str)
    if kind != SUPPORTED_TOKENIZER:
        raise UnsupportedModel(f"tokenizer {kind} is not supported; supported is {SUPPORTED_TOKENIZER}")
    tokens = _get(keys, "tokenizer.ggml.tokens", list)
    token_types = keys.get("tokenizer.ggml.token_type", np.ones(len(tokens), np.int32))
    if not isinstance(token_types, np.ndarray) or token_types.dtype.kind not in "iu":
        raise BadModelFile("key tokenizer.ggml.token_type is not an array of integers")
    for key, count in (("tokens", len(tokens)), ("token_type", len(token_types))):
        if count != vocab_size:
            raise BadModelFile(f"key tokenizer.ggml.{key} has {count} entries, token_embd.weight has {vocab_size} rows")
    return TokenizerData(
        kind=kind,
        pre=_find(keys, "tokenizer.ggml.pre", str, "default"),
        tokens=tuple(tokens),
        token_types=tuple(int(value) for value in token_types),
        merges=tuple(_get(keys, "tokenizer.ggml.merges", list)),
        bos_id=_token_id(keys, "tokenizer.ggml.bos_token_id", vocab_size),
        eos_id=_token_id(keys, "tokenizer.ggml.eos_token_id", vocab_size),
        add_bos=_find(keys, "tokenizer.ggml.add_bos_token", bool, False),
        chat_template=_find(keys, "tokenizer.chat_template", str, "") or None,
    )


def _require_plain_heads(keys: Keys, head_dim: int) -> None:
    """Key, value and rotated width must be one even number."""
    if head_dim % 2:
        raise UnsupportedModel(f"heads of {head_dim} values cannot be rotated in pairs")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        width = _find(keys, key, int, head_dim)
        if width != head_dim:
            raise UnsupportedModel(f"key {key} is {width}, other than the head size {head_dim}, which is not supported")


def _get(keys: Keys, key: str, kind: type[T]) -> T:
    if key not in keys:
        raise BadModelFile(f"key {key} is missing")
    value = keys[key]
    is_bool_for_number = isinstance(value, bool) and kind is not bool
    if not isinstance(value, kind) or is_bool_for_number:
        raise BadModelFile(f"key {key} should be a {kind.__name__}, it is a {type(value).__name__}")
    return value


def _find(keys: Keys, key: str, kind: type[T], default: T) -> T:
    return _get(keys, key, kind) if key in keys else default


def _bounded(keys: Keys, key: str, limit: int, default: int | None = None) -> int:
    value = _get(keys, key, int) if default is None else _find(keys, key, int, default)
    if not 1 <= value <= limit:
        raise BadModelFile(f"key {key} is {value}; it must be in [1, {limit}]")
    return value


def _positive(keys: Keys, key: str, default: float | None = None) -> float:
    value = _get(keys, key, float) if default is None else _find(keys, key, float, default)
    if not (math.isfinite(value) and value > 0):
        raise BadModelFile(f"key {key} is {value}; it must be a positive number")
    return value


def _token_id(keys: Keys, key: str, vocab_size: int) -> int | None:
    if key not in keys:
        return None
    value = _get(keys, key, int)
    if not 0 <= value < vocab_size:
        raise BadModelFile(f"key {key} is {value}, outside the vocabulary of {vocab_size}")
    return value
