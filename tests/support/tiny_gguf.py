"""Writes small random GGUF files of any supported architecture, complete with a byte-level tokenizer and a chat template.

Every test that needs a model makes one here: nothing is downloaded and the same arguments give the same bytes. The
vocabulary is three ChatML specials, the 256 byte tokens, a few merged tokens, then unused ones up to `vocab`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType

from tests.support.blocks import pack_values
from tests.support.tiny_shapes import DEFAULT_VOCAB, ShapeOptions, TinyShape

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
MERGES = ("h e", "Ġ t", "i n", "Ġ a", "e r", "Ġt he", "o n", "r e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_gguf(
    path: Path | str,
    *,
    context: int = 256,
    rope_base: float = 10000.0,
    weight_type: str = "Q4_1",
    embedding_type: str = "Q8_0",
    tensor_types: Mapping[str, str] | None = None,
    seed: int = 0,
    window: int = 0,
    license_name: str | None = "apache-2.0",
    chat_template: str | None = CHAT_TEMPLATE,
    extra_keys: Mapping[str, str | float | int | Sequence[int]] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    omit_tensors: Sequence[str] = (),
    max_tensors_a_file: int = 0,
    **options: Unpack[ShapeOptions],
) -> Path:
    """Write a random model to `path` and return it.

    weight_type: of the layers' matrices and an untied head. embedding_type: of token_embd. tensor_types: exceptions by
    full tensor name. Vectors are float32. window: 0 for none. extra_keys, extra_tensors, omit_tensors: to make files that
    must be refused. options: of the shape.
    max_tensors_a_file: to split the model over files named beside `path`, unless 0.
    """
    shape = TinyShape(**options)
    writer = gguf.GGUFWriter(str(path), shape.architecture, split_max_tensors=max_tensors_a_file)
    _add_config(writer, shape, context, rope_base, license_name, window)
    _add_tokenizer(writer, shape.vocab, chat_template)
    for key, value in (extra_keys or {}).items():
        _add_key(writer, key, value)
    types = {"token_embd.weight": embedding_type, **(tensor_types or {})}
    for name, values in shape.random_tensors(seed):
        if name not in omit_tensors:
            _add_tensor(writer, name, values, types.get(name, "F32" if values.ndim == 1 else weight_type))
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def byte_tokens() -> tuple[str, ...]:
    """The 256 characters that stand for bytes in byte-level BPE, in byte order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256))


def tiny_tokens(vocab: int = DEFAULT_VOCAB) -> tuple[str, ...]:
    """The vocabulary of a tiny model, by token id."""
    known = (*SPECIAL_TOKENS, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES))
    if vocab < len(known):
        raise ValueError(f"a tiny vocabulary needs at least {len(known)} tokens, got {vocab}")
    return (*known, *(f"<|unused_{index}|>" for index in range(vocab - len(known))))


def _add_config(
    writer: gguf.GGUFWriter, shape: TinyShape, context: int, rope_base: float, license_name: str | None, window: int
) -> None:
    writer.add_name("tiny")
    if license_name is not None:
        writer.add_license(license_name)
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(shape.hidden)
    is_uniform = len(set(shape.ffns)) == 1
    writer.add_feed_forward_length(shape.ffns[0] if is_uniform else list(shape.ffns))
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.head_dim * shape.num_heads != shape.hidden:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if window:
        writer.add_sliding_window(window)
    writer.add_vocab_size(shape.vocab)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int, chat_template: str | None) -> None:
    tokens = tiny_tokens(vocab)
    kinds = {"<|unused": TokenType.UNUSED, **dict.fromkeys((token[:8] for token in SPECIAL_TOKENS), TokenType.CONTROL)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(tokens))
    writer.add_token_types([kinds.get(token[:8], TokenType.NORMAL) for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _add_key(writer: gguf.GGUFWriter, key: str, value: str | float | int | Sequence[int]) -> None:
    match value:
        case str():
            writer.add_string(key, value)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, type_name: str) -> None:
    match type_name:
        case "F32":
            writer.add_tensor(name, values)
        case "F16":
            writer.add_tensor(name, values.astype(np.float16))
        case _:
            writer.add_tensor(name, pack_values(values, type_name), raw_dtype=GGMLQuantizationType[type_name])
