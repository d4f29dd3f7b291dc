"""Everything that can go wrong with a request, one class per cause. Knows nothing of gRPC.

OmniError
├── InvalidField            INVALID_ARGUMENT     a field, with its path
├── PromptTooLong           INVALID_ARGUMENT
├── InvalidMedia            INVALID_ARGUMENT
├── PipelineNotFound        NOT_FOUND
├── LoraNotFound            NOT_FOUND
├── RequestNotFound         NOT_FOUND
├── NotSupported            FAILED_PRECONDITION
├── NotResumable            FAILED_PRECONDITION
├── DuplicateRequest        ALREADY_EXISTS
├── FeederActive            ALREADY_EXISTS
├── QueueFull               RESOURCE_EXHAUSTED   retry
├── TenantBudget            RESOURCE_EXHAUSTED   retry
├── MediaBudget             RESOURCE_EXHAUSTED   retry
├── SlowConsumer            RESOURCE_EXHAUSTED
├── Draining                UNAVAILABLE          retry
├── StageUnavailable        UNAVAILABLE          retry
├── MediaSource             UNAVAILABLE
├── ReplicaLost             ABORTED
├── AbortedByClient         CANCELLED
├── DeadlineExceeded        DEADLINE_EXCEEDED
├── InputTimeout            DEADLINE_EXCEEDED
├── StageTimeout            DEADLINE_EXCEEDED
├── Unauthenticated         UNAUTHENTICATED
├── PermissionDenied        PERMISSION_DENIED
├── NotImplementedYet       UNIMPLEMENTED
├── StageError              INTERNAL             a stage raised
└── InternalError           INTERNAL             a bug; its text says nothing

ConfigError                 a configuration that cannot be served   (these two never reach a client)
StartError                  a replica that did not start
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec


class Code(Enum):
    """Canonical status codes, by gRPC's numbers (google/rpc/code.proto)."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Violation(msgspec.Struct, frozen=True):
    """What is wrong with one field: its path from the message's root, and a description."""

    field: str
    description: str


class ErrorRecord(msgspec.Struct, frozen=True):
    """An OmniError as it travels between processes."""

    reason: str
    message: str
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None


class OmniError(Exception):
    """Base of all errors that end a request with a status.

    `retry_after_s` is the least wait before a retry can help; None: a retry does not help.
    """

    code: ClassVar[Code]
    reason: ClassVar[str]
    by_reason: ClassVar[dict[str, type[OmniError]]] = {}

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.retry_after_s = retry_after_s

    def __init_subclass__(cls) -> None:
        OmniError.by_reason[cls.reason] = cls

    def record(self) -> ErrorRecord:
        """The error for another process; `from_record` makes it an exception again there."""
        return ErrorRecord(self.reason, self.message, self.violations, self.retry_after_s)

    @staticmethod
    def from_record(record: ErrorRecord) -> OmniError:
        """The exception that `record` was made from. A reason that nobody knows is an
        InternalError."""
        kind = OmniError.by_reason.get(record.reason, InternalError)
        error = kind.__new__(kind)
        OmniError.__init__(
            error, record.message, violations=record.violations, retry_after_s=record.retry_after_s
        )
        return error


class InvalidField(OmniError):
    """One or more fields are wrong. Made from a path and a description, or from several
    violations."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, field: str, description: str, *more: Violation) -> None:
        violations = (Violation(field, description), *more)
        message = "; ".join(f"{v.field}: {v.description}" for v in violations[:5])
        super().__init__(message, violations=violations)


class PromptTooLong(OmniError):
    """The prompt does not fit the model's context."""

    code = Code.INVALID_ARGUMENT
    reason = "PROMPT_TOO_LONG"


class InvalidMedia(OmniError):
    """Media that cannot be decoded, or that is over a limit."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_MEDIA"


class PipelineNotFound(OmniError):
    """No pipeline has this name."""

    code = Code.NOT_FOUND
    reason = "PIPELINE_NOT_FOUND"


class LoraNotFound(OmniError):
    """No adapter has this name."""

    code = Code.NOT_FOUND
    reason = "LORA_NOT_FOUND"


class RequestNotFound(OmniError):
    """No request with this id runs here."""

    code = Code.NOT_FOUND
    reason = "REQUEST_NOT_FOUND"


class NotSupported(OmniError):
    """The pipeline cannot do what was asked."""

    code = Code.FAILED_PRECONDITION
    reason = "NOT_SUPPORTED"


class NotResumable(OmniError):
    """The request does not take further input."""

    code = Code.FAILED_PRECONDITION
    reason = "NOT_RESUMABLE"


class DuplicateRequest(OmniError):
    """A request with this id is in flight."""

    code = Code.ALREADY_EXISTS
    reason = "DUPLICATE_REQUEST"


class FeederActive(OmniError):
    """Another feeder feeds this request."""

    code = Code.ALREADY_EXISTS
    reason = "FEEDER_ACTIVE"


class QueueFull(OmniError):
    """The server holds as many requests as it may."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class TenantBudget(OmniError):
    """The caller's own budget is used up."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "TENANT_BUDGET"


class MediaBudget(OmniError):
    """The budget of media bytes is used up."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "MEDIA_BUDGET"


class SlowConsumer(OmniError):
    """The client did not read for too long."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "SLOW_CONSUMER"


class Draining(OmniError):
    """The server is about to stop."""

    code = Code.UNAVAILABLE
    reason = "DRAINING"


class StageUnavailable(OmniError):
    """A stage has no replica, or lost the one that had taken the request before any output."""

    code = Code.UNAVAILABLE
    reason = "STAGE_UNAVAILABLE"


class MediaSource(OmniError):
    """The server behind a media URI failed."""

    code = Code.UNAVAILABLE
    reason = "MEDIA_SOURCE"


class ReplicaLost(OmniError):
    """A replica was lost after outputs had begun."""

    code = Code.ABORTED
    reason = "REPLICA_LOST"


class AbortedByClient(OmniError):
    """The request was aborted by its owner or by Abort."""

    code = Code.CANCELLED
    reason = "ABORTED_BY_CLIENT"


class DeadlineExceeded(OmniError):
    """The request's deadline, or the pipeline's longest duration, passed."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class InputTimeout(OmniError):
    """A resumable request got no input for too long."""

    code = Code.DEADLINE_EXCEEDED
    reason = "INPUT_TIMEOUT"


class StageTimeout(OmniError):
    """A stage gave nothing for too long."""

    code = Code.DEADLINE_EXCEEDED
    reason = "STAGE_TIMEOUT"


class Unauthenticated(OmniError):
    """No token, or a bad one."""

    code = Code.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(OmniError):
    """The token does not carry the right."""

    code = Code.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class NotImplementedYet(OmniError):
    """A part of the contract that this release does not serve."""

    code = Code.UNIMPLEMENTED
    reason = "NOT_IMPLEMENTED"


class StageError(OmniError):
    """A stage raised. The text names the stage only; the server's log has the cause."""

    code = Code.INTERNAL
    reason = "STAGE_ERROR"


class InternalError(OmniError):
    """A bug. The text says nothing of it; the server's log does."""

    code = Code.INTERNAL
    reason = "INTERNAL"


class ConfigError(Exception):
    """A configuration that cannot be served: names the file, the path in it and the reason."""


class StartError(Exception):
    """A replica did not start: names stage and replica, and shows the real cause."""
