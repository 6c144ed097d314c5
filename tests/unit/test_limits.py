"""Which limits make sense, which requests could never be served within them, and what tokens cost."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from orchestrator.core.limits import KV_READ_TOKENS, SchedulerLimits
from shoal.errors import ConfigError, ContextExceeded, InvalidRequest
from tests.support.builders import make_limits

OTHERS = ("mode", "stage_costs", "attention_tokens", "keeps_blocks", "chunk_border")
NUMBERS = [one.name for one in fields(SchedulerLimits) if one.name not in OTHERS]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_limit_of_nothing_is_a_configuration_error_that_names_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least"):
        replace(make_limits(), **dict[str, Any]({name: 0}))


def test_attention_cannot_cost_less_than_nothing() -> None:
    with pytest.raises(ConfigError, match="attention_tokens is 0; it must be at least 1"):
        replace(make_limits(), attention_tokens=0)


@pytest.mark.parametrize("border", [-32, 1, 24, 128])
def test_a_border_that_blocks_do_not_end_at_is_a_configuration_error(border: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_border is {border}; it must be one of 0, 16, 32, 64"):
        make_limits(chunk_border=border)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one token") as refused:
        make_limits().check_request(0, 16)
    assert refused.value.field == "prompt"


def test_an_answer_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 is out of range; it must be at least 1") as refused:
        make_limits().check_request(8, 0)
    assert refused.value.field == "max_tokens"


def test_a_prompt_that_fills_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextExceeded, match=r"100 tokens; the context is 100 .* 99 tokens or less"):
        make_limits(context_tokens=100).check_request(100, 16)


def test_a_prompt_that_fills_all_kv_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextExceeded, match=r"96 tokens; the KV memory .* holds 96 .* 95 tokens or less"):
        make_limits(context_tokens=512, kv_tokens=100).check_request(96, 16)


def test_the_longest_possible_prompt_is_allowed() -> None:
    make_limits(context_tokens=100).check_request(99, 16)
    make_limits(context_tokens=512, kv_tokens=100).check_request(95, 16)


def test_a_sequence_may_use_only_whole_pages_of_kv_memory() -> None:
    assert make_limits(kv_tokens=100).sequence_tokens == 96


def test_tokens_far_into_a_slot_cost_more() -> None:
    limits = replace(make_limits(), attention_tokens=3000.0)
    assert limits.work_of(4, 0) == 4
    assert limits.work_of(4, 1500) == 4 + (4 + KV_READ_TOKENS) / 2
    assert make_limits().work_of(4, 1500) == 4


@pytest.mark.parametrize("position", [0, 100, 3000])
@pytest.mark.parametrize("attention_tokens", [math.inf, 3000.0])
def test_as_many_tokens_fit_as_cost_no_more(position: int, attention_tokens: float) -> None:
    limits = replace(make_limits(), attention_tokens=attention_tokens)
    num_tokens = limits.tokens_of(20.5, position)
    assert limits.work_of(num_tokens, position) <= 20.5 < limits.work_of(num_tokens + 1, position)
    assert limits.tokens_of(0.5, position) == 0
