"""What a model takes of a device: bytes as stored, KV as computed, and what a row of activations weighs on a link.

Pure arithmetic over a model's sizes; the devices are `figures`'. Used by everything that decides where layers go.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.memory import need_bytes


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """A model's sizes.

    embedding_bytes: held by the first stage, which looks up in it; by the last too, if the head is tied to it. head_bytes:
    of the head alone. shared_bytes: of what every stage looks up in (rotary tables). activation_bytes: of one row between
    two stages.
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

    @property
    def last_bytes(self) -> int:
        """Of what the last stage multiplies with behind its layers."""
        return self.head_bytes + (self.embedding_bytes if self.is_head_tied else 0)

    def weight_bytes(self, start: int, stop: int) -> int:
        """Stored bytes of all a stage with layers [start, stop) loads."""
        return self._packed_bytes(start, stop) + self._mapped_bytes(start, stop)

    def need_bytes(self, start: int, stop: int, kv_tokens: int) -> int:
        """Memory of a stage with room for so many tokens in each of its layers."""
        kv_bytes = (stop - start) * self.kv_bytes_per_token_per_layer * kv_tokens
        return need_bytes(self._packed_bytes(start, stop), self._mapped_bytes(start, stop), kv_bytes)

    def _packed_bytes(self, start: int, stop: int) -> int:
        return sum(self.layer_bytes[start:stop]) + (self.last_bytes if stop == self.num_layers else 0)

    def _mapped_bytes(self, start: int, stop: int) -> int:
        is_packed = stop == self.num_layers and self.is_head_tied
        return self.shared_bytes + (self.embedding_bytes if start == 0 and not is_packed else 0)
