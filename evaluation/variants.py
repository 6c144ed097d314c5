"""Packs single layers of an opened model at several precisions, into a folder that goes when the work is done.

Knows what has been packed already, and lends the pieces as a manifest to those who run them. Decides nothing; the choice of
precisions is its caller's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from modelstore.blob_writer import BlobWriter
from modelstore.manifest import BlobEntry, Manifest
from modelstore.packing import BlobPlan, Packer
from modelstore.requantize import FLOAT32, INT8, uniform
from modelstore.source import SourceModel

# Of a packer's plans: before the layers come embedding and rotary tables, behind them the head.
NUM_PLANS_BEFORE_LAYERS = 2


class Variants:
    """A model's blobs at precisions. is_forced: see `modelstore.requantize.Precisions`."""

    def __init__(self, model: SourceModel, folder: Path, *, is_forced: bool) -> None:
        self._model = model
        self._is_forced = is_forced
        self.folder = folder
        self._plans: dict[str, list[BlobPlan]] = {}
        self._blobs: dict[tuple[str, int], BlobEntry] = {}

    @property
    def num_layers(self) -> int:
        return self._model.config.num_layers

    def need_bytes(self, precisions: Sequence[str]) -> int:
        """Room for all blobs at these precisions, with the ends and one layer at a time in float32 beside them."""
        first, _, *layers, last = (plan.num_bytes for plan in self._plans_at(FLOAT32))
        kept = sum(plan.num_bytes for precision in precisions for plan in self._plans_at(precision))
        return kept + first + max(layers) + last

    def layer(self, index: int, precision: str) -> BlobEntry:
        return self._blob(precision, NUM_PLANS_BEFORE_LAYERS + index)

    def forget_layer(self, index: int, precision: str) -> None:
        """Delete a layer's blob, unless it is the same at another precision."""
        blob = self._blobs.pop((precision, NUM_PLANS_BEFORE_LAYERS + index))
        if blob.digest not in {other.digest for other in self._blobs.values()}:
            (self.folder / blob.digest).unlink()

    def manifest(self, layers: Sequence[str], *, ends: str = INT8) -> Manifest:
        """A model whose layers have these precisions."""
        return self._manifest([self.layer(index, precision) for index, precision in enumerate(layers)], ends)

    def manifest_with_layer(self, index: int, precision: str) -> Manifest:
        """One of which this layer only is to be run, and the ends in float32."""
        return self._manifest([self.layer(index, precision)] * self.num_layers, FLOAT32)

    def _manifest(self, layers: Sequence[BlobEntry], ends: str) -> Manifest:
        return Manifest(
            name="variant",
            source="",
            license="",
            config=self._model.config,
            quantization="",
            tokenizer=self._model.tokenizer,
            embedding=self._blob(ends, 0),
            rope=self._blob(ends, 1),
            layers=tuple(layers),
            head=self._blob(ends, NUM_PLANS_BEFORE_LAYERS + self.num_layers),
        )

    def _blob(self, precision: str, number: int) -> BlobEntry:
        key = (precision, number)
        if key not in self._blobs:
            self._blobs[key] = self._write(self._plans_at(precision)[number])
        return self._blobs[key]

    def _plans_at(self, precision: str) -> list[BlobPlan]:
        if precision not in self._plans:
            self._plans[precision] = Packer(self._model, uniform(precision, is_forced=self._is_forced)).plans()
        return self._plans[precision]

    def _write(self, plan: BlobPlan) -> BlobEntry:
        path = self.folder / "blob"
        with path.open("w+b") as file:
            writer = BlobWriter(file)
            plan.write(writer)
            blob = writer.finish()
        path.replace(self.folder / blob.digest)
        return blob


@contextmanager
def open_variants(model: SourceModel, folder: Path, *, is_forced: bool) -> Iterator[Variants]:
    """Variants in a folder that is emptied first, should somebody have been killed there, and deleted afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield Variants(model, folder, is_forced=is_forced)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
