"""Configuration: one definition an option, precedence, and what is said of a wrong value."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.limits import PREFILL_ROOM_TOKENS
from shoal.config import Config, OrchestratorConfig, WorkerConfig, default_home, from_environment, options, parse_link
from shoal.errors import ConfigError
from shoal.types import LinkProfile
from tests.support.builders import make_limits

BOTH: list[type[Config]] = [OrchestratorConfig, WorkerConfig]


def test_defaults_are_valid() -> None:
    assert OrchestratorConfig().port == 50070
    assert WorkerConfig().join == "127.0.0.1:50070"


@pytest.mark.parametrize("cls", BOTH)
def test_flag_and_variable_derive_from_the_field_and_all_have_help(cls: type[Config]) -> None:
    for option in options(cls):
        assert option.flag == "--" + option.name.replace("_", "-")
        assert option.env == "SHOAL_" + option.name.upper()
        assert option.help.endswith(".")
        assert isinstance(option.default, option.type)


def test_an_option_says_its_type_and_default() -> None:
    drain = next(option for option in options(OrchestratorConfig) if option.name == "drain_s")
    assert (drain.flag, drain.env, drain.type, drain.default) == ("--drain-s", "SHOAL_DRAIN_S", float, 10.0)


def test_a_flag_goes_before_the_environment_and_that_before_the_default() -> None:
    environ = {"SHOAL_PORT": "1000", "SHOAL_MODEL": "other"}
    config = from_environment(OrchestratorConfig, {"port": 2000}, environ)
    assert (config.port, config.model, config.max_sequences) == (2000, "other", 16)


def test_an_override_of_none_and_an_empty_variable_count_as_not_given() -> None:
    config = from_environment(OrchestratorConfig, {"port": None}, {"SHOAL_PORT": "1000", "SHOAL_MODEL": ""})
    assert (config.port, config.model) == (1000, "smollm2-135m")


def test_an_override_of_nothing_like_zero_or_false_counts_as_given() -> None:
    config = from_environment(WorkerConfig, {"port": 0, "use_sockets": False}, {"SHOAL_PORT": "1000"})
    assert (config.port, config.use_sockets) == (0, False)


def test_variables_are_converted_to_the_fields_type() -> None:
    environ = {"SHOAL_DRAIN_S": "2.5", "SHOAL_HOME": "/data", "SHOAL_USE_SOCKETS": "No", "SHOAL_PORT": "3"}
    config = from_environment(OrchestratorConfig, {}, environ)
    assert (config.drain_s, config.home, config.use_sockets, config.port) == (2.5, Path("/data"), False, 3)


def test_overrides_may_be_texts_or_whole_numbers_for_decimals() -> None:
    config = from_environment(OrchestratorConfig, {"drain_s": 3, "home": "/data", "port": "4000"}, {})
    assert (config.drain_s, config.home, config.port) == (3.0, Path("/data"), 4000)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SHOAL_PORT", "abc", r"port = 'abc' is not allowed; it must be a whole number .*SHOAL_PORT"),
        ("SHOAL_PORT", "70000", r"port = '70000' is not allowed; it must be from 0 to 65535 .*SHOAL_PORT"),
        ("SHOAL_DRAIN_S", "soon", r"drain_s = 'soon' is not allowed; it must be a number .*SHOAL_DRAIN_S"),
        ("SHOAL_DRAIN_S", "-1", r"drain_s = '-1.0' is not allowed; it must be 0 or more"),
        ("SHOAL_DRAIN_S", "nan", r"drain_s = 'nan' is not allowed"),
        ("SHOAL_DRAIN_S", "inf", r"drain_s = 'inf' is not allowed"),
        ("SHOAL_HEARTBEAT_S", "0", r"heartbeat_s = '0.0' is not allowed; it must be more than 0"),
        ("SHOAL_USE_SOCKETS", "maybe", r"use_sockets = 'maybe' is not allowed; it must be one of 1, true"),
        ("SHOAL_MODEL", " ", r"model = ' ' is not allowed; it must be a text that is not empty"),
        ("SHOAL_MAX_SEQUENCES", "0", r"max_sequences = '0' is not allowed; it must be from 1 to 1024"),
        ("SHOAL_CONTEXT_TOKENS", "1", r"context_tokens = '1' is not allowed; it must be 0 or at least 2"),
        ("SHOAL_CHUNK_TOKENS", "7", r"chunk_tokens = '7' is not allowed; it must be from 8 to 4096"),
        ("SHOAL_TTFT_MS", "0", r"ttft_ms = '0.0' is not allowed; it must be more than 0 and at most \d"),
        (
            "SHOAL_INTER_TOKEN_MS",
            "1e308",
            r"inter_token_ms = '1e\+308' is not allowed; it must be more than 0 and at most \d",
        ),
    ],
)
def test_a_wrong_variable_is_refused_with_its_name_and_what_is_allowed(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_environment(OrchestratorConfig, {}, {variable: text})


@pytest.mark.parametrize("value", [1.5, True, ["1"]])
def test_an_override_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"port = .* is not allowed; it must be a whole number \(set by --port"):
        from_environment(OrchestratorConfig, {"port": value}, {})


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match="colour: not an option of WorkerConfig"):
        from_environment(WorkerConfig, {"colour": "red"}, {})


def test_a_value_is_checked_however_the_configuration_is_made() -> None:
    with pytest.raises(ConfigError, match="host = '' is not allowed"):
        WorkerConfig(host="")


def test_a_lease_shorter_than_a_heartbeat_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lease_s = 1.0 must be more than heartbeat_s = 1.0"):
        OrchestratorConfig(lease_s=1.0, heartbeat_s=1.0)


def test_the_smallest_chunk_is_the_smallest_that_a_scheduler_takes() -> None:
    least = 2 * PREFILL_ROOM_TOKENS

    assert OrchestratorConfig(chunk_tokens=least).chunk_tokens == make_limits(chunk_tokens=least).chunk_tokens
    for make in (OrchestratorConfig, make_limits):
        with pytest.raises(ConfigError, match="chunk_tokens"):
            make(chunk_tokens=least - 1)


@pytest.mark.parametrize("join", ["", "box", "box:", ":50070", "box:0", "box:70000", "box:²"])
def test_an_address_to_join_needs_host_and_port(join: str) -> None:
    with pytest.raises(ConfigError, match="join = "):
        WorkerConfig(join=join)


@pytest.mark.parametrize("join", ["box:1", "[::1]:50070", "192.168.1.7:65535"])
def test_names_and_both_kinds_of_address_can_be_joined(join: str) -> None:
    assert WorkerConfig(join=join).join == join


@pytest.mark.parametrize(
    ("join", "name"),
    [("discover", ""), ("discover:kitchen-50070", "kitchen-50070"), ("discover:50070", None), ("box:1", None)],
)
def test_the_word_discover_stands_for_an_address_that_is_looked_for(join: str, name: str | None) -> None:
    assert WorkerConfig(join=join).discovers == name


def test_discover_with_a_colon_and_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="or discover, or discover:NAME"):
        WorkerConfig(join="discover:")


def test_home_is_taken_from_the_environment_or_the_users_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", "/somewhere")
    assert default_home() == OrchestratorConfig().home == Path("/somewhere")
    monkeypatch.delenv("SHOAL_HOME")
    assert default_home().name == "shoal"


def test_a_value_may_be_in_a_file_that_a_variable_names(tmp_path: Path) -> None:
    secret = tmp_path / "redis_url"
    secret.write_text("redis://:password@redis:6379/0\n")

    assert from_environment(WorkerConfig, {}, {"SHOAL_REDIS_URL_FILE": str(secret)}).redis_url.endswith("@redis:6379/0")


def test_a_variable_goes_before_the_file_that_another_names(tmp_path: Path) -> None:
    environ = {"SHOAL_MODEL": "given", "SHOAL_MODEL_FILE": str(tmp_path / "missing")}

    assert from_environment(OrchestratorConfig, {}, environ).model == "given"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SHOAL_REDIS_URL_FILE: .*missing cannot be read"):
        from_environment(WorkerConfig, {}, {"SHOAL_REDIS_URL_FILE": str(tmp_path / "missing")})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("40ms,10mbit", LinkProfile(40.0, 10.0)),
        ("0.5ms", LinkProfile(0.5, 0.0)),
        ("10mbit, 2ms", LinkProfile(2.0, 10.0)),
    ],
)
def test_a_link_is_a_delay_and_a_rate_or_one_of_them(text: str, expected: LinkProfile | None) -> None:
    assert parse_link(text) == expected


@pytest.mark.parametrize("text", ["40", "40ms,", "40ms,50ms", "-1ms", "70000ms", "2000000mbit", "40ms 10mbit"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as 40ms,10mbit"):
        WorkerConfig(link=text)
