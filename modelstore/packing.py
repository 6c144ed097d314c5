"""Plans a model's blobs: which tensors go into which, under which names, packed a few rows at a time.

Decides what is fused, the rotary tables, and the key that tells whether a blob of an interrupted import is this very
blob: a digest of all that its bytes depend on. Knows nothing of where blobs are kept; the store carries the plans out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from modelstore.blob_writer import BlobWriter
from modelstore.gguf import GgufFile, SourceTensor
from modelstore.manifest import ModelConfig
from modelstore.quantize import (
    BLOCK,
    INT8_ZERO,
    PackedLinear,
    can_fuse,
    pack_embedding,
    pack_linear,
    to_float32,
    unpermute_rotary,
)

# To be raised whenever the same tensors are packed into other bytes.
PACKING_VERSION = 1
# Rows are packed so many at a time that as float32 they take this much: peak memory is a few times that.
CHUNK_BYTES = 2 << 20

Pack = Callable[[SourceTensor], PackedLinear]


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """A blob to be made: of which tensors, with which further numbers, and how."""

    label: str
    tensors: tuple[SourceTensor, ...]
    numbers: tuple[int | float | str, ...]
    write: Callable[[BlobWriter], None]

    @property
    def source_bytes(self) -> int:
        return sum(tensor.raw.nbytes for tensor in self.tensors)


class Packer:
    """Plans and packs one model's blobs; remembers how much rounding has changed the weights.

    precision: what F32 and F16 weights become, "int8" or "float32".
    """

    def __init__(self, model: GgufFile, precision: str) -> None:
        self._model = model
        self._config = model.config
        self._precision = precision
        self._squares = self._error_squares = 0.0

    @property
    def rounding_error(self) -> float:
        """Root mean square of what rounding changed, relative to that of the weights rounded; 0 if none was."""
        return (self._error_squares / self._squares) ** 0.5 if self._squares else 0.0

    def plans(self) -> list[BlobPlan]:
        """The blobs in the manifest's order: embedding, rope, layers, head."""
        config, count = self._config, self._config.num_layers
        layers = [self._plan(f"layer {i + 1} of {count}", self._layer(i), self._write_layer) for i in range(count)]
        head = {"output_norm": self._tensor("output_norm")}
        if not config.is_head_tied:
            head["output"] = self._tensor("output")
        rope_numbers = (config.rope_base, config.head_dim, config.context_tokens)
        return [
            self._plan("embedding", {"token_embd": self._tensor("token_embd")}, self._write_embedding),
            BlobPlan("rotary tables", (), ("rope", *rope_numbers), lambda writer: write_rope(writer, config)),
            *layers,
            self._plan("head", head, self._write_head),
        ]

    def key(self, plan: BlobPlan) -> str:
        """SHA-256 over all that the bytes of a plan's blob depend on: numbers and the tensors' contents."""
        facts = [PACKING_VERSION, *plan.numbers, *((tensor.type, tensor.shape) for tensor in plan.tensors)]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for tensor in plan.tensors:
            for chunk in _row_chunks(tensor):
                digest.update(np.ascontiguousarray(chunk.raw).data)
                self._model.release()
        return digest.hexdigest()

    def _tensor(self, part: str) -> SourceTensor:
        return self._model.tensors[f"{part}.weight"]

    def _layer(self, index: int) -> dict[str, SourceTensor]:
        prefix, suffix = f"blk.{index}.", ".weight"
        tensors = self._model.tensors.items()
        return {name[len(prefix) : -len(suffix)]: tensor for name, tensor in tensors if name.startswith(prefix)}

    def _plan(
        self,
        label: str,
        parts: dict[str, SourceTensor],
        write: Callable[[BlobWriter, dict[str, SourceTensor]], None],
    ) -> BlobPlan:
        numbers = (",".join(sorted(parts)), self._config.num_heads, self._config.num_kv_heads, self._precision)
        tensors = tuple(parts[name] for name in sorted(parts))
        return BlobPlan(label, tensors, numbers, lambda writer: write(writer, parts))

    def _write_embedding(self, writer: BlobWriter, parts: dict[str, SourceTensor]) -> None:
        tensor = parts["token_embd"]
        chunks = self._packed([tensor], lambda rows: pack_embedding(rows, precision=self._precision))
        writer.add_linear("token_embd", tensor.shape[0], chunks, is_lookup=True)

    def _write_head(self, writer: BlobWriter, parts: dict[str, SourceTensor]) -> None:
        _add_vector(writer, "output_norm", parts["output_norm"])
        if "output" in parts:
            self._add_linear(writer, "output", [parts["output"]])

    def _write_layer(self, writer: BlobWriter, parts: dict[str, SourceTensor]) -> None:
        config = self._config
        query = unpermute_rotary(parts["attn_q"], config.num_heads, config.head_dim)
        key = unpermute_rotary(parts["attn_k"], config.num_kv_heads, config.head_dim)
        for norm in ("attn_norm", "ffn_norm"):
            _add_vector(writer, norm, parts[norm])
        self._add_fused(writer, "attn_qkv", {"attn_q": query, "attn_k": key, "attn_v": parts["attn_v"]})
        self._add_linear(writer, "attn_out", [parts["attn_output"]])
        self._add_fused(writer, "ffn_gate_up", {"ffn_gate": parts["ffn_gate"], "ffn_up": parts["ffn_up"]})
        self._add_linear(writer, "ffn_down", [parts["ffn_down"]])

    def _add_fused(self, writer: BlobWriter, fused_name: str, parts: dict[str, SourceTensor]) -> None:
        """Add the parts as one weight where their types allow it, else one by one."""
        if can_fuse(tuple(parts.values())):
            self._add_linear(writer, fused_name, tuple(parts.values()))
            return
        for name, part in parts.items():
            self._add_linear(writer, name, [part])

    def _add_linear(self, writer: BlobWriter, name: str, parts: Sequence[SourceTensor]) -> None:
        chunks = self._packed(parts, lambda rows: pack_linear([rows], precision=self._precision))
        writer.add_linear(name, sum(part.shape[0] for part in parts), chunks)

    def _packed(self, parts: Sequence[SourceTensor], pack: Pack) -> Iterator[PackedLinear]:
        for part in parts:
            for chunk in _row_chunks(part):
                packed = pack(chunk)
                self._note_rounding(chunk, packed)
                yield packed
                self._model.release()

    def _note_rounding(self, source: SourceTensor, packed: PackedLinear) -> None:
        is_exact = packed.kind != "int8" or source.type in ("Q8_0", "Q4_0")
        if is_exact:
            return
        values = to_float32(source)
        q, scale = packed.arrays["q"], packed.arrays["scale"]
        rounded = (q.astype(np.float32) - INT8_ZERO) * scale[..., None]
        errors = rounded.reshape(values.shape) - values
        self._squares += float(np.vdot(values, values))
        self._error_squares += float(np.vdot(errors, errors))


