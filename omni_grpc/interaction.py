"""One session: a client that opens or attaches to a request, feeds it, steers it, and hears it.

Events, interrupts and aborts are acted on as they come; chunks of input go their own way in order,
because a stage may let one wait. Nothing that a client sends on the way ends the generation, but
for its own abort and for leaving what it opened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from omni_grpc.admission import resolve_chunk
from omni_grpc.delivery import Delivery
from omni_grpc.errors import (
    AbortedByClient,
    ErrorRecord,
    FeederActive,
    InternalError,
    NotResumable,
    OmniError,
    SlowConsumer,
    Violation,
)
from omni_grpc.lane import Feeder
from omni_grpc.outbox import Numbered, Outbox, Routed
from omni_grpc.run import Run, owned_task
from omni_grpc.types import (
    InteractionEvent,
    Notice,
    SetupComplete,
    UpdateChunk,
    UpdateRejected,
)

log = logging.getLogger(__name__)

HALF_CLOSE_GRACE_S = 0.05
QUEUED_UPDATES = 256
"""Chunks of input that may wait in a session before its client is made to wait."""


@dataclass(frozen=True, slots=True)
class Update:
    """A chunk of input, or why it cannot be one."""

    seq: int
    chunk: UpdateChunk | None
    error: OmniError | None = None


@dataclass(frozen=True, slots=True)
class BadEvent:
    """An event that cannot be one, and why; `event` is what can be said of it."""

    event: InteractionEvent
    error: OmniError


@dataclass(frozen=True, slots=True)
class EndInput:
    """No more input. `half_closed`: the client says nothing any more at all."""

    half_closed: bool = False


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The present answer ends now; `played_ms` of its sound were heard, None: all of it."""

    played_ms: int | None


@dataclass(frozen=True, slots=True)
class AbortSession:
    """The request is aborted."""


Message = Update | EndInput | InteractionEvent | BadEvent | Interrupt | AbortSession


class Session:
    """A session on one request. `owner`: it opened it, and reads it; else it attached, and gets
    copies if it wants outputs. Use it as a context manager."""

    def __init__(self, run: Run, *, owner: bool, receive_outputs: bool, limit_bytes: int) -> None:
        self.run = run
        self._owner = owner
        self._tap: Outbox | None = None
        self._outputs = receive_outputs
        self._limit = limit_bytes
        self._updates: asyncio.Queue[Update | EndInput] = asyncio.Queue(QUEUED_UPDATES)
        self._feeder: Feeder | None = None

    def __enter__(self) -> Session:
        setup = SetupComplete(self.run.request_id, self.run.delivery.epoch)
        if self._owner:
            self.run.delivery.owned_by_session = True
            self.run.delivery.put_notice(setup)
        else:
            self._tap = Outbox(self._limit)
            self._tap.put(Routed(setup, self._tap))
            self.run.delivery.taps.append(self._tap)
        return self

    def __exit__(self, *exception: object) -> None:
        self._leave()
        if self._owner:
            # Synchronous on purpose: when the client left, an await here may never come back.
            self.run.close(AbortedByClient("the client left"))
        elif self._tap is not None:
            self.run.delivery.taps.remove(self._tap)

    def _leave(self) -> None:
        if self._feeder is not None:
            self._feeder.__exit__()
            self._feeder = None

    # ------------------------------------------------------------ to the client

    async def next(self) -> Numbered | Notice | None:
        """What the client hears next; None after the request's end. Raises its error."""
        if self._tap is None:
            return await self.run.next()
        while True:
            item = await self._tap.get()
            if self._tap.overran:
                raise SlowConsumer("the session did not read what it attached to")
            if isinstance(item, Routed):
                return item.notice
            if isinstance(item, Numbered):
                if self._outputs:
                    return item
            elif self.run.error is not None:
                raise self.run.error
            else:
                return None

    @property
    def _answers(self) -> Outbox | Delivery:
        """Where answers to the client wait."""
        return self.run.delivery if self._tap is None else self._tap

    def _tell(self, notice: Notice) -> None:
        if self._tap is None:
            self.run.delivery.put_notice(notice)
        else:
            self._tap.put_urgent(Routed(notice, self._tap))

    # ------------------------------------------------------------ from the client

    async def listen(self, messages: AsyncIterator[Message]) -> None:
        """Acts on what the client sends, to its half-close. Raises what is out of order."""
        feeding = owned_task(self._feed(), self.run.request_id, "feeding of a session")
        try:
            async for message in messages:
                # Each may be answered; a client that reads no answers is not heard for now.
                await self._answers.room()
                await self._act(message)
            # A call that is lost ends the iterator too, and cancels us a moment later.
            await asyncio.sleep(HALF_CLOSE_GRACE_S)
            if self._owner:
                await self._updates.put(EndInput(half_closed=True))
            await self._updates.join()
            if not self._owner:
                # It feeds no more; the request's own input goes on, from another feeder.
                self._leave()
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _act(self, message: Message) -> None:
        match message:
            case InteractionEvent():
                self._tell(self.run.steer(message, self._tap))
            case BadEvent(event, error):
                self._tell(self.run.steer(event, self._tap, error))
            case Interrupt(played_ms):
                self.run.interrupt(played_ms)
            case AbortSession():
                self.run.close(AbortedByClient("the session aborted the request"))
            case Update() | EndInput():
                await self._updates.put(message)

    async def _feed(self) -> None:
        while True:
            update = await self._updates.get()
            try:
                await self._feed_one(update)
            except OmniError as error:
                self._refuse(update, error)
            except Exception:
                log.exception("request %s: an update", self.run.request_id)
                self._refuse(update, InternalError("internal error"))
            finally:
                self._updates.task_done()

    def _refuse(self, update: Update | EndInput, error: OmniError) -> None:
        lane = self.run.lane
        if isinstance(update, Update):
            self._tell(UpdateRejected(update.seq, _as_update(error)))
        elif lane is not None and not update.half_closed:
            self._tell(UpdateRejected(lane.next_seq, _as_update(error)))
        elif not isinstance(error, FeederActive) and not self.run.completed:
            # Nobody is left who could put it right. With another feeder it is that one's to end.
            self.run.close(error)

    async def _feed_one(self, update: Update | EndInput) -> None:
        if self.run.lane is None:
            if isinstance(update, EndInput):
                return
            raise NotResumable(f"request {self.run.request_id!r} was not opened as resumable")
        if self._feeder is None:
            self._feeder = self.run.lane.attach()
        if isinstance(update, EndInput):
            await self.run.lane.end()
        elif update.chunk is not None:
            chunk = resolve_chunk(update.chunk, self.run.plan, self.run.lane)
            await self._feeder.push(chunk)
        elif update.error is not None:
            raise update.error


def _as_update(error: OmniError) -> ErrorRecord:
    """The error with paths of a session's message: what is a chunk elsewhere is its update."""
    record, violations = error.record(), tuple(map(_renamed, error.violations))
    if violations == record.violations:
        return record
    message = "; ".join(f"{v.field}: {v.description}" for v in violations[:5])
    return ErrorRecord(record.reason, message, violations, record.retry_after_s)


def _renamed(violation: Violation) -> Violation:
    head, dot, rest = violation.field.partition(".")
    field = "update" + dot + rest if head == "chunk" else violation.field
    return Violation(field, violation.description)
