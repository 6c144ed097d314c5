"""What is kept of sessions, who may take a turn, and what is said while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import sessions
from orchestrator.conversation import Session, SessionKey, unpack
from orchestrator.session_homes import RedisHome
from orchestrator.sessions import SessionStore
from shoal.errors import InvalidRequest, SessionBusy, SessionNotFound, SessionUnavailable, TooManySessions
from shoal.kv import BlockHash
from shoal.redis_connection import Command
from shoal.redis_link import session_index_key, session_key
from tests.support.fake_link import FakeLink

MODEL = "ab" * 32
TTL_S = 100.0
KEY = SessionKey("gold", "talk")


class Clock:
    """The time is what a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_store(link: FakeLink | None = None, *, model: str = MODEL, clock: Clock | None = None) -> SessionStore:
    return SessionStore(None, RedisHome(link) if link else None, model, TTL_S, clock or Clock())


async def take_turn(store: SessionStore, key: SessionKey = KEY, token_ids: tuple[int, ...] = (1, 2, 3)) -> Session:
    """A turn that adds tokens; returns the session as it is then."""
    session = store.used(await store.begin(key))
    session = replace(session, token_ids=session.token_ids + token_ids, num_turns=session.num_turns + 1)
    store.keep(session)
    store.release(key)
    await store.write(key)
    store.check_invariants()
    return session


async def delete(store: SessionStore, key: SessionKey = KEY, blocks: Sequence[BlockHash] = ()) -> None:
    try:
        await store.delete(await store.take(key), blocks)
    finally:
        store.release(key)
    store.check_invariants()


async def look(store: SessionStore, key: SessionKey = KEY) -> Session:
    session = await store.begin(key)
    store.release(key)
    return session


def test_a_stored_session_is_the_same_again() -> None:
    blocks = (BlockHash(b"\1" * 32), BlockHash(b"\2" * 32))
    session = Session(KEY, MODEL, (1, 70000, 2**32 - 1), 3, blocks, 1.0, 2.5, 3.25)

    assert unpack(KEY, session.pack()) == session


@pytest.mark.parametrize("damage", [lambda packed: packed[:-1], lambda packed: b"", lambda packed: b"\0" + packed[1:]])
def test_a_damaged_session_is_refused(damage: object) -> None:
    packed = damage(Session(KEY, MODEL, (1, 2, 3)).pack())  # type: ignore[operator]

    with pytest.raises(InvalidRequest, match="damaged or of another version; delete it"):
        unpack(KEY, packed)


def test_a_flipped_bit_is_noticed_wherever_it_is() -> None:
    packed = Session(KEY, MODEL, (1, 2, 3), blocks=(BlockHash(b"\1" * 32),)).pack()
    for index in range(len(packed)):
        flipped = packed[:index] + bytes([packed[index] ^ 1]) + packed[index + 1 :]
        with pytest.raises(InvalidRequest):
            unpack(KEY, flipped)


@pytest.mark.parametrize("link", [None, FakeLink()], ids=["memory", "redis"])
async def test_turns_add_up(link: FakeLink | None) -> None:
    store = make_store(link)

    assert (await look(store)).num_turns == 0
    await take_turn(store, token_ids=(1, 2))
    await take_turn(store, token_ids=(3,))

    assert (await look(store)).token_ids == (1, 2, 3)
    assert (await look(store)).num_turns == 2


async def test_sessions_of_two_tenants_are_two() -> None:
    store = make_store()
    await take_turn(store, SessionKey("gold", "talk"))

    assert (await look(store, SessionKey("free", "talk"))).num_turns == 0


async def test_a_second_turn_at_the_same_time_is_refused_and_may_come_again() -> None:
    store = make_store()
    await store.begin(KEY)

    with pytest.raises(SessionBusy, match="a turn of session 'talk' is under way") as raised:
        await store.begin(KEY)
    assert (raised.value.is_retryable, raised.value.retry_after_s) == (True, 1.0)
    store.release(KEY)
    await store.begin(KEY)


async def test_of_two_turns_that_begin_at_once_one_is_refused() -> None:
    store = make_store(FakeLink())

    results = await asyncio.gather(store.begin(KEY), store.begin(KEY), return_exceptions=True)

    assert [type(result) for result in results] == [Session, SessionBusy]


async def test_a_session_outlives_the_orchestrator_in_redis() -> None:
    link = FakeLink()
    await take_turn(make_store(link))

    assert (await look(make_store(link))).token_ids == (1, 2, 3)


async def test_a_session_of_another_model_is_refused() -> None:
    link = FakeLink()
    await take_turn(make_store(link))

    with pytest.raises(InvalidRequest, match="another model"):
        await look(make_store(link, model="cd" * 32))


