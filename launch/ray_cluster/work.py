"""Work of commands that is spread over a Ray cluster: a part for each of several actors, a task for each of many parts, or
actors that all take from the same parts.

Knows nothing of what is done. Called by the command line; `pool` does the same on this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, Self, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from launch.ray_cluster.connection import connect, first_line, last_line
from shoal.errors import ConnectionFailed, InternalError, LaunchFailed, ShoalError

# For actors on nodes that have run nothing yet.
HANDS_UP_S = 60.0
# Between two looks at how far they are.
LOOK_S = 0.25
# For those that are told to end; one on a node that is frozen never does.
STOP_S = 10.0
# Of one helper: as many as anybody asks for.
AT_ONCE = 4096
# Of nodes that die under a task.
TASK_RETRIES = 3

Part = TypeVar("Part")
Result = TypeVar("Result")
Seen = TypeVar("Seen")


class Hands(Generic[Part, Result, Seen]):
    """An actor for each part of some work, on as many nodes as there are, all of which begin together; within the block.

    do: a coroutine function of an importable module; gets its part, the time to begin by the wall clock, what takes how far
    it is, and an event that tells it to end with what it has.
    """

    def __init__(
        self,
        address: str,
        do: Callable[[Part, float, Callable[[Seen], None], asyncio.Event], Awaitable[Result]],
        parts: Sequence[Part],
    ) -> None:
        self._address = address
        self._do = do
        self._parts = parts

    def __enter__(self) -> Self:
        """Raise LaunchFailed where there is no cluster."""
        connect(self._address)
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    async def work(
        self, lead_s: float, stopping: asyncio.Event, show: Callable[[list[Seen]], None]
    ) -> list[Result | LaunchFailed]:
        """Begin lead_s after all are up, and return all results; show takes, now and then, how far those are that say so.

        LaunchFailed is the result of a part that was lost with its actor, or that STOP_S after all were told to stop had not
        ended. Raises the ShoalError that a part raises, and LaunchFailed for any other fault of one, or if not all start.
        """
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0}
        hands: list[Any] = [ray.remote(_Hand).options(**options).remote() for _ in self._parts]
        try:
            await asyncio.wait_for(asyncio.gather(*(hand.look.remote() for hand in hands)), HANDS_UP_S)
        except TimeoutError:
            raise LaunchFailed(f"Ray has not started all of {len(hands)} actors within {HANDS_UP_S:g} s") from None
        except RayError as error:
            raise LaunchFailed(f"Ray has not started all of {len(hands)} actors: {first_line(error)}") from error
        start_at = time.time() + lead_s
        pairs = zip(hands, self._parts, strict=True)
        doing = [asyncio.ensure_future(_result(hand.work.remote(self._do, part, start_at))) for hand, part in pairs]
        tasks = [
            asyncio.create_task(waiting)
            for waiting in (_watch(hands, show), _first_failed(doing), _end(hands, stopping))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                # It has failed.
                await tasks[0]
            late = LaunchFailed(f"a part of the work did not end within {STOP_S:g} s after it was told to")
            return [part.result() if part.done() else late for part in doing]
        finally:
            for task in (*tasks, *doing):
                task.cancel()
            await asyncio.gather(*tasks, *doing, return_exceptions=True)


async def _first_failed(doing: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for the end of all, or of the first that fails."""
    await asyncio.wait(doing, return_when=asyncio.FIRST_EXCEPTION)


async def _watch(hands: Sequence[Any], show: Callable[[list[Any]], None]) -> None:
    """Show, again and again, how far those are that answer in time: one may be lost, or its node frozen."""
    while True:
        looking = [asyncio.ensure_future(_look(hand)) for hand in hands]
        await asyncio.wait(looking, timeout=LOOK_S)
        show([seen.result() for seen in looking if seen.done() and seen.result() is not None])
        await asyncio.sleep(LOOK_S)


async def _look(hand: Any) -> Any:
    """None is what a lost one has seen."""
    try:
        return await hand.look.remote()
    except RayError:
        return None


async def _end(hands: Sequence[Any], stopping: asyncio.Event) -> None:
    """Once they are to stop: tell them, and give them time for it."""
    await stopping.wait()
    for hand in hands:
        hand.stop.remote()
    await asyncio.sleep(STOP_S)


