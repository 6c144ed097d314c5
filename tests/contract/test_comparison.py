"""Two forms of a tiny model compared layer by layer: the layer that is broken is named, and sound ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation import parts, tables
from evaluation.comparison import Comparison, compare, require_comparable
from evaluation.page import to_html
from evaluation.parts import Parts, final_hidden
from evaluation.text import Text, cut_tokens
from shoal.errors import InvalidRequest
from tests.support.judged_models import FLOATS, Change, make_changed
from tests.support.shards import TinyModel, make_tiny_model, make_tokens, whole_prompt_logits

TEXT = cut_tokens(make_tokens(96, 280), [1], window_tokens=40, max_tokens=1000)


def parts_of(model: TinyModel, *, is_exact: bool = False) -> Parts:
    return Parts(model.manifest, model.blob_directory, 1, is_exact)


def compared(a: TinyModel, b: TinyModel, text: Text = TEXT) -> Comparison:
    require_comparable(a.manifest, b.manifest)
    return compare(parts_of(a), parts_of(b), text, lambda _: None)


def tiny(folder: Path, precision: str = "float32", **options: Any) -> TinyModel:
    return make_tiny_model(folder, precision=precision, **{**FLOATS, "num_layers": 4, **options})


def permuted(values: np.ndarray) -> np.ndarray:
    return values[::-1].copy()


@pytest.mark.parametrize(
    ("tensor", "change", "precision"),
    [
        ("blk.2.ffn_down.weight", permuted, "float32"),
        ("blk.2.ffn_down.weight", permuted, "int4"),
        ("blk.2.attn_output.weight", lambda values: values * np.float32(3), "int8"),
        ("blk.0.attn_v.weight", permuted, "int4-asym"),
        ("blk.3.ffn_gate.weight", lambda values: values * np.float32(1.3), "int8"),
    ],
)
def test_the_broken_layer_is_named_and_no_other(tmp_path: Path, tensor: str, change: Change, precision: str) -> None:
    broken = make_changed(tmp_path / "b", {tensor: change}, precision=precision, num_layers=4)
    found = compared(tiny(tmp_path / "a"), broken)
    name = ".".join(tensor.split(".")[:2])
    assert [layer.name for layer in found.outstanding] == [name]
    assert name in tables.verdict(found)
    assert [row[0] for row in tables.rows(found) if row[-1]] == [name]


@pytest.mark.parametrize("precision", ["float32", "int8", "int4", "int4-asym"])
def test_no_layer_of_a_sound_model_stands_out(tmp_path: Path, precision: str) -> None:
    found = compared(tiny(tmp_path / "a"), tiny(tmp_path / "b", precision))
    assert found.outstanding == ()
    assert tables.verdict(found) == "No layer stands out."


def test_a_model_is_equal_to_itself(tmp_path: Path) -> None:
    model = tiny(tmp_path, "int8")
    found = compared(model, model)
    assert [(layer.own_error, layer.piled_up.max_abs) for layer in found.layers] == [(0.0, 0.0)] * 4
    assert (found.head.divergence, found.head.agreement, found.loss.share) == (0.0, 1.0, 0.0)
    assert found.perplexities[0] == found.perplexities[1]


def test_errors_pile_up_over_the_layers_while_a_layers_own_stays(tmp_path: Path) -> None:
    found = compared(tiny(tmp_path / "a"), tiny(tmp_path / "b", "int4"))
    first, last = found.layers[0], found.layers[-1]
    assert last.piled_up.relative_rms > 1.5 * last.own.relative_rms
    assert last.own_error < 1.5 * first.own_error


@pytest.mark.parametrize("chunk_tokens", [16, 256])
def test_parts_one_by_one_compute_what_the_whole_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    monkeypatch.setattr(parts, "CHUNK_TOKENS", chunk_tokens)
    model = tiny(tmp_path, "int8")
    tokens = make_tokens(40, 280)
    text = cut_tokens(tokens, [], window_tokens=40, max_tokens=100)
    with parts_of(model).head() as run:
        ours = run(final_hidden(parts_of(model), text, lambda _: None))
    np.testing.assert_allclose(ours, whole_prompt_logits(model.manifest, model.blob_directory, tokens), atol=0.05)


def test_windows_do_not_see_each_other(tmp_path: Path) -> None:
    model = parts_of(tiny(tmp_path, "int8"))
    alone = final_hidden(model, TEXT.part(1, 100), lambda _: None)
    together = final_hidden(model, TEXT, lambda _: None)
    np.testing.assert_array_equal(alone, together[40 : 40 + len(alone)])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_layers": 3}, "4 layers and tiny has 3"),
        ({"hidden": 128}, "64 hidden values and tiny has 128"),
        ({"vocab": 300}, "288 tokens in the vocabulary and tiny has 300"),
    ],
)
def test_other_models_are_not_compared(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tiny has {what}: only forms of one model can be compared"):
        compared(tiny(tmp_path / "a"), tiny(tmp_path / "b", **options))


def test_forms_of_a_model_from_gguf_and_from_hugging_face_agree(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_layers": 2, "is_tied": False}
    ours = make_tiny_model(tmp_path / "a", precision="float32", weight_type="F32", embedding_type="F32", **options)
    theirs = make_tiny_model(tmp_path / "b", precision="float32", layout="hf", **options)
    found = compared(ours, theirs)
    assert found.head.divergence < 1e-4
    assert found.outstanding == ()


def test_the_page_has_curves_the_verdict_and_every_layer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    broken = make_changed(tmp_path / "b", {"blk.2.ffn_down.weight": permuted}, num_layers=4)
    page = to_html(compared(tiny(tmp_path / "a"), broken))
    assert page.count("<svg") == 1
    assert "Look at blk.2" in page
    assert all(f">blk.{index}<" in page for index in range(4))
    assert "http" not in page.replace("http://www.w3.org", "")