async def test_a_damaged_session_can_be_deleted() -> None:
    link = FakeLink()
    await take_turn(make_store(link))
    link.values[session_key("gold", "talk")] = b"nonsense"
    store = make_store(link)
    with pytest.raises(InvalidRequest, match="delete it"):
        await look(store)

    await delete(store)

    assert (await look(store)).num_turns == 0


async def test_a_refused_turn_leaves_the_session_free() -> None:
    link = FakeLink()
    store = make_store(link)
    link.is_away = True
    with pytest.raises(SessionUnavailable):
        await store.begin(KEY)
    link.is_away = False

    await store.begin(KEY)


async def test_while_redis_is_away_a_session_that_only_it_has_is_refused() -> None:
    link = FakeLink()
    await take_turn(make_store(link))
    restarted = make_store(link)
    await restarted.tend()
    link.is_away = True

    with pytest.raises(SessionUnavailable, match="cannot be looked up") as raised:
        await look(restarted)
    assert raised.value.is_retryable


async def test_while_redis_is_away_and_never_was_there_nothing_is_taken_for_new() -> None:
    link = FakeLink()
    link.is_away = True

    with pytest.raises(SessionUnavailable):
        await look(make_store(link))


async def test_while_redis_is_away_a_new_session_is_held_in_memory_and_written_later() -> None:
    link = FakeLink()
    store = make_store(link)
    await store.tend()
    link.is_away = True
    await take_turn(store)
    await take_turn(store)
    assert store.num_unsaved == 1
    link.is_away = False

    await store.tend()

    assert store.num_unsaved == 0
    assert (await look(make_store(link))).token_ids == (1, 2, 3, 1, 2, 3)


async def test_while_redis_is_away_a_session_in_memory_goes_on() -> None:
    link = FakeLink()
    store = make_store(link)
    await take_turn(store)
    link.is_away = True
    await take_turn(store)
    link.is_away = False
    await store.tend()

    assert (await look(make_store(link))).num_turns == 2


async def test_what_another_orchestrator_did_is_seen() -> None:
    link = FakeLink()
    one, other = make_store(link), make_store(link)
    await take_turn(one)
    await take_turn(other)

    assert (await look(one)).num_turns == 2


@pytest.mark.parametrize("is_older_there", [True, False])
async def test_what_a_redis_that_crashed_has_lost_is_still_in_memory(is_older_there: bool) -> None:
    link, clock = FakeLink(), Clock()
    store = make_store(link, clock=clock)
    await take_turn(store)
    before = dict(link.values) if is_older_there else {}
    clock.now += 1
    await take_turn(store)
    link.values = before

    assert (await look(store)).num_turns == 2
    await store.tend()
    assert (await look(make_store(link))).num_turns == 2


async def test_with_redis_only_sessions_used_last_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_REMEMBERED", 2)
    link = FakeLink()
    store = make_store(link)
    for name in ("a", "b", "c"):
        await take_turn(store, SessionKey("gold", name))
    link.is_away = True

    assert (await look(store, SessionKey("gold", "c"))).num_turns == 1
    with pytest.raises(SessionUnavailable):
        await look(store, SessionKey("gold", "a"))


async def test_what_waited_to_be_written_is_forgotten_like_the_rest_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_REMEMBERED", 1)
    link = FakeLink()
    store = make_store(link)
    await store.tend()
    link.is_away = True
    for name in ("a", "b"):
        await take_turn(store, SessionKey("gold", name))
    link.is_away = False
    await store.tend()
    link.is_away = True

    with pytest.raises(SessionUnavailable):
        await look(store, SessionKey("gold", "a"))


class SlowLink(FakeLink):
    """Answers a moment after it took a command."""

    async def call(self, *commands: Command, timeout_s: float = 0.05) -> list[Any] | None:
        answer = await super().call(*commands, timeout_s=timeout_s)
        await asyncio.sleep(0)
        return answer


async def test_a_turn_that_ends_while_the_one_before_is_being_written_is_written_too() -> None:
    link = SlowLink()
    store = make_store(link)
    session = await store.begin(KEY)
    store.keep(replace(session, num_turns=1))
    writing = asyncio.create_task(store.write(KEY))
    await asyncio.sleep(0)

    store.keep(replace(session, num_turns=2))
    await writing
    await store.tend()

    store.release(KEY)
    assert (await look(make_store(link))).num_turns == 2


async def test_a_new_session_that_waits_to_be_written_counts_with_those_in_redis() -> None:
    link = FakeLink()
    store = make_store(link)
    store.keep(replace(await store.begin(KEY), num_turns=1))

    assert [one.key for one in await store.sessions("gold")] == [KEY]
    store.check_invariants()


