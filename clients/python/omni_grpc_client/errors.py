"""What can go wrong with a call. `except OmniClientError` takes all of it.

OmniClientError
├── ProtocolError               the server broke the contract's order: a gap in seq or samples
├── UnservedError               no pipeline of the server can do what is asked
├── MissingOutputError          the request succeeded and gave nothing of what was wanted
└── OmniCallError               a status; `code`, `reason`, `violations`, `retry_after` say which
    ├── InvalidArgumentError    INVALID_ARGUMENT      INVALID_FIELD, PROMPT_TOO_LONG, INVALID_MEDIA
    ├── NotFoundError           NOT_FOUND             PIPELINE_, LORA_, REQUEST_NOT_FOUND
    ├── FailedPreconditionError FAILED_PRECONDITION   NOT_SUPPORTED, NOT_RESUMABLE
    ├── AlreadyExistsError      ALREADY_EXISTS        DUPLICATE_REQUEST, FEEDER_ACTIVE
    ├── ResourceExhaustedError  RESOURCE_EXHAUSTED    QUEUE_FULL, *_BUDGET, SLOW_CONSUMER
    ├── UnavailableError        UNAVAILABLE           DRAINING, STAGE_UNAVAILABLE, MEDIA_SOURCE
    ├── AbortedError            ABORTED               REPLICA_LOST
    ├── CancelledCallError      CANCELLED             ABORTED_BY_CLIENT
    ├── DeadlineExceededError   DEADLINE_EXCEEDED     DEADLINE, INPUT_TIMEOUT, STAGE_TIMEOUT
    ├── UnauthenticatedError    UNAUTHENTICATED
    ├── PermissionDeniedError   PERMISSION_DENIED
    ├── UnimplementedError      UNIMPLEMENTED         NOT_IMPLEMENTED
    └── InternalError           INTERNAL              STAGE_ERROR, INTERNAL

A status that gRPC itself makes (no connection, the caller's own deadline) has no reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with one field: its path from the message's root, and a description."""

    field: str
    description: str


class OmniClientError(Exception):
    """Base of everything that this client raises about a call."""


class ProtocolError(OmniClientError):
    """The server sent what the contract rules out: events are missing or out of order."""


class UnservedError(OmniClientError):
    """No pipeline of this server can do that; `OmniClient.server_info` tells what they can."""


class MissingOutputError(OmniClientError):
    """The request succeeded, and gave nothing of what was wanted."""


class OmniCallError(OmniClientError):
    """A call ended with a status other than OK.

    `code` is the status code's name ("NOT_FOUND"), `reason` the server's ("PIPELINE_NOT_FOUND"; ""
    where gRPC itself made the status), `retry_after` the least wait in seconds before a retry can
    help (None: nobody says that one helps), `request_id` and `pod` what the server says of itself.
    `final`: whoever answered asks that the call is not made again.
    """

    by_code: ClassVar[dict[str, type[OmniCallError]]] = {}

    def __init__(
        self,
        code: str,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
        request_id: str = "",
        pod: str = "",
        final: bool = False,
    ) -> None:
        super().__init__(f"{code} {reason}: {message}" if reason else f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after = retry_after
        self.request_id = request_id
        self.pod = pod
        self.final = final

    def __init_subclass__(cls, code: str) -> None:
        OmniCallError.by_code[code] = cls


class InvalidArgumentError(OmniCallError, code="INVALID_ARGUMENT"):
    """The request is wrong; `violations` name its fields."""


class NotFoundError(OmniCallError, code="NOT_FOUND"):
    """No such pipeline, adapter or request."""


class FailedPreconditionError(OmniCallError, code="FAILED_PRECONDITION"):
    """The pipeline, or the request as it is, cannot do that."""


class AlreadyExistsError(OmniCallError, code="ALREADY_EXISTS"):
    """The request id is in flight, or the request has a feeder."""


class ResourceExhaustedError(OmniCallError, code="RESOURCE_EXHAUSTED"):
    """The server or the caller's share of it is full, or the caller reads too slowly."""


class UnavailableError(OmniCallError, code="UNAVAILABLE"):
    """The server cannot be reached, drains, or has no replica for a stage."""


class AbortedError(OmniCallError, code="ABORTED"):
    """A replica was lost after outputs had begun."""


class CancelledCallError(OmniCallError, code="CANCELLED"):
    """The request was aborted on the server. (Cancelling the reader raises CancelledError.)"""


class DeadlineExceededError(OmniCallError, code="DEADLINE_EXCEEDED"):
    """The caller's, the pipeline's or a stage's time was over."""


class UnauthenticatedError(OmniCallError, code="UNAUTHENTICATED"):
    """No token, or a bad one."""


class PermissionDeniedError(OmniCallError, code="PERMISSION_DENIED"):
    """The token does not carry the right."""


class UnimplementedError(OmniCallError, code="UNIMPLEMENTED"):
    """The server's release does not serve that."""


class InternalError(OmniCallError, code="INTERNAL"):
    """A stage failed, or the server has a bug; its log has the cause."""


def decode_error(error: grpc.aio.AioRpcError) -> OmniCallError:
    """The typed error of a failed call, with the details that the server sent."""
    trailers = dict(error.trailing_metadata() or ())
    reason, retry_after = "", None
    violations: tuple[Violation, ...] = ()
    status = _status(trailers.get(DETAILS_KEY))
    for detail in status.details:
        info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(request):
            violations = tuple(Violation(v.field, v.description) for v in request.field_violations)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    final = False
    if PUSHBACK_KEY in trailers:
        # gRPC's own word for it, which a proxy may have set too. Negative: do not retry.
        pushback = _pushback(trailers[PUSHBACK_KEY])
        retry_after, final = pushback, pushback is None
    code, message = error.code().name, error.details() or ""
    if reason:
        # A proxy may reset a call that the server has ended before the client half-closed. gRPC
        # then says CANCELLED, over the status that did come.
        code, message = code_pb2.Code.Name(status.code), status.message
    return OmniCallError.by_code.get(code, OmniCallError)(
        code,
        message,
        reason=reason,
        violations=violations,
        retry_after=retry_after,
        request_id=str(trailers.get("omni-request-id", "")),
        pod=str(trailers.get("omni-pod", "")),
        final=final,
    )


def _pushback(value: str | bytes) -> float | None:
    """Seconds; None where it says that a retry is not wanted, as what cannot be read does."""
    try:
        milliseconds = int(value)
    except ValueError:
        return None
    return milliseconds / 1e3 if milliseconds >= 0 else None


def _status(data: str | bytes | None) -> status_pb2.Status:
    try:
        return status_pb2.Status.FromString(data if isinstance(data, bytes) else b"")
    except DecodeError:
        # A proxy's own status: what gRPC says of it is all there is.
        return status_pb2.Status()
