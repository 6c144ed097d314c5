"""Every architecture, read from GGUF files and from Hugging Face's folders, computes what an independent decoder does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import BadModelFile
from tests.support.architectures import VARIANTS, options_of
from tests.support.reference import ReferenceDecoder
from tests.support.shards import TinyModel, make_tiny_model, make_tokens, open_chain

# More than the windows of tiny models.
NUM_TOKENS = 50


def both_logits(model: TinyModel, accuracy_level: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ours and the reference's, [T, V]."""
    token_ids = make_tokens(NUM_TOKENS, model.manifest.config.vocab_size)
    chain = open_chain(model.manifest, model.blob_directory, accuracy_level=accuracy_level)
    return chain.all_logits(token_ids), ReferenceDecoder(model.path).logits(token_ids)


def make_float_model(folder: Path, layout: str, **options: Any) -> TinyModel:
    types = {"weight_type": "F32"} if layout == "hf" else {"weight_type": "F32", "embedding_type": "F32"}
    return make_tiny_model(folder, layout=layout, precision="float32", **{**types, **options})


def require_equal(model: TinyModel) -> None:
    ours, reference = both_logits(model)
    np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["gguf", "hf"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_floats_agree_with_the_reference(tmp_path: Path, variant: str, layout: str) -> None:
    require_equal(make_float_model(tmp_path, layout, **options_of(variant)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_layouts_of_a_model_become_the_same_blobs(tmp_path: Path, variant: str) -> None:
    gguf, hf = (
        make_float_model(tmp_path / layout, layout, **options_of(variant)).manifest for layout in ("gguf", "hf")
    )
    assert [blob.digest for blob in gguf.blobs] == [blob.digest for blob in hf.blobs]


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_agree_with_the_reference(tmp_path: Path, variant: str, weight_type: str) -> None:
    require_equal(make_tiny_model(tmp_path, weight_type=weight_type, **options_of(variant)))


@pytest.mark.parametrize("weight_type", ["Q4_0", "Q4_1", "F16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fast_kernels_stay_near_the_reference(tmp_path: Path, variant: str, weight_type: str) -> None:
    ours, reference = both_logits(make_tiny_model(tmp_path, weight_type=weight_type, **options_of(variant)), 4)
    assert np.sqrt(np.mean((ours - reference) ** 2)) < 0.05 * reference.std()


@pytest.mark.parametrize("weight_type", ["F16", "BF16"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma3"])
def test_folders_of_half_floats_in_several_files_agree_with_the_reference(
    tmp_path: Path, variant: str, weight_type: str
) -> None:
    require_equal(
        make_float_model(tmp_path, "hf", **{**options_of(variant), "weight_type": weight_type, "num_files": 3})
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ],
    ids=lambda scaling: str(scaling["rope_type"]),
)
def test_scaled_rotary_embeddings_agree_with_the_reference(tmp_path: Path, scaling: dict[str, Any]) -> None:
    require_equal(make_float_model(tmp_path, "hf", head_dim=32, config={"rope_scaling": scaling}))


def test_a_gguf_file_says_linear_scaling_by_its_factor(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    require_equal(make_float_model(tmp_path, "gguf", extra_keys=keys))


def test_a_gguf_files_rotary_factors_are_divided_by(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)
    require_equal(make_float_model(tmp_path, "gguf", extra_tensors={"rope_freqs.weight": factors}))


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_rotary_factors_that_cannot_be_divided_by_are_refused(tmp_path: Path, factor: float) -> None:
    factors = np.array([1, 1, 1, 1, 1, 1, 1, factor], np.float32)
    with pytest.raises(BadModelFile, match=r"rope_freqs\.weight has numbers"):
        make_float_model(tmp_path, "gguf", extra_tensors={"rope_freqs.weight": factors})


def test_linear_scaling_leaves_gemmas_layers_with_a_window_alone(tmp_path: Path) -> None:
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    require_equal(make_float_model(tmp_path, "hf", **options_of("gemma3"), config=scaling))


def test_soft_caps_and_scales_that_a_config_states_are_kept(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 7}
    require_equal(make_float_model(tmp_path, "hf", **options_of("gemma3"), config=caps))


def test_the_upper_layers_of_qwen_may_have_a_window(tmp_path: Path) -> None:
    config = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
    model = make_float_model(tmp_path, "hf", architecture="qwen2", num_layers=4, config=config)
    assert model.manifest.config.windows == (0, 0, 12, 12)
    require_equal(model)


def test_layers_are_of_the_types_that_a_config_lists(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    options = {**options_of("gemma3"), "num_layers": 4}
    model = make_float_model(tmp_path, "hf", **options, config={"layer_types": types})
    assert model.manifest.config.windows == (0, 20, 20, 0)
    require_equal(model)


def test_newer_configs_have_rotary_numbers_of_each_kind_of_layer(tmp_path: Path) -> None:
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }
    config = make_float_model(tmp_path, "hf", **options_of("gemma3"), config={"rope_parameters": both}).manifest.config
    assert (config.rope_base, config.local_rope_base) == (1e6, 5000.0)
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 8.0)


def test_a_tied_head_that_is_stored_all_the_same_is_passed_over(tmp_path: Path) -> None:
    head = np.zeros((288, 64), np.float32)
    model = make_float_model(tmp_path, "hf", extra_tensors={"lm_head.weight": head})
    assert model.manifest.head.linears == {}
