"""What a session says beside its request's events, as frozen dataclasses, and how it is read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import grpc

from omni_grpc.v1 import common_pb2, service_pb2
from omni_grpc_client.errors import OmniCallError, Violation
from omni_grpc_client.media import decode_enum

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class EventState(StrEnum):
    """Where an event is in its life: QUEUED, then REJECTED, SUPERSEDED or EXPIRED; or STARTED, then
    COMPLETED, SUPERSEDED or EXPIRED."""

    QUEUED = "queued"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    STARTED = "started"
    COMPLETED = "completed"
    UNKNOWN = "unknown"

    @property
    def terminal(self) -> bool:
        """Whether nothing comes after it."""
        return self not in (EventState.QUEUED, EventState.STARTED, EventState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class EventChanged:
    """What became of an event."""

    event_id: str
    state: EventState
    chunk: int | None = None
    """The chunk that the state concerns, where one does."""
    resubmission: bool = False
    """Whether this answers an event that was sent before."""
    error: OmniCallError | None = None
    """Why it was rejected."""


@dataclass(frozen=True, slots=True)
class UpdateRejected:
    """A chunk of input was refused, and so are those behind it; the session goes on."""

    seq: int
    error: OmniCallError


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The present answer was cut off: everything that follows is of this epoch or later."""

    epoch: int


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The server will stop: the session may go on for `time_left` seconds at most."""

    time_left: float


Notice = EventChanged | UpdateRejected | Interrupted | GoingAway


def decode_notice(message: service_pb2.SubmitInteractionResponse) -> Notice | None:
    """The notice in a message; None for a kind that a newer contract added."""
    match message.WhichOneof("message"):
        case "event_state":
            return _event_changed(message.event_state)
        case "update_rejected":
            rejected = message.update_rejected
            return UpdateRejected(rejected.seq, decode_status(rejected.status))
        case "interrupted":
            return Interrupted(message.interrupted.epoch)
        case "going_away":
            return GoingAway(message.going_away.time_left_ms / 1e3)
    return None


def _event_changed(message: service_pb2.EventState) -> EventChanged:
    state = decode_enum(EventState, service_pb2.EventState.State, message.state, "STATE_")
    return EventChanged(
        message.event_id,
        state,
        message.chunk if message.HasField("chunk") else None,
        message.resubmission,
        decode_status(message.status) if message.HasField("status") else None,
    )


def decode_status(message: common_pb2.ErrorStatus) -> OmniCallError:
    """An error that came in a message."""
    code = _CODES.get(message.code, "UNKNOWN")
    return OmniCallError.by_code.get(code, OmniCallError)(
        code,
        message.message,
        reason=message.reason,
        violations=tuple(Violation(v.field, v.description) for v in message.field_violations),
    )
