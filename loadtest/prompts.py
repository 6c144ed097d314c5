"""Makes the text of prompts: common English words, about a token each, no two texts alike unless that is asked for.

Owns the list of words and the serial that every text begins with, so that a server's cache finds a prefix only where a
workload or trace has one. Knows nothing of requests. Called by `scenarios`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from loadtest.seeds import Purpose, generator

# Enough for 512^3 = 134 million texts; a text with fewer words than this may be met again.
NUM_SERIAL_WORDS = 3


@cache
def vocabulary() -> tuple[str, ...]:
    """The words that prompts are made of; with a space before it each is one token to SmolLM2's tokenizer."""
    return tuple(files("loadtest").joinpath("data", "words.txt").read_text(encoding="utf-8").split())


class TextWriter:
    """Writes texts that differ from each other within their first NUM_SERIAL_WORDS words.

    No serial is used twice; its lowest digit comes first, so that neighbours differ in their first word.
    """

    __slots__ = ("_rng", "_serial")

    def __init__(self, seed: int) -> None:
        self._rng = generator(seed, Purpose.TEXT)
        # So that runs of other seeds begin elsewhere.
        self._serial = int(self._rng.integers(len(vocabulary()) ** NUM_SERIAL_WORDS))

    def fresh(self, num_words: int) -> tuple[str, ...]:
        """Write a text that was not there before."""
        words = vocabulary()
        digits = [self._serial // len(words) ** place % len(words) for place in range(NUM_SERIAL_WORDS)]
        self._serial += 1
        body = self._rng.integers(len(words), size=max(0, num_words - NUM_SERIAL_WORDS))
        return tuple(words[index] for index in [*digits, *body.tolist()][:num_words])
