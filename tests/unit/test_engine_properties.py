"""Whatever happens to pipelines and requests, every answer that is not ended by force is delivered whole, once, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.answer import Answer
from orchestrator.core.limits import Pace
from orchestrator.engine import MAX_VAIN_RECOVERIES
from shoal.errors import NotReady, Overloaded
from shoal.types import DeviceMode, FinishReason, NumericClass, PipelineId, QosClass
from tests.support.builders import make_sequence, with_blocks
from tests.support.lanes import FALLBACK_S, LOST, P1, P2, P3, Harness, Stages, delivered, expected_answer

PIPELINE_IDS = (P1, P2, P3)
CLASSES = tuple(QosClass)
MODES = (DeviceMode.MIXED, DeviceMode.LATENCY, DeviceMode.THROUGHPUT)
# What happens, and two numbers that say to whom and how much.
ACTIONS = (
    "submit", "submit", "submit", "compute", "compute", "compute", "abort", "lose", "come", "pass_time", "pace", "evict",
)  # fmt: skip
Action = tuple[str, int, int]
actions = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99), st.integers(0, 99)), max_size=60)
# A busy machine is no fault of the code.
unhurried = settings(deadline=None, max_examples=150)


class World:
    """An engine with up to three pipelines, and what each request has been delivered; trails outlive pipelines."""

    def __init__(self) -> None:
        self.harness = Harness(num_slots=2, burst_steps=4)
        self.stages: dict[PipelineId, Stages] = {P1: self.harness.p1}
        self.trails = self.harness.p1.model.trails
        self.requests: list[tuple[Answer, int, int]] = []
        self.got: list[list[int]] = []
        self.is_aborted: list[bool] = []

    def do(self, action: Action) -> None:
        name, first, second = action
        acts: dict[str, Callable[[int, int], None]] = {
            "submit": self._submit,
            "compute": self._compute,
            "abort": self._abort,
            "lose": self._lose,
            "come": self._come,
            "pass_time": self._pass_time,
            "pace": self._pace,
            "evict": self._evict,
        }
        acts[name](first, second)
        self.read()
        self.harness.engine.check_invariants()
        for stages in self.stages.values():
            stages.lane.scheduler.check_invariants()

    def _submit(self, first: int, second: int) -> None:
        # Their prompts begin alike, and a third of them has blocks that are kept.
        qos, num_prompt, max_tokens = CLASSES[first % 3], 2 + second % 40 + 70 * (second % 3), 1 + first % 19
        sequence = with_blocks(make_sequence(num_prompt=num_prompt), num_stored=first % 2)
        numeric = NumericClass.SOLO if qos is QosClass.LATENCY else NumericClass.SHARED
        try:
            answer = self.harness.submit(
                len(self.requests) + 1, num_prompt=num_prompt, max_tokens=max_tokens, qos=qos, numeric=numeric,
                tenant=f"tenant {second % 2}", arrived_at=self.harness.clock.now(),
                block_hashes=sequence.block_hashes, num_stored_blocks=sequence.num_stored_blocks,
            )  # fmt: skip
        except (NotReady, Overloaded):
            return
        self.requests.append((answer, num_prompt, max_tokens))
        self.got.append([])
        self.is_aborted.append(False)

    def _compute(self, first: int, second: int) -> None:
        stages = list(self.stages.values())
        if stages:
            stages[first % len(stages)].compute(1 + second % 5)

    def _abort(self, first: int, _: int) -> None:
        if self.requests:
            index = first % len(self.requests)
            self.harness.engine.abort(self.requests[index][0].sequence.sequence_id)
            self.read()
            self.is_aborted[index] = len(self.got[index]) < self.requests[index][2]

    def _lose(self, first: int, second: int) -> None:
        """Lose a pipeline that is up, maybe the only one."""
        if self.stages:
            lost = list(self.stages)[first % len(self.stages)]
            del self.stages[lost]
            self.harness.engine.pipeline_down(lost, LOST)

    def _come(self, first: int, second: int) -> None:
        missing = [one for one in PIPELINE_IDS if one not in self.stages]
        for pipeline_id in missing[: 1 + second % 2]:
            mode = MODES[second % 3]
            stages = Stages(
                self.harness.engine, pipeline_id, mode=mode, num_slots=1 + first % 3, num_stages=1 + second % 2,
                epoch=1 + len(self.got),
            )  # fmt: skip
            stages.model.trails = self.trails
            self.stages[pipeline_id] = stages
            self.harness.engine.pipeline_up(stages.pipeline, FALLBACK_S)

    def _pass_time(self, tenths: int, second: int) -> None:
        """Nobody is parked for longer than is waited for a pipeline."""
        if not self.stages:
            self._come(tenths, second)
        self.harness.clock.move_to(self.harness.clock.now() + tenths / 10)

    def _pace(self, first: int, second: int) -> None:
        if not self.stages:
            return
        stages = list(self.stages.values())[first % len(self.stages)]
        pace = Pace(1 + second % 8, float(second % 3) * 5)
        self.harness.engine.set_pace(stages.pipeline.pipeline_id, pace)

    def _evict(self, first: int, second: int) -> None:
        """Stages lose blocks and trails, or report less than they hold."""
        if not self.stages:
            return
        model = list(self.stages.values())[first % len(self.stages)].model
        for name in list(model.kept)[:: 1 + second % 3]:
            del model.kept[name]
        model.max_blocks = (0, 1, 1000)[second % 3]
        model.trail_lag = second % 7
        for name in list(self.trails)[:: 1 + first % 4]:
            del self.trails[name]

    def read(self) -> None:
        for (answer, _, max_tokens), got in zip(self.requests, self.got, strict=True):
            for event in delivered(answer):
                assert event.index == len(got), "a token twice, or one left out"
                got.append(event.token_id)
                assert (event.finish is FinishReason.LENGTH) == (len(got) == max_tokens)

    def finish(self) -> None:
        """Let everything come to its end, with all devices cool."""
        if not self.stages:
            self._come(0, 0)
        for stages in self.stages.values():
            self.harness.engine.set_pace(stages.pipeline.pipeline_id, Pace(stages.pipeline.limits.max_batch))
        for _ in range(200):
            for stages in self.stages.values():
                stages.compute_all()
            self.harness.clock.move_to(self.harness.clock.now() + 1.0)
        self.read()


@unhurried
@given(actions)
def test_every_answer_is_delivered_whole_and_once_whatever_happens(script: Sequence[Action]) -> None:
    world = World()
    for action in script:
        world.do(action)
    world.finish()

    assert world.harness.engine.is_idle
    for (_, num_prompt, max_tokens), got, is_aborted in zip(world.requests, world.got, world.is_aborted, strict=True):
        expected = expected_answer(num_prompt, max_tokens)
        assert got == expected[: len(got)]
        assert is_aborted or got == expected
    assert all(one.sequence.num_vain_recoveries <= MAX_VAIN_RECOVERIES for one, _, _ in world.requests)
    assert all(stages.lane.scheduler.num_replay_mismatches == 0 for stages in world.stages.values())
