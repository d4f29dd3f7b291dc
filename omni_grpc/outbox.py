"""The queue between a request's stages and the writer of its stream.

Never blocks the stages and never drops: text is merged while the writer is behind; sound, pictures
and film are cut into messages that fit the contract's limits. `congested` tells the stages to pause
when the client is slow, so the queue stays near `limit_bytes`."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import msgspec

from omni_grpc.cutter import PART_BYTES, text_size
from omni_grpc.types import (
    AudioChunk,
    Event,
    Finished,
    ImageChunk,
    Notice,
    Output,
    Progress,
    SegmentEnd,
    StageProgress,
    TensorChunk,
    TextDelta,
    VideoChunk,
)

MERGED_ENTRIES = 256
MERGED_CHARACTERS = 8 << 10
MERGED_TOKENS = 1024
"""Where merging stops and a new event begins, so that merging stays cheap however long the writer
is behind."""
EVENT_OVERHEAD = 256
"""What an event counts beside its content, in bytes."""
URGENT_NOTICES = 256
"""Notices that may wait before everything else until the client's next messages have to wait."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A notice for a session, in its place among the events. `listener` None: for everyone."""

    notice: Notice
    listener: object | None = None


class Numbered(msgspec.Struct, frozen=True, gc=False):
    """An event as it is written: `seq` counts from 0 without a gap."""

    seq: int
    epoch: int
    event: Event


Queued = Event | Routed | Numbered
"""What an outbox holds. A reader's holds events and notices, a tap's numbered copies."""
DISCARDED = (Output, StageProgress, SegmentEnd, Finished)
"""What an interrupt drops; the end comes again behind it."""


class Outbox:
    """One request's events on their way to the client. One writer."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._events: deque[tuple[Queued, int]] = deque()
        self._urgent: deque[Queued] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._bytes = 0
        self._closed = False
        self.overran = False
        """Whether its reader was too slow."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def congested(self) -> bool:
        """Whether the stages should pause: more waits than the limit."""
        return self._bytes > self._limit

    @property
    def drained(self) -> bool:
        """Whether the stages may go on: less than half of the limit waits."""
        return self._bytes * 2 <= self._limit

    @property
    def bytes(self) -> int:
        """What waits, in bytes."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._events)

    def put_urgent(self, notice: Queued) -> None:
        """Adds what goes before everything that waits. Also after `close`, until all is read."""
        self._urgent.append(notice)
        if len(self._urgent) >= URGENT_NOTICES:
            self._room.clear()
        self._release()

    @property
    def urgent(self) -> int:
        """How many notices wait before everything else."""
        return len(self._urgent)

    async def room(self) -> None:
        """Returns when less than URGENT_NOTICES wait: what keeps a client that sends and does not
        read from filling the server with answers."""
        await self._room.wait()

    def discard_outputs(self) -> list[Output]:
        """Drops the outputs, progress and ends that wait, and gives the outputs back. Where nothing
        was to come any more, the end may come again."""
        dropped = [event for event, _ in self._events if isinstance(event, Output)]
        kept = [pair for pair in self._events if not isinstance(pair[0], DISCARDED)]
        self._events = deque(kept)
        self._bytes = sum(size for _, size in kept)
        self._closed = False
        self._release()
        return dropped

    def put(self, event: Queued) -> None:
        """Adds an event; text of one stage, index and segment joins the last event if that still
        waits. A new sign of progress takes the place of an older one."""
        if self._closed:
            return
        joined = merge(self._events[-1][0], event) if self._events else None
        if joined is not None:
            self._bytes -= self._events.pop()[1]
            event = joined
        size = event_size(event)
        self._events.append((event, size))
        self._bytes += size
        if joined is None:
            self._release()

    def overrun(self) -> None:
        """The reader is too far behind: what waits is dropped, and nothing is taken any more."""
        self.overran = True
        self.close(discard=True)

    def abandon(self) -> list[Routed]:
        """Drops all that waits, but for the notices among it: those are given back."""
        notices = [event for event, _ in self._events if isinstance(event, Routed)]
        self._events.clear()
        self._bytes = 0
        self._release()
        return notices

    def close(self, *, discard: bool) -> None:
        """Nothing comes any more. `discard`: what waits is dropped too."""
        self._closed = True
        if discard:
            self._events.clear()
            self._bytes = 0
        self._release()

    async def get(self) -> Queued | None:
        """The next event; None after the last. Cancelling loses nothing."""
        while not self._events and not self._urgent:
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._urgent:
            if len(self._urgent) <= URGENT_NOTICES:
                self._room.set()
            return self._urgent.popleft()
        event, size = self._events.popleft()
        self._bytes -= size
        return event

    def _release(self) -> None:
        """Wakes the writer."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(last: Queued, new: Queued) -> Event | None:
    """Both events as one, or None where they must stay two."""
    if isinstance(last, Output) and isinstance(new, Output):
        return _joined(last, new)
    match last, new:
        case StageProgress(), StageProgress() if last.stage == new.stage:
            if new.progress.preview is not None or last.progress.preview is None:
                return new
            progress, preview = new.progress, last.progress.preview
            return StageProgress(new.stage, Progress(progress.step, progress.total_steps, preview))
    return None


def _joined(last: Output, new: Output) -> Output | None:
    a, b = last.content, new.content
    if not isinstance(a, TextDelta) or not isinstance(b, TextDelta):
        return None
    if last.index != new.index or last.segment != new.segment or last.stage != new.stage:
        return None
    if not _fits(a, b):
        return None
    text, ids = a.text + b.text, a.token_ids + b.token_ids
    if a.logprobs or b.logprobs or a.prompt_logprobs or b.prompt_logprobs:
        logprobs, prompt = a.logprobs + b.logprobs, a.prompt_logprobs + b.prompt_logprobs
        return Output(last.stage, last.index, last.segment, TextDelta(text, ids, logprobs, prompt))
    return Output(last.stage, last.index, last.segment, TextDelta(text, ids))


def _fits(a: TextDelta, b: TextDelta) -> bool:
    if len(a.text) + len(b.text) > MERGED_CHARACTERS:
        return False
    if len(a.token_ids) + len(b.token_ids) > MERGED_TOKENS:
        return False
    entries = len(a.logprobs) + len(a.prompt_logprobs) + len(b.logprobs) + len(b.prompt_logprobs)
    if not entries:
        return True
    return entries <= MERGED_ENTRIES and text_size(a) + text_size(b) <= PART_BYTES


def event_size(event: Queued) -> int:
    """Approximate size of an event, in bytes."""
    if isinstance(event, Output) and isinstance(event.content, TextDelta):
        # Nearly all events are: not through every pattern first.
        return EVENT_OVERHEAD + text_size(event.content)
    match event:
        case Numbered(event=inner):
            return event_size(inner)
        case Output(content=AudioChunk() | ImageChunk() | VideoChunk() | TensorChunk() as content):
            return EVENT_OVERHEAD + len(content.data)
        case StageProgress(progress=progress) if progress.preview is not None:
            return EVENT_OVERHEAD + len(progress.preview.data)
    return EVENT_OVERHEAD
