"""The listener: one server per port, quickly there, and patient with a client that pings."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator

import grpc
import pytest

from omni_grpc.config import ServerConfig
from omni_grpc.errors import StartError
from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from tests.running import ServerProcess, serving, text_pipeline


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where `echo` is served by another process."""
    with ServerProcess("echo") as server:
        yield server.await_serving()


# ---------------------------------------------------------------- the port


def test_second_server_on_a_port_ends_with_a_clear_message(port: int) -> None:
    with ServerProcess("echo", arguments=("--port", str(port))) as second:
        assert second.await_exit() == 2
        assert f"cannot listen on 127.0.0.1:{port}" in second.log
        assert "Traceback" not in second.log
        assert second.family() == []
        assert list(second.folder.iterdir()) == []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.OmniServiceStub(channel)
        assert stub.GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=5).pod


async def test_second_bind_in_one_process_fails_too() -> None:
    async with serving(text_pipeline("holder"), warm=False) as running:
        taken = running.server.port
        second = Server(ServerConfig(port=taken), [text_pipeline("second")])
        try:
            with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{taken}"):
                await second.start()
        finally:
            await second.stop(0)


async def test_port_0_takes_a_free_port() -> None:
    async with (
        serving(text_pipeline("one"), warm=False) as one,
        serving(text_pipeline("two"), warm=False) as two,
    ):
        ports = {one.server.port, two.server.port}
        assert len(ports) == 2 and 0 not in ports
        for running, name in ((one, "one"), (two, "two")):
            info = await running.omni.GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=5)
            assert info.default_pipeline == name


async def test_port_is_free_again_after_stop() -> None:
    async with serving(text_pipeline("before"), warm=False) as running:
        port = running.server.port
        await running.stop(0)
        again = Server(ServerConfig(port=port), [text_pipeline("after")])
        await again.start()
        assert again.port == port
        await again.stop(0)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_address_that_is_not_ours_ends_with_a_clear_message(host: str) -> None:
    with ServerProcess("echo", arguments=("--host", host, "--port", "0", "--insecure")) as server:
        assert server.await_exit() == 2
        assert f"cannot listen on {host}:0" in server.log
        assert "Traceback" not in server.log


# ---------------------------------------------------------------- time


def test_listens_within_two_seconds() -> None:
    took = []
    for _ in range(3):
        started = time.monotonic()
        with ServerProcess("echo") as server:
            port = server.await_port()
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            took.append(time.monotonic() - started)
    assert statistics.median(took) < 10  # the goal is 2 s
