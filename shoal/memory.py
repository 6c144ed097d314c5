"""What a shard takes of a device's memory: one formula, for placing layers and for refusing them.

Pure arithmetic in bytes. The orchestrator plans with it, a worker checks with it before it downloads anything.
"""

from __future__ import annotations

# The runtime packs weights for its kernels and keeps them beside the mapped originals (measured: 272 MB for 116 MB).
WEIGHT_FACTOR = 2.3
# Interpreter, runtime, gRPC and the activations of a step.
RUNTIME_BYTES = 130 * 2**20


def need_bytes(weight_bytes: int, kv_bytes: int) -> int:
    """The memory a worker takes with a shard of these weights loaded and its KV full."""
    return round(weight_bytes * WEIGHT_FACTOR) + kv_bytes + RUNTIME_BYTES


def most_weight_bytes(memory_bytes: int, kv_bytes: int) -> int:
    """The most weights that fit a memory beside so much KV; negative: none do."""
    weight_bytes = int((memory_bytes - kv_bytes - RUNTIME_BYTES + 1) / WEIGHT_FACTOR)
    while need_bytes(weight_bytes, kv_bytes) > memory_bytes:
        weight_bytes -= 1
    return weight_bytes
