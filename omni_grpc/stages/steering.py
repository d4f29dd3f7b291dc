"""What a stage that can be steered does with events: one waits, one is blended in.

A stage calls `submit` when an event comes, and `border` before it makes each chunk. An event that
waits is superseded by a newer one. An event that is applied is blended in from whatever the blend
is then: over `transition_chunks` chunks, the last of which shows it whole; 0 and 1 show it whole at
once. Events that are not complete when the generation ends expire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from omni_grpc.types import EventChange, EventState

Target = TypeVar("Target")
"""What an event changes to, made ready by the stage: a conditioning, parameters."""


@dataclass(frozen=True, slots=True)
class Steering(Generic[Target]):
    """An event as a stage holds it."""

    event_id: str
    target: Target
    transition_chunks: int


@dataclass(frozen=True, slots=True)
class Blend(Generic[Target]):
    """What a chunk shows: `weight` of `target` over `base`, in (0, 1]; 1 is the target alone.
    `active` names the events in force, older first."""

    base: Target
    target: Target
    weight: float
    active: tuple[str, ...] = ()


class Track(Generic[Target]):
    """The events of one generation. `shown` is what it shows before the first of them."""

    def __init__(self, shown: Target) -> None:
        self._shown = shown
        self._shown_by: tuple[str, ...] = ()
        self._base = shown
        self._base_by: tuple[str, ...] = ()
        self._waiting: Steering[Target] | None = None
        self._applied: Steering[Target] | None = None
        self._done_chunks = 0
        self._ended = False

    def submit(self, event: Steering[Target]) -> list[EventChange]:
        """An event waits for the next border; what it takes the place of is superseded."""
        if self._ended:
            return [EventChange(event.event_id, EventState.EXPIRED)]
        changes = []
        if self._waiting is not None:
            changes.append(EventChange(self._waiting.event_id, EventState.SUPERSEDED))
        self._waiting = event
        return changes

    def border(self, chunk: int, current: Target) -> tuple[Blend[Target], list[EventChange]]:
        """What chunk number `chunk` shows, and what becomes of events with it. `current` is what
        the present blend amounts to, from which a new event is blended."""
        changes = self._begin(chunk, current) if self._waiting is not None else []
        event = self._applied
        if event is None:
            return Blend(self._shown, self._shown, 1.0, self._shown_by), changes
        self._done_chunks += 1
        whole = max(1, event.transition_chunks)
        weight = min(1.0, self._done_chunks / whole)
        active = (event.event_id,) if weight == 1.0 else (*self._base_by, event.event_id)
        blend = Blend(self._base, event.target, weight, active)
        if weight == 1.0:
            changes.append(EventChange(event.event_id, EventState.COMPLETED, chunk))
            self._shown, self._shown_by = event.target, (event.event_id,)
            self._applied = None
        return blend, changes

    def _begin(self, chunk: int, current: Target) -> list[EventChange]:
        assert self._waiting is not None
        changes = []
        # What is superseded half way stays visible in the base, but is in force no more.
        self._base, self._base_by = current, self._shown_by
        if self._applied is not None:
            changes.append(EventChange(self._applied.event_id, EventState.SUPERSEDED, chunk))
        self._applied, self._waiting, self._done_chunks = self._waiting, None, 0
        changes.append(EventChange(self._applied.event_id, EventState.STARTED, chunk))
        return changes

    def end(self) -> list[EventChange]:
        """The generation has ended: what is not complete expires."""
        self._ended = True
        left = [event for event in (self._applied, self._waiting) if event is not None]
        self._applied = self._waiting = None
        return [EventChange(event.event_id, EventState.EXPIRED) for event in left]
