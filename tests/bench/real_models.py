"""The real models: what 8-bit activations cost in perplexity, and how fast each reads its weights as it decodes.

Both are run in this process, on one thread, with nothing but the runtime: `python -m tests.bench.run --only models_gemma3`.
A model that is not in the store is not measured; nobody's terms are accepted here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from evaluation.parts import Parts, final_hidden, score
from evaluation.scores import Loss, Scores, loss_of
from evaluation.text import Text, cut_text, shipped_text
from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from orchestrator.tokenizer import Tokenizer
from shoal.types import LayerRange
from tests.bench.baseline import BoundStep, Part
from tests.bench.context import Bench
from tests.bench.figures import Figure, from_pairs
from tests.bench.machine import LoadMeter
from tests.bench.pairs import Run, collect

SMOLLM2, GEMMA3 = "smollm2-135m", "gemma3-270m"
WINDOW_TOKENS, TEXT_TOKENS, QUICK_TEXT_TOKENS = 512, 2048, 256
CONTEXT_TOKENS, WARM_UP_STEPS = 256, 4
NUM_STEPS, QUICK_STEPS = 48, 8
NUM_THREADS = 1


def smollm2(bench: Bench) -> list[Figure]:
    return [_perplexity(bench, "models_smollm2", SMOLLM2)]


def gemma3(bench: Bench) -> list[Figure]:
    """Its perplexity, and its decode speed against SmolLM2's, both for each byte of weights that a token reads."""
    if GEMMA3 not in ModelStore(bench.home_of_models).names():
        note = f"{GEMMA3} is not pulled, its terms are for you to accept"
        return [Figure(name, None, 0, 0, note=note) for name in ("models_gemma3", "models_gemma3_speed")]
    return [_perplexity(bench, "models_gemma3", GEMMA3), _speed(bench)]


def _perplexity(bench: Bench, name: str, model: str) -> Figure:
    """How much perplexity rises by rounding activations to 8 bits, the stored weights being those of the file."""
    store = ModelStore(bench.home_of_models)
    manifest = store.open(model)
    max_tokens = QUICK_TEXT_TOKENS if bench.is_quick else TEXT_TOKENS
    text = cut_text(shipped_text(), Tokenizer(manifest.tokenizer), window_tokens=WINDOW_TOKENS, max_tokens=max_tokens)
    served, reference = (
        _scores(Parts(manifest, store.root / "blobs", NUM_THREADS, is_exact), text) for is_exact in (False, True)
    )
    loss: Loss = loss_of(served.losses, reference.losses)
    row: dict[str, object] = {
        "perplexity": served.perplexity,
        "reference": reference.perplexity,
        "error": loss.error,
        "weight_bytes": manifest.weight_bytes,
        "counts": True,
    }
    note = (
        f"{served.perplexity:.3f} against {reference.perplexity:.3f} with float32 activations, ± {loss.error:.2%}, "
        f"{len(served.losses)} tokens; deterministic"
    )
    # What no other load can change counts as often as it would be measured.
    return Figure(name, loss.share, 3, 0, [row], note)


def _scores(parts: Parts, text: Text) -> Scores:
    hidden = final_hidden(parts, text, lambda _: None)
    with parts.head() as run:
        return score(run, hidden, text, parts.manifest.config.vocab_size)


def _speed(bench: Bench) -> Figure:
    store = ModelStore(bench.home_of_models)
    manifests = [store.open(SMOLLM2), store.open(GEMMA3)]
    parts = [Part(store, manifest, LayerRange(0, manifest.config.num_layers)) for manifest in manifests]
    num_steps = QUICK_STEPS if bench.is_quick else NUM_STEPS
    meter = LoadMeter(())
    runs: list[Callable[[], Run]] = [
        partial(decode_run, meter, part, manifest, num_steps) for part, manifest in zip(parts, manifests, strict=True)
    ]
    try:
        pairs = collect(bench.plan, *runs)
    finally:
        for part in parts:
            part.close()
    told = []
    for name, found in (
        (SMOLLM2, [pair.before for pair in pairs.pairs]),
        (GEMMA3, [pair.candidate for pair in pairs.pairs]),
    ):
        step_ms, rate = (
            statistics.median(values) for values in zip(*((r.details["ms"], r.value) for r in found), strict=True)
        )
        told.append(f"{name} {step_ms:.1f} ms a token, {rate:.2f} GB/s")
    return from_pairs("models_gemma3_speed", pairs, lambda pair: pair.ratio, "; ".join(told))


def decode_run(meter: LoadMeter, part: Part, manifest: Manifest, num_steps: int) -> Run:
    """GB of weights a second, of processor time: the median step of one SOLO stream at a context of 256."""
    step = BoundStep(part, 1, 1, is_shared=False)
    seconds = []
    meter.start()
    for number in range(WARM_UP_STEPS + num_steps):
        began = time.process_time()
        step.run(CONTEXT_TOKENS + number)
        seconds.append(time.process_time() - began)
    load, step_s = meter.stop(), statistics.median(seconds[WARM_UP_STEPS:])
    return Run(bytes_of_token(manifest) / step_s / 1e9, load, {"ms": 1e3 * step_s})


def bytes_of_token(manifest: Manifest) -> int:
    """The weights that a token is multiplied by: of a table that it is looked up in too, all rows if it is the head."""
    head = manifest.embedding if manifest.config.is_head_tied else manifest.head
    return sum(blob.num_bytes for blob in manifest.layers) + head.num_bytes
