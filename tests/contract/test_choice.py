"""Which layers of a tiny model get 4 bits: those whose rounding shows in the answers stay at 8, and the target is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation import choice as choosing
from evaluation.choice import MIN_TOKENS, Choice, choose, shipped_texts
from evaluation.parts import Parts, final_hidden, score
from evaluation.sensitivity import measure
from evaluation.text import Text
from evaluation.variants import open_variants
from modelstore.formats import open_model
from modelstore.requantize import FLOAT32, INT4_ASYM, Precisions
from modelstore.source import SourceModel
from shoal.errors import StorageFull
from tests.support.judged_models import Change, drawn_text, make_changed
from tests.support.shards import Floats, TinyModel

NUM_LAYERS, FFN, HIDDEN, SENSITIVE = 4, 128, 128, 2
SIZES: dict[str, Any] = {"num_layers": NUM_LAYERS, "ffn": FFN, "hidden": HIDDEN}
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def on_a_grid(values: Floats) -> Floats:
    """The nearest values that 4 bits can hold exactly: -8 to 7 steps, with both ends in every block."""
    blocks = values.reshape(len(values), -1, 32)
    steps = np.clip(np.rint(blocks / (np.abs(blocks).max() / 8)), -8, 7)
    steps[..., 0], steps[..., 1] = -8, 7
    grid: Floats = (steps * (np.abs(blocks).max() / 8)).astype(np.float32)
    return grid.reshape(values.shape)


def without_every_32nd_row(values: Floats) -> Floats:
    changed = on_a_grid(values)
    changed[::32] = 0
    return changed


def with_idle_giants(values: Floats) -> Floats:
    """Each block's first value is so large that 4 bits have no step left for the others; its input is always 0."""
    changed = values * np.float32(2)
    changed[:, ::32] = 20 * np.abs(changed).std()
    return changed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    changes: dict[str, Change] = {
        f"blk.{index}.{part}.weight": on_a_grid for index in range(NUM_LAYERS) for part in MATRICES
    }
    changes[f"blk.{SENSITIVE}.ffn_gate.weight"] = without_every_32nd_row
    changes[f"blk.{SENSITIVE}.ffn_down.weight"] = with_idle_giants
    changes["output.weight"] = lambda values: values * np.float32(3)
    return make_changed(tmp_path_factory.mktemp("choice") / "model", changes, **SIZES)


@pytest.fixture(scope="module")
def texts(model: TinyModel) -> tuple[Text, Text]:
    return drawn_text(model, 3, 48, seed=1), drawn_text(model, 4, 64, seed=2)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "scratch"
    assert not (tmp_path / "scratch").exists()


def chosen(model: TinyModel, scratch: Path, texts: tuple[Text, Text], target: float) -> Choice:
    with open_model(model.path) as source, open_variants(source, scratch, is_forced=False) as variants:
        return choose(variants, target, 1, lambda _: None, texts=texts)


def test_the_sensitive_layer_alone_stays_at_8_bits(model: TinyModel, scratch: Path, texts: tuple[Text, Text]) -> None:
    choice = chosen(model, scratch, texts, target=0.02)
    assert choice.kept == (SENSITIVE,)
    assert choice.is_met
    assert choice.loss.share <= 0.02
    assert choice.num_bytes < choice.num_bytes_at_8_bits
    assert choice.loss != choice.loss_at_8_bits
    assert choice.num_tokens == len(texts[1].targets)
    others = [share for index, share in enumerate(choice.divergences) if index != SENSITIVE]
    assert choice.divergences[SENSITIVE] > 10 * max(others)


def test_a_generous_target_puts_all_layers_at_4_bits(model: TinyModel, scratch: Path, texts: tuple[Text, Text]) -> None:
    choice = chosen(model, scratch, texts, target=1.0)
    assert choice.kept == ()
    assert choice.loss.share > 0.02


def test_where_8_bits_lose_more_than_the_target_all_stay_there(
    model: TinyModel, scratch: Path, texts: tuple[Text, Text]
) -> None:
    choice = chosen(model, scratch, texts, target=-0.5)
    assert choice.kept == tuple(range(NUM_LAYERS))
    assert not choice.is_met
    assert choice.loss == choice.loss_at_8_bits


def test_the_reference_is_the_file_in_float32_on_the_text_that_is_held_out(
    model: TinyModel, scratch: Path, texts: tuple[Text, Text]
) -> None:
    exact = Parts(model.manifest, model.blob_directory, 1, is_exact=True)
    with exact.head() as run:
        found = score(run, final_hidden(exact, texts[1], lambda _: None), texts[1], model.manifest.config.vocab_size)
    choice = chosen(model, scratch, texts, target=1.0)
    assert choice.reference_perplexity == pytest.approx(found.perplexity, rel=1e-4)


