"""From the pools' state to health names and the reflection services.

"", omni_grpc.v1.OmniService, omni-readiness   every stage has a ready replica, not draining
omni-startup                                   every stage was ready once
omni-liveness                                  the loop answers, no slot is beyond its budget
stage/<name>                                   that stage has a ready replica
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_reflection.v1alpha import reflection_pb2 as messages
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import aio as reflection_aio

from omni_grpc.interceptors import Context
from omni_grpc.pool import StagePool
from omni_grpc.v1 import service_pb2

SERVICE = service_pb2.DESCRIPTOR.services_by_name["OmniService"].full_name
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
READINESS = ("", SERVICE, "omni-readiness")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthServicer(aio.HealthServicer):
    """grpc.health.v1 whose Watch streams end on drain: an open one would use up the whole stop
    grace."""

    def __init__(self) -> None:
        super().__init__()
        self._ending = asyncio.Event()

    def end_watches(self) -> None:
        """Ends every Watch stream, and each new one at its first answer."""
        self._ending.set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The state, and every change of it, until the client leaves or the server drains."""
        watching = asyncio.create_task(super().Watch(request, context))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((watching, ending), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            ending.cancel()
            await asyncio.gather(watching, ending, return_exceptions=True)


class Health:
    """Keeps the health names true. NOT_SERVING until `warm`, and again from `drain` on."""

    def __init__(self, servicer: HealthServicer) -> None:
        self._servicer = servicer
        self._pools: list[StagePool] = []
        self._warm = False
        self._draining = False
        self._updates: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def begin(self, stages: Iterable[str]) -> None:
        """Sets every name to NOT_SERVING, but liveness: a server that loads is alive."""
        for name in (*READINESS, "omni-startup", *(f"stage/{stage}" for stage in stages)):
            await self._servicer.set(name, NOT_SERVING)
        await self._servicer.set("omni-liveness", SERVING)

    def watch(self, pools: list[StagePool]) -> None:
        """Follows these pools from now on."""
        self._pools = pools
        for pool in pools:
            pool.observe(self.refresh)

    def warm(self) -> None:
        """Everything was ready once."""
        self._warm = True
        self.refresh()

    def drain(self) -> None:
        """Unready from now on; Watch streams hear it and end."""
        self._draining = True
        self.refresh()

    def refresh(self) -> None:
        """Brings the names up to date, soon."""
        update = asyncio.create_task(self._update())
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)

    async def _update(self) -> None:
        # In order: a newer state must not be overtaken by an older one.
        async with self._lock:
            ready = all(pool.ready_replicas for pool in self._pools)
            serving = self._warm and ready and not self._draining
            for name in READINESS:
                await self._set(name, serving)
            await self._set("omni-startup", self._warm)
            await self._set("omni-liveness", not any(pool.given_up for pool in self._pools))
            for pool in self._pools:
                await self._set(f"stage/{pool.config.name}", bool(pool.ready_replicas))
            if self._draining:
                # One turn for the Watch streams to say it.
                await asyncio.sleep(0.05)
                self._servicer.end_watches()

    async def _set(self, name: str, serving: bool) -> None:
        await self._servicer.set(name, SERVING if serving else NOT_SERVING)


def add_health(server: grpc.aio.Server) -> HealthServicer:
    """Registers the health service."""
    servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Registers reflection as v1 and v1alpha: the messages are equal, and each has clients that
    know no other."""
    names = (*services, "grpc.health.v1.Health", REFLECTION_V1, REFLECTION_V1ALPHA)
    servicer = reflection_aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=messages.ServerReflectionRequest.FromString,
        response_serializer=messages.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))
