"""A server as a process on a machine with a GPU: started, asked for, stopped, and what is left."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
import yaml

from omni_grpc.v1 import service_pb2_grpc

READY_S = 420.0
FREE_MIB = 700
"""GPU memory in use that is no replica's: the driver's own, beside what others use."""
SHARED_MEMORY = Path("/dev/shm")


class Checks:
    """What was checked, and how it came out."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def note(self, name: str, ok: bool, **figures: Any) -> None:
        """One line."""
        self.lines.append({"check": name, "ok": ok, **figures})
        told = " ".join(f"{key}={value}" for key, value in figures.items())
        print(f"{'PASS' if ok else 'FAIL'} {name} {told}", flush=True)


class Server:
    """`omni-grpc serve` with these pipelines, as a process. Left by `with`, it is killed if it
    still runs: what failed holds no memory of the next one."""

    def __init__(self, *pipelines: dict[str, Any]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-"))
        self._shared = set(segments())
        self.used_mib = used_mib()
        """GPU memory that others used before."""
        self.log = self._folder / "log"
        named = []
        for pipeline in pipelines:
            file = self._folder / f"{pipeline['name']}.yaml"
            file.write_text(yaml.safe_dump(pipeline))
            named += ["--pipeline", str(file)]
        command = [sys.executable, "-m", "omni_grpc.cli", "serve", *named, "--port", "0"]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command, stdout=self.log.open("wb"), stderr=subprocess.STDOUT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            family = self.family()
            self.process.kill()
            self.process.wait()
            within(lambda: not any(map(alive, family)), 10)
        if error is not None:
            print(f"----- the server's last words\n{self.text()[-4000:]}\n-----", flush=True)

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def port(self, seconds: float = READY_S) -> int:
        """Waits until it serves."""
        deadline = time.monotonic() + seconds
        while "Serving " not in self.text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("it does not serve")
            time.sleep(0.2)
        return int(self.text().split("Serving ")[1].split(". Try")[0].rpartition(":")[2])

    def age(self) -> float:
        """Seconds since it was started."""
        return round(time.monotonic() - self.started, 1)

    def family(self) -> list[psutil.Process]:
        """All processes below it."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def engines(self) -> list[psutil.Process]:
        """vLLM's engine cores below it."""
        return [process for process in self.family() if "EngineCore" in process.name()]

    def left(self) -> list[str]:
        """Shared memory that came while it ran, and is there."""
        return sorted(set(segments()) - self._shared)

    def end(self, number: int) -> float:
        """Ends it by a signal; seconds until it was gone."""
        started = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(60)
        return round(time.monotonic() - started, 1)


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Any]:
    """A stub."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield service_pb2_grpc.OmniServiceStub(channel)


async def stopped(checks: Checks, name: str, server: Server) -> None:
    """A stop by SIGTERM ends well and leaves nothing."""
    family = server.family()
    took = await asyncio.to_thread(server.end, signal.SIGTERM)
    gone = within(lambda: not any(map(alive, family)), 5)
    free = within(lambda: used_mib() < server.used_mib + FREE_MIB, 5)
    # Python's resource trackers outlive those whose shared memory they take away.
    within(lambda: not server.left(), 5)
    left, status = server.left(), server.process.returncode
    good = status == 0 and gone is not None and free is not None and not left
    checks.note(
        name, good, stop_s=took, status=status, gone_s=gone, free_s=free, shm=left,
        used_mib=used_mib(),
    )  # fmt: skip


def used_mib() -> int:
    """GPU memory in use, over all devices; 0 where there is none."""
    if shutil.which("nvidia-smi") is None:
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(query, capture_output=True, text=True).stdout.split()))


def segments() -> list[str]:
    """Shared memory that is there."""
    return sorted(path.name for path in SHARED_MEMORY.iterdir())


def alive(process: psutil.Process) -> bool:
    """Whether it runs."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def within(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until the condition held; None if it did not."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            return None
        time.sleep(0.1)
    return round(time.monotonic() - started, 1)