def test_a_layers_divergence_is_that_of_the_model_with_that_layer_rounded_alone(
    model: TinyModel, scratch: Path, texts: tuple[Text, Text]
) -> None:
    layers = tuple(INT4_ASYM if index == 1 else FLOAT32 for index in range(NUM_LAYERS))
    rounded = model.store.import_model(model.path, "one", precisions=Precisions(layers, FLOAT32))
    one, exact = (Parts(manifest, model.blob_directory, 1, is_exact=True) for manifest in (rounded, model.manifest))
    hidden, reference = (final_hidden(parts, texts[0], lambda _: None) for parts in (one, exact))
    with one.head() as run, exact.head() as run_exact:
        found = score(run, hidden, texts[0], model.manifest.config.vocab_size, (run_exact, reference))
    with open_model(model.path) as source, open_variants(source, scratch, is_forced=False) as variants:
        measured = measure(variants, *texts, INT4_ASYM, 1, lambda _: None)
        names = {path.name for path in variants.folder.iterdir()}
    assert measured.divergences[1] == pytest.approx(found.divergence, rel=1e-3)
    assert not names & {layer.digest for layer in model.manifest.layers}


def test_what_layers_do_alone_says_where_to_measure_first(
    model: TinyModel, scratch: Path, texts: tuple[Text, Text]
) -> None:
    told: list[str] = []
    with open_model(model.path) as source, open_variants(source, scratch, is_forced=False) as variants:
        choose(variants, 0.02, 1, told.append, texts=texts)
    assert [line for line in told if "measuring" in line] == [
        f"measuring with {count} of 4 layers at 4 bits" for count in (0, 3, 4)
    ]


def test_the_shipped_text_is_parted_into_windows_to_rank_by_and_others_to_measure_on(
    model: TinyModel, scratch: Path
) -> None:
    with open_model(model.path) as source, open_variants(source, scratch, is_forced=False) as variants:
        both = shipped_texts(variants)
    first, second = ({window.tobytes() for window in text.windows} for text in both)
    assert len(first) > 1
    assert abs(len(first) - len(second)) <= 1
    assert not first & second


def test_a_larger_model_is_judged_by_less_text_but_not_by_less_than_some(
    model: TinyModel, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(work: float) -> tuple[int, int]:
        """Of both texts; more work that is allowed is as good as a smaller model."""
        monkeypatch.setattr(choosing, "SENSITIVITY_WORK", work)
        monkeypatch.setattr(choosing, "MEASURE_WORK", work)
        with open_model(model.path) as source, open_variants(source, scratch, is_forced=False) as variants:
            ranking, held_out = shipped_texts(variants)
        return ranking.num_tokens, held_out.num_tokens

    # Multiplications of a token: by all layers, and by the head.
    once = tokens_once(model)
    assert tokens(0.0) == (MIN_TOKENS, MIN_TOKENS)
    ranking, held_out = tokens(1024 * once)
    assert MIN_TOKENS <= ranking < held_out == 1024


def tokens_once(model: TinyModel) -> int:
    config = model.manifest.config
    of_layers = sum(linear.n * linear.k for layer in model.manifest.layers for linear in layer.linears.values())
    return of_layers + config.hidden_size * config.vocab_size


def test_the_same_model_gives_the_same_choice(model: TinyModel, scratch: Path, texts: tuple[Text, Text]) -> None:
    assert chosen(model, scratch, texts, 0.02) == chosen(model, scratch, texts, 0.02)


def test_an_interrupted_choice_leaves_nothing_behind(model: TinyModel, scratch: Path, texts: tuple[Text, Text]) -> None:
    def interrupt(label: str) -> None:
        if "layer 3" in label:
            raise KeyboardInterrupt

    with (
        open_model(model.path) as source,
        pytest.raises(KeyboardInterrupt),
        open_variants(source, scratch, is_forced=False) as variants,
    ):
        choose(variants, 0.02, 1, interrupt, texts=texts)


def test_too_little_room_for_the_trials_is_said_before_any(
    model: TinyModel, scratch: Path, texts: tuple[Text, Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(scratch.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageFull, match="its disk has 1,000 left"):
        chosen(model, scratch, texts, 1.0)


def test_what_a_killed_choice_left_is_cleared_away(model: TinyModel, scratch: Path, texts: tuple[Text, Text]) -> None:
    scratch.mkdir()
    (scratch / "blob").write_bytes(b"half")
    assert chosen(model, scratch, texts, 1.0).kept == ()


def test_the_choice_is_what_the_store_packs(model: TinyModel, tmp_path: Path, texts: tuple[Text, Text]) -> None:
    def choose_for(source: SourceModel, folder: Path) -> Precisions:
        with open_variants(source, folder, is_forced=False) as variants:
            return Precisions(choose(variants, 0.02, 1, lambda _: None, texts=texts).layers)

    manifest = model.store.import_model(model.path, "auto", precisions=choose_for)
    kinds = [layer.linears["ffn_down"].kind for layer in manifest.layers]
    assert kinds == ["int4", "int4", "int8", "int4"]
    assert manifest.quantization == "F32 as int4-asym and int8"
    assert not list(model.store.root.glob("partial/*.auto"))
