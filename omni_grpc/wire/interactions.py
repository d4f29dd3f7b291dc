"""Sessions: from the contract's messages to our types, and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from omni_grpc import types as t
from omni_grpc.errors import ErrorRecord, InvalidField, OmniError
from omni_grpc.interaction import AbortSession, BadEvent, EndInput, Interrupt, Message, Update
from omni_grpc.v1 import common_pb2, service_pb2
from omni_grpc.wire.requests import MAX_ID, decode_media
from omni_grpc.wire.updates import decode_chunk
from omni_grpc.wire.values import decode_struct, optional

MAX_TRANSITION = 10_000
MAX_EVENT_MEDIA = 16

Messages = AsyncIterator[service_pb2.SubmitInteractionRequest]
_STATE_OUT = {
    state: getattr(service_pb2.EventState, f"STATE_{state.name}") for state in t.EventState
}


@dataclass(frozen=True, slots=True)
class Attach:
    """A session that attaches to a running request."""

    request_id: str
    receive_outputs: bool


async def decode_setup(messages: Messages) -> service_pb2.AddRequestRequest | Attach:
    """How the session begins: its first message. Raises InvalidField."""
    first = await anext(messages, None)
    if first is None or first.WhichOneof("message") != "setup":
        raise InvalidField("setup", "must be the first message")
    match first.setup.WhichOneof("target"):
        case "open":
            return first.setup.open
        case "attach":
            attach = first.setup.attach
            if not attach.request_id:
                raise InvalidField("setup.attach.request_id", "is empty")
            return Attach(attach.request_id, attach.receive_outputs)
    raise InvalidField("setup", "holds neither open nor attach")


async def decode_messages(messages: Messages) -> AsyncIterator[Message]:
    """What the client sends after setup. Raises InvalidField for what is out of order or nothing
    at all, and for an event without a usable id, which could not be answered; a bad chunk and a bad
    event are given as such, since the session goes on."""
    async for message in messages:
        match message.WhichOneof("message"):
            case "update":
                yield _update(message.update)
            case "end_input":
                yield EndInput()
            case "event":
                yield _event(message.event)
            case "interrupt":
                yield Interrupt(optional(message.interrupt, "played_ms"))
            case "abort":
                yield AbortSession()
            case "setup":
                raise InvalidField("setup", "comes once, first")
            case _:
                raise InvalidField("message", "is empty")


def _update(message: service_pb2.UpdateChunk) -> Update:
    try:
        return Update(message.seq, decode_chunk(message, "update"))
    except OmniError as error:
        return Update(message.seq, None, error)


def _event(message: service_pb2.InteractionEvent) -> Message:
    if not 1 <= len(message.event_id) <= MAX_ID:
        raise InvalidField("event.event_id", f"must have 1 to {MAX_ID} characters")
    try:
        return decode_event(message)
    except OmniError as error:
        return BadEvent(t.InteractionEvent(message.event_id), error)


def decode_event(message: service_pb2.InteractionEvent) -> t.InteractionEvent:
    """A change to the running generation. Raises InvalidField for what cannot be one."""
    if len(message.media) > MAX_EVENT_MEDIA:
        raise InvalidField("event.media", f"has more than {MAX_EVENT_MEDIA} entries")
    transition = optional(message, "transition_chunks")
    if transition is not None and transition > MAX_TRANSITION:
        raise InvalidField("event.transition_chunks", f"must be at most {MAX_TRANSITION}")
    return t.InteractionEvent(
        event_id=message.event_id,
        prompt=optional(message, "prompt"),
        negative_prompt=optional(message, "negative_prompt"),
        media=tuple(decode_media(m, f"event.media[{i}]") for i, m in enumerate(message.media)),
        parameters=decode_struct(message.parameters, "event.parameters")
        if message.HasField("parameters")
        else None,
        transition_chunks=3 if transition is None else transition,
    )


def encode_notice(notice: t.Notice) -> service_pb2.SubmitInteractionResponse:
    """A notice as it is written."""
    response = service_pb2.SubmitInteractionResponse()
    match notice:
        case t.SetupComplete(request_id, epoch):
            response.setup_complete.request_id = request_id
            response.setup_complete.epoch = epoch
        case t.EventNotice(change, resubmission):
            _fill_event(response.event_state, change, resubmission)
        case t.UpdateRejected(seq, error):
            response.update_rejected.seq = seq
            response.update_rejected.status.CopyFrom(encode_error(error))
        case t.Interrupted(epoch):
            response.interrupted.epoch = epoch
        case t.GoingAway(time_left_s):
            response.going_away.time_left_ms = int(time_left_s * 1e3)
    return response


def _fill_event(message: service_pb2.EventState, change: t.EventChange, resubmission: bool) -> None:
    message.event_id, message.state = change.event_id, _STATE_OUT[change.state]
    message.resubmission = resubmission
    if change.chunk is not None:
        message.chunk = change.chunk
    if change.error is not None:
        message.status.CopyFrom(encode_error(change.error))


def encode_error(record: ErrorRecord) -> common_pb2.ErrorStatus:
    """An error inside a message."""
    return common_pb2.ErrorStatus(
        code=OmniError.by_reason[record.reason].code.value,
        reason=record.reason,
        message=record.message[:512],
        field_violations=[
            common_pb2.FieldViolation(field=v.field[:256], description=v.description[:512])
            for v in record.violations[:16]
        ],
    )
