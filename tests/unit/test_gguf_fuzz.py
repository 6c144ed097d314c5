"""Whatever a GGUF file says, it opens or is refused: mutations of a sound file, of its bytes and of its fields."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelstore.architectures import ARCHITECTURES
from modelstore.gguf import GgufFile
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.bad_gguf import HUGE, SOUND, import_content
from tests.support.raw_gguf import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    TYPE_IDS,
    RawTensor,
    array,
    f32,
    sound,
    string,
    text,
    u32,
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The sound file with some bytes changed, cut out, put in or cut off."""
    content = bytearray(SOUND)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        match draw(st.sampled_from(("byte", "bit", "number", "insert", "remove", "repeat", "end"))):
            case "byte":
                content[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "bit":
                content[at : at + 1] = bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) if content else b""
            case "number":
                content[at : at + 8] = draw(st.sampled_from((b"\0" * 8, b"\xff" * 8, struct.pack("<Q", HUGE))))
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=40))
            case "remove":
                del content[at : at + draw(st.integers(1, 40))]
            case "repeat":
                content[at:at] = content[at : at + draw(st.integers(1, 200))]
            case "end":
                del content[at:]
    return bytes(content)


raw_values = st.one_of(
    st.tuples(st.integers(0, 14), st.binary(max_size=24)),
    st.integers(0, 2**32 - 1).map(u32),
    st.floats(width=32).map(f32),
    st.text(max_size=8).map(text),
    st.sampled_from(("linear", "llama3", "yarn", "longrope", "none", "default", "smollm")).map(text),
    st.sampled_from((0, 1, 2, 16, 32, 64)).map(u32),
    st.integers(0, 2**64 - 1).map(lambda count: (ARRAY, array(STRING, [string("x")], count))),
    st.lists(st.text(max_size=4), max_size=5).map(
        lambda items: (ARRAY, array(STRING, [string(item) for item in items]))
    ),
    st.lists(st.integers(-4, 40), max_size=5).map(
        lambda items: (ARRAY, array(I32, [struct.pack("<i", item) for item in items]))
    ),
    st.lists(st.floats(width=32), max_size=5).map(
        lambda items: (ARRAY, array(F32, [struct.pack("<f", item) for item in items]))
    ),
    st.booleans().map(lambda flag: (BOOL, bytes([flag]))),
)
sizes = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from((0, 1, 2, 4, 16, 31, 32, 33, 64, 256, HUGE)))


# Keys that the smallest model does without; the first ones behind the architecture's name.
OPTIONAL_KEYS = (
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("attention.key_length", "attention.value_length", "attention.sliding_window", "attention.sliding_window_pattern"),
    *("attention.head_count", "feed_forward_length", "attn_logit_softcapping", "final_logit_softcapping"),
)
TOKENIZER_KEYS = (
    "scores",
    "pre",
    "merges",
    "bos_token_id",
    "eos_token_id",
    "eot_token_id",
    "add_bos_token",
    "add_space_prefix",
)


@st.composite
def changed_fields(draw: st.DrawFn) -> bytes:
    """The sound file with some keys and tensor descriptions that say something else, all lengths being right."""
    raw = sound()
    architecture = draw(st.sampled_from(sorted(ARCHITECTURES)))
    keys = {name.replace("llama.", f"{architecture}."): value for name, value in raw.keys.items()}
    keys["general.architecture"] = text(architecture)
    keys["tokenizer.ggml.model"] = text(draw(st.sampled_from(("gpt2", "llama", "bert"))))
    known = [
        *keys,
        *(f"{architecture}.{key}" for key in OPTIONAL_KEYS),
        *(f"tokenizer.ggml.{key}" for key in TOKENIZER_KEYS),
    ]
    for name in draw(st.lists(st.sampled_from(known), max_size=3)):
        keys[name] = draw(raw_values)
    raw = replace(raw, keys=keys)
    for name in draw(st.lists(st.sampled_from(sorted(raw.tensors)), max_size=2)):
        shape = tuple(draw(st.lists(sizes, max_size=5)))
        type_id = draw(st.one_of(st.sampled_from(sorted(TYPE_IDS.values())), st.integers(0, 2**32 - 1)))
        described = RawTensor(shape, type_id, raw.tensors[name].data, draw(st.one_of(st.none(), sizes)))
        raw = replace(raw, tensors={**raw.tensors, name: described})
    return raw.content()


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@settings(max_examples=400, deadline=None)
@given(content=mutations())
def test_a_mutated_file_opens_or_is_refused(content: bytes, scratch: Path) -> None:
    path = scratch / "mutated.gguf"
    path.write_bytes(content)
    # Anything raised but these two is a fault.
    with suppress(BadModelFile, UnsupportedModel):
        GgufFile(path).close()


@settings(max_examples=300, deadline=None)
@given(content=changed_fields())
def test_a_file_whose_fields_say_something_else_opens_or_is_refused(content: bytes, scratch: Path) -> None:
    path = scratch / "changed.gguf"
    path.write_bytes(content)
    with suppress(BadModelFile, UnsupportedModel):
        GgufFile(path).close()


@settings(max_examples=60, deadline=None)
@given(content=st.one_of(mutations(), changed_fields()))
def test_importing_a_mutated_file_succeeds_or_leaves_nothing(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(BadModelFile, UnsupportedModel):
        import_content(content, Path(folder))
