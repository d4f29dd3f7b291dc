"""Processes that are measured: each in a session of its own, its output in a file, and ended with
all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parents[1]
STOP_TIMEOUT_S = 20.0


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the repository's code in front."""
    paths = [more.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Measured:
    """A running process. Use it in a `with`."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env or environment()),
                cwd=ROOT,
                start_new_session=True,
            )
        self.view = psutil.Process(self._process.pid)

    @classmethod
    def module(cls, module: str, *arguments: str, log: Path, **more: str) -> Measured:
        """One that runs a module with this interpreter; `more` is further environment."""
        return cls([sys.executable, "-m", module, *arguments], log, environment(**more))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Seconds of CPU that it alone has used, all of its threads."""
        times = self.view.cpu_times()
        return float(times.user + times.system)

    def family_cpu_s(self) -> float:
        """Seconds of CPU of it and of all that it started."""
        total = self.cpu_s()
        for child in self.view.children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += float(times.user + times.system)
        return total

    def rss(self) -> int:
        """Its memory in bytes."""
        return int(self.view.memory_info().rss)

    def await_line(self, words: str, seconds: float) -> float:
        """Waits until it has printed `words`; the seconds that it took from its start. Raises
        RuntimeError where it ends before."""
        deadline = time.monotonic() + seconds
        while words not in (said := self._log.read_text(errors="replace")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {words!r} in what it printed:\n{said[-2000:]}")
            time.sleep(0.02)
        return time.time() - self.view.create_time()

    def check(self) -> None:
        """Raises RuntimeError where it has ended."""
        if self._process.poll() is not None:
            said = self._log.read_text(errors="replace")
            raise RuntimeError(f"it ended with {self._process.returncode}:\n{said[-2000:]}")

    def __enter__(self) -> Measured:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        family = self.view.children(recursive=True) if self._process.poll() is None else []
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for left in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
