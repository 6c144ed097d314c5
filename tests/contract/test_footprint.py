"""What a plan says a shard takes of a device is what its worker checks before it downloads anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelstore.manifest import Manifest
from orchestrator.shards import blob_refs, footprint
from shoal.types import LayerRange
from tests.support.shards import make_tiny_model
from worker.blobs import need_of

NUM_LAYERS = 4
KV_TOKENS = 640
CUTS = [LayerRange(start, stop) for start in range(NUM_LAYERS) for stop in range(start + 1, NUM_LAYERS + 1)]
TABLE_BYTES, ROPE_BYTES = 1 << 30, 1 << 20


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    made = make_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=NUM_LAYERS).manifest
    # Sizes that cannot be taken for each other.
    return replace(
        made,
        embedding=replace(made.embedding, num_bytes=TABLE_BYTES),
        rope=replace(made.rope, num_bytes=ROPE_BYTES),
    )


@pytest.mark.parametrize("is_head_tied", [True, False])
@pytest.mark.parametrize("layers", CUTS, ids=str)
def test_planned_and_checked_memory_are_the_same(manifest: Manifest, layers: LayerRange, is_head_tied: bool) -> None:
    model = replace(manifest, config=replace(manifest.config, is_head_tied=is_head_tied))
    sizes = footprint(model)
    refs = blob_refs(model, layers)

    planned = sizes.need_bytes(layers.start, layers.stop, KV_TOKENS)

    assert need_of(refs, KV_TOKENS * len(layers) * sizes.kv_bytes_per_token_per_layer) == planned
    assert sum(ref.num_bytes for ref in refs) == sizes.weight_bytes(layers.start, layers.stop)


@pytest.mark.parametrize(
    ("layers", "is_head_tied", "is_packed"),
    [((0, 2), True, False), ((0, 4), True, True), ((2, 4), True, True), ((0, 4), False, False)],
)
def test_a_table_is_packed_only_for_a_head_that_is_tied_to_it(
    manifest: Manifest, layers: tuple[int, int], is_head_tied: bool, is_packed: bool
) -> None:
    model = replace(manifest, config=replace(manifest.config, is_head_tied=is_head_tied))

    by_size = {ref.num_bytes: ref.is_mapped for ref in blob_refs(model, LayerRange(*layers))}

    assert by_size[TABLE_BYTES] is not is_packed
    assert by_size[ROPE_BYTES]
    assert not any(is_mapped for num_bytes, is_mapped in by_size.items() if num_bytes < ROPE_BYTES)
