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

from modelstore.architectures.decoder import ROPE_FACTORS
from modelstore.blob_writer import BlobWriter
from modelstore.block_types import FLOAT_TYPES
from modelstore.manifest import ModelConfig, RopeScaling, to_fields
from modelstore.quantize import (
    PackedLinear,
    as_floats,
    can_fuse,
    half_split_rows,
    is_exact,
    pack_embedding,
    pack_linear,
    packed_bytes,
    require_packable,
    rounded_anew,
    to_float32,
    unpermute_rotary,
)
from modelstore.requantize import BLOCK, INT8, Precisions, restored
from modelstore.rope import frequencies, table
from modelstore.source import SourceModel, SourceTensor
from shoal.errors import BadModelFile

# To be raised whenever the same tensors are packed into other bytes.
PACKING_VERSION = 2
# Rows are packed so many at a time that as float32 they take this much: peak memory is a few times that.
CHUNK_BYTES = 2 << 20

NORMS = ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
# By what they are multiplied as, in the order of their rows.
LINEARS = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_out": ("attn_output",),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}

Pack = Callable[[SourceTensor], PackedLinear]


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """A blob to be made: of which tensors, with which further numbers, and how."""

    label: str
    tensors: tuple[SourceTensor, ...]
    numbers: tuple[int | float | str, ...]
    # Of the blob, about.
    num_bytes: int
    write: Callable[[BlobWriter], None]

    @property
    def source_bytes(self) -> int:
        return sum(tensor.raw.nbytes for tensor in self.tensors)


