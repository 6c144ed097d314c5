"""What the dispatcher is told and what it says: orders by standard input, news by standard output, a JSON object a line.

Owns the dispatcher's ends of both pipes, and what of an order holds on which node. Knows nothing of Ray. Called by
`ray_cluster`; the other side is `ray_fleet`.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launch.detached import WorkerOrder
from launch.ray_nodes import NodeWish
from shoal.errors import LaunchFailed


@dataclass(frozen=True, slots=True)
class Wish:
    """A device that is wanted: its worker, and what it asks of its node."""

    order: WorkerOrder
    node: NodeWish
    generation: int = 0


def order_for(order: WorkerOrder, node_ip: str, own_ip: str, reach: str) -> WorkerOrder:
    """The order as it holds on a node: here as it is; elsewhere with the orchestrator's outer address and its own home.

    reach: that address, "" where the orchestrator listens to this machine alone. Raises LaunchFailed in that case.
    """
    if node_ip == own_ip:
        return order
    if not reach:
        raise LaunchFailed(
            f"node {node_ip} cannot reach the orchestrator at {order.join}: start it with --host 0.0.0.0"
        )
    # A socket file is for this machine alone.
    redis_url = "" if order.redis_url.startswith("unix:") else order.redis_url
    return replace(order, join=reach, home="", host=node_ip, redis_url=redis_url)


def parse(message: Mapping[str, Any]) -> dict[str, Any]:
    devices = [
        Wish(WorkerOrder(**device["order"]), NodeWish(**device["wish"]), device["generation"])
        for device in message["devices"]
    ]
    return {"devices": devices, **{name: message[name] for name in ("port", "reach", "is_first")}}


class News:
    """Our standard output; whatever else is printed goes to the log, so that lines stay whole."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, worker_id: str, pid: int, node: str, news: str) -> None:
        self.write({"worker_id": worker_id, "pid": pid, "node": node, "news": news})

    def write(self, message: Mapping[str, object]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


class Orders:
    """Our standard input, line by line, without waiting."""

    def __init__(self) -> None:
        self.is_open = True
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        while self.is_open and select.select([0], [], [], 0.0)[0]:
            chunk = os.read(0, 65536)
            self.is_open = bool(chunk)
            self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]
