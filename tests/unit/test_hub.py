"""Models of the hub: what a name asks for, which files are fetched, and what is said when they cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelstore.hub import pull_from_hub
from modelstore.hub_files import HubFile, HubName, choose
from modelstore.manifest import Manifest
from modelstore.store import ModelStore
from shoal.errors import BadModelFile, InvalidRequest, ModelNotFound, PullFailed, StorageFull, UnsupportedModel
from tests.support.hub_server import COMMIT, REPOSITORY, TOKEN, HubState, files_of, serve_hub
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_hf import write_tiny_hf

NAME = f"hf:{REPOSITORY}"
Pull = Callable[..., Manifest]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Of a repository with weights in two files, and what else repositories have."""
    folder = write_tiny_hf(tmp_path / "tiny", num_files=2)
    more = {
        "README.md": b"---\nlicense: mit\n---\n",
        "pytorch_model.bin": b"pickle",
        "onnx/model.onnx": b"other",
        "tiny.Q4_1.gguf": b"GGUF",
        "training_args.bin": b"pickle",
    }
    return files_of(folder) | more


@pytest.fixture
def hub(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve_hub(files) as state:
        yield state


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def pull(store: ModelStore, hub: HubState) -> Pull:
    def pull(wanted: str = NAME, name: str = "", reports: list[tuple[int, int, str]] | None = None) -> Manifest:
        seen = [] if reports is None else reports
        return pull_from_hub(store, wanted, name, lambda *report: seen.append(report), endpoint=hub.url)

    return pull


def left_over(store: ModelStore) -> list[str]:
    """What downloads have under way, but for locks."""
    paths = (store.root / "downloads").rglob("*")
    return sorted(path.name for path in paths if path.is_file() and path.suffix != ".lock")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", None, "")),
        ("hf:a/b@refs/pr/1", HubName("a/b", "refs/pr/1", "")),
        ("hf:a/b:Q4_K_M", HubName("a/b", None, "Q4_K_M")),
        ("hf:a/b@v1.0:sub/x.gguf", HubName("a/b", "v1.0", "sub/x.gguf")),
    ],
)
def test_a_name_has_a_repository_and_may_have_a_revision_and_a_file(text: str, expected: HubName) -> None:
    assert HubName.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:a/b/c", "hf:a/../b", "hf:a/b:../x", "hf:a/b@", "hf:ä/b", "hf:a/b c"]
)
def test_any_other_name_is_refused_with_what_names_are_like(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not like hf:ORG/REPO, hf:ORG/REPO@REVISION or hf:ORG/REPO:FILE"):
        HubName.parse(text)


class TestChoice:
    """Which files of a repository a name asks for."""

    def choice(self, text: str, *names: str) -> list[str]:
        return [file.name for file in choose(HubName.parse(text), [HubFile(name, 1 << 20, "") for name in names])]

    def test_weights_as_safetensors_come_with_what_is_read_beside_them(self) -> None:
        names = (
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "pytorch_model.bin",
            "a.gguf",
            "x.py",
            "README.md",
        )
        assert self.choice("hf:a/b", *names) == ["config.json", "tokenizer.json", "model.safetensors"]

    def test_a_chat_template_comes_from_either_of_its_files_and_files_that_nobody_reads_stay(self) -> None:
        names = ("config.json", "chat_template.jinja", "chat_template.json", "vocab.json", "merges.txt")
        chosen = ["config.json", "chat_template.jinja", "chat_template.json", "model.safetensors"]
        assert self.choice("hf:a/b", *names, "model.safetensors") == chosen

    def test_all_files_of_a_tokenizer_come(self) -> None:
        names = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        assert self.choice("hf:a/b", *names, "model.safetensors") == [*names, "model.safetensors"]

    def test_a_file_of_a_repository_without_gguf_is_told_to_leave_out(self) -> None:
        with pytest.raises(InvalidRequest, match="a/b has no GGUF files: leave out :Q4"):
            self.choice("hf:a/b:Q4", "model.safetensors")

    def test_weights_in_several_files_come_with_their_index(self) -> None:
        shards = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
        index = "model.safetensors.index.json"
        assert self.choice("hf:a/b", *shards, index, "consolidated.safetensors") == [index, *shards]

    def test_the_only_gguf_file_needs_no_name(self) -> None:
        assert self.choice("hf:a/b", "a.gguf", "mmproj-a.gguf", "config.json") == ["a.gguf"]

    def test_of_several_gguf_files_one_must_be_named(self) -> None:
        first, second = r"hf:a/b@v1:a-Q4_0.gguf \(1 MiB\)", r"hf:a/b@v1:b-00001-of-00002.gguf \(2 MiB\)"
        expected = f"a/b has 2 GGUF files, say which: {first}, {second}$"
        with pytest.raises(InvalidRequest, match=expected):
            self.choice("hf:a/b@v1", "a-Q4_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf")

    def test_a_part_of_the_name_is_enough_where_it_is_of_one(self) -> None:
        assert self.choice("hf:a/b:q4_0", "a-Q4_0.gguf", "a-Q8_0.gguf") == ["a-Q4_0.gguf"]

    def test_a_whole_name_comes_before_a_part_of_another(self) -> None:
        assert self.choice("hf:a/b:a.gguf", "a.gguf", "aa.gguf") == ["a.gguf"]

    def test_a_name_of_several_asks_again(self) -> None:
        with pytest.raises(InvalidRequest, match=r"has 2 GGUF files, say which: .*:a-Q4_0.gguf .*:a-Q4_1.gguf"):
            self.choice("hf:a/b:Q4", "a-Q4_0.gguf", "a-Q4_1.gguf", "a-Q8_0.gguf")

    def test_a_split_file_comes_whole_with_the_first_piece_first(self) -> None:
        names = (
            "q/b-00002-of-00002.gguf",
            "q/b-00001-of-00002.gguf",
            "q/b-00001-of-00003.gguf",
            "c-00002-of-00002.gguf",
        )
        expected = ["q/b-00001-of-00002.gguf", "q/b-00002-of-00002.gguf"]
        assert self.choice("hf:a/b:q/b-00001-of-00002.gguf", *names) == expected

    def test_a_long_list_is_cut(self) -> None:
        with pytest.raises(InvalidRequest, match=r"has 30 GGUF files.*, and 18 more$"):
            self.choice("hf:a/b", *(f"{index:02}.gguf" for index in range(30)))

    def test_pickles_alone_are_refused(self) -> None:
        with pytest.raises(
            UnsupportedModel, match=r"no weights as model.safetensors or GGUF \(its weights are in a.bin\)"
        ):
            self.choice("hf:a/b", "a.bin", "config.json")

    @pytest.mark.parametrize("name", ["../a.gguf", "/a.gguf", "a/../b.gguf", "a\\b.gguf", "./a.gguf"])
    def test_names_that_lead_elsewhere_are_no_choice(self, name: str) -> None:
        with pytest.raises(UnsupportedModel):
            self.choice("hf:a/b", name)


def test_a_pulled_model_is_the_one_that_its_folder_is(
    pull: Pull, store: ModelStore, hub: HubState, tmp_path: Path
) -> None:
    manifest = pull()
    of_folder = ModelStore(tmp_path / "other").import_model(tmp_path / "tiny", "tiny")
    assert store.verify("tiny").blobs == of_folder.blobs
    assert (manifest.source, manifest.license) == (f"hf:{REPOSITORY}@{COMMIT}", "apache-2.0")
    assert left_over(store) == []


def test_only_what_is_needed_is_fetched_the_configuration_first(pull: Pull, hub: HubState) -> None:
    pull()
    assert hub.fetched[0] == "config.json"
    assert sorted(hub.fetched) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_progress_counts_the_bytes_of_all_files(pull: Pull, hub: HubState) -> None:
    reports: list[tuple[int, int, str]] = []
    pull(reports=reports)
    total = sum(len(hub.files[name]) for name in set(hub.fetched))
    downloading = [(done, of) for done, of, label in reports if label.startswith("download")]
    assert downloading[-1] == (total, total)
    assert [done for done, _ in downloading] == sorted(done for done, _ in downloading)
    assert {of for _, of in downloading} == {total}


def test_a_gguf_file_is_named_with_its_commit(pull: Pull, hub: HubState, tmp_path: Path) -> None:
    hub.files["q/tiny.Q4_1.gguf"] = write_tiny_gguf(tmp_path / "a.gguf").read_bytes()
    manifest = pull(f"{NAME}:q/tiny.Q4_1.gguf")
    assert (manifest.name, manifest.source) == ("tiny.Q4_1", f"hf:{REPOSITORY}@{COMMIT}:q/tiny.Q4_1.gguf")
    assert hub.fetched == ["q/tiny.Q4_1.gguf"]


def test_a_stored_model_is_not_fetched_again(pull: Pull, hub: HubState) -> None:
    manifest = pull()
    hub.asked.clear()
    assert pull() == manifest
    assert hub.asked == []


def test_a_stored_model_that_lacks_a_blob_is_fetched_again(pull: Pull, store: ModelStore, hub: HubState) -> None:
    digest = pull().blobs[0].digest
    store.blob_path(digest).unlink()
    hub.asked.clear()
    pull()
    assert hub.asked
    assert store.verify("tiny").blobs


def test_a_model_that_is_stored_with_another_chat_template_gets_the_one_that_is_asked_for(
    store: ModelStore, hub: HubState
) -> None:
    for template in ("{{ 'a' }}", "{{ 'b' }}"):
        pull_from_hub(store, NAME, chat_template=template, endpoint=hub.url)
        assert store.list()[0].tokenizer.chat_template == template
    hub.asked.clear()
    pull_from_hub(store, NAME, endpoint=hub.url)
    assert (hub.asked, store.list()[0].tokenizer.chat_template) == ([], "{{ 'b' }}")


def test_a_newer_commit_is_fetched(pull: Pull, hub: HubState) -> None:
    pull()
    hub.commit = "f" * 40
    assert pull().source == f"hf:{REPOSITORY}@{'f' * 40}"


def test_a_name_that_another_model_has_is_not_taken_from_it(pull: Pull, store: ModelStore, tmp_path: Path) -> None:
    store.import_model(write_tiny_gguf(tmp_path / "a.gguf"), "tiny")
    with pytest.raises(InvalidRequest, match=r"name: tiny is the name of another model \(from a.gguf\): give --name"):
        pull()
    assert pull(NAME, "other").name == "other"


@pytest.mark.parametrize("name", ["../tiny", "my tiny", "-tiny", "x" * 101])
def test_a_name_that_cannot_be_stored_is_refused_before_anything_is_fetched(
    pull: Pull, hub: HubState, name: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"name: .* must be 1 to 100 of"):
        pull(NAME, name)
    assert hub.asked == []


@pytest.mark.parametrize("wanted", ["hf:-x/b", "hf:a/.b", "hf:./b", "hf:a--b/c", f"hf:a/{'b' * 100}", "hf:a/b.git"])
def test_a_name_that_the_hub_itself_cannot_have_is_refused(pull: Pull, hub: HubState, wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="is no name of the hub's"):
        pull(wanted)
    assert hub.asked == []


def test_a_connection_that_is_cut_costs_only_the_rest(
    pull: Pull, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    name = "model-00001-of-00002.safetensors"
    hub.files = {name: hub.files[name], **hub.files}
    # Answers come in the order in which files are asked for: the weights' is the seventh.
    hub.cut_after_bytes = [10**9] * 6 + [1000]
    pull()
    assert hub.ranges_of(name) == ["", "bytes=1000-"]


def test_a_pull_that_was_killed_goes_on_where_it_was(
    pull: Pull, store: ModelStore, hub: HubState, tmp_path: Path
) -> None:
    script = """
import os, sys
from pathlib import Path
from modelstore.hub import pull_from_hub
from modelstore.store import ModelStore

def progress(done, total, label):
    if label == "downloading model-00002-of-00002.safetensors":
        os._exit(9)

pull_from_hub(ModelStore(Path(sys.argv[1])), sys.argv[2], "", progress, endpoint=sys.argv[3])
"""
    killed = subprocess.run((sys.executable, "-c", script, str(store.root), NAME, hub.url), check=False)
    assert (killed.returncode, store.names()) == (9, ())
    before = hub.fetched
    assert "model-00001-of-00002.safetensors" in before
    hub.asked.clear()
    pull()
    assert hub.fetched == ["model-00002-of-00002.safetensors"]


def test_bytes_other_than_announced_are_never_imported(pull: Pull, store: ModelStore, hub: HubState) -> None:
    hub.announced["model-00002-of-00002.safetensors"] = "0" * 64
    with pytest.raises(PullFailed, match=r"model-00002-of-00002.safetensors arrived with other content than announced"):
        pull()
    assert store.names() == ()
    assert "model-00002-of-00002.safetensors" not in left_over(store)


def test_a_model_that_is_not_supported_is_refused_by_its_configuration_alone(
    pull: Pull, store: ModelStore, hub: HubState
) -> None:
    hub.files["config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM is not supported"):
        pull()
    assert hub.fetched == ["config.json"]
    assert left_over(store) == []


def test_a_damaged_model_leaves_nothing_behind(pull: Pull, store: ModelStore, hub: HubState) -> None:
    hub.files["model-00002-of-00002.safetensors"] = b"nothing of the kind"
    with pytest.raises(BadModelFile, match=r"model-00002-of-00002.safetensors"):
        pull()
    assert left_over(store) == []
    assert store.names() == ()


def test_a_full_disk_is_told_before_anything_is_fetched(
    pull: Pull, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageFull, match="its disk has 1,000 left"):
        pull()
    assert hub.asked == []


def test_a_repository_that_is_not_there_is_told_with_what_to_check(pull: Pull) -> None:
    with pytest.raises(ModelNotFound, match="the hub has no model fish/none; if it is private, set HF_TOKEN"):
        pull("hf:fish/none")


def test_a_revision_that_is_not_there_is_told(pull: Pull) -> None:
    with pytest.raises(ModelNotFound, match="fish/tiny has no revision v9"):
        pull(f"{NAME}@v9")


def test_a_revision_is_recorded_as_its_commit(pull: Pull) -> None:
    assert pull(f"{NAME}@v1").source == f"hf:{REPOSITORY}@{COMMIT}"


def test_a_private_repository_is_read_with_the_token(
    pull: Pull, hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = TOKEN
    with pytest.raises(ModelNotFound, match="set HF_TOKEN"):
        pull()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull().name == "tiny"


def test_a_gated_repository_is_told_with_where_to_accept_its_terms(pull: Pull, hub: HubState) -> None:
    hub.is_gated = True
    expected = "accept them at https://huggingface.co/fish/tiny, then set HF_TOKEN"
    with pytest.raises(PullFailed, match=expected):
        pull()


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(store: ModelStore) -> None:
    with pytest.raises(PullFailed, match=r"the hub cannot be reached.*import a folder that was downloaded elsewhere"):
        pull_from_hub(store, NAME, endpoint="http://127.0.0.1:9")


def test_a_hub_in_trouble_is_told_with_its_answer(pull: Pull, hub: HubState) -> None:
    hub.status = 500
    with pytest.raises(PullFailed, match="the hub answers 500 for fish/tiny: try again later"):
        pull()


def test_a_commit_that_is_none_is_not_made_a_path(pull: Pull, hub: HubState) -> None:
    hub.commit = "../../elsewhere"
    with pytest.raises(PullFailed, match="the hub names no commit"):
        pull()


def test_without_internet_by_choice_nobody_is_asked(store: ModelStore, hub: HubState) -> None:
    script = (
        "import sys; from pathlib import Path; from modelstore.hub import pull_from_hub; "
        "from modelstore.store import ModelStore; pull_from_hub(ModelStore(Path(sys.argv[1])), sys.argv[2])"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url}
    outcome = subprocess.run(
        (sys.executable, "-c", script, str(store.root), NAME),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PullFailed: HF_HUB_OFFLINE forbids asking the hub" in outcome.stderr


def test_the_command_line_pulls_from_the_hub_that_the_environment_names(hub: HubState, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "SHOAL_HOME": str(tmp_path / "home")}
    command = (sys.executable, "-m", "cli.main", "models", "pull", NAME, "--name", "mine")
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "mine is stored: 3 layers" in outcome.stderr
    assert "licence apache-2.0" in outcome.stderr
    assert ModelStore(tmp_path / "home").open("mine").source == f"hf:{REPOSITORY}@{COMMIT}"
