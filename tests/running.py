"""Servers for behaviour tests: in this process on a free port, or as the real command; and what
tests ask of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.config import PipelineConfig, ServerConfig
from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.support import ENVIRONMENT, ROOT, client, stub_of

BIN = Path(sys.executable).parent
Command = Sequence[str | Path]
HOST_MODULE = "omni_grpc.stages.host"


# ---------------------------------------------------------------- servers


@dataclass(slots=True)
class Running:
    """A server in this process, with stubs."""

    server: Server
    channel: grpc.aio.Channel
    omni: Any
    health: Any
    stopped: bool = field(default=False, init=False)

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Stops the server; once."""
        if not self.stopped:
            self.stopped = True
            await self.server.stop(drain_timeout)

    async def check(self, name: str) -> str:
        """The status of a health name; the status code's name where there is no such name."""
        request = health_pb2.HealthCheckRequest(service=name)
        try:
            answer = await self.health.Check(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@asynccontextmanager
async def serving(
    *pipelines: PipelineConfig, warm: bool = True, **settings: Any
) -> AsyncIterator[Running]:
    """A server of these pipelines on a free port, warm unless told otherwise."""
    server = Server(ServerConfig(port=0, **settings), pipelines)
    running = None
    try:
        await server.start()
        async with client(server) as channel:
            running = Running(server, channel, stub_of(channel), health_stub(channel))
            if warm:
                await server.warm()
            yield running
    finally:
        if running is None or not running.stopped:
            await server.stop(drain_timeout=0)


def health_stub(channel: grpc.aio.Channel) -> Any:
    """A stub of the health service."""
    return health_pb2_grpc.HealthStub(channel)


def health_check(port: int, service: str, timeout: float = 5) -> str:
    """What a plain Check says, as a kubelet asks; the status code's name if it fails."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code.name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


class ServerProcess:
    """`omni-grpc serve` on a free port. Its log is kept, and nothing of it outlives the `with`."""

    def __init__(
        self,
        *pipelines: PipelineConfig | str,
        arguments: Sequence[str] = ("--port", "0"),
        environment: Mapping[str, str] | None = None,
        wrap: Callable[[Command], tuple[Command, Mapping[str, str]]] | None = None,
    ) -> None:
        """`wrap` makes of the command line another one, and all its variables."""
        # Not below pytest's folder: paths of sockets are short.
        self._home = tempfile.TemporaryDirectory(prefix="ot-")
        self._log = Path(self._home.name) / "server.log"
        self.folder = Path(self._home.name) / "tmp"
        """Its TMPDIR."""
        self.folder.mkdir()
        named = [option for one in pipelines for option in ("--pipeline", self._reference(one))]
        command: Command = [BIN / "omni-grpc", "serve", *named, *arguments]
        own: Mapping[str, str] = {
            **os.environ,
            "TMPDIR": str(self.folder),
            **(environment or {}),
        }
        if wrap is not None:
            command, own = wrap(command)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=own,
                cwd=ROOT,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """All that it printed so far."""
        return self._log.read_text(errors="replace")

    def _reference(self, pipeline: PipelineConfig | str) -> str:
        if isinstance(pipeline, str):
            return pipeline
        file = Path(self._home.name) / f"{pipeline.name}.yaml"
        file.write_text(pipeline.model_dump_json(exclude_unset=True))  # JSON is YAML
        return str(file)

    def family(self) -> list[psutil.Process]:
        """Replica processes and their watchers that it started and that still run."""
        return family(self.pid)

    def await_log(self, pattern: str, seconds: float = 15) -> re.Match[str]:
        """Waits until the log holds the pattern."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.log)) is None:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log}"
            assert time.monotonic() < deadline, f"no {pattern!r} in: {self.log}"
            time.sleep(0.02)
        return found

    def await_exit(self, seconds: float = 15) -> int:
        """Waits for the exit status."""
        return self.process.wait(seconds)

    def await_port(self) -> int:
        """Waits until it listens; it may still load."""
        return int(self.await_log(r"listening on \S+:(\d+)")[1])

    def await_serving(self) -> int:
        """Waits until it serves; gives the port."""
        return int(self.await_log(r"Serving .* on \S+:(\d+)\.")[1])

    def end(self, number: int = signal.SIGTERM, seconds: float = 10) -> int:
        """Sends a signal and waits for the exit status."""
        self.process.send_signal(number)
        return self.await_exit(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(5)
        for left in self.family():
            left.kill()
        self._home.cleanup()


def family(server_pid: int) -> list[psutil.Process]:
    """Replica processes and watchers that a server started, whoever their parent is now."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "ppid"])
        if {HOST_MODULE, str(server_pid)} <= set(process.info["cmdline"] or ())
    ]


def replicas(pipeline: str, stage: str, server_pid: int | None = None) -> list[psutil.Process]:
    """The replica processes of a stage that run now, without watchers, lowest number first."""
    server_pid = server_pid or os.getpid()
    found = [
        process
        for process in family(server_pid)
        # A watcher has the same command line, but is a replica's child.
        if f"/{pipeline}-{stage}-" in process.info["cmdline"][-1]
        and process.info["ppid"] == server_pid
    ]
    return sorted(found, key=lambda process: str(process.info["cmdline"][-1]))


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], object], seconds: float, what: str = "") -> None:
    """Waits until the condition holds; for tests without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what or condition}"
        time.sleep(0.01)


# ---------------------------------------------------------------- requests


def pipeline(name: str, *stages: dict[str, Any], **settings: Any) -> PipelineConfig:
    """A pipeline; a stage that names no engine is a fake one, of text where it has an output."""
    defaults = {"engine": "fake", "environment": ENVIRONMENT}
    filled = [defaults | stage for stage in stages]
    return PipelineConfig.model_validate({"name": name, "stages": filled, **settings})


def text_pipeline(name: str, **stage: Any) -> PipelineConfig:
    """One stage, `text`, that gives text."""
    return pipeline(name, {"name": "text", "output": "text", **stage})


async def rest_of(call: Any) -> list[service_pb2.AddRequestResponse]:
    """All that still comes on a stream of which something was read."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses
