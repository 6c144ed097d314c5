"""Answers of a real tiny model that break off and go on: with what slots retain, what a trail has, or computed again.

Builds on `kv_reuse`: its prompt of three full blocks and a tail, for stages whose slots hold 256 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.kv import BLOCK_TOKENS, BlockHash
from shoal.types import SamplingParams
from shoal.v1 import flow_pb2
from tests.support.kv_reuse import NAMES, PROMPT, TWO_STAGES, Open
from tests.support.stages import StageChain, make_restore, make_row, make_start, make_step

TRAIL = bytes(range(16))
OTHER_TRAIL = bytes(range(16, 32))
DRAWN = SamplingParams(temperature=8.0, seed=7, num_logprobs=5)
MORE = 6
# Tokens that are fed: of the last one nobody has computed anything.
NUM_ANSWERED = 46
# Prompt and answer, less the newest token.
NUM_RESUMABLE = len(PROMPT) + NUM_ANSWERED - 1
# Of segments of 8 tokens.
NUM_IN_TRAIL = 240

Token = tuple[int, int, tuple[float, ...]]


@dataclass
class Answer:
    """One sequence, over its runs. tokens: position, id and log probabilities of what was drawn, in order."""

    stages: StageChain
    run_id: int = 1
    slot: int = 0
    trail_id: bytes = TRAIL
    solo: bool = False
    names: Sequence[BlockHash] = NAMES
    sampling: SamplingParams = DRAWN
    tokens: list[Token] = field(default_factory=list)

    def begin(self, *, is_kv_exact: bool = True) -> None:
        """Compute the prompt, and draw the first token."""
        self._prefill(0, is_kv_exact=is_kv_exact)

    def decode(self, count: int) -> list[Token]:
        """Draw so many tokens more."""
        for _ in range(count):
            self._feed(len(PROMPT) + len(self.tokens) - 1)
        return self.tokens

    def restore(self, timeout_ms: float = 5000.0, **fields: object) -> flow_pb2.RestoredBlocks:
        """Begin another run, and ask for what there is."""
        self.ask(timeout_ms, **fields)
        (restored,) = self.stages.take_restored()
        assert restored.sequence_id == self.run_id
        return restored.restored

    def ask(self, timeout_ms: float = 5000.0, **fields: object) -> None:
        self.run_id += 100
        options: dict[str, object] = {
            "slot": self.slot,
            "is_exact_only": True,
            "fetch_timeout_ms": timeout_ms,
            "trail_id": self.trail_id,
            "num_tokens": len(PROMPT) + len(self.tokens) - 1,
        }
        self.stages.send(make_restore(self.run_id, self.names, **{**options, **fields}))  # type: ignore[arg-type]

    def go_on(self, restored: flow_pb2.RestoredBlocks) -> None:
        """Compute again what is known and was not restored; nothing else may be drawn than before."""
        known, self.tokens = self.tokens, []
        position = restored.num_tokens
        if position < len(PROMPT):
            self._prefill(restored.num_blocks * BLOCK_TOKENS)
            position = len(PROMPT)
        else:
            self.tokens = known[: position - len(PROMPT) + 1]
            self._feed(position, known[position - len(PROMPT)], is_first=True)
            position += 1
        while len(self.tokens) < len(known):
            self._feed(position, known[position - len(PROMPT)])
            position += 1
        assert self.tokens[: len(known)] == known

    def _prefill(self, begin: int, *, is_kv_exact: bool = True) -> None:
        for position in range(begin, len(PROMPT), BLOCK_TOKENS):
            piece = PROMPT[position : position + BLOCK_TOKENS]
            start = self._start(is_kv_exact=is_kv_exact) if position == begin else None
            self._compute(position, piece, start)

    def _feed(self, position: int, token: Token | None = None, *, is_first: bool = False) -> None:
        _, token_id, _ = token or self.tokens[-1]
        start = self._start() if is_first else None
        self._compute(position, [token_id], start)

    def _start(self, *, is_kv_exact: bool = True) -> flow_pb2.SequenceStart:
        return make_start(
            self.sampling,
            names=self.names,
            is_kv_exact=is_kv_exact,
            trail_id=self.trail_id,
            prompt_token_ids=PROMPT,
            answer_token_ids=[token_id for _, token_id, _ in self.tokens],
        )

    def _compute(self, position: int, token_ids: Sequence[int], start: flow_pb2.SequenceStart | None) -> None:
        stop = position + len(token_ids)
        row = make_row(
            self.run_id,
            slot=self.slot,
            position=position,
            num_tokens=len(token_ids),
            sample=stop >= len(PROMPT),
            start=start,
        )
        is_solo = self.solo and position >= len(PROMPT)
        self.stages.send(make_step(stop, [row], token_ids, solo=is_solo))
        self.stages.keep_up()
        for token in [token for frame in self.stages.results for token in frame.step_result.tokens]:
            logprobs = (token.logprobs.logprob, *(one.logprob for one in token.logprobs.top))
            self.tokens.append((token.position, token.token_id, logprobs))
        self.stages.results.clear()


def broken_off(stages: StageChain, **options: object) -> Answer:
    """An answer of NUM_ANSWERED tokens whose pipeline is about to be lost."""
    answer = Answer(stages, **options)  # type: ignore[arg-type]
    answer.begin()
    answer.decode(NUM_ANSWERED - 1)
    return answer


def contents(stages: StageChain, num_tokens: int, slot: int = 0) -> list[bytes]:
    """What slots hold of so many tokens, stage by stage."""
    return [shard.arena.tokens(slot, 0, num_tokens).tobytes() for shard in stages.shards]


def undisturbed(open_stages: Open, cuts: Sequence[int] = TWO_STAGES, **options: object) -> Answer:
    answer = broken_off(open_stages(cuts, budget_bytes=0), **options)
    answer.decode(MORE)
    return answer


def goes_on_as(answer: Answer, expected: Answer) -> None:
    """Draw the rest, and compare all of it, and what every slot holds."""
    answer.decode(len(expected.tokens) - len(answer.tokens))
    assert answer.tokens == expected.tokens
    num_tokens = NUM_RESUMABLE + MORE
    assert contents(answer.stages, num_tokens, answer.slot) == contents(expected.stages, num_tokens, expected.slot)
    answer.stages.keep_up()


def moved(answer: Answer, stages: StageChain) -> Answer:
    """The same answer, to go on elsewhere."""
    return Answer(
        stages, answer.run_id, answer.slot, answer.trail_id, answer.solo, answer.names, answer.sampling, answer.tokens
    )
