"""How much of a prompt Redis is believed to have, by what workers wrote of it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.catalogue import Catalogue
from shoal.kv import BlockHash, layer_key
from shoal.redis_link import block_manifest_key, block_value_key
from shoal.types import LayerRange
from tests.support.fake_link import FakeLink, store_blocks

NUM_LAYERS = 4
BLOCKS = [BlockHash(bytes([number]) * 32) for number in range(3)]
Ranges = list[str]


def stored_prefix(*blocks: Ranges, is_away: bool = False) -> int:
    """Of three blocks, the first of which have these layers in Redis."""
    link = FakeLink()
    for block, ranges in zip(BLOCKS, blocks, strict=False):
        link.hashes[block_manifest_key(block)] = {one.encode(): b"" for one in ranges}
    link.is_away = is_away
    return asyncio.run(Catalogue(link, NUM_LAYERS).stored_prefix(BLOCKS))


def test_blocks_with_all_their_layers_count_until_the_first_without() -> None:
    assert stored_prefix(["0-4"], ["0-2", "2-4"], ["0-2"]) == 2


def test_all_blocks_may_be_there() -> None:
    assert stored_prefix(["0-4"], ["0-4"], ["0-4"]) == 3


@pytest.mark.parametrize(
    ("ranges", "is_whole"),
    [
        (["2-4", "0-2"], True),
        (["0-3", "1-4"], True),
        (["0-3", "0-1", "1-4"], True),
        (["0-1", "2-4"], False),
        (["1-4"], False),
        (["0-3"], False),
        ([], False),
        (["0-4x", "x", "4-0", "-", "0-"], False),
        (["0-4", "nonsense"], True),
    ],
)
def test_a_block_is_whole_if_its_groups_cover_the_layers(ranges: Ranges, is_whole: bool) -> None:
    assert stored_prefix(ranges) == int(is_whole)


def test_a_field_whose_number_nobody_could_read_is_skipped() -> None:
    assert stored_prefix(["0-4", "9" * 5000 + "-" + "9" * 5001], ["0-4"]) == 2


async def test_all_that_a_prompt_begins_with_counts_as_used_and_what_comes_behind_a_hole_does_not() -> None:
    link = FakeLink()
    store_blocks(link, BLOCKS, ranges=((0, 2), (2, 4)))
    del link.hashes[block_manifest_key(BLOCKS[2])][b"2-4"]

    assert await Catalogue(link, NUM_LAYERS).stored_prefix(BLOCKS) == 2
    await asyncio.sleep(0)

    ranges = [LayerRange(0, 2), LayerRange(2, 4)]
    assert link.touched == [block_value_key(layer_key(block, one)) for block in BLOCKS[:2] for one in ranges]


def test_a_block_behind_one_that_lacks_does_not_count() -> None:
    assert stored_prefix([], ["0-4"]) == 0


def test_while_redis_is_away_nothing_is_there() -> None:
    assert stored_prefix(["0-4"], is_away=True) == 0


async def test_without_redis_nothing_is_there_and_all_is_deleted() -> None:
    catalogue = Catalogue(None, NUM_LAYERS)

    assert await catalogue.stored_prefix(BLOCKS) == 0
    assert await catalogue.delete(BLOCKS)


async def test_a_prompt_without_full_blocks_asks_nobody() -> None:
    link = FakeLink()

    assert await Catalogue(link, NUM_LAYERS).stored_prefix([]) == 0
    assert link.num_calls == 0