def write_rope(writer: BlobWriter, config: ModelConfig) -> None:
    """Write cos and sin of position / base^(2i / D), both float32 [context, D/2], half-split order."""
    half = config.head_dim // 2
    frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)
    step = max(1, CHUNK_BYTES // (8 * half))

    def angles() -> Iterator[NDArray[np.float64]]:
        for start in range(0, config.context_tokens, step):
            positions = np.arange(start, min(start + step, config.context_tokens), dtype=np.float64)
            yield np.outer(positions, frequencies)

    shape = (config.context_tokens, half)
    writer.add_array("cos", shape, (np.cos(chunk).astype(np.float32) for chunk in angles()))
    writer.add_array("sin", shape, (np.sin(chunk).astype(np.float32) for chunk in angles()))


def _add_vector(writer: BlobWriter, name: str, tensor: SourceTensor) -> None:
    writer.add_array(name, tensor.shape, [to_float32(tensor)])


def _row_chunks(tensor: SourceTensor) -> Iterator[SourceTensor]:
    """The tensor by groups of rows that are small as float32."""
    if len(tensor.shape) == 1:
        yield tensor
        return
    num_rows, row_values = tensor.shape
    # Whole pairs of cache lines a piece where rows are written as columns.
    step = max(BLOCK, CHUNK_BYTES // (4 * row_values) // BLOCK * BLOCK)
    for start in range(0, num_rows, step):
        raw = tensor.raw[start : start + step]
        yield replace(tensor, shape=(raw.shape[0], row_values), raw=raw)
