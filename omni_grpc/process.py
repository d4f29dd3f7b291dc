"""The process of a replica: spawned, its output relayed to the log, killed with all that it
started."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from omni_grpc.config import StageConfig

PIPE_TIMEOUT_S = 5.0
"""How long the last processes of a replica's group may take to go once they are killed."""
LAST_LINES = 12
"""How much of what a process printed is shown when it does not start."""
LINE_BYTES = 1 << 16
"""Most bytes of a line that is not ended yet."""


class ReplicaProcess:
    """One spawned process, leader of its own process group. `name` is for the log."""

    def __init__(self, name: str, logger: logging.Logger) -> None:
        self._name = name
        self._logger = logger
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)

    async def spawn(self, endpoint: str, environment: Mapping[str, str]) -> None:
        """Starts the host of a stage, which connects to `endpoint`."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "omni_grpc.stages.host",
            str(os.getpid()),
            endpoint,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Leader of its own process group: it and all that it starts can be killed as one.
            start_new_session=True,
        )
        self._relay = asyncio.create_task(self._relay_log(self._process))

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was spawned."""
        return self._process.pid if self._process is not None else 0

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last of what it printed."""
        return tuple(self._last_lines)

    async def ended(self) -> str:
        """Returns how it ended, when it has: "exited with 1", "was ended by SIGKILL"."""
        assert self._process is not None
        status = await self._process.wait()
        return f"was ended by {_signal_name(-status)}" if status < 0 else f"exited with {status}"

    def kill(self) -> None:
        """Kills it and all that it started. Nothing where it is not there."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Kills it if it runs, and returns when nothing of its group is left, or after
        PIPE_TIMEOUT_S."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self.kill()
            await self._process.wait()
        if self._relay is not None:
            # The last of its process group closes the pipe: then nothing of it is left.
            await asyncio.wait([self._relay], timeout=PIPE_TIMEOUT_S)
            self._relay.cancel()
            await asyncio.gather(self._relay, return_exceptions=True)

    async def _relay_log(self, process: asyncio.subprocess.Process) -> None:
        """Passes what the process prints on to the server's log, line by line, with its name."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(LINE_BYTES):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-LINE_BYTES:]
            self._log_lines(lines)
        self._log_lines([rest])

    def _log_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            if line.strip():
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                self._logger.info("[%s] %s", self._name, text)


def replica_environment(config: StageConfig, device: str) -> Mapping[str, str]:
    """Environment of a replica process: the server's, its own devices and threads, its stage's
    variables."""
    kind, _, numbers = device.partition(":")
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    # "" hides every device: a CPU replica cannot touch a GPU by accident.
    environment["CUDA_VISIBLE_DEVICES"] = numbers if kind == "cuda" else ""
    if config.threads is not None:
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[variable] = str(config.threads)
    return environment | config.environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
