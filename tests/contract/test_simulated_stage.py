"""The simulated stage sends and holds what a real one does: the same frames, played to both, compared after each.

Else what `tests/simulation` finds, or does not find, says nothing of Shoal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest

from shoal.kv import KVScope, chain
from shoal.v1 import flow_pb2
from tests.simulation.layers import NUM_LAYERS
from tests.support.shards import TinyModel, make_tiny_model, make_tokens
from tests.support.stage_pairs import Chain, Pair, RealChain, SimulatedChain
from tests.support.stages import EPOCH, make_cancel, make_frame, make_restore, make_row, make_start, make_step

CUTS = [(), (2,), (1, 3)]
PROMPT = make_tokens(150, 280, seed=1)
SHORT = make_tokens(20, 280, seed=2)
NAMES = chain(KVScope("00" * 32, "f32-rope-1"), PROMPT)
TRAIL, OTHER_TRAIL = b"t" * 16, b"o" * 16
FETCH_MS = 1000.0

Open = Callable[..., Pair]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("simulated"), num_layers=NUM_LAYERS)


@pytest.fixture(params=CUTS, ids=str)
def open_pair(model: TinyModel, request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Chain] = []

    def open_with(kv_tokens: int | None = None) -> Pair:
        chains = (RealChain(model, request.param, kv_tokens), SimulatedChain(model, request.param, kv_tokens))
        opened.extend(chains)
        return Pair(chains)

    yield open_with
    for one in opened:
        one.close()


def prefill(
    pair: Pair,
    sequence_id: int = 1,
    prompt: Sequence[int] = PROMPT,
    *,
    slot: int = 0,
    begin: int = 0,
    trail_id: bytes = TRAIL,
    is_named: bool = True,
) -> None:
    """Compute a prompt from a token on, in chunks."""
    names = NAMES if is_named and prompt is PROMPT else ()
    for position in range(begin, len(prompt), 64):
        piece = prompt[position : position + 64]
        start = make_start(names=names, trail_id=trail_id) if position == begin else None
        is_end = position + 64 >= len(prompt)
        row = make_row(sequence_id, slot=slot, position=position, num_tokens=len(piece), sample=is_end, start=start)
        pair.send(make_step(position + 1, [row], piece))


def decode(pair: Pair, sequence_id: int = 1, count: int = 1, *, slot: int = 0, burst_steps: int = 0) -> None:
    """Go on from the newest token of each chain, in steps of a row."""

    def step(one: Chain) -> None:
        newest = one.newest(sequence_id)
        row = make_row(sequence_id, slot=slot, position=newest.position)
        one.send(make_step(900 + newest.position, [row], [newest.token_id], burst_steps=burst_steps))

    for _ in range(count):
        pair.do(step)


def resume(pair: Pair, sequence_id: int, known: int, *, slot: int = 0, trail_id: bytes = TRAIL) -> None:
    """Ask for what is kept of a sequence that ran before, of which so many tokens are of use."""
    pair.send(
        make_restore(
            sequence_id, NAMES, slot=slot, is_exact_only=True, fetch_timeout_ms=FETCH_MS, trail_id=trail_id,
            num_tokens=known,
        )
    )  # fmt: skip


def go_on_at(pair: Pair, sequence_id: int, position: int, *, slot: int = 0, trail_id: bytes = TRAIL) -> None:
    """Compute the row at a position, as the first of a run."""
    start = make_start(names=NAMES, trail_id=trail_id)
    pair.send(make_step(950, [make_row(sequence_id, slot=slot, position=position, start=start)], [17]))


def test_a_prompt_in_chunks_and_single_steps(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, count=5)


def test_two_sequences_in_one_batch_one_of_which_ends(open_pair: Open) -> None:
    pair = open_pair()
    rows = [make_row(1, num_tokens=20, slot=0), make_row(2, num_tokens=20, slot=2)]
    pair.send(make_step(1, rows, [*SHORT, *SHORT]))
    pair.send(make_cancel((2, 2)))

    rows = [make_row(1, slot=0, position=20), make_row(2, slot=2, position=20)]
    pair.send(make_step(2, rows, [11, 12]))


def test_a_burst(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, burst_steps=7)
    decode(pair, count=2)


def test_a_burst_that_a_stop_token_ends(open_pair: Open) -> None:
    pair = open_pair()
    row = make_row(1, num_tokens=20, start=make_start(stop_ids=range(288)))
    pair.send(make_step(1, [row], SHORT, burst_steps=5))


def test_a_burst_whose_sequence_is_cancelled_meanwhile(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair, prompt=SHORT)

    def cancel_amid(one: Chain) -> None:
        newest = one.newest(1)
        row = make_row(1, position=newest.position)
        one.send(make_step(2, [row], [newest.token_id], burst_steps=9), make_cancel((1, 0)))

    pair.do(cancel_amid)


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_frames_of_other_epochs(open_pair: Open, epoch: int) -> None:
    pair = open_pair()
    prefill(pair, prompt=SHORT)
    frames = [
        make_step(2, [make_row(1, position=20)], [11]),
        make_cancel((1, 0)),
        make_restore(2, NAMES, slot=1),
        make_step(3, [make_row(2, num_tokens=20, slot=1)], SHORT),
    ]
    for frame in frames:
        frame.epoch = epoch
        pair.send(frame)

    assert all(held == {0: 20} for held in pair.real.held())


def test_a_cancel_of_a_run_that_is_over(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair, prompt=SHORT)
    pair.send(make_cancel((1, 0)))
    prefill(pair, 2, SHORT)
    pair.send(make_cancel((1, 0)))
    pair.send(make_cancel((9, 3)))
    pair.send(make_step(9, [make_row(1, position=20)], [11]))


def test_a_slot_is_filled_with_blocks_that_an_earlier_prompt_left(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    pair.send(make_cancel((1, 0)))
    pair.send(make_restore(2, NAMES, slot=1))
    prefill(pair, 2, slot=1, begin=128)
    decode(pair, 2, slot=1)


def test_a_slot_is_filled_with_nothing(open_pair: Open) -> None:
    pair = open_pair()
    pair.send(make_restore(1, NAMES))
    prefill(pair)


@pytest.mark.parametrize("timeout_ms", [0.0, FETCH_MS])
def test_blocks_come_from_the_tier_below_if_there_is_time(open_pair: Open, timeout_ms: float) -> None:
    pair = open_pair()
    prefill(pair)
    pair.send(make_cancel((1, 0)))
    pair.do(lambda one: one.replace(0))
    pair.send(make_restore(2, NAMES, slot=1, fetch_timeout_ms=timeout_ms))


def test_a_restore_that_nobody_waits_for_any_more(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    pair.send(make_cancel((1, 0)))
    pair.do(lambda one: one.replace(0))
    pair.do(lambda one: one.send(make_restore(2, NAMES, fetch_timeout_ms=FETCH_MS), make_cancel((2, 0))))
    prefill(pair, 3, SHORT)


def test_forgotten_blocks_are_not_found(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    pair.send(make_cancel((1, 0)))
    pair.send(make_frame(forget_blocks=flow_pb2.ForgetBlocks(block_hashes=NAMES[1:])))
    pair.send(make_restore(2, NAMES))


def test_segments_are_written_as_an_answer_grows_and_deleted_with_it(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, count=40)
    assert pair.real.trails()
    pair.send(make_cancel((1, 0)))

    assert not pair.real.trails()


def test_the_rest_of_a_trail_is_written_when_its_sequence_goes_on_later(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, count=5)
    pair.send(make_cancel((1, 0), will_resume=True))
    resume(pair, 2, 155)
    go_on_at(pair, 2, 155)
    decode(pair, 2, count=30)


def test_what_is_retained_is_used_without_copying(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, count=10)
    pair.do(lambda one: one.rebase())
    pair.send(make_step(5, [make_row(1, position=160)], [11]))
    resume(pair, 1, 158)
    go_on_at(pair, 1, 158)
    decode(pair, count=25)


def test_nothing_is_retained_of_a_sequence_without_a_trail(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair, trail_id=b"")
    pair.do(lambda one: one.rebase())
    resume(pair, 1, 149)


@pytest.mark.parametrize("asks", [True, False])
def test_a_retained_slot_is_lost_to_another_sequence(open_pair: Open, asks: bool) -> None:
    pair = open_pair()
    prefill(pair)
    pair.do(lambda one: one.rebase())
    if asks:
        resume(pair, 7, 149, trail_id=OTHER_TRAIL)
    prefill(pair, 7, SHORT, trail_id=OTHER_TRAIL)
    resume(pair, 8, 149, slot=1)


@pytest.mark.parametrize("stage", [0, -1])
def test_a_stage_that_was_replaced_reads_the_trail(open_pair: Open, stage: int) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, count=40)
    pair.do(lambda one: one.replace(stage))
    pair.do(lambda one: one.rebase())
    resume(pair, 1, 189)
    # 128 of blocks, and behind them 48 of segments.
    go_on_at(pair, 1, 176)
    decode(pair, count=20)


def test_a_stage_that_was_replaced_finds_nothing_in_the_tier_below(open_pair: Open) -> None:
    pair = open_pair()
    prefill(pair)
    decode(pair, count=40)
    pair.do(lambda one: one.flush())
    pair.do(lambda one: one.replace(-1))
    pair.do(lambda one: one.rebase())
    resume(pair, 1, 189)
    prefill(pair)


def test_retained_slots_make_room(open_pair: Open) -> None:
    pair = open_pair(kv_tokens=320)
    prefill(pair)
    prefill(pair, 2, SHORT, slot=1, trail_id=OTHER_TRAIL)
    pair.do(lambda one: one.rebase())
    prefill(pair, 3, slot=2, trail_id=b"")
    prefill(pair, 4, make_tokens(120, 280, seed=3), slot=3, trail_id=b"")


@pytest.mark.parametrize("seed", range(20))
def test_any_frames_that_an_orchestrator_may_send(open_pair: Open, seed: int) -> None:
    Script(open_pair(), Random(seed)).play(25)


class Script:
    """Frames as an orchestrator would send them, drawn at random. runs: by slot, with how many tokens are computed."""

    def __init__(self, pair: Pair, random: Random) -> None:
        self._pair = pair
        self._random = random
        self._runs: dict[int, int] = {}
        self._num_runs = 0

    def play(self, num_acts: int) -> None:
        acts = [self._start, self._start, self._decode, self._decode, self._decode, self._end, self._rebase, self._lose]
        for _ in range(num_acts):
            self._random.choice(acts)()

    def _start(self) -> None:
        """Begin a run in a free slot, whose sequence may have run before in it, or in another."""
        free = [slot for slot in range(4) if slot not in self._runs]
        if not free:
            return
        slot, self._num_runs = self._random.choice(free), self._num_runs + 1
        run_id, trail_id = self._num_runs, bytes([self._random.randrange(4)]) * 16
        self._runs[slot] = run_id
        if self._random.random() < 0.7:
            resume(self._pair, run_id, self._random.randint(150, 200), slot=slot, trail_id=trail_id)
            restored = self._pair.restored()
            if restored.num_tokens >= len(PROMPT):
                go_on_at(self._pair, run_id, restored.num_tokens, slot=slot, trail_id=trail_id)
            else:
                prefill(self._pair, run_id, slot=slot, begin=64 * restored.num_blocks, trail_id=trail_id)
        else:
            prefill(self._pair, run_id, slot=slot, trail_id=trail_id)

    def _decode(self) -> None:
        if self._runs:
            slot = self._random.choice(list(self._runs))
            burst_steps = self._random.choice((0, 0, 3, 9))
            newest = self._pair.real.newest(self._runs[slot])
            if newest.position + burst_steps < 250:
                decode(self._pair, self._runs[slot], slot=slot, burst_steps=burst_steps)

    def _end(self) -> None:
        if self._runs:
            slot = self._random.choice(list(self._runs))
            self._pair.send(make_cancel((self._runs.pop(slot), slot), will_resume=self._random.random() < 0.5))

    def _rebase(self) -> None:
        self._runs.clear()
        self._pair.do(lambda one: one.rebase())

    def _lose(self) -> None:
        stage = self._random.choice((0, -1))
        self._runs.clear()
        if self._random.random() < 0.3:
            self._pair.do(lambda one: one.flush())
        self._pair.do(lambda one: one.replace(stage))
        self._pair.do(lambda one: one.rebase())
