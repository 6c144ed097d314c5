"""How `shoal models import` and `pull` are told what precision weights get, and what they say of the choice `auto` made.

Decides nothing of how weights are rounded or chosen (`modelstore.requantize`, `evaluation.choice`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cli.terminal import format_bytes, note
from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    from evaluation.choice import Choice
    from modelstore.requantize import Precisions
    from modelstore.source import SourceModel

Quantize = Annotated[
    Literal["int8", "int4", "int4-asym", "none", "auto"],
    typer.Option(help="What float weights become; none: float32; auto: 4 bits where a measurement allows it, else 8."),
]
TargetLoss = Annotated[
    str, typer.Option("--target-ppl-loss", help="With auto: by how much perplexity may rise.", show_default="1%")
]
Requantize = Annotated[
    bool,
    typer.Option("--requantize", help="Also of weights that the file has quantised, if they get fewer bits, or none."),
]

DEFAULT = "int8"
DEFAULT_TARGET = "1%"
_TARGET = re.compile(r"(\d+(?:\.\d*)?) ?%")
# Twice the perplexity is no loss that anybody asks for.
MAX_TARGET = 1.0


class Chosen:
    """The precisions that were asked for; for auto, they are chosen when the model is open, and told of afterwards."""

    def __init__(self, quantize: str, target: str, *, is_forced: bool, update: Callable[[int, int, str], None]) -> None:
        """Raises InvalidRequest for options that do not go together."""
        if target and quantize != "auto":
            raise InvalidRequest("target_ppl_loss", "is for --quantize auto only")
        self._quantize = quantize
        self._target = parse_target(target or DEFAULT_TARGET)
        self._is_forced = is_forced
        self._update = update
        self.choice: Choice | None = None

    def __call__(self, model: SourceModel, scratch: Path) -> Precisions:
        from modelstore.requantize import FLOAT32, Precisions, uniform

        if self._quantize != "auto":
            return uniform(FLOAT32 if self._quantize == "none" else self._quantize, is_forced=self._is_forced)
        from evaluation.choice import choose
        from evaluation.variants import open_variants
        from launch.pool import num_cores

        with open_variants(model, scratch, is_forced=self._is_forced) as variants:
            self.choice = choose(variants, self._target, num_cores(), lambda text: self._update(0, 0, text))
        return Precisions(self.choice.layers, is_forced=self._is_forced)

    def tell(self, quantization: str) -> None:
        """Say on stderr what auto chose and measured, or that what was asked for changed nothing.

        quantization: what the stored weights are, as the manifest says it.
        """
        asked = self._quantize not in (DEFAULT, "auto") and not self._is_forced
        if asked and " as " not in quantization:
            note(f"Weights stay {quantization}, as the file has them: --requantize is for those, too.", style="")
        if self.choice is not None:
            for line in describe(self.choice):
                note(line, style="")


def parse_target(text: str) -> float:
    """Such as 1% or 0.5 %, as a share; raises InvalidRequest."""
    found = _TARGET.fullmatch(text.strip())
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share <= MAX_TARGET:
        raise InvalidRequest("target_ppl_loss", f"{text!r} is no share such as 1% or 0.5%, above 0 and at most 100%")
    return share


def describe(choice: Choice) -> list[str]:
    """What was chosen and measured, in sentences."""
    from evaluation.tables import describe_loss

    count, kept = len(choice.layers), choice.kept
    sizes = f"{format_bytes(choice.num_bytes)} instead of {format_bytes(choice.num_bytes_at_8_bits)}"
    target = f"{100 * choice.target:g} %"
    measured = (
        f"perplexity {describe_loss(choice.loss)} of {choice.reference_perplexity:.2f}, on {choice.num_tokens} tokens"
    )
    if not choice.is_met:
        return [f"Nothing is at 4 bits: 8 bits everywhere already cost more than {target} ({measured})."]
    if len(kept) == count:
        return [f"Nothing is at 4 bits: no layer's 4 bits keep to {target}, or none is larger at 8 ({measured})."]
    stay = f"; at 8 bits stay blk.{spans(kept)}" if kept else ""
    return [
        f"{count - len(kept)} of {count} layers are at 4 bits{stay}: {sizes}.",
        f"Measured: {measured}; at 8 bits everywhere {describe_loss(choice.loss_at_8_bits)}; the target was {target}.",
    ]


def spans(numbers: Sequence[int]) -> str:
    """Rising numbers, those that follow each other drawn together: as in "0-3, 7"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
