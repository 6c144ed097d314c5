"""Which rows decode next, and how many prompt tokens may go along without stalling a running stream.

Owns the decoding sequences: ready, held back by the pace their client asked for, or carried by a batch. It does not know
prompts, slots or the queue: the scheduler, its only caller, says what else is going on.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from orchestrator.core.limits import PREFILL_ROOM_TOKENS, Pace, SchedulerLimits, even_rows
from orchestrator.core.qos import CLASSES, PATIENCE_S, PRIORITY
from orchestrator.core.sequence import RunId, Sequence
from orchestrator.core.step_time import StepTimes
from shoal.types import DeviceMode, NumericClass, QosClass

# On a pipeline for class LATENCY, rows of other classes in a batch: one that comes finds it soon.
BORROWED_ROWS = 2
# A gap between tokens may grow by this much for others' sake although its target is out of reach. The goal is that p99 stays
# within 1.5; what lies between is for batches that meet at a stage, which a sum over stages does not see.
GAP_SLACK = 1.25
# How long a row may be held for the sake of higher classes: for as long as its class aims at by default, or, without an
# aim, long enough to spare others a step in ten and short enough that a reader sees it go on.
HELD_S = {QosClass.LATENCY: 0.0, QosClass.BALANCED: 0.1, QosClass.THROUGHPUT: 1.0}
# With more streams than this, bursts are short: who comes new waits for their end, and they gain less. They still spare each
# micro-batch the way through the orchestrator, which is a bubble where stages are about equally fast.
FEW_SEQUENCES = 2
SHORT_BURST_STEPS = 4
# Longer bursts are limited by time: a prompt that must not stall their rows has to wait for their end.
MAX_BURST_S = 0.35


@dataclass(frozen=True, slots=True)
class Moment:
    """What else is going on when a batch is made.

    busy_s: what the batches in flight take at their slowest stage. num_prompts: sequences that have, or could have, a slot
    and no token yet, and do not await blocks.
    has_latency: whether somebody of class LATENCY runs. has_chunk_in_flight: whether a batch carries prompt tokens.
    rows_in_flight: SHARED decode rows, for each batch in flight that has some; num_soon_back: how many of these do no burst.
    """

    now: float
    busy_s: float
    num_prompts: int
    has_latency: bool
    has_chunk_in_flight: bool
    rows_in_flight: tuple[int, ...]
    num_soon_back: int


class _Line:
    """The decoding sequences of one numeric and QoS class. ready: longest waiting first."""

    __slots__ = ("joinable_rows", "num_decoding", "qos", "ready")

    def __init__(self, qos: QosClass) -> None:
        self.qos = qos
        self.ready: OrderedDict[RunId, _Ready] = OrderedDict()
        self.num_decoding = 0
        # Up to how many rows a batch may have with one of these among them; of the moment.
        self.joinable_rows = 0

    @property
    def first(self) -> _Ready:
        return next(iter(self.ready.values()))


@dataclass(frozen=True, slots=True)
class _Ready:
    """number: rises with the order in which rows became ready. patient_until: the lowest goes first."""

    number: int
    patient_until: float
    run_id: RunId
    sequence: Sequence
    line: _Line

    def may_join(self, num_rows: int, now: float) -> bool:
        """Whether it may be one more in a batch of num_rows: always if its patience is at its end."""
        return num_rows < self.line.joinable_rows or self.patient_until <= now


class Decoding:
    """The sequences in DECODE, by numeric and QoS class.

    Invariants: a sequence is ready in at most one line, in order of becoming so, and not parked then; only paced ones are
    parked; counts and targets are those of all decoding sequences.
    """

    def __init__(self, limits: SchedulerLimits, times: StepTimes) -> None:
        self._limits = limits
        self._times = times
        self.pace = Pace(limits.max_batch)
        self._lines = {(numeric, qos): _Line(qos) for numeric in NumericClass for qos in CLASSES}
        self._solo = [self._lines[NumericClass.SOLO, qos] for qos in CLASSES]
        self._shared = [self._lines[NumericClass.SHARED, qos] for qos in CLASSES]
        self.num_decoding = 0
        self._num_readied = 0
        self._parked: dict[RunId, Sequence] = {}
        self._park_ends: list[tuple[float, RunId]] = []
        self._replaying: set[RunId] = set()
        # Tokens in the slots of all.
        self._num_held = 0
        self._num_paced = 0
        # How many ask for which time between tokens.
        self._targets: dict[QosClass, dict[float, int]] = {qos: {} for qos in CLASSES}

    @property
    def max_rows(self) -> int:
        """Decode rows of a batch."""
        return min(self._limits.max_batch, self.pace.max_batch)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a batch: less while devices are to be spared, but enough for both phases to go on."""
        most = self._limits.chunk_tokens
        if self.max_rows == self._limits.max_batch:
            return most
        return max(most * self.max_rows // self._limits.max_batch, 2 * PREFILL_ROOM_TOKENS)

    @property
    def _can_burst(self) -> bool:
        """Whether nobody has to be looked at before each of its steps."""
        return not self._replaying and self._num_paced == 0 and not self.pace.steps_per_s

    def burst_steps(self, rows: Seq[Sequence], num_running: int) -> int:
        """Further steps to grant a batch of these rows, which nothing else keeps from one."""
        if not rows or not self._can_burst:
            return 0
        most = SHORT_BURST_STEPS
        if num_running <= FEW_SEQUENCES:
            most = self._limits.burst_steps
            if self._times.is_known:
                most = max(int(MAX_BURST_S / self.pass_s(len(rows))), SHORT_BURST_STEPS)
        return min(most, self._limits.burst_steps, *(sequence.num_output_left for sequence in rows)) - 1

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence whose prompt is computed; a batch still carries it."""
        assert sequence.run_id is not None, sequence.story()
        self.num_decoding += 1
        self._line_of(sequence).num_decoding += 1
        self._num_held += sequence.num_held
        self._num_paced += sequence.is_paced
        if sequence.num_to_replay:
            self._replaying.add(sequence.run_id)
        if (target_s := sequence.targets.inter_token_s) is not None:
            counts = self._targets[sequence.qos]
            counts[target_s] = counts.get(target_s, 0) + 1

    def remove(self, sequence: Sequence) -> None:
        assert sequence.run_id is not None, sequence.story()
        line = self._line_of(sequence)
        self.num_decoding -= 1
        line.num_decoding -= 1
        self._num_held -= sequence.num_held
        line.ready.pop(sequence.run_id, None)
        self._num_paced -= sequence.is_paced
        self._replaying.discard(sequence.run_id)
        self._parked.pop(sequence.run_id, None)
        if (target_s := sequence.targets.inter_token_s) is not None:
            counts = self._targets[sequence.qos]
            counts[target_s] -= 1
            if counts[target_s] == 0:
                del counts[target_s]

    def took_token(self, sequence: Sequence) -> None:
        """Note that a sequence has one more token computed: a new one, or one that was known of its answer."""
        assert sequence.run_id is not None, sequence.story()
        self._num_held += 1
        if sequence.num_to_replay == 0:
            self._replaying.discard(sequence.run_id)

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Take back a sequence that no batch carries any more: it is ready, or parked until its next token is due."""
        assert sequence.run_id is not None, sequence.story()
        if sequence.is_paced and not sequence.num_to_replay and sequence.next_token_at > now:
            self._parked[sequence.run_id] = sequence
            heapq.heappush(self._park_ends, (sequence.next_token_at, sequence.run_id))
        else:
            self._make_ready(sequence, now)

    def take(self, moment: Moment) -> list[Sequence]:
        """Pick the sequences of the next batch: one SOLO alone, or SHARED ones; whichever have waited longer."""
        self._unpark(moment.now)
        for lines in zip(self._solo, self._shared, strict=True):
            if any(line.ready for line in lines):
                most = self._joinable_rows(lines[0].qos, moment)
                for line in lines:
                    line.joinable_rows = most
        firsts = [line.first for line in self._lines.values() if line.ready]
        able = [one for one in firsts if one.may_join(0, moment.now)]
        # Where steps are rationed, a round outlasts everybody's patience: classes go before turns.
        first = _patient_until if self.pace.steps_per_s else _number
        longest = min(able, key=first, default=None)
        if longest is None:
            return []
        if longest.sequence.numeric is NumericClass.SOLO:
            chosen = [min((one for one in able if one.line in self._solo), key=_patient_until)]
        else:
            chosen = self._choose_shared(moment)
        for one in chosen:
            del one.line.ready[one.run_id]
        return [one.sequence for one in chosen]

    def _choose_shared(self, moment: Moment) -> list[_Ready]:
        """The higher classes first; before them, who has waited for longer than its patience."""
        most = self._most_shared_rows(moment)
        candidates = [one for line in self._shared for one in islice(line.ready.values(), most)]
        chosen: list[_Ready] = []
        for one in sorted(candidates, key=_patient_until):
            if len(chosen) < most and one.may_join(len(chosen), moment.now):
                chosen.append(one)
        return chosen

    def _most_shared_rows(self, moment: Moment) -> int:
        budget = self.chunk_tokens - (PREFILL_ROOM_TOKENS if moment.num_prompts else 0)
        return min(self._even_rows(_num_decoding(self._shared)), budget)

    def _even_rows(self, num_shared: int) -> int:
        """The rows of a batch if so many sequences decode: few small ones where large ones would leave stages idle."""
        return even_rows(num_shared, self._limits.num_stages, self.max_rows, self._limits.min_rows)

    def _joinable_rows(self, qos: QosClass, moment: Moment) -> int:
        """Up to how many rows a batch may have with one of this class among them, for the sake of higher ones."""
        higher = CLASSES[: PRIORITY[qos]]
        most = self.chunk_tokens
        if self._limits.mode is DeviceMode.LATENCY and qos is not QosClass.LATENCY:
            most = 0 if moment.has_latency else BORROWED_ROWS
        target_s = self.strictest_s(higher)
        if target_s is None:
            return most
        budget_s = max(target_s, GAP_SLACK * self.gap_s(higher))
        left_s = budget_s - moment.busy_s - self.solo_part_s(higher)
        return min(most, int(self._times.work_within(budget_s, left_s) / self._row_work))

    def rows_s(self, batches: Mapping[int, int]) -> float:
        """What batches of so many rows take one after the other at the slowest stage."""
        return sum(count * self._times.bottleneck_s(self.work_of_rows(rows)) for rows, count in batches.items())

    def pass_s(self, num_rows: int) -> float:
        """What so many decode rows take from entering the first stage to leaving the last."""
        return self._times.latency_s(self.work_of_rows(num_rows))

    def work_of_rows(self, num_rows: float) -> float:
        """What so many decode rows cost, as far as their slots are filled now."""
        return num_rows * self._row_work

    @property
    def _row_work(self) -> float:
        return self._limits.work_of(1, self._num_held / max(self.num_decoding, 1))

    def batches_of_round(self, num_rows: int, moment: Moment) -> Counter[int]:
        """How many batches have how many rows until all that decode have had their turn, with those in flight."""
        num_ready = sum(len(line.ready) for line in self._shared)
        batches = Counter((*moment.rows_in_flight, num_rows, num_ready % self.max_rows))
        batches[self.max_rows] += num_ready // self.max_rows
        del batches[0]
        return +batches

    def usual_batches(self) -> Counter[int]:
        """How many batches have how many rows in a round, if none is in flight or ready at another's time."""
        num_rows, num_batches = self._round(_num_decoding(self._shared))
        return +Counter({num_rows: num_batches})

    def gap_s(self, classes: Iterable[QosClass] = CLASSES, num_more: int = 0) -> float:
        """Predict the time between two tokens of each stream if the decoding of these classes, and num_more, are alone."""
        num_rows, num_batches = self._round(_num_decoding(self._shared, classes) + num_more)
        return self.round_s({num_rows: num_batches}, self.solo_part_s(classes))

    def round_s(self, batches: Mapping[int, int], solo_s: float) -> float:
        """The time of a round: so many batches with so many rows, and SOLO rows beside them."""
        passes_s = [self.pass_s(num_rows) for num_rows, count in batches.items() if count]
        return max([self.rows_s(batches) + solo_s, self._times.solo_s() if solo_s else 0.0, *passes_s])

    def _round(self, num_shared: int) -> tuple[int, int]:
        """The rows of a batch, and the batches until each of num_shared rows has had its turn."""
        if num_shared == 0:
            return 0, 0
        num_rows = min(self._even_rows(num_shared), num_shared)
        return num_rows, -(-num_shared // num_rows)

    def strictest_s(self, classes: Iterable[QosClass] = CLASSES) -> float | None:
        """The shortest time between tokens that these classes are to have; None if nobody cares, or nothing is known."""
        if not self._times.is_known:
            return None
        return min((min(self._targets[qos]) for qos in classes if self._targets[qos]), default=None)

    def solo_part_s(self, classes: Iterable[QosClass] = CLASSES) -> float:
        """What SOLO rows take of a round; stages work on several at once."""
        return _num_decoding(self._solo, classes) * self._times.solo_s() / self._limits.num_stages

    def _line_of(self, sequence: Sequence) -> _Line:
        return self._lines[sequence.numeric, sequence.qos]

    def _make_ready(self, sequence: Sequence, at: float) -> None:
        assert sequence.run_id is not None, sequence.story()
        self._num_readied += 1
        line = self._line_of(sequence)
        # A lent device is not to be counted on.
        held_s = (PATIENCE_S if self._limits.mode is DeviceMode.LATENCY else HELD_S)[sequence.qos]
        if self.pace.steps_per_s and sequence.qos is QosClass.THROUGHPUT:
            # Half of the steps stay for higher classes.
            held_s = max(held_s, 2 * self._round(_num_decoding(self._shared))[1] / self.pace.steps_per_s)
        patient_until = at + held_s
        line.ready[sequence.run_id] = _Ready(self._num_readied, patient_until, sequence.run_id, sequence, line)

    def _unpark(self, now: float) -> None:
        while self._park_ends and self._park_ends[0][0] <= now:
            _, run_id = heapq.heappop(self._park_ends)
            if (sequence := self._parked.pop(run_id, None)) is not None:
                self._make_ready(sequence, now)

    def wake_at(self, now: float) -> float | None:
        """The earliest later time at which a row becomes ready, or may go because its patience is at its end."""
        while self._park_ends and self._park_ends[0][1] not in self._parked:
            heapq.heappop(self._park_ends)
        times = [line.first.patient_until for line in self._lines.values() if line.ready]
        times += [end for end, _ in self._park_ends[:1]]
        return min((at for at in times if at > now), default=None)

    def check_invariants(self, decoding: list[Sequence], carried: set[RunId]) -> None:
        """`carried`: the runs that a batch in flight samples."""
        ready = [run_id for line in self._lines.values() for run_id in line.ready]
        waiting = [*ready, *self._parked]
        for sequence in decoding:
            assert sequence.run_id is not None, sequence.story()
            assert waiting.count(sequence.run_id) + (sequence.run_id in carried) == 1, sequence.story()
            assert (sequence.run_id in self._replaying) == (sequence.num_to_replay > 0), sequence.story()
        assert set(waiting) <= {one.run_id for one in decoding}
        assert all(one.is_paced for one in self._parked.values())
        assert self._num_paced == sum(one.is_paced for one in decoding)
        for (numeric, qos), line in self._lines.items():
            numbers = [one.number for one in line.ready.values()]
            assert numbers == sorted(numbers)
            assert line.num_decoding == sum(one.numeric is numeric and one.qos is qos for one in decoding)
        assert self.num_decoding == len(decoding)
        assert self._num_held == sum(one.num_held for one in decoding)
        for qos, counts in self._targets.items():
            targets = [one.targets.inter_token_s for one in decoding if one.qos is qos]
            assert counts == {one: targets.count(one) for one in targets if one is not None}


_patient_until = attrgetter("patient_until")
_number = attrgetter("number")


def _num_decoding(lines: Iterable[_Line], classes: Iterable[QosClass] = CLASSES) -> int:
    return sum(line.num_decoding for line in lines if line.qos in classes)