class Packer:
    """Plans and packs one model's blobs; remembers how much rounding has changed the weights.

    precisions: what weights become that the file has as floats.
    """

    def __init__(self, model: SourceModel, precisions: Precisions) -> None:
        self._model = model
        self._config = model.config
        self._precisions = precisions
        self._squares = self._error_squares = 0.0

    @property
    def rounding_error(self) -> float:
        """Root mean square of what rounding changed, relative to that of the weights rounded; 0 if none was."""
        return (self._error_squares / self._squares) ** 0.5 if self._squares else 0.0

    @property
    def quantization(self) -> str:
        """What the weights are, as in "F16 as int4 and int8"; that floats get 8 bits goes without saying."""
        rounded = set()
        for index in range(self._config.num_layers):
            precision = self._precisions.of_layer(index)
            matrices = (part for part in self._layer(index).values() if len(part.shape) == 2)
            if any(self._as_packed(part, precision).type in FLOAT_TYPES for part in matrices):
                rounded.add(precision)
        kept = self._model.quantization
        return kept if rounded <= {INT8} else f"{kept} as {' and '.join(sorted(rounded))}"

    def plans(self) -> list[BlobPlan]:
        """The blobs in the manifest's order: embedding, rope, layers, head."""
        config, count = self._config, self._config.num_layers
        layers = [
            self._plan(f"layer {i + 1} of {count}", self._layer(i), self._precisions.of_layer(i), self._write_layer)
            for i in range(count)
        ]
        head_parts = ("output_norm.weight",) if config.is_head_tied else ("output_norm.weight", "output.weight")
        head = {part: self._tensor(part) for part in head_parts}
        embedding, ends = {"token_embd.weight": self._tensor("token_embd.weight")}, self._precisions.ends
        return [
            self._plan("embedding", embedding, ends, self._write_embedding),
            self._rope_plan(),
            *layers,
            self._plan("head", head, ends, self._write_head),
        ]

    def key(self, plan: BlobPlan) -> str:
        """SHA-256 over all that the bytes of a plan's blob depend on: numbers and the tensors' contents."""
        facts = [PACKING_VERSION, *plan.numbers, *((tensor.type, tensor.shape) for tensor in plan.tensors)]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for tensor in plan.tensors:
            for chunk in _row_chunks(tensor):
                self._model.release()
                digest.update(np.ascontiguousarray(chunk.raw).data)
        return digest.hexdigest()

    def _tensor(self, name: str) -> SourceTensor:
        return self._model.tensors[name]

    def _layer(self, index: int) -> dict[str, SourceTensor]:
        prefix = f"blk.{index}."
        tensors = self._model.tensors.items()
        return {name[len(prefix) :]: tensor for name, tensor in tensors if name.startswith(prefix)}

    def _rope_plan(self) -> BlobPlan:
        config, tensors = self._config, self._model.tensors
        factors = (tensors[ROPE_FACTORS],) if ROPE_FACTORS in tensors else ()
        bases = (config.rope_base, config.local_rope_base if any(config.windows) else 0.0)
        numbers = ("rope", *bases, config.head_dim, config.context_tokens, *to_fields(config.rope_scaling).values())
        num_bytes = 4 * config.context_tokens * config.head_dim * (2 if bases[1] else 1)
        return BlobPlan(
            "rotary tables", factors, numbers, num_bytes, lambda writer: write_rope(writer, config, *factors)
        )

    def _plan(
        self,
        label: str,
        parts: dict[str, SourceTensor],
        precision: str,
        write: Callable[[BlobWriter, dict[str, SourceTensor], str], None],
    ) -> BlobPlan:
        heads = (self._config.num_heads, self._config.num_kv_heads, self._model.has_paired_rotary)
        numbers = (",".join(sorted(parts)), *heads, precision, self._precisions.is_forced)
        tensors = tuple(parts[name] for name in sorted(parts))
        num_bytes = sum(packed_bytes(self._as_packed(tensor, precision), precision) for tensor in tensors)
        return BlobPlan(label, tensors, numbers, num_bytes, lambda writer: write(writer, parts, precision))

    def _write_embedding(self, writer: BlobWriter, parts: dict[str, SourceTensor], precision: str) -> None:
        tensor = parts["token_embd.weight"]
        chunks = self._packed([tensor], precision, lambda rows: pack_embedding(rows, precision=precision))
        writer.add_linear("token_embd", tensor.shape[0], chunks, is_lookup=True)

    def _write_head(self, writer: BlobWriter, parts: dict[str, SourceTensor], precision: str) -> None:
        _add_vector(writer, "output_norm", parts["output_norm.weight"])
        if "output.weight" in parts:
            self._add_linear(writer, "output", [parts["output.weight"]], precision)

    def _write_layer(self, writer: BlobWriter, parts: dict[str, SourceTensor], precision: str) -> None:
        config = self._config
        for norm in NORMS:
            if f"{norm}.weight" in parts:
                _add_vector(writer, norm, parts[f"{norm}.weight"])
        weights = {name.removesuffix(".weight"): part for name, part in parts.items() if name.endswith(".weight")}
        if self._model.has_paired_rotary:
            for name, num_heads in self._rotated.items():
                weights[name] = unpermute_rotary(weights[name], num_heads, config.head_dim)
        for target, names in LINEARS.items():
            # Some files have as one tensor what is multiplied as one.
            present = [name for name in (target, *names) if name in weights]
            self._add_fused(writer, target, {name: weights[name] for name in present}, precision)
        for target, names in LINEARS.items():
            self._add_bias(writer, f"{target}_bias", names, parts)

    @property
    def _rotated(self) -> dict[str, int]:
        """The weights whose rows are rotated, and their heads."""
        return {"attn_q": self._config.num_heads, "attn_k": self._config.num_kv_heads}

    def _add_bias(self, writer: BlobWriter, target: str, names: Sequence[str], parts: dict[str, SourceTensor]) -> None:
        """Add the biases of weights that are multiplied as one, zeros where one has none; nothing if none has."""
        if not any(f"{name}.bias" in parts for name in names):
            return
        pieces = []
        for name in names:
            bias = parts.get(f"{name}.bias")
            values = to_float32(bias) if bias else np.zeros(parts[f"{name}.weight"].shape[0], np.float32)
            if self._model.has_paired_rotary and name in self._rotated:
                values = values[half_split_rows(self._rotated[name], self._config.head_dim)]
            pieces.append(values)
        joined = np.concatenate(pieces)
        writer.add_array(target, joined.shape, [joined])

    def _add_fused(self, writer: BlobWriter, target: str, parts: dict[str, SourceTensor], precision: str) -> None:
        """Add the parts as one weight where their types allow it, else one by one."""
        if len(parts) == 1 or can_fuse([self._as_packed(part, precision) for part in parts.values()]):
            self._add_linear(writer, target, tuple(parts.values()), precision)
            return
        for name, part in parts.items():
            self._add_linear(writer, name, [part], precision)

    def _add_linear(self, writer: BlobWriter, name: str, parts: Sequence[SourceTensor], precision: str) -> None:
        chunks = self._packed(parts, precision, lambda rows: pack_linear([rows], precision=precision))
        writer.add_linear(name, sum(part.shape[0] for part in parts), chunks)

    def _as_packed(self, tensor: SourceTensor, precision: str) -> SourceTensor:
        """A tensor with the type that it is packed as; of its bytes nothing may be read."""
        is_anew = self._precisions.is_forced and rounded_anew(tensor, precision)
        return replace(tensor, type="F32") if is_anew else tensor

    def _packed(self, parts: Sequence[SourceTensor], precision: str, pack: Pack) -> Iterator[PackedLinear]:
        for part in parts:
            is_anew = self._as_packed(part, precision).type != part.type
            for rows in _row_chunks(part):
                self._model.release()
                chunk = as_floats(rows) if is_anew else rows
                packed = pack(chunk)
                self._note_rounding(chunk, packed, precision)
                yield packed

    def _note_rounding(self, source: SourceTensor, packed: PackedLinear, precision: str) -> None:
        if is_exact(source.type, precision):
            return
        values = to_float32(source)
        errors = restored(packed.arrays, packed.k) - values
        self._squares += float(np.vdot(values, values))
        self._error_squares += float(np.vdot(errors, errors))


def require_packable_tensors(model: SourceModel) -> None:
    """Raise BadModelFile or UnsupportedModel naming the first tensor that cannot be packed; reads all of the model once.

    To be called before anything is written, so that a damaged file leaves nothing behind.
    """
    for tensor in model.tensors.values():
        for chunk in _row_chunks(tensor):
            model.release()
            require_packable(chunk)


def write_rope(writer: BlobWriter, config: ModelConfig, factors: SourceTensor | None = None) -> None:
    """Write the rotary tables in half-split order; factors: the tensor that a file has for them."""
    scaling = config.rope_scaling
    divisors = None if factors is None else to_float32(factors).astype(np.float64)
    if divisors is not None and not (divisors > 0).all():
        raise BadModelFile(
            f"tensor {ROPE_FACTORS} has numbers that frequencies cannot be divided by: the file is damaged"
        )
    kinds = [("", frequencies(config.head_dim, config.rope_base, scaling, divisors), scaling.magnitude)]
    if any(config.windows) and config.local_rope_base:
        kinds.append(("local_", frequencies(config.head_dim, config.local_rope_base, RopeScaling()), 1.0))
    shape = (config.context_tokens, config.head_dim // 2)
    for prefix, steps, magnitude in kinds:
        for name in ("cos", "sin"):
            writer.add_array(prefix + name, shape, table(config, steps, magnitude, is_sine=name == "sin"))


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
