"""Sessions in a file and in Redis: what counts where they differ, and that nothing is refused while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from orchestrator import sessions
from orchestrator.conversation import Session, SessionKey
from orchestrator.session_homes import FileHome, RedisHome
from orchestrator.sessions import SessionStore
from shoal.errors import SessionNotFound, TooManySessions
from shoal.kv import BlockHash
from shoal.redis_link import session_index_key, session_key
from tests.support.fake_link import FakeLink

T = TypeVar("T")

MODEL = "ab" * 32
TTL_S = 100.0
PATIENCE_S = 20.0
KEY = SessionKey("gold", "talk")
BLOCKS = (BlockHash(b"\1" * 32),)


class Homes:
    """A file and a Redis that outlive the orchestrators which use them. The time is what a test sets."""

    def __init__(self, path: Path) -> None:
        self.file = FileHome(path)
        self.link = FakeLink()
        self.now = 1000.0

    def store(self) -> SessionStore:
        """What an orchestrator that has just started knows."""
        return SessionStore(self.file, RedisHome(self.link), MODEL, TTL_S, lambda: self.now)


@pytest.fixture
async def homes(tmp_path: Path) -> AsyncIterator[Homes]:
    homes = Homes(tmp_path / "sessions.sqlite")
    yield homes
    await homes.file.close()


async def take_turn(store: SessionStore, key: SessionKey = KEY) -> Session:
    session = store.used(await store.begin(key))
    number = session.num_turns + 1
    session = replace(session, token_ids=(*session.token_ids, number), num_turns=number)
    store.keep(session)
    store.release(key)
    await store.write(key)
    store.check_invariants()
    return session


async def num_turns(store: SessionStore, key: SessionKey = KEY) -> int:
    session = await store.begin(key)
    store.release(key)
    store.check_invariants()
    return session.num_turns


async def delete(store: SessionStore, key: SessionKey = KEY, blocks: tuple[BlockHash, ...] = ()) -> None:
    try:
        await store.delete(await store.take(key), blocks)
    finally:
        store.release(key)
    store.check_invariants()


async def look_after(store: SessionStore) -> None:
    """What an orchestrator does now and then; the second time it acts on what it learned the first time."""
    for _ in range(2):
        await store.tend()
        for deleted in await store.deletions():
            store.keep(replace(deleted, blocks=()))
            await store.write(deleted.key)
        store.check_invariants()


async def test_a_redis_that_was_never_there_is_not_missed(homes: Homes) -> None:
    homes.link.is_away = True
    store = homes.store()
    await store.tend()

    await take_turn(store)
    await take_turn(store)

    assert store.num_unsaved == 0
    assert [session.num_turns for session in await store.sessions("gold")] == [2]


async def test_a_session_goes_on_after_a_restart_without_redis(homes: Homes) -> None:
    await take_turn(homes.store())
    homes.link.is_away = True

    assert (await take_turn(homes.store())).token_ids == (1, 2)
    assert await num_turns(homes.store()) == 2


async def test_what_was_said_while_redis_was_away_is_brought_to_it_also_after_a_restart(homes: Homes) -> None:
    await take_turn(homes.store())
    homes.link.is_away = True
    last = await take_turn(homes.store())
    homes.link.is_away = False

    await look_after(homes.store())

    assert homes.link.values[session_key("gold", "talk")] == last.pack()


async def test_of_a_file_and_a_redis_that_differ_the_one_with_more_turns_counts(homes: Homes, tmp_path: Path) -> None:
    for _ in range(3):
        await take_turn(homes.store())
    await homes.file.close()
    # The orchestrator moved to another home, and Redis was not there when it started.
    homes.file = FileHome(tmp_path / "another.sqlite")
    homes.link.is_away = True
    store = homes.store()
    assert (await take_turn(store)).num_turns == 1
    homes.link.is_away = False

    await look_after(store)

    assert await num_turns(store) == 3
    assert (await homes.file.get([KEY]) or {})[KEY] == homes.link.values[session_key("gold", "talk")]


async def test_what_a_redis_has_lost_is_in_the_file(homes: Homes) -> None:
    await take_turn(homes.store())
    before = dict(homes.link.values)
    await take_turn(homes.store())
    homes.link.values = before

    store = homes.store()
    assert await num_turns(store) == 2
    await store.tend()
    await homes.file.forget(KEY)
    assert await num_turns(homes.store()) == 2


async def test_a_record_that_is_damaged_in_one_home_is_taken_from_the_other(homes: Homes) -> None:
    last = await take_turn(homes.store())
    homes.link.values[session_key("gold", "talk")] = b"nonsense"
    store = homes.store()

    assert await num_turns(store) == 1
    await store.tend()
    assert homes.link.values[session_key("gold", "talk")] == last.pack()


async def test_a_file_that_fails_costs_nothing_while_redis_is_there(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    homes = Homes(tmp_path / "taken" / "sessions.sqlite")
    await take_turn(homes.store())

    store = homes.store()
    assert (await take_turn(store)).num_turns == 2
    assert store.num_unsaved == 0
    await delete(store)
    assert homes.link.values == {}
    await homes.file.close()


async def test_a_session_that_was_deleted_while_redis_was_away_does_not_come_back_with_it(homes: Homes) -> None:
    await take_turn(homes.store())
    homes.link.is_away = True
    await delete(homes.store())
    homes.link.is_away = False
    store = homes.store()

    assert await store.sessions("gold") == []
    with pytest.raises(SessionNotFound):
        await store.take(KEY)
    await look_after(store)

    assert homes.link.values == {}
    assert homes.link.sets[session_index_key("gold")] == set()
    assert await homes.file.get([KEY]) == {}


async def test_one_that_was_begun_anew_since_counts_though_it_has_fewer_turns(homes: Homes) -> None:
    for _ in range(3):
        await take_turn(homes.store())
    homes.link.is_away = True
    await delete(homes.store())
    assert (await take_turn(homes.store())).num_turns == 1
    homes.link.is_away = False

    store = homes.store()
    assert await num_turns(store) == 1
    await look_after(store)
    assert await num_turns(homes.store()) == 1


async def test_blocks_that_are_still_to_be_deleted_are_remembered(homes: Homes) -> None:
    await take_turn(homes.store())
    homes.link.is_away = True
    await delete(homes.store(), blocks=BLOCKS)
    store = homes.store()
    await store.tend()
    assert await store.deletions() == []
    homes.link.is_away = False

    await store.tend()

    (deleted,) = await store.deletions()
    assert (deleted.key, deleted.blocks) == (KEY, BLOCKS)
    assert store.is_newest(deleted)
    await look_after(store)
    assert await store.deletions() == []


async def test_deleted_sessions_do_not_take_the_room_of_others(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_OF_TENANT", 1)
    homes.link.is_away = True
    store = homes.store()
    for name in ("a", "b", "c"):
        await take_turn(store, SessionKey("gold", name))
        await delete(store, SessionKey("gold", name))

    await take_turn(store, SessionKey("gold", "d"))


async def test_sessions_that_one_home_alone_has_count_while_it_is_away(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_OF_TENANT", 1)
    await take_turn(homes.store())
    await homes.file.forget(KEY)
    store = homes.store()
    assert len(await store.sessions("gold")) == 1
    homes.link.is_away = True

    with pytest.raises(TooManySessions):
        await store.begin(SessionKey("gold", "another"))


async def test_what_is_remembered_is_bounded_while_redis_is_away(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_REMEMBERED", 2)
    homes.link.is_away = True
    store = homes.store()
    keys = [SessionKey("gold", name) for name in "abcd"]
    for key in keys:
        await take_turn(store, key)
    assert len(store._memory) == 2
    homes.link.is_away = False

    await store.tend()

    assert homes.link.values.keys() == {session_key("gold", key.session_id) for key in keys}


class TwoHomesMachine(RuleBasedStateMachine):
    """Whatever Redis does and however often the orchestrator restarts, a session has the turns that it had."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = TemporaryDirectory()
        self.homes = Homes(Path(self.directory.name) / "sessions.sqlite")
        self.store = self.homes.store()
        self.turns: dict[SessionKey, int] = {}

    def run(self, task: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(task, PATIENCE_S))

    KEYS = st.sampled_from([SessionKey("gold", "a"), SessionKey("gold", "b"), SessionKey("free", "a")])

    @rule(key=KEYS)
    def turn(self, key: SessionKey) -> None:
        self.homes.now += 1.0
        self.turns[key] = self.turns.get(key, 0) + 1
        assert self.run(take_turn(self.store, key)).num_turns == self.turns[key]

    @rule(key=KEYS)
    def look(self, key: SessionKey) -> None:
        assert self.run(num_turns(self.store, key)) == self.turns.get(key, 0)

    @rule(key=KEYS, leaves_blocks=st.booleans())
    def delete(self, key: SessionKey, leaves_blocks: bool) -> None:
        if key in self.turns:
            del self.turns[key]
            self.run(delete(self.store, key, BLOCKS if leaves_blocks else ()))
        else:
            with pytest.raises(SessionNotFound):
                self.run(self.store.take(key))

    @rule()
    def restart(self) -> None:
        self.store = self.homes.store()

    @rule(is_away=st.booleans())
    def change_redis(self, is_away: bool) -> None:
        self.homes.link.is_away = is_away

    @rule()
    def lose_redis(self) -> None:
        self.homes.link.values.clear()
        self.homes.link.sets.clear()

    @rule()
    def tend(self) -> None:
        self.run(look_after(self.store))

    @rule(tenant=st.sampled_from(["gold", "free"]))
    def list(self, tenant: str) -> None:
        listed = {session.key: session.num_turns for session in self.run(self.store.sessions(tenant))}
        assert listed == {key: count for key, count in self.turns.items() if key.tenant == tenant}

    def teardown(self) -> None:
        """Once Redis is there, both homes come to have the same, and nothing of what was deleted."""
        self.homes.link.is_away = False
        self.store = self.homes.store()
        self.run(look_after(self.store))
        for key in ("gold", "a"), ("gold", "b"), ("free", "a"):
            held = self.run(self.homes.file.get([SessionKey(*key)]))
            assert held is not None
            assert held.get(SessionKey(*key)) == self.homes.link.values.get(session_key(*key))
        assert len(self.homes.link.values) == len(self.turns)
        self.run(self.homes.file.close())
        self.loop.close()
        self.directory.cleanup()


TwoHomesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTwoHomes = TwoHomesMachine.TestCase
