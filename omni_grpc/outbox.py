"""The queue between a request's stages and the writer of its stream.

Never blocks the stages and never drops: text is merged while the writer is behind; sound, pictures
and film are cut into messages that fit the contract's limits. `congested` tells the stages to pause
when the client is slow, so the queue stays near `limit_bytes`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from omni_grpc.types import (
    Audio,
    AudioChunk,
    Content,
    Event,
    Finished,
    Image,
    ImageChunk,
    Notice,
    Output,
    Payload,
    Progress,
    SegmentEnd,
    StageProgress,
    TensorChunk,
    Tensors,
    TextDelta,
    TokenLogprobs,
    Video,
    VideoChunk,
)

AUDIO_BYTES = 64 << 10
"""Largest audio message."""
PART_BYTES = 512 << 10
"""Largest part of a picture, a film or an array: well under 1 MiB with all that is around it."""
TEXT_CHARACTERS = 128 << 10
"""Most characters of one text message (4 bytes each at most)."""
TOKEN_BYTES = 5
"""Most bytes of a token id in a message."""
ENTRY_BYTES = 24
"""Most bytes of a token's log-probability in a message, beside its candidates' texts."""
MERGED_ENTRIES = 256
MERGED_CHARACTERS = 8 << 10
MERGED_TOKENS = 1024
"""Where merging stops and a new event begins, so that merging stays cheap however long the writer
is behind."""
Item = TypeVar("Item")

EVENT_OVERHEAD = 256
"""What an event counts beside its content, in bytes."""
URGENT_NOTICES = 256
"""Notices that may wait before everything else until the client's next messages have to wait."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A notice for a session, in its place among the events. `listener` None: for everyone."""

    notice: Notice
    listener: object | None = None


@dataclass(frozen=True, slots=True)
class Numbered:
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
        self._wake()

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
        return dropped

    def put(self, event: Queued) -> None:
        """Adds an event; text of one stage, index and segment joins the last event if that still
        waits. A new sign of progress takes the place of an older one."""
        if self._closed:
            return
        if self._events:
            merged = merge(self._events[-1][0], event)
            if merged is not None:
                self._bytes -= self._events.pop()[1]
                event = merged
        size = event_size(event)
        self._events.append((event, size))
        self._bytes += size
        self._wake()

    def overrun(self) -> None:
        """The reader is too far behind: what waits is dropped, and nothing is taken any more."""
        self.overran = True
        self.close(discard=True)

    def abandon(self) -> list[Routed]:
        """Drops all that waits, but for the notices among it: those are given back."""
        notices = [event for event, _ in self._events if isinstance(event, Routed)]
        self._events.clear()
        self._bytes = 0
        return notices

    def close(self, *, discard: bool) -> None:
        """Nothing comes any more. `discard`: what waits is dropped too."""
        self._closed = True
        if discard:
            self._events.clear()
            self._bytes = 0
        self._wake()

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

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(last: Queued, new: Queued) -> Event | None:
    """Both events as one, or None where they must stay two."""
    match last, new:
        case Output(content=TextDelta() as a), Output(content=TextDelta() as b):
            same = (last.stage, last.index, last.segment) == (new.stage, new.index, new.segment)
            if not same or not _fits(a, b):
                return None
            text = TextDelta(
                a.text + b.text,
                a.token_ids + b.token_ids,
                a.logprobs + b.logprobs,
                a.prompt_logprobs + b.prompt_logprobs,
            )
            return Output(last.stage, last.index, last.segment, text)
        case StageProgress(), StageProgress() if last.stage == new.stage:
            if new.progress.preview is not None or last.progress.preview is None:
                return new
            progress, preview = new.progress, last.progress.preview
            return StageProgress(new.stage, Progress(progress.step, progress.total_steps, preview))
    return None


def _fits(a: TextDelta, b: TextDelta) -> bool:
    entries = sum(len(d.logprobs) + len(d.prompt_logprobs) for d in (a, b))
    return (
        len(a.text) + len(b.text) <= MERGED_CHARACTERS
        and len(a.token_ids) + len(b.token_ids) <= MERGED_TOKENS
        and entries <= MERGED_ENTRIES
        and (not entries or text_size(a) + text_size(b) <= PART_BYTES)
    )


