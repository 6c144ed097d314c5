"""Names of models of the hub, and which files of a repository such a name asks for.

Pure: gets lists of files, returns those to download. Decides that weights come as safetensors or GGUF or not at all.
`hub` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from modelstore import sentencepiece_file, tokenizer_json
from modelstore.hf_folder import CONFIG, INDEX, WEIGHTS
from modelstore.hf_template import TEMPLATE_FILE, TEMPLATE_JSON
from modelstore.tokenizer_hf import ADDED_TOKENS, GENERATION_CONFIG, SPECIAL_TOKENS, TOKENIZER_CONFIG
from shoal.errors import InvalidRequest, UnsupportedModel

PREFIX = "hf:"
# What is read of a repository besides its weights.
SMALL_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    tokenizer_json.NAME,
    sentencepiece_file.NAME,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    ADDED_TOKENS,
    TEMPLATE_FILE,
    TEMPLATE_JSON,
)
MAX_LISTED = 12
_NAME = re.compile(
    r"hf:(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w./ +-]+))?", re.ASCII
)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_PIECE = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. sha256: empty if the hub does not say."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class HubName:
    """What somebody asks for. revision: a branch, tag or commit, None for the main branch; file: empty for all."""

    repository: str
    revision: str | None
    file: str

    @classmethod
    def parse(cls, text: str) -> HubName:
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            raise InvalidRequest(
                "model", f"{text[:100]!r} is not like hf:ORG/REPO, hf:ORG/REPO@REVISION or hf:ORG/REPO:FILE"
            )
        return cls(match["repository"], match["revision"], match["file"] or "")

    def stored_name(self, files: Sequence[HubFile]) -> str:
        """What a model of these files is called if nobody says: after the GGUF file, else after the repository."""
        if is_gguf(files):
            return _PIECE.sub("", PurePosixPath(files[0].name).name).removesuffix(".gguf")
        return self.repository.partition("/")[2]


def is_gguf(files: Sequence[HubFile]) -> bool:
    return files[0].name.endswith(".gguf")


def choose(wanted: HubName, files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    """The files to download, the first piece of a GGUF file first.

    Raises InvalidRequest where the name must say which, with the choice, and UnsupportedModel for other weights.
    """
    safe = [file for file in files if _is_plain(file.name)]
    models = _gguf_models(safe)
    if wanted.file:
        return _one_of(wanted, models)
    names = {file.name: file for file in safe}
    if WEIGHTS in names or INDEX in names:
        weights = (WEIGHTS,) if WEIGHTS in names else (INDEX, *sorted(filter(_SHARD.fullmatch, names)))
        return tuple(names[name] for name in (*SMALL_FILES, *weights) if name in names)
    if len(models) == 1:
        return next(iter(models.values()))
    if models:
        raise _which(wanted, models)
    others = sorted(file.name for file in files if file.name.endswith((".bin", ".pt", ".pth", ".safetensors")))
    what = f"its weights are in {others[0]}" if others else "it has none"
    raise UnsupportedModel(
        f"{wanted.repository} has no weights as {WEIGHTS} or GGUF ({what}): look for a repository or a revision that has"
    )


def _is_plain(name: str) -> bool:
    """Whether a name leads to a file below the folder that it is put in."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and name == str(path)


def _gguf_models(files: Sequence[HubFile]) -> dict[str, tuple[HubFile, ...]]:
    """The models among the GGUF files, each with all its pieces, by the name of the first."""
    ggufs = sorted((file for file in files if file.name.endswith(".gguf")), key=lambda file: file.name)
    models: dict[str, tuple[HubFile, ...]] = {}
    for file in ggufs:
        match = _PIECE.search(file.name)
        # What makes a model see is no model.
        if PurePosixPath(file.name).name.startswith("mmproj"):
            continue
        if match is None:
            models[file.name] = (file,)
        elif int(match[1]) == 1:
            stem, ending = file.name[: match.start()], f"-of-{match[2]}.gguf"
            models[file.name] = tuple(
                piece for piece in ggufs if piece.name.startswith(stem + "-") and piece.name.endswith(ending)
            )
    return models


def _one_of(wanted: HubName, models: dict[str, tuple[HubFile, ...]]) -> tuple[HubFile, ...]:
    """The model of this file name, or the only one whose name has this in it, as in hf:ORG/REPO:Q4_K_M."""
    if wanted.file in models:
        return models[wanted.file]
    alike = {name: model for name, model in models.items() if wanted.file.lower() in name.lower()}
    if len(alike) == 1:
        return next(iter(alike.values()))
    if not models:
        raise InvalidRequest("model", f"{wanted.repository} has no GGUF files: leave out :{wanted.file}")
    raise _which(wanted, alike or models)


def _which(wanted: HubName, models: dict[str, tuple[HubFile, ...]]) -> InvalidRequest:
    revision = f"@{wanted.revision}" if wanted.revision else ""
    sizes = {name: sum(piece.num_bytes for piece in pieces) for name, pieces in models.items()}
    choice = [f"{PREFIX}{wanted.repository}{revision}:{name} ({size / 2**20:,.0f} MiB)" for name, size in sizes.items()]
    more = f", and {len(choice) - MAX_LISTED} more" if len(choice) > MAX_LISTED else ""
    return InvalidRequest(
        "model", f"{wanted.repository} has {len(choice)} GGUF files, say which: {', '.join(choice[:MAX_LISTED])}{more}"
    )
