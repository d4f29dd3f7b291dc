"""Three servers behind HAProxy, with the configuration that the documentation shows."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import pytest

from tests.running import ServerProcess, text_pipeline, wait_until
from tests.support import ROOT

PAGE = ROOT / "docs/load-balancing.md"
PODS = ("omni-1", "omni-2", "omni-3")
# Below the ports that the system gives to outgoing connections: one of these could take a
# server's while that one restarts.
PORTS = range(20_000, 32_000)
DRAIN_DELAY_S = 3.0
"""As the page says: more than the balancer takes to notice."""


def block(language: str) -> str:
    """The page's code block of a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(found)


def retrying(**more: Any) -> list[tuple[str, Any]]:
    """Channel options of a client with the page's retry policy, `more` in its service config, and
    a connection of its own."""
    return [
        ("grpc.service_config", json.dumps(json.loads(block("json")) | more)),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def channel(port: int) -> grpc.aio.Channel:
    """A channel of such a client."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=retrying())


def balancing(ports: Iterable[int]) -> grpc.aio.Channel:
    """A channel of a client that knows all servers, and which of them are ready."""
    options = retrying(
        loadBalancingConfig=[{"round_robin": {}}],
        healthCheckConfig={"serviceName": "omni-readiness"},
    )
    target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    return grpc.aio.insecure_channel(target, options=options)


def hashed(request_id: str) -> tuple[tuple[str, str], ...]:
    """Metadata that the balancer chooses a request's server by."""
    return (("omni-request-id", request_id),)


async def where(call: Any, request_id: str) -> tuple[tuple[str, str], ...]:
    """Metadata of later calls about a request that was accepted: its server by name, too."""
    return (*hashed(request_id), ("omni-pod", dict(await call.initial_metadata())["omni-pod"]))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


def require_haproxy() -> None:
    """Installs HAProxy where that is possible, else skips."""
    if shutil.which("haproxy") is None:
        done = subprocess.run([ROOT / "scripts/install_haproxy"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"not run: {done.stderr.strip() or 'HAProxy cannot be installed'}")


class Balancer:
    """HAProxy before these servers, by name."""

    def __init__(self, servers: Mapping[str, int]) -> None:
        (self.port,) = free_ports(1)
        self._home = tempfile.TemporaryDirectory(prefix="ob-")
        self._socket = Path(self._home.name) / "admin"
        config = block("haproxy").replace("127.0.0.1:50050", f"127.0.0.1:{self.port}")
        for name, port in servers.items():
            config, count = re.subn(rf"(server {name} 127\.0\.0\.1):\d+", rf"\g<1>:{port}", config)
            assert count == 1, name
        files = {"page.cfg": config, "test.cfg": f"global\n    stats socket {self._socket}\n"}
        for name, content in files.items():
            (Path(self._home.name) / name).write_text(content)
        self._log = Path(self._home.name) / "haproxy.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["haproxy", "-db", *(part for name in files for part in ("-f", name))],
                cwd=self._home.name,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def states(self) -> dict[str, str]:
        """What HAProxy thinks of each server: UP, DOWN, or on the way."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(self._socket))
            asking.sendall(b"show stat omni 4 -1\n")
            with asking.makefile() as answer:
                rows = csv.DictReader(answer.read().removeprefix("# ").splitlines())
                return {row["svname"]: row["status"] for row in rows}

    def await_state(self, state: str, *servers: str, seconds: float = 10) -> None:
        """Waits until it thinks so of these."""

        def reached() -> bool:
            assert self._process.poll() is None, self._log.read_text()
            if not self._socket.exists():
                return False
            states = self.states()
            return all(states[server] == state for server in servers)

        wait_until(reached, seconds, f"{servers} {state}")

    def __enter__(self) -> Balancer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait(5)
        self._home.cleanup()


class Farm:
    """The servers, each on a port that it keeps when it restarts, and the balancer."""

    def __init__(self) -> None:
        self.ports = dict(zip(PODS, free_ports(len(PODS)), strict=True))
        self.servers: dict[str, ServerProcess] = {}
        self._logs: list[str] = []
        self._stack = ExitStack()
        self.balancer = self._stack.enter_context(Balancer(self.ports))

    @property
    def port(self) -> int:
        """Where the balancer listens."""
        return self.balancer.port

    def launch(self, pod: str, drain_delay: float = DRAIN_DELAY_S) -> ServerProcess:
        """Starts a server that does not run."""
        settings = {"port": self.ports[pod], "drain-delay": drain_delay, "drain-timeout": 15}
        server = ServerProcess(
            text_pipeline("balanced", engine_args={"interactive": True}),
            arguments=[f"--{name}={value}" for name, value in settings.items()],
            environment={"POD_NAME": pod},
        )
        self.servers[pod] = self._stack.enter_context(server)
        return server

    def await_serving(self, pod: str) -> None:
        """Waits until it serves; long enough for a busy machine that starts three."""
        self.servers[pod].await_log(r"Serving ", 60)

    def end(self, pod: str) -> None:
        """SIGTERM; it must exit with success."""
        server = self.servers[pod]
        assert server.end(signal.SIGTERM, seconds=25) == 0, server.log
        self._logs.append(server.log)
        assert "Traceback" not in server.log, server.log

    def kill(self, pod: str) -> None:
        """SIGKILL."""
        self.servers[pod].end(signal.SIGKILL)

    def refusals(self) -> int:
        """Calls that servers refused because they drained, so far."""
        logs = [*self._logs, *(server.log for server in self.servers.values())]
        return sum(log.count(" UNAVAILABLE ") for log in set(logs))

    def heal(self) -> None:
        """Starts what does not run; returns when the balancer sees all of them."""
        for pod, server in self.servers.copy().items():
            if server.process.poll() is not None:
                self.launch(pod)
        self._await_all()

    def _await_all(self) -> None:
        for pod in self.servers:
            self.await_serving(pod)
        self.balancer.await_state("UP", *self.ports)

    def __enter__(self) -> Farm:
        try:
            for pod in self.ports:
                self.launch(pod)
            self._await_all()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
