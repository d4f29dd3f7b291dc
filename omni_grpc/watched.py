"""Files that may change while the server runs: certificates, tokens."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from omni_grpc.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

REFRESH_S = 0.5


class Watched(Generic[T]):
    """What some files hold together, read again when one of them has changed.

    The first reading may raise ConfigError. A later one that fails is logged, once until the files
    change again, and what was read before still holds: a file may be half-written."""

    def __init__(self, name: str, paths: Iterable[Path], read: Callable[[], T]) -> None:
        self._name, self._paths, self._read = name, tuple(paths), read
        self._seen = self._state()
        self.value = read()

    def refresh(self) -> None:
        """Reads the files again if they have changed. Waits for the file system."""
        # Before they are read: what changes meanwhile is seen the next time.
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.value = self._read()
        except ConfigError as error:
            log.error("%s: as before, for what is there now cannot be used: %s", self._name, error)
        else:
            log.info("%s: read again", self._name)

    def _state(self) -> list[tuple[int, ...] | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> tuple[int, ...] | None:
    """What differs when a file was written, replaced, or the link to it swapped (as Kubernetes does
    it); None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


class Refreshable(Protocol):
    """What a Watcher refreshes."""

    def refresh(self) -> None: ...


class Watcher:
    """Refreshes until it is stopped, in a thread of its own: a file system may hang."""

    def __init__(self, watched: Iterable[Refreshable]) -> None:
        self._watched = tuple(watched)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Begins."""
        if self._watched:
            threading.Thread(target=self._run, name="watched files", daemon=True).start()

    def stop(self) -> None:
        """Ends, soon. Idempotent."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(REFRESH_S):
            for one in self._watched:
                try:
                    one.refresh()
                except Exception:
                    # A thread that dies would leave the server with files that are never read.
                    log.exception("cannot read files again")
