"""Measures what each layer's rounding to 4 bits does to a model's answers, all other layers left in float32.

One walk through the layers for all of them: each layer is loaded once and runs the text as it is, and as it is after each
earlier layer was rounded. Decides nothing; `choice` ranks layers by what is found here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evaluation.parts import Parts, RunHead, logit_rows, score
from evaluation.scores import Doubles, divergences, log_probabilities
from evaluation.text import Text
from evaluation.variants import Variants
from modelstore.requantize import FLOAT32

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivities:
    """divergences: by layer, mean KL in nats of the model with that layer rounded from the one without.

    losses: of the model in float32, for each predicted token of the text that is held out.
    """

    divergences: tuple[float, ...]
    losses: Doubles


def measure(
    variants: Variants, text: Text, held_out: Text, precision: str, num_threads: int, say: Callable[[str], None]
) -> Sensitivities:
    """Measure all layers at a precision on one text, and the model in float32 on another; memory: T E values a layer."""

    def parts(index: int, of: str) -> Parts:
        manifest = variants.manifest_with_layer(index, of)
        return Parts(manifest, variants.folder, num_threads, is_exact=True)

    first, longest = parts(0, FLOAT32), max(text.longest, held_out.longest)
    exact, other = first.embed(text), first.embed(held_out)
    rounded: list[Floats] = []
    for index in range(variants.num_layers):
        say(f"sensitivity, layer {index + 1} of {variants.num_layers}")
        with parts(index, FLOAT32).layer(index, longest) as run:
            rounded = [run(hidden, text) for hidden in rounded]
            before, exact, other = exact, run(exact, text), run(other, held_out)
        with parts(index, precision).layer(index, longest) as run:
            rounded.append(run(before, text))
        variants.forget_layer(index, FLOAT32)
    # Of this one only the head is run.
    return _judge(parts(0, precision), text, held_out, exact, other, rounded, say)


def _judge(
    model: Parts,
    text: Text,
    held_out: Text,
    exact: Floats,
    other: Floats,
    rounded: list[Floats],
    say: Callable[[str], None],
) -> Sensitivities:
    vocab_size = model.manifest.config.vocab_size
    with model.head() as run:
        found = np.zeros(len(rounded))
        groups = list(logit_rows(text.predicting_rows, vocab_size))
        for number, rows in enumerate(groups):
            say(f"sensitivity, what layers do to the answers, {10 * (10 * number // len(groups))} %")
            found += _sums(run, rows, exact, rounded)
        losses = score(run, other, held_out, vocab_size).losses
    return Sensitivities(tuple(float(total) / len(text.targets) for total in found), losses)


def _sums(run: RunHead, rows: NDArray[np.int64], exact: Floats, rounded: list[Floats]) -> Doubles:
    log_p = log_probabilities(run(exact[rows]))
    sums = [divergences(log_p, log_probabilities(run(hidden[rows]))).sum() for hidden in rounded]
    return np.array(sums)
