"""What each way to quantise a model costs and saves: `python -m tests.bench.quantisation [--out PATH]`.

Writes the SmolLM2 file anew with its weights in float16, imports that in every way, and judges each by the shipped text
against the float32 form. Those weights had been rounded to 16 steps a block before: other 16 steps for them lose more than
they would of weights that are floats by birth, so the int4 lines are worse here than elsewhere, and auto has less to give.
Seconds are of processor time, for the sake of busy machines.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cli.quantize import Chosen, describe
from evaluation.parts import Parts, final_hidden, score
from evaluation.scores import loss_of
from evaluation.text import cut_text, shipped_text
from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from orchestrator.tokenizer import Tokenizer
from shoal.types import LayerRange
from tests.bench.baseline import Part
from tests.bench.machine import LoadMeter
from tests.bench.real_models import bytes_of_token, decode_run
from tests.bench.report import table
from tests.support.float_gguf import write_as_floats
from tests.support.real_model import real_gguf

WAYS = ("none", "int8", "int4", "int4-asym", "auto")
AS_FILE = "Q4_1, as its file"
WINDOW_TOKENS = 512
NUM_STEPS, NUM_ROUNDS = 24, 3

Row = dict[str, object]


def imports(store: ModelStore, path: Path, ways: list[str]) -> Iterator[tuple[str, Manifest, float]]:
    """Each way's manifest, and the seconds that its import took; first the float32 form."""
    floats = write_as_floats(path, store.root / "floats.gguf")
    for way in ways:
        chosen = Chosen(way, "", is_forced=False, update=lambda done, total, label: None)
        began = time.process_time()
        manifest = store.import_model(floats, way, precisions=chosen)
        yield way, manifest, time.process_time() - began
        if chosen.choice is not None:
            say("\n".join(describe(chosen.choice)))
    began = time.process_time()
    manifest = store.import_model(path, "as-file")
    yield AS_FILE, manifest, time.process_time() - began


def rows(store: ModelStore, path: Path, ways: list[str], max_tokens: int) -> Iterator[Row]:
    reference = None
    steps: dict[str, list[float]] = {}
    for way, manifest, import_s in imports(store, path, ways):
        say(f"judging {way}")
        text = cut_text(
            shipped_text(), Tokenizer(manifest.tokenizer), window_tokens=WINDOW_TOKENS, max_tokens=max_tokens
        )
        parts = Parts(manifest, store.root / "blobs", 1)
        hidden = final_hidden(parts, text, lambda _: None)
        reference = reference or (parts, hidden)
        with parts.head() as run, reference[0].head() as run_reference:
            found = score(run, hidden, text, manifest.config.vocab_size, (run_reference, reference[1]))
            losses = score(run_reference, reference[1], text, manifest.config.vocab_size).losses
        loss = loss_of(found.losses, losses)
        steps[way] = decode_ms(store, manifest)
        yield {
            "weights": way if way != "none" else "none (float32)",
            "perplexity": f"{found.perplexity:.3f}",
            "change": f"{100 * loss.share:+.2f} ± {100 * loss.error:.2f} %",
            "KL": f"{found.divergence:.4f}",
            "top-1": f"{found.agreement:.3f}",
            "MiB": f"{manifest.weight_bytes / (1 << 20):.0f}",
            "decode, ms a token": f"{min(steps[way]):.1f}",
            "GB/s": f"{bytes_of_token(manifest) / min(steps[way]) / 1e6:.1f}",
            "import, s": f"{import_s:.0f}",
        }


def decode_ms(store: ModelStore, manifest: Manifest) -> list[float]:
    """Milliseconds of processor time of a token of one stream, on one thread; the best round is the least disturbed."""
    part = Part(store, manifest, LayerRange(0, manifest.config.num_layers))
    try:
        return [decode_run(LoadMeter(()), part, manifest, NUM_STEPS).details["ms"] for _ in range(NUM_ROUNDS)]
    finally:
        part.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quantisation", description="Compare quantisations.")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of the text (default 2048)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="the first is what others are judged by"
    )
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-quantisation-") as folder:
        lines = table(list(rows(ModelStore(Path(folder)), real_gguf(), options.ways, options.max_tokens)))
    found = "\n".join(lines)
    say(found)
    if options.out:
        options.out.write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
