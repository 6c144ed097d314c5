"""What is told of a run: frames in a line each, and nothing of what orchestrators log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.v1 import flow_pb2


def brief(frame: flow_pb2.Frame) -> str:
    """A frame in a line."""
    body = frame.WhichOneof("body")
    where = f"{frame.pipeline_id}/{frame.epoch} to {frame.to_stage}"
    match body:
        case "step":
            rows = " ".join(
                f"{row.sequence_id}@{row.slot}[{row.position}+{row.num_tokens}]{'*' if row.HasField('start') else ''}"
                for row in frame.step.rows
            )
            return f"step {frame.step.step} ({where}) {rows} burst {frame.step.burst_steps}"
        case "step_result":
            result = frame.step_result
            tokens = " ".join(f"{token.sequence_id}:{token.token_id}" for token in result.tokens)
            return f"result {result.step} ({where}) {tokens} burst {result.burst_steps}"
        case "cancel":
            refs = " ".join(f"{ref.sequence_id}@{ref.slot}" for ref in frame.cancel.sequences)
            return f"cancel ({where}) {refs}"
        case "restore":
            restore = frame.restore
            return f"restore ({where}) {restore.sequence_id}@{restore.slot} {restore.num_tokens} tokens"
        case "restored":
            blocks = frame.restored.restored
            return f"restored ({where}) {frame.restored.sequence_id}: {blocks.num_blocks} blocks, {blocks.num_tokens} tokens"
        case _:
            return f"{body} ({where})"


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing meanwhile: what an orchestrator warns of is meant to happen here."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
