"""What a home of sessions promises, of the file, of the fake Redis and of a real one; and what is the file's own."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from launch.redis_server import EmbeddedRedis
from orchestrator import session_homes
from orchestrator.conversation import Session, SessionKey
from orchestrator.session_homes import FileHome, RedisHome, SessionHome
from shoal.redis_link import AsyncRedisLink
from tests.support.fake_link import FakeLink
from tests.support.redis import PATIENCE_S, redis_server

__all__ = ["redis_server"]

KEY = SessionKey("gold", "talk")


def make_session(key: SessionKey = KEY, num_turns: int = 1, expires_at: float = 100.0) -> Session:
    return Session(key, "ab" * 32, token_ids=(1, 2, 3), num_turns=num_turns, expires_at=expires_at)


def make_deleted(key: SessionKey = KEY, expires_at: float = 100.0) -> Session:
    return Session(key, "ab" * 32, expires_at=expires_at, life=1)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[FileHome]:
    home = FileHome(tmp_path / "home" / "sessions.sqlite")
    yield home
    await home.close()


@pytest.fixture(params=["file", "fake", "valkey"])
async def home(
    request: pytest.FixtureRequest, file: FileHome, redis_server: EmbeddedRedis
) -> AsyncIterator[SessionHome]:
    if request.param == "file":
        yield file
        return
    link = FakeLink() if request.param == "fake" else AsyncRedisLink(redis_server.url)
    assert request.param == "fake" or await link.connect(PATIENCE_S)
    await link.delete(*(await link.call(("KEYS", "shoal:*")) or [[]])[0]) if request.param == "valkey" else None
    yield RedisHome(link)
    await link.close()


async def test_what_was_put_is_had_again_as_it_was(home: SessionHome) -> None:
    one, other = make_session(), make_session(SessionKey("gold", "other"))
    assert await home.put(one)
    assert await home.put(other)

    assert await home.get([KEY, SessionKey("free", "talk"), other.key]) == {KEY: one.pack(), other.key: other.pack()}


async def test_a_record_takes_the_place_of_the_one_before(home: SessionHome) -> None:
    await home.put(make_session(num_turns=1))
    await home.put(make_session(num_turns=2))

    assert await home.get([KEY]) == {KEY: make_session(num_turns=2).pack()}


async def test_sessions_are_listed_by_tenant(home: SessionHome) -> None:
    assert await home.session_ids("gold") == set()
    for key in (KEY, SessionKey("gold", "b"), SessionKey("a:b", "c"), SessionKey("a", "b:c"), SessionKey("é ", "d")):
        await home.put(make_session(key))

    assert await home.session_ids("gold") == {"talk", "b"}
    assert await home.session_ids("a") == {"b:c"}
    assert await home.tenants() == {"gold", "a:b", "a", "é "}


async def test_a_deleted_session_is_not_listed_and_may_begin_anew(home: SessionHome) -> None:
    await home.put(make_session())
    assert await home.put(make_deleted())

    assert await home.session_ids("gold") == set()
    assert (await home.get([KEY]) or {}).get(KEY) in (None, make_deleted().pack())
    await home.put(make_session(num_turns=1))
    assert await home.session_ids("gold") == {"talk"}


async def test_what_is_in_the_file_outlives_the_process_and_is_its_owners_alone(file: FileHome, tmp_path: Path) -> None:
    await file.put(make_session())
    await file.close()
    again = FileHome(tmp_path / "home" / "sessions.sqlite")

    assert await again.get([KEY]) == {KEY: make_session().pack()}
    assert stat.S_IMODE((tmp_path / "home" / "sessions.sqlite").stat().st_mode) == 0o600
    await again.close()


async def test_the_file_remembers_deletions_until_they_are_forgotten_or_over(file: FileHome) -> None:
    late, heard = SessionKey("gold", "late"), SessionKey("gold", "heard")
    for session in (make_deleted(), make_deleted(late, expires_at=50.0), make_deleted(heard), make_session()):
        await file.put(session)
    assert await file.deletions(now=49.0) == [late, heard]

    await file.forget(heard)

    assert await file.deletions(now=50.0) == []
    assert await file.session_ids("gold") == {"talk"}
    assert await file.get([late, heard]) == {}


async def test_the_file_forgets_the_oldest_of_too_many_deletions(
    file: FileHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_homes, "MAX_DELETIONS", 2)
    keys = [SessionKey("gold", name) for name in "abc"]
    for at, key in enumerate(keys):
        await file.put(make_deleted(key, expires_at=100.0 + at))

    assert await file.deletions(now=0.0) == keys[1:]


async def test_nothing_of_a_deleted_session_is_left_in_the_file(file: FileHome, tmp_path: Path) -> None:
    session = Session(KEY, "ab" * 32, token_ids=(0x53484F41,) * 2000, num_turns=1)
    await file.put(session)
    await file.put(make_deleted())
    await file.close()

    stored = b"".join(path.read_bytes() for path in (tmp_path / "home").iterdir())
    assert (0x53484F41).to_bytes(4, "little") not in stored


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
async def test_a_damaged_file_is_put_aside_and_another_is_begun(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sessions.sqlite").write_bytes(content)
    file = FileHome(tmp_path / "sessions.sqlite")

    assert await file.put(make_session())
    assert await file.get([KEY]) == {KEY: make_session().pack()}
    assert (tmp_path / "sessions.damaged").read_bytes() == content
    await file.close()


async def test_a_file_that_cannot_be_written_is_a_home_that_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").write_bytes(b"")
    file = FileHome(tmp_path / "taken" / "sessions.sqlite")

    assert not await file.put(make_session())
    assert await file.get([KEY]) is None
    assert await file.session_ids("gold") is None
    assert caplog.text.count("sessions_file_failed") == 1
    await file.close()


async def test_a_file_that_another_process_has_locked_is_away_until_it_is_free(file: FileHome, tmp_path: Path) -> None:
    await file.put(make_session())
    other = sqlite3.connect(tmp_path / "home" / "sessions.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    assert await file.get([KEY]) is None
    other.execute("ROLLBACK")
    other.close()

    assert await file.get([KEY]) == {KEY: make_session().pack()}


async def test_a_file_that_is_locked_when_it_is_opened_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"
    before = FileHome(path)
    await before.put(make_session())
    await before.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    file = FileHome(path)
    assert await file.get([KEY]) is None

    other.close()
    assert await file.get([KEY]) == {KEY: make_session().pack()}
    assert not (tmp_path / "sessions.damaged").exists()
    await file.close()


async def test_a_disk_that_hangs_holds_nobody_up_and_is_asked_again_when_it_answers(
    file: FileHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    await file.put(make_session())
    monkeypatch.setattr(session_homes, "TIMEOUT_S", 0.01)
    hanging = threading.Event()
    assert await file._call(lambda _: hanging.wait()) is None
    late = file._late
    assert late is not None

    assert await file.get([KEY]) is None
    assert not await file.put(make_session(num_turns=2))
    monkeypatch.undo()
    hanging.set()
    await asyncio.wait_for(late, PATIENCE_S)

    assert await file.get([KEY]) == {KEY: make_session().pack()}


async def test_a_closed_file_is_away(file: FileHome) -> None:
    await file.put(make_session())
    await file.close()

    assert await file.get([KEY]) is None
