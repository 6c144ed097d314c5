"""The two sides of one formula: what a shard takes, and what fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.memory import most_weight_bytes, need_bytes

MEMORY = st.integers(0, 2**40)


@given(memory_bytes=MEMORY, kv_bytes=MEMORY)
def test_the_most_weights_fit_and_one_byte_more_does_not(memory_bytes: int, kv_bytes: int) -> None:
    most = most_weight_bytes(memory_bytes, kv_bytes)
    assert need_bytes(most, kv_bytes) <= memory_bytes < need_bytes(most + 1, kv_bytes)


@given(weight_bytes=MEMORY, kv_bytes=MEMORY)
def test_weights_fit_what_they_need(weight_bytes: int, kv_bytes: int) -> None:
    assert most_weight_bytes(need_bytes(weight_bytes, kv_bytes), kv_bytes) == weight_bytes
