"""A watcher process that outlives a replica by a moment and leaves nothing of it behind.

An engine starts processes of its own (vLLM: an engine core and workers), which go on when the
process that started them is killed. So each replica is the leader of its own process group, and a
watcher outside that group kills the group when the replica ends in whatever way, or when the server
is gone."""

from __future__ import annotations

import os
import select
import signal


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
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        poll = select.poll()
        for pid in (server_pid, replica_pid):
            poll.register(os.pidfd_open(pid), select.POLLIN)
        poll.poll()
    finally:
        try:
            os.killpg(replica_pid, signal.SIGKILL)
        finally:
            os._exit(0)
