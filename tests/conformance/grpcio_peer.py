"""gRPC's own C core, through plain stubs."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from omni_grpc.v1 import service_pb2
from tests.conformance.check import Json, Outcome
from tests.support import rich_error


def methods() -> dict[str, tuple[str, type[Message], type[Message]]]:
    """Path, request and response of every rpc of the list."""
    service = service_pb2.DESCRIPTOR.services_by_name["OmniService"]
    found = {
        method.name: (
            f"/{service.full_name}/{method.name}",
            getattr(service_pb2, method.input_type.name),
            getattr(service_pb2, method.output_type.name),
        )
        for method in service.methods
    }
    health = "/grpc.health.v1.Health/Check"
    check = (health, health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse)
    return found | {"Check": check}


METHODS = methods()
UNARY_REQUESTS = {"AddRequest", "Abort", "GetServerInfo", "GetLoad", "Check"}


class GrpcioCall:
    """A call; whatever its shape, a stream of messages both ways."""

    def __init__(self, method: Any, request: type[Message], **options: Any) -> None:
        self._request = request
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._call = method(self._sent(), **options)

    def _sent(self) -> Iterator[Message]:
        while (message := self._messages.get()) is not None:
            yield message

    def send(self, message: Json) -> None:
        """Sends a message."""
        self._messages.put(ParseDict(message, self._request()))

    def close(self) -> None:
        """Half-closes."""
        self._messages.put(None)

    def cancel(self) -> None:
        """Cancels."""
        self._call.cancel()

    def read(self) -> Json | None:
        """The next message; None when the call has ended."""
        with suppress(StopIteration, grpc.RpcError, grpc.FutureCancelledError):
            return MessageToDict(next(self._call))
        self._messages.put(None)
        return None

    def outcome(self) -> Outcome:
        """How it ended."""
        error = rich_error(self._call)
        return Outcome(
            code=error.code.name,
            message=error.message,
            domain=error.domain,
            reason=error.reason,
            fields=list(error.violations),
            retry_ms=None if error.retry is None else round(error.retry * 1000),
            headers=dict(self._call.initial_metadata() or ()),
            trailers={name: str(value) for name, value in error.trailers.items()},
        )


class GrpcioPeer:
    """A channel to a server."""

    def __init__(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(address, options=options)

    def start(self, rpc: str, metadata: Mapping[str, str], deadline_s: float) -> GrpcioCall:
        """Starts a call."""
        path, request, response = METHODS[rpc]
        method = self._channel.stream_stream(
            path,
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )
        return GrpcioCall(method, request, timeout=deadline_s, metadata=tuple(metadata.items()))

    def close(self) -> None:
        """Closes the channel."""
        self._channel.close()