async def _result(doing: Awaitable[Result]) -> Result | LaunchFailed:
    try:
        return await doing
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, ShoalError) else LaunchFailed(last_line(error)) from error
    except RayError as error:
        return LaunchFailed(f"Ray has lost a part of the work: {first_line(error)}")


class _Hand:
    """An actor that does what it is given."""

    def __init__(self) -> None:
        self._seen: Any = None
        self._stopping = asyncio.Event()

    async def look(self) -> Any:
        return self._seen

    async def stop(self) -> None:
        self._stopping.set()

    async def work(self, do: Callable[..., Awaitable[Any]], part: Any, start_at: float) -> Any:
        return await do(part, start_at, self._see, self._stopping)

    def _see(self, seen: Any) -> None:
        self._seen = seen


def each(
    address: str, work: Callable[[Part], Result], parts: Sequence[Part], num_at_once: int
) -> Generator[tuple[int, Result | LaunchFailed]]:
    """Do each part of some work as a task, on as many nodes as there are; yield its place and its result as they come.

    LaunchFailed is the result of a part whose work raised something; one whose node was lost is done again. work: a function
    of an importable module. Raises LaunchFailed where there is no cluster, or no processor is free. Ends what is under way
    when it is closed.
    """
    connect(address)
    left, under_way = iter(enumerate(parts)), dict[Any, int]()
    try:
        _check_free()
        task = ray.remote(work).options(num_cpus=1, scheduling_strategy="SPREAD", max_retries=TASK_RETRIES)
        while True:
            while len(under_way) < num_at_once and (following := next(left, None)) is not None:
                index, part = following
                under_way[task.remote(part)] = index
            if not under_way:
                return
            for doing in ray.wait(list(under_way))[0]:
                yield under_way.pop(doing), _done(doing)
    finally:
        for doing in under_way:
            ray.cancel(doing, force=True)
        ray.shutdown()


def _check_free() -> None:
    """Raise LaunchFailed if a task would wait: for ever, as far as can be told."""
    there, free = (
        resources.get("CPU", 0.0)
        for resources in (ray.cluster_resources(), ray.available_resources())  # type: ignore[no-untyped-call]
    )
    if free < 1.0:
        raise LaunchFailed(
            f"of the Ray cluster's {there:g} processors {free:g} are free, and each part of the work takes one: add a node, "
            "or wait until others have ended"
        )


def _done(doing: Any) -> Any:
    try:
        return ray.get(doing)
    except RayError as error:
        return LaunchFailed(f"Ray has not done it: {last_line(error) or first_line(error)}")


class Helpers(Generic[Part, Result]):
    """So many actors that all do the same, each many parts at once; within the block.

    make: of an importable module; gives, where the actor is, the coroutine function that does a part. What an actor did when
    it was lost is not done, and another one takes its place.
    """

    def __init__(self, address: str, make: Callable[[], Callable[[Part], Awaitable[Result]]], number: int) -> None:
        self._address = address
        self._make = make
        self._number = number
        self._actors: list[Any] = []
        self._num_doing = [0] * number

    def __enter__(self) -> Self:
        """Raise LaunchFailed where there is no cluster."""
        connect(self._address)
        self._actors = [self._start() for _ in range(self._number)]
        return self

    def __exit__(self, *_: object) -> None:
        ray.shutdown()

    def _start(self) -> Any:
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_concurrency": AT_ONCE}
        return ray.remote(_Helper).options(**options).remote(self._make)

    async def do(self, part: Part) -> Result:
        """Have a part done by who has least to do.

        Raises the ShoalError that doing it raises, InternalError for any other, ConnectionFailed if the actor is lost.
        """
        place = min(range(self._number), key=self._num_doing.__getitem__)
        actor = self._actors[place]
        self._num_doing[place] += 1
        try:
            result: Result | ShoalError = await actor.do.remote(part)
        except RayTaskError as error:
            raise InternalError(f"a helper has not done its part: {last_line(error)}") from error
        except RayError as error:
            if self._actors[place] is actor:
                self._actors[place] = self._start()
            raise ConnectionFailed(f"Ray has lost a helper: {first_line(error)}") from error
        finally:
            self._num_doing[place] -= 1
        if isinstance(result, ShoalError):
            raise result
        return result


class _Helper:
    """An actor with an event loop."""

    def __init__(self, make: Callable[[], Callable[[Any], Awaitable[Any]]]) -> None:
        self._do = make()

    async def do(self, part: Any) -> Any:
        try:
            return await self._do(part)
        except ShoalError as error:
            return error
