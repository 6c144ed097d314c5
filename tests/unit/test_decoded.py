"""Where requests are decoded: beside the loop in which tokens pass, if that may take long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from orchestrator.server import LONG_REQUEST_BYTES, decoded
from shoal.v1 import inference_pb2

PATIENCE_S = 5.0


@pytest.mark.parametrize(
    "request_message",
    [
        inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput()),
        inference_pb2.GenerateRequest(prompt="a" * LONG_REQUEST_BYTES),
    ],
    ids=["chat", "long prompt"],
)
async def test_a_chat_and_a_long_prompt_leave_the_loop_free(request_message: inference_pb2.GenerateRequest) -> None:
    loop_has_gone_on = threading.Event()
    asyncio.get_running_loop().call_soon(loop_has_gone_on.set)
    assert await decoded(lambda: loop_has_gone_on.wait(PATIENCE_S), request_message)


async def test_a_short_prompt_costs_no_thread() -> None:
    assert await decoded(threading.get_ident, inference_pb2.GenerateRequest(prompt="a")) == threading.get_ident()
