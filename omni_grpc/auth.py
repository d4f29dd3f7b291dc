"""Who calls: the bearer token of a call, its right to the method, and its tenant."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc
from grpc_status import rpc_status

from omni_grpc.errors import OmniError, PermissionDenied, Unauthenticated
from omni_grpc.interceptors import OWN_PACKAGE, Context, rich_status
from omni_grpc.tokens import Right, Tokens

log = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
SCHEME = "bearer "
TENANT_KEY = "omni-tenant"
MAX_TENANT = 256

OMNI = "omni_grpc.v1.OmniService"
ADMIN = "omni_grpc.v1.AdminService"
CHANNELZ = "grpc.channelz.v1.Channelz"


def _of(service: str, *methods: str) -> tuple[str, ...]:
    return tuple(f"/{service}/{method}" for method in methods)


REFLECTION = (
    *_of("grpc.reflection.v1.ServerReflection", "ServerReflectionInfo"),
    *_of("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
)
# Balancers and clients ask whether a server is healthy, and carry no token.
OPEN = _of("grpc.health.v1.Health", "Check", "List", "Watch")
_INFER = _of(OMNI, "AddRequest", "StreamingUpdate", "SubmitInteraction", "Abort")
_INFO = (
    *_of(OMNI, "GetServerInfo", "GetLoad", "WatchLoad"),
    *_of("xds.service.orca.v3.OpenRcaService", "StreamCoreMetrics"),
    *REFLECTION,
)
_ADMIN = (
    *_of(ADMIN, "PauseStage", "ResumeStage", "ResetCache", "SleepStage", "WakeStage"),
    *_of(ADMIN, "LoadLora", "UnloadLora", "Drain", "GetCensus"),
    *_of(CHANNELZ, "GetTopChannels", "GetServers", "GetServer", "GetServerSockets"),
    *_of(CHANNELZ, "GetChannel", "GetSubchannel", "GetSocket"),
)
RIGHTS: Mapping[str, Right] = {
    **dict.fromkeys(_INFER, Right.INFER),
    **dict.fromkeys(_INFO, Right.INFO),
    **dict.fromkeys(_ADMIN, Right.ADMIN),
}
"""The right that a method needs. One without an entry, here or in OPEN, is refused to everyone."""

_tenant: ContextVar[str | None] = ContextVar("tenant", default=None)


def tenant_of(context: Context) -> str:
    """Whose call this is: the token's tenant. Without tokens the one that the metadata names, which
    is good for budgets among callers that trust each other, and for nothing else."""
    if (tenant := _tenant.get()) is not None:
        return tenant
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_KEY and isinstance(value, str):
            return value[:MAX_TENANT]
    return ""


class Auth(grpc.aio.ServerInterceptor):
    """Lets a call through to its handler if its token may make it.

    Goes behind Edge, which makes a status of a refusal."""

    def __init__(self, tokens: Tokens, *, open_reflection: bool) -> None:
        self._tokens = tokens
        self._open = frozenset(OPEN + (REFLECTION if open_reflection else ()))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler, or one that refuses; None where there is no such method."""
        method = handler_call_details.method
        if method in self._open:
            return await continuation(handler_call_details)
        try:
            entry = self._tokens.find(_token(handler_call_details.invocation_metadata))
        except Unauthenticated as error:
            return _refusal(method, error)
        handler = await continuation(handler_call_details)
        right = RIGHTS.get(method)
        if handler is not None and right not in entry.rights:
            needed = f"the right {right.value!r}" if right else "a right that no token has"
            return _refusal(method, PermissionDenied(f"the method needs {needed}"))
        if right is Right.ADMIN:
            log.info("%s by %s", method, entry.name)
        # The handler runs in this task: what is set here, it sees.
        _tenant.set(entry.tenant)
        return handler


def _token(metadata: Any) -> str:
    given = [value for key, value in metadata or () if key == AUTHORIZATION]
    if not given:
        raise Unauthenticated("the call has no token: send metadata 'authorization: Bearer TOKEN'")
    (value, *more) = given
    if more or not isinstance(value, str) or not value.lower().startswith(SCHEME):
        raise Unauthenticated("the call's metadata 'authorization' must be 'Bearer TOKEN', once")
    return value[len(SCHEME) :].strip()


def _refusal(method: str, error: OmniError) -> Any:
    """A handler that refuses at once. A stream whatever the method is: so it neither waits for the
    request nor parses it."""

    async def refuse(_: Any, context: Context) -> None:
        if method.startswith(OWN_PACKAGE):
            raise error
        log.info("%s %s", method, error.code.name)
        await context.abort_with_status(rpc_status.to_status(rich_status(error)))

    return grpc.stream_stream_rpc_method_handler(refuse, request_deserializer=bytes)
