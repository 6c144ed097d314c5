"""Makes traces of many turns from a seed: hours of chats that come back, beside calls of programs that share templates.

Decides what such a day is like; `traces` has the format. Shipped as `chats`, whose origin says which call made it.

Sources of the shape: reuse is skewed (a tenth of the blocks have three quarters of it), four of five reuses come within ten
minutes where people chat, an unbounded cache finds 54-62 % of prompt tokens, and single calls with a common prefix matter as
much as turns (Wang et al., KVCache Cache in the Wild, USENIX ATC 2025, arXiv:2506.02634); few turns of some 70 tokens, with
answers of some 200 (Zheng et al., LMSYS-Chat-1M, arXiv:2309.11998). How often and when people return, and how long templates
are, is assumed. Lengths are those of a model with a context of 2,048 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from loadtest.amounts import Amount, Shape
from loadtest.arrivals import make_arrivals
from loadtest.seeds import Purpose, generator
from loadtest.traces import Draft, Trace, TraceEntry, with_hash_ids
from shoal.types import QosClass

CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class _Kind:
    """What starts: conversations, or bursts of calls. num_prefixes: system prompts or templates, popular by Zipf's law.

    goes_on: that another turn or call follows; comes_back: that a conversation does, after a long pause.
    """

    tenant: str
    qos: QosClass
    share: float
    num_prefixes: int
    prefix: Amount
    question: Amount
    answer: Amount
    pause_s: Amount
    goes_on: float
    comes_back: float
    is_conversation: bool


def _lognormal(minimum: int, maximum: int, median: float, sigma: float) -> Amount:
    return Amount(Shape.LOGNORMAL, minimum, maximum, median=median, sigma=sigma)


_TALK = _Kind(
    tenant="app",
    qos=QosClass.BALANCED,
    share=0.0,
    num_prefixes=24,
    prefix=_lognormal(64, 768, 220.0, 0.6),
    question=_lognormal(6, 400, 45.0, 0.9),
    answer=_lognormal(16, 400, 170.0, 0.6),
    pause_s=_lognormal(5, 1800, 60.0, 1.0),
    goes_on=0.6,
    comes_back=0.25,
    is_conversation=True,
)
_KINDS = (
    replace(_TALK, share=0.45),
    replace(_TALK, tenant="home", qos=QosClass.LATENCY, share=0.2, num_prefixes=6, comes_back=0.4),
    # Programs: a long template, a short question, no memory of the call before.
    _Kind(
        tenant="tools",
        qos=QosClass.THROUGHPUT,
        share=0.35,
        num_prefixes=40,
        prefix=_lognormal(128, 1280, 350.0, 0.6),
        question=_lognormal(16, 900, 220.0, 0.9),
        answer=_lognormal(4, 200, 40.0, 0.8),
        pause_s=_lognormal(1, 60, 4.0, 0.8),
        goes_on=0.6,
        comes_back=0.0,
        is_conversation=False,
    ),
)
ZIPF_EXPONENT = 1.0
# From the end of a visit to the next one, an hour.
_RETURN_S = _lognormal(900, 14_400, 3600.0, 0.7)
# What a small device takes for a token of an answer.
_TOKEN_S = 0.05


def make_conversations(
    seed: int, *, num_starts: int = 400, duration_s: float = 21_600.0, block_tokens: int = 64
) -> Trace:
    """Make a trace in which so many conversations and bursts of calls start over a time.

    A turn's prompt is the one before, the answer to it, and a new question; it shares all full blocks with the one before.
    Tenants share no blocks. Raises ConfigError for no valid seed, and as make_arrivals.
    """
    rng = generator(seed, Purpose.TRACE)
    kinds = rng.choice(len(_KINDS), size=num_starts, p=[kind.share for kind in _KINDS])
    prefix_tokens = [[kind.prefix.draw(rng) for _ in range(kind.num_prefixes)] for kind in _KINDS]
    starts_s = make_arrivals(num_starts / duration_s, seed=seed, num_requests=num_starts)
    drafts = [
        draft
        for number, (at_s, kind) in enumerate(zip(starts_s, kinds.tolist(), strict=True))
        for draft in _draft(rng, number, at_s, _KINDS[kind], prefix_tokens[kind], block_tokens)
    ]
    origin = (
        f"loadtest.conversations.make_conversations({seed}, num_starts={num_starts}, duration_s={duration_s}, "
        f"block_tokens={block_tokens})"
    )
    return Trace(with_hash_ids(drafts), block_tokens, origin)


def _draft(
    rng: np.random.Generator, number: int, at_s: float, kind: _Kind, prefix_tokens: list[int], block_tokens: int
) -> Iterator[Draft]:
    prefix = _zipf(rng, kind.num_prefixes)
    said, turn = prefix_tokens[prefix], 0
    # The block that a template ends in differs by what follows.
    kept: tuple[tuple[object, ...], ...] = tuple((kind.tenant, prefix, place) for place in range(said // block_tokens))
    while True:
        length, answer = said + kind.question.draw(rng), kind.answer.draw(rng)
        if length + answer > CONTEXT_TOKENS:
            return
        blocks = kept + tuple((number, turn, place) for place in range(len(kept), -(-length // block_tokens)))
        entry = TraceEntry(float(round(at_s * 1000)), length, answer, (), kind.qos, kind.tenant)
        if kind.is_conversation:
            entry = replace(entry, conversation=f"c{number}", turn=turn)
            said, kept = length + answer, blocks[: length // block_tokens]
        yield Draft(entry, blocks)
        at_s += answer * _TOKEN_S + kind.pause_s.draw(rng)
        if rng.random() >= kind.goes_on:
            if rng.random() >= kind.comes_back:
                return
            at_s += _RETURN_S.draw(rng)
        turn += 1


def _zipf(rng: np.random.Generator, count: int) -> int:
    weights = 1.0 / np.arange(1, count + 1) ** ZIPF_EXPONENT
    return int(rng.choice(count, p=weights / weights.sum()))
