"""What each codec of KV blocks saves and what it costs: `python -m tests.bench.kv_codecs`.

Computes the first half of a text exactly, replaces its keys and values by what a codec gives back, and has the model go
on with the second half, beside a run on the exact ones. Twice: with activations in float32, which shows the codec alone, and
in 8 bits, as workers compute. There any change is amplified by rounding, so a row has what the smallest change of all costs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelstore.graph import build_shard_graph
from modelstore.manifest import Manifest
from modelstore.pull import pull
from modelstore.store import ModelStore
from orchestrator.tokenizer import Tokenizer
from shoal.config import OrchestratorConfig, default_home
from shoal.types import LayerRange
from tests.bench.context import Bench
from tests.bench.report import table
from tests.support.english import TEXT
from tests.support.shards import make_shape
from worker.kv.arena import Arena
from worker.kv.codec import Block, KVCodec, decode_into, encode, encoded_bytes
from worker.session import Binding, Session

BLOCK_TOKENS = 64
TEXT_TOKENS = (512, 2048)
# As the policy does: what attention looks at most stays exact.
SINK_TOKENS, NEWEST_TOKENS = 4, 32
SPEED_REPEATS = 30
# Of onnxruntime's matrix kernels, by the bits of activations.
ACCURACY_LEVELS = {32: 0, 8: 4}
CODECS = {32: tuple(KVCodec), 8: (*KVCodec, None)}
# The text of the tests is a little over 512 tokens; the decision records go on with plain English, and do not change.
RECORDS = Path(__file__).parents[2] / "docs" / "adr"

Rows = NDArray[np.float32]  # [T, V]


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """GB of float32 a second on one thread, the fastest of some tries, between arena and bytes."""

    encode_gb_s: float
    decode_gb_s: float


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """One codec on texts of one length, against the exact run. codec: None moves every value to the next float32 instead.

    activation_bits: what the model's layers round their inputs to. bytes_share: of a full block, against float32. change:
    of the perplexity, as a share; change_error: its standard error, from the spread of the differences token by token.
    divergence: mean KL of the exact distribution from this one, in nats. agreement: share of tokens with the same first
    choice. speed: None without a codec.
    """

    codec: KVCodec | None
    activation_bits: int
    num_tokens: int
    bytes_share: float
    perplexity: float
    change: float
    change_error: float
    divergence: float
    agreement: float
    speed: CodecSpeed | None


class ForcedModel:
    """A whole model that gives the logits of every token it is fed, as a shard does not; its slots share nothing."""

    def __init__(self, manifest: Manifest, blob_directory: Path, activation_bits: int) -> None:
        layers, self.activation_bits = LayerRange(0, manifest.config.num_layers), activation_bits
        num_slots = 1 + len(CODECS[activation_bits])
        self._shape = make_shape(manifest, layers, num_slots=num_slots, slot_tokens=max(TEXT_TOKENS))
        graph = build_shard_graph(manifest, layers, accuracy_level=ACCURACY_LEVELS[activation_bits])
        self._session = Session(graph, blob_directory)
        self.arena = Arena(self._shape)
        self._token_ids = np.zeros(BLOCK_TOKENS, np.int64)
        self._last = np.zeros(1, np.int32)
        self._total = np.zeros((), np.int32)
        self._logits = np.empty((BLOCK_TOKENS, self._shape.vocab_size), np.float32)
        self._bindings = [self._bind(slot) for slot in range(num_slots)]

    def run(self, slot: int, position: int, token_ids: Sequence[int]) -> Rows:
        """The logits of BLOCK_TOKENS tokens from this position on; the next run overwrites them."""
        self._token_ids[:] = token_ids
        self._last[0] = position + BLOCK_TOKENS - 1
        self._total[()] = position + BLOCK_TOKENS
        self._session.run(self._bindings[slot])
        return self._logits

    def close(self) -> None:
        self._bindings.clear()
        self._session.close()
        self.arena.close()

    def _bind(self, slot: int) -> Binding:
        binding, rows = self._session.binding(), np.arange(BLOCK_TOKENS)
        sizes = (1, self._shape.num_kv_heads, self.arena.capacity, self._shape.head_dim)
        for layer in range(self._shape.num_layers):
            for kv, half in enumerate(("key", "value")):
                pointer = self.arena.pointer(layer, kv, slot)
                binding.bind_in_place(f"past_{half}_{layer}", f"present_{half}_{layer}", sizes, pointer)
        binding.bind_input("token_ids", self._token_ids)
        binding.bind_input("pad_index", rows[None])
        binding.bind_input("unpad_index", rows)
        binding.bind_input("logit_rows", rows)
        binding.bind_input("query_seqlens", np.array([BLOCK_TOKENS], np.int32))
        binding.bind_input("seqlens_k", self._last)
        binding.bind_input("total_sequence_length", self._total)
        binding.bind_output("logits", self._logits)
        return binding


class _Tally:
    """Gathers, token by token, what a codec's run differs in from the exact one."""

    def __init__(self) -> None:
        self._exact: list[float] = []
        self._scores: list[float] = []
        self._divergences: list[float] = []
        self._num_same = 0

    def add(self, exact: Rows, ours: Rows, next_ids: Sequence[int]) -> None:
        """Take log probabilities [T, V] of both, and the tokens that followed."""
        rows = np.arange(len(next_ids))
        self._exact += exact[rows, next_ids].tolist()
        self._scores += ours[rows, next_ids].tolist()
        self._divergences += (np.exp(exact) * (exact - ours)).sum(axis=1, dtype=np.float64).tolist()
        self._num_same += int((exact.argmax(axis=1) == ours.argmax(axis=1)).sum())

    def figures(self, codec: KVCodec | None, forced: ForcedModel, num_tokens: int) -> CodecFigures:
        losses = np.array(self._exact) - np.array(self._scores)
        ratio = math.exp(losses.mean())
        block = forced.arena.array[:, :, 0, :, :BLOCK_TOKENS]
        return CodecFigures(
            codec=codec,
            activation_bits=forced.activation_bits,
            num_tokens=num_tokens,
            bytes_share=encoded_bytes(codec or KVCodec.LOSSLESS, block.shape) / block.nbytes,
            perplexity=math.exp(-np.mean(self._scores)),
            change=ratio - 1,
            change_error=ratio * float(losses.std()) / math.sqrt(len(losses)),
            divergence=float(np.mean(self._divergences)),
            agreement=self._num_same / len(losses),
            speed=measure_speed(block, forced.arena.array[:, :, 1, :, :BLOCK_TOKENS], codec) if codec else None,
        )


