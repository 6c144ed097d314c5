"""Shard graphs compute what an independent numpy decoder computes on the same file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from modelstore.block_types import BLOCK_TYPES
from modelstore.graph import build_shard_graph, shard_blobs
from orchestrator.tokenizer import Tokenizer
from shoal.types import LayerRange
from tests.support.english import TEXT
from tests.support.real_model import real_gguf, real_manifest, real_store
from tests.support.reference import ReferenceDecoder, perplexity
from tests.support.shards import TinyModel, make_tiny_model, make_tokens, open_chain, whole_prompt_logits

NUM_TOKENS = 40

# Every kind of weight and embedding that keeps the file's values: (weights, embedding, precision).
EXACT_KINDS = [
    *((name, name, "int8") for name in BLOCK_TYPES),
    ("Q4_1", "Q8_0", "int8"),
    ("Q4_K", "Q6_K", "int8"),
    ("F16", "F16", "float32"),
    ("BF16", "BF16", "float32"),
    ("F32", "Q8_0", "float32"),
]


def make_model(folder: Path, weights: str, embedding: str, precision: str, *, is_tied: bool) -> TinyModel:
    types = {"weight_type": weights, "embedding_type": embedding}
    # Some types have blocks of 256 values.
    return make_tiny_model(folder, precision=precision, **types, is_tied=is_tied, num_layers=2, hidden=256, ffn=256)


def both_logits(model: TinyModel, accuracy_level: int) -> tuple[np.ndarray, np.ndarray]:
    """Ours and the reference's, [T, V]."""
    token_ids = make_tokens(NUM_TOKENS, model.manifest.config.vocab_size)
    chain = open_chain(model.manifest, model.blob_directory, accuracy_level=accuracy_level)
    return chain.all_logits(token_ids), ReferenceDecoder(model.path).logits(token_ids)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("weights", "embedding", "precision"), EXACT_KINDS)
def test_exact_kinds_agree_with_the_reference(
    tmp_path: Path, weights: str, embedding: str, precision: str, is_tied: bool
) -> None:
    ours, reference = both_logits(make_model(tmp_path, weights, embedding, precision, is_tied=is_tied), 0)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("weights", "embedding"),
    [*zip(BLOCK_TYPES, BLOCK_TYPES, strict=True), ("Q8_0", "F32"), ("F16", "F16"), ("BF16", "BF16")],
)
def test_fast_kernels_and_8_bit_rounding_stay_near_the_reference(
    tmp_path: Path, weights: str, embedding: str, is_tied: bool
) -> None:
    ours, reference = both_logits(make_model(tmp_path, weights, embedding, "int8", is_tied=is_tied), 4)
    assert np.sqrt(np.mean((ours - reference) ** 2)) < 0.03 * reference.std()


def test_projections_of_different_kinds_are_not_fused_and_agree(tmp_path: Path) -> None:
    mixed = {"blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_up.weight": "Q4_0", "blk.1.ffn_down.weight": "Q8_0"}
    model = make_tiny_model(tmp_path, num_layers=2, weight_type="Q4_1", tensor_types=mixed)
    assert {"attn_q", "attn_k", "attn_v", "ffn_gate_up"} <= set(model.manifest.layers[0].linears)
    assert {"attn_qkv", "ffn_gate", "ffn_up"} <= set(model.manifest.layers[1].linears)
    ours, reference = both_logits(model, 0)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (1, 1)])
def test_all_ways_of_sharing_kv_heads_agree(tmp_path: Path, num_heads: int, num_kv_heads: int) -> None:
    ours, reference = both_logits(make_tiny_model(tmp_path, num_heads=num_heads, num_kv_heads=num_kv_heads), 0)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


def test_a_chunked_prompt_agrees_at_its_end(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, rope_base=500.0)
    token_ids = make_tokens(100, model.manifest.config.vocab_size)
    chain = open_chain(model.manifest, model.blob_directory, accuracy_level=0)
    reference = ReferenceDecoder(model.path).logits(token_ids)[-1]
    np.testing.assert_allclose(chain.prefill(token_ids, chunk=32), reference, rtol=1e-4, atol=1e-4)


def test_a_shard_needs_the_blobs_of_its_layers_and_ends_only(tmp_path: Path) -> None:
    tied = make_tiny_model(tmp_path / "tied", num_layers=3, is_tied=True).manifest
    assert shard_blobs(tied, LayerRange(0, 1)) == (tied.embedding, tied.rope, tied.layers[0])
    assert shard_blobs(tied, LayerRange(1, 2)) == (tied.rope, tied.layers[1])
    assert shard_blobs(tied, LayerRange(2, 3)) == (tied.embedding, tied.rope, tied.layers[2], tied.head)
    untied = make_tiny_model(tmp_path / "untied", num_layers=3, is_tied=False).manifest
    assert shard_blobs(untied, LayerRange(2, 3)) == (untied.rope, untied.layers[2], untied.head)


def test_a_graph_is_small_and_the_same_every_time(tmp_path: Path) -> None:
    manifest = make_tiny_model(tmp_path).manifest
    graph = build_shard_graph(manifest, LayerRange(0, 3))
    assert graph == build_shard_graph(manifest, LayerRange(0, 3))
    assert len(graph) < 32_000


@pytest.mark.e2e
def test_the_real_model_is_as_good_as_its_dequantised_reference() -> None:
    manifest, decoder = real_manifest(), ReferenceDecoder(real_gguf())
    encode = Tokenizer(manifest.tokenizer).encode
    ratios = []
    # Rounding activations leaves a standard error of 0.3 % on 512 tokens.
    for text in (TEXT, files("evaluation").joinpath("calibration.txt").read_text(encoding="utf-8")):
        token_ids = encode(text, add_special=False)[:512]
        assert len(token_ids) == 512
        ours = perplexity(whole_prompt_logits(manifest, real_store().root / "blobs", token_ids), token_ids)
        ratios.append(ours / perplexity(decoder.logits(token_ids), token_ids))
    assert 0.99 < (ratios[0] * ratios[1]) ** 0.5 < 1.01
