"""What pipelines are wanted for: objective, streams, context, and how many or how they are to be cut if somebody says so.

A value, with the amounts of KV that follow from it. Made from options by `orchestrator.planner` and the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.slots import round_up_to_page
from shoal.errors import ConfigError
from shoal.types import Objective

# A pipeline that cannot hold even one conversation of this length is of no use.
MIN_CONTEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Demand:
    """What the operator wants.

    num_streams: sequences at the same time, of each pipeline; of all together if is_shared, and where the number of
    pipelines is left open, because only so can numbers be compared. context_tokens: what a sequence shall be able to have;
    0: what the model allows. is_promised: KV for all of that must fit; else as much as there is memory for, at least one
    conversation. split: layers of each stage of the one shared pipeline, 0 for a device to leave out. replicas: pipelines to
    make of the devices not kept for latency, fewer if these do not suffice; 0: as many as give most tokens. prompt_tokens:
    of the prompt whose first token is predicted.
    """

    num_streams: int
    context_tokens: int = 0
    objective: Objective = Objective.THROUGHPUT
    split: tuple[int, ...] | None = None
    replicas: int = 1
    is_promised: bool = False
    is_shared: bool = False
    prompt_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_streams < 1:
            raise ConfigError(f"num_streams is {self.num_streams}; it must be at least 1", field="num_streams")
        if self.split is not None and self.replicas > 1:
            raise ConfigError(
                f"split gives the stages of one pipeline, replicas = {self.replicas} asks for more: leave out one of them",
                field="split",
            )

    @property
    def has_shared_streams(self) -> bool:
        """Whether num_streams is of all pipelines together."""
        return self.is_shared or self.replicas == 0

    def of_each(self, num_pipelines: int) -> Demand:
        """What is wanted of each of so many pipelines: its part of the streams if they are shared."""
        if not self.has_shared_streams:
            return self
        return replace(self, num_streams=-(-self.num_streams // num_pipelines))

    def context_of(self, model: ModelFootprint) -> int:
        """The longest sequence that is wanted and possible."""
        return min(self.context_tokens or model.context_tokens, model.context_tokens)

    def least_stream(self, model: ModelFootprint) -> int:
        """KV tokens that a stream is counted with."""
        context_tokens = self.context_of(model)
        return round_up_to_page(context_tokens if self.is_promised else min(MIN_CONTEXT_TOKENS, context_tokens))

    def least_kv(self, model: ModelFootprint) -> int:
        """KV tokens without which a pipeline is of no use."""
        return self.least_stream(model) * (self.num_streams if self.is_promised else 1)

    def most_kv(self, model: ModelFootprint) -> int:
        """KV tokens beyond which more are of no use."""
        return self.num_streams * round_up_to_page(self.context_of(model))

    def amounts(self, model: ModelFootprint) -> Iterator[tuple[int, int]]:
        """Streams and the KV tokens they need at least, most first: a pipeline may do for fewer than are wanted."""
        least = self.least_kv(model)
        if self.is_promised:
            yield self.num_streams, least
            return
        num_streams = self.num_streams
        while num_streams > 1:
            yield num_streams, num_streams * least
            num_streams //= 2
        yield 1, least
