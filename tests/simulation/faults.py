"""What goes wrong in a simulated fleet, one thing after the other, and how all of it comes to an end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.errors import InvalidRequest, ShoalError
from shoal.types import PipelineId, WorkerId
from shoal.v1 import flow_pb2

if TYPE_CHECKING:
    from tests.simulation.worker import Device, SimulatedWorker
    from tests.simulation.world import World

# A connection on which nothing comes any more is given up by both its ends.
KEEPALIVE_S = 1.0
HOT_C = 75.0
COOL_C = 40.0


class Faults:
    """Draws what goes wrong next, and does it."""

    def __init__(self, world: World) -> None:
        self._world = world
        # Some of them are not about the device that was drawn.
        self._kinds: dict[str, Callable[[Device], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "cut_links": self._cut_links,
            "cut_off": self._cut_off,
            "leave": self._leave,
            "break_step": self._break_step,
            "heat": self._heat,
            "cordon": self._cordon,
            "drain": self._drain,
            "redis_away": lambda _: self._redis_away(),
            "redis_flush": lambda _: self._redis_flush(),
            "kill_orchestrator": lambda _: self._kill_orchestrator(),
            "stall": lambda _: world.stall(world.random.uniform(0.1, 3.0)),
            "past": lambda _: self._past_in_a_while(),
        }

    def plan_next(self) -> None:
        world = self._world
        world.after(world.random.expovariate(1 / world.scenario.fault_gap_s), self._strike)

    def _strike(self) -> None:
        world = self._world
        if world.is_calm:
            return
        faults = world.scenario.faults
        (kind,) = world.random.choices(list(faults), weights=list(faults.values()))
        device = world.random.choice(list(world.devices.values()))
        world.happened[kind] += 1
        world.note(f"fault: {kind} {device.worker_id}")
        self._kinds[kind](device)
        self.plan_next()

    def heal(self) -> None:
        """Have everything well again and everybody there."""
        world = self._world
        if world.redis is not None:
            world.redis.is_away = False
        if world.office is None:
            world.start_office()
        for device in world.devices.values():
            device.temperature_c, device.cut_off_until = COOL_C, world.now()
            if device.worker is not None:
                device.worker.fails_next_step = False
            if device.worker is not None and device.worker.process.is_stopped:
                device.worker.process.go_on()
            self._set_cordon(device, is_cordoned=False)
            world.start_worker(device)

    # Devices

    def _kill(self, device: Device) -> None:
        if device.worker is not None and device.worker.process.is_alive:
            self._world.end_life(device.worker)

    def start_later(self, device: Device) -> None:
        self._world.after(self._world.random.choice((0.05, 0.5, 3.0, 8.0)), lambda: self._world.start_worker(device))

    def cut_all(self, worker: SimulatedWorker, delay_s: float) -> None:
        """All connections of a worker end: at the other end after a while, and at its own."""
        world = self._world
        if worker._attachment is not None:
            worker._attachment.cut(delay_s, world.random.uniform(0.0, 2 * delay_s))
        if worker.uplink is not None:
            worker.uplink.cut(delay_s, world.random.uniform(0.0, 2 * delay_s))
        self._cut_peers(worker, delay_s)

    def _cut_peers(self, worker: SimulatedWorker, delay_s: float) -> None:
        for link in worker.inbound:
            link.cut(delay_s)
        if worker.next_link is not None:
            worker.next_link.cut(delay_s)

    def _freeze(self, device: Device) -> None:
        """SIGSTOP: what comes meanwhile comes late; connections may be given up meanwhile."""
        world, worker = self._world, device.worker
        if worker is None or not worker.process.is_alive or worker.process.is_stopped:
            return
        frozen_s = world.random.choice((0.1, 0.6, 2.0, 6.0))
        worker.process.stop()
        world.after(frozen_s, worker.process.go_on)
        if frozen_s > KEEPALIVE_S and world.random.random() < 0.5:
            world.after(KEEPALIVE_S, lambda: self.cut_all(worker, 0.0))

    def _cut_links(self, device: Device) -> None:
        """One connection of a worker breaks, or more of them, with both ends alive."""
        world, linked = (
            self._world,
            [one for one in self._world.devices.values() if one.worker and one.worker.next_link],
        )
        which = world.random.choice(("peers", "peers", "peers", "uplink", "attachment", "all"))
        if which == "peers" and linked:
            device = world.random.choice(linked)
        worker, delay_s = device.worker, world.random.choice((0.0, 0.01, 0.3))
        if worker is None:
            return
        if which in ("uplink", "all") and worker.uplink is not None:
            worker.uplink.cut(delay_s, world.random.choice((0.0, 0.3)))
        if which in ("peers", "all"):
            self._cut_peers(worker, delay_s)
        if which in ("attachment", "all") and worker._attachment is not None:
            worker._attachment.cut(delay_s, world.random.choice((0.0, 0.3, 1.0)))

    def _cut_off(self, device: Device) -> None:
        """Nothing comes or goes for a while; connections are given up if that takes long."""
        world = self._world
        cut_s = world.random.choice((0.2, 0.8, 2.0, 6.0))
        device.cut_off_until = max(device.cut_off_until, world.now() + cut_s)
        if cut_s > KEEPALIVE_S and device.worker is not None:
            worker = device.worker
            world.after(KEEPALIVE_S, lambda: self.cut_all(worker, 0.0))

    def _leave(self, device: Device) -> None:
        worker = device.worker
        if worker is not None and device.is_up(self._world.now()):
            worker.process.do(worker.leave)

    def _break_step(self, device: Device) -> None:
        if device.worker is not None:
            self._world.num_broken_steps += 1
            device.worker.fails_next_step = True

    def _heat(self, device: Device) -> None:
        device.temperature_c = self._world.random.choice((COOL_C, 65.0, HOT_C, 85.0))

    def _cordon(self, device: Device) -> None:
        self._set_cordon(device, is_cordoned=self._world.random.random() < 0.5)

    def _set_cordon(self, device: Device, *, is_cordoned: bool) -> None:
        """As an operator does: not of a device that nobody knows."""
        office = self._world.office
        if office is not None:
            with suppress(InvalidRequest):
                office.control.relief.cordon(WorkerId(device.worker_id), is_cordoned)

    def _drain(self, device: Device) -> None:
        """Have a device relieved of its layers, if that is possible, and take it back later."""
        world, office = self._world, self._world.office
        if office is None:
            return

        async def drain() -> None:
            try:
                drained = await office.control.relief.drain(WorkerId(device.worker_id))
                world.note(f"{device.worker_id} is drained: {drained.moved.text}")
            except ShoalError as error:
                world.note(f"{device.worker_id} is not drained: {error.message}")

        office.start(drain())
        world.after(world.random.uniform(1.0, 6.0), lambda: self._set_cordon(device, is_cordoned=False))

    # Everything else

    def _redis_away(self) -> None:
        redis, world = self._world.redis, self._world
        if redis is None or redis.is_away:
            return
        redis.is_away = True

        def back() -> None:
            redis.is_away = False

        world.after(world.random.choice((0.1, 1.0, 4.0)), back)

    def _redis_flush(self) -> None:
        if self._world.redis is not None:
            self._world.redis.flush()
            self._world.journal.clear()

    def _kill_orchestrator(self) -> None:
        world, office = self._world, self._world.office
        if office is None:
            return
        office.kill()
        world.office = None
        for device in world.devices.values():
            worker = device.worker
            if worker is None:
                continue
            if worker._attachment is not None:
                worker._attachment.cut(world.random.choice((0.0, 0.01, 1.0)), 0.0)
            if worker.uplink is not None:
                worker.uplink.cut(world.random.choice((0.0, 0.01, 1.0)), 0.0)

        def again() -> None:
            if world.office is None:
                world.start_office()

        world.after(world.random.choice((0.1, 0.5, 2.0)), again)

    def _past_in_a_while(self) -> None:
        for _ in range(4):
            self._world.after(self._world.random.uniform(0.0, 3.0), self._past)

    def _past(self) -> None:
        """Frames of epochs that are over come (again), in any order, wherever they could go."""
        world, office = self._world, self._world.office
        if office is None:
            return
        fleet = office.control._fleet
        # What went to an orchestrator that is gone, nobody can send to the next one: it takes no link that is not new.
        old = [
            one
            for one in world.past
            if one[0] is office and not fleet.is_current(PipelineId(one[2].pipeline_id), one[2].epoch)
        ]
        for _, _, frame in world.random.sample(old, min(len(old), 12)):
            copy = flow_pb2.Frame()
            copy.CopyFrom(frame)
            if frame.to_stage < 0:
                office.process.do(lambda copy=copy: office.engine.on_frame(copy))  # type: ignore[misc]
            else:
                self._deliver_late(copy)

    def _deliver_late(self, frame: flow_pb2.Frame) -> None:
        """To every stage that is in another epoch: within one, streams lose, but neither repeat nor reorder."""
        for device in self._world.devices.values():
            worker = device.worker
            if worker is None:
                continue

            def receive(worker: SimulatedWorker = worker) -> None:
                if worker.stage is not None and worker.stage.spec.epoch != frame.epoch:
                    worker.receive(frame)

            worker.process.do(receive)
