"""What happens around every rpc: bytes that do not parse, errors, deadlines, identity, what
operators see of it.

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
from omni_grpc.metrics import Metrics
from omni_grpc.observation import Observation
from omni_grpc.rpc import Rpc, current
from omni_grpc.tracing import end_rpc, rpc_span, trace_id

log = logging.getLogger(__name__)

DOMAIN = "omni-grpc"
STATUS_BYTES = 2560
"""Most bytes of a rich status, of which base64 makes a third more. Trailers over 8 KiB are dropped
by some peers, over 16 KiB by all; a request id takes up to 3 KiB of them."""
MESSAGE_BYTES = 1024
"""Most bytes of `grpc-message`, encoded."""
OWN_PACKAGE = "/omni_grpc.v1."
TRACE_KEYS = ("traceparent", "tracestate")

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

    def __init__(self, pod: str, observation: Observation | None = None) -> None:
        self._pod = pod
        self.observation = observation or Observation(Metrics())
        """What becomes of each call at its end."""
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
        rpc = Rpc(method.rpartition("/")[2])
        write = rpc.writing(handler.response_serializer)
        if not handler.response_streaming:
            # In the call, so that its end has counted it too.
            behaviour, write = _answering(behaviour, write), bytes
        return make(
            self._wrap(behaviour, method, handler.request_streaming, rpc),
            request_deserializer=rpc.reading(tolerant(handler.request_deserializer)),
            response_serializer=write,
        )

    def _wrap(self, behaviour: Handler, method: str, streaming: bool, rpc: Rpc) -> Handler:
        async def call(request: Any, context: Context) -> Any:
            rpc.peer = context.peer()
            current.set(rpc)
            with rpc_span(method, trace_headers(context)) as span:
                rpc.trace_id = trace_id(span)
                try:
                    messages = _checked(request) if streaming else request
                    return await self._answered(behaviour, messages, context, rpc)
                finally:
                    rpc.request_id = _request_id.get()
                    about = {"request_id": rpc.request_id, "pipeline": rpc.pipeline}
                    end_rpc(span, rpc.code, rpc.reason, about)
                    self.observation.ended(rpc)
                    # Contexts of callbacks that outlast the call know it: not the request too.
                    rpc.run = None

        return call

    async def _answered(self, behaviour: Handler, request: Any, context: Context, rpc: Rpc) -> Any:
        """The behaviour's answer, or the status that its failure is."""
        rpc.code = Code.INTERNAL.name
        self.calls[rpc.method] += 1
        try:
            answer = await behaviour(_parsed(request), context)
            context.set_trailing_metadata((("omni-pod", self._pod), *self.observation.trailers()))
            rpc.code = "OK"
            return answer
        except OmniError as error:
            # gRPC may keep what `abort` raises for as long as the connection lasts: the request
            # must not hang on it, by way of tracebacks.
            failure = OmniError.from_record(error.record())
        except asyncio.CancelledError:
            if _cancelled_for_real():
                rpc.code = Code.CANCELLED.name
                raise
            # A CancelledError that leaked from an inner task would hang the client for ever.
            log.exception("%s: an inner task's cancellation leaked", rpc.method)
            failure = InternalError("internal error")
        except grpc.aio.BaseError:
            # The client left while we wrote.
            rpc.code = Code.CANCELLED.name
            raise
        except Exception:
            log.exception("%s failed", rpc.method)
            failure = InternalError("internal error")
        finally:
            self.calls[rpc.method] -= 1
        # Beyond what is counted: a client that does not read takes its status when it likes.
        await self._abort(context, failure, rpc)

    async def _abort(self, context: Context, error: OmniError, rpc: Rpc) -> None:
        rpc.code, rpc.reason = error.code.name, error.reason
        status = rpc_status.to_status(rich_status(error))
        metadata = [
            *status.trailing_metadata,
            ("omni-pod", self._pod),
            *self.observation.trailers(),
        ]
        if request_id := _request_id.get():
            metadata.append(("omni-request-id", request_id))
        if error.retry_after_s is not None:
            metadata.append(("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1e3))))
        await context.abort(status.code, status.details, tuple(metadata))


def trace_headers(context: Context) -> dict[str, str]:
    """The call's W3C trace context."""
    return {
        key: value
        for key, value in (context.invocation_metadata() or ())
        if key in TRACE_KEYS and isinstance(value, str)
    }


def _answering(behaviour: Handler, write: Callable[[Any], bytes]) -> Handler:
    async def call(request: Any, context: Context) -> bytes:
        return write(await behaviour(request, context))

    return call


_request_id: ContextVar[str] = ContextVar("request_id", default="")


def set_request_id(request_id: str) -> None:
    """Names the request that this rpc is about: for its log line and for the trailers of its
    error."""
    _request_id.set(mirrored(request_id))


def mirrored(request_id: str) -> str:
    """The id as metadata may carry it: percent-encoded if it is not all printable ASCII."""
    if request_id.isascii() and request_id.isprintable():
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
