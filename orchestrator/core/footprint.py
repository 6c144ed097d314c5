"""What a model takes of a device: bytes as stored, KV as computed, and what a row of activations weighs on a link.

Pure arithmetic over a model's sizes; the devices are `figures`'. Used by everything that decides where layers go.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.memory import need_bytes


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """A model's sizes.

    embedding_bytes: held by the first stage; by the last too, if the head is tied to it. head_bytes: of the head alone.
    shared_bytes: held by every stage (rotary tables). activation_bytes: of one row between two stages.
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    kv_bytes_per_token_per_layer: int
    context_tokens: int
    is_head_tied: bool = False
    shared_bytes: int = 0
    activation_bytes: int = 2304

    @property
    def num_layers(self) -> int:
        return len(self.layer_bytes)

    def weight_bytes(self, start: int, stop: int) -> int:
        """Stored bytes of all a stage with layers [start, stop) loads."""
        is_first, is_last = start == 0, stop == self.num_layers
        has_embedding = is_first or (is_last and self.is_head_tied)
        ends = self.embedding_bytes * has_embedding + self.head_bytes * is_last
        return sum(self.layer_bytes[start:stop]) + ends + self.shared_bytes

    def fixed_bytes(self, start: int, stop: int) -> int:
        """Memory of a stage without KV."""
        return need_bytes(self.weight_bytes(start, stop), 0)

    def need_bytes(self, start: int, stop: int, kv_tokens: int) -> int:
        return self.fixed_bytes(start, stop) + (stop - start) * self.kv_bytes_per_token_per_layer * kv_tokens
