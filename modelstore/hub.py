"""Gets a model named `hf:ORG/REPO` into a store, by the hub's own client, which knows its addresses, tokens and cache.

Decides which files of a repository are needed, checks that what came is what the repository says, and turns the client's
errors into ours. What is under way lies in root/downloads/ and is gone afterwards. The only importer of huggingface_hub,
an extra of this package. The command line calls it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelstore.download import sha256_of
from modelstore.file_lock import exclusive_lock
from modelstore.hf_folder import CONFIG, HfFolder
from modelstore.hub_files import HubFile, HubName, choose, is_gguf
from modelstore.huggingface import require_supported
from modelstore.manifest import Manifest
from modelstore.requantize import Precisions
from modelstore.store import (
    DEFAULT,
    GROWTH,
    Choose,
    ModelStore,
    Progress,
    full_disk_explained,
    ignore_progress,
    require_free_space,
    require_name,
)
from shoal.errors import (
    BadModelFile,
    ConfigError,
    CorruptBlob,
    InvalidRequest,
    ModelNotFound,
    PullFailed,
    UnsupportedModel,
)

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub says of a repository at one commit. license: empty if it says nothing."""

    commit: str
    files: tuple[HubFile, ...]
    license: str


def pull_from_hub(
    store: ModelStore,
    wanted: str,
    name: str = "",
    progress: Progress = ignore_progress,
    *,
    precisions: Precisions | Choose = DEFAULT,
    chat_template: str = "",
    endpoint: str | None = None,
) -> Manifest:
    """Get a model such as hf:ORG/REPO, hf:ORG/REPO@REVISION or hf:ORG/REPO:FILE.gguf; at once if it is stored already.

    name: to store it under, by default the repository's or the file's. A pull that was interrupted goes on where it was.
    chat_template: in place of the model's own. endpoint: the hub's address; by default what HF_ENDPOINT says. Raises
    InvalidRequest with the files to choose from, ModelNotFound, PullFailed, StorageFull, and what an import raises.
    """
    target = HubName.parse(wanted)
    hub = _Hub(target, endpoint)
    progress(0, 0, f"asking for {target.repository}")
    repository = hub.look_up()
    files = choose(target, repository.files)
    name = name or target.stored_name(files)
    # Before anything is downloaded for it.
    require_name(name)
    source = f"hf:{target.repository}@{repository.commit}" + (f":{files[0].name}" if is_gguf(files) else "")
    folder = store.root / "downloads" / f"hf--{target.repository.replace('/', '--')}--{repository.commit}"
    lock = exclusive_lock(folder.with_name(folder.name + ".lock"), lambda: progress(0, 0, "waiting for another pull"))
    with full_disk_explained(store.root), lock:
        stored = _find_stored(store, name, source)
        if stored is not None and chat_template in ("", stored.tokenizer.chat_template):
            return stored
        _require_space(folder, files)
        origin = folder / files[0].name if is_gguf(files) else folder
        try:
            _fetch(hub, repository.commit, files, folder, progress)
            manifest = store.import_model(
                origin,
                name,
                source=source,
                license=repository.license,
                chat_template=chat_template,
                progress=progress,
                precisions=precisions,
            )
        except (BadModelFile, UnsupportedModel):
            # The bytes are as announced, so that others will not come.
            shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)
    return manifest


