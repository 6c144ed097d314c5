"""Figures of fleets to plan for that need not run: devices by their profiles, or those that an orchestrator told of.

Puts profiles and messages into the planner's values; decides nothing. Called by `shoal plan`, and by `admin` the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.core.figures import (
    DeviceFigures,
    FleetFigures,
    LinkEnds,
    LinkFigures,
    declared_link,
    declared_times,
)
from orchestrator.core.footprint import ModelFootprint
from orchestrator.measuring import link_from_proto, times_from_proto
from shoal import messages
from shoal.types import DeviceProfile, WorkerId
from shoal.v1 import admin_pb2


def fleet_of_profiles(model: ModelFootprint, devices: Sequence[tuple[WorkerId, DeviceProfile]]) -> FleetFigures:
    """What profiles declare: times by speed, and links as emulation makes them, which delays what a device sends."""
    links: dict[LinkEnds, LinkFigures] = {}
    for worker_id, profile in devices:
        link = declared_link(profile.link)
        others = (other_id for other_id, other in devices if other_id != worker_id and _is_direct(profile, other))
        links |= {(worker_id, other_id): link for other_id in others}
        links[worker_id, None] = link
        links[None, worker_id] = LinkFigures()
    figures = (DeviceFigures(worker_id, profile, declared_times(profile, model)) for worker_id, profile in devices)
    return FleetFigures(tuple(figures), links)


def fleet_of_messages(devices: Iterable[admin_pb2.PlannedDevice]) -> FleetFigures:
    """What an orchestrator knows of its devices."""
    figures, links = [], dict[LinkEnds, LinkFigures]()
    for device in devices:
        worker_id, profile = WorkerId(device.worker_id), messages.profile_from_proto(device.profile)
        times = times_from_proto(device.times)
        figures.append(DeviceFigures(worker_id, profile, times, device.is_declared, device.times.free_bytes))
        for link in device.links:
            far = WorkerId(link.worker_id) if link.worker_id else None
            links[worker_id, far] = link_from_proto(link)
    return FleetFigures(tuple(figures), links)


def _is_direct(one: DeviceProfile, other: DeviceProfile) -> bool:
    return one.allow_direct_links and other.allow_direct_links
