"""Writes small random models as Hugging Face's folders: config.json, safetensors, tokenizer and generation settings.

The same arguments give the model that `tiny_gguf` writes, in the other layout: names, norms without what an architecture
adds to them, query and key rows in half-split order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_gguf import BOS_ID, CHAT_TEMPLATE, EOS_ID, MERGES, SPECIAL_TOKENS, tiny_tokens
from tests.support.tiny_shapes import ShapeOptions, TinyShape

HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_DTYPES = {"F32": np.float32, "F16": np.float16}


def write_tiny_hf(
    folder: Path | str,
    *,
    context: int = 256,
    rope_base: float = 10000.0,
    weight_type: str = "F32",
    seed: int = 0,
    window: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    num_files: int = 1,
    config: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    omit_tensors: Sequence[str] = (),
    **options: Unpack[ShapeOptions],
) -> Path:
    """Write a random model into `folder`, which is made, and return it.

    weight_type: of all tensors, F32, F16 or BF16. num_files: of weights. config: entries added to config.json, or put in
    place of others. extra_tensors, omit_tensors: by the names of this format. options: of the shape.
    """
    shape = TinyShape(**options)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {**_config(shape, context, rope_base, window), **(config or {})}
    _write_json(folder / "config.json", numbers)
    tensors = {
        _hf_name(name, shape.architecture): _hf_values(shape, name, values)
        for name, values in shape.random_tensors(seed)
    }
    tensors = {name: values for name, values in tensors.items() if name not in omit_tensors}
    _write_weights(folder, {**tensors, **(extra_tensors or {})}, weight_type, num_files)
    write_tokenizer(folder, shape.vocab, chat_template)
    return folder


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], weight_type: str) -> None:
    """Source: the safetensors README: length of the header, header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    pieces, end = [], 0
    for name, values in tensors.items():
        data = _to_bytes(values, weight_type)
        header[name] = {"dtype": weight_type, "shape": list(values.shape), "data_offsets": [end, end + len(data)]}
        pieces.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))


def write_tokenizer(folder: Path, vocab: int, chat_template: str | None) -> None:
    """The tokenizer of tiny GGUF files, as tokenizer.json with its configuration."""
    ids = {token: index for index, token in enumerate(tiny_tokens(vocab))}
    tokenizer = Tokenizer(
        models.BPE(ids, [(first, second) for first, _, second in (merge.partition(" ") for merge in MERGES)])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "add_bos_token": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID]})
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _config(shape: TinyShape, context: int, rope_base: float, window: int) -> dict[str, Any]:
    architecture = "mistral" if shape.architecture == "llama" and window else shape.architecture
    config: dict[str, Any] = {
        "architectures": [CLASSES[architecture]],
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffns[0] if len(set(shape.ffns)) == 1 else list(shape.ffns),
        "vocab_size": shape.vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_base,
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    if architecture == "gemma3":
        config |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": shape.head_dim}
        config |= {"sliding_window": window, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
    else:
        config |= {"hidden_act": "silu"}
    if architecture in ("mistral", "phi3") and window:
        config["sliding_window"] = window
    return config


def _hf_name(name: str, architecture: str) -> str:
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, layer, part, suffix = name.split(".")
    names = HF_NAMES | {"gemma3": GEMMA_NAMES, "phi3": PHI_NAMES}.get(architecture, {})
    return f"model.layers.{layer}.{names[part]}.{suffix}"


def _hf_values(shape: TinyShape, name: str, values: np.ndarray) -> np.ndarray:
    if shape.architecture == "gemma3" and name.endswith("norm.weight"):
        return values - np.float32(1)
    if shape.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        pairs = values.reshape(-1, shape.head_dim // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    return values


def _write_weights(folder: Path, tensors: Mapping[str, np.ndarray], weight_type: str, num_files: int) -> None:
    if num_files == 1:
        write_safetensors(folder / "model.safetensors", tensors, weight_type)
        return
    places: dict[str, str] = {}
    for index in range(num_files):
        file = f"model-{index + 1:05}-of-{num_files:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[index::num_files]}
        write_safetensors(folder / file, part, weight_type)
        places |= dict.fromkeys(part, file)
    total = sum(values.nbytes for values in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _to_bytes(values: np.ndarray, weight_type: str) -> bytes:
    if weight_type == "BF16":
        # The upper half of a float32, rounded to the nearest, ties to even.
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
    return np.ascontiguousarray(values.astype(_DTYPES[weight_type])).tobytes()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
