"""The GGUF reader: what it reads from sound files, and that nothing unsound passes or costs memory."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest

from modelstore.block_types import SUPPORTED_TYPES
from modelstore.gguf import GgufFile
from modelstore.manifest import ModelConfig
from shoal.errors import BadModelFile, UnsupportedModel
from tests.support.tiny_gguf import CHAT_TEMPLATE, MERGES, tiny_tokens, write_tiny_gguf

HUGE = 1 << 60


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", num_layers=2)


def patch(path: Path, change: Callable[[bytearray], None]) -> Path:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def replace_once(path: Path, old: str, new: str) -> Path:
    assert len(old) == len(new)

    def change(content: bytearray) -> None:
        start = content.index(old.encode())
        content[start : start + len(old)] = new.encode()

    return patch(path, change)


def number_after(path: Path, text: str, skip: int, code: str, value: int) -> Path:
    """Overwrite the number that comes `skip` bytes after a name."""

    def change(content: bytearray) -> None:
        start = content.index(text.encode()) + len(text) + skip
        content[start : start + struct.calcsize(code)] = struct.pack("<" + code, value)

    return patch(path, change)


# After a matrix's name: number of dimensions, two of them, type, offset.
DIMS, FIRST_DIM, TYPE, OFFSET = 0, 4, 20, 24


def test_a_files_configuration_tokenizer_and_licence_are_read(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", num_layers=2, context=512, rope_base=5000.0, is_tied=False)
    with GgufFile(path) as model:
        assert model.config == ModelConfig(
            architecture="llama",
            num_layers=2,
            hidden_size=64,
            ffn_sizes=(96, 96),
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=288,
            context_tokens=512,
            rope_base=5000.0,
            rms_epsilon=float(np.float32(1e-5)),
            is_head_tied=False,
            windows=(0, 0),
        )
        assert model.license == "apache-2.0"
        assert model.quantization == "Q4_1"
        assert model.tokenizer.tokens == tiny_tokens()
        assert model.tokenizer.merges == MERGES
        assert (model.tokenizer.kind, model.tokenizer.pre) == ("gpt2", "smollm")
        assert (model.tokenizer.bos_id, model.tokenizer.eos_id, model.tokenizer.add_bos) == (1, 2, False)
        assert model.tokenizer.token_types[:4] == (3, 3, 3, 1)
        assert model.tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("weight_type", SUPPORTED_TYPES)
def test_tensors_hold_the_bytes_that_the_reference_reader_finds(tmp_path: Path, weight_type: str) -> None:
    path = write_tiny_gguf(
        tmp_path / "a.gguf", num_layers=1, hidden=256, ffn=512, weight_type=weight_type, is_tied=False
    )
    with GgufFile(path) as model:
        reference = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        assert set(model.tensors) == set(reference)
        for name, tensor in model.tensors.items():
            assert tensor.raw.tobytes() == reference[name].data.tobytes()
            assert tensor.shape == tuple(reference[name].shape.tolist()[::-1])
            assert tensor.type == reference[name].tensor_type.name
            assert tensor.raw.shape[0] == (tensor.shape[0] if len(tensor.shape) == 2 else 1)


def test_a_head_tied_to_the_embedding_is_recognised(tiny: Path) -> None:
    assert GgufFile(tiny).config.is_head_tied


def test_a_file_without_a_chat_template_or_licence_is_fine(tmp_path: Path) -> None:
    model = GgufFile(write_tiny_gguf(tmp_path / "a.gguf", chat_template=None, license_name=None))
    assert model.tokenizer.chat_template is None
    assert model.license == ""


def test_released_memory_can_be_read_again(tiny: Path) -> None:
    model = GgufFile(tiny)
    tensor = model.tensors["token_embd.weight"]
    before = tensor.raw.tobytes()
    model.release()
    assert tensor.raw.tobytes() == before


def test_arrays_outlive_a_closed_file(tiny: Path) -> None:
    with GgufFile(tiny) as model:
        tensor = model.tensors["output_norm.weight"]
    del model
    assert np.isfinite(tensor.raw.view(np.float32)).all()


def test_a_model_is_called_by_the_type_of_its_layers_whatever_its_embedding_has(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", num_layers=1, vocab=4000, weight_type="Q4_1", embedding_type="Q8_0")
    assert GgufFile(path).quantization == "Q4_1"


def test_a_closed_model_holds_none_of_its_file(tiny: Path) -> None:
    with GgufFile(tiny) as model:
        assert model.tensors
    assert not model.tensors


def test_version_2_is_read(tiny: Path) -> None:
    patch(tiny, lambda content: content.__setitem__(slice(4, 8), struct.pack("<I", 2)))
    assert GgufFile(tiny).config.num_layers == 2


@pytest.mark.parametrize(
    ("version", "named"), [(struct.pack("<I", 1), "version 1"), (struct.pack(">I", 3), "big-endian")]
)
def test_other_versions_are_refused_by_name(tiny: Path, version: bytes, named: str) -> None:
    patch(tiny, lambda content: content.__setitem__(slice(4, 8), version))
    with pytest.raises(UnsupportedModel, match=named):
        GgufFile(tiny)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BadModelFile, match="not a GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize("content", [b"", b"GGUF"])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match="too few"):
        GgufFile(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


def test_a_file_cut_off_anywhere_is_refused(tiny: Path) -> None:
    content = tiny.read_bytes()
    # The last tensor is followed by nothing but padding.
    for end in [*range(0, 8000, 97), *range(8000, len(content) - 32, 4999)]:
        tiny.write_bytes(content[:end])
        with pytest.raises(BadModelFile):
            GgufFile(tiny)


def test_a_truncated_file_names_the_tensor_and_what_to_do(tiny: Path) -> None:
    tiny.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(BadModelFile, match=r"tensor blk\.1\.\w+\.weight ends at byte .* get it again"):
        GgufFile(tiny)


@pytest.mark.parametrize(("position", "named"), [(8, "tensors"), (16, "keys")])
def test_absurd_counts_are_refused(tiny: Path, position: int, named: str) -> None:
    patch(tiny, lambda content: content.__setitem__(slice(position, position + 8), struct.pack("<Q", HUGE)))
    with pytest.raises(BadModelFile, match=f"a header of {HUGE} {named}"):
        GgufFile(tiny)


def test_an_absurd_string_length_is_refused_by_key(tiny: Path) -> None:
    number_after(tiny, "tokenizer.ggml.model", 4, "Q", HUGE)
    with pytest.raises(BadModelFile, match=r"key tokenizer\.ggml\.model wants"):
        GgufFile(tiny)


@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
def test_an_absurd_array_length_is_refused_by_key(tiny: Path, key: str) -> None:
    number_after(tiny, key, 8, "Q", HUGE)
    with pytest.raises(BadModelFile, match=f"key {key}, an array of {HUGE}"):
        GgufFile(tiny)


def test_an_absurd_dimension_is_refused_by_tensor(tiny: Path) -> None:
    number_after(tiny, "blk.0.attn_q.weight", FIRST_DIM, "Q", HUGE)
    with pytest.raises(BadModelFile, match=r"tensor blk\.0\.attn_q\.weight ends"):
        GgufFile(tiny)


def test_an_absurd_number_of_dimensions_is_refused_by_tensor(tiny: Path) -> None:
    number_after(tiny, "blk.0.attn_q.weight", DIMS, "I", 1 << 30)
    with pytest.raises(BadModelFile, match=r"blk\.0\.attn_q\.weight has 1073741824 dimensions"):
        GgufFile(tiny)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", extra_keys={"test.first": 1, "test.other": 2})
    with pytest.raises(BadModelFile, match=r"key test\.first is given twice"):
        GgufFile(replace_once(path, "test.other", "test.first"))


def test_a_tensor_given_twice_is_refused(tiny: Path) -> None:
    with pytest.raises(BadModelFile, match=r"tensor blk\.0\.attn_q\.weight is given twice"):
        GgufFile(replace_once(tiny, "blk.1.attn_q.weight", "blk.0.attn_q.weight"))


def test_overlapping_tensors_are_refused(tiny: Path) -> None:
    number_after(tiny, "blk.0.attn_k.weight", OFFSET, "Q", 32)
    with pytest.raises(BadModelFile, match=r"token_embd\.weight and blk\.0\.attn_k\.weight overlap"):
        GgufFile(tiny)


def test_a_tensor_that_starts_off_the_grid_is_refused(tiny: Path) -> None:
    number_after(tiny, "blk.0.attn_k.weight", OFFSET, "Q", 33)
    with pytest.raises(BadModelFile, match="not a multiple of 32"):
        GgufFile(tiny)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", num_layers=2, omit_tensors=[name])
    with pytest.raises(BadModelFile, match=f"tensor {name} is missing"):
        GgufFile(path)


def test_a_tensor_of_another_shape_is_named(tiny: Path) -> None:
    number_after(tiny, "blk.0.attn_q.weight", FIRST_DIM, "Q", 32)
    with pytest.raises(BadModelFile, match=r"blk\.0\.attn_q\.weight has shape \(64, 32\).* asks for \(64, 64\)"):
        GgufFile(tiny)


def test_another_architecture_is_refused_by_name_with_what_is_supported(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", architecture="mamba")
    with pytest.raises(
        UnsupportedModel, match="architecture mamba is not supported; supported are llama, qwen2, qwen3, gemma3"
    ):
        GgufFile(path)


@pytest.mark.parametrize(("type_id", "named"), [(19, "IQ1_S"), (35, "TQ2_0"), (99, "number 99")])
def test_another_tensor_type_is_refused_by_name_with_what_is_supported(tiny: Path, type_id: int, named: str) -> None:
    number_after(tiny, "blk.0.attn_q.weight", TYPE, "I", type_id)
    with pytest.raises(
        UnsupportedModel, match=rf"attn_q\.weight is of type {named}; supported are F32, F16, BF16, Q4_0"
    ):
        GgufFile(tiny)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type is longrope; supported is none, linear, yarn"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8"),
        ({"llama.attention.value_length": 8}, r"llama\.attention\.value_length is 8"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer bert"),
    ],
)
def test_models_that_ask_for_other_arithmetic_are_refused(
    tmp_path: Path, keys: dict[str, str | float | int], named: str
) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", extra_keys=keys)
    with pytest.raises(UnsupportedModel, match=named):
        GgufFile(path)


def test_rotary_scaling_none_is_fine(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", extra_keys={"llama.rope.scaling.type": "none"})
    assert GgufFile(path).config.num_layers == 3


@pytest.mark.parametrize(
    ("name", "named"),
    [("blk.0.attn_sinks.weight", "not part of a llama decoder"), ("blk.3.attn_q.bias", "not part of a llama decoder")],
)
def test_tensors_a_plain_decoder_has_not_are_refused(tmp_path: Path, name: str, named: str) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", extra_tensors={name: np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match=named):
        GgufFile(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.context_length", 1 << 31),
        ("llama.attention.head_count_kv", 3),
        ("llama.embedding_length", "wide"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.rope.freq_base", float("inf")),
        ("tokenizer.ggml.eos_token_id", 288),
        ("tokenizer.ggml.token_type", 1),
        ("tokenizer.ggml.merges", "none"),
        ("general.alignment", 24),
    ],
)
def test_a_key_that_makes_no_sense_is_named(tmp_path: Path, key: str, value: str | float | int) -> None:
    path = write_tiny_gguf(tmp_path / "a.gguf", extra_keys={key: value})
    with pytest.raises(BadModelFile, match=key.removesuffix("_kv")):
        GgufFile(path)


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(tmp_path: Path) -> None:
    rows = np.zeros((289, 64), np.float32)
    name = "token_embd.weight"
    path = write_tiny_gguf(tmp_path / "a.gguf", omit_tensors=[name], extra_tensors={name: rows})
    with pytest.raises(BadModelFile, match=r"tokenizer\.ggml\.tokens has 288 entries.* 289 rows"):
        GgufFile(path)


def test_no_damage_to_the_header_leads_to_anything_but_a_clear_error(tiny: Path) -> None:
    content = tiny.read_bytes()
    header_bytes = content.index(b"output_norm.weight") + 64
    rng = random.Random(0)
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(header_bytes)] = rng.randrange(256)
        tiny.write_bytes(damaged)
        # Anything else that is raised fails the test.
        with suppress(BadModelFile, UnsupportedModel):
            GgufFile(tiny).close()
