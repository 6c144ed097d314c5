"""What is known of how fast devices and links are: asks devices that can be asked, and learns from the steps they take.

Devices that may share a machine are measured one after the other, those that hold layers not at all; then the links of the
new ones are probed. A placement waits for that for a bounded time, and takes what profiles declare for those who are late.
`control` tells it who comes and goes and what workers report, and gives its figures to the planner.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from modelstore.manifest import Manifest
from orchestrator.core.figures import (
    DeviceFigures,
    FleetFigures,
    LayerTimes,
    LinkEnds,
    LinkFigures,
    RowTimes,
    declared_times,
)
from orchestrator.core.hops import Hop, HopWatch
from orchestrator.core.limits import KV_READ_TOKENS
from orchestrator.core.placement import Worker
from orchestrator.core.refinement import CONTEXT_TOKENS, Correction, StageLoad
from orchestrator.lane import Lane
from orchestrator.shape import measure_command
from orchestrator.shards import footprint
from orchestrator.worker_session import WorkerSession
from shoal import messages
from shoal.errors import NotReady
from shoal.types import DeviceProfile, WorkerId
from shoal.v1 import admin_pb2, fleet_pb2

logger = logging.getLogger(__name__)

MAX_AGE_S = 7 * 24 * 3600.0
MAX_AHEAD_S = 3600.0
# A slow device takes a few seconds; what takes longer is stuck.
MEASURE_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 3.0
# How long a placement waits for a device that has joined; launchers take a longer silence for an end.
MAX_WAIT_S = 2.0
# A device that was busy may be free again.
RETRY_S = 5.0
# Of the devices that are there, so many are probed by one that comes: the links to the others are taken to be alike.
MAX_PEERS = 8
# More than a device can have measured in a fleet that makes sense.
MAX_TOLD_LINKS = 256


@dataclass(slots=True)
class _Device:
    """A member. linked_at: None before it can be used. links: by the far end, measured from here, one way."""

    session: WorkerSession
    profile: DeviceProfile
    times: fleet_pb2.DeviceTimes | None
    linked_at: float | None = None
    gave_up: bool = False
    ask_at: float = -math.inf
    is_probed: bool = False
    links: dict[WorkerId | None, LinkFigures] = field(default_factory=dict)
    correction: Correction = field(default_factory=Correction)

    @property
    def needs_measuring(self) -> bool:
        return not self.gave_up and (self.times is None or not _is_fresh(self.times))

    @property
    def machine(self) -> str:
        """Devices of one id share a machine; those that do not know it may, if they have one address."""
        hello = self.session.hello
        return hello.machine_id or hello.flow_address.rpartition(":")[0]


class Measuring:
    """Figures of the fleet.

    Invariants: of the devices that may share a machine at most one is being measured; nobody is asked who is not free.
    """

    def __init__(self, manifest: Manifest, is_free: Callable[[WorkerId], bool], num_expected: int = 1) -> None:
        """is_free: whether a member holds no layers and is to hold none.

        num_expected: nobody is asked before so many are there; those that still start would take the cores of a machine
        that they share.
        """
        self._footprint = footprint(manifest)
        self._context_work = 1.0 + (1.0 + KV_READ_TOKENS) * CONTEXT_TOKENS / manifest.config.attention_tokens
        self._command = measure_command(manifest)
        self._is_free = is_free
        self._devices: dict[WorkerId, _Device] = {}
        # Until when an answer is waited for, by who was asked.
        self._measured_by: dict[WorkerId, float] = {}
        self._probed_by: dict[WorkerId, float] = {}
        self._figures: FleetFigures | None = None
        self._hops = HopWatch()
        self._num_expected = num_expected
        self._began_at: float | None = None

    # Members

    def take_in(self, session: WorkerSession, profile: DeviceProfile) -> None:
        """A worker attached; it says what it knows of itself and of its links, which holds until these are probed anew."""
        times = None
        if self._command is not None:
            digest = self._command.shape_digest
            known = (one for one in session.hello.times if one.shape_digest == digest and _is_sound(one))
            times = next((one for one in known if _is_fresh(one)), None)
        self.remove(session.worker_id)
        links = _links_from_proto(session.hello.links[:MAX_TOLD_LINKS])
        self._devices[session.worker_id] = _Device(session, profile, times, gave_up=self._command is None, links=links)

    def linked(self, worker_id: WorkerId, now: float) -> None:
        """A worker has its link and can be asked."""
        device = self._devices.get(worker_id)
        if device is not None:
            device.linked_at = now
            self._figures = None
            self._introduce(device)
            self.advance(now)

    def _introduce(self, device: _Device) -> None:
        """Have a device that comes, and those that are there, find out whether they reach each other."""
        others = [one for one in self._devices.values() if one.linked_at is not None and one is not device]
        for one in others:
            one.session.send(try_peers=fleet_pb2.TryPeers(peers=[_address(device.session.hello)]))
        if others:
            peers = [_address(one.session.hello) for one in others]
            device.session.send(try_peers=fleet_pb2.TryPeers(peers=peers))

    def remove(self, worker_id: WorkerId) -> None:
        self._hops.forget(worker_id)
        self._devices.pop(worker_id, None)
        self._measured_by.pop(worker_id, None)
        self._probed_by.pop(worker_id, None)
        self._figures = None

    # Asking

    def advance(self, now: float) -> None:
        """Ask whoever can be asked: for times first, for links when nobody computes."""
        if self._began_at is None:
            if sum(device.linked_at is not None for device in self._devices.values()) < self._num_expected:
                return
            self._began_at = now
        self._give_up_late(now)
        free = {one: device for one, device in self._devices.items() if self._can_be_asked(one, device, now)}
        busy = {self._devices[one].machine for one in self._measured_by}
        for worker_id, device in free.items():
            if device.needs_measuring and device.machine not in busy:
                device.session.send(measure=self._command)
                self._measured_by[worker_id] = now + MEASURE_TIMEOUT_S
                busy.add(device.machine)
        if not self._measured_by and not self._probed_by:
            self._probe(free, now)

    def _can_be_asked(self, worker_id: WorkerId, device: _Device, now: float) -> bool:
        is_asked = worker_id in self._measured_by or worker_id in self._probed_by
        return device.linked_at is not None and now >= device.ask_at and not is_asked and self._is_free(worker_id)

    def _probe(self, free: dict[WorkerId, _Device], now: float) -> None:
        """Have new devices probe those that are there, each pair once."""
        new = [one for one, device in free.items() if not device.is_probed]
        token = secrets.token_bytes(16)
        there = [one for one in free if one not in new]
        for worker_id in new:
            device = free[worker_id]
            reachable = [one for one in there if free[one].session.hello.flow_address][-MAX_PEERS:]
            there.append(worker_id)
            device.is_probed = True
            self._probed_by[worker_id] = now + PROBE_TIMEOUT_S
            peers = [_address(free[one].session.hello) for one in reachable]
            device.session.send(probe_links=fleet_pb2.ProbeLinks(peers=peers, link_token=token))
        if new:
            for worker_id in set(there) - set(new):
                free[worker_id].session.send(probe_links=fleet_pb2.ProbeLinks(link_token=token))

    def _give_up_late(self, now: float) -> None:
        for worker_id in [one for one, until in self._measured_by.items() if until <= now]:
            del self._measured_by[worker_id]
            self._devices[worker_id].gave_up = True
            logger.warning("not_measured worker=%s: it did not answer in time", worker_id)
        for worker_id in [one for one, until in self._probed_by.items() if until <= now]:
            del self._probed_by[worker_id]

    def on_event(self, session: WorkerSession, request: fleet_pb2.AttachRequest, now: float) -> bool:
        """Take what a worker reports, if it is for us; what ghosts say is not."""
        worker_id = session.worker_id
        device = self._devices.get(worker_id)
        if device is None or device.session is not session:
            return False
        match request.WhichOneof("event"):
            case "measured":
                self._measured_by.pop(worker_id, None)
                self._on_measured(worker_id, device, request.measured, now)
            case "links_probed":
                self._probed_by.pop(worker_id, None)
                device.links |= _links_from_proto(request.links_probed.links)
                if request.links_probed.links:
                    self._hops.forget(worker_id)
            case _:
                return False
        self._figures = None
        self.advance(now)
        return True

    def _on_measured(self, worker_id: WorkerId, device: _Device, measured: fleet_pb2.Measured, now: float) -> None:
        if not measured.reason and self._is_ours(measured.times):
            device.times = measured.times
            logger.info("measured worker=%s %s", worker_id, _summary(measured.times))
        elif measured.reason == NotReady.reason:
            device.ask_at = now + RETRY_S
        else:
            device.gave_up = True
            logger.warning("not_measured worker=%s reason=%s message=%s", worker_id, measured.reason, measured.message)

    def _is_ours(self, times: fleet_pb2.DeviceTimes) -> bool:
        return self._command is not None and times.shape_digest == self._command.shape_digest and _is_sound(times)

    @property
    def is_asking(self) -> bool:
        """Whether a device times layers or links now."""
        return bool(self._measured_by or self._probed_by)

    def awaits(self, workers: Iterable[Worker], now: float) -> bool:
        """Whether a placement of these workers should wait, since figures of some are about to come."""
        return any(self._is_awaited(worker_id, now) for worker_id, _ in workers)

    def _is_awaited(self, worker_id: WorkerId, now: float) -> bool:
        device = self._devices.get(worker_id)
        if device is None or device.linked_at is None or self._began_at is None:
            return False
        if now >= max(device.linked_at, self._began_at) + MAX_WAIT_S:
            return False
        is_missing = worker_id in self._probed_by or device.needs_measuring or not device.is_probed
        return is_missing and now >= device.ask_at and self._is_free(worker_id)

    # Learning

    def tick(self, lanes: Iterable[Lane], now: float) -> bool:
        """Ask whom it is time to ask, and learn from the passes that came back since the last time.

        True if a link is much slower than it was, or no longer so: it is time to look at the plan.
        """
        self.advance(now)
        for lane in lanes:
            members = lane.pipeline.members
            for hop in lane.pipeline.take_hops():
                self._observe_hop(hop, now)
            for timing in lane.take_timings():
                for member, took_s in zip(members, timing.stage_s, strict=True):
                    device = self._devices.get(member.worker_id)
                    if device is not None and timing.num_rows:
                        has_head = member.layers.stop == self._footprint.num_layers
                        load = StageLoad(len(member.layers), has_head, self._context_work)
                        expected_s = load.expected_s(self._times(device)[0], timing)
                        device.correction.observe(took_s, expected_s, now)
        for worker_id, device in self._devices.items():
            if device.correction.update(now):
                logger.debug("times_corrected worker=%s factor=%.2f", worker_id, device.correction.factor)
                self._figures = None

        if not self._hops.update(now):
            return False
        for (source, target), late_s in self._hops.late_s.items():
            logger.info("link_late from=%s to=%s by_ms=%.0f", source or "-", target or "-", late_s * 1e3)
            for end in (source, target):
                if end is not None and end in self._devices:
                    self._devices[end].is_probed = False  # Once it holds no layers, it is asked again.
        self._figures = None
        return True

    def _observe_hop(self, hop: Hop, now: float) -> None:
        link = self.figures().link(*hop.ends)
        sending_s = link.sending_s(hop.num_rows * self._footprint.activation_bytes)
        known_s = link.delay_s - self._hops.by_s(hop.ends)
        self._hops.observe(hop.ends, hop.seconds - sending_s, known_s, now)

    # What the planner gets

    def figures(self) -> FleetFigures:
        """All members that have a link, with links between all of them, those that were not probed as one may expect."""
        if self._figures is None:
            there = {one: device for one, device in self._devices.items() if device.linked_at is not None}
            links: dict[LinkEnds, LinkFigures] = {}
            for worker_id, device in there.items():
                if None in device.links:
                    links[worker_id, None] = links[None, worker_id] = device.links[None]
                for other_id, other in there.items():
                    link = _between(worker_id, device, other_id, other)
                    if link is not None and other_id != worker_id:
                        links[worker_id, other_id] = link
            base = FleetFigures((), dict(links))
            for source, target in self._hops.late_s:
                for ends in ((source, target), (target, source)):
                    link = base.link(*ends)
                    links[ends] = replace(link, delay_s=link.delay_s + self._hops.by_s(ends))
            self._figures = FleetFigures(tuple(self._device(one, device) for one, device in there.items()), links)
        return self._figures

    def planned_devices(self) -> list[admin_pb2.PlannedDevice]:
        """The same for operators, with the links of each device to the orchestrator and to the others."""
        figures = self.figures()
        return [
            admin_pb2.PlannedDevice(
                worker_id=one.worker_id,
                profile=messages.profile_to_proto(one.profile),
                times=times_to_proto(one.times, one.free_bytes),
                is_declared=one.is_declared,
                links=[
                    _link_to_proto(target, link)
                    for (source, target), link in figures.links.items()
                    if source == one.worker_id
                ],
            )
            for one in figures.devices
        ]

    def _device(self, worker_id: WorkerId, device: _Device) -> DeviceFigures:
        times, is_declared = self._times(device)
        free_bytes = 0 if device.times is None else device.times.free_bytes
        corrected = times.scaled(device.correction.factor)
        return DeviceFigures(worker_id, device.profile, corrected, is_declared, free_bytes)

    def _times(self, device: _Device) -> tuple[LayerTimes, bool]:
        """Without the correction, and whether they are declared."""
        if device.times is None:
            return declared_times(device.profile, self._footprint), True
        return times_from_proto(device.times), False


def _between(one_id: WorkerId, one: _Device, other_id: WorkerId, other: _Device) -> LinkFigures | None:
    """From one device to another: as probed from either end, else as far as both are from the orchestrator."""
    probed = one.links.get(other_id) or other.links.get(one_id)
    if probed is not None:
        return probed
    up, down = one.links.get(None), other.links.get(None)
    if up is None or down is None:
        return None
    is_direct = one.profile.allow_direct_links and bool(other.session.hello.flow_address)
    # Through the same radios, but with one process less to wake; emulation delays what a device sends, and only that.
    return up if is_direct and one.profile.is_emulated else up.then(down)


def times_from_proto(times: fleet_pb2.DeviceTimes) -> LayerTimes:
    return LayerTimes(_row_times(times.layer), _row_times(times.head), times.prefill_token_s, times.pass_s)


def times_to_proto(times: LayerTimes, free_bytes: int) -> fleet_pb2.DeviceTimes:
    return fleet_pb2.DeviceTimes(
        layer=[fleet_pb2.RowsTime(rows=rows, seconds=seconds) for rows, seconds in times.layer_s],
        head=[fleet_pb2.RowsTime(rows=rows, seconds=seconds) for rows, seconds in times.head_s],
        prefill_token_s=times.prefill_token_s,
        pass_s=times.pass_s,
        free_bytes=free_bytes,
    )


def _row_times(times: Iterable[fleet_pb2.RowsTime]) -> RowTimes:
    return tuple((one.rows, one.seconds) for one in times)


def _is_sound(times: fleet_pb2.DeviceTimes) -> bool:
    """Whether these are times at all: what a worker says is checked, not trusted."""
    both: Sequence[Sequence[fleet_pb2.RowsTime]] = (times.layer, times.head)
    for row_times in both:
        rows = [one.rows for one in row_times]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            return False
    seconds = [one.seconds for row_times in both for one in row_times]
    seconds += [times.prefill_token_s, times.pass_s]
    return all(0.0 <= one < math.inf for one in seconds) and all(one.seconds > 0.0 for one in times.layer)


def _is_fresh(times: fleet_pb2.DeviceTimes) -> bool:
    return -MAX_AHEAD_S <= time.time() - times.measured_at_s <= MAX_AGE_S


def _links_from_proto(links: Iterable[fleet_pb2.LinkFigures]) -> dict[WorkerId | None, LinkFigures]:
    return {WorkerId(one.worker_id) or None: link_from_proto(one) for one in links}


def link_from_proto(figures: fleet_pb2.LinkFigures) -> LinkFigures:
    """One way: half of what there and back takes."""
    rtt_s = figures.rtt_ms / 2e3 if 0.0 <= figures.rtt_ms < math.inf else 0.0
    rate = figures.mbit_s * 1e6 / 8
    return LinkFigures(rtt_s, rate if 0.0 < rate < math.inf else math.inf)


def _link_to_proto(far_end: WorkerId | None, link: LinkFigures) -> fleet_pb2.LinkFigures:
    mbit_s = 0.0 if link.bytes_per_s == math.inf else link.bytes_per_s * 8 / 1e6
    return fleet_pb2.LinkFigures(worker_id=far_end or "", rtt_ms=link.delay_s * 2e3, mbit_s=mbit_s)


def _summary(times: fleet_pb2.DeviceTimes) -> str:
    def shown(row_times: Iterable[fleet_pb2.RowsTime]) -> str:
        return "/".join(f"{one.seconds * 1e3:.2f}" for one in row_times)

    return (
        f"layer_ms={shown(times.layer)} head_ms={shown(times.head)} prefill_token_ms={times.prefill_token_s * 1e3:.3f} "
        f"pass_ms={times.pass_s * 1e3:.3f} free_mib={times.free_bytes >> 20}"
    )


def _address(hello: fleet_pb2.Hello) -> fleet_pb2.StageAddress:
    return fleet_pb2.StageAddress(
        worker_id=hello.worker_id, flow_address=hello.flow_address, socket_address=hello.socket_address
    )
