"""The names of cordoned devices, in a file of the orchestrator's home, so that a restart lets none of them in again.

Knows names alone: what a cordon means is `core.fleet`'s, and `relief` says when one comes or goes. The file is small and is
replaced whole; what cannot be read is taken for none, and said.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.types import WorkerId

logger = logging.getLogger(__name__)


class CordonFile:
    """Invariant: the file has what was written last, whole, or what was there before."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> frozenset[WorkerId]:
        """The names that were kept; none if there is no file, or nothing sound in it."""
        try:
            names = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return frozenset()
        except (OSError, ValueError) as error:
            logger.warning("cordons_not_read path=%s error=%s", self._path, error)
            return frozenset()
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            logger.warning("cordons_not_read path=%s error=it is no list of names", self._path)
            return frozenset()
        return frozenset(map(WorkerId, names))

    def write(self, names: Iterable[WorkerId]) -> None:
        """Keep these and no others. A few bytes, once an operator has said something: nobody waits for a disk long."""
        part = self._path.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_text(json.dumps(sorted(names)))
            os.replace(part, self._path)
        except OSError as error:
            logger.warning("cordons_not_kept path=%s error=%s: a restart would forget them", self._path, error)