def measure_codecs(home: Path, model: str) -> list[CodecFigures]:
    """Measure every codec on texts of each length of TEXT_TOKENS, on a model that `home` has. Takes minutes."""
    store = ModelStore(home)
    manifest = store.open(model)
    text = english_tokens(manifest, max(TEXT_TOKENS) + 1)
    figures: list[CodecFigures] = []
    for activation_bits in ACCURACY_LEVELS:
        forced = ForcedModel(manifest, store.root / "blobs", activation_bits)
        try:
            for num_tokens in TEXT_TOKENS:
                figures += _measure_length(forced, text, num_tokens)
        finally:
            forced.close()
    return figures


def english_tokens(manifest: Manifest, count: int) -> list[int]:
    """The first tokens of the tests' text and the decision records after it."""
    text = "\n\n".join([TEXT, *(path.read_text(encoding="utf-8") for path in sorted(RECORDS.glob("*.md")))])
    token_ids = Tokenizer(manifest.tokenizer).encode(text, add_special=False)
    assert len(token_ids) >= count, f"the text has {len(token_ids)} tokens of {count}"
    return token_ids[:count]


def _measure_length(forced: ForcedModel, text: Sequence[int], num_tokens: int) -> list[CodecFigures]:
    """Over all the texts of this length that the whole one has, one after the other."""
    tallies = {codec: _Tally() for codec in CODECS[forced.activation_bits]}
    for start in range(0, len(text) - num_tokens, num_tokens):
        _compare(forced, text[start : start + num_tokens + 1], tallies)
    return [tally.figures(codec, forced, num_tokens) for codec, tally in tallies.items()]


