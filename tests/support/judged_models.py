"""Tiny models with one layer changed, and texts that they would write themselves, for the tests of what judges models.

A random model finds every text as unlikely as any other, so that damage may as well help: a text drawn from the model is
one that every change makes less likely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.text import Text
from modelstore.formats import open_model
from modelstore.quantize import to_float32
from tests.support.shards import Floats, TinyModel, make_tiny_model, open_chain
from tests.support.tiny_gguf import write_tiny_gguf

# A head of its own, so that a token does not merely predict itself; F32, so that there is something to round.
FLOATS: dict[str, Any] = {"weight_type": "F32", "embedding_type": "F32", "is_tied": False}

Change = Callable[[Floats], Floats]


def make_changed(
    folder: Path, changes: Mapping[str, Change], *, precision: str = "float32", **options: Any
) -> TinyModel:
    """A tiny float model, some of whose tensors are what a function makes of them."""
    options = {**FLOATS, **options}
    folder.mkdir(parents=True)
    plain = write_tiny_gguf(folder / "plain.gguf", **options)
    with open_model(plain) as model:
        changed = {name: change(to_float32(model.tensors[name])) for name, change in changes.items()}
    return make_tiny_model(folder, precision=precision, omit_tensors=tuple(changed), extra_tensors=changed, **options)


def drawn_text(model: TinyModel, num_windows: int, window_tokens: int, seed: int = 0) -> Text:
    """Windows of tokens drawn from what a model predicts, each from another first token."""
    rng = np.random.default_rng(seed)
    chain = open_chain(model.manifest, model.blob_directory, accuracy_level=0, slot_tokens=window_tokens)
    windows = []
    for _ in range(num_windows):
        tokens = [int(rng.integers(3, 250))]
        while len(tokens) < window_tokens:
            tokens.append(_draw(chain.decode(tokens[-1], len(tokens) - 1), rng))
        windows.append(np.array(tokens, np.int64))
    chain.close()
    return Text(tuple(windows))


def _draw(logits: Floats, rng: np.random.Generator) -> int:
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return int(rng.choice(len(shares), p=shares / shares.sum()))
