"""The input of a resumable request: chunks in order, from one feeder at a time.

A chunk counts once the stage has taken it. `seq` counts chunks from 0 over the request's life,
whoever feeds: a number that was seen is ignored, a gap is refused. A chunk that is refused leaves
no trace, so its number may come again. Whatever a feeder breaks off in, the next one goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from omni_grpc.errors import FeederActive, InvalidField, NotResumable, OmniError
from omni_grpc.types import Audio, AudioFormat, Params, Payload, Prompt, TextDelta


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of input. `params`: the segment's own, by stage; in a segment's first chunk only."""

    seq: int
    payload: Payload | None = None
    prompt: Prompt | None = None
    params: dict[str, Params] = field(default_factory=dict)
    end_of_segment: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    """Where the client set the parameters, by stage."""

    @property
    def holds(self) -> bool:
        """Whether it brings input, and not only a segment's end."""
        if isinstance(self.payload, TextDelta):
            return bool(self.payload.text)
        return self.payload is not None or self.prompt is not None


@dataclass(slots=True)
class Summary:
    """What one feeder did, and the segments that the request has had in all."""

    accepted_chunks: int = 0
    duplicate_chunks: int = 0
    segments: int = 0


class Sink(Protocol):
    """Where the lane's chunks go: the request's first stage."""

    async def viewed(self, chunk: Chunk) -> Chunk:
        """A client's chunk as the stage shall see it. Cancelling leaves nothing behind."""

    def send_chunk(self, number: int, chunk: Chunk, *, end: bool) -> None:
        """Sends a chunk; `Lane.answered` hears what became of it."""

    def close(self, error: OmniError | None) -> None:
        """Ends the request."""


