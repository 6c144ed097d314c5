"""What a stored model is: its configuration, its tokenizer data, and where every packed array lies in which blob.

Written by `store`, read by `graph`, the tokenizer and placement. Plain frozen data with a JSON form; knows no file
format and no runtime. The model digest is the SHA-256 of the canonical JSON of everything here but name and source.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

MANIFEST_VERSION = 2
# onnxruntime adds up the products of wider heads in two parts, unless a block of keys has at most 64 columns. Blocks begin
# at multiples of the processor's L2 / (32 head_dim), which is a multiple of 32 keys where L2 is one of 256 KiB (ADR 28).
MAX_UNCUT_HEAD = 128
WIDE_HEAD_BORDER = 32


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies were stretched for a longer context; the rotary tables have it in them.

    kind: "none"; "linear", all divided by factor; "llama3"; "yarn"; "factors", each divided by a number of its own that
    the file has. low_factor, high_factor: of llama3 the frequency factors, of yarn beta_slow and beta_fast. magnitude:
    what yarn multiplies cos and sin by.
    """

    kind: str = "none"
    factor: float = 1.0
    original_context_tokens: int = 0
    low_factor: float = 1.0
    high_factor: float = 1.0
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The numbers that shape a decoder. What tensors there are (biases, further norms), a layer's blob tells.

    ffn_sizes, windows: of each layer; a window is how many tokens a token sees, itself among them, 0: all. local_rope_base:
    of layers with a window, 0: the same as of the others. attention_scale: of scores, 0: 1 / sqrt(head_dim).
    attention_softcap, logit_softcap: c of c tanh(x / c), 0: none. activation: "silu" or "gelu_tanh", of the gate.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_sizes: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rope_base: float
    rms_epsilon: float
    is_head_tied: bool
    windows: tuple[int, ...]
    local_rope_base: float = 0.0
    rope_scaling: RopeScaling = RopeScaling()
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    activation: str = "silu"

    @property
    def attention_tokens(self) -> float:
        """With so many tokens held, the attention of a token takes as many operations as the rest of a layer."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ffn_size = sum(self.ffn_sizes) / self.num_layers
        weights = self.hidden_size * (2 * heads + 2 * kv_heads + 3 * ffn_size)
        # Scores and their sums: a multiplication for each of a token's heads and each token held, twice.
        return weights / (2 * heads)

    @property
    def chunk_border(self) -> int:
        """No chunk of a prompt may cross a multiple of it, or logits would depend on how the prompt was cut; 0: any may."""
        return WIDE_HEAD_BORDER if self.head_dim > MAX_UNCUT_HEAD else 0


@dataclass(frozen=True, slots=True)
class Splitting:
    """How byte-level BPE cuts text into words, before it merges bytes within each.

    patterns: regular expressions (Oniguruma's), each applied to the pieces the one before left; what one matches is a piece.
    whole_words: a word that is a token is taken whole, whatever the merges say. is_nfc: text is composed (NFC) first.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    is_nfc: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A tokenizer, as GGUF states it whatever file it came from; token ids are positions in tokens.

    kind: "gpt2", byte-level BPE by merges, or "llama", SentencePiece's BPE by scores with U+2581 for a space. pre: name
    of the splitting of gpt2, as "smollm"; splitting: one that has no name. token_types: 1 normal, 2 unknown, 3 control,
    4 user defined (written as the text that it stands for), 5 unused, 6 byte ("<0x0A>"). end_ids: tokens that end an
    answer, besides eos_id. space_prefix, of llama: "never", "first" (a text has a space put in front) or "each" (as has
    text behind a control token); has_double_prefix: even where the text begins with a space. lstrip_ids, rstrip_ids:
    added tokens that take the white space before or behind them along.
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
    add_eos: bool = False
    scores: tuple[float, ...] = ()
    splitting: Splitting | None = None
    end_ids: tuple[int, ...] = ()
    space_prefix: str = "never"
    has_double_prefix: bool = True
    lstrip_ids: tuple[int, ...] = ()
    rstrip_ids: tuple[int, ...] = ()


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
      "int4"     q [N, B, block/2] uint8, scale [N, B] float32                      zero point 8, or in some weights
                 zero [N, ceil(B/2)] uint8                                           one for each block
      "int4_cz"  the same with zero, correction [B, N] float32                      adds blocksum(x) @ correction
      "int8"     q [N, B, block] uint8, scale [N, B] float32                        zero point 128
      "int8_cz"  the same, correction [B, N] float32                                adds blocksum(x) @ correction
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

    layers[i].linears: either attn_qkv (rows q, k, v) or attn_q, attn_k, attn_v; attn_out; either ffn_gate_up (rows gate,
    up) or ffn_gate, ffn_up; ffn_down. Query and key rows are in half-split rotary order. layers[i].arrays: attn_norm [E],
    ffn_norm [E]; where the architecture has them attn_q_norm [D], attn_k_norm [D], post_attention_norm [E],
    post_ffw_norm [E], and biases attn_qkv_bias [(H + 2K) D], attn_out_bias [E], ffn_gate_up_bias [2F], ffn_down_bias [E].
    embedding.linears: token_embd (of kind "float32" w is [V, E]). rope.arrays: cos, sin [context, D/2], and
    local_cos, local_sin for layers with a window if these have a base of their own. head.arrays: output_norm [E];
    head.linears: output, absent if the head is tied to the embedding.
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
    # The terms that whoever pulled it accepted, and when.
    accepted_terms: str = ""

    @property
    def blobs(self) -> tuple[BlobEntry, ...]:
        return (self.embedding, self.rope, *self.layers, self.head)

    @property
    def weight_bytes(self) -> int:
        return sum(blob.num_bytes for blob in self.blobs)

    def compute_digest(self) -> str:
        """SHA-256 over all that changes an answer; name, source and licence do not."""
        content = to_fields(self)
        for name in ("name", "source", "license", "digest", "accepted_terms"):
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
    return Manifest(
        config=_config(content.pop("config")),
        tokenizer=_tokenizer(content.pop("tokenizer")),
        embedding=parse_blob(content.pop("embedding")),
        rope=parse_blob(content.pop("rope")),
        layers=tuple(parse_blob(layer) for layer in content.pop("layers")),
        head=parse_blob(content.pop("head")),
        **content,
    )


def _tokenizer(fields: dict[str, Any]) -> TokenizerData:
    names = ("tokens", "token_types", "merges", "scores", "end_ids", "lstrip_ids", "rstrip_ids")
    lists: dict[str, Any] = {name: tuple(fields.pop(name)) for name in names}
    splitting = fields.pop("splitting")
    if splitting is not None:
        splitting = Splitting(**{**splitting, "patterns": tuple(splitting["patterns"])})
    return TokenizerData(splitting=splitting, **lists, **fields)


def _config(fields: dict[str, Any]) -> ModelConfig:
    changed: dict[str, Any] = {name: tuple(fields[name]) for name in ("ffn_sizes", "windows")}
    return ModelConfig(**{**fields, **changed, "rope_scaling": RopeScaling(**fields["rope_scaling"])})


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
