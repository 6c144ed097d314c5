"""Faults in a running lab, each in mid-stream: a phone killed, a tablet frozen, a class of links cut, Redis restarted.

`python -m tests.lab.chaos` disturbs the lab that `make lab-up` started, and prints what was lost, what differed from
undisturbed answers, and how long streams stood still. After each fault all is as before. Exit code 1 if anything was lost
or differed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from launch.compose import DEVICES, ORCHESTRATOR, ComposeLab, address
from shoal.client import AsyncClient, Client
from shoal.errors import ShoalError
from shoal.status import FleetStatus
from tests.chaos.losses import Stream, differences, make_streams, read_stream
from tests.chaos.run import percentile

ADDRESS = address()
NUM_STREAMS, NUM_TOKENS, AFTER_TOKENS = 6, 80, 16
ANSWER_S, WHOLE_S, LOOK_S = 180.0, 120.0, 0.2
# Longer than the orchestrator takes to tell those who stand by what to fetch.
SETTLED_S = 7.0
# They have slow links.
FETCH_S = 30.0
ROOT = Path(__file__).parents[2]
# Of a device that is killed: one that is silent, since it is frozen or cut off, is only missed by a ping after as long.
TARGET_GAP_S = 1.5
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to the lab, and how it is undone once the answers are there."""

    name: str
    hit: Callable[[], None]
    mend: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a fault.

    wrong: what is not as undisturbed. noticed_s: from the last token before a device was missed until it was; repaired_s:
    from then on until a pipeline served again; None where nobody was lost. gaps_s: the longest of each stream after the
    fault. whole_s: until all was as before. had_standby: a device stood by that had fetched what it would take over.
    """

    fault: str
    wrong: tuple[str, ...]
    noticed_s: float | None
    repaired_s: float | None
    gaps_s: tuple[float, ...]
    whole_s: float
    had_standby: bool

    def to_text(self) -> str:
        gaps = self.gaps_s or (0.0,)
        got = "; ".join(self.wrong) or "none lost, all identical"
        standby = "" if self.had_standby else " (nobody stood by)"
        lost = "" if self.noticed_s is None else f"noticed after {self.noticed_s:.2f} s, "
        lost += "" if self.repaired_s is None else f"serving {self.repaired_s:.2f} s later; "
        return (
            f"{self.fault}{standby}: {got}; {lost}longest gap of a stream: median {statistics.median(gaps):.2f} s, "
            f"p95 {percentile(gaps, 0.95):.2f} s, most {max(gaps):.2f} s; whole again after {self.whole_s:.1f} s"
        )


def faults(lab: ComposeLab, status: FleetStatus) -> list[Fault]:
    """On devices that compute, where there are such of the kind."""
    serving = [one.worker_id for one in status.devices if one.layers is not None]

    def one_of(prefix: str) -> str:
        of_kind = [one for one in DEVICES if one.startswith(prefix)]
        return next((one for one in of_kind if one in serving), of_kind[0])

    phone, tablet = one_of("phone"), one_of("tablet")
    cut = next((network for network in ("ethernet", "wifi") if any(DEVICES[one] == network for one in serving)), "wifi")
    return [
        Fault(f"{phone} killed", lambda: lab.kill(phone), lambda: lab.start(phone)),
        Fault(f"{tablet} frozen", lambda: lab.pause(tablet), lambda: lab.unpause(tablet)),
        Fault(
            f"{cut} cut off",
            lambda: lab.disconnect(ORCHESTRATOR, cut),
            lambda: lab.connect(ORCHESTRATOR, cut),
        ),
        Fault("redis restarted", lambda: lab.restart("redis"), lambda: None),
    ]


def answer(streams: Sequence[Stream], disturb: Callable[[], None] = lambda: None) -> float:
    """Read all streams; disturb once each has some tokens. Returns when that was, by the clock of the streams."""

    async def run() -> float:
        async with AsyncClient(ADDRESS, timeout_s=ANSWER_S) as client:
            reading = [asyncio.create_task(read_stream(client, one)) for one in streams]
            while min(len(one.token_ids) for one in streams) < AFTER_TOKENS and not any(one.done() for one in reading):
                await asyncio.sleep(0.01)
            hit_at = time.perf_counter()
            await asyncio.to_thread(disturb)
            await asyncio.gather(*reading)
            return hit_at

    return asyncio.run(run())


def wait_whole(timeout_s: float = WHOLE_S) -> FleetStatus:
    """Wait until all devices are there and what they hold serves, and a while for who stands by to fetch what it may need.

    Ends the program if they are not there in time.
    """
    deadline = since = time.monotonic()
    deadline += timeout_s
    before: object = None
    seen = "nothing answers"
    while (now := time.monotonic()) < deadline:
        try:
            with Client(ADDRESS, timeout_s=2.0) as client:
                status = client.status()
        except ShoalError as error:
            seen, before = error.message, None
        else:
            seen = status.waiting_for or str({one.worker_id: one.state for one in status.devices})
            layers = [(one.worker_id, one.layers) for one in status.devices]
            if not _is_whole(status) or layers != before:
                since, before = now, layers
            elif now - since > (SETTLED_S if _has_fetched(status) else FETCH_S):
                return status
        time.sleep(LOOK_S)
    sys.exit(f"the lab is not whole after {timeout_s:.0f} s: {seen}")


def _is_whole(status: FleetStatus) -> bool:
    states = {one.worker_id: one.state for one in status.devices}
    is_there = set(states) == set(DEVICES) and {*states.values()} <= {"ready", "standby"}
    return is_there and status.is_complete


def _has_fetched(status: FleetStatus) -> bool:
    """Whether who stands by has what it would take over."""
    return all(one.prefetched_bytes >= one.prefetch_bytes for one in status.devices)


def lost_and_served(log: str, since: float) -> tuple[float | None, float | None]:
    """When, in seconds since 1970, an orchestrator's log first says that a pipeline was lost, and when one served again.

    Of what was logged after `since`. Of several losses, one after the other, what serves after the last counts.
    """
    lost_at = served_at = None
    for line in log.splitlines():
        if not (found := STAMP.match(line)) or (at := _seconds(found[1])) < since:
            continue
        if "pipeline_lost" in line:
            lost_at, served_at = lost_at or at, None
        elif " serving " in line and lost_at is not None:
            served_at = served_at or at
    return lost_at, served_at


def _seconds(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp()


def noticed_after(streams: Sequence[Stream], lost_at: float) -> float:
    """From the last token of any stream before a pipeline was lost until it was."""
    to_wall_s = time.time() - time.perf_counter()
    before = [at + to_wall_s for one in streams for at in one.token_at if at + to_wall_s < lost_at]
    return lost_at - max(before, default=lost_at)


def suffer(lab: ComposeLab, number: int, expected: Sequence[Stream]) -> Outcome:
    """Let the fault of that number happen in mid-stream, and undo it."""
    status = wait_whole()
    fault = faults(lab, status)[number]
    had_standby = any(one.layers is None for one in status.devices) and _has_fetched(status)
    streams = make_streams(len(expected), NUM_TOKENS)
    since = time.time()
    try:
        hit_at = answer(streams, fault.hit)
    finally:
        mended_at = time.monotonic()
        log = lab.logs(ORCHESTRATOR)
        fault.mend()
    wait_whole()
    lost_at, served_at = lost_and_served(log, since)
    noticed_s = None if lost_at is None else noticed_after(streams, lost_at)
    repaired_s = None if lost_at is None or served_at is None else served_at - lost_at
    gaps = (one.gap_s(hit_at) for one in streams if one.token_at and one.token_at[-1] > hit_at)
    wrong = tuple(differences(streams, expected))
    whole_s = time.monotonic() - mended_at
    return Outcome(fault.name, wrong, noticed_s, repaired_s, tuple(gaps), whole_s, had_standby)


def run(lab: ComposeLab) -> bool:
    """Let all faults happen, one after the other, and print what came of each; whether nothing was lost or different."""
    wait_whole()
    expected = make_streams(NUM_STREAMS, NUM_TOKENS)
    answer(expected)
    problems = [one.problem for one in expected if one.problem]
    if problems:
        sys.exit(f"without any fault: {problems}")
    outcomes = []
    for number in range(len(faults(lab, wait_whole()))):
        outcomes.append(suffer(lab, number, expected))
        sys.stdout.write(f"{outcomes[-1].to_text()}\n")
        sys.stdout.flush()
    gaps = [gap for one in outcomes if "killed" in one.fault for gap in one.gaps_s]
    if gaps:
        p95_s = percentile(gaps, 0.95)
        verdict = "met" if p95_s <= TARGET_GAP_S else "missed"
        sys.stdout.write(f"killed: gap p95 {p95_s:.2f} s (target {TARGET_GAP_S} s: {verdict})\n")
    return not any(one.wrong for one in outcomes)


def main() -> None:
    argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=__doc__).parse_args()
    try:
        lab = ComposeLab(ROOT)
        lab.container(ORCHESTRATOR)
        is_sound = run(lab)
    except ShoalError as error:
        sys.exit(f"error: {error.message}")
    sys.exit(0 if is_sound else 1)


if __name__ == "__main__":
    main()
