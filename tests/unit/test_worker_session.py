"""What is known of the shard that a worker holds: by its own word, and by what it was told to load."""

from __future__ import annotations

import pytest

from orchestrator.worker_session import WorkerSession, held_of
from shoal.v1 import fleet_pb2, types_pb2

DIGEST = "ab" * 32


def make_held(start: int = 0, stop: int = 4, digest: str = DIGEST) -> fleet_pb2.HeldShard:
    layers = types_pb2.LayerRange(start=start, stop=stop)
    return fleet_pb2.HeldShard(pipeline_id="p1", layers=layers, model_digest=digest)


def make_session(held: fleet_pb2.HeldShard | None = None) -> WorkerSession:
    return WorkerSession(fleet_pb2.Hello(worker_id="w0", held=held))


def make_command(epoch: int = 5) -> fleet_pb2.LoadShard:
    layers = types_pb2.LayerRange(start=0, stop=4)
    return fleet_pb2.LoadShard(pipeline_id="p1", epoch=epoch, layers=layers, model_digest=DIGEST)


def test_a_worker_holds_what_it_says_when_it_attaches() -> None:
    held = held_of(make_session(make_held()), DIGEST)

    assert held is not None
    assert (held.worker_id, held.pipeline_id, str(held.layers)) == ("w0", "p1", "[0, 4)")


@pytest.mark.parametrize("held", [None, make_held(digest="cd" * 32), make_held(4, 4), make_held(5, 4)])
def test_nothing_that_could_be_gone_on_with_is_held(held: fleet_pb2.HeldShard | None) -> None:
    assert held_of(make_session(held), DIGEST) is None


async def test_a_worker_that_was_told_to_load_holds_nothing_until_it_says_so() -> None:
    session = make_session(make_held())
    session.load(make_command())
    assert session.held is None

    session.loaded("p1", 5)

    assert held_of(session, DIGEST) == held_of(make_session(make_held()), DIGEST) is not None


@pytest.mark.parametrize(("pipeline_id", "epoch"), [("p1", 4), ("p2", 5)])
async def test_what_was_loaded_for_something_else_does_not_count(pipeline_id: str, epoch: int) -> None:
    session = make_session()
    session.load(make_command())

    session.loaded(pipeline_id, epoch)

    assert session.held is None


async def test_a_worker_that_was_told_to_unload_holds_nothing_whatever_it_says_after_that() -> None:
    session = make_session(make_held())
    session.load(make_command())
    session.unload(5)

    session.loaded("p1", 5)

    assert session.held is None
