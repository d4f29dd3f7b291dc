"""A watcher process that outlives a replica by a moment and leaves nothing of it behind.

An engine starts processes of its own (vLLM: an engine core and workers), which go on when the
process that started them is killed; and it makes shared memory, which stays when all of them are.
So each replica is the leader of its own process group, and a watcher outside that group kills the
group when the replica ends in whatever way, or when the server is gone, and then removes the shared
memory that only the group had."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = "/dev/shm/"
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
"""Between two looks at what the group holds: soon while a model is loaded, seldom later."""
GROUP_TIMEOUT_S = 5.0
"""Longest wait for processes that were killed."""


def guard_process_group(server_pid: int) -> None:
    """Forks the watcher. Call it first, while the process has one thread and no engine.

    The caller must lead its process group. Raises RuntimeError if the server is gone already.
    """
    replica_pid = os.getpid()
    if os.getpgrp() != replica_pid:
        raise RuntimeError("a replica must lead its own process group")
    if os.fork() == 0:
        _watch(server_pid, replica_pid)
    if os.getppid() != server_pid:
        raise RuntimeError("the server is gone")


def _watch(server_pid: int, replica_pid: int) -> None:
    # Nothing here may fail before the kill, and nothing may return into the replica's code.
    group = Group(replica_pid)
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        poll = select.poll()
        for pid in (server_pid, replica_pid):
            poll.register(os.pidfd_open(pid), select.POLLIN)
        pause = FIRST_LOOK_S
        while not poll.poll(pause * 1e3):
            group.look()
            pause = min(2 * pause, LAST_LOOK_S)
        group.look()
    finally:
        try:
            os.killpg(replica_pid, signal.SIGKILL)
        finally:
            with suppress(Exception):
                group.clear()
            os._exit(0)


class Group:
    """A replica's process group: who is in it, and which shared memory they have mapped."""

    def __init__(self, leader: int) -> None:
        self._members = {leader}
        self._mapped: set[str] = set()

    def look(self) -> None:
        """Takes note of processes that came and of what all have mapped."""
        with suppress(OSError):
            for pid in tuple(self._members):
                self._members |= set(_descendants(pid))
            # Not the watcher, the leader's child: it is to stay.
            self._members = {p for p in self._members if p != os.getpid() and _lives(p)}
            for pid in self._members:
                self._mapped |= _shared_memory(pid)

    def clear(self) -> None:
        """Removes what the group had mapped and nobody has any more. After the group was killed."""
        deadline = time.monotonic() + GROUP_TIMEOUT_S
        while any(map(_lives, self._members)) and time.monotonic() < deadline:
            time.sleep(0.02)
        left = {path for path in self._mapped if os.path.exists(path)}
        if left:
            # Another server's, or a process's that outlived the kill: not ours to remove.
            for pid in _all_processes():
                left -= _shared_memory(pid)
        for path in left:
            with suppress(OSError):
                os.unlink(path)


def _descendants(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)


def _shared_memory(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped; none of one that is gone, or not ours."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            # address permissions offset device inode path; " (deleted)" where the name is gone.
            fields = [line.split(maxsplit=5) for line in maps if SHARED_MEMORY in line]
    except OSError:
        return set()
    paths = (entry[5].strip() for entry in fields if len(entry) == 6)
    return {path for path in paths if path.startswith(SHARED_MEMORY)}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _all_processes() -> Iterable[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
