"""Places workers on the nodes of a Ray cluster: an actor each, which keeps one worker process running there.

Workers are detached from all this and meet the orchestrator by gRPC: no token passes here, and none waits for it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from launch.backoff import Backoff
from launch.detached import Keeper, Tended, WorkerOrder
from launch.ray_cluster.connection import connect, first_line
from launch.ray_nodes import NodeWish
from launch.ray_orders import News, Orders, Wish, order_for, parse
from shoal.client import Client
from shoal.errors import ShoalError

POLL_S = 0.25
# A node that is free takes an actor within seconds; what takes longer has nowhere to go.
PATIENCE_S = 8.0
STATUS_TIMEOUT_S = 1.0
STOP_S = 8.0
# Of a node's id: enough to find it in Ray's lists.
NODE_CHARS = 8


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
            self._say(worker_id, 0, "", f"has lost its supervisor, and gets another: {first_line(error)}")
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
            self._say(placed.order.worker_id, 0, "", f"could not be told to end: {first_line(error)}")
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
    connect(address)
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


def attached_workers(address: str) -> frozenset[str] | None:
    """Ask an orchestrator."""
    try:
        with Client(address, timeout_s=STATUS_TIMEOUT_S) as client:
            return frozenset(device.worker_id for device in client.status().devices)
    except ShoalError:
        return None


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
