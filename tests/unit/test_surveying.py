"""What a worker answers when it is asked about itself: for how long others may probe it, and when it is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConnectionFailed, NotReady
from shoal.v1 import fleet_pb2
from tests.support.fleet import make_device
from worker import surveying
from worker.probing import PROBES
from worker.profiling import MeasureShape
from worker.surveying import Survey

TOKEN = b"0123456789abcdef"


class SurveyBench:
    """What a survey without peers posted and reported."""

    def __init__(self, folder: Path) -> None:
        self.tokens: dict[str, bytes] = {}
        self.posted: list[object] = []
        self.reported: list[tuple[str, Any]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.survey = Survey(
            make_device(),
            folder,
            SimpleNamespace(uplink_kind="socket"),  # type: ignore[arg-type]
            SimpleNamespace(tokens=self.tokens),  # type: ignore[arg-type]
            self.posted.append,
            lambda **event: self.reported.extend(event.items()),
            self._start,
        )

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]


async def test_peers_may_probe_for_a_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "TOKEN_S", 0.0)
    monkeypatch.setattr("worker.probing.ECHO_TIMEOUT_S", 0.01)
    bench = SurveyBench(tmp_path)
    bench.survey.obey(fleet_pb2.AttachResponse(probe_links=fleet_pb2.ProbeLinks(link_token=TOKEN)), is_free=True)
    await asyncio.sleep(0)
    assert bench.tokens == {PROBES: TOKEN}

    await asyncio.gather(*bench.tasks)

    assert ([name for name, _ in bench.reported], bench.tokens) == (["links_probed"], {})


async def test_a_link_that_does_not_answer_is_known_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([fleet_pb2.LinkFigures(rtt_ms=3.0)])

    async def measure(echo: object, worker_id: str, kind: str) -> fleet_pb2.LinkFigures:
        figures = next(answers, None)
        if figures is None:
            raise ConnectionFailed("no echo came back")
        return figures

    monkeypatch.setattr(surveying, "measure_link", measure)
    bench = SurveyBench(tmp_path)

    for _ in range(2):
        bench.survey.obey(fleet_pb2.AttachResponse(probe_links=fleet_pb2.ProbeLinks(link_token=TOKEN)), is_free=True)
        await asyncio.gather(*bench.tasks)

    assert bench.survey.known_links() == [fleet_pb2.LinkFigures(rtt_ms=3.0)]


@pytest.mark.parametrize("is_free", [True, False])
async def test_only_a_worker_without_a_shard_is_measured(tmp_path: Path, is_free: bool) -> None:
    bench = SurveyBench(tmp_path)

    bench.survey.obey(fleet_pb2.AttachResponse(measure=fleet_pb2.Measure(shape_digest="ab" * 32)), is_free=is_free)

    assert [type(one) for one in bench.posted] == ([MeasureShape] if is_free else [])
    assert [event.reason for _, event in bench.reported] == ([] if is_free else [NotReady.reason])


async def test_links_are_known_as_they_were_measured_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rtts_ms = iter((3.0, 5.0))

    async def measure(echo: object, worker_id: str, kind: str) -> fleet_pb2.LinkFigures:
        return fleet_pb2.LinkFigures(worker_id=worker_id, rtt_ms=next(rtts_ms), kind=kind)

    monkeypatch.setattr(surveying, "measure_link", measure)
    bench = SurveyBench(tmp_path)
    assert bench.survey.known_links() == []

    for _ in range(2):
        bench.survey.obey(fleet_pb2.AttachResponse(probe_links=fleet_pb2.ProbeLinks(link_token=TOKEN)), is_free=True)
        await asyncio.gather(*bench.tasks)

    assert bench.survey.known_links() == [fleet_pb2.LinkFigures(rtt_ms=5.0, kind="socket")]
