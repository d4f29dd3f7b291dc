"""Directories that a prompt transform makes for a request. The request owns them: every ending
deletes them, and nothing else is ever deleted."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


class Artifacts:
    """One request's directories below the server's artifact root."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._directories: list[Path] = []
        self._kept = 0
        self._closed = False

    def make_directory(self) -> Path:
        """A new empty directory that lives as long as the request. May be called from a thread.

        Raises RuntimeError when the request has ended meanwhile: nobody would delete it.
        """
        if self._closed:
            raise RuntimeError("the request has ended")
        self._root.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self._root))
        self._directories.append(directory)
        return directory

    def adopt(self, directory: Path) -> None:
        """Makes the request the owner of a directory that a transform made by itself.

        Raises ValueError for one that is not below the artifact root: it would be deleted.
        """
        resolved = directory.resolve()
        if resolved == self._root or not resolved.is_relative_to(self._root):
            raise ValueError(f"{directory} is not below the artifact root")
        self._directories.append(resolved)

    @property
    def directories(self) -> list[Path]:
        """What the request owns now."""
        return list(self._directories)

    def keep_new(self) -> None:
        """What they were made for was taken: they stay until the request's end."""
        self._kept = len(self._directories)

    def drop_new(self) -> None:
        """What they were made for was refused: deletes those made since the last `keep_new`."""
        self._delete_from(self._kept)

    def delete(self) -> None:
        """Deletes them all, soon and off the event loop. Idempotent."""
        self._closed = True
        self._delete_from(0)

    def _delete_from(self, first: int) -> None:
        doomed = self._directories[first:]
        del self._directories[first:]
        if doomed:
            asyncio.get_running_loop().run_in_executor(None, _remove, doomed)


def _remove(directories: list[Path]) -> None:
    for directory in directories:
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            continue
        except OSError:
            log.exception("cannot delete %s", directory)
