"""Files that come with a package, found by their names, and a user's own beside them, found by their paths.

Device profiles, workloads and traces are such files. Knows nothing of what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shipped:
    """One kind of them. package, folder: where they are; what: as in "device profile"; field: for errors."""

    package: str
    folder: tuple[str, ...]
    suffix: str
    what: str
    field: str

    def names(self) -> tuple[str, ...]:
        """Those that come with Shoal."""
        found = (entry.name for entry in self._place().iterdir())
        return tuple(sorted(name.removesuffix(self.suffix) for name in found if name.endswith(self.suffix)))

    def read(self, name_or_path: str) -> tuple[str, str]:
        """What to call the file in messages, and its text; a path has a separator in it or ends in the suffix.

        Raises ConfigError that says which there are.
        """
        is_path = name_or_path.endswith(self.suffix) or "/" in name_or_path or os.sep in name_or_path
        entry = Path(name_or_path) if is_path else self._place().joinpath(name_or_path + self.suffix)
        try:
            return str(entry), entry.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no {self.what} {name_or_path!r}{meant(name_or_path, self.names())}; shipped are "
                f"{', '.join(self.names())}, or give the path of a {self.suffix} file",
                field=self.field,
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{entry}: cannot be read: {error}", field=self.field) from error

    def _place(self) -> Traversable:
        return files(self.package).joinpath(*self.folder)


def meant(name: str, names: Iterable[str]) -> str:
    """Ask for the name that somebody may have meant, to go behind the one that there is not; empty: none is like it."""
    close = get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
