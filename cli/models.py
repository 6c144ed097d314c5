"""`shoal models`: pull, import, list, show, verify, compare and remove stored models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.compare import compare_models
from cli.quantize import Chosen, Quantize, Requantize, TargetLoss
from cli.terminal import format_bytes, note, progress, say, write_json
from shoal.config import default_home
from shoal.errors import CorruptBlob, InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

    from modelstore.catalog import CatalogEntry
    from modelstore.manifest import Manifest
    from modelstore.store import ModelStore

app = typer.Typer(no_args_is_help=True, help="Pull, import, list, show, verify, compare and remove models.")

Home = Annotated[Path | None, typer.Option(help="Where models are kept. [env SHOAL_HOME]", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Template = Annotated[
    str,
    typer.Option(
        "--chat-template",
        metavar="FILE|NAME",
        help="A file, or chatml, gemma, llama2, llama3, mistral or phi3, in place of the model's own template.",
    ),
]
Stored = Annotated[str, typer.Argument(help="The name it is stored under.")]
# A column is not wider, however wide the terminal is.
TABLE_WIDTH = 100
# What is longer is folded.
MAX_WIDTHS = {"name": 20, "model and where it is from": 36, "licence": 12}
TITLES = ("name", "model and where it is from", "size", "digest", "licence")

app.command("compare")(compare_models)


@app.command("pull")
def pull_model(
    name: Annotated[
        str, typer.Argument(help="A name that `shoal models list` shows, or hf:ORG/REPO[@REVISION][:FILE.gguf].")
    ],
    stored_as: Annotated[str, typer.Option("--name", help="The name to store a model of the hub under.")] = "",
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the terms of a model that has some.")
    ] = False,
    quantize: Quantize = "int8",
    target_loss: TargetLoss = "",
    requantize: Requantize = False,
    template: Template = "",
    home: Home = None,
) -> None:
    """Get a model of the catalogue or of the Hugging Face hub; goes on where an earlier try was interrupted."""
    store = open_store(home)
    if name.startswith("hf:"):
        from modelstore.hub import pull_from_hub

        chat_template = chosen_template(template)
        with progress(f"pull {name}") as update:
            chosen = Chosen(quantize, target_loss, is_forced=requantize, update=update)
            manifest = pull_from_hub(store, name, stored_as, update, precisions=chosen, chat_template=chat_template)
        chosen.tell(manifest.quantization)
    else:
        if stored_as or requantize or target_loss or template or quantize != "int8":
            raise InvalidRequest(
                "model", f"{name} is stored as it is, under this name: options are for models of the hub"
            )
        manifest = fetch(store, name, accept_license=accept_license)
    note(_summary(manifest), style="")


@app.command("import")
def import_model(
    path: Annotated[
        Path,
        typer.Argument(help="A GGUF file (of a split one the first part), or a Hugging Face folder.", exists=True),
    ],
    name: Annotated[str, typer.Option(help="The name to store it under.")],
    quantize: Quantize = "int8",
    target_loss: TargetLoss = "",
    requantize: Requantize = False,
    template: Template = "",
    home: Home = None,
) -> None:
    """Store a model from files; goes on where an earlier try was interrupted."""
    with progress(f"import {name}") as update:
        chosen = Chosen(quantize, target_loss, is_forced=requantize, update=update)
        manifest = open_store(home).import_model(
            path, name, precisions=chosen, progress=update, chat_template=chosen_template(template)
        )
    chosen.tell(manifest.quantization)
    note(_summary(manifest), style="")


@app.command("list")
def list_models(json: Json = False, home: Home = None) -> None:
    """List what is stored and what can be pulled."""
    from modelstore.catalog import CATALOG

    store = open_store(home)
    names = store.names()
    stored = [_describe(store, name) for name in names]
    others = [entry for name, entry in CATALOG.items() if name not in names]
    if json:
        unfinished = store.unfinished()
        write_json(
            {"stored": stored, "unfinished": unfinished, "can_be_pulled": [_entry_fields(entry) for entry in others]}
        )
        return
    if stored:
        say(_table(TITLES, [_row(fields) for fields in stored]))
    if any("error" in fields for fields in stored):
        say("\nwhat cannot be read was made by another version or is damaged: pull or import it again")
    for name in store.unfinished():
        say(f"\n{name} is unfinished: import or pull it again to go on, or `shoal models remove {name}`")
    if stored and others:
        say()
    if others:
        rows = [(entry.name, entry.description, format_bytes(entry.num_bytes), entry.license) for entry in others]
        say(_table(("`shoal models pull NAME`", "what it is", "size", "licence"), rows))


@app.command("show")
def show_model(name: Stored, json: Json = False, home: Home = None) -> None:
    """Show what is known of a stored model."""
    fields = _fields(open_store(home).open(name))
    if json:
        write_json(fields)
        return
    for key, value in fields.items():
        shown = format_bytes(value) if key.endswith("_bytes") else _plain(value)
        say(f"{key.replace('_', ' ')}: {shown}")


@app.command("verify")
def verify_model(name: Stored, home: Home = None) -> None:
    """Read a stored model whole and compare it with its digests."""
    with progress(f"verify {name}") as update:
        manifest = open_store(home).verify(name, update)
    note(f"{name} is sound: {len(manifest.blobs)} blobs, {format_bytes(manifest.weight_bytes)}", style="")


@app.command("remove")
def remove_model(name: Stored, home: Home = None) -> None:
    """Delete a stored model, and whatever no other one uses of it."""
    with progress(f"remove {name}") as update:
        freed = open_store(home).remove(name, update)
    what = f"{format_bytes(freed)} are free again" if freed else "its weights stay, for other models have them too"
    note(f"{name} is removed, {what}", style="")


def chosen_template(wanted: str) -> str:
    """The text of a chat template that is asked for; empty if none is. Raises InvalidRequest if it is no template."""
    from modelstore.hf_template import user_template

    if not wanted:
        return ""
    from orchestrator.template_sandbox import check_template

    template = user_template(wanted)
    check_template(template)
    return template


def open_store(home: Path | None) -> ModelStore:
    from modelstore.store import ModelStore

    return ModelStore(home or default_home())


def fetch(store: ModelStore, name: str, *, accept_license: bool = False) -> Manifest:
    """Pull a model of the catalogue, showing how far it is; at once if it is stored.

    Asks whoever sits at a terminal about terms that are not accepted yet. Raises LicenseNotAccepted where nobody does.
    """
    from modelstore.pull import find_entry, find_stored, pull

    entry = find_entry(name)
    if find_stored(store, entry) is None:
        accept_license = accept_license or _ask(entry)
        note(f"{name} is under the licence {entry.license}", style="")
    with progress(f"pull {name}") as update:
        return pull(store, name, update, accept_license=accept_license)


def _ask(entry: CatalogEntry) -> bool:
    """Whether somebody at the terminal accepts the terms; False where there are none or nobody is there."""
    if entry.terms is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    note(f"{entry.terms.notice}\n{entry.terms.url}", style="")
    return typer.confirm(f"Do you accept the {entry.terms.title}?", err=True)


def _describe(store: ModelStore, name: str) -> dict[str, Any]:
    try:
        return _fields(store.open(name))
    except CorruptBlob as error:
        return {"name": name, "error": error.message}


def _row(fields: dict[str, Any]) -> tuple[str, ...]:
    if "error" in fields:
        return (fields["name"], "cannot be read", "", "", "")
    what = f"{fields['architecture']}, {fields['num_layers']} layers, {fields['quantization']}"
    size, digest = format_bytes(fields["num_bytes"]), fields["digest"][:12]
    origin = _short_source(fields["source"])
    return (fields["name"], f"{what}\n{origin}", size, digest, fields["license"] or "not stated")


def _plain(value: str | int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) or "-"


def _short_source(source: str) -> str:
    """With commits of the hub as people write them."""
    if not source.startswith("hf:"):
        return source
    repository, _, rest = source.partition("@")
    commit, has_file, file = rest.partition(":")
    return f"{repository}@{commit[:8]}{has_file}{file}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """What does not fit is folded, so that nothing of a name or an origin is lost."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title, *cells in zip(titles, *rows, strict=True):
        lines = [line for cell in (title, *cells) for line in cell.splitlines()]
        width = min(max(map(len, lines)), MAX_WIDTHS.get(title, TABLE_WIDTH))
        side: Literal["left", "right"] = "right" if title == "size" else "left"
        # Where the terminal is narrow, the one without a width of its own gives way.
        fixed = None if title == titles[1] else width
        table.add_column(title, justify=side, width=fixed, max_width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _entry_fields(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "description": entry.description,
        "source": entry.source,
        "license": entry.license,
        "terms": entry.terms.url if entry.terms else None,
        "num_bytes": entry.num_bytes,
        "sha256": entry.sha256,
    }


def _fields(manifest: Manifest) -> dict[str, Any]:
    config = manifest.config
    return {
        "name": manifest.name,
        "source": manifest.source,
        "license": manifest.license,
        "accepted_terms": manifest.accepted_terms,
        "architecture": config.architecture,
        "quantization": manifest.quantization,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "context_tokens": config.context_tokens,
        "has_chat_template": manifest.tokenizer.chat_template is not None,
        "num_bytes": manifest.weight_bytes,
        "largest_layer_bytes": max(blob.num_bytes for blob in manifest.layers),
        "digest": manifest.digest,
    }


def _summary(manifest: Manifest) -> str:
    size = format_bytes(manifest.weight_bytes)
    return (
        f"{manifest.name} is stored: {manifest.config.num_layers} layers, {size}, digest {manifest.digest[:12]}, "
        f"licence {manifest.license or 'not stated'}"
    )
