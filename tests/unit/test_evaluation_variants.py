"""Layers of a tiny model packed at several precisions: what lies in the folder, and what is lent as a manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from evaluation.variants import Variants, open_variants
from modelstore.formats import open_model
from modelstore.requantize import FLOAT32, INT4, INT4_ASYM, INT8
from tests.support.judged_models import FLOATS
from tests.support.tiny_gguf import write_tiny_gguf

Opened = Callable[..., Variants]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Variants of a tiny model of two layers with weights of a type."""
    with ExitStack() as stack:

        def open_one(weight_type: str, *, is_forced: bool = False) -> Variants:
            options = {**FLOATS, "weight_type": weight_type, "num_layers": 2, "hidden": 128, "ffn": 128}
            model = stack.enter_context(open_model(write_tiny_gguf(tmp_path / "tiny.gguf", **options)))
            return stack.enter_context(open_variants(model, tmp_path / "scratch", is_forced=is_forced))

        yield open_one


def files_of(variants: Variants) -> set[str]:
    return {path.name for path in variants.folder.iterdir()}


def test_a_layer_that_is_forgotten_is_deleted_and_made_anew_when_it_is_wanted(opened: Opened) -> None:
    variants = opened("F32")
    first = variants.layer(0, FLOAT32)
    variants.forget_layer(0, FLOAT32)
    assert files_of(variants) == set()
    assert variants.layer(0, FLOAT32) == first
    assert files_of(variants) == {first.digest}


def test_a_layer_that_is_the_same_at_another_precision_is_kept_for_that(opened: Opened) -> None:
    variants = opened("Q8_0")
    assert variants.layer(0, FLOAT32) == variants.layer(0, INT4)
    variants.forget_layer(0, FLOAT32)
    assert files_of(variants) == {variants.layer(0, INT4).digest}


def test_quantised_weights_are_rounded_anew_if_forced(opened: Opened) -> None:
    variants = opened("Q8_0", is_forced=True)
    assert variants.layer(0, INT4).num_bytes < variants.layer(0, INT8).num_bytes


def test_the_room_that_is_asked_for_is_what_all_trials_take_at_most(opened: Opened) -> None:
    variants = opened("F32")
    needed = variants.need_bytes((INT8, INT4_ASYM))
    variants.manifest([INT8, INT8])
    variants.manifest([INT4_ASYM, INT4_ASYM])
    variants.manifest_with_layer(1, FLOAT32)
    taken = sum(path.stat().st_size for path in variants.folder.iterdir())
    assert taken <= needed < 1.2 * taken


def test_a_manifest_for_one_layer_has_its_ends_in_float32(opened: Opened) -> None:
    manifest = opened("F32").manifest_with_layer(1, INT4)
    assert {linear.kind for linear in manifest.layers[1].linears.values()} == {"int4"}
    assert {linear.kind for linear in manifest.head.linears.values()} == {"float32"}
