"""Hugging Face folders with anything in place of what should be there: an error of ours, or a model, never a crash."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelstore.huggingface import HfModel
from modelstore.packing import Packer
from modelstore.requantize import Precisions
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.tiny_hf import write_tiny_hf
from tests.support.tiny_shapes import ARCHITECTURES

JSON_FILES = ("config.json", "model.safetensors.index.json", "tokenizer_config.json", "generation_config.json")
KEYS = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings",
    "bos_token_id", "hidden_act", "hidden_activation", "rope_local_base_freq", "metadata", "eos_token", "add_eos_token",
    "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "head_dim", "attention_bias", "mlp_bias",
    "use_sliding_window", "max_window_layers", "sliding_window_pattern", "query_pre_attn_scalar", "quantization_config",
    "final_logit_softcapping", "attn_logit_softcapping", "partial_rotary_factor", "eos_token_id", "chat_template",
    "added_tokens_decoder", "add_bos_token", "bos_token", "weight_map",
)  # fmt: skip
numbers = st.one_of(st.integers(-3, 300), st.integers(-(2**70), 2**70), st.floats())
words = st.one_of(
    st.text(max_size=8), st.sampled_from(["llama3", "yarn", "linear", "factor", "rope_type", "gelu", "../x"])
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)


class Sound:
    """A folder's files as they were written. Not plain bytes: hypothesis would print them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}

    def damage(self, name: str, content: bytes) -> None:
        """Make one file anew, and all others sound."""
        for sound, bytes_of_it in self.files.items():
            (self.folder / sound).write_bytes(content if sound == name else bytes_of_it)
        self.open_and_plan()

    def open_and_plan(self) -> None:
        """Do all that an import does before it packs."""
        with suppress(BadModelFile, UnsupportedModel):
            Packer(HfModel(self.folder), Precisions()).plans()


@pytest.fixture(scope="module", params=ARCHITECTURES)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    path = tmp_path_factory.mktemp("fuzz") / "tiny"
    return Sound(write_tiny_hf(path, architecture=request.param, num_layers=1, num_files=2, window=16, is_tied=False))


@settings(max_examples=60)
@given(
    name=st.sampled_from(JSON_FILES),
    changes=st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=3),
)
def test_any_value_of_any_key_is_refused_or_taken(sound: Sound, name: str, changes: dict[str, Any]) -> None:
    sound.damage(name, json.dumps(json.loads(sound.files[name]) | changes).encode())


# Headers are at the beginning.
@settings(max_examples=60)
@given(index=st.integers(0, 7), position=st.integers(0, 4000), value=st.integers(0, 255))
def test_any_byte_of_any_file_may_be_another(sound: Sound, index: int, position: int, value: int) -> None:
    name = list(sound.files)[index % len(sound.files)]
    content = bytearray(sound.files[name])
    content[position % len(content)] = value
    sound.damage(name, bytes(content))


@settings(max_examples=60)
@given(index=st.integers(0, 7), share=st.floats(0, 1))
def test_any_file_may_end_anywhere(sound: Sound, index: int, share: float) -> None:
    name = list(sound.files)[index % len(sound.files)]
    sound.damage(name, sound.files[name][: int(share * len(sound.files[name]))])
