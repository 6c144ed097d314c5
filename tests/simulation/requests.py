"""What clients of a simulated fleet ask for and get: every token once, in order, as if nothing had gone wrong.

A client whose orchestrator dies goes on with the next one from what it has; what it gets twice then must be the same. The
journal is what `served` and `journal` keep: whole when the request comes, tokens a little later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from orchestrator.answer import Answer, TokenEvent
from orchestrator.core.sequence import Sequence
from orchestrator.engine import Engine
from shoal.errors import DeadlineExceeded, ShoalError
from shoal.kv import KVScope, chain
from shoal.types import FinishReason, KVReuse, NumericClass, QosClass, SamplingParams
from tests.simulation.layers import FIRST_TOKEN_ID, answer_to

SCOPE = KVScope("simulated", "f32-rope-1")
CLASSES = (QosClass.BALANCED, QosClass.LATENCY, QosClass.THROUGHPUT)
# The engine looks at deadlines when its alarm rings.
DEADLINE_SLACK_S = 0.05


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for. deadline_s, cancel_after_s: from when it is accepted; None: never."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    qos: QosClass = QosClass.BALANCED
    tenant: str = "default"
    kv_reuse: KVReuse = KVReuse.POLICY
    deadline_s: float | None = None
    cancel_after_s: float | None = None
    max_tokens_per_s: float = 0.0


def draw_wish(random: Random, number: int) -> Wish:
    """Prompts begin alike in three ways, so that they share blocks."""
    beginning = Random(random.randrange(3)).choices(range(10, 90), k=130)
    num_shared = random.choice((0, 0, 64, 70, 130))
    prompt = beginning[:num_shared] + random.choices(range(10, 90), k=random.randint(1, 40))
    stops = random.random() < 0.3
    return Wish(
        request_id=f"r{number}",
        prompt=tuple(prompt),
        max_tokens=random.choice((1, 7, 20, 30, 40, 50, 60)),
        stop_ids=frozenset(random.sample(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + 90), 4)) if stops else frozenset(),
        qos=random.choice(CLASSES),
        tenant=random.choice(("one", "other")),
        kv_reuse=random.choice((KVReuse.POLICY, KVReuse.POLICY, KVReuse.EXACT, KVReuse.NONE)),
        deadline_s=random.uniform(0.5, 20.0) if random.random() < 0.2 else None,
        cancel_after_s=random.uniform(0.0, 3.0) if random.random() < 0.2 else None,
        max_tokens_per_s=random.uniform(5.0, 40.0) if random.random() < 0.15 else 0.0,
    )


@dataclass(slots=True)
class Entry:
    """What the journal has of a request."""

    trail_id: bytes
    token_ids: list[int] = field(default_factory=list)


class Request:
    """A wish that was accepted, and what came of it so far.

    Invariants: token_ids are the begin of `expected`; the last of these came with the reason that they are the last.
    """

    def __init__(self, wish: Wish, now: float) -> None:
        self.wish = wish
        self.accepted_at = now
        self.deadline_at = None if wish.deadline_s is None else now + wish.deadline_s
        self.expected = answer_to(wish.prompt, wish.max_tokens, wish.stop_ids)
        self.token_ids: list[int] = []
        self.answer: Answer | None = None
        self.error: ShoalError | None = None
        self.is_cancelled = False
        self.finish: FinishReason | None = None
        # Tokens that an earlier orchestrator delivered, and this one computes again.
        self._next_index = 0
        self._adopted_at = now

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.finish is not None or self.error is not None

    def sequence(self, engine: Engine, now: float, num_stored: int = 0) -> Sequence:
        wish = self.wish
        is_latency = wish.qos is QosClass.LATENCY
        hashes = chain(SCOPE, wish.prompt)
        return Sequence(
            sequence_id=engine.new_sequence_id(),
            prompt_token_ids=wish.prompt,
            sampling=SamplingParams(),
            max_tokens=wish.max_tokens,
            stop_ids=wish.stop_ids,
            numeric=NumericClass.SOLO if is_latency else NumericClass.SHARED,
            qos=wish.qos,
            arrived_at=now,
            tenant=wish.tenant,
            deadline_at=self.deadline_at,
            max_tokens_per_s=wish.max_tokens_per_s,
            block_hashes=hashes,
            num_stored_blocks=min(num_stored, len(hashes)),
            kv_reuse=wish.kv_reuse,
        )

    def submit(self, engine: Engine, now: float, num_stored: int) -> None:
        """Raises what the engine refuses it with."""
        self.answer = engine.submit(self.sequence(engine, now, num_stored), self.wish.request_id)

    def adopt(self, engine: Engine, entry: Entry, wait_s: float, now: float) -> None:
        sequence = self.sequence(engine, now)
        sequence.output_token_ids = list(entry.token_ids)
        sequence.trail_id = entry.trail_id
        self._next_index, self._adopted_at = len(entry.token_ids), now
        self.answer = engine.adopt(sequence, self.wish.request_id, wait_s)

    def read(self) -> list[int]:
        """Take what was delivered, and check that it is what comes next; the tokens that are new."""
        if self.answer is None or self.is_over:
            return []
        before = len(self.token_ids)
        while not self.answer._queue.empty():
            event = self.answer._queue.get_nowait()
            if not isinstance(event, TokenEvent):
                self.error = event
                break
            self._take(event)
        return self.token_ids[before:]

    def _take(self, event: TokenEvent) -> None:
        where = f"{self.wish.request_id}, token {event.index}"
        assert self.finish is None, f"{where}: something after the end"
        assert event.index == self._next_index, f"{where}: {self._next_index} should come next"
        assert event.index < len(self.expected), f"{where}: the answer is longer than it would be undisturbed"
        expected = self.expected[event.index]
        assert event.token_id == expected, f"{where}: {event.token_id} instead of {expected}"
        self._next_index += 1
        if event.index == len(self.token_ids):
            self.token_ids.append(event.token_id)
        is_last = event.index == len(self.expected) - 1
        assert (event.finish is not None) == is_last, f"{where}: {event.finish} of {len(self.expected)} tokens"
        self.finish = event.finish

    def check_deadline(self, now: float) -> None:
        """It is over when its deadline is, or soon after an orchestrator has it again."""
        if self.deadline_at is not None and not self.is_over:
            at = max(self.deadline_at, self._adopted_at)
            assert now < at + DEADLINE_SLACK_S, f"{self.wish.request_id} is not over after its deadline"

    def is_late(self, now: float) -> bool:
        """Whether it ended because its deadline passed, which it had."""
        is_deadline = isinstance(self.error, DeadlineExceeded)
        return is_deadline and self.deadline_at is not None and now >= self.deadline_at