def event_size(event: Queued) -> int:
    """Approximate size of an event, in bytes."""
    match event:
        case Numbered(event=inner):
            return event_size(inner)
        case Output(content=TextDelta() as delta):
            return EVENT_OVERHEAD + text_size(delta)
        case Output(content=AudioChunk() | ImageChunk() | VideoChunk() | TensorChunk() as content):
            return EVENT_OVERHEAD + len(content.data)
        case StageProgress(progress=progress) if progress.preview is not None:
            return EVENT_OVERHEAD + len(progress.preview.data)
    return EVENT_OVERHEAD


class Cutter:
    """Cuts one stage's payloads into the contents of messages, and keeps count of samples, chunks
    and frames.

    The counts are of what was handed over for delivery, over all payloads of the stage.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.frames = 0
        self._chunk = 0

    def withdraw(self, content: Content) -> None:
        """A content that was cut is not delivered after all: it does not count."""
        match content:
            case AudioChunk():
                self.samples -= len(content.data) // content.format.frame_width
            case VideoChunk():
                self._chunk -= 1
                self.frames -= content.frame_count

    def cut(self, payload: Payload) -> Iterator[Content]:
        """The payload's contents in order, each within the contract's limits."""
        match payload:
            case TextDelta():
                yield from cut_text(payload)
            case Audio():
                yield from self._cut_audio(payload)
            case Image():
                for offset, data, last in _parts(payload.data, PART_BYTES):
                    yield ImageChunk(
                        data, payload.mime_type, payload.width, payload.height, offset, last
                    )
            case Video():
                yield from self._cut_video(payload)
            case Tensors():
                yield from cut_tensors(payload)

    def _cut_audio(self, audio: Audio) -> Iterator[AudioChunk]:
        width = audio.format.frame_width
        step = AUDIO_BYTES // width * width
        for _, data, _ in _parts(audio.data, step):
            if data:
                yield AudioChunk(data, self.samples, audio.format)
                self.samples += len(data) // width

    def _cut_video(self, video: Video) -> Iterator[VideoChunk]:
        for offset, data, last in _parts(video.data, PART_BYTES):
            yield VideoChunk(
                data,
                video.mime_type,
                self._chunk,
                video.first_frame,
                # The frames begin in the first part; the others carry on with its bytes.
                video.frame_count if offset == 0 else 0,
                video.width,
                video.height,
                last and video.last,
                video.active_event_ids,
            )
            self._chunk += 1
        self.frames += video.frame_count


def cut_text(delta: TextDelta) -> Iterator[TextDelta]:
    """The delta as one or more, each well under 1 MiB: log-probabilities of the prompt first; a
    token's log-probabilities stay beside its id."""
    if text_size(delta) <= PART_BYTES:
        yield delta
        return
    for entries in _batches(delta.prompt_logprobs, _entry_size):
        yield TextDelta("", prompt_logprobs=entries)
    start = 0
    for entries in _batches(delta.logprobs, lambda entry: TOKEN_BYTES + _entry_size(entry)):
        ids = delta.token_ids[start : start + len(entries)]
        yield TextDelta("", ids, entries)
        start += len(entries)
    for ids in _batches(delta.token_ids[start:], lambda _: TOKEN_BYTES):
        yield TextDelta("", ids)
    for start in range(0, len(delta.text), TEXT_CHARACTERS):
        yield TextDelta(delta.text[start : start + TEXT_CHARACTERS])


def _batches(items: list[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in order, in lists of at most PART_BYTES (or of one that is larger)."""
    batch: list[Item] = []
    total = 0
    for item in items:
        if batch and total + size(item) > PART_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def _entry_size(entry: TokenLogprobs) -> int:
    return ENTRY_BYTES + sum(ENTRY_BYTES + 4 * len(c.text) for c in entry.candidates)


def text_size(delta: TextDelta) -> int:
    """Most bytes that a delta takes in a message."""
    entries = sum(map(_entry_size, delta.logprobs)) + sum(map(_entry_size, delta.prompt_logprobs))
    return 4 * len(delta.text) + TOKEN_BYTES * len(delta.token_ids) + entries


def cut_tensors(tensors: Tensors) -> Iterator[TensorChunk]:
    """Each array in parts of whole elements."""
    for name, tensor in tensors.arrays.items():
        size = tensor.dtype.itemsize
        for offset, data, last in _parts(tensor.data, PART_BYTES // size * size):
            yield TensorChunk(name, data, tensor.dtype, tensor.shape, offset, last)


def _parts(data: bytes, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, part, whether it is the last) of `data`; one empty part where there is nothing."""
    if len(data) <= size:
        yield 0, data, True
        return
    for offset in range(0, len(data), size):
        yield offset, data[offset : offset + size], offset + size >= len(data)
