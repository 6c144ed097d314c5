"""What all figures share: the model, prompts, sizes, the baseline process, and how to start a fleet.

Decides sizes and how many pairs are measured, before anything is measured.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelstore.store import ModelStore
from orchestrator.tokenizer import Tokenizer
from shoal.types import LinkProfile
from tests.bench import fleet
from tests.bench.baseline_process import BaselineProcess
from tests.bench.fleet import System
from tests.bench.machine import LoadMeter
from tests.bench.pairs import Plan, Run
from tests.support.english import TEXT


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens; decode runs around a context of 256.

    many_*: of 16 streams, whose answers are longer, since the first of them begin while the last prompts are computed.
    """

    prompt: int = 200
    answer: int = 96
    many_prompt: int = 176
    many_answer: int = 144
    many_baseline_steps: int = 40
    long_prompt: int = 512
    short_prompt: int = 8
    short_repeats: int = 20
    # Answer tokens of each stream before its rate is measured.
    skip: int = 8


QUICK_SIZES = Sizes(answer=32, many_prompt=32, many_answer=40, many_baseline_steps=12, short_repeats=6)
# Many enough for a median that one odd pair does not move; few for what takes half a minute.
PLAN, LONG_PLAN = Plan(counted=5, tries=6), Plan(counted=3, tries=4)
QUICK_PLAN = Plan(counted=1, tries=1)
NUM_STREAMS = 16
# Of the first stage; the head weighs as much as some layers do.
CUT_SHARES = (0.5, 0.6, 0.7)


class Bench:
    """The run of a benchmark. folder: emptied afterwards by who made it."""

    def __init__(
        self,
        home: Path,
        folder: Path,
        model: str,
        baseline: BaselineProcess,
        runner: asyncio.Runner,
        say: Callable[[str], None],
        *,
        quick: bool,
    ) -> None:
        self.home_of_models = home
        self.model = model
        self.baseline = baseline
        self.say = say
        self._runner = runner
        self.is_quick = quick
        self.sizes = QUICK_SIZES if quick else Sizes()
        self.plan, self.long_plan = (QUICK_PLAN, QUICK_PLAN) if quick else (PLAN, LONG_PLAN)
        self.notes: list[str] = []
        self.tables: dict[str, list[dict[str, object]]] = {}
        self._store = ModelStore(home)
        self._folder = folder
        manifest = self._store.open(model)
        self.num_layers = manifest.config.num_layers
        self._text = Tokenizer(manifest.tokenizer).encode(TEXT, add_special=True)
        self._cut: int | None = None

    def prompt(self, num_tokens: int, number: int = 0) -> list[int]:
        """English text of this length; another number starts at another place."""
        start = number * 31 % len(self._text)
        return list(itertools.islice(itertools.cycle(self._text), start, start + num_tokens))

    @property
    def cut(self) -> int:
        """Layers of the first of two stages: the cut whose slower stage is fastest at 8 decode rows.

        The times of some cuts are measured; a straight line through them (time over layers) evens out their noise.
        """
        if self._cut is None:
            cuts = sorted({round(self.num_layers * share) for share in CUT_SHARES})
            times = self.baseline.ask("cuts", cuts=cuts)["stage_s"]
            lines = [np.polyfit(cuts, [times[str(cut)][stage] for cut in cuts], 1) for stage in (0, 1)]
            self._cut = min(
                range(cuts[0], cuts[-1] + 1), key=lambda cut: max(float(np.polyval(line, cut)) for line in lines)
            )
            shown = ", ".join(f"{cut}: {a * 1e3:.1f} + {b * 1e3:.1f}" for cut, (a, b) in sorted(times.items()))
            self.notes.append(
                f"Two stages have {self._cut} and {self.num_layers - self._cut} layers, chosen by the time of both "
                f"at 8 decode rows (ms, by layers of the first): {shown}."
            )
            self.say(self.notes[-1])
        return self._cut

    def run_baseline(self, meter: LoadMeter, value: str, mode: str, **arguments: object) -> Run:
        return self.baseline.run(meter, value, mode, **arguments)

    def one_worker(self) -> AbstractContextManager[System]:
        return self.fleet("one-worker", num_workers=1)

    def two_stages(
        self, name: str, *, link: LinkProfile | None = None, **options: Any
    ) -> AbstractContextManager[System]:
        split = f"{self.cut},{self.num_layers - self.cut}"
        return self.fleet(name, num_workers=2, link=link, split=split, **options)

    def fleet(self, name: str, **options: Any) -> AbstractContextManager[System]:
        self.say(f"starting {name}")
        return fleet.running(self.home(name), self.model, self._runner, also_ours=[self.baseline.process_id], **options)

    def home(self, name: str) -> Path:
        """A folder of its own for the fleets of a name, at first with the models that are pulled and nothing else."""
        home = self._folder / name
        if home.exists():
            return home
        home.mkdir()
        for part in ("models", "blobs"):
            (home / part).symlink_to((self._store.root / part).resolve())
        return home


def decode_prompts(bench: Bench, count: int, num_tokens: int) -> list[Sequence[int]]:
    """Different prompts for streams that run together."""
    return [bench.prompt(num_tokens, number) for number in range(count)]
