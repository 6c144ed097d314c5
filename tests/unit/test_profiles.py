"""Device profiles: those shipped, a user's own, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.profiles import KINDS, SHIPPED, Machine, load_profile, measure_machine
from shoal.errors import ConfigError
from shoal.types import BatteryModel, DeviceLimits, DeviceMode, DeviceProfile, KVPolicy, LinkProfile, ThermalModel
from worker.emulation import EmulatedDevice, LinkShaper, temperature_after

SMALLEST = 'name = "mine"\nkind = "box"\nmemory_mib = 10\n'


EMULATED = [name for name in SHIPPED.names() if name != "host"]


def small_machine() -> Machine:
    return Machine(available_bytes=1_000_000, num_cores=3)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(folder: Path, text: str) -> DeviceProfile:
    return load_profile(write(folder, text), small_machine)


def test_the_shipped_profiles_are_listed() -> None:
    assert SHIPPED.names() == ("edge-box", "flagship-phone", "host", "laptop", "phone", "sbc", "tablet")


@pytest.mark.parametrize("name", SHIPPED.names())
def test_every_shipped_profile_loads_under_its_name_and_can_be_emulated(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.kind in KINDS
    assert profile.is_emulated == (name != "host")
    EmulatedDevice(profile, now=0.0)
    LinkShaper(profile.link)


def test_a_phone_is_smaller_and_slower_than_a_tablet_and_a_tablet_than_a_laptop() -> None:
    phone, tablet, laptop = (load_profile(name) for name in ("phone", "tablet", "laptop"))
    assert phone.memory_bytes < tablet.memory_bytes < laptop.memory_bytes
    assert phone.speed < tablet.speed < laptop.speed
    assert phone.max_batch < tablet.max_batch < laptop.max_batch


def test_a_flagship_phone_is_larger_and_faster_than_a_mid_range_one_and_on_the_same_kind_of_link() -> None:
    flagship, phone = load_profile("flagship-phone"), load_profile("phone")
    assert flagship.kind == phone.kind
    assert flagship.memory_bytes > phone.memory_bytes
    assert flagship.speed > phone.speed
    assert flagship.max_batch > phone.max_batch
    assert flagship.battery.capacity_wh > phone.battery.capacity_wh


def test_the_unequal_fleet_has_most_memory_where_it_is_slowest() -> None:
    devices = [load_profile(name) for name in ("flagship-phone", "phone", "sbc")]
    slowest = min(devices, key=lambda one: one.speed)
    assert slowest.shard_bytes == max(one.shard_bytes for one in devices)
    assert max(one.speed for one in devices) > 3 * slowest.speed


@pytest.mark.parametrize("name", ["sbc", "edge-box"])
def test_a_device_on_mains_power_and_a_wire_has_no_battery_and_a_short_link(name: str) -> None:
    profile = load_profile(name)
    assert profile.battery.capacity_wh == 0.0
    assert profile.limits.low_battery_percent == 0.0
    assert profile.link.delay_ms < load_profile("phone").link.delay_ms


@pytest.mark.parametrize("name", EMULATED)
def test_the_limits_of_shipped_devices_come_before_the_heat_they_would_end_at_or_are_never_met(name: str) -> None:
    profile = load_profile(name)
    ends_at = temperature_after(profile.thermal, profile.thermal.ambient_c, 1.0, 1e6)
    limits = profile.limits
    assert ends_at > limits.critical_c or ends_at < limits.moderate_c


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
        SMALLEST + 'host_kv_mib = 3\nkv_policy = "balanced"\n'
        "speed = 0.25\nthreads = 2\nmax_batch = 4\npoll_ms = 3\nallow_direct_links = false\nemulated = true\n"
        'mode = "throughput"\n[fallback]\ntimeout_ms = 50\n[link]\ndelay_ms = 5\nrate_mbit_s = 20\n'
        "[limits]\nmoderate_c = 50\nhot_c = 60\ncritical_c = 70\nlow_battery_percent = 30\n"
        "critical_battery_percent = 5\nbusy_load = 1\nmax_batch = [4, 4, 2, 1]\nsteps_per_s = [0, 0, 4.5, 1]\n"
        "[thermal]\nambient_c = -5\nheat_c_per_s = 1\ncooling_per_s = 0.5\n"
        "[battery]\ncapacity_wh = 12\nstart_percent = 50\nactive_w = 3\nidle_w = 0\n"
    )
    assert load(tmp_path, text) == DeviceProfile(
        name="mine",
        kind="box",
        memory_bytes=10 * 2**20,
        speed=0.25,
        num_threads=2,
        max_batch=4,
        poll_ms=3.0,
        allow_direct_links=False,
        link=LinkProfile(5.0, 20.0),
        is_emulated=True,
        mode=DeviceMode.THROUGHPUT,
        fallback_timeout_ms=50.0,
        limits=DeviceLimits(50.0, 60.0, 70.0, 30.0, 5.0, 1.0, (4, 4, 2, 1), (0.0, 0.0, 4.5, 1.0)),
        thermal=ThermalModel(-5.0, 1.0, 0.5),
        battery=BatteryModel(12.0, 50.0, 3.0, 0.0),
        host_kv_bytes=3 * 2**20,
        kv_policy=KVPolicy.BALANCED,
    )


def test_what_a_users_file_leaves_out_has_the_defaults(tmp_path: Path) -> None:
    memory_bytes = 10 * 2**20
    assert load(tmp_path, SMALLEST) == DeviceProfile(
        name="mine", kind="box", memory_bytes=memory_bytes, host_kv_bytes=memory_bytes // 10
    )


def test_the_host_keeps_kv_in_a_tenth_of_its_memory_in_whole_mebibytes() -> None:
    profile = load_profile("host", lambda: Machine(available_bytes=1000 * 2**20, num_cores=1))
    assert profile.host_kv_bytes == 80 * 2**20


def test_a_profile_may_say_that_no_kv_is_kept(tmp_path: Path) -> None:
    assert load(tmp_path, SMALLEST + "host_kv_mib = 0\n").host_kv_bytes == 0


def test_kept_kv_must_leave_memory_for_a_shard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml:4: host_kv_mib = 10 is not allowed; .* which is 10 MiB"):
        load(tmp_path, SMALLEST + "host_kv_mib = 10\n")


@pytest.mark.parametrize("name", EMULATED)
def test_shipped_devices_keep_kv_exactly_and_most_of_their_memory_for_shards(name: str) -> None:
    profile = load_profile(name)
    assert profile.kv_policy is KVPolicy.EXACT
    assert 0.85 * profile.memory_bytes < profile.shard_bytes < profile.memory_bytes


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"no device profile 'fridge'; shipped are edge-box, flagship-phone, host, "):
        load_profile("fridge")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no device profile '.*gone\.toml'"):
        load_profile(str(tmp_path / "gone.toml"))


def test_a_directory_is_not_a_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALLEST + "speed = fast\n", r"mine\.toml:4: not valid TOML: .* in: speed = fast"),
        (SMALLEST + "speed = 1\nspeed = 0.5\n", r"mine\.toml:5: not valid TOML: .* in: speed = 0\.5"),
        (SMALLEST + "[link]\n[limits]\n[link]\n", r"mine\.toml:6: not valid TOML: .*link.* twice.* in: \[link\]"),
        (SMALLEST + "[limits]\nmax_batch = [8,\n", r"mine\.toml:6: not valid TOML"),
    ],
    ids=["not a value", "a field given twice", "a table given twice", "not ended"],
)
def test_broken_toml_names_file_line_and_what_is_there(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("speed = 0", "speed = 0 is not allowed; it must be a number from 0.001 to 100"),
        ("speed = 0.0005", r"speed = 0\.0005 is not allowed; it must be a number from 0.001 to 100"),
        ("speed = 101", "speed = 101 is not allowed; it must be a number from 0.001 to 100"),
        ("speed = nan", "speed = nan is not allowed"),
        ('speed = "fast"', "speed = 'fast' is not allowed"),
        ("threads = -1", "threads = -1 is not allowed; it must be a whole number, or 0"),
        ("threads = true", "threads = true is not allowed"),
        ("threads = 1.0", r"threads = 1\.0 is not allowed; it must be a whole number"),
        ("max_batch = 0", "max_batch = 0 is not allowed; it must be a whole number from 1"),
        ('allow_direct_links = "no"', "allow_direct_links = 'no' is not allowed; it must be true or false"),
        ("host_kv_mib = 1.5", r"host_kv_mib = 1\.5 is not allowed; it must be a whole number of MiB"),
        ('kv_policy = "small"', "kv_policy = 'small' is not allowed; it must be one of exact, balanced, compact"),
        ('mode = "fast"', "mode = 'fast' is not allowed; it must be one of mixed, latency, throughput"),
        ("colour = 1", "colour is not a field of a profile; fields are name, kind, mode, memory_mib"),
        ("hot_c = 1", r"hot_c is not a field of a profile; .*\(hot_c belongs in \[limits\]\)"),
        ("link = 5", r"link is not a table; it must be a table \[link\] with delay_ms, rate_mbit_s"),
        ("[[thermal]]", "thermal is not a table; it must be a table"),
        ("speed = 1.5\nemulated = true", r"speed = 1\.5 cannot be emulated"),
    ],
)
def test_a_wrong_field_is_refused_with_its_line_and_what_is_allowed(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml:4: " + message):
        load(tmp_path, SMALLEST + line + "\n")


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        ("link", "delay_ms = -1", "delay_ms = -1 is not allowed; it must be a number of milliseconds from 0"),
        ("link", "jitter = 1", r"jitter is not a field of \[link\]; fields are delay_ms, rate_mbit_s"),
        ("link", "speed = 1", r"speed is not a field of \[link\]; .* \(speed belongs before the first table\)"),
        ("fallback", "timeout_ms = 0", "timeout_ms = 0 is not allowed; it must be a number of milliseconds above 0"),
        (
            "limits",
            "moderate_c = 200",
            "moderate_c = 200 is not allowed; it must be a number of degrees Celsius above 0",
        ),
        ("limits", 'hot_c = "warm"', "hot_c = 'warm' is not allowed; it must be a number of degrees"),
        ("limits", "low_battery_percent = 101", "low_battery_percent = 101 is not allowed; .* percent from 0 to 100"),
        ("limits", "busy_load = 50", "busy_load = 50 is not allowed; it must be the share .* up to 1"),
        ("limits", "max_batch = 8", "max_batch = 8 is not allowed; it must be four whole numbers from 1 to 1024"),
        ("limits", "max_batch = [8, 6, 4]", r"max_batch = \[8, 6, 4\] is not allowed; it must be four whole numbers"),
        ("limits", "max_batch = [8, 6, 4, 0]", "max_batch = .* is not allowed"),
        ("limits", "max_batch = [8, 6, 4, true]", "max_batch = .* is not allowed"),
        ("limits", "max_batch = [8, 6, 4, 5]", "max_batch = .* is not allowed; .* none above the one before it"),
        ("limits", "steps_per_s = [0, 12, 6]", "steps_per_s = .* is not allowed; it must be four numbers"),
        ("limits", "steps_per_s = [0, 12, 6, -3]", "steps_per_s = .* is not allowed"),
        ("limits", "steps_per_s = [0, 3, 6, 12]", "steps_per_s = .* is not allowed; .* none above the one before it"),
        ("limits", "steps_per_s = [12, 0, 6, 3]", "steps_per_s = .* is not allowed; .* 0, for no limit, only in front"),
        ("limits", 'steps_per_s = [0, "12", 6, 3]', "steps_per_s = .* is not allowed"),
        (
            "thermal",
            "ambient_c = 61",
            "ambient_c = 61 is not allowed; it must be a number of degrees Celsius from -40 to 60",
        ),
        ("thermal", "cooling_per_s = 0", "cooling_per_s = 0 is not allowed; it must be a number from 0.00001"),
        ("thermal", "heat_c_per_s = inf", "heat_c_per_s = inf is not allowed"),
        ("battery", "start_percent = -1", "start_percent = -1 is not allowed; it must be a number of percent"),
        ("battery", "active_w = false", "active_w = false is not allowed; it must be a number of watts"),
        ("battery", "capacity_wh = -1", "capacity_wh = -1 is not allowed; it must be a number of Wh"),
    ],
)
def test_a_wrong_field_of_a_table_is_refused_with_its_line_and_what_is_allowed(
    tmp_path: Path, table: str, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"mine\.toml:7: {table}\.{message}"):
        load(tmp_path, f"{SMALLEST}emulated = true\n\n[{table}]  # mine\n{line}\n")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "hot_c = 70\nmoderate_c = 70",
            "5: limits.hot_c = 70 is not allowed; it must be above moderate_c, which is 70",
        ),
        (
            "hot_c = 70\ncritical_c = 65.5",
            "6: limits.critical_c = 65.5 is not allowed; it must be above hot_c, which is 70",
        ),
        (
            "moderate_c = 70\ncritical_c = 65",
            "6: limits.critical_c = 65 is not allowed; it must be above moderate_c, which is 70",
        ),
        (
            "critical_battery_percent = 20\nlow_battery_percent = 20",
            "5: limits.critical_battery_percent = 20 is not allowed; it must be below low_battery_percent, which is 20",
        ),
    ],
)
def test_a_worse_state_must_begin_at_a_worse_value(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml:" + message):
        load(tmp_path, f"{SMALLEST}[limits]\n{lines}\n")


def test_thresholds_may_be_left_out_in_between(tmp_path: Path) -> None:
    limits = load(tmp_path, SMALLEST + "[limits]\ncritical_c = 70\ncritical_battery_percent = 5\n").limits

    assert limits == DeviceLimits(critical_c=70.0, critical_battery_percent=5.0)


@pytest.mark.parametrize("line", ["[link]\ndelay_ms = 3", "[thermal]\nheat_c_per_s = 1", "[battery]\ncapacity_wh = 3"])
def test_what_only_emulation_keeps_is_refused_on_a_real_device(tmp_path: Path, line: str) -> None:
    table = line.partition("]")[0].strip("[")
    with pytest.raises(ConfigError, match=rf"mine\.toml:4: {table} is kept by emulation only; set emulated = true"):
        load(tmp_path, SMALLEST + line + "\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[ limits ]\n'hot_c' = -1\n", 5),
        ("limits.moderate_c = 50\nlimits . hot_c = -1\n", 5),
        ("limits = { moderate_c = 50, hot_c = -1 }\n", 4),
        ("[limits]\nmax_batch = [\n  8,\n  6, # hot_c = -1\n  4, 2,\n]\nhot_c = -1\n", 10),
        ('kind2 = """\n[limits]\nhot_c = -1\n"""\n', 4),
        ("\r\n\r\nspeed = -1\r\n", 6),
        ("# speed = -1\nspeed = -1", 5),
    ],
)
def test_the_line_is_found_however_a_field_is_written(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"mine\.toml:{line}: "):
        load(tmp_path, SMALLEST + text)


def test_a_field_over_several_lines_is_found_where_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml:6: limits\.max_batch = \[8, 9, 4, 2\]"):
        load(tmp_path, SMALLEST + "[limits]\n\nmax_batch = [\n  8, 9,\n  4, 2\n]\n")


@pytest.mark.parametrize("field", ["name", "kind", "memory_mib"])
def test_a_required_field_that_is_missing_is_named(tmp_path: Path, field: str) -> None:
    text = "".join(line for line in SMALLEST.splitlines(keepends=True) if not line.startswith(field))
    with pytest.raises(ConfigError, match=rf"mine\.toml: {field} is missing; it must be "):
        load(tmp_path, text)


@pytest.mark.parametrize("name", ["", "a/b", r"a\\b", r"a\tb", r"a\u0007b"], ids=ascii)
def test_a_name_that_is_empty_or_cannot_be_shown_or_has_a_separator_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml:1: name = '.*' is not allowed; .* and without / or \\"):
        load(tmp_path, SMALLEST.replace("mine", name))


@pytest.mark.parametrize("speed", [0.001, 100.0])
def test_speeds_at_the_ends_of_the_range_are_taken(tmp_path: Path, speed: float) -> None:
    assert load(tmp_path, f"{SMALLEST}speed = {speed}\n").speed == speed


def test_an_unknown_kind_lists_the_kinds(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mine\.toml:2: kind = 'toaster' is not allowed; it must be one of phone, tablet"
    ):
        load(tmp_path, SMALLEST.replace("box", "toaster"))


def test_a_phone_at_full_load_would_go_well_beyond_75_degrees_but_not_within_a_minute() -> None:
    model = load_profile("phone").thermal

    assert 25.0 <= model.ambient_c <= 30.0
    assert temperature_after(model, model.ambient_c, 1.0, 60.0) < 50.0
    assert temperature_after(model, model.ambient_c, 1.0, 1200.0) > 80.0


@pytest.mark.parametrize("name", ["flagship-phone", "phone", "tablet"])
def test_a_handheld_is_limited_before_75_degrees(name: str) -> None:
    limits = load_profile(name).limits

    assert limits.moderate_c < limits.hot_c < limits.critical_c < 75.0
    assert limits.steps_per_s == (0.0, 12.0, 6.0, 3.0)


def test_a_phone_takes_8_6_4_and_2_rows() -> None:
    assert load_profile("phone").limits.max_batch == (8, 6, 4, 2)


@pytest.mark.parametrize("name", SHIPPED.names())
def test_a_shipped_profile_takes_no_more_rows_when_limited_than_otherwise(name: str) -> None:
    profile = load_profile(name)

    assert profile.limits.max_batch[0] == profile.max_batch
    assert profile.fallback_timeout_ms == 200.0
