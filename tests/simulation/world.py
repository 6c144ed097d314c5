"""A fleet in virtual time: a seed decides who is there, what is asked for and what goes wrong; the rest is the real cores.

The event loop's clock jumps from event to event. After each of them everything that must always hold is checked; when faults
have stopped, everything that was accepted must come to its end. The first thing that is wrong ends the run.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from random import Random
from unittest import mock

from modelstore.manifest import Manifest
from orchestrator import prefetching, shape, shards
from orchestrator.core.fleet import WorkerState
from orchestrator.core.parking import PARKED_S
from orchestrator.core.placement import Worker
from orchestrator.engine import MAX_VAIN_RECOVERIES
from orchestrator.shards import footprint
from shoal.config import OrchestratorConfig
from shoal.errors import DeadlineUnmeetable, InternalError, ShoalError
from shoal.types import PipelineId, WorkerId
from shoal.v1 import fleet_pb2, flow_pb2
from tests.simulation.faults import Faults
from tests.simulation.layers import NUM_LAYERS
from tests.simulation.network import Stream
from tests.simulation.office import Attachment, Office, Uplink
from tests.simulation.requests import Entry, Request, Wish
from tests.simulation.scenario import CONTEXT_TOKENS, draw_scenario
from tests.simulation.store import SimulatedRedis
from tests.simulation.trace import brief, quiet
from tests.simulation.worker import Device, SimulatedWorker
from tests.support.virtual_time import VirtualLoop

# After faults have stopped; longer than anybody is parked or backs off.
LIVENESS_S = 90.0
# Beyond the time that nobody is parked for: leases, back-off, loading.
SHORT_SLACK_S = 8.0
# When one more is asked for.
LAST_AFTER_S = 3.0
# By then, something serves.
FIRST_FAULT_AT_S = 0.8
JOURNAL_S = 0.1
UNCLAIMED_S = 30.0
# Instead of a time in which something always happens here.
CALM_S = 0.3
# Frames that may come again out of the past.
NUM_REMEMBERED = 150
LEASE_SLACK_S = 0.3


class Failed(AssertionError):
    """Something did not hold; the message says what, when and how to see it again."""


class World:
    """Everything in one run, and the time in it.

    Invariant: what happens next depends on the seed and on nothing else.
    """

    def __init__(self, seed: int, manifest: Manifest, *, is_tracing: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.manifest = manifest
        self.is_tracing = is_tracing
        self.trace: list[str] = []
        self.num_events = 0
        self.footprint = footprint(manifest)
        assert self.footprint.num_layers == NUM_LAYERS
        self.scenario = draw_scenario(self.random, self.footprint)
        self._config = OrchestratorConfig(
            model=manifest.name,
            expect_workers=self.scenario.expect_workers,
            max_sequences=self.scenario.num_slots,
            context_tokens=CONTEXT_TOKENS,
            burst_steps=self.scenario.burst_steps,
            replicas=self.scenario.replicas,
            lease_s=self.scenario.lease_s,
            heartbeat_s=self.scenario.heartbeat_s,
        )
        self.redis = SimulatedRedis() if self.scenario.has_redis else None
        self.devices = {device.worker_id: device for device in self.scenario.devices}
        self.office: Office | None = None
        self.requests: list[Request] = []
        self.cordoned: Collection[WorkerId] = ()
        self.journal: dict[str, Entry] = {}
        self.past: deque[tuple[Office, SimulatedWorker, flow_pb2.Frame]] = deque(maxlen=NUM_REMEMBERED)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stalled_until = 0.0
        # Of the orchestrator's events.
        self._num_checked = -1
        self._is_enough: dict[tuple[WorkerId, ...], bool] = {}
        self.num_broken_steps = 0
        self.num_refused = 0
        # For whoever asks whether enough happens.
        self.happened: Counter[str] = Counter()
        self.is_calm = False
        self.last_short_at = 0.0
        self._num_waiting_wishes = len(self.scenario.wishes)
        self._faults = Faults(self)

    # Time

    def now(self) -> float:
        return self._loop.time()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """The loop's own timers of one time ring in any order; these in the order in which they were set."""
        at = self.now() + max(delay_s, 0.0)
        heapq.heappush(self._agenda, (at, next(self._numbers), action))
        self._loop.call_at(at, self._happen)

    def _happen(self) -> None:
        """Do what is next: as many of these calls come as there are things to do."""
        _, _, action = heapq.heappop(self._agenda)
        if self._done.done():
            return
        self.num_events += 1
        try:
            action()
            self._check()
        except Exception as error:  # noqa: BLE001 - whatever it is ends the run
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    @property
    def is_attentive(self) -> bool:
        """Whether nobody was kept from his turn just now: after that, heartbeats are seen late."""
        return self.now() > self._stalled_until + LEASE_SLACK_S

    def stall(self, duration_s: float) -> None:
        """Nobody gets a turn for so long."""
        self.last_short_at = self._stalled_until = self.now() + duration_s
        self._loop.block(duration_s)

    def note(self, text: str) -> None:
        if self.is_tracing:
            self.trace.append(f"{self.now() - self._began_at:9.4f}  {text}")

    def run(self) -> None:
        """Play the seed to its end. Raises Failed."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            self._loop = loop
            self._loop.set_exception_handler(
                lambda _, context: self.fail(context.get("exception") or Failed(str(context)))
            )
            stamps = lambda: int(self._loop.time() * 1e9)  # noqa: E731
            # Simulated workers load nothing, so they need no graphs.
            with (
                mock.patch.multiple(time, monotonic=self._loop.time, monotonic_ns=stamps),
                mock.patch.object(shards, "build_shard_graph", return_value=b""),
                mock.patch.object(shape, "build_shard_graph", return_value=b""),
                mock.patch.object(prefetching, "CALM_S", CALM_S),
                quiet(),
            ):
                runner.run(self._play())

    async def _play(self) -> None:
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._began_at = self.last_short_at = self.now()
        self.start_office()
        for device in self.devices.values():
            self.after(self.random.uniform(0.0, 0.3), lambda device=device: self.start_worker(device))  # type: ignore[misc]
        for at_s, wish in self.scenario.wishes:
            self.after(at_s, lambda wish=wish: self.ask(wish))  # type: ignore[misc]
        self.after(FIRST_FAULT_AT_S, self._faults.plan_next)
        self.after(self.scenario.stop_at_s, self._calm)
        try:
            await self._done
        finally:
            if self.office is not None:
                self.office.kill()
            await asyncio.sleep(0)

    def _calm(self) -> None:
        """Nothing goes wrong any more, and everybody comes back: all that was asked for must end, and one thing more."""
        self.is_calm = True
        self.note("faults are over")
        self._faults.heal()
        self._num_waiting_wishes += 1
        self.after(LAST_AFTER_S, lambda: self.ask(Wish("last", (11, 12, 13), 5)))
        self._calm_at = self.now()
        self._watch_end()

    def _watch_end(self) -> None:
        if self._num_waiting_wishes == 0 and all(request.is_over for request in self.requests):
            self._check_end()
            self._done.set_result(None)
            return
        waiting = [request.wish.request_id for request in self.requests if not request.is_over]
        assert self.now() < self._calm_at + LIVENESS_S, (
            f"{waiting} and {self._num_waiting_wishes} that were not accepted did not end: {self.story()}"
        )
        self.after(0.5, self._watch_end)

    def _check_end(self) -> None:
        assert self.office is not None
        last = next(request for request in self.requests if request.wish.request_id == "last")
        assert last.finish is not None, f"a request after all faults ended with {last.error}"
        assert self.office.engine.is_idle
        for device in self.devices.values():
            stage = None if device.worker is None else device.worker.stage
            if stage is None or not self.office.control._fleet.is_current(
                PipelineId(stage.spec.pipeline_id), stage.spec.epoch
            ):
                continue
            held = [slot.run_id for slot in stage.slots.values() if not slot.is_retained]
            # A Cancel may be under way still.
            assert len(held) <= 1, f"{device.worker_id} still holds runs {held}"

    # Who is there

    def start_office(self) -> None:
        self.note("orchestrator starts")
        self.office = Office(self, self._config, self.manifest)
        for request in self.requests:
            if not request.is_over:
                self._resume(request)

    def _resume(self, request: Request) -> None:
        assert self.office is not None
        entry = self.journal.get(request.wish.request_id)
        if entry is None:
            # Redis was away, or forgot: the client is told that nobody knows it.
            request.error = InternalError("the journal does not have it")
            return
        self.happened["adopted"] += 1
        self.note(f"{request.wish.request_id} is adopted with {len(entry.token_ids)} tokens")
        request.adopt(self.office.engine, entry, UNCLAIMED_S, self.now())

    def start_worker(self, device: Device) -> None:
        if device.worker is None or not device.worker.process.is_alive:
            self.note(f"{device.worker_id} starts")
            device.worker = SimulatedWorker(self, device)

    def end_life(self, worker: SimulatedWorker) -> None:
        """A worker's process ends, and comes back later; the others learn of it by the ends of their streams."""
        if not worker.process.is_alive:
            return
        self.note(f"{worker.device.worker_id} ends")
        worker.process.kill()
        self._faults.cut_all(worker, self.delay_s())
        self._faults.start_later(worker.device)

    def is_enough(self) -> bool:
        """Whether those who are up can hold the model."""
        if self.office is None:
            return False
        now, cordoned = self.now(), self.office.control._fleet.cordoned
        up = [(WorkerId(one.worker_id), one.profile) for one in self.devices.values() if one.is_up(now)]
        up = [one for one in up if one[0] not in cordoned]
        key = tuple(worker_id for worker_id, _ in up)
        if key not in self._is_enough:
            self._is_enough[key] = self._can_hold(up)
        return self._is_enough[key]

    def _can_hold(self, up: list[Worker]) -> bool:
        """Whether these can hold all layers, one after the other, in the order of their names."""
        if len(up) < self.scenario.expect_workers:
            return False
        stops = {0}
        for _, profile in sorted(up, key=lambda one: one[0]):
            stops |= {
                stop
                for start in stops
                for stop in range(start + 1, NUM_LAYERS + 1)
                if self.footprint.need_bytes(start, stop, CONTEXT_TOKENS) <= profile.shard_bytes
            }
        return NUM_LAYERS in stops

    # Links

    def delay_s(self) -> float:
        return self.scenario.delay_s * self.random.uniform(0.5, 3.0)

    def link_delay(self, worker: SimulatedWorker) -> Callable[[], float]:
        """Of the links of a worker: what is sent while it is cut off comes when it no longer is."""
        return lambda: self.delay_s() + max(worker.device.cut_off_until - self.now(), 0.0)

    def open_attachment(self, worker: SimulatedWorker) -> Attachment | None:
        if self.office is None or worker.device.is_cut_off(self.now()):
            return None
        return Attachment(self, self.office, worker)

    def open_uplink(self, worker: SimulatedWorker, token: bytes) -> Uplink | None:
        return None if self.office is None else Uplink(self, self.office, worker, token)

    def open_peer_link(self, worker: SimulatedWorker, command: fleet_pb2.LoadShard, peer_id: str) -> None:
        """Dial another stage: it takes the link if it has the same shard's token; else frames are relayed."""
        peer = self.devices[peer_id].worker
        delay_s, process = self.delay_s(), worker.process
        relay = lambda: worker.linked(command, None, "relay")  # noqa: E731
        if peer is None or not self.devices[peer_id].is_up(self.now()):
            process.after(1.0, relay)
            return

        def dialled() -> None:
            theirs = peer.current
            if theirs is None or theirs.link_token != command.link_token:
                process.after(delay_s, relay)
                return
            link: Stream[flow_pb2.Frame] = Stream(
                self, peer.process, peer.receive,
                lambda: peer.link_failed(theirs, "a link from another stage broke"), self.link_delay(worker),
            )  # fmt: skip
            peer.inbound.append(link)
            process.after(delay_s, lambda: worker.linked(command, link, "socket"))

        self.after(delay_s, lambda: peer.process.do(dialled))

    def remember(self, worker: SimulatedWorker, frame: flow_pb2.Frame) -> None:
        if self.office is not None:
            self.past.append((self.office, worker, frame))
        if self.is_tracing:
            self.note(f"{worker.device.worker_id} sends {brief(frame)}")

    # What clients do

    def ask(self, wish: Wish) -> None:
        """Submit until it is accepted, as a client does that is told to come again."""
        request = Request(wish, self.now())
        if self.office is None:
            self.after(0.5, lambda: self.ask(wish))
            return
        num_stored = self.random.randint(0, 2) if self.redis is not None else 0
        try:
            request.submit(self.office.engine, self.now(), num_stored)
        except ShoalError as error:
            self.num_refused += 1
            self.note(f"{wish.request_id} is refused: {error!r}")
            if isinstance(error, DeadlineUnmeetable):
                self._num_waiting_wishes -= 1
                return
            if not error.is_retryable:
                raise Failed(f"{wish} was refused with {error!r}") from error
            self.after(max(error.retry_after_s, 0.2), lambda: self.ask(wish))
            return
        self._num_waiting_wishes -= 1
        self.note(f"{wish.request_id} is accepted: {len(wish.prompt)} tokens, at most {wish.max_tokens}")
        self.requests.append(request)
        self._write_journal(request)
        if wish.cancel_after_s is not None:
            self.after(wish.cancel_after_s, lambda: self._cancel(request))

    def _cancel(self, request: Request) -> None:
        if not request.is_over and self.office is not None and request.answer is not None:
            self.happened["cancelled"] += 1
            self.note(f"{request.wish.request_id} is cancelled")
            request.is_cancelled = True
            self.office.engine.abort(request.answer.sequence.sequence_id)

    def _write_journal(self, request: Request) -> None:
        """Have what is known of a request written, later, whole."""
        token_ids, answer = list(request.token_ids), request.answer
        assert answer is not None

        def write() -> None:
            if self.redis is not None and not self.redis.is_away and not request.is_over:
                entry = self.journal.setdefault(request.wish.request_id, Entry(answer.sequence.trail_id))
                if len(entry.token_ids) < len(token_ids):
                    entry.token_ids = token_ids

        if self.office is not None:
            self.office.process.after(JOURNAL_S, write)

    # What must hold

    def check_call(self, office: Office, worker: SimulatedWorker, frame: flow_pb2.Frame) -> None:
        """No work for a worker without a lease, nor of a placement that is not in force."""
        fleet = office.control._fleet
        member = fleet.get(WorkerId(worker.device.worker_id))
        what = f"{brief(frame)} to {worker.device.worker_id}"
        assert fleet.is_current(PipelineId(frame.pipeline_id), frame.epoch), f"{what}: not in force"
        assert member is not None, f"{what}: not a member"
        assert member.incarnation == worker.incarnation, f"{what}: a ghost"
        # Who did not get a turn did not see heartbeats either.
        slack_s = LEASE_SLACK_S if self.is_attentive else math.inf
        assert member.lease_expires_at > self.now() - slack_s, f"{what}: no lease"
        assert member.state in (WorkerState.READY, WorkerState.DRAINING), f"{what}: {member.story()}"
        if self.is_tracing:
            self.note(f"orchestrator sends {what}")

    def _check(self) -> None:
        office = self.office
        if office is None:
            self.last_short_at = self.now()
            return
        if office.process.num_done == self._num_checked:
            return
        self._num_checked = office.process.num_done
        if not self.is_enough():
            self.last_short_at = self.now()
        for request in self.requests:
            if request.is_over:
                continue
            new = request.read()
            if new:
                self.note(f"{request.wish.request_id} has {len(request.token_ids)} tokens: {new}")
                self._write_journal(request)
            if request.error is not None:
                self._check_error(request, request.error)
            if self.is_attentive:
                request.check_deadline(self.now())
        office.check_invariants()

    def _check_error(self, request: Request, error: ShoalError) -> None:
        """An accepted request ends with an error only if devices were missing, it was late, or it broke devices itself."""
        self.note(f"{request.wish.request_id} ends with {error!r}")
        answer = request.answer
        assert answer is not None
        is_broken = self.num_broken_steps > 0 and "could not run a step" in error.message
        is_vain = answer.sequence.num_vain_recoveries > MAX_VAIN_RECOVERIES
        was_short = self.now() - self.last_short_at < PARKED_S + SHORT_SLACK_S
        assert request.is_late(self.now()) or is_broken or is_vain or was_short, (
            f"{request.wish.request_id} ended though there were devices enough: {error!r}"
        )

    def summary(self) -> Counter[str]:
        """How often what happened in the whole run."""
        answers = [request.answer for request in self.requests if request.answer is not None]
        return self.happened + Counter(
            finished=sum(request.finish is not None for request in self.requests),
            recovered=sum(answer.sequence.num_recoveries for answer in answers),
        )

    def story(self) -> str:
        """How things stand, for whoever looks at a failure."""
        office = self.office
        fleet = (
            "no orchestrator" if office is None else "; ".join(one.story() for one in office.control._fleet.members())
        )
        return f"{fleet}; {'' if office is None else office.control._waiting_for()}"
