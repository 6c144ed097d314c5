"""The real SmolLM2 tokenizer: fixed ids, the independent implementation, and streams over its own tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelstore.manifest import Manifest
from orchestrator.text import TextStream
from orchestrator.tokenizer import Tokenizer
from tests.support import bpe_reference

pytestmark = pytest.mark.e2e
# A busy machine is no fault of the code; the reference reads the whole vocabulary for each text.
unhurried = settings(deadline=None, max_examples=25)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_ids.json").read_text())
# Without "<" no control token is spelt out; characters this Python does not know may be letters in the library.
KNOWN_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn"), exclude_characters="<"))


@pytest.fixture(scope="module")
def tokenizer(real_model: Manifest) -> Tokenizer:
    return Tokenizer(real_model.tokenizer)


@pytest.mark.parametrize("golden", GOLDEN["texts"], ids=lambda golden: ascii(golden["text"][:12]))
def test_the_ids_of_difficult_texts_stay(tokenizer: Tokenizer, golden: dict[str, Any]) -> None:
    token_ids = tokenizer.encode(golden["text"], add_special=True)
    assert token_ids == golden["ids"]
    assert tokenizer.decode(token_ids) == golden["text"]


@unhurried
@given(text=KNOWN_TEXT)
def test_ids_are_those_of_an_independent_implementation(real_model: Manifest, tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text, add_special=True) == bpe_reference.encode(real_model.tokenizer, text)


@unhurried
@given(token_ids=st.lists(st.integers(0, 49151), max_size=30), stop=st.lists(st.text("ab e", min_size=1), max_size=2))
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, token_ids: list[int], stop: list[str]) -> None:
    stream = TextStream(tokenizer, stop)
    text = "".join(stream.push(token_id).text for token_id in token_ids) + stream.finish()
    whole = tokenizer.decode(token_ids)
    assert whole.startswith(text)
    assert not any(candidate in text for candidate in stop)
    assert text == whole or any(whole.startswith(candidate, len(text)) for candidate in stop)


def test_a_conversation_has_the_ids_of_the_models_template(tokenizer: Tokenizer) -> None:
    conversation = GOLDEN["conversation"]
    assert tokenizer.encode_chat(conversation["messages"]) == conversation["ids"]


def test_the_template_adds_its_own_system_message(tokenizer: Tokenizer) -> None:
    spelled = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.encode_chat(messages) == tokenizer.encode(spelled, add_special=False)


def test_an_answer_ends_at_the_models_two_ends(tokenizer: Tokenizer) -> None:
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.vocab_size == 49152


def test_a_session_has_the_ids_of_the_whole_conversation(tokenizer: Tokenizer) -> None:
    turns = [("Why is the sky blue?", "Because of <scattering>."), ("And at dusk?", " Red.\n")]
    messages: list[dict[str, str]] = []
    session: list[int] = []
    for question, answer in turns:
        new = {"role": "user", "content": question}
        session += tokenizer.encode_turn([new]) if session else tokenizer.encode_chat([new])
        session += tokenizer.encode(answer, add_special=False)
        messages += [new, {"role": "assistant", "content": answer}]

    last = {"role": "user", "content": "Thanks"}
    assert session + tokenizer.encode_turn([last]) == tokenizer.encode_chat([*messages, last])
