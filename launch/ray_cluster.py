"""Places workers on the nodes of a Ray cluster: an actor each, which keeps one worker process running there.

The only importer of ray, hence also what spreads other work over a cluster. For a fleet it runs as a process of its own
(`ray_fleet` starts it), because Ray ends processes that have lost its head. Workers are detached from all this and meet the
orchestrator by gRPC: no token passes here, and none waits for it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

# Ray reads both when it is imported. A fleet reports to nobody.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# This process has nothing to lose: without a head it ends, and the next one tries again.
os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from launch.backoff import Backoff
from launch.detached import Keeper, Tended, WorkerOrder
from launch.ray_nodes import NodeWish
from launch.ray_orders import News, Orders, Wish, order_for, parse
from shoal.client import Client
from shoal.errors import ConnectionFailed, InternalError, LaunchFailed, ShoalError

START_HINT = "start one with `ray start --head`, or give the address of its head, HOST:PORT"
CONNECT_S = 5.0
POLL_S = 0.25
# A node that is free takes an actor within seconds; what takes longer has nowhere to go.
PATIENCE_S = 8.0
STATUS_TIMEOUT_S = 1.0
STOP_S = 8.0
# For actors on nodes that have run nothing yet.
HANDS_UP_S = 60.0
# Of one helper: as many as anybody asks for.
AT_ONCE = 4096
# Of nodes that die under a task.
TASK_RETRIES = 3
# Of a node's id: enough to find it in Ray's lists.
NODE_CHARS = 8


Part = TypeVar("Part")
Result = TypeVar("Result")


class Supervisor:
    """An actor: a keeper on the node that Ray chose."""

    def __init__(self, order: WorkerOrder, own_ip: str, reach: str) -> None:
        node_ip = _node_ip()
        # Several nodes of a cluster may be one machine.
        self._node = f"{node_ip}/{ray.get_runtime_context().get_node_id()[:NODE_CHARS]}"
        self._refusal = ""
        try:
            self._keeper: Keeper | None = Keeper(order_for(order, node_ip, own_ip, reach))
        except ShoalError as error:
            self._keeper, self._refusal = None, error.message
        self._worker_id = order.worker_id

    def tend(self, may_start: bool) -> tuple[str, Tended]:
        """The node's address and the start of its id, and what Keeper.tend() found."""
        if self._keeper is None:
            return self._node, Tended(self._worker_id, 0, self._refusal)
        return self._node, self._keeper.tend(may_start=may_start)

    def stop(self, timeout_s: float) -> None:
        if self._keeper is not None:
            self._keeper.stop(timeout_s)


@dataclass(slots=True)
class _Placed:
    """A device that is wanted, and its supervisor.

    generation: another one is another worker. due_at: when to place it; asked_at: when Ray was last asked to.
    """

    order: WorkerOrder
    wish: NodeWish
    generation: int
    due_at: float
    backoff: Backoff = field(default_factory=Backoff)
    actor: Any = None
    tending: Any = None
    asked_at: float = 0.0
    pid: int = 0
    has_told: bool = False


