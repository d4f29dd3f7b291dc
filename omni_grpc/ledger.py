"""The events of one request: each gets exactly one terminal state, whoever sent it.

QUEUED → REJECTED | SUPERSEDED | EXPIRED
QUEUED → STARTED(chunk) → COMPLETED(chunk) | SUPERSEDED(chunk) | EXPIRED
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from omni_grpc.errors import Code, InvalidField, NotSupported, OmniError, QueueFull
from omni_grpc.types import EventChange, EventNotice, EventState, InteractionEvent

MAX_PENDING = 64
"""Events that may be without a terminal state at a time."""
REMEMBERED = 10_000
"""Events in a terminal state whose ids are still known."""


class EventIdConflict(OmniError):  # noqa: N818 - named after its cause, as all errors are
    """The id belongs to an event with another payload."""

    code = Code.ALREADY_EXISTS
    reason = "EVENT_ID_CONFLICT"


@dataclass(slots=True)
class Record:
    """One event: who hears of it, what it was, what became of it last."""

    listener: Any
    digest: bytes
    change: EventChange


class Ledger:
    """All events of one request. `listener` is opaque: whoever shall hear what becomes of one."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._pending = 0
        self._closed = False

    def submit(
        self, event: InteractionEvent, listener: Any, refusal: OmniError | None
    ) -> tuple[EventNotice, bool]:
        """The answer to an event, and whether it goes to the stage.

        `refusal` is why the request cannot take events at all, if it cannot. A known id is answered
        with its present state, or rejected if the payload differs; neither changes the first.
        """
        # Sorted: a mapping is the same in whatever order its keys came.
        payload = msgspec.msgpack.encode(event, order="sorted")
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        known = self._records.get(event.event_id)
        if known is not None and known.digest == digest:
            return EventNotice(known.change, resubmission=True), False
        if known is not None:
            conflict = EventIdConflict(f"event {event.event_id!r} has another payload")
            return EventNotice(_rejected(event, conflict), resubmission=True), False
        refusal = refusal or self._refusal(event)
        state = EventState.QUEUED if refusal is None else EventState.REJECTED
        error = refusal.record() if refusal is not None else None
        change = EventChange(event.event_id, state, error=error)
        self._records[event.event_id] = Record(listener, digest, change)
        self._pending += refusal is None
        self._forget()
        return EventNotice(change), refusal is None

    def _refusal(self, event: InteractionEvent) -> OmniError | None:
        if self._closed:
            return NotSupported("the request has ended")
        if self._pending >= MAX_PENDING:
            return QueueFull(f"{MAX_PENDING} events wait already")
        changes = (event.prompt, event.negative_prompt, event.parameters)
        if not event.media and all(change is None for change in changes):
            return InvalidField("event", "changes nothing")
        return None

    def changed(self, change: EventChange) -> tuple[bool, Any]:
        """Notes what became of an event: whether that is news, and who shall hear it."""
        record = self._records.get(change.event_id)
        if record is None or record.change.state.terminal:
            return False, None
        record.change = change
        self._pending -= change.state.terminal
        return True, record.listener

    def close(self) -> list[tuple[Any, EventChange]]:
        """The request has ended: every event that has no terminal state expires, and no other is
        taken. (listener, change)."""
        self._closed = True
        return self.expire()

    def expire(self) -> list[tuple[Any, EventChange]]:
        """What was steered has ended: every event that has no terminal state expires. (listener,
        change)."""
        expired = []
        for event_id, record in self._records.items():
            if not record.change.state.terminal:
                record.change = EventChange(event_id, EventState.EXPIRED)
                expired.append((record.listener, record.change))
        self._pending = 0
        return expired

    def _forget(self) -> None:
        # At most MAX_PENDING are passed over: an event that waits for long keeps no other here.
        while len(self._records) > REMEMBERED:
            ended = (i for i, record in self._records.items() if record.change.state.terminal)
            del self._records[next(ended)]


def _rejected(event: InteractionEvent, error: OmniError) -> EventChange:
    return EventChange(event.event_id, EventState.REJECTED, error=error.record())
