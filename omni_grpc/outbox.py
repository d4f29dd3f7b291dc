"""The queue between a request's stages and the writer of its stream.

Never blocks the stages and never drops: text is merged while the writer is behind, or for a moment
that a merge window gives it; sound, pictures and film are cut into messages that fit the contract's
limits. `congested` tells the stages to pause when the client is slow, so the queue stays near
`limit_bytes`."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec

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
WINDOW_STEPS = 6
"""A merge window ends on a clock that all requests share, of so many steps a window: up to a step
early, so that many are written in one turn of the loop, which costs half of a turn for each."""
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
    """One request's events on their way to the client. One writer.

    `merge_window` (seconds): how long text waits for more to join it. Only text that waits alone
    does, and never the first of an answer; whatever comes behind it sends it on its way."""

    def __init__(self, limit_bytes: int, merge_window: float = 0.0) -> None:
        self._limit = limit_bytes
        self._window = merge_window
        self._hold: asyncio.TimerHandle | None = None
        """While set, the text that waits is not given out; ends the wait."""
        self._answer: tuple[str, int, int] | None = None
        """Stage, index and segment of the text that was taken last."""
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
        self._answer = None
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
        if joined is not None:
            return
        if self._may_wait(event):
            loop, step = asyncio.get_running_loop(), self._window / WINDOW_STEPS
            due = math.floor((loop.time() + self._window) / step) * step
            self._hold = loop.call_at(due, self._release)
        else:
            self._release()

    def _may_wait(self, event: Queued) -> bool:
        """Whether an event that was just added may wait for more."""
        if not self._window or len(self._events) > 1 or self._urgent:
            return False
        answer = answer_of(event)
        return answer is not None and answer == self._answer

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
        while (not self._events or self._hold is not None) and not self._urgent:
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
        if self._window:
            self._answer = answer_of(event) or self._answer
        return event

    def _release(self) -> None:
        """Nothing holds the writer back any more, and it is woken."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def answer_of(event: Queued) -> tuple[str, int, int] | None:
    """Which answer an event is text of: stage, index, segment. None: it is something else."""
    if isinstance(event, Output) and isinstance(event.content, TextDelta):
        return event.stage, event.index, event.segment
    return None


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

    def cut(self, payload: Payload) -> Iterable[Content]:
        """The payload's contents in order, each within the contract's limits. To be taken once, and
        whole: what is cut counts."""
        if isinstance(payload, TextDelta):
            return cut_text(payload) if text_size(payload) > PART_BYTES else (payload,)
        return self._cut(payload)

    def _cut(self, payload: Audio | Image | Video | Tensors) -> Iterator[Content]:
        match payload:
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
    size = 4 * len(delta.text) + TOKEN_BYTES * len(delta.token_ids)
    if not delta.logprobs and not delta.prompt_logprobs:
        return size
    entries = sum(map(_entry_size, delta.logprobs)) + sum(map(_entry_size, delta.prompt_logprobs))
    return size + entries


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
