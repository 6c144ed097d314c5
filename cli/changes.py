"""What happened to a fleet between two looks at its status, in lines for people: who came and went, which layers moved.

Pure: made of two values of `shoal.status`. Called by what watches a fleet, and by the commands that change one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shoal.status import DepartedDevice, FleetStatus, PipelineStatus

# The same departure, looked at twice: clocks and calls take some time.
SAME_S = 0.5


def changes(before: FleetStatus, after: FleetStatus, told: Collection[str] = (), *, between_s: float) -> list[str]:
    """A line for each change. told: devices whose end was told already. between_s: from one look to the other."""
    return [
        *(line for line in _departed(before, after, between_s) if line.partition(" ")[0] not in told),
        *_joined(before, after),
        *_placed(before, after),
    ]


def departure(one: DepartedDevice) -> str:
    """As in "phone-2 was lost (no heartbeat for 5 s)"."""
    return f"{one.worker_id} left" if one.has_left else f"{one.worker_id} was lost ({one.why})"


def placed(pipeline: PipelineStatus, fleet: FleetStatus) -> str:
    """Who holds what of a pipeline, as in "phone-1 [0, 12), tablet-1 [12, 30)"."""
    layers = {device.worker_id: device.layers for device in fleet.devices}
    return ", ".join(f"{one} {layers[one]}" if layers.get(one) else one for one in pipeline.worker_ids)


def _departed(before: FleetStatus, after: FleetStatus, between_s: float) -> Iterator[str]:
    known = {one.worker_id: one.ago_s for one in before.departed}
    for one in reversed(after.departed):
        is_again = one.worker_id in known and one.ago_s + SAME_S < known[one.worker_id] + between_s
        if one.worker_id not in known or is_again:
            yield departure(one)


def _joined(before: FleetStatus, after: FleetStatus) -> Iterator[str]:
    known = {one.worker_id for one in before.devices}
    return (f"{one.worker_id} has joined" for one in after.devices if one.worker_id not in known)


def _placed(before: FleetStatus, after: FleetStatus) -> Iterator[str]:
    """Pipelines whose epoch is another one, or that are new or gone."""
    known = {one.pipeline_id: one.epoch for one in before.pipelines}
    for one in after.pipelines:
        if one.pipeline_id not in known:
            yield f"pipeline {one.pipeline_id} serves: {placed(one, after)}"
        elif one.epoch != known[one.pipeline_id]:
            yield f"layers are placed anew, pipeline {one.pipeline_id}: {placed(one, after)}"
    gone = known.keys() - {one.pipeline_id for one in after.pipelines}
    for pipeline_id in sorted(gone):
        rest = "" if after.ready else f"; answers wait until one does: {after.waiting_for}"
        yield f"pipeline {pipeline_id} serves no more{rest}"
