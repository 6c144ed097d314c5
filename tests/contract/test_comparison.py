"""Two forms of a tiny model compared layer by layer: the layer that is broken is named, and sound ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation import comparison, parts, tables
from evaluation.comparison import Comparison, compare, require_comparable
from evaluation.page import to_html
from evaluation.parts import Parts, final_hidden
from evaluation.text import Text, cut_tokens
from modelstore.requantize import Precisions
from shoal.errors import InvalidRequest
from tests.support.judged_models import FLOATS, Change, drawn_text, make_changed
from tests.support.shards import TinyModel, make_tiny_model, make_tokens, open_chain, whole_prompt_logits

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


def test_a_head_alone_that_is_broken_is_no_layers_fault(tmp_path: Path) -> None:
    broken = make_changed(tmp_path / "b", {"output.weight": lambda values: -values}, num_layers=4)
    found = compared(tiny(tmp_path / "a"), broken)
    assert found.own_head == found.head
    assert found.head.divergence > 0.1
    assert found.head.agreement < 0.5
    assert found.outstanding == ()


def test_a_head_that_is_the_same_differs_by_what_layers_hand_it(tmp_path: Path) -> None:
    broken = make_changed(tmp_path / "b", {"blk.2.ffn_down.weight": permuted}, num_layers=4)
    found = compared(tiny(tmp_path / "a"), broken)
    assert (found.own_head.divergence, found.own_head.agreement) == (0.0, 1.0)
    assert found.head.divergence > 0.01


def test_a_loss_is_how_far_the_second_perplexity_is_above_the_first(tmp_path: Path) -> None:
    a = tiny(tmp_path / "a")
    broken = make_changed(tmp_path / "b", {"blk.2.ffn_down.weight": lambda values: -3 * values}, num_layers=4)
    found = compared(a, broken, drawn_text(a, 2, 48))
    assert found.loss.share > 0
    assert found.perplexities[1] / found.perplexities[0] - 1 == pytest.approx(found.loss.share)


def test_sizes_and_embeddings_are_those_of_each_side(tmp_path: Path) -> None:
    a, b = tiny(tmp_path / "a", ffn=128), tiny(tmp_path / "b", "int4", ffn=128)
    found = compared(a, b)
    assert found.num_bytes == (a.manifest.weight_bytes, b.manifest.weight_bytes)
    assert [layer.num_bytes for layer in found.layers] == [
        (first.num_bytes, second.num_bytes) for first, second in zip(a.manifest.layers, b.manifest.layers, strict=True)
    ]
    assert 0 < found.embedding.relative_rms < 0.1


def test_differences_are_a_share_of_the_first_model(tmp_path: Path) -> None:
    doubled = make_changed(tmp_path / "b", {"token_embd.weight": lambda values: 2 * values}, num_layers=4)
    found = compared(tiny(tmp_path / "a"), doubled)
    assert found.embedding.relative_rms == pytest.approx(1.0)
    assert found.embedding.cosine == pytest.approx(1.0)


def test_rows_without_a_direction_are_equal_ones(tmp_path: Path) -> None:
    silent: dict[str, Change] = {"token_embd.weight": lambda values: 0 * values}
    a, b = (make_changed(tmp_path / name, silent, num_layers=4) for name in "ab")
    found = compared(a, b).embedding
    assert (found.cosine, found.relative_rms, found.max_abs) == (1.0, 0.0, 0.0)


def test_one_of_two_layers_can_stand_out(tmp_path: Path) -> None:
    changed: dict[str, Change] = {"blk.1.ffn_gate.weight": lambda values: values * np.float32(1.3)}
    found = compared(tiny(tmp_path / "a", num_layers=2), make_changed(tmp_path / "b", changed, num_layers=2))
    assert [layer.name for layer in found.outstanding] == ["blk.1"]
    assert found.layers[1].own_error < comparison.BROKEN_ERROR


def test_layers_that_are_all_broken_all_stand_out_worst_first(tmp_path: Path) -> None:
    changed: dict[str, Change] = {
        f"blk.{index}.{part}.weight": lambda values, by=3 + index: values * np.float32(by)  # type: ignore[misc]
        for index in range(2)
        for part in ("attn_output", "ffn_down")
    }
    found = compared(tiny(tmp_path / "a", num_layers=2), make_changed(tmp_path / "b", changed, num_layers=2))
    assert [layer.name for layer in found.outstanding] == ["blk.1", "blk.0"]


def test_rounding_of_floats_is_nothing_to_look_at(tmp_path: Path) -> None:
    changed: dict[str, Change] = {"blk.2.ffn_down.weight": lambda values: values * np.float32(1.001)}
    found = compared(tiny(tmp_path / "a"), make_changed(tmp_path / "b", changed, num_layers=4))
    assert found.layers[2].own_error > 4 * found.layers[1].own_error
    assert found.outstanding == ()


def test_layers_of_fewer_bits_are_judged_among_their_like(tmp_path: Path) -> None:
    a = tiny(tmp_path / "a")
    layers = ("int8", "int8", "int4", "int8")
    manifest = a.store.import_model(a.path, "mixed", precisions=Precisions(layers))
    found = compared(a, TinyModel(a.path, a.store, manifest))
    assert found.layers[2].own_error > 4 * found.layers[1].own_error
    assert found.outstanding == ()


def test_logits_are_looked_at_in_groups_that_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tiny(tmp_path / "a"), tiny(tmp_path / "b", "int4")
    at_once = compared(a, b)
    monkeypatch.setattr(parts, "LOGIT_BYTES", 4 * a.manifest.config.vocab_size * 5)
    by_groups = compared(a, b)
    groups = list(parts.logit_rows(TEXT.predicting_rows, a.manifest.config.vocab_size))
    assert {len(rows) for rows in groups[:-1]} == {5}
    assert by_groups.perplexities == pytest.approx(at_once.perplexities)
    assert by_groups.head.divergence == pytest.approx(at_once.head.divergence, rel=1e-3)
    assert by_groups.head.agreement == at_once.head.agreement


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


def test_exact_parts_leave_activations_as_they_are(tmp_path: Path) -> None:
    model = tiny(tmp_path, "int8")
    tokens = make_tokens(24, 280)
    chain = open_chain(model.manifest, model.blob_directory, accuracy_level=0, slot_tokens=len(tokens))
    expected = [chain.decode(token, position) for position, token in enumerate(tokens)]
    chain.close()
    exact, text = parts_of(model, is_exact=True), cut_tokens(tokens, [], window_tokens=24, max_tokens=100)
    with exact.head() as run:
        ours = run(final_hidden(exact, text, lambda _: None))
    np.testing.assert_allclose(ours, np.reshape(expected, ours.shape), atol=1e-4)


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
