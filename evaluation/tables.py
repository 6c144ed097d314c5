"""What a comparison says in words and in columns; the same for the terminal and for a page.

Knows how figures are shown, and nothing of where. Called by the command line and by `page`.
"""

from __future__ import annotations

from evaluation.comparison import BROKEN_ERROR, Comparison, Difference, LayerComparison
from evaluation.scores import Loss

HEADER = ("part", "MiB A", "MiB B", "own error", "max diff", "cosine", "rel RMS", "cos, piled up", "rel RMS", "")
MARK = "<-- here"
# Of layers that stand out, so many are named in a sentence.
MAX_NAMED = 8


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row for each part, as HEADER has it."""
    embedding = _cells(comparison.embedding)
    own, head = comparison.own_head, comparison.head
    return [
        ("embedding", "", "", "", *embedding, "", "", ""),
        *(_layer(layer) for layer in comparison.layers),
        ("head", "", "", f"KL {own.divergence:.2g}", "", "", "", f"KL {head.divergence:.2g}", "", ""),
    ]


def _layer(layer: LayerComparison) -> tuple[str, ...]:
    size_a, size_b = (f"{num_bytes / (1 << 20):.2f}" for num_bytes in layer.num_bytes)
    _, cosine, rms = _cells(layer.piled_up)
    mark = MARK if layer.stands_out else ""
    return (layer.name, size_a, size_b, f"{layer.own_error:.2g}", *_cells(layer.own), cosine, rms, mark)


def _cells(difference: Difference) -> tuple[str, str, str]:
    largest = f"{difference.max_abs:.0f}" if difference.max_abs >= 100 else f"{difference.max_abs:.2g}"
    return largest, f"{difference.cosine:.5f}", f"{difference.relative_rms:.2g}"


def legend() -> str:
    """What the columns mean."""
    return (
        "own error: how far what a layer adds to its input is from what A's adds, as a share of that; this and the next "
        "three are with A's input, piled up is with B's own."
    )


def verdict(comparison: Comparison) -> str:
    """Which layers stand out, in a sentence."""
    found = comparison.outstanding
    if not found:
        return "No layer stands out."
    named = ", ".join(f"{layer.name} ({layer.own_error:.0%})" for layer in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    which = "Look at" if found[0].own_error > BROKEN_ERROR else "Less exact than layers stored alike:"
    return f"{which} {named}{more}: that share of what they add is different in B."


def summary(comparison: Comparison) -> list[tuple[str, str]]:
    """The few figures of the whole, with their names."""
    a, b = comparison.perplexities
    size_a, size_b = comparison.num_bytes
    return [
        ("perplexity A", f"{a:.3f}"),
        ("perplexity B", f"{b:.3f} ({describe_loss(comparison.loss)})"),
        ("KL of A from B", f"{comparison.head.divergence:.2g} nats a token"),
        ("same first choice", f"{comparison.head.agreement:.1%}"),
        ("size", f"A {size_a / (1 << 20):.1f} MiB, B {size_b / (1 << 20):.1f} MiB ({size_b / size_a:.0%})"),
    ]


def describe_loss(loss: Loss) -> str:
    """Such as +0.81 % ± 0.12."""
    return f"{100 * loss.share:+.2f} % ± {100 * loss.error:.2f}"


def text_note(comparison: Comparison) -> str:
    """How much of the text was read."""
    left_out = f"; {comparison.num_left_out:,} more are left out" if comparison.num_left_out else ""
    return f"{comparison.num_tokens:,} tokens of text{left_out}"