def _compare(forced: ForcedModel, token_ids: Sequence[int], tallies: Mapping[KVCodec | None, _Tally]) -> None:
    """Run one text exactly in slot 0 and with a codec in each of the others, and tally its second half."""
    stop = len(token_ids) - 1
    prefix = stop // 2
    for start in range(0, prefix, BLOCK_TOKENS):
        forced.run(0, start, token_ids[start : start + BLOCK_TOKENS])
    for slot, codec in enumerate(tallies, 1):
        restore_prefix(forced.arena.array, slot, codec, prefix)
    for start in range(prefix, stop, BLOCK_TOKENS):
        now = token_ids[start : start + BLOCK_TOKENS]
        following = token_ids[start + 1 : start + 1 + BLOCK_TOKENS]
        exact = _log_probabilities(forced.run(0, start, now))
        for slot, (codec, tally) in enumerate(tallies.items(), 1):
            # The same bits, as restoring made sure of, compute the same.
            is_exact = codec is KVCodec.LOSSLESS
            tally.add(exact, exact if is_exact else _log_probabilities(forced.run(slot, start, now)), following)


def restore_prefix(kv: NDArray[np.float32], slot: int, codec: KVCodec | None, num_tokens: int) -> None:
    """Fill a slot of an arena [L, 2, S, K, C, D] with slot 0's first tokens as a codec gives them back, block by block."""
    exact, restored = kv[:, :, 0], kv[:, :, slot]
    for start in range(0, num_tokens, BLOCK_TOKENS):
        block, target = (values[..., start : start + BLOCK_TOKENS, :] for values in (exact, restored))
        if codec is None:
            np.nextafter(block, np.float32(np.inf), out=target)
        else:
            decode_into(encode(block, codec), codec, target)
        assert codec is not KVCodec.LOSSLESS or target.tobytes() == block.tobytes()
    for kept in (slice(SINK_TOKENS), slice(num_tokens - NEWEST_TOKENS, num_tokens)):
        restored[..., kept, :] = exact[..., kept, :]


def measure_speed(block: Block, target: Block, codec: KVCodec) -> CodecSpeed:
    """Encode a block, and decode it into another place of the arena."""
    encode_s = decode_s = math.inf
    for _ in range(SPEED_REPEATS):
        started = time.perf_counter()
        data = encode(block, codec)
        encoded = time.perf_counter()
        decode_into(data, codec, target)
        encode_s, decode_s = min(encode_s, encoded - started), min(decode_s, time.perf_counter() - encoded)
    return CodecSpeed(block.nbytes / encode_s / 1e9, block.nbytes / decode_s / 1e9)


def _log_probabilities(logits: Rows) -> Rows:
    scores: Rows = logits - logits.max(axis=1, keepdims=True)
    totals = np.exp(scores).sum(axis=1, keepdims=True, dtype=np.float64)
    scores -= np.log(totals).astype(np.float32)
    return scores


def add_table(bench: Bench) -> None:
    """Add the table to what a run of the benchmark reports."""
    bench.tables["Codecs of KV blocks"] = table_rows(measure_codecs(bench.home_of_models, bench.model))


def table_rows(figures: Sequence[CodecFigures]) -> list[dict[str, object]]:
    """The figures as they are read."""
    return [
        {
            "activations": f"{row.activation_bits} bit",
            "tokens": row.num_tokens,
            "codec": row.codec.value if row.codec else "none, next float32",
            "bytes": f"{row.bytes_share:.3f}",
            "perplexity": f"{row.perplexity:.3f}",
            "change": f"{row.change * 100:+.2f} ± {row.change_error * 100:.2f} %",
            "KL": f"{row.divergence:.4f}",
            "top-1": f"{row.agreement:.3f}",
            "encode GB/s": f"{row.speed.encode_gb_s:.2f}" if row.speed else "-",
            "decode GB/s": f"{row.speed.decode_gb_s:.2f}" if row.speed else "-",
        }
        for row in figures
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.kv_codecs", description="Compare the codecs of KV blocks."
    )
    parser.add_argument("--model", default=OrchestratorConfig().model, help="the model (default %(default)s)")
    options = parser.parse_args()
    home = default_home()
    pull(ModelStore(home), options.model)
    sys.stdout.write("\n".join(table(table_rows(measure_codecs(home, options.model)))) + "\n")


if __name__ == "__main__":
    main()
