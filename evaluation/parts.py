"""Runs a stored model part by part: embedding, one layer, head; so that memory is that of a part and some activations.

Decides nothing of what is measured. Layers run in the shard code that serves, and each window of a text has their KV to
itself. Knows the store only as a manifest and a folder of blobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evaluation.scores import Scores, divergences, log_probabilities, token_losses
from evaluation.text import Ids, Text
from modelstore.graph import build_embedding_graph, build_head_graph, build_layer_graph
from modelstore.manifest import Manifest
from shoal.types import ShardShape
from worker.session import Session
from worker.shard import ShardBatch, ShardRow, open_shard

# Tokens of a run; attention takes time and memory with their square.
CHUNK_TOKENS = 256
# Logits of so many bytes are looked at at a time.
LOGIT_BYTES = 32 << 20

Floats = NDArray[np.float32]
RunLayer = Callable[[Floats, Text], Floats]
RunHead = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class Parts:
    """A model of a store. is_exact: activations stay float32; else they are rounded to 8 bits, as where it serves."""

    manifest: Manifest
    folder: Path
    num_threads: int
    is_exact: bool = False

    @property
    def num_layers(self) -> int:
        return self.manifest.config.num_layers

    @property
    def _accuracy_level(self) -> int:
        return 0 if self.is_exact else 4

    def embed(self, text: Text) -> Floats:
        """The hidden rows [T, E] of a text's tokens."""
        session = Session(build_embedding_graph(self.manifest), self.folder, num_threads=self.num_threads)
        try:
            token_ids = text.token_ids
            hidden = np.empty((len(token_ids), self.manifest.config.hidden_size), np.float32)
            binding = session.binding()
            binding.bind_input("token_ids", token_ids)
            binding.bind_output("hidden_out", hidden)
            session.run(binding)
        finally:
            session.close()
        return hidden

    @contextmanager
    def layer(self, index: int, longest: int) -> Iterator[RunLayer]:
        """A loaded layer, as a function from the hidden rows [T, E] of a text to those behind it; longest: its windows."""
        graph = build_layer_graph(self.manifest, index, accuracy_level=self._accuracy_level)
        shard = open_shard(self._shape(longest), graph, self.folder, num_threads=self.num_threads)

        def run(hidden: Floats, text: Text) -> Floats:
            result = np.empty_like(hidden)
            for start, position, count in _chunks(text):
                row = ShardRow(slot=0, position=position, num_tokens=count, wants_logits=False)
                rows = slice(start, start + count)
                result[rows] = shard.run(ShardBatch((row,), hidden[rows]))
            return result

        try:
            yield run
        finally:
            shard.close()

    @contextmanager
    def head(self) -> Iterator[RunHead]:
        """The loaded head, as a function from hidden rows [R, E] to logits [R, V]."""
        graph = build_head_graph(self.manifest, accuracy_level=self._accuracy_level)
        session = Session(graph, self.folder, num_threads=self.num_threads)

        def run(hidden: Floats) -> Floats:
            logits = np.empty((len(hidden), self.manifest.config.vocab_size), np.float32)
            binding = session.binding()
            binding.bind_input("hidden", np.ascontiguousarray(hidden))
            binding.bind_output("logits", logits)
            session.run(binding)
            return logits

        try:
            yield run
        finally:
            session.close()

    def _shape(self, longest: int) -> ShardShape:
        config = self.manifest.config
        return ShardShape(
            num_layers=1,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_slots=1,
            slot_tokens=longest,
            kv_tokens=longest,
            is_first=False,
            is_last=False,
        )


def final_hidden(parts: Parts, text: Text, say: Callable[[str], None]) -> Floats:
    """The hidden rows [T, E] behind the last layer."""
    hidden = parts.embed(text)
    for index in range(parts.num_layers):
        say(f"layer {index + 1} of {parts.num_layers}")
        with parts.layer(index, text.longest) as run:
            hidden = run(hidden, text)
    return hidden


def score(
    run: RunHead, hidden: Floats, text: Text, vocab_size: int, reference: tuple[RunHead, Floats] | None = None
) -> Scores:
    """Judge final hidden rows [T, E] by the text's next tokens, and by a reference's head and final rows if given."""
    targets = text.targets
    losses, distances = np.empty(len(targets)), np.zeros(len(targets))
    agrees = np.ones(len(targets), np.bool_)
    start = 0
    for rows in logit_rows(text.predicting_rows, vocab_size):
        piece = slice(start, start + len(rows))
        log_q = log_probabilities(run(hidden[rows]))
        losses[piece] = token_losses(log_q, targets[piece])
        if reference is not None:
            run_reference, reference_hidden = reference
            log_p = log_probabilities(run_reference(reference_hidden[rows]))
            distances[piece] = divergences(log_p, log_q)
            agrees[piece] = log_p.argmax(axis=1) == log_q.argmax(axis=1)
        start = piece.stop
    return Scores(losses, distances, agrees)


def logit_rows(rows: Ids, vocab_size: int) -> Iterator[Ids]:
    """The rows by groups whose logits take no more than LOGIT_BYTES."""
    step = max(1, LOGIT_BYTES // (4 * vocab_size))
    return (rows[start : start + step] for start in range(0, len(rows), step))


def _chunks(text: Text) -> Iterator[tuple[int, int, int]]:
    """Pieces of a text's windows: first row, position in the window, tokens."""
    first = 0
    for window in text.windows:
        for position in range(0, len(window), CHUNK_TOKENS):
            yield first + position, position, min(CHUNK_TOKENS, len(window) - position)
        first += len(window)
