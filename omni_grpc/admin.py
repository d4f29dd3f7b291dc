"""AdminService: an operator's calls, on a listener of their own. Decode, call, encode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omni_grpc.census import Census
from omni_grpc.control import Controls
from omni_grpc.errors import InvalidField, OmniError
from omni_grpc.interceptors import Context
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc
from omni_grpc.wire.interactions import encode_error
from omni_grpc.wire.values import optional

Response = TypeVar("Response")
Results = Sequence[tuple[int, OmniError | None]]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The service over one server's controls."""

    def __init__(
        self,
        controls: Controls,
        drain: Callable[[float | None], int],
        census: Callable[[], Census],
    ) -> None:
        self._controls = controls
        self._drain = drain
        self._census = census

    async def PauseStage(
        self, request: admin_pb2.PauseStageRequest, context: Context
    ) -> admin_pb2.PauseStageResponse:
        """No new work for these replicas; what runs goes on."""
        results = self._controls.pause(*_target(request.target), paused=True)
        return admin_pb2.PauseStageResponse(results=_encode(results))

    async def ResumeStage(
        self, request: admin_pb2.ResumeStageRequest, context: Context
    ) -> admin_pb2.ResumeStageResponse:
        """New work again."""
        results = self._controls.pause(*_target(request.target), paused=False)
        return admin_pb2.ResumeStageResponse(results=_encode(results))

    async def ResetCache(
        self, request: admin_pb2.ResetCacheRequest, context: Context
    ) -> admin_pb2.ResetCacheResponse:
        """Empties caches; neither named is both."""
        both = not (request.prefix_cache or request.media_cache)
        arguments = {
            "prefix_cache": request.prefix_cache or both,
            "media_cache": request.media_cache or both,
        }
        results = await self._call(request.target, "reset_cache", arguments)
        return admin_pb2.ResetCacheResponse(results=results)

    async def SleepStage(
        self, request: admin_pb2.SleepStageRequest, context: Context
    ) -> admin_pb2.SleepStageResponse:
        """Frees device memory, once what runs has finished."""
        level = optional(request, "level")
        if level not in (None, 1, 2):
            raise InvalidField("level", "must be 1 or 2")
        results = await self._controls.sleep(*_target(request.target), level or 1)
        return admin_pb2.SleepStageResponse(results=_encode(results))

    async def WakeStage(
        self, request: admin_pb2.WakeStageRequest, context: Context
    ) -> admin_pb2.WakeStageResponse:
        """Wakes, then lets new work come."""
        results = await self._controls.wake(*_target(request.target))
        return admin_pb2.WakeStageResponse(results=_encode(results))

    async def LoadLora(
        self, request: admin_pb2.LoadLoraRequest, context: Context
    ) -> admin_pb2.LoadLoraResponse:
        """Loads an adapter; replicas that are started later load it too."""
        if not request.name:
            raise InvalidField("name", "is empty")
        if not request.path:
            raise InvalidField("path", "is empty")
        results = await self._controls.load_lora(
            *_target(request.target), request.name, request.path
        )
        return admin_pb2.LoadLoraResponse(results=_encode(results))

    async def UnloadLora(
        self, request: admin_pb2.UnloadLoraRequest, context: Context
    ) -> admin_pb2.UnloadLoraResponse:
        """Unloads an adapter."""
        results = await self._controls.unload_lora(*_target(request.target), request.name)
        return admin_pb2.UnloadLoraResponse(results=_encode(results))

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        """No new requests; the running ones may finish."""
        timeout = None
        if request.HasField("timeout"):
            timeout = request.timeout.ToTimedelta().total_seconds()
            if timeout < 0:
                raise InvalidField("timeout", "must be 0 or more")
        return admin_pb2.DrainResponse(running=self._drain(timeout))

    async def GetCensus(
        self, request: admin_pb2.GetCensusRequest, context: Context
    ) -> admin_pb2.GetCensusResponse:
        """What requests hold."""
        census = self._census()
        return admin_pb2.GetCensusResponse(
            holdings=[
                admin_pb2.Holding(kind=one.kind, request_id=one.request_id, detail=one.detail)
                for one in census.holdings
            ],
            standing=census.standing,
        )

    async def _call(
        self, target: admin_pb2.StageTarget, command: str, arguments: dict[str, Any]
    ) -> list[admin_pb2.ReplicaResult]:
        return _encode(await self._controls.call(*_target(target), command, arguments))


def _target(target: admin_pb2.StageTarget) -> tuple[str, tuple[int, ...]]:
    if not target.stage:
        raise InvalidField("target.stage", "is empty")
    return target.stage, tuple(target.replicas)


def _encode(results: Results) -> list[admin_pb2.ReplicaResult]:
    encoded = []
    for replica, error in results:
        result = admin_pb2.ReplicaResult(replica=replica)
        # OK is said too: a status with code 0.
        result.status.SetInParent()
        if error is not None:
            result.status.CopyFrom(encode_error(error.record()))
        encoded.append(result)
    return encoded
