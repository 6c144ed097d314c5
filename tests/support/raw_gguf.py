"""Writes GGUF files byte by byte, sound or not: what the format's own writer would refuse to write.

`sound()` is the smallest model that the reader takes; tests change its fields, or its bytes, and see what becomes of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tests.support.blocks import pack_values

HIDDEN, FFN, VOCAB = 32, 64, 4
ALIGNMENT = 32
# Of a value: uint32, float32, string, array, and the ids of some tensor types.
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "IQ4_NL": 20}
# Byte of a file where there stands: version, number of tensors, number of keys.
VERSION_AT, TENSORS_AT, KEYS_AT = 4, 8, 16


def string(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's description and data. shape: (rows, columns). offset: None to lie behind the one before."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes
    offset: int | None = None

    @staticmethod
    def of(values: np.ndarray, type_name: str = "F32") -> RawTensor:
        rows = np.atleast_2d(values.astype(np.float32))
        return RawTensor(values.shape, TYPE_IDS[type_name], pack_values(rows, type_name).tobytes())


@dataclass(frozen=True, slots=True)
class RawGguf:
    """A file's fields. keys: each a value type and the value's bytes."""

    keys: Mapping[str, tuple[int, bytes]]
    tensors: Mapping[str, RawTensor]
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    more: bytes = field(default=b"")

    def with_keys(self, **keys: tuple[int, bytes]) -> RawGguf:
        """With these keys changed or added; `__` stands for a dot."""
        return replace(self, keys={**self.keys, **{name.replace("__", "."): value for name, value in keys.items()}})

    def without(self, name: str) -> RawGguf:
        """Without a key or a tensor."""
        keys = {key: value for key, value in self.keys.items() if key != name}
        return replace(self, keys=keys, tensors={key: tensor for key, tensor in self.tensors.items() if key != name})

    def with_tensor(self, name: str, change: Callable[[RawTensor], RawTensor]) -> RawGguf:
        return replace(self, tensors={**self.tensors, name: change(self.tensors[name])})

    def boundaries(self) -> list[int]:
        """Where each field of the header ends."""
        return [end for end, _ in self._fields()]

    def content(self) -> bytes:
        header = b"".join(part for _, part in self._fields())
        data = bytearray()
        for tensor in self.tensors.values():
            data += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
        return header + bytes(-len(header) % ALIGNMENT) + bytes(data) + self.more

    def _fields(self) -> list[tuple[int, bytes]]:
        parts = [self.magic, struct.pack("<I", self.version)]
        parts.append(struct.pack("<Q", len(self.tensors) if self.num_tensors is None else self.num_tensors))
        parts.append(struct.pack("<Q", len(self.keys) if self.num_keys is None else self.num_keys))
        for name, (kind, value) in self.keys.items():
            parts += [struct.pack("<Q", len(name.encode())), name.encode(), struct.pack("<I", kind), value]
        offset = 0
        for name, tensor in self.tensors.items():
            parts += [struct.pack("<Q", len(name.encode())), name.encode(), struct.pack("<I", len(tensor.shape))]
            parts += [struct.pack("<Q", size) for size in tensor.shape[::-1]]
            at = offset if tensor.offset is None else tensor.offset
            parts += [struct.pack("<I", tensor.type_id), struct.pack("<Q", at)]
            offset += len(tensor.data) + -len(tensor.data) % ALIGNMENT
        ends = np.cumsum([len(part) for part in parts])
        return [(int(end), part) for end, part in zip(ends, parts, strict=True)]


def u32(value: int) -> tuple[int, bytes]:
    return U32, struct.pack("<I", value)


def f32(value: float) -> tuple[int, bytes]:
    return F32, struct.pack("<f", value)


def text(value: str) -> tuple[int, bytes]:
    return STRING, string(value)


def sound(**options: object) -> RawGguf:
    """A model of one layer of width 32 with four tokens. options: fields of RawGguf."""
    keys = {
        "general.architecture": text("llama"),
        "llama.block_count": u32(1),
        "llama.context_length": u32(64),
        "llama.embedding_length": u32(HIDDEN),
        "llama.feed_forward_length": u32(FFN),
        "llama.attention.head_count": u32(2),
        "llama.attention.head_count_kv": u32(1),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text("smollm"),
        "tokenizer.ggml.tokens": (ARRAY, array(STRING, [string(letter) for letter in "abcd"])),
        "tokenizer.ggml.token_type": (ARRAY, array(I32, [struct.pack("<i", 1)] * VOCAB)),
        "tokenizer.ggml.merges": (ARRAY, array(STRING, [])),
    }
    return replace(RawGguf(keys, _tensors()), **options)  # type: ignore[arg-type]


def _tensors() -> dict[str, RawTensor]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int, type_name: str) -> RawTensor:
        return RawTensor.of(rng.standard_normal((rows, columns)), type_name)

    one = RawTensor.of(np.ones(HIDDEN))
    return {
        "token_embd.weight": matrix(VOCAB, HIDDEN, "Q8_0"),
        "output_norm.weight": one,
        "blk.0.attn_norm.weight": one,
        "blk.0.attn_q.weight": matrix(HIDDEN, HIDDEN, "Q4_1"),
        "blk.0.attn_k.weight": matrix(HIDDEN // 2, HIDDEN, "Q5_0"),
        "blk.0.attn_v.weight": matrix(HIDDEN // 2, HIDDEN, "F16"),
        "blk.0.attn_output.weight": matrix(HIDDEN, HIDDEN, "IQ4_NL"),
        "blk.0.ffn_norm.weight": one,
        "blk.0.ffn_gate.weight": matrix(FFN, HIDDEN, "Q4_0"),
        "blk.0.ffn_up.weight": matrix(FFN, HIDDEN, "Q4_1"),
        "blk.0.ffn_down.weight": matrix(HIDDEN, FFN, "F32"),
    }
