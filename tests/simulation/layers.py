"""A model that computes with numbers instead of vectors, layer by layer: any cut of the layers gives the same answers.

What a layer gives for a token depends on all that the layer was given before it: a token that was lost, fed twice or kept
wrongly changes all that follows. So does KV that was put into the wrong slot, layer or place.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

NUM_LAYERS = 4
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 10, 90
_SEED, _FACTOR, _MODULUS = 7, 31, 65521


class LayerKV:
    """The KV of a sequence at one layer: what the layer was given, token by token, and what it made of that."""

    __slots__ = ("_layer", "inputs", "outputs")

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def feed(self, inputs: Seq[int]) -> list[int]:
        """Take the next tokens; what they are for the next layer."""
        state = self.outputs[-1] if self.outputs else _SEED + self._layer
        made = []
        for value in inputs:
            state = (state * _FACTOR + value + self._layer) % _MODULUS
            made.append(state)
        self.inputs += inputs
        self.outputs += made
        return made

    def cut(self, num_tokens: int) -> None:
        """Forget what is behind so many tokens."""
        del self.inputs[num_tokens:]
        del self.outputs[num_tokens:]


def draw(output: int) -> int:
    """The token that the head draws from what the last layer gave."""
    return FIRST_TOKEN_ID + output % NUM_TOKEN_IDS


def answer_to(prompt: Seq[int], num_tokens: int, stop_ids: Collection[int] = ()) -> list[int]:
    """The answer that nothing disturbs."""
    layers = [LayerKV(layer) for layer in range(NUM_LAYERS)]
    values, answer = list(prompt), list[int]()
    while len(answer) < num_tokens and not (answer and answer[-1] in stop_ids):
        for layer in layers:
            values = layer.feed(values)
        answer.append(draw(values[-1]))
        values = answer[-1:]
    return answer
