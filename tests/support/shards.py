"""Opens tiny models as chains of shards, and drives sequences through them step by step.

What the graph and shard suites share. A chain is a pipeline without its transport: the hidden rows of one shard are the
input of the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelstore.graph import build_shard_graph
from modelstore.manifest import Manifest
from modelstore.requantize import uniform
from modelstore.store import ModelStore
from shoal.types import LayerRange, ShardShape
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import write_tiny_hf
from worker.kv.arena import Arena
from worker.session import Session
from worker.shard import Shard, ShardBatch, ShardRow, open_shard

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TinyModel:
    path: Path
    store: ModelStore
    manifest: Manifest

    @property
    def blob_directory(self) -> Path:
        return self.store.root / "blobs"


def make_tiny_model(folder: Path, *, precision: str = "int8", layout: str = "gguf", **options: object) -> TinyModel:
    """Write and import a tiny model; layout: "gguf" or "hf". options are those of write_tiny_gguf or write_tiny_hf."""
    folder.mkdir(parents=True, exist_ok=True)
    write: Callable[..., Path] = write_tiny_hf if layout == "hf" else write_tiny_gguf
    path = write(folder / ("tiny" if layout == "hf" else "tiny.gguf"), **options)
    store = ModelStore(folder / "store")
    return TinyModel(path, store, store.import_model(path, "tiny", precisions=uniform(precision)))


def make_shape(manifest: Manifest, layers: LayerRange, *, num_slots: int = 4, slot_tokens: int = 128) -> ShardShape:
    config = manifest.config
    return ShardShape(
        num_layers=len(layers),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_slots=num_slots,
        slot_tokens=slot_tokens,
        kv_tokens=num_slots * slot_tokens,
        is_first=layers.start == 0,
        is_last=layers.stop == config.num_layers,
    )


class ShardChain:
    """Shards that cover a model, run one after the other. chunk_border: of the model, see SchedulerLimits."""

    def __init__(self, shards: Sequence[Shard], chunk_border: int = 0) -> None:
        self.shards = tuple(shards)
        self.chunk_border = chunk_border

    def run(self, rows: Sequence[ShardRow], token_ids: Sequence[int], *, solo: bool = False) -> Floats:
        """The logits [R, V] of a step."""
        values: NDArray[np.int64] | Floats = np.array(token_ids, np.int64)
        for shard in self.shards:
            values = shard.run(ShardBatch(tuple(rows), values, solo)).copy()
        return values.astype(np.float32, copy=False)

    def prefill(self, token_ids: Sequence[int], *, slot: int = 0, position: int = 0, chunk: int = 64) -> Floats:
        """The logits [V] after the last of these tokens, taken in chunks."""
        logits, start = np.empty(0, np.float32), 0
        while start < len(token_ids):
            piece = token_ids[start : start + self.before_border(chunk, position + start)]
            row = ShardRow(slot, position + start, len(piece), wants_logits=start + len(piece) == len(token_ids))
            logits = self.run([row], piece)
            start += len(piece)
        result: Floats = logits[0]
        return result

    def before_border(self, chunk: int, position: int) -> int:
        """How much of a chunk of a prompt may be run at once."""
        return min(chunk, self.chunk_border - position % self.chunk_border) if self.chunk_border else chunk

    def decode(self, token_id: int, position: int, *, slot: int = 0, solo: bool = False) -> Floats:
        """The logits [V] after one more token."""
        result: Floats = self.run([ShardRow(slot, position, 1, wants_logits=True)], [token_id], solo=solo)[0]
        return result

    def all_logits(self, token_ids: Sequence[int], *, slot: int = 0) -> Floats:
        """The logits [T, V] after each token, one decode step a token."""
        return np.stack([self.decode(token, position, slot=slot) for position, token in enumerate(token_ids)])

    def release(self, slot: int) -> None:
        for shard in self.shards:
            shard.release(slot)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def open_chain(
    manifest: Manifest,
    blob_directory: Path,
    cuts: Iterable[int] = (),
    *,
    accuracy_level: int = 4,
    num_slots: int = 4,
    slot_tokens: int = 128,
    num_threads: int = 1,
) -> ShardChain:
    """Open a model cut before the layers named."""
    edges = [0, *cuts, manifest.config.num_layers]
    shards = []
    for start, stop in itertools.pairwise(edges):
        layers = LayerRange(start, stop)
        graph = build_shard_graph(manifest, layers, accuracy_level=accuracy_level)
        shape = make_shape(manifest, layers, num_slots=num_slots, slot_tokens=slot_tokens)
        shards.append(open_shard(shape, graph, blob_directory, num_threads=num_threads))
    return ShardChain(shards, manifest.config.chunk_border)


def whole_prompt_logits(manifest: Manifest, blob_directory: Path, token_ids: Sequence[int]) -> Floats:
    """The logits [T, V] of a prompt in one run of the whole graph, which hands out more rows than a shard asks for."""
    layers, count = LayerRange(0, manifest.config.num_layers), len(token_ids)
    session = Session(build_shard_graph(manifest, layers), blob_directory)
    shape = make_shape(manifest, layers, num_slots=1, slot_tokens=count)
    arena = Arena(shape)
    binding = session.binding()
    for layer in range(shape.num_layers):
        for kv, half in enumerate(("key", "value")):
            sizes = (1, shape.num_kv_heads, arena.capacity, shape.head_dim)
            pointer = arena.pointer(layer, kv, 0)
            binding.bind_in_place(f"past_{half}_{layer}", f"present_{half}_{layer}", sizes, pointer)
    binding.bind_input("token_ids", np.array(token_ids, np.int64))
    binding.bind_input("pad_index", np.arange(count)[None])
    for name in ("unpad_index", "logit_rows"):
        binding.bind_input(name, np.arange(count))
    binding.bind_input("seqlens_k", np.array([count - 1], np.int32))
    binding.bind_input("query_seqlens", np.array([count], np.int32))
    binding.bind_input("total_sequence_length", np.array(count, np.int32))
    logits = np.empty((count, shape.vocab_size), np.float32)
    binding.bind_output("logits", logits)
    session.run(binding)
    return logits


def make_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab, count)]
