"""Compares two stored forms of one model on a text, part by part, and says which layers broke.

Each layer is fed twice: with the first model's input, which shows what the layer itself does differently, and with what came
out of the second model's layers before it, which shows what has piled up. Holds one layer of each and a few arrays of the
text's hidden rows. Called by the command line; how parts run is `parts`' business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evaluation.parts import Parts, score
from evaluation.scores import Loss, loss_of
from evaluation.text import Text
from modelstore.manifest import BlobEntry, Manifest
from shoal.errors import InvalidRequest

# A layer's own error that stands out: so many times the usual one of layers stored alike, and no rounding of floats.
TIMES_USUAL, LEAST_ERROR = 4.0, 0.02
# Half of what a layer adds is wrong: broken, whatever the others do.
BROKEN_ERROR = 0.5

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of hidden rows [T, E] from the first model's.

    max_abs: the largest. cosine: mean over the rows. relative_rms: root mean square, relative to the first's.
    """

    max_abs: float
    cosine: float
    relative_rms: float


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """One layer. num_bytes: in both models. own: fed with the first's input; piled_up: with the second's own.

    own_error: how far what the layer adds to its input is from what the first's adds, as a share of that, by rows.
    """

    index: int
    num_bytes: tuple[int, int]
    own: Difference
    piled_up: Difference
    own_error: float
    stands_out: bool = False

    @property
    def name(self) -> str:
        """As files call it."""
        return f"blk.{self.index}"


@dataclass(frozen=True, slots=True)
class HeadComparison:
    """divergence: mean KL of the first's distribution from the second's, in nats. agreement: of their first choices."""

    divergence: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on a text. own_head: the second's head fed with the first's hidden rows; head: with its own."""

    names: tuple[str, str]
    num_bytes: tuple[int, int]
    num_tokens: int
    num_left_out: int
    embedding: Difference
    layers: tuple[LayerComparison, ...]
    own_head: HeadComparison
    head: HeadComparison
    perplexities: tuple[float, float]
    loss: Loss

    @property
    def outstanding(self) -> tuple[LayerComparison, ...]:
        """The layers that stand out, worst first."""
        found = [layer for layer in self.layers if layer.stands_out]
        return tuple(sorted(found, key=lambda layer: -layer.own_error))


def require_comparable(a: Manifest, b: Manifest) -> None:
    """Raise InvalidRequest, saying what differs, unless both are forms of one model."""
    facts = {
        "layers": (a.config.num_layers, b.config.num_layers),
        "hidden values": (a.config.hidden_size, b.config.hidden_size),
        "tokens in the vocabulary": (a.config.vocab_size, b.config.vocab_size),
    }
    for what, (first, second) in facts.items():
        if first != second:
            raise InvalidRequest(
                "model",
                f"{a.name} has {first:,} {what} and {b.name} has {second:,}: only forms of one model can be compared",
            )


def compare(a: Parts, b: Parts, text: Text, say: Callable[[str], None]) -> Comparison:
    """Compare two models that passed require_comparable; say: told what is under way."""
    hidden_a, hidden_b = a.embed(text), b.embed(text)
    embedding = _difference(hidden_a, hidden_b)
    layers = []
    for index in range(a.num_layers):
        say(f"layer {index + 1} of {a.num_layers}")
        with a.layer(index, text.longest) as run:
            out_a = run(hidden_a, text)
        with b.layer(index, text.longest) as run:
            fed, out_b = run(hidden_a, text), run(hidden_b, text)
        layers.append(
            LayerComparison(
                index=index,
                num_bytes=(a.manifest.layers[index].num_bytes, b.manifest.layers[index].num_bytes),
                own=_difference(out_a, fed),
                piled_up=_difference(out_a, out_b),
                own_error=_share_of_update(hidden_a, out_a, fed),
            )
        )
        hidden_a, hidden_b = out_a, out_b
    say("head")
    return _with_heads(a, b, text, (hidden_a, hidden_b), embedding, _marked(a.manifest, b.manifest, layers))


def _with_heads(
    a: Parts,
    b: Parts,
    text: Text,
    hidden: tuple[Floats, Floats],
    embedding: Difference,
    layers: tuple[LayerComparison, ...],
) -> Comparison:
    vocab_size = a.manifest.config.vocab_size
    with a.head() as run_a, b.head() as run_b:
        alone = score(run_a, hidden[0], text, vocab_size)
        own = score(run_b, hidden[0], text, vocab_size, (run_a, hidden[0]))
        whole = score(run_b, hidden[1], text, vocab_size, (run_a, hidden[0]))
    return Comparison(
        names=(a.manifest.name, b.manifest.name),
        num_bytes=(a.manifest.weight_bytes, b.manifest.weight_bytes),
        num_tokens=text.num_tokens,
        num_left_out=text.num_left_out,
        embedding=embedding,
        layers=layers,
        own_head=HeadComparison(own.divergence, own.agreement),
        head=HeadComparison(whole.divergence, whole.agreement),
        perplexities=(alone.perplexity, whole.perplexity),
        loss=loss_of(whole.losses, alone.losses),
    )


def _difference(a: Floats, b: Floats) -> Difference:
    change = b - a
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products = np.einsum("te,te->t", a, b)
    # Rows that are all zero have no direction: equal ones count as such.
    cosines = np.divide(products, lengths, out=np.ones_like(products), where=lengths > 0)
    size = float(np.linalg.norm(a))
    return Difference(
        max_abs=float(np.abs(change).max()),
        cosine=min(float(cosines.mean()), 1.0),
        relative_rms=float(np.linalg.norm(change)) / size if size else 0.0,
    )


def _share_of_update(hidden: Floats, a: Floats, b: Floats) -> float:
    """A mean over rows, for a few rows have activations that would drown all others."""
    added = np.linalg.norm(a - hidden, axis=1)
    changed = np.linalg.norm(b - a, axis=1)
    shares = np.divide(changed, added, out=np.zeros_like(changed), where=added > 0)
    return float(shares.mean())


def _marked(a: Manifest, b: Manifest, layers: Sequence[LayerComparison]) -> tuple[LayerComparison, ...]:
    """The layers, those that stand out among layers stored alike marked."""
    alike: dict[tuple[object, ...], list[float]] = defaultdict(list)
    stored = [(_kinds(a.layers[layer.index]), _kinds(b.layers[layer.index])) for layer in layers]
    for key, layer in zip(stored, layers, strict=True):
        alike[key].append(layer.own_error)
    marked = []
    for key, layer in zip(stored, layers, strict=True):
        # Of an even number the lower of the middle two: one of two must be able to stand out.
        usual = sorted(alike[key])[(len(alike[key]) - 1) // 2]
        stands_out = layer.own_error > max(TIMES_USUAL * usual, LEAST_ERROR) or layer.own_error > BROKEN_ERROR
        marked.append(replace(layer, stands_out=stands_out))
    return tuple(marked)


def _kinds(blob: BlobEntry) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, linear.kind) for name, linear in blob.linears.items()))
