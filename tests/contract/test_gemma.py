"""The second real model: as good as its file says, and the same bits wherever its layers are cut, whoever shares a batch."""

from __future__ import annotations

import numpy as np
import pytest

from modelstore.manifest import Manifest
from orchestrator.tokenizer import Tokenizer
from tests.support.english import TEXT
from tests.support.guests import Guest, continue_greedily, run_together
from tests.support.real_model import GEMMA, real_gguf, real_manifest, real_store, require_gemma
from tests.support.reference import ReferenceDecoder, perplexity
from tests.support.shards import ShardChain, open_chain, whole_prompt_logits

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# As long as the window of its local layers, which the prompt must outgrow to tell them from the others.
WINDOW = 512


@pytest.fixture(scope="module")
def gemma() -> Manifest:
    require_gemma()
    return real_manifest(GEMMA)


def text_tokens(manifest: Manifest, count: int) -> list[int]:
    tokenizer = Tokenizer(manifest.tokenizer)
    return [*tokenizer.encode(TEXT, add_special=True), *tokenizer.encode(TEXT, add_special=False)][:count]


def open_gemma(manifest: Manifest, *cuts: int, num_slots: int = 4) -> ShardChain:
    return open_chain(manifest, real_store().root / "blobs", cuts, num_slots=num_slots, slot_tokens=640)


def test_gemma_is_as_good_as_its_dequantised_reference(gemma: Manifest) -> None:
    token_ids = text_tokens(gemma, 512)
    ours = perplexity(whole_prompt_logits(gemma, real_store().root / "blobs", token_ids), token_ids)
    reference = perplexity(ReferenceDecoder(real_gguf(GEMMA)).logits(token_ids), token_ids)
    assert 0.99 * reference < ours < 1.01 * reference


def test_gemma_cut_in_three_computes_what_the_whole_does_beyond_its_window(gemma: Manifest) -> None:
    prompt = text_tokens(gemma, WINDOW + 40)
    expected = continue_greedily(open_gemma(gemma), prompt, 6, chunk=64)
    cut = open_gemma(gemma, 5, 11)
    assert np.array_equal(continue_greedily(cut, prompt, 6, chunk=48), expected)
    assert np.array_equal(continue_greedily(cut, prompt, 6, slot=2, chunk=23), expected)


def test_a_sequence_alone_equals_itself_among_others_on_gemma(gemma: Manifest) -> None:
    text = text_tokens(gemma, 400)
    guests = [
        Guest(slot=5, token_ids=text[:50], arrives=0, chunk=20),
        Guest(slot=1, token_ids=text[100:164], arrives=2, chunk=32),
        Guest(slot=2, token_ids=text[200:230], arrives=4, chunk=16),
    ]
    run_together(open_gemma(gemma, num_slots=8), guests, steps=10)
    for guest in guests:
        alone = continue_greedily(open_gemma(gemma, 6), guest.token_ids, len(guest.logits))
        assert np.array_equal(np.stack(guest.logits), alone), f"the guest in slot {guest.slot}"