class Lane:
    """One request's input."""

    def __init__(self, sink: Sink, on_activity: Callable[[], None]) -> None:
        self.audio_format: AudioFormat | None = None
        """Of the sound that is fed, from its first chunk on."""
        self.ended = False
        self._sink = sink
        self._on_activity = on_activity
        self._next_seq = 0
        self._numbers = 0
        self._segments = 0
        self._open = False
        self._held = False
        self._feeder: Feeder | None = None
        self._pending: asyncio.Future[None] | None = None
        self._under_way: tuple[Chunk, bool] | None = None
        self._closed: OmniError | None = None
        """Why nothing more is taken, once the request has ended."""
        self.open_chunks: list[Chunk] = []
        """The chunks of the segment that is open: what a new stage 0 must be given again."""

    @property
    def segments(self) -> int:
        """Segments that were ended."""
        return self._segments

    @property
    def next_seq(self) -> int:
        """Number of the next chunk."""
        return self._next_seq

    @property
    def fed(self) -> bool:
        """Whether a feeder is there."""
        return self._feeder is not None

    @property
    def segment_open(self) -> bool:
        """Whether the present segment has had a chunk."""
        return self._open

    @property
    def holds_nothing(self) -> bool:
        """Whether no input has ever come."""
        return not self._held

    def attach(self) -> Feeder:
        """The one feeder. Raises FeederActive while there is another."""
        if self._feeder is not None:
            raise FeederActive("another feeder feeds this request")
        self._feeder = Feeder(self)
        self._on_activity()
        return self._feeder

    def detach(self, feeder: Feeder) -> None:
        """The feeder is gone; the request waits for another. What it had sent stays sent."""
        if self._feeder is feeder:
            self._feeder = None
            self._on_activity()

    async def add(self, chunk: Chunk) -> bool:
        """Adds a chunk; False: its number was seen before. Raises what refuses it.

        Cancelling leaves a chunk that was sent under way: it counts if the stage takes it.
        """
        await self._settled()
        if chunk.seq < self._next_seq:
            return False
        if chunk.seq > self._next_seq:
            raise InvalidField("chunk.seq", f"is {chunk.seq}, the next is {self._next_seq}")
        if self.ended:
            raise NotResumable("the request's input has ended")
        if chunk.payload is None and chunk.prompt is None and not chunk.end_of_segment:
            raise InvalidField("chunk", "holds neither input nor a segment's end")
        if chunk.end_of_segment and not (self._open or chunk.holds):
            raise InvalidField("chunk.end_of_segment", "ends a segment that holds nothing")
        if chunk.params and self._open:
            raise InvalidField("chunk.stage_params", "come with a segment's first chunk only")
        if chunk.params and not chunk.holds:
            raise InvalidField("chunk.stage_params", "come with input")
        await self._send(await self._sink.viewed(chunk), end=False)
        return True

    async def begin(self, prompt: Prompt) -> None:
        """Adds the prompt that the request itself brought: what comes before chunk 0."""
        await self._send(Chunk(-1, prompt=prompt), end=False)

    async def end(self) -> None:
        """No more input: closes the segment that is open. Again: nothing. Where no input ever came,
        that is the request's error."""
        await self._settled()
        if self.ended:
            return
        if not self._held:
            error = InvalidField("prompt", "the input ended without ever holding anything")
            self._sink.close(error)
            raise error
        await self._send(Chunk(self._next_seq, end_of_segment=self._open), end=True)

    async def _send(self, chunk: Chunk, *, end: bool) -> None:
        if self._closed is not None:
            # Stage 0 may hold no task by now: it would be given one that nobody ends.
            raise self._closed
        self._numbers += 1
        self._under_way = (chunk, end)
        self._pending = asyncio.get_running_loop().create_future()
        self.resend()
        await asyncio.shield(self._pending)

    async def _settled(self) -> None:
        """Waits for a chunk that an earlier feeder left under way; whether it was taken shows in
        the next number."""
        if self._pending is not None and not self._pending.done():
            await asyncio.wait([self._pending])

    def answered(self, number: int, error: OmniError | None) -> None:
        """The stage's word on the chunk that is under way."""
        if self._pending is None or self._under_way is None or number != self._numbers:
            return
        chunk, end = self._under_way
        self._under_way = None
        if error is None:
            self._count(chunk, end)
        if self._pending.done():
            return
        if error is None:
            self._pending.set_result(None)
        else:
            self._pending.set_exception(error)
            # Its feeder may be gone: then nobody asks.
            self._pending.exception()

    def _count(self, chunk: Chunk, end: bool) -> None:
        self._held = self._held or chunk.holds
        self.open_chunks = [] if chunk.end_of_segment else [*self.open_chunks, chunk]
        if isinstance(chunk.payload, Audio):
            self.audio_format = chunk.payload.format
        self._open = (self._open or chunk.holds) and not chunk.end_of_segment
        self._segments += chunk.end_of_segment
        self.ended = end
        if chunk.seq >= 0 and not end:
            self._next_seq += 1
        self._on_activity()

    @property
    def waits(self) -> bool:
        """Whether the request waits for a client's input, and not for a stage."""
        return not self.ended and self._under_way is None

    def resend(self) -> None:
        """Sends the chunk that is under way: once, and again when stage 0 has a new task."""
        if self._under_way is None:
            return
        chunk, end = self._under_way
        try:
            self._sink.send_chunk(self._numbers, chunk, end=end)
        except OmniError as error:
            # No replica takes it now: it leaves no trace, and its number may come again.
            self.answered(self._numbers, error)

    def answering(self, answered: int) -> bool:
        """Whether stage 0 owes an answer, having given `answered`; or its word on a chunk."""
        return self._under_way is not None or self._segments > answered or self.ended

    def close(self, error: OmniError | None) -> None:
        """The request ended, with `error` if it failed: nobody waits any more."""
        self._under_way = None
        self._closed = error or NotResumable("the request has finished")
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(self._closed)
            self._pending.exception()


class Feeder:
    """One feeder's call: pushes chunks, then finishes. Detaches itself as a context manager."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.summary = Summary()

    async def push(self, chunk: Chunk) -> None:
        """Adds one chunk. Raises what refuses it."""
        if await self._lane.add(chunk):
            self.summary.accepted_chunks += 1
        else:
            self.summary.duplicate_chunks += 1

    async def drive(self, chunks: AsyncIterator[Chunk]) -> Summary:
        """Adds all chunks, then ends the input. Raises what refuses one."""
        async for chunk in chunks:
            await self.push(chunk)
        await self._lane.end()
        self.summary.segments = self._lane.segments
        return self.summary

    def __enter__(self) -> Feeder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lane.detach(self)
