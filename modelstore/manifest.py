"""What a stored model is: its configuration, its tokenizer data, and where every packed array lies in which blob.

Written by `store`, read by `graph`, the tokenizer and placement. Plain frozen data with a JSON form; knows no file
format and no runtime. The model digest is the SHA-256 of the canonical JSON of everything here but name and source.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that shape a decoder of the llama family."""

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rope_base: float
    rms_epsilon: float
    is_head_tied: bool

    @property
    def attention_tokens(self) -> float:
        """With so many tokens held, the attention of a token takes as many operations as the rest of a layer."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        weights = self.hidden_size * (2 * heads + 2 * kv_heads + 3 * self.ffn_size)
        # Scores and their sums: a multiplication for each of a token's heads and each token held, twice.
        return weights / (2 * heads)


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer as its GGUF states it.

    kind: "gpt2" (byte-level BPE). pre: name of the pre-tokeniser, as "smollm". token_types: 1 normal, 3 control, ...
    """

    kind: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """One array in a blob: offset and num_bytes in the blob; dtype is numpy's name; row-major."""

    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed weight [N, K] and how to multiply by it.

    kind and arrays, by name (B = number of blocks in a row = ceil(K / block)):
      "int4"     q [N, B, block/2] uint8, scale [N, B] float32                      zero point 8
      "int4_cz"  the same, zero [N, ceil(B/2)] uint8, correction [B, N] float32     adds blocksum(x) @ correction
      "int8"     q [N, B, block] uint8, scale [N, B] float32                        zero point 128
      "float32"  w [K, N] float32
    """

    kind: str
    n: int
    k: int
    block: int
    arrays: dict[str, ArrayEntry]


@dataclass(frozen=True, slots=True)
class BlobEntry:
    """A content-addressed file: SHA-256 in hex, size, and what is in it.

    arrays: plain arrays by name (norms, rotary tables). linears: packed weights by name.
    """

    digest: str
    num_bytes: int
    arrays: dict[str, ArrayEntry]
    linears: dict[str, Linear]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A model: layer blobs in order, and the blobs of the ends.

    layers[i].arrays: attn_norm [E], ffn_norm [E]. layers[i].linears: either attn_qkv (rows q, k, v) or attn_q, attn_k,
    attn_v; attn_out; either ffn_gate_up (rows gate, up) or ffn_gate, ffn_up; ffn_down. Query and key rows are in
    half-split rotary order. embedding.linears: token_embd ("int8" or "float32", there w is [V, E]). rope.arrays: cos,
    sin [context, D/2]. head.arrays: output_norm [E]; head.linears: output, absent if the head is tied to the embedding.
    """

    name: str
    source: str
    license: str
    config: ModelConfig
    quantization: str
    tokenizer: TokenizerData
    embedding: BlobEntry
    rope: BlobEntry
    layers: tuple[BlobEntry, ...]
    head: BlobEntry
    digest: str = ""

    @property
    def blobs(self) -> tuple[BlobEntry, ...]:
        return (self.embedding, self.rope, *self.layers, self.head)

    @property
    def weight_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs)

    def compute_digest(self) -> str:
        """SHA-256 over all that changes an answer; name, source and licence do not."""
        content = to_fields(self)
        for name in ("name", "source", "license", "digest"):
            del content[name]
        canonical = json.dumps(content, default=to_fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def to_json(manifest: Manifest) -> str:
    return json.dumps({"manifest_version": MANIFEST_VERSION, **to_fields(manifest)}, default=to_fields)


def to_fields(value: Any) -> dict[str, Any]:
    """The fields of one of these dataclasses; as json's default far faster than asdict."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def from_json(text: str) -> Manifest:
    """Parse what to_json wrote; raises ValueError, KeyError or TypeError on anything else."""
    content = json.loads(text)
    version = content.pop("manifest_version")
    if version != MANIFEST_VERSION:
        raise ValueError(f"manifest version {version}, this program reads {MANIFEST_VERSION}: import the model again")
    tokenizer: dict[str, Any] = content.pop("tokenizer")
    for key in ("tokens", "token_types", "merges"):
        tokenizer[key] = tuple(tokenizer[key])
    return Manifest(
        config=ModelConfig(**content.pop("config")),
        tokenizer=TokenizerData(**tokenizer),
        embedding=parse_blob(content.pop("embedding")),
        rope=parse_blob(content.pop("rope")),
        layers=tuple(parse_blob(layer) for layer in content.pop("layers")),
        head=parse_blob(content.pop("head")),
        **content,
    )


def _array(fields: dict[str, Any]) -> ArrayEntry:
    return ArrayEntry(**{**fields, "shape": tuple(fields["shape"])})


def _arrays(fields: dict[str, Any]) -> dict[str, ArrayEntry]:
    return {name: _array(entry) for name, entry in fields.items()}


def parse_blob(fields: dict[str, Any]) -> BlobEntry:
    """Rebuild an entry from its JSON form; raises KeyError or TypeError on anything else."""
    linears = {
        name: Linear(**{**entry, "arrays": _arrays(entry["arrays"])}) for name, entry in fields["linears"].items()
    }
    return BlobEntry(fields["digest"], fields["num_bytes"], _arrays(fields["arrays"]), linears)
