"""Keys of KV blocks: equal exactly for what may be shared, in every process."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, InternalError
from shoal.kv import BLOCK_TOKENS, BlockHash, KVScope, chain, extend, layer_key, tenant_salt
from shoal.types import LayerRange

MODEL = "ab" * 32
SECRET = b"sixteen bytes or more"
IDS = tuple(range(5, 5 + 3 * BLOCK_TOKENS))


def make_scope(
    *, model_digest: str = MODEL, scheme: str = "f32-rope-1", adapter: str = "", salt: bytes = b""
) -> KVScope:
    return KVScope(model_digest, scheme, adapter, salt)


def test_each_full_block_has_a_digest_and_the_rest_has_none() -> None:
    lengths = {
        num_tokens: len(chain(make_scope(), IDS[:num_tokens])) for num_tokens in (0, 1, 63, 64, 65, 127, 128, 192)
    }
    assert lengths == {0: 0, 1: 0, 63: 0, 64: 1, 65: 1, 127: 1, 128: 2, 192: 3}
    assert {len(block) for block in chain(make_scope(), IDS)} == {32}


def test_a_longer_prompt_keeps_the_digests_of_its_prefix() -> None:
    assert chain(make_scope(), IDS)[:2] == chain(make_scope(), IDS[:130])


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=BLOCK_TOKENS, max_size=4 * BLOCK_TOKENS),
    st.integers(0, 4 * BLOCK_TOKENS - 1),
)
def test_a_changed_token_changes_its_block_and_all_after_it_and_none_before(ids: list[int], place: int) -> None:
    place %= len(ids)
    changed = [*ids[:place], ids[place] ^ 1, *ids[place + 1 :]]
    first = place // BLOCK_TOKENS
    old, new = chain(make_scope(), ids), chain(make_scope(), changed)
    assert old[:first] == new[:first]
    assert not set(old[first:]) & set(new[first:])


def test_equal_blocks_at_other_places_differ() -> None:
    assert len(set(chain(make_scope(), (7,) * 3 * BLOCK_TOKENS))) == 3


@given(st.integers(0, 3), st.integers(0, 63))
def test_a_chain_extended_block_by_block_is_the_chain_at_once(num_blocks: int, rest: int) -> None:
    scope = make_scope()
    start = num_blocks * BLOCK_TOKENS
    head = chain(scope, IDS[:start])
    parent = head[-1] if head else None
    assert head + extend(scope, parent, IDS[start:]) == chain(scope, IDS)
    assert extend(scope, parent, IDS[:rest]) == ()


@pytest.mark.parametrize(
    "other",
    [
        make_scope(model_digest="ac" * 32),
        make_scope(scheme="f32-rope-2"),
        make_scope(adapter="poet"),
        make_scope(salt=tenant_salt(SECRET, "gold")),
        # The same text, cut into fields elsewhere.
        make_scope(model_digest=MODEL + "f", scheme="32-rope-1"),
        make_scope(scheme="f32-rope-", adapter="1"),
        make_scope(scheme="f32-rope-1", adapter="a" * 32),
    ],
)
def test_no_block_is_shared_between_scopes(other: KVScope) -> None:
    assert not set(chain(make_scope(), IDS)) & set(chain(other, IDS))
    assert not set(chain(make_scope(adapter="", salt=b"a" * 32), IDS)) & set(chain(other, IDS))


def test_salts_follow_tenant_and_secret_and_are_not_the_public_one() -> None:
    salts = [tenant_salt(SECRET, "gold"), tenant_salt(SECRET, "free"), tenant_salt(SECRET + b"!", "gold")]
    assert len(set(salts)) == 3
    assert [make_scope(salt=salt).is_public for salt in (*salts, b"")] == [False, False, False, True]
    assert tenant_salt(SECRET, "gold") == salts[0]
    assert len(tenant_salt(b"sixteen bytes...", "gold")) == 32


def test_a_salt_is_not_what_the_tenant_can_compute_without_the_secret() -> None:
    guesses = {hashlib.sha256(text).digest() for text in (b"gold", b"shoal kv salt 1\0gold")}
    assert tenant_salt(SECRET, "gold") not in guesses


@pytest.mark.parametrize("secret", [b"", b"fifteen bytes.."])
def test_a_secret_that_can_be_guessed_is_refused(secret: bytes) -> None:
    with pytest.raises(ConfigError, match=f"has {len(secret)} bytes; it needs at least 16"):
        tenant_salt(secret, "gold")


@pytest.mark.parametrize("num_bytes", [1, 31, 33])
def test_a_salt_of_another_length_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="32 bytes, or none"):
        make_scope(salt=bytes(num_bytes))


def test_a_tenant_s_prompt_goes_on_from_a_public_prefix() -> None:
    public, mine = make_scope(), make_scope(salt=tenant_salt(SECRET, "gold"))
    prefix = chain(public, IDS[:BLOCK_TOKENS])
    following = extend(mine, prefix[-1], IDS[BLOCK_TOKENS:])
    assert len(following) == 2
    assert not set(following) & {*chain(public, IDS), *chain(mine, IDS), *extend(mine, None, IDS[BLOCK_TOKENS:])}


def test_keys_of_stages_differ_by_their_layers_and_by_block() -> None:
    blocks = chain(make_scope(), IDS)
    ranges = [LayerRange(0, 15), LayerRange(15, 30), LayerRange(0, 30), LayerRange(0, 14), LayerRange(15, 16)]
    keys = [layer_key(block, layers) for block in blocks for layers in ranges]
    assert len(set(keys) | set(blocks)) == len(keys) + len(blocks)
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7"])
@pytest.mark.parametrize("place", [0, BLOCK_TOKENS])
def test_what_is_no_32_bit_token_id_is_refused_even_behind_the_last_block(bad: int, place: int) -> None:
    ids = [1] * (BLOCK_TOKENS + 1)
    ids[place] = bad
    with pytest.raises(InternalError, match="token ids must be whole numbers"):
        chain(make_scope(), ids)


def test_arrays_of_ids_have_the_keys_of_lists() -> None:
    assert chain(make_scope(), np.array(IDS, np.int64).tolist()) == chain(make_scope(), IDS)
    assert chain(make_scope(), range(IDS[0], IDS[-1] + 1)) == chain(make_scope(), IDS)


def test_the_digests_are_those_that_the_definition_gives() -> None:
    """Written out once more: whoever changes a digest makes every stored block unreachable, and must mean to."""
    fields = (MODEL.encode(), b"f32-rope-1", b"", b"")
    scope = hashlib.sha256(
        b"shoal kv scope 1\0" + b"".join(struct.pack("<I", len(field)) + field for field in fields)
    ).digest()
    parent, expected = b"", []
    for start in range(0, len(IDS), 64):
        tokens = b"".join(token_id.to_bytes(4, "little") for token_id in IDS[start : start + 64])
        parent = hashlib.sha256(
            b"shoal kv block 1\0" + scope + struct.pack("<I", len(parent)) + parent + tokens
        ).digest()
        expected.append(parent)
    assert list(chain(make_scope(), IDS)) == expected
    key = hashlib.sha256(b"shoal kv layers 1\0" + expected[0] + struct.pack("<II", 3, 9)).digest()
    assert layer_key(BlockHash(expected[0]), LayerRange(3, 9)) == key


def test_processes_with_other_hash_seeds_have_the_same_keys() -> None:
    program = (
        "from shoal.kv import *; from shoal.types import LayerRange;"
        f"s = KVScope({MODEL!r}, 'f32-rope-1', 'poet', tenant_salt({SECRET!r}, 'gold'));"
        "b = chain(s, range(192)); print(hash('x'), *(layer_key(h, LayerRange(2, 5)).hex() for h in b))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    scope = make_scope(adapter="poet", salt=tenant_salt(SECRET, "gold"))
    own = [layer_key(block, LayerRange(2, 5)).hex() for block in chain(scope, range(192))]
    assert outputs[0][0] != outputs[1][0], "the seeds made no difference to hash()"
    assert outputs[0][1:] == outputs[1][1:] == own
