"""The server process: build → listen → load → warm → serve → drain → stop.

It listens before its models are loaded, with every health name NOT_SERVING, so that probes and
clients can see it start. It holds no torch and no vllm: models live in the replica processes that
its pools spawn."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc
import zmq
from grpc_channelz.v1 import channelz

from omni_grpc.admin import AdminServicer
from omni_grpc.config import PipelineConfig, ServerConfig
from omni_grpc.control import Controls
from omni_grpc.engine import Engine
from omni_grpc.errors import ConfigError, StartError
from omni_grpc.health import SERVICE, Health, add_health, add_reflection
from omni_grpc.interceptors import Edge
from omni_grpc.placement import Starts, check_memory
from omni_grpc.pool import Runtime, StagePool
from omni_grpc.servicer import OmniServicer
from omni_grpc.topology import build_pipeline
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, service_pb2_grpc

log = logging.getLogger(__name__)

ADMIN_HOST = "127.0.0.1"
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"
STOP_GRACE_S = 2.0
"""What gRPC gets to write the last messages, once no request runs."""


class Server:
    """One server. `start`, then `warm`, then `stop` once, whatever happened before."""

    def __init__(self, settings: ServerConfig, pipelines: Sequence[PipelineConfig]) -> None:
        if not pipelines:
            raise ConfigError("there is no pipeline to serve")
        names = [pipeline.name for pipeline in pipelines]
        if len(set(names)) != len(names):
            raise ConfigError(f"two pipelines have the same name among {', '.join(names)}")
        self.settings = settings
        self.pod = os.environ.get("POD_NAME") or socket.gethostname()
        self.port = 0
        self._configs = pipelines
        self._folder = Path(tempfile.mkdtemp(prefix="omni-grpc-"))
        self._context = zmq.Context()
        runtime = Runtime(self._context, self._folder, settings, Starts())
        self._pools: list[StagePool] = []
        built = {}
        shared: dict[str, StagePool] = {}
        for config in pipelines:
            pools = {}
            for stage in config.stages:
                # Pipelines that declare an identical stage run it once.
                key = stage.identity()
                if key not in shared:
                    shared[key] = StagePool(config.name, stage, runtime)
                    self._pools.append(shared[key])
                pools[stage.name] = shared[key]
            built[config.name] = build_pipeline(config, pools)
        check_memory(pool.config for pool in self._pools)
        self.engine = Engine(built, names[0], settings, self._folder / "artifacts")
        self._grpc = grpc.aio.server(
            interceptors=(Edge(self.pod),), options=channel_options(settings)
        )
        self._health: Health | None = None
        self.admin_port = 0
        self._admin: grpc.aio.Server | None = None
        self._draining: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens; nothing is served yet. Raises StartError if the address is taken."""
        service_pb2_grpc.add_OmniServiceServicer_to_server(
            OmniServicer(self.engine, self.pod), self._grpc
        )
        add_reflection(self._grpc, (SERVICE,))
        self._health = Health(add_health(self._grpc))
        await self._health.begin(pool.config.name for pool in self._pools)
        address = f"{self.settings.host}:{self.settings.port}"
        try:
            self.port = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise StartError(f"cannot listen on {address}: {error}") from None
        await self._grpc.start()
        if self.settings.admin_port is not None:
            await self._start_admin(self.settings.admin_port)

    async def _start_admin(self, port: int) -> None:
        """Listens for operators, on the loopback address only."""
        admin = grpc.aio.server(
            interceptors=(Edge(self.pod),), options=channel_options(self.settings)
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(Controls(self.engine.pipelines), self._drain_soon), admin
        )
        channelz.add_channelz_servicer(admin)
        add_reflection(admin, (ADMIN_SERVICE, CHANNELZ_SERVICE))
        try:
            self.admin_port = admin.add_insecure_port(f"{ADMIN_HOST}:{port}")
        except RuntimeError as error:
            raise StartError(f"cannot listen on {ADMIN_HOST}:{port}: {error}") from None
        await admin.start()
        self._admin = admin

    def _drain_soon(self, timeout: float | None) -> int:
        """Begins to drain; the requests that run now."""
        running = len(self.engine.orchestrator)
        if self._health is not None:
            self._health.drain()
        limit = self.settings.drain_timeout if timeout is None else timeout
        self._draining = asyncio.create_task(self.engine.drain(limit))
        return running

    async def warm(self) -> None:
        """Starts all replicas and, when all are ready, serves. Raises StartError with the real
        cause."""
        assert self._health is not None
        self._health.watch(self._pools)
        try:
            async with asyncio.TaskGroup() as group:
                for pool in self._pools:
                    group.create_task(self._start_pool(pool))
        except* StartError as failures:
            raise _first(failures) from None
        self._health.warm()

    async def _start_pool(self, pool: StagePool) -> None:
        config = pool.config
        log.info(
            "loading stage %s (engine %s, %d replica(s))",
            config.name,
            config.engine,
            config.replicas,
        )
        started = asyncio.get_running_loop().time()
        await pool.start()
        elapsed = asyncio.get_running_loop().time() - started
        log.info("stage %s is ready after %.1f s", config.name, elapsed)

    async def stop(self, drain_timeout: float | None = None) -> None:
        """Refuses new requests, lets the running ones finish, ends the rest, stops every replica
        once."""
        if self._health is not None:
            self._health.drain()
        limit = self.settings.drain_timeout if drain_timeout is None else drain_timeout
        await self.engine.drain(limit)
        if self._draining is not None:
            await self._draining
        await self._grpc.stop(STOP_GRACE_S)
        if self._admin is not None:
            await self._admin.stop(STOP_GRACE_S)
        await asyncio.gather(*(pool.close() for pool in self._pools))
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _first(group: BaseExceptionGroup[StartError]) -> StartError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartError)
    return error


def channel_options(settings: ServerConfig) -> list[tuple[str, int]]:
    """Options of the listener. Each has a test of its behaviour: the core ignores names that it
    doesn't know."""
    return [
        # Two servers on one port would split the traffic silently.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
