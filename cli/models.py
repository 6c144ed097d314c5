"""`shoal models`: pull, import, list and show stored models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cli.terminal import format_bytes, note, progress, say, write_json
from shoal.config import default_home
from shoal.errors import CorruptBlob

if TYPE_CHECKING:
    from modelstore.manifest import Manifest
    from modelstore.store import ModelStore

app = typer.Typer(no_args_is_help=True, help="Pull, import, list and show models.")

Home = Annotated[Path | None, typer.Option(help="Where models are kept. [env SHOAL_HOME]", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("pull")
def pull_model(
    name: Annotated[str, typer.Argument(help="A name that `shoal models list` shows.")], home: Home = None
) -> None:
    """Get a model of the catalogue; goes on where an earlier try was interrupted."""
    note(_summary(fetch(open_store(home), name)), style="")


@app.command("import")
def import_model(
    path: Annotated[Path, typer.Argument(help="A GGUF file.", exists=True, dir_okay=False)],
    name: Annotated[str, typer.Option(help="The name to store it under.")],
    precision: Annotated[
        Literal["int8", "float32"], typer.Option(help="Of weights that the file does not have quantised.")
    ] = "int8",
    home: Home = None,
) -> None:
    """Store a model from a file."""
    with progress(f"import {name}") as update:
        manifest = open_store(home).import_gguf(path, name, precision=precision, progress=update)
    note(_summary(manifest), style="")


@app.command("list")
def list_models(json: Json = False, home: Home = None) -> None:
    """List what is stored and what can be pulled."""
    from modelstore.catalog import CATALOG

    store = open_store(home)
    stored = {name: _describe(store, name) for name in store.names()}
    others = [entry for entry in CATALOG.values() if entry.name not in stored]
    if json:
        write_json({"stored": list(stored.values()), "can_be_pulled": others})
        return
    for name, fields in stored.items():
        if "error" in fields:
            say(f"{name}: damaged, pull or import it again")
        else:
            what = f"{fields['architecture']}, {fields['num_layers']} layers, {fields['quantization']}"
            say(f"{name}: {what}, {format_bytes(fields['num_bytes'])}, {fields['license']}")
    for entry in others:
        size = format_bytes(entry.num_bytes)
        say(f"{entry.name}: {entry.description}, {size}, {entry.license} (`shoal models pull {entry.name}`)")


@app.command("show")
def show_model(
    name: Annotated[str, typer.Argument(help="The name it is stored under.")], json: Json = False, home: Home = None
) -> None:
    """Show what is known of a stored model."""
    fields = _fields(open_store(home).open(name))
    if json:
        write_json(fields)
        return
    for key, value in fields.items():
        say(f"{key.replace('_', ' ')}: {format_bytes(value) if key.endswith('_bytes') else value}")


def open_store(home: Path | None) -> ModelStore:
    from modelstore.store import ModelStore

    return ModelStore(home or default_home())


def fetch(store: ModelStore, name: str) -> Manifest:
    """Pull a model, showing how far it is; at once if it is stored."""
    from modelstore.pull import pull

    with progress(f"pull {name}") as update:
        return pull(store, name, update)


def _describe(store: ModelStore, name: str) -> dict[str, Any]:
    try:
        return _fields(store.open(name))
    except CorruptBlob as error:
        return {"name": name, "error": error.message}


def _fields(manifest: Manifest) -> dict[str, Any]:
    config = manifest.config
    return {
        "name": manifest.name,
        "source": manifest.source,
        "license": manifest.license,
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
    return f"{manifest.name} is stored: {manifest.config.num_layers} layers, {size}, digest {manifest.digest[:12]}"
