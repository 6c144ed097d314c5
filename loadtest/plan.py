"""What a load run will ask for, and what came back: the values that all parts of the harness share.

Plain frozen data. A Plan is made from a seed before anything is sent; Records are made by `runner`, read by `statistics` and
`report`. Knows neither targets nor clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.types import QosClass


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to be sent.

    due_s: seconds after the start of the run; None in closed loops, where the end of an earlier one decides. prompt: text
    of about prompt_tokens tokens. after: number of the request whose answer this one continues (a turn of a conversation):
    it is not sent before that one ended, however early it is due.
    """

    number: int
    due_s: float | None
    prompt: str
    prompt_tokens: int
    max_tokens: int
    qos: QosClass = QosClass.BALANCED
    tenant: str = ""
    stream: str = "default"
    after: int | None = None
    max_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests in the order of their number. concurrency: how many at once, in closed loops; 0: open loop.

    seed, description: how it was made; the same seed and description give the same plan.
    """

    requests: tuple[PlannedRequest, ...]
    concurrency: int
    seed: int
    description: str


@dataclass(frozen=True, slots=True)
class Record:
    """What became of a request; all times in seconds after the start of the run, by the harness's clock.

    due_s: when it should have been sent (in closed loops: when its turn came); latencies count from here, so that a harness
    or server that falls behind does not hide waiting (coordinated omission). sent_at_s - due_s is the client's lag.
    token_at_s: one entry a token, several tokens of one message share theirs. error: a stable reason, "" for none.
    """

    request: PlannedRequest
    due_s: float
    sent_at_s: float
    ended_at_s: float
    token_at_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = ""
    error: str = ""
    message: str = ""
    served_by: str = ""
    num_preemptions: int = 0

    @property
    def is_ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to meet to count as good, in seconds; None: not asked for. tpot_s: (end - first) / (tokens - 1)."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run. duration_s: from its start to the last end. loop_lag_s: delays of the harness's own event loop."""

    plan: Plan
    target: str
    records: tuple[Record, ...]
    duration_s: float
    slos: dict[QosClass, Slo] = field(default_factory=dict)
    loop_lag_s: tuple[float, ...] = ()
    cpu_share: float = 0.0
    machine: str = ""
    command: str = ""
