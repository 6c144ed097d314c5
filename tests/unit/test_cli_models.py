"""`shoal models`: what it prints of stored models, and what it does with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelstore.store import ModelStore
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import write_tiny_hf
from tests.unit.conftest import Run


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """Where `run` keeps models."""
    return ModelStore(tmp_path)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def test_models_list_names_what_can_be_pulled(run: Run) -> None:
    outcome = run("models", "list", "--json")

    listed = json.loads(outcome.out)
    assert listed["stored"] == []
    assert [entry["name"] for entry in listed["can_be_pulled"]] == ["smollm2-135m", "gemma3-270m"]
    assert "shoal models pull NAME" in run("models", "list").out


def test_a_stored_model_is_listed_with_size_digest_licence_and_origin(run: Run, store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny", source="hf:fish/tiny@0123456789abcdef:tiny.gguf")

    row, origin = run("models", "list").out.splitlines()[2:4]
    assert row.split()[:4] == ["tiny", "llama,", "3", "layers,"]
    assert manifest.digest[:12] in row
    assert "apache-2.0" in row
    assert origin.strip() == "hf:fish/tiny@01234567:tiny.gguf"
    (fields,) = json.loads(run("models", "list", "--json").out)["stored"]
    assert (fields["digest"], fields["num_bytes"]) == (manifest.digest, manifest.weight_bytes)
    assert (fields["license"], fields["source"]) == ("apache-2.0", "hf:fish/tiny@0123456789abcdef:tiny.gguf")


def test_long_names_are_folded_within_a_hundred_columns_and_nothing_is_lost(
    run: Run, store: ModelStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    origin = "hf:an-organisation-of-some-length/a-model-with-a-longer-name-than-most-GGUF@" + "0" * 40 + ":file.gguf"
    store.import_model(tiny, "n" * 60, source=origin, license="a licence that goes by a name of several words")

    out = run("models", "list").out
    assert max(map(len, out.splitlines())) <= 100
    table = out.splitlines()[2:]
    table = table[: table.index("")]
    assert "".join(line[:20].strip() for line in table) == "n" * 60
    assert f"{origin[:76]}{'0' * 8}:file.gguf" in "".join(line[22:58].strip() for line in table)


def test_a_model_that_cannot_be_read_does_not_hide_the_others(
    run: Run, store: ModelStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    store.import_model(tiny, "sound")
    store.import_model(tiny, "torn")
    (store.root / "models/torn/manifest.json").write_text("{}")

    lines = run("models", "list").out.splitlines()
    assert any(line.startswith("sound ") and "llama" in line for line in lines)
    assert any(line.startswith("torn ") and "cannot be read" in line for line in lines)
    assert any("pull or import it again" in line for line in lines)


def test_a_model_that_is_not_stored_is_one_clear_line(run: Run) -> None:
    outcome = run("models", "show", "nope")

    assert outcome.code == 1
    assert outcome.err.startswith("error: there is no model nope")


def test_importing_what_is_no_file_is_wrong_usage(run: Run, tmp_path: Path) -> None:
    assert run("models", "import", str(tmp_path / "none.gguf"), "--name", "x").code == 2


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_files_of_both_kinds_are_imported_alike(run: Run, store: ModelStore, tiny: Path, kind: str) -> None:
    path = tiny if kind == "gguf" else write_tiny_hf(tiny.parent / "folder")

    outcome = run("models", "import", str(path), "--name", "mine")

    assert outcome.code == 0
    assert "mine is stored: 3 layers" in outcome.err
    assert store.open("mine").source == path.name


def test_a_file_that_cannot_be_read_is_one_clear_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"pickle")

    outcome = run("models", "import", str(tmp_path / "model.bin"), "--name", "x")

    assert outcome.code == 1
    assert outcome.err.startswith("error: model.bin is a PyTorch file")


def test_a_model_is_shown_in_words(run: Run, store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")

    lines = run("models", "show", "tiny").out.splitlines()
    assert {"architecture: llama", "accepted terms: -", "has chat template: yes"} <= set(lines)


@pytest.mark.parametrize(("weight_type", "option", "is_told"), [
    ("Q4_0", "--quantize=int4", True), ("Q4_0", "--quantize=int8", False), ("F32", "--quantize=int4", False),
])  # fmt: skip
def test_what_an_option_does_not_change_is_told(
    run: Run, tmp_path: Path, weight_type: str, option: str, is_told: bool
) -> None:
    path = write_tiny_gguf(tmp_path / "some.gguf", weight_type=weight_type)

    told = run("models", "import", str(path), "--name", "mine", option).err
    assert (f"Weights stay {weight_type}, as the file has them" in told) is is_told


def test_a_chat_template_that_is_none_is_refused_before_the_import(run: Run, store: ModelStore, tiny: Path) -> None:
    broken = tiny.parent / "broken.jinja"
    broken.write_text("{% for message in messages %}{{ message }")

    outcome = run("models", "import", str(tiny), "--name", "mine", "--chat-template", str(broken))

    assert (outcome.code, list(store.names())) == (1, [])
    assert outcome.err.startswith("error: chat_template: is no template: ")


def test_terms_that_nobody_accepted_are_told_with_the_command_that_does(run: Run) -> None:
    outcome = run("models", "pull", "gemma3-270m")

    assert outcome.code == 1
    assert "gemma3-270m is under the licence Gemma" in outcome.err
    assert "https://ai.google.dev/gemma/terms" in outcome.err
    assert outcome.err.rstrip().endswith("shoal models pull gemma3-270m --accept-license")


def test_the_default_model_has_no_terms_that_would_stop_it(
    run: Run, store: ModelStore, monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    manifest = store.import_model(tiny, "tiny")
    asked: list[bool] = []

    def pull(store: ModelStore, name: str, progress: object, *, accept_license: bool) -> object:
        asked.append(accept_license)
        return manifest

    monkeypatch.setattr("modelstore.pull.pull", pull)
    outcome = run("models", "pull", "smollm2-135m")

    assert (outcome.code, asked) == (0, [False])
    assert "smollm2-135m is under the licence Apache-2.0" in outcome.err


@pytest.mark.parametrize(
    "option", [("--name", "mine"), ("--quantize", "int4"), ("--requantize",), ("--target-ppl-loss", "5%")]
)
def test_options_that_a_model_of_the_catalogue_would_not_heed_are_refused(run: Run, option: tuple[str, ...]) -> None:
    outcome = run("models", "pull", "smollm2-135m", *option)

    assert outcome.code == 1
    assert "options are for models of the hub" in outcome.err


def test_a_sound_model_is_verified(run: Run, store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")
    assert "tiny is sound: 6 blobs" in run("models", "verify", "tiny").err


def test_a_damaged_model_is_found_out(run: Run, store: ModelStore, tiny: Path) -> None:
    manifest = store.import_model(tiny, "tiny")
    store.blob_path(manifest.layers[1].digest).write_bytes(bytes(manifest.layers[1].num_bytes))

    outcome = run("models", "verify", "tiny")

    assert outcome.code == 1
    assert "(layer 2 of tiny) is damaged" in outcome.err


def test_a_removed_model_is_not_listed_any_more(run: Run, store: ModelStore, tiny: Path) -> None:
    store.import_model(tiny, "tiny")

    outcome = run("models", "remove", "tiny")

    assert (outcome.code, store.names()) == (0, ())
    assert outcome.err.startswith("tiny is removed, ")
