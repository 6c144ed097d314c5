"""What a comparison says in words, columns and a page, of figures made by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation import page, tables
from evaluation.comparison import Comparison, Difference, HeadComparison, LayerComparison
from evaluation.scores import Loss
from shoal.errors import ConfigError

MIB = 1 << 20


def layer(index: int, own_error: float, *, stands_out: bool = False) -> LayerComparison:
    own, piled_up = Difference(0.1234, 0.9, 0.02), Difference(123.4, 0.8, 0.04)
    return LayerComparison(index, (4 * MIB, MIB), own, piled_up, own_error, stands_out)


def comparison(*layers: LayerComparison) -> Comparison:
    return Comparison(
        names=("a", "b"),
        num_bytes=(40 * MIB, 10 * MIB),
        num_tokens=1500,
        num_left_out=0,
        embedding=Difference(250.6, 0.99, 0.01),
        layers=layers,
        own_head=HeadComparison(0.01, 0.99),
        head=HeadComparison(0.02, 0.875),
        perplexities=(20.0, 20.2),
        loss=Loss(0.01, 0.002),
    )


def test_a_broken_layer_is_to_be_looked_at_worst_first() -> None:
    found = comparison(layer(0, 0.6, stands_out=True), layer(1, 0.01), layer(2, 1.2, stands_out=True))
    assert tables.verdict(found) == "Look at blk.2 (120%), blk.0 (60%): that share of what they add is different in B."


def test_a_layer_that_is_not_broken_is_less_exact() -> None:
    found = comparison(layer(0, 0.3, stands_out=True), layer(1, 0.01))
    assert tables.verdict(found).startswith("Less exact than layers stored alike: blk.0 (30%)")


def test_of_many_layers_a_sentence_names_a_few() -> None:
    found = comparison(*(layer(index, 0.9, stands_out=True) for index in range(10)))
    assert "blk.7 (90%) and 2 more:" in tables.verdict(found)
    assert "blk.8" not in tables.verdict(found)


def test_rows_have_sizes_of_both_and_the_mark_where_it_belongs() -> None:
    embedding, first, second, head = tables.rows(comparison(layer(0, 0.01), layer(1, 0.9, stands_out=True)))
    assert embedding[4:7] == ("251", "0.99000", "0.01")
    assert first == ("blk.0", "4.00", "1.00", "0.01", "0.12", "0.90000", "0.02", "0.80000", "0.04", "")
    assert second[-1] == tables.MARK
    assert (head[3], head[7]) == ("KL 0.01", "KL 0.02")


def test_the_summary_has_the_loss_in_percent_and_the_size_of_b_as_a_share_of_a() -> None:
    assert dict(tables.summary(comparison(layer(0, 0.01)))) == {
        "perplexity A": "20.000",
        "perplexity B": "20.200 (+1.00 % ± 0.20)",
        "KL of A from B": "0.02 nats a token",
        "same first choice": "87.5%",
        "size": "A 40.0 MiB, B 10.0 MiB (25%)",
    }


def test_what_of_a_text_was_not_read_is_said() -> None:
    found = comparison(layer(0, 0.01))
    assert tables.text_note(found) == "1,500 tokens of text"
    assert tables.text_note(replace(found, num_left_out=2000)) == "1,500 tokens of text; 2,000 more are left out"


def test_a_page_of_a_sound_model_has_nothing_in_red() -> None:
    pytest.importorskip("matplotlib")
    sound, broken = comparison(layer(0, 0.0)), comparison(layer(0, 0.9, stands_out=True))
    assert 'class="bad"' not in page.to_html(sound)
    assert len(re.findall('<(p|tr) class="bad"', page.to_html(broken))) == 2


def test_the_picture_marks_layers_that_stand_out_and_shows_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plots = pytest.importorskip("loadtest.plots", reason="needs matplotlib")
    drawn: list[Any] = []

    def draw(name: str, curves: list[Any]) -> str:
        drawn.extend(curves)
        return "<svg></svg>"

    monkeypatch.setattr(plots, "draw_curves", draw)
    page.to_html(comparison(layer(0, 0.0), layer(1, 0.9, stands_out=True)))
    errors, _ = drawn
    assert errors.marks == (1.0,)
    assert errors.is_log_y
    assert [y for _, y in errors.curves[0].points] == [page.LEAST_SHOWN, 0.9]


def test_a_page_without_matplotlib_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(page, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match="pip install"):
        page.write_page(tmp_path / "page.html", comparison(layer(0, 0.1)))
    assert not (tmp_path / "page.html").exists()
