"""The promise of batch invariance, for every architecture: cuts, company, chunks and slots do not change a bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.architectures import VARIANTS, options_of
from tests.support.guests import Guest, continue_greedily, run_together
from tests.support.shards import ShardChain, TinyModel, make_tiny_model, make_tokens, open_chain

PROMPT_TOKENS = 90
KINDS: dict[str, dict[str, Any]] = {
    "Q4_1": {"weight_type": "Q4_1"},
    "int8": {"weight_type": "F16", "layout": "hf"},
    "float32": {"weight_type": "F32", "layout": "hf", "precision": "float32"},
}


@pytest.fixture(scope="module", params=[(variant, kind) for variant in VARIANTS for kind in KINDS], ids="-".join)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TinyModel:
    variant, kind = request.param
    return make_tiny_model(tmp_path_factory.mktemp("model"), **options_of(variant), **KINDS[kind])


def open_model(model: TinyModel, *cuts: int, num_slots: int = 4) -> ShardChain:
    return open_chain(model.manifest, model.blob_directory, cuts, num_slots=num_slots)


def test_any_cut_computes_what_the_whole_does(model: TinyModel) -> None:
    prompt = make_tokens(PROMPT_TOKENS, model.manifest.config.vocab_size)
    whole = continue_greedily(open_model(model), prompt, 5)
    for cuts in ((1,), (2, 3), (1, 2, 3)):
        assert np.array_equal(continue_greedily(open_model(model, *cuts), prompt, 5), whole), f"cut before {cuts}"


def test_chunks_and_slots_do_not_matter(model: TinyModel) -> None:
    prompt = make_tokens(PROMPT_TOKENS, model.manifest.config.vocab_size)
    chain = open_model(model)
    whole = continue_greedily(chain, prompt, 3, chunk=PROMPT_TOKENS)
    for chunk, slot in ((2, 0), (7, 3), (32, 1), (64, 2)):
        found = continue_greedily(chain, prompt, 3, chunk=chunk, slot=slot)
        assert np.array_equal(found, whole), f"chunks of {chunk} in slot {slot}"


def test_a_sequence_alone_equals_itself_among_others(model: TinyModel) -> None:
    vocab = model.manifest.config.vocab_size
    guests = [
        Guest(slot, make_tokens(length, vocab, seed=length), arrives, chunk)
        for slot, length, arrives, chunk in ((3, 23, 0, 5), (0, 70, 3, 64), (6, 2, 4, 8), (7, 44, 1, 12), (2, 1, 6, 4))
    ]
    run_together(open_model(model, num_slots=8), guests, steps=14)
    for guest in guests:
        alone = continue_greedily(open_model(model, 2), guest.token_ids, len(guest.logits))
        assert np.array_equal(np.stack(guest.logits), alone), f"the guest in slot {guest.slot}"


def test_a_solo_row_is_the_same_whatever_the_other_slots_hold(model: TinyModel) -> None:
    vocab = model.manifest.config.vocab_size
    quiet, busy, prompt = open_model(model), open_model(model, 1, 3), make_tokens(40, vocab)
    for slot in (0, 2, 3):
        busy.prefill(make_tokens(60, vocab, seed=slot), slot=slot)
    logits = [chain.prefill(prompt, slot=slot) for chain, slot in ((quiet, 0), (busy, 1))]
    for position in range(40, 44):
        token = int(logits[0].argmax())
        logits = [chain.decode(token, position, slot=slot, solo=True) for chain, slot in ((quiet, 0), (busy, 1))]
        assert np.array_equal(logits[0], logits[1])
