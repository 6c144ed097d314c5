"""What a simulated run is given: the model, who asks for what, and who leaves how often.

Values alone; times in seconds, lengths in tokens. Made by the command line and by tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from orchestrator.core.demand import Demand
from orchestrator.core.figures import DeviceFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.limits import SchedulerLimits
from orchestrator.core.placement import Placement
from orchestrator.core.predictions import Prediction
from orchestrator.core.qos import default_targets
from orchestrator.core.sequence import QosTargets
from shoal.config import OrchestratorConfig
from shoal.errors import ConfigError
from shoal.types import QosClass

_DEFAULTS = OrchestratorConfig()
# Of a run, that is not counted: queues and the schedulers' idea of how long steps take come into being.
WARM_SHARE = 0.2
MAX_WARM_S = 15.0
# What a run takes where nobody says how long: as many steps as are played in some seconds, within these bounds.
DEFAULT_STEPS = 30_000
MIN_SECONDS, MAX_SECONDS = 15.0, 120.0
# Devices that leave at their rates do so rarely.
MIN_CHURN_SECONDS = 60.0
# Each takes tenths of a millisecond and some memory, even one that is refused.
MAX_REQUESTS = 1_000_000


def targets_of(qos: QosClass) -> QosTargets:
    """What a request of a class is to get, as an orchestrator has it by default."""
    return default_targets(qos, QosTargets(_DEFAULTS.ttft_ms / 1e3, _DEFAULTS.inter_token_ms / 1e3))


def some_seconds(predictions: Iterable[Prediction], churn_per_hour: float) -> float:
    """How long to play pipelines where nobody says so."""
    steps_per_s = sum(one.tokens_per_s / one.rows for one in predictions)
    least = MIN_CHURN_SECONDS if churn_per_hour else MIN_SECONDS
    return round(min(max(DEFAULT_STEPS / steps_per_s, least), MAX_SECONDS))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, lognormal with `sigma` of the logarithm; what falls outside the bounds becomes the bound."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        drawn = round(self.median * math.exp(self.sigma * random.gauss(0.0, 1.0)))
        return min(max(drawn, self.least), self.most)


@dataclass(frozen=True, slots=True)
class Load:
    """Who asks.

    num_streams: of a closed loop, each of which asks again as soon as it is answered; or rate_per_s: requests of an open
    loop, Poisson. class_shares: of the requests; by default most people wait for an answer, some talk to a device, some work
    is not urgent. Lengths are those of a chat with a small model. All of this is assumed.
    """

    num_streams: int = 0
    rate_per_s: float = 0.0
    prompts: Lengths = Lengths(64, 0.7, 8, 512)
    answers: Lengths = Lengths(64, 0.6, 8, 256)
    class_shares: Mapping[QosClass, float] = field(
        default_factory=lambda: {QosClass.LATENCY: 0.05, QosClass.BALANCED: 0.75, QosClass.THROUGHPUT: 0.20}
    )

    def __post_init__(self) -> None:
        if (self.num_streams > 0) == (self.rate_per_s > 0):
            raise ConfigError("say how many streams there are or how many requests come, one of the two", field="rate")


@dataclass(frozen=True, slots=True)
class Churn:
    """per_hour: how often each device leaves, unannounced; it is away for about away_s (exponential, both)."""

    per_hour: float = 0.0
    away_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """attention_tokens: of the model, as in SchedulerLimits. demand: what the pipelines of all sites are planned for."""

    model: ModelFootprint
    demand: Demand
    load: Load
    duration_s: float
    churn: Churn = Churn()
    seed: int = 1
    attention_tokens: float = math.inf

    def __post_init__(self) -> None:
        """Raise ConfigError for more requests than can be played."""
        num_requests = self.load.rate_per_s * self.duration_s
        if num_requests > MAX_REQUESTS:
            raise ConfigError(
                f"rate = {self.load.rate_per_s:g} requests a second for {self.duration_s:g} s are {num_requests:,.0f}; at "
                f"most {MAX_REQUESTS:,} are played: lower it, or the seconds",
                field="rate",
            )

    @property
    def warm_s(self) -> float:
        """What comes before is not counted."""
        return min(self.duration_s * WARM_SHARE, MAX_WARM_S)

    def random(self, *names: object) -> Random:
        """Random numbers of their own for each purpose, so that one does not disturb another."""
        return Random(":".join(str(name) for name in (self.seed, *names)))

    def limits(self, placement: Placement, devices: list[DeviceFigures]) -> SchedulerLimits:
        """What a pipeline of these devices allows, as an orchestrator has it by default."""
        costs = (
            len(stage.layers) / self.model.num_layers / device.profile.speed
            for stage, device in zip(placement.stages, devices, strict=True)
        )
        return SchedulerLimits(
            num_stages=len(placement.stages),
            num_slots=placement.slots,
            kv_tokens=placement.kv_tokens,
            context_tokens=placement.context_tokens,
            max_batch=min(device.profile.max_batch for device in devices),
            chunk_tokens=_DEFAULTS.chunk_tokens,
            max_waiting=_DEFAULTS.max_waiting,
            burst_steps=_DEFAULTS.burst_steps,
            mode=placement.mode,
            stage_costs=tuple(costs),
            attention_tokens=self.attention_tokens,
            # Prompts have nothing in common.
            keeps_blocks=False,
        )
