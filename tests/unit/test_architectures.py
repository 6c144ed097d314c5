"""What headers become, as published models state them, and that what cannot be computed is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from modelstore.architectures import find_gguf, find_hf
from modelstore.manifest import ModelConfig, RopeScaling
from modelstore.rope import frequencies
from shoal.errors import BadModelFile, UnsupportedModel

TINY_HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
TINY_GGUF: dict[str, Any] = {
    "block_count": 4,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "feed_forward_length": 96,
    "context_length": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
}


def read_hf(name: str, rows: int = 288, hidden: int = 64, **entries: Any) -> ModelConfig:
    config = {"architectures": [name], **TINY_HF, **entries}
    shapes = {"token_embd.weight": (rows, hidden)}
    return find_hf(config).config_of_hf(config, shapes)


def read_gguf(name: str, rows: int = 288, hidden: int = 64, **entries: Any) -> ModelConfig:
    stated = {f"{name}.{key.replace('__', '.')}": value for key, value in {**TINY_GGUF, **entries}.items()}
    keys = {"general.architecture": name, **stated}
    return find_gguf(keys).config_of_gguf(keys, {"token_embd.weight": (rows, hidden)})


def test_llama_3_2_scales_its_rotary_embedding() -> None:
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = read_hf("LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling, tie_word_embeddings=True)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    assert (config.rope_base, config.is_head_tied) == (500000.0, True)


@pytest.mark.parametrize(
    ("entries", "window"), [({"sliding_window": 4096}, 4096), ({"sliding_window": None}, 0), ({}, 4096)]
)
def test_mistral_has_the_window_that_its_config_states_or_leaves_to_its_class(
    entries: Mapping[str, Any], window: int
) -> None:
    config = read_hf("MistralForCausalLM", model_type="mistral", **entries)
    assert config.windows == (window,) * 4
    assert config.architecture == "llama"


def test_qwen_2_5_does_not_use_the_window_that_its_config_names() -> None:
    config = read_hf("Qwen2ForCausalLM", sliding_window=32768, max_window_layers=2, use_sliding_window=False)
    assert config.windows == (0, 0, 0, 0)


def test_heads_of_qwen_3_are_wider_than_its_hidden_rows_shared_among_them() -> None:
    assert read_hf("Qwen3ForCausalLM", head_dim=32).head_dim == 32
    assert read_hf("Qwen3ForCausalLM").head_dim == 128


def test_gemma_3_is_the_same_in_both_formats() -> None:
    gguf = read_gguf(
        "gemma3",
        block_count=18,
        feed_forward_length=2048,
        attention__head_count_kv=1,
        attention__key_length=256,
        attention__value_length=256,
        attention__sliding_window=512,
        rope__freq_base=1000000.0,
    )
    hf = read_hf(
        "Gemma3ForCausalLM",
        num_hidden_layers=18,
        intermediate_size=2048,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        _sliding_window_pattern=6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        hidden_activation="gelu_pytorch_tanh",
    )
    assert gguf == hf
    assert [index for index, window in enumerate(hf.windows) if not window] == [5, 11, 17]
    assert (hf.embedding_scale, hf.activation, hf.local_rope_base) == (8.0, "gelu_tanh", 10000.0)


def test_gemma_3_of_27_billion_scales_scores_by_what_its_config_says_and_its_layers_tell() -> None:
    options: dict[str, Any] = {"hidden": 5376, "rows": 10}
    gguf = read_gguf(
        "gemma3", **options, block_count=62, embedding_length=5376, attention__head_count=32, attention__key_length=128
    )
    hf = read_hf(
        "Gemma3ForCausalLM",
        **options,
        hidden_size=5376,
        num_attention_heads=32,
        query_pre_attn_scalar=168,
        head_dim=128,
    )
    assert gguf.attention_scale == hf.attention_scale == pytest.approx(168**-0.5)


def test_gemma_3_may_state_how_many_layers_see_a_window_and_the_rotary_base_of_those() -> None:
    hf = read_hf("Gemma3ForCausalLM", _sliding_window_pattern=2, rope_local_base_freq=5000.0)
    gguf = read_gguf(
        "gemma3",
        attention__key_length=256,
        attention__value_length=256,
        attention__sliding_window_pattern=2,
        rope__freq_base_swa=5000.0,
    )
    assert hf.windows == gguf.windows == (4096, 0, 4096, 0)
    assert hf.local_rope_base == gguf.local_rope_base == 5000.0


def test_newer_configs_have_rotary_base_and_scaling_in_one_place() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    config = read_hf("LlamaForCausalLM", rope_parameters=rope)
    assert (config.rope_base, config.rope_scaling) == (500000.0, RopeScaling("linear", 2.0))


def test_newer_configs_of_gemma_3_have_them_for_each_kind_of_layer() -> None:
    whole = {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}
    config = read_hf("Gemma3ForCausalLM", rope_parameters={"full_attention": whole})
    assert (config.rope_base, config.rope_scaling) == (2e6, RopeScaling("linear", 8.0))


@pytest.mark.parametrize(("stated", "magnitude"), [({}, 0.1 * math.log(4.0) + 1), ({"attention_factor": 1.5}, 1.5)])
def test_yarn_sharpens_attention_as_stated_or_as_its_paper_says(stated: dict[str, float], magnitude: float) -> None:
    config = read_hf("LlamaForCausalLM", rope_scaling={"rope_type": "yarn", "factor": 4.0, **stated})
    assert config.rope_scaling.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize(
    ("stated", "scaling"),
    [({}, RopeScaling("linear", 4.0)), ({"rope__scaling__type": "none"}, RopeScaling())],
    ids=["without a type", "of type none"],
)
def test_a_gguf_files_factor_of_no_type_means_linear_scaling(stated: dict[str, Any], scaling: RopeScaling) -> None:
    assert read_gguf("llama", rope__scaling__factor=4.0, **stated).rope_scaling == scaling


def test_layers_may_have_feed_forward_parts_of_different_width() -> None:
    widths = np.array([96, 64, 32, 96], np.int32)
    assert read_gguf("llama", feed_forward_length=widths).ffn_sizes == (96, 64, 32, 96)


def test_counts_that_are_listed_by_layer_but_the_same_are_one_count() -> None:
    assert read_gguf("llama", attention__head_count_kv=np.array([2, 2, 2, 2], np.int32)).num_kv_heads == 2


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"expert_count": 8}, "mixtures of experts"),
        ({"attention__head_count_kv": np.array([2, 1, 2, 2], np.int32)}, "head_count_kv differs between layers"),
        ({"attention__key_length": 24}, "heads of 24 values"),
        ({"attention__value_length": 32}, "value_length is 32"),
        ({"rope__dimension_count": 8}, "dimension_count is 8"),
        ({"rope__scaling.type": "longrope"}, "scaling.type is longrope"),
    ],
)
def test_a_gguf_file_that_asks_for_other_arithmetic_is_refused(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_gguf("llama", **entries)


@pytest.mark.parametrize(
    ("name", "entries", "named"),
    [
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act is gelu"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is dynamic"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ("Qwen3ForCausalLM", {"head_dim": 24}, "heads of 24 values"),
        (
            "Qwen3ForCausalLM",
            {"head_dim": 192},
            "over heads of 192 values is not supported, only of up to 128 or of 256",
        ),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "soft cap over heads of 256"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ],
)
def test_a_config_that_asks_for_other_arithmetic_is_refused(name: str, entries: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_hf(name, **entries)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers should be a int"),
        ({"num_hidden_layers": True}, "num_hidden_layers should be a int"),
        ({"num_hidden_layers": 1 << 60}, "num_hidden_layers is"),
        ({"num_attention_heads": 3}, "not a multiple of 2 KV heads"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": 1.0}, "rotary base is 1.0"),
        ({"rope_theta": 1e300}, "rope_theta is 1e.300"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "rope_scaling, factor is 1e-300"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": math.inf}}, "attention_factor is inf"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": -1.0}}, "attention_factor is -1.0"),
        ({"max_position_embeddings": 1}, "the context is 1 token"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "high_freq_factor is 4.0",
        ),
        ({"intermediate_size": [96, 96]}, "4 whole numbers"),
        ({"intermediate_size": [96, 96, 0, 96]}, "intermediate_size is 0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling, factor is missing"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_entry(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(BadModelFile, match=named):
        read_hf("LlamaForCausalLM", **entries)


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnsupportedModel, match="mamba is not supported; supported are llama, qwen2, qwen3, gemma3"):
        find_gguf({"general.architecture": "mamba"})
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM is not supported; supported are LlamaForCausalLM"):
        find_hf({"architectures": ["MambaForCausalLM"]})


def test_a_stretched_context_slows_the_slow_pairs_and_leaves_the_fast_ones() -> None:
    plain = frequencies(64, 500000.0, RopeScaling())
    scaled = frequencies(64, 500000.0, RopeScaling("llama3", 32.0, 8192, 1.0, 4.0))
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 32)
    assert np.all(np.diff(scaled) < 0)
