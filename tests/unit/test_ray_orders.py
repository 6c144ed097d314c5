"""What a worker on a Ray node is told: on this machine, and on another one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.detached import WorkerOrder
from launch.ray_orders import order_for
from shoal.errors import LaunchFailed

ORDER = WorkerOrder("phone-1", "127.0.0.1:50070", "phone", home="/home/me/shoal", redis_url="redis://db:6379/0")


def test_on_this_machine_an_order_holds_as_it_is() -> None:
    assert order_for(ORDER, "10.0.0.1", "10.0.0.1", "") == ORDER


def test_on_another_machine_a_worker_joins_by_the_outer_address_and_has_a_home_of_its_own() -> None:
    order = order_for(ORDER, "10.0.0.2", "10.0.0.1", "10.0.0.1:50070")

    assert (order.join, order.host, order.home) == ("10.0.0.1:50070", "10.0.0.2", "")
    assert order.redis_url == ORDER.redis_url


def test_a_redis_of_this_machine_alone_is_none_to_the_others() -> None:
    here = replace(ORDER, redis_url="unix:///run/redis.sock")

    assert order_for(here, "10.0.0.2", "10.0.0.1", "10.0.0.1:50070").redis_url == ""


def test_an_orchestrator_that_listens_to_its_own_machine_alone_is_told_to_listen_to_all() -> None:
    with pytest.raises(LaunchFailed, match=r"10\.0\.0\.2 cannot reach .* --host 0\.0\.0\.0"):
        order_for(ORDER, "10.0.0.2", "10.0.0.1", "")
