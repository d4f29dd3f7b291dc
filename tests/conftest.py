"""Servers for behaviour tests: real ones, in this process, on port 0, with real stubs."""

from __future__ import annotations

import os

# Before grpc is imported anywhere: its fork handlers do nothing here but warn.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline
from omni_grpc.server import Server
from tests.clients import conformance_address  # noqa: F401 - a fixture
from tests.real import options, options_server, voice, voice_server  # noqa: F401 - fixtures
from tests.secured import guarded, guarded_server, token_file  # noqa: F401 - fixtures
from tests.streaming import streams, streams_server  # noqa: F401 - fixtures
from tests.support import Served, client, freed, stub_of

# Two busy cores: time per example says nothing there.
settings.register_profile("omni", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("omni")

Serve = Callable[..., Awaitable[Served]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    """The server's own event loop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
async def echo_server() -> AsyncIterator[Server]:
    """A server of the pipeline echo for all tests."""
    server = Server(ServerConfig(port=0), [load_pipeline("echo")])
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


@pytest.fixture
async def stub(echo_server: Server) -> AsyncIterator[Any]:
    """A client of `echo_server`. When the test is over, the server must hold nothing."""
    async with client(echo_server) as channel:
        yield stub_of(channel)
    await freed(echo_server)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server: `await serve(pipeline, **settings)`. When the test is over, it must hold
    nothing, and is stopped."""
    async with AsyncExitStack() as servers:

        async def start(*pipelines: PipelineConfig, **fields: Any) -> Served:
            server = Server(
                ServerConfig(**{"port": 0, "busy_merge_window": 0, **fields}), pipelines
            )
            servers.push_async_callback(server.stop, drain_timeout=0)
            await server.start()
            await server.warm()
            servers.push_async_callback(freed, server)
            channel = await servers.enter_async_context(client(server))
            return Served(server, stub_of(channel), channel)

        yield start