class _Hub:
    """One repository, as the hub's client reaches it."""

    def __init__(self, target: HubName, endpoint: str | None) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            raise ConfigError("models of the hub need an extra: pip install 'shoal[hub]'", field="model") from error
        self._client = huggingface_hub
        self._target = target
        self._endpoint = endpoint

    def look_up(self) -> Repository:
        api = self._client.HfApi(endpoint=self._endpoint)
        with self._errors_explained():
            found = api.model_info(
                self._target.repository, revision=self._target.revision, files_metadata=True, timeout=TIMEOUT_S
            )
        files = tuple(
            HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "")
            for file in found.siblings or ()
        )
        commit = str(found.sha)
        if len(commit) != 40 or not set(commit) <= set("0123456789abcdef"):
            raise PullFailed(f"the hub names no commit of {self._target.repository} but {commit[:50]!r}")
        return Repository(commit, files, _license(found.card_data))

    def download(self, file: str, commit: str, folder: Path, report: Callable[[int], None]) -> Path:
        """Bring a file into a folder, going on where an earlier try was; report gets bytes as they come."""
        with self._errors_explained():
            return Path(
                self._client.hf_hub_download(
                    self._target.repository,
                    file,
                    revision=commit,
                    local_dir=folder,
                    endpoint=self._endpoint,
                    tqdm_class=_bar(report),
                )
            )

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Say in our errors what went wrong, and what to do."""
        errors, repository = self._client.errors, self._target.repository
        try:
            yield
        except errors.HFValidationError as error:
            raise InvalidRequest("model", f"{repository} is no name of the hub's: {_first_line(error)}") from error
        except errors.GatedRepoError as error:
            raise PullFailed(
                f"{repository} is given to those who accepted its terms: accept them at https://huggingface.co/"
                f"{repository}, then set HF_TOKEN to a token of yours (https://huggingface.co/settings/tokens)"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ModelNotFound(f"{repository} has no revision {self._target.revision}", field="model") from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFound(
                f"the hub has no model {repository}; if it is private, set HF_TOKEN to a token that may read it",
                field="model",
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise PullFailed(
                "HF_HUB_OFFLINE forbids asking the hub: unset it, or import a folder by its path"
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            raise PullFailed(f"the hub answers {status} for {repository}: try again later") from error
        except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
            raise PullFailed(
                f"the hub cannot be reached, or breaks off ({_first_line(error)}): a new pull goes on from there; on a "
                "machine without internet, import a folder that was downloaded elsewhere"
            ) from error


def _fetch(hub: _Hub, commit: str, files: Sequence[HubFile], folder: Path, progress: Progress) -> None:
    done, total = 0, sum(file.num_bytes for file in files)
    # The configuration first: it may say that the rest is of no use.
    for file in sorted(files, key=lambda file: file.name != CONFIG):
        label = f"downloading {file.name}"
        came = 0

        def report(num_bytes: int, before: int = done, label: str = label) -> None:
            nonlocal came
            came += num_bytes
            progress(min(before + came, total), total, label)

        progress(done, total, label)
        path = hub.download(file.name, commit, folder, report)
        if file.sha256 and sha256_of(path) != file.sha256:
            path.unlink()
            raise PullFailed(f"{file.name} arrived with other content than announced: pull again")
        done += file.num_bytes
        if file.name == CONFIG and not is_gguf(files):
            require_supported(HfFolder(folder).read_json(CONFIG) or {})
    progress(total, total, "downloaded")


def _require_space(folder: Path, files: Sequence[HubFile]) -> None:
    """Raise StorageFull unless there is room for the files, as far as they are not there, and for their blobs."""
    total = sum(file.num_bytes for file in files)
    kept = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    require_free_space(folder, max(0, int((1 + GROWTH) * total) - kept))


def _find_stored(store: ModelStore, name: str, source: str) -> Manifest | None:
    try:
        manifest = store.open(name)
    except (ModelNotFound, CorruptBlob):
        return None
    if manifest.source.partition("@")[0] != source.partition("@")[0]:
        raise InvalidRequest("name", f"{name} is the name of another model (from {manifest.source}): give --name")
    return manifest if manifest.source == source and store.has_blobs(manifest) else None


def _license(card: Any) -> str:
    license_name = card.get("license") if card else None
    other = card.get("license_name") if card and license_name == "other" else None
    return str(other or license_name or "")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bar(report: Callable[[int], None]) -> type[Any]:
    """A bar of the client that shows nothing and reports how far it is."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            report(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

    return Bar
