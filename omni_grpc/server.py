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
from contextlib import suppress
from pathlib import Path

import grpc
import zmq
from grpc_channelz.v1 import channelz

from omni_grpc.admin import AdminServicer
from omni_grpc.census import Census, Holding, holdings, standing
from omni_grpc.config import PipelineConfig, ServerConfig
from omni_grpc.control import Controls
from omni_grpc.engine import Engine
from omni_grpc.errors import ConfigError, StartError
from omni_grpc.health import SERVICE, Health, HealthServicer, add_health, add_reflection
from omni_grpc.listeners import Listeners
from omni_grpc.load import LoadFeed
from omni_grpc.observation import Observation
from omni_grpc.orca import Reports, add_orca
from omni_grpc.placement import Starts, check_memory
from omni_grpc.pool import Runtime, StagePool
from omni_grpc.pressure import Pressure
from omni_grpc.scrape import Scrape
from omni_grpc.servicer import OmniServicer
from omni_grpc.topology import build_pipeline
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, service_pb2_grpc

log = logging.getLogger(__name__)

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"
REQUEST_CALLS = ("AddRequest", "StreamingUpdate", "SubmitInteraction")
"""The calls that are about a request, and end with it or before."""
STOP_GRACE_S = 2.0
"""What gRPC gets to write the last messages, once no request runs."""
SETTLE_S = 2.0
"""Longest time that calls are still answered, once no request runs."""
QUIET_S = 0.05
"""How long no call must have come for the server to close."""


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
        self._listeners = Listeners(settings, self.pod)
        self.port = self.admin_port = self.health_port = 0
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
        self._load = LoadFeed(self.engine)
        self._reports = Reports(self._load)
        self._scrape = Scrape(self.engine)
        self._pressure = Pressure(self._pace, settings.merge_window, settings.busy_merge_window)
        self._listeners.observe(
            Observation(self.engine.metrics, self._reports.count, self._reports.trailers)
        )
        self._grpc = self._listeners.make()
        self._more: list[grpc.aio.Server] = []
        """Listeners for operators and for probes."""
        self._health: Health | None = None
        self._draining: asyncio.Task[None] | None = None
        self._refuse_at: float | None = None

    async def start(self) -> None:
        """Listens; nothing is served yet. Raises StartError if the address is taken."""
        service_pb2_grpc.add_OmniServiceServicer_to_server(
            OmniServicer(self.engine, self.pod, self._load), self._grpc
        )
        add_orca(self._grpc, self._reports)
        add_reflection(self._grpc, (SERVICE,))
        servicer = add_health(self._grpc)
        self._health = Health(servicer)
        await self._health.begin(pool.config.name for pool in self._pools)
        self.port = self._listeners.bind(self._grpc, self.settings.host, self.settings.port)
        await self._grpc.start()
        if self.settings.admin_port is not None:
            await self._start_admin(self.settings.admin_port)
        if self.settings.metrics_port is not None:
            self._scrape.start(self.settings.host, self.settings.metrics_port)
        if self.settings.health_port is not None:
            await self._start_health(self.settings.health_port, servicer)
        self._listeners.start()
        self._pressure.start()

    def _pace(self, window_s: float) -> None:
        for pool in self._pools:
            pool.pace(window_s)

    async def _start_admin(self, port: int) -> None:
        """Listens for operators."""
        admin = self._listeners.make()
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(Controls(self.engine.pipelines), self._drain_soon, self.census), admin
        )
        channelz.add_channelz_servicer(admin)
        add_reflection(admin, (ADMIN_SERVICE, CHANNELZ_SERVICE))
        self.admin_port = self._listeners.bind(admin, self.settings.admin_host, port)
        await admin.start()
        self._more.append(admin)

    async def _start_health(self, port: int, servicer: HealthServicer) -> None:
        """Listens for probes, which speak no TLS and have no token: health and nothing else."""
        probes = self._listeners.make(open_to_all=True)
        add_health(probes, servicer)
        self.health_port = self._listeners.bind(probes, self.settings.host, port, plaintext=True)
        await probes.start()
        self._more.append(probes)

    def holdings(self) -> list[Holding]:
        """Everything that requests hold; nothing when none runs."""
        calls = [
            Holding("call", "", f"{count} {name}")
            for name, count in self._listeners.calls.items()
            if count and name in REQUEST_CALLS
        ]
        return [*holdings(self.engine), *calls]

    def census(self) -> Census:
        """All holdings, and what there is whether or not requests run."""
        return Census(tuple(self.holdings()), standing(self.engine))

    @property
    def metrics_port(self) -> int:
        """Where metrics are served; 0 where they are not."""
        return self._scrape.port

    def _drain_soon(self, timeout: float | None) -> int:
        """Begins to drain; the requests that run now."""
        running = len(self.engine.orchestrator)
        limit = self.settings.drain_timeout if timeout is None else timeout
        self._draining = asyncio.create_task(self._drain(limit))
        return running

    async def _drain(self, limit: float) -> None:
        """Tells balancers, refuses new requests when they have had time to notice, and lets the
        running ones finish."""
        now = asyncio.get_running_loop().time()
        if self._health is not None:
            self._health.drain()
            if self._refuse_at is None and self._health.served:
                self._refuse_at = now + self.settings.drain_delay
        await asyncio.sleep((self._refuse_at or now) - now)
        self._load.end()
        await self.engine.drain(limit)

    async def _settle(self, limit: float) -> None:
        """Answers calls until none comes any more. Those that gRPC has not handed over when it
        stops end with CANCELLED, which no client retries."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while (wait := QUIET_S - self._listeners.idle_s) > 0:  # noqa: ASYNC110 - a time is all there is
                    await asyncio.sleep(wait)

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
        limit = self.settings.drain_timeout if drain_timeout is None else drain_timeout
        await self._drain(limit)
        if self._draining is not None:
            await self._draining
        await self._settle(min(limit, SETTLE_S))
        await self._grpc.stop(STOP_GRACE_S)
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._more))
        self._listeners.stop()
        await self._pressure.stop()
        await self._scrape.stop()
        await asyncio.gather(*(pool.close() for pool in self._pools))
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _first(group: BaseExceptionGroup[StartError]) -> StartError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StartError)
    return error
