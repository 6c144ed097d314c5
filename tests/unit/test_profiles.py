"""Device profiles: those shipped, a user's own, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.profiles import Machine, load_profile, measure_machine, shipped_names
from shoal.errors import ConfigError
from shoal.types import DeviceProfile, LinkProfile
from worker.emulation import LinkShaper, SlowDown

SMALLEST = 'name = "mine"\nkind = "box"\nmemory_mib = 10\n'


def small_machine() -> Machine:
    return Machine(available_bytes=1_000_000, num_cores=3)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(folder: Path, text: str) -> DeviceProfile:
    return load_profile(write(folder, text), small_machine)


def test_the_shipped_profiles_are_listed() -> None:
    assert shipped_names() == ("host", "laptop", "phone", "tablet")


@pytest.mark.parametrize("name", ["host", "laptop", "phone", "tablet"])
def test_every_shipped_profile_loads_under_its_name_and_can_be_emulated(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == profile.kind == name
    assert profile.is_emulated == (name != "host")
    SlowDown(profile.speed)
    LinkShaper(profile.link)


def test_a_phone_is_smaller_and_slower_than_a_tablet_and_a_tablet_than_a_laptop() -> None:
    phone, tablet, laptop = (load_profile(name) for name in ("phone", "tablet", "laptop"))
    assert phone.memory_bytes < tablet.memory_bytes < laptop.memory_bytes
    assert phone.speed < tablet.speed < laptop.speed
    assert phone.max_batch < tablet.max_batch < laptop.max_batch


def test_the_host_has_a_share_of_the_free_memory_and_all_cores() -> None:
    profile = load_profile("host", small_machine)
    assert (profile.memory_bytes, profile.num_threads) == (800_000, 3)


def test_the_machine_is_only_measured_if_a_profile_leaves_something_to_it() -> None:
    def refuse() -> Machine:
        raise AssertionError("measured")

    assert load_profile("phone", refuse).memory_bytes == 700 * 2**20


def test_this_machine_has_memory_and_cores() -> None:
    machine = measure_machine()
    assert machine.available_bytes > 0
    assert machine.num_cores >= 1


def test_a_users_file_sets_every_field(tmp_path: Path) -> None:
    text = (
        SMALLEST + "speed = 0.25\nthreads = 2\nmax_batch = 4\nallow_direct_links = false\nemulated = true\n"
        "[link]\ndelay_ms = 5\nrate_mbit_s = 20\n"
    )
    assert load(tmp_path, text) == DeviceProfile(
        name="mine",
        kind="box",
        memory_bytes=10 * 2**20,
        speed=0.25,
        num_threads=2,
        max_batch=4,
        allow_direct_links=False,
        link=LinkProfile(5.0, 20.0),
        is_emulated=True,
    )


def test_what_a_users_file_leaves_out_has_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, SMALLEST) == DeviceProfile(name="mine", kind="box", memory_bytes=10 * 2**20)


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"no device profile 'fridge'; shipped are host, laptop, phone, tablet"):
        load_profile("fridge")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no device profile '.*gone\.toml'"):
        load_profile(str(tmp_path / "gone.toml"))


def test_a_directory_is_not_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(f"{tmp_path}/")


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml: not valid TOML: .*line 4"):
        load(tmp_path, SMALLEST + "speed = fast\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("speed = 0", "speed = 0 is not allowed; it must be a number above 0"),
        ("speed = nan", "speed = nan is not allowed"),
        ('speed = "fast"', "speed = 'fast' is not allowed"),
        ("threads = -1", "threads = -1 is not allowed; it must be a whole number, or 0"),
        ("threads = true", "threads = true is not allowed"),
        ("max_batch = 0", "max_batch = 0 is not allowed; it must be a whole number from 1"),
        ('allow_direct_links = "no"', "allow_direct_links = 'no' is not allowed; it must be true or false"),
        ("colour = 1", "colour is not a field of a profile; fields are name, kind, memory_mib"),
        ("link = 5", "link must be a table"),
        ("[link]\ndelay_ms = -1", r"link\.delay_ms = -1 is not allowed; it must be a number of milliseconds from 0"),
        ("[link]\njitter = 1", r"link\.jitter is not a field of a profile; fields are delay_ms, rate_mbit_s"),
        ("speed = 1.5\nemulated = true", "speed = 1.5 cannot be emulated"),
        ("[link]\ndelay_ms = 3", "link limits are kept by emulation only"),
    ],
)
def test_a_wrong_field_is_refused_with_what_is_allowed(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml: " + message):
        load(tmp_path, SMALLEST + line + "\n")


@pytest.mark.parametrize("field", ["name", "kind", "memory_mib"])
def test_a_required_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    text = "".join(line for line in SMALLEST.splitlines(keepends=True) if not line.startswith(field))
    with pytest.raises(ConfigError, match=f"{field} is missing"):
        load(tmp_path, text)


def test_an_unknown_kind_lists_the_kinds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kind = 'toaster' is not allowed; it must be one of phone, tablet"):
        load(tmp_path, SMALLEST.replace("box", "toaster"))
