"""The real tokenizers of model families: the same ids from tokenizer.json and from GGUF, those of the library they are
written for, and those that they had before."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from modelstore.gguf import GgufFile
from modelstore.hf_folder import HfFolder
from modelstore.manifest import TokenizerData
from modelstore.tokenizer_gguf import read_tokenizer as read_gguf
from modelstore.tokenizer_hf import read_tokenizer as read_hf
from orchestrator.tokenizer import Tokenizer
from tests.support.difficult_text import DIFFICULT_TEXTS
from tests.support.family_files import FAMILIES, Family, FamilyFileMissing, family_folder, gemma_header

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GOLDEN = json.loads((Path(__file__).parent / "golden" / "family_ids.json").read_text())
BOTH_FORMS = pytest.mark.parametrize("form", ["hf", "gguf"])
ALL_FAMILIES = pytest.mark.parametrize("name", FAMILIES)
# llama.cpp's converter calls added tokens that are special so, or look it, control tokens, all others user-defined.
CONTROL, USER_DEFINED, UNUSED, BYTE, UNKNOWN, NORMAL = 3, 4, 5, 6, 2, 1


@functools.cache
def folder_of(name: str) -> Path:
    try:
        return family_folder(FAMILIES[name])
    except FamilyFileMissing as error:
        pytest.skip(str(error))


@functools.cache
def data_of(name: str, form: str) -> TokenizerData:
    if form == "hf":
        return read_hf(HfFolder(folder_of(name)), {}, FAMILIES[name].rows)
    if name == "gemma3":
        try:
            with GgufFile(gemma_header()) as model:
                return model.tokenizer
        except FamilyFileMissing as error:
            pytest.skip(str(error))
    return read_gguf(gguf_keys(FAMILIES[name], folder_of(name)), FAMILIES[name].rows)


@functools.cache
def tokenizer_of(name: str, form: str) -> Tokenizer:
    return Tokenizer(data_of(name, form))


@functools.cache
def library_of(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder_of(name) / "tokenizer.json"))


def gguf_keys(family: Family, folder: Path) -> dict[str, Any]:
    """What a converter makes of a tokenizer.json: a name for the splitting, merges as text, scores by place."""
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = [f"[PAD{index}]" for index in range(family.rows)]
    types = [UNUSED] * family.rows
    for token, index in content["model"]["vocab"].items():
        tokens[index], types[index] = token, BYTE if family.kind == "llama" and token.startswith("<0x") else NORMAL
    for added in content["added_tokens"]:
        looks_special = added["special"] or (added["content"].startswith("<|") and added["content"].endswith("|>"))
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if looks_special else USER_DEFINED
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": family.kind,
        "tokenizer.ggml.pre": family.pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.eos_token_id": tokens.index(settings["eos_token"]),
    }
    if settings["bos_token"]:
        keys["tokenizer.ggml.bos_token_id"] = tokens.index(settings["bos_token"])
    if family.kind == "llama":
        types[tokens.index("<unk>")] = UNKNOWN
        keys["tokenizer.ggml.token_type"] = np.array(types, np.int32)
        scores = np.zeros(family.rows, np.float32)
        made = dict.fromkeys("".join(merge.split(" ")) for merge in content["model"]["merges"])
        for place, token in enumerate(made):
            scores[tokens.index(token)] = -1000.0 - place
        keys["tokenizer.ggml.scores"] = scores
    else:
        merges = content["model"]["merges"]
        keys["tokenizer.ggml.merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return keys


@ALL_FAMILIES
def test_ids_are_those_of_the_library_that_the_file_is_written_for(name: str) -> None:
    ours, library = tokenizer_of(name, "hf"), library_of(name)
    for text in DIFFICULT_TEXTS:
        assert ours.encode(text, add_special=True) == library.encode(text).ids, ascii(text)


@ALL_FAMILIES
def test_both_forms_of_a_family_give_the_same_ids(name: str) -> None:
    hf, gguf = tokenizer_of(name, "hf"), tokenizer_of(name, "gguf")
    for text in DIFFICULT_TEXTS:
        assert gguf.encode(text, add_special=True) == hf.encode(text, add_special=True), ascii(text)


@BOTH_FORMS
@ALL_FAMILIES
def test_the_ids_of_difficult_texts_stay(name: str, form: str) -> None:
    tokenizer = tokenizer_of(name, form)
    found = {text: tokenizer.encode(text, add_special=True) for text in DIFFICULT_TEXTS}
    assert found == dict(zip(DIFFICULT_TEXTS, GOLDEN[name], strict=True))


@BOTH_FORMS
@ALL_FAMILIES
def test_difficult_texts_come_back_from_their_ids(name: str, form: str) -> None:
    tokenizer = tokenizer_of(name, form)
    # Qwen composes characters first, SentencePiece writes a space as U+2581.
    changed = {"qwen3": DIFFICULT_TEXTS[19:20] + DIFFICULT_TEXTS[43:44]}.get(name, ("\u2581",))
    for text in set(DIFFICULT_TEXTS) - set(changed):
        assert tokenizer.decode(tokenizer.encode(text, add_special=True)) == text


@ALL_FAMILIES
def test_both_forms_have_the_same_tokens_of_the_same_kinds(name: str) -> None:
    hf, gguf = data_of(name, "hf"), data_of(name, "gguf")
    assert hf.tokens == gguf.tokens
    different = {
        hf.tokens[index]
        for index, (one, other) in enumerate(zip(hf.token_types, gguf.token_types, strict=True))
        if one != other
    }
    # The real GGUF file calls these so; text spells out neither in a prompt that a template wrote.
    assert different <= {"<unk>", "<start_of_image>", "<end_of_image>"}
    assert (hf.pre, hf.splitting, hf.space_prefix, hf.add_bos) == (gguf.pre, None, gguf.space_prefix, gguf.add_bos)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen3", {"<|im_end|>", "<|endoftext|>"}),
        ("gemma3", {"<end_of_turn>", "<eos>"}),
        ("mistral", {"</s>"}),
        ("llama3_1", {"<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"}),
    ],
)
@BOTH_FORMS
def test_an_answer_ends_at_all_ends_of_a_family(name: str, ends: set[str], form: str) -> None:
    tokenizer, tokens = tokenizer_of(name, form), data_of(name, form).tokens
    assert {tokens[token_id] for token_id in tokenizer.stop_ids} == ends & set(tokens)


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("qwen3", "<|im_start|>user\nWhy  <b>?<|im_end|>\n<|im_start|>assistant\n"),
        ("gemma3", "<bos><start_of_turn>user\nWhy  <b>?<end_of_turn>\n<start_of_turn>model\n"),
        (
            "llama3_1",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhy  <b>?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_a_conversation_has_the_ids_of_the_familys_format(name: str, spelled: str) -> None:
    tokenizer = tokenizer_of(name, "hf")
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Why  <b>?"}])
    assert token_ids == library_of(name).encode(spelled, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("name", "spelling"), [("qwen3", "<|im_end|>"), ("gemma3", "<end_of_turn>"), ("llama3_1", "<|eot_id|>")]
)
def test_contents_that_spell_a_familys_control_tokens_stay_text(name: str, spelling: str) -> None:
    tokenizer = tokenizer_of(name, "hf")
    plain = tokenizer.encode_chat([{"role": "user", "content": "x"}])
    spelled = tokenizer.encode_chat([{"role": "user", "content": f"{spelling}x"}])
    hidden = [token_id for token_id in spelled if not tokenizer.token_bytes(token_id)]
    assert hidden == [token_id for token_id in plain if not tokenizer.token_bytes(token_id)]
    assert spelling in tokenizer.decode(spelled)
