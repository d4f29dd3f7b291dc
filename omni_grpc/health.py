"""From the pools' state to health names and the reflection services.

"", omni_grpc.v1.OmniService, omni-readiness   every stage has a ready replica, not draining
omni-startup                                   every stage was ready once
omni-liveness                                  the loop answers, no slot is beyond its budget
stage/<name>                                   that stage has a ready replica
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2, health_pb2_grpc
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
STARTUP = "omni-startup"
LIVENESS = "omni-liveness"

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 whose Watch streams end on drain: an open one would use up the whole stop
    grace. grpcio's own cannot: to end its Watch is to cancel it, and cancelled in a write it leaves
    its client hanging."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._ending = False

    async def set(self, service: str, status: int) -> None:
        """Gives a name its status; watchers hear of it."""
        self._statuses[service] = status
        self._wake()

    def end_watches(self) -> None:
        """Ends every Watch stream, and each new one, when it has told the present state."""
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The state now; NOT_FOUND for a name that is not served."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such health name")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The state, and every change of it, until the client leaves or the server drains."""
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            elif self._ending:
                return
            else:
                await changed.wait()


class Health:
    """Keeps the health names true. NOT_SERVING until `warm`, and again from `drain` on."""

    def __init__(self, servicer: HealthServicer) -> None:
        self._servicer = servicer
        self._pools: list[StagePool] = []
        self._warm = False
        self._draining = False
        self._updates: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    @property
    def served(self) -> bool:
        """Whether everything was ready once."""
        return self._warm

    async def begin(self, stages: Iterable[str]) -> None:
        """Sets every name to NOT_SERVING, but liveness: a server that loads is alive."""
        for name in (*READINESS, STARTUP, *(f"stage/{stage}" for stage in stages)):
            await self._servicer.set(name, NOT_SERVING)
        await self._servicer.set(LIVENESS, SERVING)

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
            await self._set(STARTUP, self._warm)
            await self._set(LIVENESS, not any(pool.given_up for pool in self._pools))
            for stage, stage_ready in self._stages().items():
                await self._set(f"stage/{stage}", stage_ready)
            if self._draining:
                self._servicer.end_watches()

    def _stages(self) -> dict[str, bool]:
        """Whether each stage serves: where pipelines have stages of one name, whether all do."""
        stages: dict[str, bool] = {}
        for pool in self._pools:
            name = pool.config.name
            stages[name] = stages.get(name, True) and bool(pool.ready_replicas)
        return stages

    async def _set(self, name: str, serving: bool) -> None:
        await self._servicer.set(name, SERVING if serving else NOT_SERVING)


def add_health(server: grpc.aio.Server, servicer: HealthServicer | None = None) -> HealthServicer:
    """Registers the health service: `servicer`, or a new one."""
    servicer = servicer or HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Registers reflection as v1 and v1alpha: the messages are equal, and each has clients that
    know no other."""
    _describe_reflection_v1()
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


def _describe_reflection_v1() -> None:
    """Makes v1 describable too: tools that describe everything that is listed fail otherwise."""
    pool = descriptor_pool.Default()
    with suppress(KeyError):
        pool.FindFileContainingSymbol(REFLECTION_V1)
        return
    alpha = descriptor_pb2.FileDescriptorProto()
    messages.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace(
        "grpc.reflection.v1alpha", "grpc.reflection.v1"
    )
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    file.name = "grpc/reflection/v1/reflection.proto"
    pool.AddSerializedFile(file.SerializeToString())
