"""Plays seeds of the simulated fleet by hand:

python -m tests.simulation.run --seeds 20000 --first 1
python -m tests.simulation.run --seed 1234 --trace
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path

from modelstore.manifest import Manifest
from tests.simulation.layers import NUM_LAYERS
from tests.simulation.world import World
from tests.support.shards import make_tiny_model

# The end of a trace is what explains a failure.
TRACE_LINES = 120


@functools.cache
def tiny_manifest() -> Manifest:
    """Of a model with as many layers as the simulated one; nothing of it is computed."""
    with tempfile.TemporaryDirectory() as folder:
        return make_tiny_model(Path(folder), num_layers=NUM_LAYERS).manifest


def replay_command(seed: int) -> str:
    return f"python -m tests.simulation.run --seed {seed} --trace"


def play(seed: int, *, is_tracing: bool = False) -> World:
    """Play a seed. Raises AssertionError that says how to see it again."""
    world = World(seed, tiny_manifest(), is_tracing=is_tracing)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"seed {seed} failed; see it again with:  {replay_command(seed)}")
        if is_tracing:
            error.add_note("\n".join(["the last of what happened:", *world.trace[-TRACE_LINES:]]))
        raise
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description="Play seeds of the simulated fleet.")
    parser.add_argument("--seeds", type=int, default=200, help="how many to play")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", action="store_true", help="show what happens")
    args = parser.parse_args()
    if args.seed is not None:
        return _play_one(args.seed, is_tracing=args.trace)
    failed, began_at = [], time.perf_counter()
    for seed in range(args.first, args.first + args.seeds):
        try:
            play(seed)
        except Exception as error:  # noqa: BLE001 - every seed is played
            failed.append(seed)
            _tell(f"{seed}: {type(error).__name__}: {str(error)[:300]}\n    {replay_command(seed)}")
    _tell(f"{args.seeds} seeds, {len(failed)} failed, {time.perf_counter() - began_at:.1f} s")
    return 1 if failed else 0


def _play_one(seed: int, *, is_tracing: bool) -> int:
    world = World(seed, tiny_manifest(), is_tracing=is_tracing)
    try:
        world.run()
    finally:
        _tell("\n".join(world.trace))
    _tell(f"seed {seed}: {world.num_events} events, {len(world.requests)} requests, {world.num_refused} refusals")
    return 0


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
