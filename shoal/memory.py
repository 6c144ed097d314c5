"""What a shard takes of a device's memory: one formula, for placing layers and for refusing them.

Pure arithmetic in bytes. The orchestrator plans with it, a worker checks with it before it downloads anything.
"""

from __future__ import annotations

# The runtime packs weights for its kernels (measured: copies of 1.0 to 1.2 times their bytes). The mapped originals are read
# once for that, and a system that is short of memory takes such pages back without harm (ADR 30).
PACKED_FACTOR = 1.3
# Interpreter, runtime, gRPC and the activations of a step.
RUNTIME_BYTES = 130 * 2**20


def need_bytes(packed_bytes: int, mapped_bytes: int, kv_bytes: int) -> int:
    """The memory a worker takes with a shard loaded and its KV full.

    packed_bytes: of weights that rows are multiplied with. mapped_bytes: of tables that rows are only looked up in, all of
    which may get used in time.
    """
    return round(packed_bytes * PACKED_FACTOR) + mapped_bytes + kv_bytes + RUNTIME_BYTES
