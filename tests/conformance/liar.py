"""A server that says what a request tells it to: for runners to notice what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from omni_grpc.v1 import service_pb2, service_pb2_grpc


class LyingServicer(service_pb2_grpc.OmniServiceServicer):
    """AddRequest writes `additional_information.events`, and ends with its `status` where there is
    one, and with its `trailers`. What each call brought is kept in `heard`."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def AddRequest(
        self, request: service_pb2.AddRequestRequest, context: grpc.ServicerContext
    ) -> Iterator[service_pb2.AddRequestResponse]:
        """Does as it is told."""
        metadata = {str(name): value for name, value in context.invocation_metadata() or ()}
        self.heard.append({"remaining_s": context.time_remaining(), **metadata})
        script = MessageToDict(request.additional_information)
        for event in script.get("events", []):
            yield ParseDict(event, service_pb2.AddRequestResponse())
        trailers = tuple(script.get("trailers", {}).items())
        if "status" not in script:
            context.set_trailing_metadata(trailers)
            return
        status: Any = rpc_status.to_status(ParseDict(script["status"], Status()))
        context.set_trailing_metadata((*status.trailing_metadata, *trailers))
        context.abort(status.code, status.details)


class Liar:
    """The server, on a free port of this process."""

    def __init__(self) -> None:
        self._servicer = LyingServicer()
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_OmniServiceServicer_to_server(self._servicer, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    @property
    def heard(self) -> list[dict[str, Any]]:
        """Metadata of each call, and `remaining_s` of its deadline."""
        return self._servicer.heard

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(0).wait()
