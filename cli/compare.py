"""`shoal models compare`: two stored forms of one model on a text, layer by layer.

What is compared is decided in `evaluation`; this shows it. Called by `cli.models`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.terminal import note, say, tell, waiting, write_json
from shoal.config import default_home
from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

    from evaluation.comparison import Comparison
    from evaluation.text import Text
    from modelstore.manifest import Manifest

MAX_TOKENS = 2048
# Long enough for windows of attention to show, and for a perplexity like those that are quoted.
WINDOW_TOKENS = 1024


def compare_models(
    a: Annotated[str, typer.Argument(help="A stored model: the reference.")],
    b: Annotated[str, typer.Argument(help="Another form of the same model.")],
    text: Annotated[Path | None, typer.Option(help="A text file; by default one that comes with Shoal.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves to this file.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of the text; what is longer is cut.")] = MAX_TOKENS,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    home: Annotated[
        Path | None, typer.Option(help="Where models are kept. [env SHOAL_HOME]", show_default=False)
    ] = None,
) -> None:
    """Compare two forms of a model layer by layer: which one lost what, and where."""
    from cli.load_report import Files, check_files
    from evaluation.comparison import compare, require_comparable
    from evaluation.parts import Parts
    from launch.pool import num_cores
    from modelstore.store import ModelStore

    check_files(Files(html=html))
    store = ModelStore(home or default_home())
    first, second = store.verify(a), store.verify(b)
    require_comparable(first, second)
    cut = _cut(first, second, text, max_tokens)
    if cut.num_left_out:
        note(f"the text is cut: its first {cut.num_tokens:,} tokens are read, {cut.num_left_out:,} are not")
    folder, num_threads = store.root / "blobs", num_cores()
    with waiting("comparing") as update:
        found = compare(Parts(first, folder, num_threads), Parts(second, folder, num_threads), cut, update)
    if html is not None:
        from evaluation.page import write_page

        write_page(html, found)
    if json:
        write_json(to_fields(found))
    else:
        _show(found)


def _cut(a: Manifest, b: Manifest, path: Path | None, max_tokens: int) -> Text:
    """The text in windows; raises InvalidRequest if the models read it differently."""
    from evaluation.text import cut_text, read_text, shipped_text
    from orchestrator.tokenizer import Tokenizer

    content = shipped_text() if path is None else read_text(path)
    window_tokens = min(WINDOW_TOKENS, a.config.context_tokens, b.config.context_tokens)
    first, second = (
        cut_text(content, Tokenizer(manifest.tokenizer), window_tokens=window_tokens, max_tokens=max_tokens)
        for manifest in (a, b)
    )
    if first.token_ids.tolist() != second.token_ids.tolist():
        raise InvalidRequest(
            "model", f"{a.name} and {b.name} have different tokenizers: they read the same text as different tokens"
        )
    return first


def to_fields(found: Comparison) -> dict[str, object]:
    """A comparison as JSON's values."""
    return {**asdict(found), "stands_out": [layer.name for layer in found.outstanding]}


def _show(found: Comparison) -> None:
    from evaluation.tables import legend, summary, text_note, verdict

    say(f"A: {found.names[0]}, B: {found.names[1]}; {text_note(found)}", style="bold")
    say(_table(found))
    tell(legend())
    say()
    for name, value in summary(found):
        say(f"{name}: {value}")
    say(verdict(found), style="bold")


def _table(found: Comparison) -> Table:
    from rich import box
    from rich.table import Table

    from evaluation.tables import HEADER, rows

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for index, title in enumerate(HEADER):
        table.add_column(title, justify="left" if index in (0, len(HEADER) - 1) else "right", no_wrap=True)
    for row in rows(found):
        table.add_row(*row, style="bold" if row[-1] else "")
    return table
