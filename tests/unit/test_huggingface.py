"""Hugging Face folders: what is read of sound ones, and that bad ones cost a clear error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelstore.block_types import float_values
from modelstore.formats import open_model
from modelstore.gguf import GgufFile
from modelstore.hf_folder import INDEX, WEIGHTS
from modelstore.huggingface import HfModel
from modelstore.source import SourceModel
from modelstore.store import ModelStore
from shoal.errors import BadModelFile, ShoalError, UnsupportedModel
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import write_safetensors, write_tiny_hf
from tests.support.tiny_shapes import ARCHITECTURES

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
PEAK_MEMORY_SCRIPT = """
import sys
from pathlib import Path
from modelstore.store import ModelStore

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

before = peak_kib()
manifest = ModelStore(Path(sys.argv[2])).import_model(Path(sys.argv[1]), "tiny")
print((peak_kib() - before) * 1024, max(blob.num_bytes for blob in manifest.blobs))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_hf(tmp_path / "tiny")


def change_json(path: Path, **changes: Any) -> None:
    """Put entries in place of others; None deletes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def values_of(model: SourceModel) -> dict[str, np.ndarray]:
    return {name: float_values(tensor.type, tensor.raw).reshape(tensor.shape) for name, tensor in model.tensors.items()}


def refusal(folder: Path) -> ShoalError:
    with pytest.raises((BadModelFile, UnsupportedModel)) as caught:
        HfModel(folder)
    return caught.value


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_gives_the_blobs_that_the_gguf_file_of_the_same_model_gives(
    tmp_path: Path, architecture: str, num_files: int
) -> None:
    folder = write_tiny_hf(tmp_path / "hf", architecture=architecture, num_files=num_files, window=16)
    file = write_tiny_gguf(
        tmp_path / "a.gguf", architecture=architecture, weight_type="F32", embedding_type="F32", window=16
    )
    store = ModelStore(tmp_path / "store")
    of_folder, of_file = store.import_model(folder, "folder"), store.import_model(file, "file")
    assert [blob.digest for blob in of_folder.blobs] == [blob.digest for blob in of_file.blobs]


def test_rows_of_queries_are_taken_as_they_stand_where_gguf_files_have_them_in_pairs(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "hf")
    assert not HfModel(folder).has_paired_rotary
    assert GgufFile(write_tiny_gguf(tmp_path / "a.gguf")).has_paired_rotary


def test_norms_of_gemma_get_the_one_that_their_files_leave_out(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "hf", architecture="gemma3", window=16, weight_type="BF16")
    norm = HfModel(folder).tensors["blk.0.post_ffw_norm.weight"]
    assert norm.type == "F32"
    assert abs(float(float_values(norm.type, norm.raw).mean()) - 1) < 0.2


def test_norms_of_others_are_views_of_the_file(folder: Path) -> None:
    norm = HfModel(folder).tensors["blk.0.attn_norm.weight"]
    assert not norm.raw.flags.owndata
    assert abs(float(float_values(norm.type, norm.raw).mean()) - 1) < 0.2


@pytest.mark.parametrize("weight_type", ["F32", "F16", "BF16"])
def test_weights_of_each_type_are_read_and_named(tmp_path: Path, weight_type: str) -> None:
    exact = values_of(HfModel(write_tiny_hf(tmp_path / "exact")))
    model = HfModel(write_tiny_hf(tmp_path / "tiny", weight_type=weight_type))
    assert model.quantization == weight_type
    for name, values in values_of(model).items():
        np.testing.assert_allclose(values, exact[name], rtol=2**-8, atol=2**-24)


def test_a_tied_head_is_none(tmp_path: Path) -> None:
    assert HfModel(write_tiny_hf(tmp_path / "tiny", is_tied=True)).config.is_head_tied


def test_a_head_of_its_own_is_read(tmp_path: Path) -> None:
    model = HfModel(write_tiny_hf(tmp_path / "tiny", is_tied=False))
    assert not model.config.is_head_tied
    assert "output.weight" in model.tensors


def test_without_a_head_and_a_word_about_it_the_head_is_tied(folder: Path) -> None:
    change_json(folder / "config.json", tie_word_embeddings=None)
    assert HfModel(folder).config.is_head_tied


def test_a_head_that_is_announced_and_lacks_is_told(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "tiny", is_tied=False, omit_tensors=["lm_head.weight"])
    assert "tensor output.weight is missing" in refusal(folder).message


def test_frequencies_that_older_versions_saved_are_passed_over(tmp_path: Path) -> None:
    extra = {
        "model.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
    }
    model = HfModel(write_tiny_hf(tmp_path / "tiny", extra_tensors=extra))
    assert not [name for name in model.tensors if "inv_freq" in name]


def test_any_other_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"model.layers.1.self_attn.gate.weight": np.ones((8, 8), np.float32)}
    error = refusal(write_tiny_hf(tmp_path / "tiny", extra_tensors=extra))
    assert isinstance(error, UnsupportedModel)
    assert "tensor model.layers.1.self_attn.gate.weight is not part of a llama decoder" in error.message


def test_the_licence_is_that_of_the_models_card(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\nlicense: mit\n")
    assert HfModel(folder).license == "apache-2.0"


def test_a_licence_of_its_own_goes_by_its_name(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: 'llama3.2'\n---\n")
    assert HfModel(folder).license == "llama3.2"


def test_a_card_without_a_head_states_no_licence(folder: Path) -> None:
    (folder / "README.md").write_text("license: mit\n")
    assert HfModel(folder).license == ""


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_of_the_folder_stands_for_it(folder: Path, name: str) -> None:
    assert isinstance(open_model(folder / name), HfModel)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_a_pickle_is_refused_with_what_to_get_instead(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(
        UnsupportedModel, match=f"{name} is a PyTorch file, .* get the model as safetensors or as a GGUF"
    ):
        open_model(tmp_path / name)


def test_a_path_without_anything_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match="neither a file nor a folder"):
        open_model(tmp_path / "none")


class TestWeightFiles:
    """Which files the weights are in."""

    @pytest.fixture
    def split(self, tmp_path: Path) -> Path:
        return write_tiny_hf(tmp_path / "tiny", num_files=3)

    def test_an_empty_folder_is_none_of_a_model(self, tmp_path: Path) -> None:
        assert "has no config.json" in refusal(tmp_path).message

    def test_pickles_in_place_of_weights_are_refused_with_what_to_do(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
        error = refusal(folder)
        assert isinstance(error, UnsupportedModel)
        assert "pytorch_model.bin, a format that can run code" in error.message
        assert "safe_serialization=True" in error.message

    def test_gguf_files_are_named(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "tiny.gguf")
        assert f"name one of them, as {folder / 'tiny.gguf'}" in refusal(folder).message

    def test_an_adapter_is_no_model(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        assert "merge it into its base model first" in refusal(folder).message

    def test_a_folder_without_weights_is_told(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        assert f"has neither {WEIGHTS} nor {INDEX}" in refusal(folder).message

    def test_a_missing_file_of_several_is_named(self, split: Path) -> None:
        (split / "model-00002-of-00003.safetensors").unlink()
        assert f"model-00002-of-00003.safetensors is missing, which {INDEX} names" in refusal(split).message

    def test_a_truncated_file_of_several_is_told_with_the_tensor(self, split: Path) -> None:
        path = split / "model-00002-of-00003.safetensors"
        os.truncate(path, path.stat().st_size - 1)
        assert "model-00002-of-00003.safetensors" in refusal(split).message
        assert "truncated" in refusal(split).message

    @pytest.mark.parametrize(
        "name", ["../tiny.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b"]
    )
    def test_an_index_cannot_name_files_elsewhere(self, split: Path, name: str) -> None:
        change_json(split / INDEX, weight_map={Q_PROJ: name})
        assert "is no name of a file in" in refusal(split).message

    def test_an_index_cannot_name_files_of_other_formats(self, split: Path) -> None:
        change_json(split / INDEX, weight_map={Q_PROJ: "config.json"})
        assert "config.json, which is no safetensors file" in refusal(split).message

    @pytest.mark.parametrize("places", [None, {}, [], {Q_PROJ: 7}, {Q_PROJ: ["a"]}])
    def test_an_index_without_places_is_refused(self, split: Path, places: object) -> None:
        change_json(split / INDEX, weight_map=places)
        assert "has no weight_map" in refusal(split).message

    def test_an_index_of_absurdly_many_files_is_refused(self, split: Path) -> None:
        change_json(split / INDEX, weight_map={str(index): f"{index}.safetensors" for index in range(1001)})
        assert "names 1001 files" in refusal(split).message

    def test_a_tensor_that_is_not_where_the_index_has_it_is_named(self, split: Path) -> None:
        places = json.loads((split / INDEX).read_text())["weight_map"]
        change_json(split / INDEX, weight_map=places | {"model.more.weight": "model-00001-of-00003.safetensors"})
        assert "tensor model.more.weight is not in model-00001-of-00003.safetensors" in refusal(split).message

    def test_a_tensor_in_two_files_is_named(self, split: Path) -> None:
        name = "model-00003-of-00003.safetensors"
        (split / name).write_bytes((split / "model-00001-of-00003.safetensors").read_bytes())
        change_json(split / INDEX, weight_map={"a": "model-00001-of-00003.safetensors", "b": name})
        assert f"is in two files, {name} is one" in refusal(split).message


class TestLinks:
    """Links are followed inside a folder and in the hub's own cache."""

    def test_a_link_out_of_the_folder_is_refused(self, folder: Path, tmp_path: Path) -> None:
        (folder / WEIGHTS).rename(tmp_path / "elsewhere")
        (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere")
        assert f"{folder / WEIGHTS} is a link out of its folder" in refusal(folder).message

    def test_a_link_of_the_configuration_out_of_the_folder_is_refused(self, folder: Path, tmp_path: Path) -> None:
        (folder / "config.json").rename(tmp_path / "elsewhere")
        (folder / "config.json").symlink_to("../elsewhere")
        assert f"{folder / 'config.json'} is a link out of its folder" in refusal(folder).message

    def test_a_link_of_the_licence_out_of_the_folder_is_refused(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("---\nlicense: secret\n---\n")
        (folder / "README.md").symlink_to(tmp_path / "secret")
        assert f"{folder / 'README.md'} is a link out of its folder" in refusal(folder).message

    def test_a_link_inside_the_folder_is_followed(self, folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "other.safetensors")
        (folder / WEIGHTS).symlink_to("other.safetensors")
        assert HfModel(folder).config.num_layers == 3

    def test_a_link_to_nothing_is_told(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to("gone")
        assert "leads nowhere" in refusal(folder).message

    def test_a_link_to_itself_is_told(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).symlink_to(WEIGHTS)
        assert "leads nowhere" in refusal(folder).message

    def test_the_hubs_cache_is_read_by_its_links_to_blobs(self, folder: Path, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for index, path in enumerate(folder.iterdir()):
            path.rename(blobs / str(index))
            (snapshot / path.name).symlink_to(f"../../blobs/{index}")
        assert HfModel(snapshot).config.num_layers == 3

    def test_a_link_of_the_hubs_cache_past_its_blobs_is_refused(self, folder: Path, tmp_path: Path) -> None:
        snapshot = tmp_path / "models--a--b/snapshots/0123"
        snapshot.parent.mkdir(parents=True)
        (folder / "config.json").rename(tmp_path / "models--a--b/secret")
        (folder / "config.json").symlink_to("../../secret")
        folder.rename(snapshot)
        assert "is a link out of its folder" in refusal(snapshot).message

    def test_a_pipe_is_not_waited_for(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
        assert "config.json is no file" in refusal(folder).message


class TestConfiguration:
    """What a config.json cannot ask for."""

    @pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "architectures"])
    def test_a_missing_key_is_named(self, folder: Path, key: str) -> None:
        change_json(folder / "config.json", **{key: None})
        assert f"{key} is missing" in refusal(folder).message

    @pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"])
    @pytest.mark.parametrize("value", [0, -1, 2**60, 1.5, "4", True, [], {}])
    def test_an_absurd_number_is_named(self, folder: Path, key: str, value: object) -> None:
        change_json(folder / "config.json", **{key: value})
        assert key in refusal(folder).message

    @pytest.mark.parametrize("digits", ["1" * 400, "1" * 5000, "1e999", "NaN", "-Infinity"])
    def test_a_number_that_no_number_can_hold_is_refused(self, folder: Path, digits: str) -> None:
        path = folder / "config.json"
        path.write_text(path.read_text().replace('"rope_theta": 10000.0', f'"rope_theta": {digits}'))
        assert isinstance(refusal(folder), BadModelFile)

    def test_a_key_that_is_given_twice_is_named(self, folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(path.read_text().replace("{", '{"hidden_size": 64,', 1))
        assert refusal(folder).message == "key hidden_size is given twice in config.json"

    def test_a_configuration_that_is_no_json_is_told(self, folder: Path) -> None:
        (folder / "config.json").write_text("{'a': 1}")
        assert "config.json is no JSON" in refusal(folder).message

    def test_an_endless_configuration_is_not_read(self, folder: Path) -> None:
        with (folder / "config.json").open("ab") as file:
            file.truncate(1 << 40)
        assert "config.json has more than" in refusal(folder).message

    def test_weights_quantised_in_another_way_are_refused_by_its_name(self, folder: Path) -> None:
        change_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
        error = refusal(folder)
        assert isinstance(error, UnsupportedModel)
        assert "quantised (gptq), which cannot be read: get the model in BF16 or as a GGUF file" in error.message

    def test_an_architecture_that_is_not_supported_is_told_with_those_that_are(self, folder: Path) -> None:
        change_json(folder / "config.json", architectures=["MambaForCausalLM"])
        assert "MambaForCausalLM is not supported; supported are LlamaForCausalLM" in refusal(folder).message


class TestTensors:
    """What tensors cannot be."""

    @pytest.mark.parametrize("kind", ["F8_E4M3", "I32", "F64"])
    def test_a_type_that_is_not_supported_is_told_with_the_tensor(self, folder: Path, kind: str) -> None:
        size = {"F8_E4M3": 1, "I32": 4, "F64": 8}[kind]
        header = {Q_PROJ: {"dtype": kind, "shape": [4, 4], "data_offsets": [0, 16 * size]}}
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(16 * size))
        error = refusal(folder)
        assert isinstance(error, UnsupportedModel)
        assert f"tensor {Q_PROJ} is of type {kind}; supported are F32, F16, BF16" in error.message

    def test_a_wrong_shape_is_told_with_the_tensor(self, tmp_path: Path) -> None:
        folder = write_tiny_hf(tmp_path / "tiny", extra_tensors={Q_PROJ: np.ones((32, 64), np.float32)})
        expected = "tensor blk.0.attn_q.weight has shape (32, 64), the configuration asks for (64, 64)"
        assert expected in refusal(folder).message

    @pytest.mark.parametrize("shape", [(), (2, 2, 2), (0, 64)])
    def test_a_tensor_that_is_no_vector_or_matrix_is_refused(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        folder = write_tiny_hf(tmp_path / "tiny", extra_tensors={Q_PROJ: np.ones(shape, np.float32)})
        assert f"tensor {Q_PROJ} has shape {shape}" in refusal(folder).message

    def test_a_missing_tensor_is_named(self, tmp_path: Path) -> None:
        folder = write_tiny_hf(tmp_path / "tiny", omit_tensors=[Q_PROJ])
        assert "tensor blk.0.attn_q.weight is missing" in refusal(folder).message

    def test_a_file_of_another_model_is_refused(self, folder: Path) -> None:
        write_safetensors(folder / WEIGHTS, {"model.embed_tokens.weight": np.ones((288, 32), np.float32)}, "F32")
        assert isinstance(refusal(folder), BadModelFile)


@pytest.mark.parametrize("damage", ["truncated", "no head", "no layer"])
def test_a_bad_folder_leaves_nothing_in_the_store(tmp_path: Path, damage: str) -> None:
    omitted = {"truncated": [], "no head": ["model.norm.weight"], "no layer": [Q_PROJ]}[damage]
    folder = write_tiny_hf(tmp_path / "tiny", omit_tensors=omitted)
    if damage == "truncated":
        os.truncate(folder / WEIGHTS, 5000)
    with pytest.raises(BadModelFile):
        ModelStore(tmp_path / "store").import_model(folder, "tiny")
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_an_import_takes_less_memory_than_its_largest_blob(tmp_path: Path) -> None:
    folder = write_tiny_hf(tmp_path / "tiny", num_layers=2, hidden=1024, ffn=8192, vocab=32_000, weight_type="BF16")
    arguments = (sys.executable, "-c", PEAK_MEMORY_SCRIPT, str(folder), str(tmp_path / "store"))
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    peak, largest = map(int, printed.split())
    assert largest > 30 << 20
    assert peak < largest
