"""A comparison as one HTML file for people that needs nothing beside it: figures, curves by layer, the table.

Figures and sentences come from `tables`, curves from `loadtest.plots` (matplotlib is an extra). Called by the command line.
"""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from evaluation import tables
from evaluation.comparison import Comparison
from loadtest.report import NEEDS_MATPLOTLIB, can_draw, page_template, write_whole
from shoal.errors import ConfigError

# A logarithmic axis has no place for layers that are equal.
LEAST_SHOWN = 1e-9


def write_page(path: Path, comparison: Comparison) -> None:
    """Raises ConfigError if matplotlib is not installed."""
    write_whole(path, to_html(comparison))


def to_html(comparison: Comparison) -> str:
    """The page. Raises ConfigError if matplotlib is not installed."""
    if not can_draw():
        raise ConfigError(NEEDS_MATPLOTLIB)
    return page_template("evaluation", "comparison.html").render(
        names=comparison.names,
        text_note=tables.text_note(comparison),
        verdict=tables.verdict(comparison),
        is_broken=bool(comparison.outstanding),
        summary=tables.summary(comparison),
        legend=tables.legend(),
        header=tables.HEADER,
        rows=tables.rows(comparison),
        # Not escaped: it was made here, by a library that escapes what it is given.
        picture=Markup(_picture(comparison)),
    )


def _picture(comparison: Comparison) -> str:
    from loadtest.plots import Curve, Curves, draw_curves

    layers = comparison.layers

    def points(values: list[float]) -> list[tuple[float, float]]:
        return [(layer.index, max(value, LEAST_SHOWN)) for layer, value in zip(layers, values, strict=True)]

    errors = (
        Curve("own error", points([layer.own_error for layer in layers])),
        Curve("relative RMS, A's input", points([layer.own.relative_rms for layer in layers])),
        Curve("relative RMS, piled up", points([layer.piled_up.relative_rms for layer in layers])),
    )
    sizes = tuple(
        Curve(f"{'AB'[side]}", points([layer.num_bytes[side] / (1 << 20) for layer in layers])) for side in (0, 1)
    )
    marks = tuple(float(layer.index) for layer in comparison.outstanding)
    return draw_curves(
        "comparison",
        [
            Curves("Errors by layer", "layer (dotted: stands out)", errors, is_log_y=True, marks=marks),
            Curves("MiB by layer", "layer", sizes),
        ],
    )