class Dispatcher:
    """Has a supervisor for each wanted device.

    say: takes a worker's id, its process (0: none), its node and news of it. attached: the workers that the
    orchestrator has, None where it does not say: a device that still computes is not started a second time.
    """

    def __init__(
        self,
        say: Callable[[str, int, str, str], None],
        attached: Callable[[str], frozenset[str] | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._attached = attached
        self._clock = clock
        self._own_ip = _node_ip()
        self._reach = ""
        self._is_first = False
        self._placed: dict[str, _Placed] = {}

    def want(self, devices: Sequence[Wish], *, port: int, reach: str, is_first: bool) -> None:
        """Have these devices and no others. reach: where nodes find the orchestrator, "all": at this machine's address."""
        self._reach = f"{self._own_ip}:{port}" if reach == "all" else reach
        self._is_first = is_first
        generations = {wish.order.worker_id: wish.generation for wish in devices}
        for worker_id, placed in tuple(self._placed.items()):
            if generations.get(worker_id) != placed.generation:
                self._remove(self._placed.pop(worker_id))
        for wish in devices:
            if wish.order.worker_id not in self._placed:
                placed = _Placed(wish.order, wish.node, wish.generation, due_at=self._clock())
                self._placed[wish.order.worker_id] = placed

    def step(self) -> None:
        """Place who is due, and hear from those who are placed; takes POLL_S at most where nothing is new."""
        for placed in self._placed.values():
            if placed.actor is None and self._clock() >= placed.due_at:
                self._place(placed)
        may_start = self._may_start()
        for worker_id, placed in self._placed.items():
            if placed.actor is not None and placed.tending is None:
                placed.tending = placed.actor.tend.remote(may_start(worker_id))
        waiting = {placed.tending: placed for placed in self._placed.values() if placed.tending is not None}
        started_at = self._clock()
        done = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_S)[0] if waiting else []
        for tending in done:
            waiting[tending].tending = None
            self._hear(waiting[tending], tending)
        self._tell_patience(waiting[tending] for tending in waiting if tending not in done)
        time.sleep(max(0.0, started_at + POLL_S - self._clock()))

    def _place(self, placed: _Placed) -> None:
        wish = placed.wish
        actor_class = ray.remote(Supervisor).options(
            num_cpus=wish.cpus,
            resources=dict(wish.resources),
            label_selector=dict(wish.labels) or None,
            memory=wish.memory_bytes or None,
            scheduling_strategy="SPREAD",
            max_restarts=0,
        )
        placed.actor = actor_class.remote(placed.order, self._own_ip, self._reach)
        placed.asked_at, placed.has_told = self._clock(), False

    def _may_start(self) -> Callable[[str], bool]:
        """Whether a worker may be started, as far as the orchestrator is needed to tell."""
        orders = [placed.order for placed in self._placed.values() if not placed.pid]
        if self._is_first or not orders:
            return lambda _: True
        attached = self._attached(orders[0].join)
        return lambda worker_id: attached is not None and worker_id not in attached

    def _hear(self, placed: _Placed, tending: Any) -> None:
        worker_id = placed.order.worker_id
        try:
            node, tended = ray.get(tending)
        except RayError as error:
            placed.actor, placed.pid = None, 0
            self._is_first = False
            placed.due_at = placed.backoff.ended(self._clock())
            self._say(worker_id, 0, "", f"has lost its supervisor, and gets another: {_first_line(error)}")
            return
        if tended.pid and not placed.pid:
            placed.backoff.began(self._clock())
        if tended.news or tended.pid != placed.pid:
            self._say(worker_id, tended.pid, node, tended.news)
        placed.pid = tended.pid

    def _tell_patience(self, pending: Iterator[_Placed]) -> None:
        for placed in pending:
            if not placed.pid and not placed.has_told and self._clock() - placed.asked_at > PATIENCE_S:
                placed.has_told = True
                self._say(placed.order.worker_id, 0, "", f"waits for a node with {placed.wish} free")

    def _remove(self, placed: _Placed, timeout_s: float = STOP_S) -> None:
        if placed.actor is None:
            return
        try:
            ray.get(placed.actor.stop.remote(timeout_s), timeout=timeout_s + 2.0)
        except (RayActorError, GetTimeoutError) as error:
            self._say(placed.order.worker_id, 0, "", f"could not be told to end: {_first_line(error)}")
        ray.kill(placed.actor)

    def stop(self) -> None:
        """End all workers, at the same time."""
        actors = [placed.actor for placed in self._placed.values() if placed.actor is not None]
        stopping: list[Any] = [actor.stop.remote(STOP_S) for actor in actors]
        if stopping:
            # Those that were never placed hear nothing and have nothing to end.
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_S if any(self._pids()) else 0.0)
        self._placed.clear()

    def _pids(self) -> Iterator[int]:
        return (placed.pid for placed in self._placed.values())