async def test_a_look_at_a_session_shows_none_that_nobody_can_go_on_with() -> None:
    link, clock = FakeLink(), Clock()
    store = make_store(link, clock=clock)
    session = await take_turn(store)

    assert await store.peek(KEY) == session
    assert await make_store(link, model="cd" * 32).peek(KEY) is None
    clock.now += TTL_S
    assert await store.peek(KEY) is None


async def test_what_is_not_written_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_REMEMBERED", 1)
    link = FakeLink()
    store = make_store(link)
    await store.tend()
    link.is_away = True
    for name in ("a", "b", "c"):
        await take_turn(store, SessionKey("gold", name))

    assert (await look(store, SessionKey("gold", "a"))).num_turns == 1


async def test_a_tenant_has_room_for_so_many_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_OF_TENANT", 2)
    store = make_store(FakeLink())
    await take_turn(store, SessionKey("gold", "a"))
    await take_turn(store, SessionKey("gold", "b"))

    with pytest.raises(TooManySessions, match="tenant 'gold' has 2 sessions; at most 2 of a tenant"):
        await store.begin(SessionKey("gold", "c"))
    await take_turn(store, SessionKey("gold", "a"))
    await take_turn(store, SessionKey("free", "c"))


async def test_there_is_room_for_so_many_sessions_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 1)
    store = make_store()
    await take_turn(store, SessionKey("gold", "a"))

    with pytest.raises(TooManySessions):
        await store.begin(SessionKey("free", "a"))


async def test_a_restarted_orchestrator_counts_what_redis_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_OF_TENANT", 1)
    link = FakeLink()
    await take_turn(make_store(link))

    with pytest.raises(TooManySessions):
        await make_store(link).begin(SessionKey("gold", "another"))


@pytest.mark.parametrize("link", [None, FakeLink()], ids=["memory", "redis"])
async def test_sessions_are_listed_by_tenant(link: FakeLink | None) -> None:
    store = make_store(link)
    for key in (SessionKey("gold", "b"), SessionKey("gold", "a"), SessionKey("free", "c")):
        await take_turn(store, key)

    assert [session.key.session_id for session in await store.sessions("gold")] == ["a", "b"]
    assert await store.sessions("nobody") == []


async def test_sessions_cannot_be_listed_while_redis_is_away() -> None:
    link = FakeLink()
    store = make_store(link)
    await take_turn(store)
    link.is_away = True

    with pytest.raises(SessionUnavailable, match="cannot be listed"):
        await store.sessions("gold")


@pytest.mark.parametrize("link", [None, FakeLink()], ids=["memory", "redis"])
async def test_a_deleted_session_is_gone(link: FakeLink | None) -> None:
    store = make_store(link)
    await take_turn(store)

    await delete(store)

    with pytest.raises(SessionNotFound, match="tenant 'gold' has no session 'talk'"):
        await store.take(KEY)
    assert await store.sessions("gold") == []
    if link is not None:
        assert session_key("gold", "talk") not in link.values
        assert link.sets[session_index_key("gold")] == set()


async def test_a_session_with_a_turn_under_way_cannot_be_taken_for_deletion() -> None:
    store = make_store()
    await take_turn(store)
    await store.begin(KEY)

    with pytest.raises(SessionBusy):
        await store.take(KEY)


async def test_a_deletion_that_failed_can_be_tried_again() -> None:
    link = FakeLink()
    store = make_store(link)
    await take_turn(store)
    link.is_away = True
    with pytest.raises(SessionUnavailable, match="cannot be deleted"):
        await delete(store)
    assert (await look(store)).num_turns == 1
    link.is_away = False

    await delete(store)

    assert await store.sessions("gold") == []


async def test_a_session_expires_when_it_was_not_used_for_its_time() -> None:
    clock = Clock()
    store = make_store(FakeLink(), clock=clock)
    await take_turn(store)
    clock.now += TTL_S - 1
    await take_turn(store, SessionKey("gold", "later"))
    assert await store.expired() == []

    clock.now += 1

    assert await store.expired() == [KEY]


async def test_a_turn_gives_a_session_its_whole_time_again() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    await take_turn(store)
    clock.now += TTL_S - 1
    await take_turn(store)
    clock.now += TTL_S - 1

    assert await store.expired() == []


async def test_a_session_does_not_expire_amid_a_turn() -> None:
    clock = Clock()
    store = make_store(clock=clock)
    await take_turn(store)
    await store.begin(KEY)
    clock.now += TTL_S

    assert await store.expired() == []
