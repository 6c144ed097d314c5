"""What the lab's engine is asked for; the engine itself is asked in `make lab-test`."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from launch import compose
from launch.compose import BUILDERS, FILE, NOTHING, ComposeLab, address, run_command
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


def test_a_command_is_shown_as_one_would_type_it(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="`sh -c exit 3 build model` failed"):
        run_command(
            ["/bin/sh", "-c", "exit 3", "--file", "x.yml", "--profile", "load", "build", "model"], tmp_path, 10.0
        )


@pytest.mark.parametrize(
    "said",
    [
        "failed to connect to the docker API at unix:///var/run/docker.sock; check if the path is correct",
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    ],
)
def test_where_no_engine_answers_it_is_said_what_to_do(tmp_path: Path, said: str) -> None:
    with pytest.raises(LaunchFailed, match=r"^no Docker engine answers: start Docker, or name one by DOCKER_HOST"):
        run_command(["sh", "-c", f'echo "{said}" >&2; exit 1'], tmp_path, 10.0)


def test_when_the_lab_does_not_come_up_those_at_fault_are_told_with_their_last_words(tmp_path: Path) -> None:
    rows = [("model", 1, ""), ("redis", 0, "healthy"), ("tablet", 0, "unhealthy"), ("secrets", 0, "")]

    def run(command: Sequence[str], folder: Path, timeout_s: float, environment: Mapping[str, str] = NOTHING) -> str:
        if "up" in command:
            raise LaunchFailed("`up` failed")
        if "ps" in command:
            return "\n".join(json.dumps({"Service": name, "ExitCode": code, "Health": is_}) for name, code, is_ in rows)
        return f"{command[-1]} is sorry"

    (tmp_path / FILE).write_text("")
    with pytest.raises(LaunchFailed) as raised:
        ComposeLab(tmp_path, run).up(10.0)

    assert raised.value.message == (
        "`up` failed\nmodel said last:\n  model is sorry\ntablet said last:\n  tablet is sorry"
    )


def test_the_lab_is_where_the_port_says_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_PORT", raising=False)
    usual = address()
    monkeypatch.setenv("SHOAL_PORT", "50071")

    assert (usual, address()) == ("127.0.0.1:50070", "127.0.0.1:50071")
