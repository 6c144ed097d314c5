"""Chooses which layers of a model get 4 bits and which stay at 8, so that its perplexity rises no more than is allowed.

Ranks layers by what their rounding does for the bytes it saves, gives 4 bits to as many of them as a measurement of the
whole allows, and measures that on a part of the text that the ranking has not seen. The same model gives the same choice:
how much text is read depends on the model's size alone, never on a clock. Called by the command line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from evaluation.parts import Parts, final_hidden, score
from evaluation.scores import Doubles, Loss, loss_of
from evaluation.sensitivity import measure
from evaluation.text import Text, cut_text, shipped_text
from evaluation.variants import Variants
from modelstore.manifest import BlobEntry
from modelstore.requantize import INT4_ASYM, INT8
from modelstore.store import require_free_space
from orchestrator.tokenizer import Tokenizer

WINDOW_TOKENS = 256
# Multiplications that measuring sensitivities may take, and one measurement of the whole: a minute or two on two cores for
# models up to some hundred million weights; larger ones get less text, but no less than this.
SENSITIVITY_WORK, MEASURE_WORK = 2.5e12, 4e11
MIN_TOKENS = 256

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen and measured.

    layers: the precision of each. divergences: what rounding each alone to 4 bits does, in nats. loss: of the whole, against
    the file's values in float32; loss_at_8_bits: with no layer at 4 bits. num_bytes, num_bytes_at_8_bits: of all weights.
    num_tokens: of the text that the loss was measured on.
    """

    layers: tuple[str, ...]
    divergences: tuple[float, ...]
    target: float
    reference_perplexity: float
    loss: Loss
    loss_at_8_bits: Loss
    num_bytes: int
    num_bytes_at_8_bits: int
    num_tokens: int

    @property
    def is_met(self) -> bool:
        return self.loss.share <= self.target

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers that stay at 8 bits."""
        return tuple(index for index, precision in enumerate(self.layers) if precision == INT8)


def choose(
    variants: Variants, target: float, num_threads: int, say: Say, *, texts: tuple[Text, Text] | None = None
) -> Choice:
    """Choose for a perplexity that is at most `target` above that of the file's values, as a share of it.

    texts: to rank layers by, and to measure the whole on; by default the text that comes with the package. Where 8 bits
    everywhere lose more than that, no layer gets 4, and the choice says that the target is not met. Raises StorageFull.
    """
    require_free_space(variants.folder, variants.need_bytes((INT8, INT4_ASYM)))
    text, held_out = texts or shipped_texts(variants)
    found = measure(variants, text, held_out, INT4_ASYM, num_threads, say)
    saved = [
        variants.layer(i, INT8).num_bytes - variants.layer(i, INT4_ASYM).num_bytes for i in range(variants.num_layers)
    ]
    ranking = ranked(found.divergences, saved)
    losses: dict[int, Loss] = {}

    def is_met(count: int) -> bool:
        say(f"measuring with {count} of {variants.num_layers} layers at 4 bits")
        model = Parts(variants.manifest(_layers(variants, ranking[:count])), variants.folder, num_threads)
        losses[count] = loss_of(_losses(model, held_out), found.losses)
        return losses[count].share <= target

    count = most(len(ranking), is_met, lambda: _guess(ranking, found.divergences, target - losses[0].share))
    layers = _layers(variants, ranking[:count])
    return Choice(
        layers=layers,
        divergences=found.divergences,
        target=target,
        reference_perplexity=math.exp(float(found.losses.mean())),
        loss=losses[count],
        loss_at_8_bits=losses[0],
        num_bytes=variants.manifest(layers).weight_bytes,
        num_bytes_at_8_bits=variants.manifest(_layers(variants, ())).weight_bytes,
        num_tokens=len(held_out.targets),
    )


def ranked(divergences: Sequence[float], saved: Sequence[int]) -> list[int]:
    """The layers that 4 bits make smaller, first those that do least harm for each byte saved."""
    smaller = [index for index, num_bytes in enumerate(saved) if num_bytes > 0]
    return sorted(smaller, key=lambda index: divergences[index] / saved[index])


def most(limit: int, is_met: Callable[[int], bool], guess: Callable[[], int]) -> int:
    """The largest count in [0, limit] that is met where more is worse, by halving; 0 if even that is not.

    is_met: asked of no count twice. guess: where to look first, asked after 0 was looked at.
    """
    if not is_met(0):
        return 0
    met, not_met = 0, limit + 1
    probe = min(max(guess(), 1), limit)
    while not_met - met > 1:
        if is_met(probe):
            met = probe
        else:
            not_met = probe
        probe = (met + not_met) // 2
    return met


def _guess(ranking: Sequence[int], divergences: Sequence[float], allowed: float) -> int:
    """How many layers may go by what each alone does: what they do together is near the sum, and rounds losses alike."""
    sums = accumulate(divergences[index] for index in ranking)
    return sum(total <= allowed for total in sums)


def _layers(variants: Variants, lowered: Sequence[int]) -> tuple[str, ...]:
    return tuple(INT4_ASYM if index in set(lowered) else INT8 for index in range(variants.num_layers))


def _losses(model: Parts, text: Text) -> Doubles:
    hidden = final_hidden(model, text, lambda _: None)
    with model.head() as run:
        return score(run, hidden, text, model.manifest.config.vocab_size).losses


def shipped_texts(variants: Variants) -> tuple[Text, Text]:
    """Every other window of the shipped text each, no more than the work allows for a model of this size."""
    manifest = variants.manifest(_layers(variants, ()))
    config, of_layers = manifest.config, sum(_weights(layer) for layer in manifest.layers)
    of_head = config.hidden_size * config.vocab_size
    window = min(WINDOW_TOKENS, config.context_tokens)
    whole = cut_text(shipped_text(), Tokenizer(manifest.tokenizer), window_tokens=window, max_tokens=1 << 20)
    walk, once = config.num_layers * (of_layers / 2 + of_head), of_layers + of_head
    return (
        whole.part(0, 2).shortened(max(MIN_TOKENS, int(SENSITIVITY_WORK / walk))),
        whole.part(1, 2).shortened(max(MIN_TOKENS, int(MEASURE_WORK / once))),
    )


def _weights(layer: BlobEntry) -> int:
    return sum(linear.n * linear.k for linear in layer.linears.values())
