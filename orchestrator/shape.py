"""The shape of a model as devices are asked to time it: a few layers from its middle, and the last one with the head.

Builds the command from a manifest; sends nothing. Models of one shape get the same command, for blobs go by their place.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from modelstore.graph import build_shard_graph
from modelstore.manifest import BlobEntry, Manifest
from orchestrator.core.refinement import CONTEXT_TOKENS
from orchestrator.shards import blob_refs
from shoal import messages
from shoal.types import LayerRange, ShardShape
from shoal.v1 import fleet_pb2

# To be raised when the same graphs are to be timed in another way.
MEASURING_VERSION = 1
# Of layers without the head: enough that what a run takes beside them is small, few enough for a small device.
NUM_LAYERS = 4
NUM_SLOTS = 16
SLOT_TOKENS = CONTEXT_TOKENS + 64


def measure_command(manifest: Manifest) -> fleet_pb2.Measure | None:
    """What devices are asked to time; None for a model without a layer in the middle.

    Blobs go by their place, so that models of one shape are measured once.
    """
    config = manifest.config
    num_layers = min(NUM_LAYERS, config.num_layers - 2)
    if num_layers < 1:
        return None
    hollow = _hollow(manifest)
    start = (config.num_layers - num_layers) // 2
    middle = LayerRange(start, start + num_layers)
    last = LayerRange(config.num_layers - 1, config.num_layers)
    graphs = [build_shard_graph(hollow, layers) for layers in (middle, last)]
    blobs = {blob.digest: blob for layers in (middle, last) for blob in blob_refs(hollow, layers)}
    digest = hashlib.sha256(b"%d" % MEASURING_VERSION + b"".join(graphs)).hexdigest()
    return fleet_pb2.Measure(
        shape_digest=digest,
        layers_graph=graphs[0],
        head_graph=graphs[1],
        blobs=blobs.values(),
        layers_shape=messages.shape_to_proto(_shape(manifest, middle)),
        head_shape=messages.shape_to_proto(_shape(manifest, last)),
    )


def _hollow(manifest: Manifest) -> Manifest:
    """The same model with blobs that are named by their place."""

    def named(blob: BlobEntry, place: str) -> BlobEntry:
        return replace(blob, digest=hashlib.sha256(place.encode()).hexdigest())

    layers = tuple(named(blob, f"layer {index}") for index, blob in enumerate(manifest.layers))
    return replace(
        manifest,
        layers=layers,
        embedding=named(manifest.embedding, "embedding"),
        head=named(manifest.head, "head"),
        rope=named(manifest.rope, "rope"),
    )


def _shape(manifest: Manifest, layers: LayerRange) -> ShardShape:
    config = manifest.config
    slot_tokens = min(SLOT_TOKENS, config.context_tokens)
    return ShardShape(
        num_layers=len(layers),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_slots=NUM_SLOTS,
        slot_tokens=slot_tokens,
        kv_tokens=NUM_SLOTS * slot_tokens,
        is_first=False,
        is_last=layers.stop == config.num_layers,
    )
