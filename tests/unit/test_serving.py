"""Whether requests are taken: what health is told, and who waits for it how long."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.serving import Serving
from shoal.errors import NotReady


class Scene:
    """shown: what health was told, in order. is_building: a pipeline is likely soon."""

    def __init__(self) -> None:
        self.shown: list[bool] = []
        self.is_building = True
        self.serving = Serving(self._show, lambda: self.is_building, lambda: "no device has joined")

    async def _show(self, is_on: bool) -> None:
        self.shown.append(is_on)


async def test_health_is_told_of_changes_alone() -> None:
    scene = Scene()
    for is_on in (False, False, True, True, False):
        scene.serving.note(is_on)
        await scene.serving.show()

    assert scene.shown == [False, True, False]


async def test_who_comes_while_a_pipeline_is_built_is_taken_when_it_is_up() -> None:
    scene = Scene()
    waiting = asyncio.create_task(scene.serving.wait())
    await asyncio.sleep(0)
    assert not waiting.done()

    scene.serving.note(True)
    await asyncio.wait_for(waiting, 5.0)


@pytest.mark.parametrize("was_on", [False, True])
async def test_who_comes_while_none_is_built_is_told_what_is_waited_for(was_on: bool) -> None:
    scene = Scene()
    scene.is_building = False
    scene.serving.note(was_on)
    scene.serving.note(False)

    with pytest.raises(NotReady, match="no device has joined"):
        await asyncio.wait_for(scene.serving.wait(), 5.0)
