"""`shoal models compare`, and how import is told what to do with float weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.quantize import describe, parse_target, spans
from evaluation.choice import Choice
from evaluation.scores import Loss
from modelstore.store import ModelStore
from shoal.errors import InvalidRequest
from tests.support.judged_models import FLOATS, make_changed
from tests.support.tiny_gguf import write_tiny_gguf
from tests.unit.conftest import Run

# What a terminal shows at least, and what the table may take.
WIDTH = 100


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", num_layers=3, **FLOATS)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("hello world, the weather in the other hall is warm. " * 3)
    return path


def imported(run: Run, path: Path, name: str, *options: str) -> None:
    outcome = run("models", "import", str(path), "--name", name, *options)
    assert outcome.code == 0, outcome.err


def test_a_comparison_is_a_table_of_parts_and_a_verdict(run: Run, file: Path, text: Path) -> None:
    imported(run, file, "a", "--quantize", "none")
    imported(run, file, "b", "--quantize", "int4")
    outcome = run("models", "compare", "a", "b", "--text", str(text))
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("embedding", "blk.", "head"))] == [
        "embedding", "blk.0", "blk.1", "blk.2", "head",
    ]  # fmt: skip
    assert lines[-1] == "No layer stands out."
    assert max(map(len, lines)) <= WIDTH


def test_the_broken_layer_is_pointed_at(run: Run, file: Path, tmp_path: Path, text: Path) -> None:
    imported(run, file, "a", "--quantize", "none")
    broken = make_changed(tmp_path / "b", {"blk.1.ffn_up.weight": lambda values: -values}, num_layers=3)
    imported(run, broken.path, "b", "--quantize", "int4")
    page = tmp_path / "page.html"
    outcome = run("models", "compare", "a", "b", "--text", str(text), "--html", str(page))
    marked = [line for line in outcome.out.splitlines() if "<-- here" in line]
    assert [line.split()[0] for line in marked] == ["blk.1"]
    assert max(map(len, outcome.out.splitlines())) <= WIDTH
    assert "Look at blk.1" in outcome.out
    assert "Look at blk.1" in page.read_text()


def test_json_is_one_object_with_every_layer(run: Run, file: Path, text: Path) -> None:
    imported(run, file, "a", "--quantize", "none")
    outcome = run("models", "compare", "a", "a", "--text", str(text), "--json")
    found = json.loads(outcome.out)
    assert [layer["index"] for layer in found["layers"]] == [0, 1, 2]
    assert found["stands_out"] == []
    assert found["head"]["agreement"] == 1.0


def test_a_long_text_is_cut_with_a_note(run: Run, file: Path, text: Path) -> None:
    imported(run, file, "a")
    outcome = run("models", "compare", "a", "a", "--text", str(text), "--max-tokens", "20")
    assert "its first 20 tokens are read" in outcome.err
    assert "20 tokens of text" in outcome.out


def test_models_with_other_contexts_are_judged_in_the_shorter_one(run: Run, tmp_path: Path, text: Path) -> None:
    for name, context in (("long", 256), ("short", 24)):
        imported(run, write_tiny_gguf(tmp_path / f"{name}.gguf", context=context, **FLOATS), name)
    outcomes = [
        run("models", "compare", *names, "--text", str(text)) for names in (("long", "short"), ("short", "long"))
    ]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].err


def test_an_empty_text_is_refused(run: Run, file: Path, tmp_path: Path) -> None:
    imported(run, file, "a")
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    outcome = run("models", "compare", "a", "a", "--text", str(empty))
    assert outcome.code == 1
    assert "a text of 0 tokens has nothing to predict" in outcome.err


def test_models_with_other_tokenizers_are_refused(run: Run, file: Path, tmp_path: Path, text: Path) -> None:
    imported(run, file, "a")
    other = write_tiny_gguf(
        tmp_path / "other.gguf",
        num_layers=3,
        **FLOATS,
        extra_keys={"tokenizer.ggml.add_bos_token": True},
    )
    imported(run, other, "b")
    outcome = run("models", "compare", "a", "b", "--text", str(text))
    assert outcome.code == 1
    assert "a and b have different tokenizers" in outcome.err


def test_a_page_that_cannot_be_written_is_said_before_anything_is_compared(
    run: Run, file: Path, tmp_path: Path, text: Path
) -> None:
    imported(run, file, "a")
    page = tmp_path / "nowhere" / "page.html"
    outcome = run("models", "compare", "a", "a", "--text", str(text), "--html", str(page))
    assert outcome.code == 1
    assert "layer 1 of 3" not in outcome.err
    assert str(page) in outcome.err


def test_another_model_is_not_compared(run: Run, file: Path, tmp_path: Path, text: Path) -> None:
    imported(run, file, "a")
    imported(run, write_tiny_gguf(tmp_path / "other.gguf", num_layers=2, **FLOATS), "b")
    outcome = run("models", "compare", "a", "b", "--text", str(text))
    assert outcome.code == 1
    assert "a has 3 layers and b has 2: only forms of one model can be compared" in outcome.err


def test_a_damaged_model_is_not_compared(run: Run, file: Path, tmp_path: Path, text: Path) -> None:
    imported(run, file, "a")
    store = ModelStore(tmp_path)
    path = store.root / "blobs" / store.open("a").layers[1].digest
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    outcome = run("models", "compare", "a", "a", "--text", str(text))
    assert outcome.code == 1
    assert "perplexity" not in outcome.out


def test_int4_is_smaller_than_int8_and_the_manifest_says_so(run: Run, file: Path, tmp_path: Path) -> None:
    imported(run, file, "eight")
    imported(run, file, "four", "--quantize", "int4")
    store = ModelStore(tmp_path)
    eight, four = store.open("eight"), store.open("four")
    assert four.weight_bytes < eight.weight_bytes
    assert (eight.quantization, four.quantization) == ("F32", "F32 as int4")


def test_weights_that_are_quantised_stay_unless_asked(run: Run, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q8_0")
    imported(run, path, "kept", "--quantize", "int4")
    imported(run, path, "rounded", "--quantize", "int4", "--requantize")
    store = ModelStore(tmp_path)
    kinds = {name: store.open(name).layers[0].linears["ffn_down"].kind for name in ("kept", "rounded")}
    assert kinds == {"kept": "int8", "rounded": "int4"}
    assert store.open("kept").quantization == "Q8_0"
    assert store.open("rounded").quantization == "Q8_0 as int4"


def test_4_bits_are_not_made_more_by_rounding_anew(run: Run, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", weight_type="Q4_1")
    imported(run, path, "plain")
    imported(run, path, "rounded", "--quantize", "int8", "--requantize")
    store = ModelStore(tmp_path)
    assert store.open("plain").layers == store.open("rounded").layers


def test_auto_says_what_it_chose_and_measured(run: Run, tmp_path: Path) -> None:
    # Large enough that 4 bits with zero points take fewer pages than 8.
    sizes: dict[str, Any] = {"num_layers": 2, "hidden": 128, "ffn": 128, "context": 64}
    file = write_tiny_gguf(tmp_path / "wide.gguf", **FLOATS, **sizes)
    outcome = run("models", "import", str(file), "--name", "a", "--quantize", "auto", "--target-ppl-loss", "90%")
    assert outcome.code == 0, outcome.err
    assert "of 2 layers are at 4 bits" in outcome.err
    assert "the target was 90 %" in outcome.err


def test_a_target_without_auto_is_refused(run: Run, file: Path) -> None:
    outcome = run("models", "import", str(file), "--name", "a", "--target-ppl-loss", "1%")
    assert outcome.code == 1
    assert "target_ppl_loss: is for --quantize auto only" in outcome.err


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.5 %", 0.005), (" 100% ", 1.0)])
def test_a_target_is_a_share_in_percent(text: str, share: float) -> None:
    assert parse_target(text) == share


@pytest.mark.parametrize("text", ["1", "0%", "-1%", "101%", "1e3%", "%", "nan%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is no share such as 1% or"):
        parse_target(text)


def choice(layers: tuple[str, ...], loss: float, target: float = 0.01) -> Choice:
    return Choice(
        layers=layers,
        divergences=(0.1,) * len(layers),
        target=target,
        reference_perplexity=20.0,
        loss=Loss(loss, 0.001),
        loss_at_8_bits=Loss(0.002, 0.001),
        num_bytes=3 << 20,
        num_bytes_at_8_bits=4 << 20,
        num_tokens=500,
    )


def test_a_choice_names_the_layers_that_stay_at_8_bits() -> None:
    first, second = describe(choice(("int4-asym", "int8", "int4-asym"), 0.008))
    assert first == "2 of 3 layers are at 4 bits; at 8 bits stay blk.1: 3.0 MiB instead of 4.0 MiB."
    assert "+0.80 % ± 0.10 of 20.00, on 500 tokens" in second
    assert "at 8 bits everywhere +0.20 % ± 0.10; the target was 1 %" in second


def test_a_target_that_8_bits_miss_is_said_to_be_missed() -> None:
    (told,) = describe(choice(("int8", "int8"), 0.03))
    assert told.startswith("Nothing is at 4 bits: 8 bits everywhere already cost more than 1 %")


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((4,), "4"), ((0, 1, 2, 3, 7), "0-3, 7"), ((0, 2, 3), "0, 2-3")]
)
def test_layers_in_a_row_are_drawn_together(numbers: tuple[int, ...], text: str) -> None:
    assert spans(numbers) == text
