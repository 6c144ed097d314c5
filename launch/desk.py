"""Where a fleet's launcher and those who want other devices of it meet: files in the folder of its logs.

The launcher writes which devices it has; who wants others writes those, and the launcher takes that away. Who cordons
devices for a change writes them down until it has let them in again, so that somebody else can. Each file is replaced whole.
Knows nothing of what devices are. Used by `ray_fleet` and `changes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

from modelstore.file_lock import exclusive_lock
from shoal.errors import ConfigError, NotReady


@dataclass(frozen=True, slots=True)
class Wanted:
    """Devices as on the command line. generations: of workers that were to be started anew, how often."""

    devices: tuple[str, ...]
    generations: Mapping[str, int] = field(default_factory=dict)


class Desk:
    """The files of one fleet."""

    def __init__(self, home: Path, port: int) -> None:
        folder = home / "logs" / str(port)
        self._port = port
        self._having = folder / "devices.json"
        self._wanting = folder / "wanted.json"
        self._lock_path = folder / "changing.lock"
        self._cordoned_path = folder / "cordoned.json"

    def tell(self, wanted: Wanted) -> None:
        """The launcher, which is this process, has these devices."""
        self._wanting.unlink(missing_ok=True)
        _write(self._having, {**asdict(wanted), "pid": os.getpid()})

    def take(self) -> Wanted | None:
        """What is wanted since the last time, for the launcher."""
        try:
            wanted = _wanted(json.loads(self._wanting.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            # Nothing of ours: `ask` replaces the file whole.
            wanted = None
        self._wanting.unlink(missing_ok=True)
        return wanted

    def leave(self) -> None:
        """The launcher ends."""
        self._having.unlink(missing_ok=True)

    def look(self) -> Wanted:
        """What the launcher has. Raises ConfigError if there is none that places devices."""
        try:
            content = json.loads(self._having.read_bytes())
            wanted, pid = _wanted(content), int(content["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            wanted, pid = None, 0
        if wanted is None or not psutil.pid_exists(pid):
            raise ConfigError(
                f"no fleet on port {self._port} of this home can be changed: it must be one of `shoal up --on ray`, and "
                "this command must run where that does",
                field="server",
            )
        return wanted

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Be the only one who wants something: each says all that is to be there, and would undo what another one said.

        Raises NotReady if somebody else changes the fleet, ConfigError as look() does.
        """
        self.look()
        with exclusive_lock(self._lock_path, self._fail_as_changing):
            yield

    def _fail_as_changing(self) -> NoReturn:
        raise NotReady(
            "another `shoal scale` or `shoal roll` changes this fleet, or --autoscale does: wait for its end"
        )

    @property
    def cordoned(self) -> tuple[str, ...]:
        """Devices that a change has cordoned, or was about to, and has not let in again."""
        try:
            names = json.loads(self._cordoned_path.read_bytes())
        except (OSError, ValueError):
            return ()
        return tuple(map(str, names)) if isinstance(names, list) else ()

    @cordoned.setter
    def cordoned(self, worker_ids: Iterable[str]) -> None:
        if names := sorted(set(worker_ids)):
            _write(self._cordoned_path, names)
        else:
            self._cordoned_path.unlink(missing_ok=True)

    def ask(self, wanted: Wanted) -> None:
        """Have the launcher have these devices."""
        _write(self._wanting, asdict(wanted))


def _wanted(content: Mapping[str, object]) -> Wanted:
    devices, generations = content["devices"], content["generations"]
    if not isinstance(devices, list) or not isinstance(generations, dict):
        raise TypeError
    return Wanted(tuple(map(str, devices)), {str(name): int(number) for name, number in generations.items()})


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.replace(path)