def run(address: str) -> int:
    """Be the dispatcher of the cluster at an address until standard input ends; returns the exit code."""
    news = News()
    _connect(address)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    dispatcher = Dispatcher(news.say, attached_workers)
    news.write({"connected": ray.get_runtime_context().gcs_address})
    orders = Orders()
    try:
        while orders.is_open:
            for message in orders.read():
                dispatcher.want(**parse(message))
            dispatcher.step()
    except KeyboardInterrupt:
        pass
    finally:
        dispatcher.stop()
        ray.shutdown()
    return 0


def spread(address: str, work: Callable[[Part, float], Result], parts: Sequence[Part], lead_s: float) -> list[Result]:
    """Have an actor do each part of some work, on as many nodes as there are, all from one time on: lead_s after all are up.

    work: a function of an importable module; gets its part and that time, by the wall clock. Raises LaunchFailed.
    """
    _connect(address)
    try:
        actor_class = ray.remote(_Hand).options(num_cpus=0, scheduling_strategy="SPREAD", max_restarts=0)
        hands: list[Any] = [actor_class.remote() for _ in parts]
        ray.get([hand.is_up.remote() for hand in hands], timeout=HANDS_UP_S)
        start_at = time.time() + lead_s
        doing = [hand.work.remote(work, part, start_at) for hand, part in zip(hands, parts, strict=True)]
        results: list[Result] = ray.get(doing)
        return results
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, ShoalError) else LaunchFailed(_first_line(error)) from error
    except (RayError, GetTimeoutError) as error:
        raise LaunchFailed(f"Ray has lost a part of the work: {_first_line(error)}") from error
    finally:
        ray.shutdown()


def each(
    address: str, work: Callable[[Part], Result], parts: Sequence[Part], num_at_once: int
) -> Generator[tuple[int, Result | LaunchFailed]]:
    """Do each part of some work as a task, on as many nodes as there are; yield its place and its result as they come.

    LaunchFailed is the result of a part whose work raised something; one whose node was lost is done again. work: a function
    of an importable module. Raises LaunchFailed where there is no cluster, or no processor is free. Ends what is under way
    when it is closed.
    """
    _connect(address)
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
        return LaunchFailed(f"Ray has not done it: {_last_line(error) or _first_line(error)}")


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
        _connect(self._address)
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
            raise InternalError(f"a helper has not done its part: {_last_line(error)}") from error
        except RayError as error:
            if self._actors[place] is actor:
                self._actors[place] = self._start()
            raise ConnectionFailed(f"Ray has lost a helper: {_first_line(error)}") from error
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


class _Hand:
    """An actor that does what it is given."""

    def is_up(self) -> bool:
        return True

    def work(self, work: Callable[[Any, float], Any], part: Any, start_at: float) -> Any:
        return work(part, start_at)


def _connect(address: str) -> None:
    """Be a driver of the cluster at an address. Raises LaunchFailed."""
    _check_reachable(address)
    try:
        ray.init(address=address, namespace="shoal", log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise LaunchFailed(f"no Ray at {address!r}: {_first_sentence(error)}; {START_HINT}") from error


def _check_reachable(address: str) -> None:
    """Raise LaunchFailed if nobody listens at HOST:PORT; Ray would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchFailed(f"no Ray at {address}: {error}; {START_HINT}") from None


def attached_workers(address: str) -> frozenset[str] | None:
    """Ask an orchestrator."""
    try:
        with Client(address, timeout_s=STATUS_TIMEOUT_S) as client:
            return frozenset(device.worker_id for device in client.status().devices)
    except ShoalError:
        return None


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _last_line(error: Exception) -> str:
    """What was raised, of a traceback of the other side."""
    return str(error).strip().rpartition("\n")[2]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _first_sentence(error: Exception) -> str:
    """Without the advice that Ray adds."""
    return _first_line(error).partition(". ")[0].removesuffix(".")
