"""What happens around every rpc: bytes that do not parse, errors, deadlines, identity, one log
line.

The one place where an exception becomes a status. What is not an OmniError is a bug or a client
that left: its text goes to the log, never to the client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from omni_grpc.errors import Code, InternalError, InvalidField, OmniError

log = logging.getLogger(__name__)

DOMAIN = "omni-grpc"
STATUS_BYTES = 2560
"""Most bytes of a rich status, of which base64 makes a third more. Trailers over 8 KiB are dropped
by some peers, over 16 KiB by all; a request id takes up to 3 KiB of them."""
MESSAGE_BYTES = 1024
"""Most bytes of `grpc-message`, encoded."""
OWN_PACKAGE = "/omni_grpc.v1."

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Any, Context], Awaitable[Any]]


class Malformed:
    """Stands for a message whose bytes did not parse."""


MALFORMED = Malformed()


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The deserializer, giving MALFORMED where the bytes do not parse: grpcio itself would answer
    UNKNOWN with the parser's text."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return MALFORMED

    return parse


class Edge(grpc.aio.ServerInterceptor):
    """Wraps every handler of this package's services. Handlers are coroutines that read `request`
    (a message or an async iterator of them) and, where they stream, write to the context."""

    def __init__(self, pod: str) -> None:
        self._pod = pod
        self.calls: Counter[str] = Counter()
        """Calls that are not over, by method."""
        self._last_call = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds since the last call came."""
        return time.monotonic() - self._last_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The wrapped handler; None where there is no such method."""
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(OWN_PACKAGE):
            return handler
        self._last_call = time.monotonic()
        make, behaviour = _shape(handler)
        return make(
            self._wrap(behaviour, method, handler.request_streaming),
            request_deserializer=tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _wrap(self, behaviour: Handler, method: str, streaming: bool) -> Handler:
        name = method.rpartition("/")[2]

        async def call(request: Any, context: Context) -> Any:
            started = time.perf_counter()
            self.calls[name] += 1
            context.set_trailing_metadata((("omni-pod", self._pod),))
            code = Code.INTERNAL.name
            try:
                checked = _checked(request) if streaming else _parsed(request)
                answer = await behaviour(checked, context)
                code = "OK"
                return answer
            except OmniError as error:
                code = error.code.name
                # gRPC may keep what `abort` raises for as long as the connection lasts: the
                # request must not hang on it, by way of tracebacks.
                failure = OmniError.from_record(error.record())
            except asyncio.CancelledError:
                if _cancelled_for_real():
                    code = Code.CANCELLED.name
                    raise
                # A CancelledError that leaked from an inner task would hang the client for ever.
                log.exception("%s: an inner task's cancellation leaked", name)
                failure = InternalError("internal error")
            except grpc.aio.BaseError:
                # The client left while we wrote.
                code = Code.CANCELLED.name
                raise
            except Exception:
                log.exception("%s failed", name)
                failure = InternalError("internal error")
            finally:
                self.calls[name] -= 1
                elapsed = (time.perf_counter() - started) * 1e3
                log.info("%s %s %.1f ms %s", name, code, elapsed, _request_id.get() or "-")
            await self._abort(context, failure)

        return call

    async def _abort(self, context: Context, error: OmniError) -> None:
        status = rpc_status.to_status(rich_status(error))
        metadata = [*status.trailing_metadata, ("omni-pod", self._pod)]
        if request_id := _request_id.get():
            metadata.append(("omni-request-id", request_id))
        if error.retry_after_s is not None:
            metadata.append(("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1e3))))
        await context.abort(status.code, status.details, tuple(metadata))


_request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_request_id(request_id: str) -> None:
    """Names the request that this rpc is about: for its log line and for the trailers of its
    error."""
    _request_id.set(mirrored(request_id))


def mirrored(request_id: str) -> str:
    """The id as metadata may carry it: percent-encoded if it is not all printable ASCII."""
    if all(" " <= character <= "~" for character in request_id):
        return request_id
    return quote(request_id, safe="")


def _cancelled_for_real() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _shape(handler: Any) -> tuple[Callable[..., Any], Any]:
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _parsed(message: Any) -> Any:
    if message is MALFORMED:
        raise InvalidField("(message)", "its bytes do not parse")
    return message


async def _checked(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield _parsed(message)


def rich_status(error: OmniError) -> Status:
    """The error as google.rpc.Status with its details, under STATUS_BYTES: violations are cut, the
    first stay."""
    message = _cut_encoded(error.message)
    status = Status(code=error.code.value, message=message)
    _add(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1e3))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    request = error_details_pb2.BadRequest()
    room = STATUS_BYTES - status.ByteSize() - 64
    for violation in error.violations:
        entry = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(violation.field, 256), description=_cut(violation.description, 512)
        )
        room -= entry.ByteSize() + 4
        if room < 0:
            break
        request.field_violations.append(entry)
    if request.field_violations:
        _add(status, request)
    return status


def _cut(text: str, size: int) -> str:
    """At most `size` bytes of UTF-8, cut between characters."""
    data = text.encode()
    if len(data) <= size:
        return text
    return data[: size - 3].decode(errors="ignore") + "…"


def _cut_encoded(message: str) -> str:
    """The message, short enough that the percent-encoded form in which `grpc-message` travels has
    at most MESSAGE_BYTES."""
    size = MESSAGE_BYTES
    while len(quote(cut := _cut(message, size))) > MESSAGE_BYTES:
        size = size * 2 // 3
    return cut


def _add(status: Status, detail: Message) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)
