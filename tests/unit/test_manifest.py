"""Manifests as JSON, and what of a tokenizer an import may replace."""

from dataclasses import replace
from pathlib import Path

import pytest

from modelstore.manifest import Manifest, Splitting, TokenizerData, from_json, to_json
from modelstore.store import ModelStore
from tests.support.pieces_reference import make_pieces
from tests.support.tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf
from tests.support.vocabulary import make_tokenizer_data


@pytest.fixture
def stored(tmp_path: Path) -> Manifest:
    return ModelStore(tmp_path / "home").import_model(write_tiny_gguf(tmp_path / "tiny.gguf"), "tiny")


@pytest.mark.parametrize(
    "tokenizer",
    [
        make_tokenizer_data(),
        make_tokenizer_data(splitting=Splitting((r"\d", "a"), whole_words=True), end_ids=(1,), lstrip_ids=(2,)),
        make_pieces(space_prefix="each", has_double_prefix=False, rstrip_ids=(1, 2), add_eos=True),
    ],
    ids=["plain", "splitting", "pieces"],
)
def test_every_tokenizer_comes_back_from_json(stored: Manifest, tokenizer: TokenizerData) -> None:
    manifest = replace(stored, tokenizer=tokenizer)
    assert from_json(to_json(manifest)) == manifest


def test_a_model_keeps_its_template_unless_the_import_has_another(stored: Manifest, tmp_path: Path) -> None:
    assert stored.tokenizer.chat_template == CHAT_TEMPLATE
    store = ModelStore(tmp_path / "home")
    manifest = store.import_model(tmp_path / "tiny.gguf", "other", chat_template="{{ bos_token }}")
    assert store.open("other").tokenizer.chat_template == "{{ bos_token }}"
    assert manifest.digest != stored.digest
