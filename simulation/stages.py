"""The stages of a simulated pipeline: when a pass leaves the last of them, by the figures that plans are made with.

Devices and links take one message after the other, in order, so a pass is reckoned in one go when it is sent. Decode rows
take what `core.predictions` says, and what attention costs as slots fill, that many prompt tokens more. Steps of a burst
come back to the first stage in the order of their turn there, to within a hop. Knows neither what is computed nor for whom.
"""

from __future__ import annotations

from itertools import pairwise

from orchestrator.core.batch import Batch
from orchestrator.core.figures import DeviceFigures, FleetFigures, LinkFigures
from orchestrator.core.footprint import ModelFootprint
from orchestrator.core.limits import LEAST_ROWS
from orchestrator.core.placement import Placement
from orchestrator.core.stage_costs import Links


class Stages:
    """busy_s: how long each has computed.

    Invariants: a stage computes one pass at a time, in the order in which they came; a link carries one message at a time.
    """

    def __init__(self, model: ModelFootprint, fleet: FleetFigures, placement: Placement) -> None:
        """Raise KeyError for a worker that has no figures."""
        by_id = {device.worker_id: device for device in fleet.devices}
        self.devices: list[DeviceFigures] = [by_id[one] for one in placement.worker_ids]
        self.busy_s = [0.0] * len(self.devices)
        links = Links(FleetFigures(tuple(self.devices), fleet.links, fleet.default_link))
        self.enter_s, self.leave_s = links.enter_s[0], links.leave_s[-1]
        last = len(self.devices) - 1
        self._hops: list[LinkFigures | None] = [links.between(one, other) for one, other in pairwise(range(last + 1))]
        self._hops.append(None)
        # From the last stage to the first, within a burst; within one device there is none.
        self._back = links.between(last, 0) if last else LinkFigures(0.0)
        self._activation_bytes = model.activation_bytes
        self._num_layers = [len(stage.layers) for stage in placement.stages]
        self._free_at = [0.0] * len(self.devices)
        self._link_free_at = [0.0] * len(self.devices)
        # By decode rows, what each stage takes for them; by sampled rows, what the head takes.
        self._rows_s: dict[int, list[float]] = {}
        self._head_s: dict[int, float] = {}

    def back_s(self, num_rows: int) -> float:
        """From the last stage to the first, with the tokens of a burst."""
        return self._back.transfer_s(num_rows * self._activation_bytes)

    def run(self, batch: Batch, num_rows: int, num_sampled: int, at: float) -> tuple[float, tuple[float, ...]]:
        """Let a pass come to the first stage at a time: when it leaves the last one, and what each computed for it.

        num_rows: decode rows that are left of the batch, num_sampled: rows with a token at the end.
        """
        passes_s = self._passes_s(batch, num_rows, num_sampled)
        num_bytes = (batch.num_tokens if batch.has_chunk else num_rows) * self._activation_bytes
        free_at, link_free_at = self._free_at, self._link_free_at
        for index, (pass_s, hop) in enumerate(zip(passes_s, self._hops, strict=True)):
            at = free_at[index] = max(at, free_at[index]) + pass_s
            self.busy_s[index] += pass_s
            if hop is not None:
                at = link_free_at[index] = max(at, link_free_at[index]) + hop.sending_s(num_bytes)
                at += hop.delay_s
        return at, passes_s

    def _passes_s(self, batch: Batch, num_rows: int, num_sampled: int) -> tuple[float, ...]:
        rows = num_rows if batch.is_solo or num_rows == 0 else max(num_rows, LEAST_ROWS)
        rows_s = self._rows_s.get(rows)
        if rows_s is None:
            rows_s = self._rows_s[rows] = [
                device.times.pass_s + (count * device.times.layer_at(rows) if rows else 0.0)
                for device, count in zip(self.devices, self._num_layers, strict=True)
            ]
        # Tokens of prompts, and what is read of slots that are filled, which is reckoned in such tokens.
        tokens = batch.work - batch.num_decode_rows
        if num_rows < batch.num_decode_rows:
            # Of a burst some of whose rows have ended.
            tokens *= num_rows / batch.num_decode_rows
        passes_s = [
            seconds + count * device.times.prefill_token_s * tokens
            for seconds, count, device in zip(rows_s, self._num_layers, self.devices, strict=True)
        ]
        if num_sampled:
            passes_s[-1] += self._head(1 if batch.is_solo else max(num_sampled, LEAST_ROWS))
        return tuple(passes_s)

    def _head(self, num_sampled: int) -> float:
        seconds = self._head_s.get(num_sampled)
        if seconds is None:
            seconds = self._head_s[num_sampled] = self.devices[-1].times.head_at(num_sampled)
        return seconds
