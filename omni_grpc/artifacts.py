"""Directories that a prompt transform makes for a request. The request owns them: every ending
deletes them, and nothing else is ever deleted."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")

OWNED = "request-"
"""What the names begin with of the folders below the root that belong to a request."""


class Artifacts:
    """One request's directories below the server's artifact root, or those that one chunk of its
    input brought: all in one folder, so that what a transform makes beside them and tells nobody of
    goes too.

    Transforms use it from threads, which nothing can stop: what is deleted while one works is
    deleted when it has ended, with all that it made in between.

    `root` is a resolved path: to resolve it takes a system call for each of its parts.
    """

    def __init__(self, root: Path, whole: Artifacts | None = None) -> None:
        self._root = root
        self._whole = whole or self
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._directories: list[Path] = []
        self._parts: list[Artifacts] = []
        self._users = 0
        self._closed = False
        self._deleted = asyncio.Event()

    def part(self) -> Artifacts:
        """What a chunk brings: it goes with the rest, or before."""
        part = Artifacts(self._root, self)
        self._parts.append(part)
        if self._closed:
            part.delete()
        return part

    # ------------------------------------------------------------ in a thread

    def use(self, work: Callable[[], Result]) -> Result:
        """Runs what makes directories. Raises RuntimeError where the request has ended."""
        with self._lock:
            self._check_open()
            self._users += 1
        try:
            return work()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            doomed = self._take() if self._closed and not self._users else None
        if doomed is not None:
            self._remove(doomed)

    def make_directory(self) -> Path:
        """A new empty directory that lives as long as the request.

        Raises RuntimeError when the request has ended meanwhile: nobody would delete it.
        """
        with self._lock:
            self._check_open()
            if self._folder is None:
                self._root.mkdir(parents=True, exist_ok=True)
                self._folder = Path(tempfile.mkdtemp(prefix=OWNED, dir=self._root))
            directory = Path(tempfile.mkdtemp(dir=self._folder))
            self._directories.append(directory)
        return directory

    def adopt(self, directories: Iterable[Path]) -> None:
        """Makes the request the owner of directories that a transform made by itself.

        Raises ValueError for one that is not below the artifact root, or is another request's,
        since it would be deleted; the others are adopted all the same.
        """
        foreign = None
        for directory in directories:
            resolved = directory.resolve()
            if not self._may_own(resolved):
                foreign = directory
            elif resolved not in self._whole.directories:
                with self._lock:
                    self._directories.append(resolved)
        if foreign is not None:
            raise ValueError(f"{foreign} is not this request's, below the artifact root")

    def _may_own(self, resolved: Path) -> bool:
        if resolved == self._root or not resolved.is_relative_to(self._root):
            return False
        top = self._root / resolved.relative_to(self._root).parts[0]
        ours = [one._folder for one in (self, self._whole, *self._whole._parts)]
        return resolved != top if top in ours else not top.name.startswith(OWNED)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the request has ended")

    # ------------------------------------------------------------ on the loop

    @property
    def directories(self) -> list[Path]:
        """What the request owns now."""
        return [*self._directories, *(path for part in self._parts for path in part.directories)]

    def keep(self) -> None:
        """The chunk was taken: what it brought, if anything, stays as long as the request."""
        if not (self._folder or self._directories):
            self.delete()

    def delete(self) -> None:
        """Deletes them all, soon and off the event loop. Idempotent."""
        for part in list(self._parts):
            part.delete()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._users:
                return
            doomed = self._take()
        if doomed:
            self._loop.run_in_executor(None, self._remove, doomed)
        else:
            self._gone()

    async def deleted(self) -> None:
        """Returns when, after `delete`, nothing is left."""
        for one in (self, *self._parts):
            await one._deleted.wait()

    def _take(self) -> list[Path]:
        doomed, self._directories = self._directories, []
        return doomed if self._folder is None else [*doomed, self._folder]

    def _remove(self, directories: list[Path]) -> None:
        for directory in directories:
            try:
                shutil.rmtree(directory)
            except FileNotFoundError:
                continue
            except OSError:
                log.exception("cannot delete %s", directory)
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._gone)

    def _gone(self) -> None:
        self._deleted.set()
        if self._whole is not self and self in self._whole._parts:
            self._whole._parts.remove(self)
