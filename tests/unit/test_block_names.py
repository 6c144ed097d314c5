"""Who shares the names of KV blocks: a tenant with itself, everybody what is public, and the secret that sees to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import block_names
from orchestrator.block_names import BlockNames, load_secret
from shoal.errors import ConfigError, InvalidRequest
from shoal.kv import BLOCK_TOKENS
from tests.support.fake_link import FakeLink

MODEL = "ab" * 32
SECRET = b"s" * 32
SYSTEM = list(range(2 * BLOCK_TOKENS))
PROMPT = [*SYSTEM, *range(500, 500 + BLOCK_TOKENS)]


def make_names(secret: bytes = SECRET, model: str = MODEL, link: FakeLink | None = None) -> BlockNames:
    return BlockNames(model, secret, link)


def test_only_full_blocks_have_names() -> None:
    names = make_names()

    assert names.names("a", PROMPT[: BLOCK_TOKENS - 1]) == ()
    assert len(names.names("a", PROMPT[:-1])) == 2
    assert len(names.names("a", PROMPT)) == 3


def test_a_longer_prompt_begins_with_the_names_of_a_shorter_one() -> None:
    assert make_names().names("a", PROMPT)[:2] == make_names().names("a", SYSTEM)


@given(tokens=st.lists(st.integers(0, 49151), min_size=BLOCK_TOKENS, max_size=4 * BLOCK_TOKENS))
def test_two_tenants_never_share_a_name(tokens: list[int]) -> None:
    names = make_names()

    assert not set(names.names("gold", tokens)) & set(names.names("free", tokens))


@pytest.mark.parametrize("other", [make_names(secret=b"t" * 32), make_names(model="cd" * 32)], ids=["secret", "model"])
def test_another_secret_or_model_has_other_names(other: BlockNames) -> None:
    assert not set(make_names().names("a", PROMPT)) & set(other.names("a", PROMPT))


def test_a_guessable_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 5 bytes"):
        make_names(secret=b"short")


async def test_a_public_prefix_is_shared_and_what_follows_is_not() -> None:
    names = make_names()
    await names.make_public(SYSTEM)

    gold, free = names.names("gold", PROMPT), names.names("free", PROMPT)

    assert gold[:2] == free[:2]
    assert gold[2] != free[2]
    assert [names.is_public(block) for block in gold] == [True, True, False]


async def test_the_same_tokens_behind_two_public_prefixes_have_two_names() -> None:
    names = make_names()
    other = list(range(900, 900 + 2 * BLOCK_TOKENS))
    await names.make_public(SYSTEM)
    await names.make_public(other)

    assert names.names("gold", PROMPT)[2] != names.names("gold", [*other, *PROMPT[2 * BLOCK_TOKENS :]])[2]


async def test_the_beginning_of_a_public_prefix_is_public() -> None:
    names = make_names()
    await names.make_public(SYSTEM)
    tokens = [*SYSTEM[:BLOCK_TOKENS], *range(900, 900 + BLOCK_TOKENS)]

    assert [names.is_public(block) for block in names.names("gold", tokens)] == [True, False]


async def test_the_middle_of_a_public_prefix_is_not() -> None:
    names = make_names()
    await names.make_public(SYSTEM)

    assert not any(map(names.is_public, names.names("gold", SYSTEM[BLOCK_TOKENS:])))


async def test_too_much_that_is_public_is_refused_and_none_of_it_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_names, "MAX_PUBLIC_BLOCKS", 2)
    names = make_names()

    with pytest.raises(InvalidRequest, match="more than 2 blocks of 64 tokens would be public"):
        await names.make_public(PROMPT)
    assert not any(map(names.is_public, names.names("a", PROMPT)))


async def test_what_is_public_outlives_the_orchestrator() -> None:
    link = FakeLink()
    await make_names(link=link).make_public(SYSTEM)
    restarted = make_names(link=link)

    await restarted.tend()

    assert all(map(restarted.is_public, restarted.names("gold", SYSTEM)))


async def test_what_became_public_while_redis_was_away_is_written_later() -> None:
    link = FakeLink()
    link.is_away = True
    names = make_names(link=link)
    await names.make_public(SYSTEM)
    link.is_away = False
    await names.tend()
    restarted = make_names(link=link)

    await restarted.tend()

    assert all(map(restarted.is_public, restarted.names("gold", SYSTEM)))


async def test_what_is_public_of_one_model_is_not_of_another() -> None:
    link = FakeLink()
    await make_names(link=link).make_public(SYSTEM)
    other = make_names(model="cd" * 32, link=link)

    await other.tend()

    assert not any(map(other.is_public, other.names("gold", SYSTEM)))


def test_a_secret_is_drawn_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "kv_secret"

    drawn = load_secret(path)

    assert len(drawn) == 32
    assert load_secret(path) == drawn
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["kv_secret"]


def test_the_secret_that_was_drawn_first_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kv_secret"
    link = os.link

    def come_second(source: Path, target: Path) -> None:
        path.write_bytes(b"the other process's secret......")
        link(source, target)

    monkeypatch.setattr(os, "link", come_second)

    assert load_secret(path) == b"the other process's secret......"


def test_a_secret_that_cannot_be_kept_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"cannot be kept in .*/file/kv_secret"):
        load_secret(tmp_path / "file" / "kv_secret")
