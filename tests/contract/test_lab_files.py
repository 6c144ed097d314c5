"""What the lab is made of fits together: Compose takes its file, services are those that the code knows, all is pinned."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch.compose import BUILDERS, DEVICES, FILE, MODEL, ORCHESTRATOR, PROJECT, compose_command
from launch.profiles import load_profile
from tests.lab.supplies import IMAGES, REQUIREMENTS, requirements_of

ROOT = Path(__file__).parents[2]
PROFILES = ("--profile", "load", "--profile", "chaos")


def compose(*args: str, file: Path = ROOT / FILE) -> subprocess.CompletedProcess[str]:
    command = [*compose_command(), "--file", str(file), *PROFILES, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30.0, check=False)


@pytest.fixture(scope="module")
def lab() -> dict[str, Any]:
    """The file as Compose understands it."""
    fields: dict[str, Any] = json.loads(compose("config", "--format", "json").stdout)
    return fields


def test_compose_takes_the_file_without_a_word() -> None:
    done = compose("config", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_compose_would_not_take_a_word_that_it_does_not_know(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.write_text((ROOT / FILE).read_text().replace("    cpus: 1.0", "    cpuss: 1.0", 1))

    assert compose("config", "--quiet", file=file).returncode != 0


def test_the_code_knows_the_services_by_their_names(lab: dict[str, Any]) -> None:
    assert lab["name"] == PROJECT
    links = {f"link-{device}" for device in DEVICES}
    assert set(lab["services"]) == {*DEVICES, *links, ORCHESTRATOR, MODEL, "secrets", "redis", "loadtest"}
    assert {name for name, service in lab["services"].items() if "build" in service} == set(BUILDERS)
    assert {next(iter(lab["services"][device]["networks"])) for device in DEVICES} == set(DEVICES.values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_has_its_network_its_name_and_room_for_its_profile(lab: dict[str, Any], device: str) -> None:
    service = lab["services"][device]
    words = dict(word.removeprefix("--").split("=") for word in service["command"] if "=" in word)
    assert list(service["networks"]) == [DEVICES[device]]
    assert (words["id"], service["hostname"]) == (device, device)
    assert int(service["mem_limit"]) > load_profile(words["profile"]).memory_bytes
    assert lab["services"][f"link-{device}"]["network_mode"] == f"service:{device}"


def test_the_orchestrator_waits_for_as_many_devices_as_there_are(lab: dict[str, Any]) -> None:
    assert f"--expect-workers={len(DEVICES)}" in lab["services"][ORCHESTRATOR]["command"]


def test_all_that_lasts_is_checked_and_has_limits(lab: dict[str, Any]) -> None:
    for name in (*DEVICES, ORCHESTRATOR, "redis"):
        service = lab["services"][name]
        assert "healthcheck" in service
        assert int(service["mem_limit"]) > 0
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]


def test_no_secret_is_in_an_environment(lab: dict[str, Any]) -> None:
    for service in lab["services"].values():
        assert not any("URL" in name and not name.endswith("_FILE") for name in service.get("environment") or {})


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned() -> dict[str, str]:
    """Version by name, of what images are made of."""
    pins: dict[str, str] = {}
    for one in map(Requirement, requirements_of(REQUIREMENTS.read_text())):
        (pin,) = one.specifier
        assert pin.operator == "=="
        pins[canonicalize_name(one.name)] = pin.version
    return pins


def unmet(wanted: Requirement, pins: dict[str, str]) -> bool:
    version = pins.get(canonicalize_name(wanted.name), "")
    return not version or not wanted.specifier.contains(version, prereleases=True)


def needs_of(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """What an installed distribution needs where images run."""
    for text in importlib.metadata.requires(name) or ():
        wanted = Requirement(text)
        if wanted.marker is None or any(wanted.marker.evaluate(IMAGES | {"extra": one}) for one in ("", *extras)):
            yield wanted


def test_every_dependency_is_pinned_to_what_it_may_be() -> None:
    pins = pinned()
    wanted = [Requirement(text) for text in project()["project"]["dependencies"]]
    assert [str(one) for one in wanted if unmet(one, pins)] == []


def test_what_dependencies_need_is_pinned_too() -> None:
    """As far as it can be told here: of packages that are installed in the version that is pinned."""
    pins = pinned()
    installed = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions()}
    wanted = [Requirement(text) for text in project()["project"]["dependencies"]]
    seen: set[str] = set()
    while wanted:
        one = wanted.pop()
        name = canonicalize_name(one.name)
        assert not unmet(one, pins), f"{one} is not met"
        if str(one) not in seen and pins[name] == installed.get(name):
            wanted.extend(needs_of(name, one.extras))
        seen.add(str(one))


def test_every_pin_has_digests_and_nothing_names_where_it_comes_from() -> None:
    lines = [line.strip() for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    for line, following in pairwise([*lines, ""]):
        if not line.startswith("--"):
            assert following.startswith("--hash=sha256:"), line
        assert "://" not in line
        assert "index" not in line


def test_the_guide_says_by_which_command_the_pins_are_made() -> None:
    command = REQUIREMENTS.read_text().splitlines()[1].removeprefix("#").strip()

    assert command in (ROOT / "docs" / "lab.md").read_text()


def test_images_are_made_of_all_packages() -> None:
    shown = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = set(project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    assert packages <= shown
    assert all((ROOT / path).exists() for path in shown)
