"""What a device asks of a Ray node, by the operator's file or without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.profiles import Machine, load_profile
from launch.ray_nodes import EMULATED_CPUS, NodeMap, NodeWish, load_map
from launch.roster import Device
from shoal.errors import ConfigError

MIB = 2**20
TABLET = Device(replace(load_profile("tablet"), memory_bytes=900 * MIB), "tablet")


def write(folder: Path, text: str) -> Path:
    path = folder / "map.toml"
    path.write_text(text)
    return path


def test_without_a_file_an_emulated_device_asks_for_its_memory_and_a_part_of_a_processor() -> None:
    assert load_map(None).wish(TABLET) == NodeWish(cpus=EMULATED_CPUS, memory_bytes=900 * MIB)


def test_a_machine_of_its_own_asks_for_its_processors_and_no_memory_that_was_looked_up_here() -> None:
    host = Device(load_profile("host", lambda: Machine(available_bytes=8 * 2**30, num_cores=4)), "host")

    assert NodeMap({}).wish(host) == NodeWish(cpus=4.0)


def test_a_table_of_the_file_goes_before_the_profile(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[tablet]\nresources = { tablet = 1 }\nlabels = { rack = "a" }\ncpus = 2\nmemory_mib = 0\n',
    )

    assert load_map(path).wish(TABLET) == NodeWish({"tablet": 1.0}, {"rack": "a"}, 2.0, 0)


def test_devices_without_a_table_take_the_default_one(tmp_path: Path) -> None:
    wish = load_map(write(tmp_path, "[default]\nresources = { slot = 1 }\n[phone]\ncpus = 1\n")).wish(TABLET)

    assert wish.resources == {"slot": 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tablet]\ncpu = 1\n", "map.toml:2: tablet.cpu is not a field"),
        ("[tablet]\ncpus = -1\n", "map.toml:2: tablet.cpus = -1 is not allowed"),
        ("[tablet]\nresources = { tablet = 0 }\n", "map.toml:2: tablet.resources"),
        ("[tablet]\nlabels = { rack = 1 }\n", "map.toml:2: tablet.labels"),
        ("tablet = 1\n", "map.toml:1: tablet is not a table"),
        ("[tablet\n", "map.toml:1: not valid TOML"),
    ],
)
def test_a_fault_of_the_file_is_told_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_map(write(tmp_path, text))

    assert said in refused.value.message


def test_a_wish_reads_as_an_operator_would_say_it() -> None:
    assert str(NodeWish({"tablet": 1.0}, {"rack": "a"}, 0.25, 64 * MIB)) == "1 tablet, label rack=a, 0.25 CPUs, 64 MiB"
