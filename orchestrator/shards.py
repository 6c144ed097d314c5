"""What placement and workers have to know of the stored model: its footprint, and the command that loads a shard of it.

Builds values and messages from a manifest; sends nothing. Called by `control` and `bringup`.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelstore.graph import build_shard_graph, mapped_blobs, shard_blobs
from modelstore.manifest import Manifest
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.placement import Placement
from shoal import messages
from shoal.types import LayerRange, ShardShape
from shoal.v1 import fleet_pb2


def footprint(manifest: Manifest) -> ModelFootprint:
    """What placement has to know of a model."""
    config = manifest.config
    return ModelFootprint(
        layer_bytes=tuple(blob.num_bytes for blob in manifest.layers),
        embedding_bytes=manifest.embedding.num_bytes,
        head_bytes=manifest.head.num_bytes,
        kv_bytes_per_token_per_layer=2 * config.num_kv_heads * config.head_dim * 4,
        context_tokens=config.context_tokens,
        is_head_tied=config.is_head_tied,
        shared_bytes=manifest.rope.num_bytes,
        activation_bytes=4 * config.hidden_size,
    )


def blob_refs(manifest: Manifest, layers: LayerRange) -> list[fleet_pb2.BlobRef]:
    """The blobs of the shard that has these layers."""
    mapped = mapped_blobs(manifest, layers)
    return [
        fleet_pb2.BlobRef(digest=blob.digest, num_bytes=blob.num_bytes, is_mapped=blob.digest in mapped)
        for blob in shard_blobs(manifest, layers)
    ]


def load_command(
    manifest: Manifest,
    placement: Placement,
    index: int,
    *,
    epoch: int,
    stages: Sequence[fleet_pb2.StageAddress],
    link_token: bytes,
) -> fleet_pb2.LoadShard:
    """Tell the worker of a stage all it needs: graph, blobs, sizes, and the other stages."""
    layers = placement.stages[index].layers
    return fleet_pb2.LoadShard(
        pipeline_id=placement.pipeline_id,
        epoch=epoch,
        stage=index,
        layers=messages.layers_to_proto(layers),
        model_digest=manifest.digest,
        graph=build_shard_graph(manifest, layers),
        blobs=blob_refs(manifest, layers),
        shape=messages.shape_to_proto(_shape(manifest, placement, index)),
        stages=stages,
        link_token=link_token,
    )


def _shape(manifest: Manifest, placement: Placement, index: int) -> ShardShape:
    config, layers = manifest.config, placement.stages[index].layers
    return ShardShape(
        num_layers=len(layers),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_slots=placement.slots,
        slot_tokens=placement.context_tokens,
        kv_tokens=placement.kv_tokens,
        is_first=layers.start == 0,
        is_last=layers.stop == config.num_layers,
    )
