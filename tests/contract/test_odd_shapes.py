"""Models whose widths are no whole number of blocks: rounded as they are, with rows filled up, and computed exactly so."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelstore.requantize import INT4, INT4_ASYM, INT8, Floats, restored, round_rows
from tests.support.judged_models import FLOATS, Change, make_changed
from tests.support.shards import TinyModel, make_tiny_model, make_tokens, open_chain

# Neither the hidden size, nor the feed-forward widths, nor the vocabulary is a multiple of the block of 32.
ODD: dict[str, Any] = {
    "hidden": 48,
    "num_heads": 3,
    "num_kv_heads": 1,
    "ffn": (40, 33),
    "vocab": 301,
    "num_layers": 2,
}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def rounded(values: Floats, precision: str) -> Floats:
    return np.ascontiguousarray(restored(round_rows(values, precision), values.shape[1]))


def logits_of(model: TinyModel) -> Floats:
    """After each of some tokens, activations in float32."""
    chain = open_chain(model.manifest, model.blob_directory, cuts=(1,), accuracy_level=0)
    logits = chain.all_logits(make_tokens(12, 280))
    chain.close()
    return logits


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("precision", [INT8, INT4, INT4_ASYM])
def test_a_model_of_odd_widths_computes_what_its_rounded_weights_say(
    tmp_path: Path, precision: str, is_tied: bool
) -> None:
    layers = [f"blk.{index}.{part}.weight" for index in range(2) for part in MATRICES]
    ends = ["token_embd.weight"] if is_tied else ["token_embd.weight", "output.weight"]
    changes: dict[str, Change] = {name: partial(rounded, precision=precision) for name in layers}
    changes |= {name: partial(rounded, precision=INT8) for name in ends}
    reference = make_changed(tmp_path / "reference", changes, **{**ODD, "is_tied": is_tied})
    packed = make_tiny_model(tmp_path / "packed", precision=precision, **{**FLOATS, **ODD, "is_tied": is_tied})
    assert {layer.linears["ffn_down"].kind for layer in packed.manifest.layers} == {
        "int8" if precision == INT8 else "int4"
    }
    np.testing.assert_allclose(logits_of(packed), logits_of(reference), atol=2e-4, rtol=2e-4)


def test_weights_of_odd_widths_run_on_the_fast_kernels_too(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, precision=INT8, **{**FLOATS, **ODD})
    chain = open_chain(model.manifest, model.blob_directory)
    fast = chain.all_logits(make_tokens(12, 280))
    chain.close()
    exact = logits_of(model)
    assert np.linalg.norm(fast - exact) < 0.05 * np.linalg.norm(exact)
