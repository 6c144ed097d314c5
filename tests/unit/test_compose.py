"""What the lab's engine is asked for; the engine itself is asked in `make lab-test`."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launch import compose
from launch.compose import BUILDERS, FILE, NOTHING, ComposeLab, run_command
from launch.links import PROBE, Shape
from shoal.errors import ConfigError, LaunchFailed, ModelNotFound
from tests.support.shards import make_tiny_model


class Engine:
    """Takes commands, and answers those of which it has been told the answer; phone-1 runs."""

    def __init__(self, abilities: str = "tbf statistic", link: str = "") -> None:
        self.commands: list[str] = []
        self.environments: list[Mapping[str, str]] = []
        services = {"link-phone-1": {"image": "links"}}
        self._answers = {
            "config --format json": json.dumps({"services": services}),
            "ps --all --quiet phone-1": "c1\n",
            "inspect --format {{json .Config.Env}} c1": json.dumps(["PATH=/bin", f"SHOAL_LINK={link}"]),
            PROBE: abilities,
        }

    def __call__(
        self, command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] = NOTHING
    ) -> str:
        text = " ".join(command)
        self.commands.append(text)
        if environment:
            self.environments.append(environment)
        return next((answer for end, answer in self._answers.items() if text.endswith(end)), "")

    def asked(self, *words: str) -> list[str]:
        """The commands with all of these words."""
        return [one for one in self.commands if all(word in one for word in words)]


def lab(folder: Path, engine: Engine) -> ComposeLab:
    (folder / FILE).write_text("")
    return ComposeLab(folder, engine)


def test_images_are_built_one_after_the_other(tmp_path: Path) -> None:
    engine = Engine()

    lab(tmp_path, engine).build()

    assert [one.split()[-1] for one in engine.asked("build")] == list(BUILDERS)


def test_what_the_kernel_can_do_leaves_the_device_alone(tmp_path: Path) -> None:
    engine = Engine()

    lab(tmp_path, engine).shape("phone-1", Shape(rate_mbit_s=5.0))

    assert not engine.asked("up --detach")
    assert engine.asked("link-phone-1", "tbf rate 5mbit")


def test_a_device_that_has_to_delay_starts_anew_before_the_kernel_is_told(tmp_path: Path) -> None:
    engine = Engine()

    chosen = lab(tmp_path, engine).shape("phone-1", Shape(delay_ms=40.0, loss_percent=1.0))

    assert chosen.by_device == "40ms"
    assert engine.environments == [{"LINK_PHONE_1": "40ms"}]
    (started,), (told,) = (
        engine.asked("up --detach --no-deps phone-1"),
        engine.asked("link-phone-1", "statistic", "run")[-1:],
    )
    assert engine.commands.index(started) < engine.commands.index(told)


def test_a_device_that_delayed_starts_anew_as_its_profile_says(tmp_path: Path) -> None:
    engine = Engine(link="40ms")

    lab(tmp_path, engine).shape("phone-1", Shape())

    assert engine.environments == [{"LINK_PHONE_1": ""}]


def test_a_service_comes_back_to_its_network_under_its_name(tmp_path: Path) -> None:
    engine = Engine()

    lab(tmp_path, engine).connect("phone-1", "wifi")

    assert engine.commands[-1] == "docker network connect --alias phone-1 shoal-lab_wifi c1"


def test_a_service_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="tablet is not there"):
        lab(tmp_path, Engine()).container("tablet")


def test_a_model_that_is_not_stored_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        lab(tmp_path, Engine()).seed(tmp_path / "home", "smollm2-135m")


def test_a_stored_model_is_copied_with_what_its_links_lead_to_for_everybody_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path, num_layers=1)
    home, copy, elsewhere = tmp_path / "store", tmp_path / "copy.tar", tmp_path / "elsewhere"
    blob = home / "blobs" / model.manifest.blobs[0].digest
    content = blob.read_bytes()
    blob.rename(elsewhere)
    blob.symlink_to(elsewhere)
    elsewhere.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(elsewhere, 1234, 1234)
    monkeypatch.setattr(compose, "compose_command", lambda: ["sh", "-c", f"cat > '{copy}'"])

    lab(tmp_path, Engine()).seed(home, "tiny")

    with tarfile.open(copy) as archive:
        member = archive.getmember(f"blobs/{blob.name}")
        assert "models/tiny" in archive.getnames()
        copied = archive.extractfile(member)
        assert copied is not None
        assert copied.read() == content
        assert (member.uid, member.gid, member.uname, member.mode & 0o044) == (0, 0, "", 0o044)


def test_a_copy_that_fails_is_told_with_what_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path, num_layers=1)
    monkeypatch.setattr(compose, "compose_command", lambda: ["sh", "-c", "echo no room >&2; exit 1"])

    with pytest.raises(LaunchFailed, match="no room"):
        lab(tmp_path, Engine()).seed(tmp_path / "store", "tiny")


def test_outside_of_a_checkout_there_is_no_lab(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no docker-compose\.yml in"):
        ComposeLab(tmp_path, Engine())


def test_a_command_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"exit code 3\):\n  no engine"):
        run_command(["sh", "-c", "echo no engine >&2; exit 3"], tmp_path, 10.0)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="no-such-program is not installed"):
        run_command(["no-such-program"], tmp_path, 10.0)
