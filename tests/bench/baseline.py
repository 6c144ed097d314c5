"""The baseline: the same full graph in one process, no gRPC, one thread, every array bound once.

A child process that reads one JSON request a line and answers with one line; ends with its input. It uses the runtime
and the arena of a worker and nothing else of it, and does per token only what cannot be left out: fill in positions, run,
take the largest logit. Started by `baseline_process`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelstore.graph import build_shard_graph
from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from shoal.types import LayerRange, ShardShape
from worker.kv.arena import Arena
from worker.session import Session

NUM_SLOTS = 16
SLOT_TOKENS = 1024
WARM_UP_STEPS = 8
# Decode rows of one of two micro-batches of 16 streams, and the context they have.
CUT_ROWS, CUT_POSITION, CUT_STEPS = 8, 256, 12


class Part:
    """Some layers with a session and an arena; all layers are the baseline."""

    def __init__(self, store: ModelStore, manifest: Manifest, layers: LayerRange) -> None:
        config = manifest.config
        self.shape = ShardShape(
            num_layers=len(layers),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_slots=NUM_SLOTS,
            slot_tokens=SLOT_TOKENS,
            kv_tokens=NUM_SLOTS * SLOT_TOKENS,
            is_first=layers.start == 0,
            is_last=layers.stop == config.num_layers,
        )
        self.session = Session(build_shard_graph(manifest, layers), store.root / "blobs")
        self.arena = Arena(self.shape)

    def close(self) -> None:
        self.session.close()
        self.arena.close()


class BoundStep:
    """A step of fixed size on slots 0, 1, ..: `num_tokens` tokens in each of `num_rows` of them.

    is_shared: at least two slots, token rows and logit rows, as SHARED rows are computed. data: token ids [T] or hidden
    rows [T, E] that go in; result: hidden rows [T, E] or logits [R, V] that come out.
    """

    def __init__(
        self,
        part: Part,
        num_rows: int,
        num_tokens: int,
        *,
        is_shared: bool,
        has_logits: bool = True,
        data: NDArray[Any] | None = None,
    ) -> None:
        least, shape = 2 if is_shared else 1, part.shape
        num_slots, total = max(least, num_rows), max(least, num_rows * num_tokens)
        self._part, self._num_rows, self._num_tokens = part, num_rows, num_tokens
        self._seqlens = np.zeros(num_slots, np.int32)  # [S]
        self._total = np.zeros((), np.int32)
        rows = np.arange(num_rows * num_tokens).reshape(num_rows, num_tokens)
        pad = np.zeros((num_slots, num_tokens), np.int64)  # [S, Q]
        pad[:num_rows] = rows
        unpad = np.zeros(total, np.int64)  # [T]
        unpad[: rows.size] = rows.ravel()
        queries = np.zeros(num_slots, np.int32)  # [S]
        queries[:num_rows] = num_tokens
        self.data = np.zeros(total, np.int64) if data is None else data
        self._small: dict[str, NDArray[Any]] = {"pad_index": pad, "unpad_index": unpad, "query_seqlens": queries}
        self._small.update(seqlens_k=self._seqlens, total_sequence_length=self._total)
        self._small["token_ids" if shape.is_first else "hidden"] = self.data
        if shape.is_last:
            logit_rows = np.full(max(least, num_rows) if has_logits else 0, rows[-1, -1])  # [R]
            logit_rows[:num_rows] = rows[: len(logit_rows), -1]
            self._small["logit_rows"] = logit_rows
            self.result = np.empty((len(logit_rows), shape.vocab_size), np.float32)
        else:
            self.result = np.empty((total, shape.hidden_size), np.float32)
        self._binding = self._bind(num_slots)

    def _bind(self, num_slots: int) -> Any:
        shape, arena = self._part.shape, self._part.arena
        binding = self._part.session.binding()
        sizes = (num_slots, shape.num_kv_heads, arena.capacity, shape.head_dim)
        for layer in range(shape.num_layers):
            for kv, half in enumerate(("key", "value")):
                pointer = arena.pointer(layer, kv, 0)
                binding.bind_in_place(f"past_{half}_{layer}", f"present_{half}_{layer}", sizes, pointer)
        for name, array in self._small.items():
            binding.bind_input(name, array)
        binding.bind_output("logits" if shape.is_last else "hidden_out", self.result)
        return binding

    def run(self, position: int) -> None:
        """Run on `data`, whose tokens follow `position` others in each slot."""
        self._seqlens[: self._num_rows] = position + self._num_tokens - 1
        self._total[()] = position + self._num_tokens
        self._part.session.run(self._binding)

    def take_largest(self) -> None:
        """Make the most likely tokens the input of the next step."""
        self.data[: self._num_rows] = self.result[: self._num_rows].argmax(axis=1)


class Baseline:
    """What can be asked for, by name; every answer is in seconds or tokens per second."""

    def __init__(self, home: Path, model: str) -> None:
        self._store = ModelStore(home)
        self._manifest = self._store.open(model)
        self._num_layers = self._manifest.config.num_layers
        self._whole = Part(self._store, self._manifest, LayerRange(0, self._num_layers))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        methods: dict[str, Callable[..., dict[str, Any]]] = {
            "decode": self._decode,
            "prefill": self._prefill,
            "first_token": self._first_token,
            "cuts": self._cuts,
        }
        return methods[request.pop("mode")](**request)

    def _decode(self, prompt: Sequence[int], num_rows: int, num_steps: int, is_shared: bool) -> dict[str, Any]:
        """Decode `num_steps` tokens in each of num_rows slots that hold the prompt; the first few are not timed."""
        self._fill(prompt, num_rows)
        step = BoundStep(self._whole, num_rows, 1, is_shared=is_shared)
        step.data[:] = prompt[-1]
        started = 0.0
        for index in range(num_steps):
            if index == WARM_UP_STEPS:
                started = time.perf_counter()
            step.run(len(prompt) + index)
            step.take_largest()
        elapsed_s = time.perf_counter() - started
        return {"tokens_per_s": num_rows * (num_steps - WARM_UP_STEPS) / elapsed_s}

    def _fill(self, prompt: Sequence[int], num_rows: int) -> None:
        """Put a prompt into slot 0 and copy it to the others: the time of a step does not depend on what slots hold."""
        step = BoundStep(self._whole, 1, len(prompt), is_shared=False, has_logits=False)
        step.data[:] = prompt
        step.run(0)
        array = self._whole.arena.array  # [L, 2, S, K, C, D]
        array[:, :, 1:num_rows, :, : len(prompt)] = array[:, :, :1, :, : len(prompt)]

    def _prefill(self, prompt: Sequence[int], chunk_tokens: int) -> dict[str, Any]:
        """Compute a prompt, a whole number of chunks; only the last one needs logits."""
        between = BoundStep(self._whole, 1, chunk_tokens, is_shared=False, has_logits=False)
        last = BoundStep(self._whole, 1, chunk_tokens, is_shared=False)
        started = time.perf_counter()
        for start in range(0, len(prompt), chunk_tokens):
            step = last if start + chunk_tokens >= len(prompt) else between
            step.data[:] = prompt[start : start + chunk_tokens]
            step.run(start)
        last.take_largest()
        return {"seconds": time.perf_counter() - started}

    def _first_token(self, prompt: Sequence[int], cut: int, repeats: int, pause_s: float) -> dict[str, Any]:
        """Compute a short prompt in the two shards of a cut, one after the other, each time after a pause."""
        parts = [self._part(0, cut), self._part(cut, self._num_layers)]
        first = BoundStep(parts[0], 1, len(prompt), is_shared=True)
        second = BoundStep(parts[1], 1, len(prompt), is_shared=True, data=first.result)
        seconds = []
        for _ in range(repeats):
            time.sleep(pause_s)
            started = time.perf_counter()
            first.data[:] = prompt
            first.run(0)
            second.run(0)
            second.result.argmax(axis=1)
            seconds.append(time.perf_counter() - started)
        del first, second
        _close(parts)
        return {"seconds": statistics.median(seconds)}

    def _cuts(self, cuts: Sequence[int]) -> dict[str, Any]:
        """The time of both stages of a decode step of half the streams, for every cut: the best of three rounds."""
        times: dict[int, tuple[float, float]] = dict.fromkeys(cuts, (math.inf, math.inf))
        for cut in [*cuts, *cuts, *cuts]:
            first, second = self._stage_time(0, cut), self._stage_time(cut, self._num_layers)
            times[cut] = min(times[cut][0], first), min(times[cut][1], second)
        return {"stage_s": times}

    def _stage_time(self, start: int, stop: int) -> float:
        part = self._part(start, stop)
        rng = np.random.default_rng(0)
        held = part.arena.array[:, :, :CUT_ROWS, :, : CUT_POSITION + CUT_STEPS]
        held[...] = rng.standard_normal(held.shape, np.float32)
        rows = rng.standard_normal((CUT_ROWS, part.shape.hidden_size), np.float32)  # [T, E]
        step = BoundStep(part, CUT_ROWS, 1, is_shared=True, data=None if part.shape.is_first else rows)
        seconds = []
        for index in range(CUT_STEPS):
            started = time.perf_counter()
            step.run(CUT_POSITION + index)
            seconds.append(time.perf_counter() - started)
        del step, held
        _close([part])
        # What the machine does beside it only ever adds.
        return min(seconds)

    def _part(self, start: int, stop: int) -> Part:
        return Part(self._store, self._manifest, LayerRange(start, stop))


def _close(parts: Sequence[Part]) -> None:
    for part in parts:
        part.close()


def main() -> None:
    baseline = Baseline(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        sys.stdout.write(json.dumps(baseline.answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
