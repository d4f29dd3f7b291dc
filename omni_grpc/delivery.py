"""A request's events on their way to who reads it: numbered when they are taken, not before, and
copied to the sessions that attached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from omni_grpc.conversation import Timeline
from omni_grpc.outbox import Numbered, Outbox, Routed
from omni_grpc.types import AudioChunk, Event, EventChange, EventNotice, Notice, Output


class Delivery:
    """One request's outbox and its copies. One reader takes from `outbox` with `next`.

    `on_room` is called when a reader that had fallen behind has caught up."""

    def __init__(self, outbox: Outbox, on_room: Callable[[], None]) -> None:
        self.epoch = 0
        self.emitted = False
        """Whether an output was taken: what ends the request now cannot be undone."""
        self.owned_by_session = False
        """Whether the reader wants notices among the events."""
        self.taps: list[Outbox] = []
        """Copies of everything from now on, for sessions that attached. One that falls behind is
        closed."""
        self.timeline = Timeline()
        self.taken_at: float | None = None
        """When the reader last took an event, by the loop's clock; None: nothing yet."""
        self._outbox = outbox
        self._on_room = on_room
        self._next_seq = 0

    @property
    def congested(self) -> bool:
        """Whether the reader is behind, and the stages should pause."""
        return self._outbox.congested

    @property
    def drained(self) -> bool:
        """Whether the stages may go on."""
        return self._outbox.drained

    @property
    def bytes(self) -> int:
        """What waits, in bytes."""
        return self._outbox.bytes

    def __len__(self) -> int:
        return len(self._outbox)

    @property
    def urgent(self) -> int:
        """How many notices wait before all events."""
        return self._outbox.urgent

    async def room(self) -> None:
        """Returns when there is room for a notice more."""
        await self._outbox.room()

    # ------------------------------------------------------------ in

    def put(self, event: Event) -> None:
        """Adds an event."""
        self._outbox.put(event)

    def put_changes(self, changes: Iterable[tuple[Any, EventChange]]) -> None:
        """Tells what became of events, in its place among the outputs; listener None: the
        reader."""
        for listener, change in changes:
            self._outbox.put(Routed(EventNotice(change), self if listener is None else listener))

    def put_for_all(self, notice: Notice) -> None:
        """Adds a notice for every session, in its place among the outputs."""
        self._outbox.put(Routed(notice))

    def put_notice(self, notice: Notice) -> None:
        """Tells the session that owns the request, before everything that waits."""
        self._outbox.put_urgent(Routed(notice, self))

    def notify(self, notice: Notice) -> None:
        """Tells every session of the request, at once."""
        if self.owned_by_session:
            self.put_notice(notice)
        for tap in self.taps:
            tap.put_urgent(Routed(notice, tap))

    def withdraw(self) -> list[Output]:
        """Drops the outputs that wait, and gives them back: they were not delivered."""
        return self._outbox.discard_outputs()

    # ------------------------------------------------------------ out

    async def next(self) -> Numbered | Notice | None:
        """The next event, or notice where a session reads; None after the last. Cancelling loses
        nothing."""
        while True:
            held_back = not self._outbox.drained
            item = await self._outbox.get()
            if held_back and self._outbox.drained:
                self._on_room()
            if item is None:
                return None
            if isinstance(item, Routed):
                if self._route(item) and self.owned_by_session:
                    return item.notice
            elif not isinstance(item, Numbered):
                return self._number(item)

    def _route(self, routed: Routed) -> bool:
        """Hands a notice to the sessions that it is for; whether the reader is among them."""
        for tap in self.taps:
            if routed.listener in (None, tap):
                tap.put(Routed(routed.notice, tap))
        return routed.listener in (None, self)

    def _number(self, event: Event) -> Numbered:
        if isinstance(event, Output):
            self.emitted = True
            self._deliver(event)
        numbered = Numbered(self._next_seq, self.epoch, event)
        self._next_seq += 1
        self.taken_at = asyncio.get_running_loop().time()
        for tap in self.taps:
            tap.put(numbered)
            if tap.congested:
                # Its session is told so; what it did not read is freed now.
                tap.overrun()
        return numbered

    def _deliver(self, output: Output) -> None:
        if isinstance(output.content, AudioChunk):
            form = output.content.format
            samples = len(output.content.data) // form.frame_width
            self.timeline.deliver(output.segment, samples * 1e3 / form.sample_rate_hz)

    # ------------------------------------------------------------ the end

    def complete(self) -> None:
        """Nothing comes any more; what waits is still read."""
        self._outbox.close(discard=False)

    def close(self, changes: Iterable[tuple[Any, EventChange]], *, discard: bool) -> None:
        """The request ended, and with it the events of `changes`. `discard`: what waits is dropped;
        those that listen hear of their events even then."""
        for routed in self._outbox.abandon() if discard else ():
            if self._route(routed):
                self.put_notice(routed.notice)
        for listener, change in changes:
            self._tell(listener, EventNotice(change))
        self._outbox.close(discard=False)
        for tap in self.taps:
            tap.close(discard=False)

    def _tell(self, listener: Outbox | None, notice: Notice) -> None:
        if listener is None:
            self.put_notice(notice)
        else:
            listener.put(Routed(notice, listener))
