"""The contract's order of events, checked as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from omni_grpc_client.errors import ProtocolError, decode_error
from omni_grpc_client.events import (
    Accepted,
    AudioChunk,
    Event,
    Finished,
    ImageChunk,
    TensorChunk,
    VideoChunk,
    decode_event,
)
from omni_grpc_client.media import AudioFormat


class EventOrder:
    """One call's order. Each method raises ProtocolError where the server broke it."""

    def __init__(self) -> None:
        self._next_seq = 0
        self._finished = False
        self._formats: dict[str, AudioFormat] = {}
        self._samples: dict[str, int] = {}
        self._offsets: dict[tuple[str, int, int, str], int] = {}
        self._video_chunks: dict[str, int] = {}

    def number(self, seq: int) -> None:
        """The next message's number: from 0 without a gap, none after `finished`."""
        if self._finished:
            raise ProtocolError(f"event {seq} came after finished")
        if seq != self._next_seq:
            raise ProtocolError(f"event {seq} came where {self._next_seq} was due")
        self._next_seq += 1

    def event(self, event: Event) -> None:
        """`accepted` first and only then; pieces of one output without a gap."""
        if isinstance(event, Accepted) != (event.seq == 0):
            raise ProtocolError(f"event {event.seq} is {type(event).__name__}: accepted is first")
        match event:
            case Finished():
                self._finished = True
            case AudioChunk():
                self._audio(event)
            case ImageChunk():
                self._part(event, "")
            case TensorChunk():
                self._part(event, event.name)
            case VideoChunk():
                due = self._video_chunks.get(event.stage, 0)
                _expect(event.stage, "chunk_index", event.chunk_index, due)
                self._video_chunks[event.stage] = due + 1

    def end(self) -> None:
        """The call ended with OK."""
        if not self._finished:
            raise ProtocolError("the call ended with OK, but without finished")

    def _audio(self, chunk: AudioChunk) -> None:
        form = self._formats.setdefault(chunk.stage, chunk.format)
        if chunk.format != form:
            raise ProtocolError(f"stage {chunk.stage!r}: the audio format changed")
        if len(chunk.data) % form.frame_bytes:
            raise ProtocolError(f"stage {chunk.stage!r}: an audio chunk cuts a sample")
        due = self._samples.get(chunk.stage, 0)
        _expect(chunk.stage, "start_sample", chunk.start_sample, due)
        self._samples[chunk.stage] = due + chunk.samples

    def _part(self, part: ImageChunk | TensorChunk, name: str) -> None:
        key = (part.stage, part.index, part.segment, name)
        due = self._offsets.pop(key, 0)
        _expect(part.stage, "offset", part.offset, due)
        if not part.last:
            self._offsets[key] = due + len(part.data)


async def read_events(call: Any) -> AsyncGenerator[Event, None]:
    """The events of an AddRequest call, in the contract's order. The call is cancelled when the
    generator is closed. Raises OmniCallError, ProtocolError."""
    order = EventOrder()
    try:
        async for message in call:
            order.number(message.seq)
            # A kind of event that this client does not know yet is skipped.
            if (event := decode_event(message)) is not None:
                order.event(event)
                yield event
        order.end()
    except grpc.aio.AioRpcError as error:
        raise decode_error(error) from None
    finally:
        call.cancel()


def _expect(stage: str, field: str, found: int, due: int) -> None:
    if found != due:
        raise ProtocolError(f"stage {stage!r}: {field} is {found} where {due} was due")
