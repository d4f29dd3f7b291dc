"""Input that streams: a feeder, and a request that is fed while its events are read.

Chunks are numbered here, and kept until it is sure that the server has them: a segment that was
answered was there. When a feeder's call breaks off, another one sends all others again; their
numbers make what had arrived harmless."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from omni_grpc.v1.service_pb2 import (
    AudioInput,
    StreamingUpdateRequest,
    StreamingUpdateResponse,
    UpdateChunk,
    UpdateHeader,
)
from omni_grpc_client.errors import CancelledCallError, NotFoundError, OmniCallError, decode_error
from omni_grpc_client.events import Accepted, Event, SegmentEnd
from omni_grpc_client.media import AudioFormat, encode_audio_format
from omni_grpc_client.request import Params, PromptLike, encode_prompt, encode_stage_params

RETRIES = 6
"""Calls that may break off one after the other before the error is the caller's."""
RETRY_S = 0.05
"""Wait before the first of them is followed by another; doubled each time."""

BROKEN = frozenset({"UNAVAILABLE", "INTERNAL", "CANCELLED", "UNKNOWN"})
"""Codes that mean, where the server gave no reason, that the call broke off. grpcio itself says
INTERNAL where the server ended a call that was being written to: the next call tells why."""

Content = PromptLike | bytes
"""A chunk's input: text that joins the segment's; sound; or a whole prompt."""


@dataclass(frozen=True, slots=True)
class FeedSummary:
    """What a feeder's last call did, and the segments that the request has had in all."""

    accepted_chunks: int
    duplicate_chunks: int
    segments: int


class Feeder:
    """Feeds a resumable request that runs, `async with client.feed(request_id) as feeder`.

    Refusals come with one of the next calls, as chunks are not answered one by one: the chunk that
    was refused, and those behind it, are not part of the input. The request waits for a feeder that
    begins with the number of that chunk."""

    def __init__(self, open_call: Callable[[], Any], request_id: str, next_seq: int = 0) -> None:
        self.request_id = request_id
        self.next_seq = next_seq
        """Number of the next chunk."""
        self._open_call = open_call
        self._kept: deque[UpdateChunk] = deque()
        self._segment_of: deque[int] = deque()
        self._segment = 0
        self._end_sent = False
        self._answer_lost = False
        self._half_closed = False
        self._call: Any = None
        self._answer: asyncio.Task[StreamingUpdateResponse] | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def unacknowledged(self) -> int:
        """Chunks that may have to be sent again."""
        return len(self._kept)

    async def send(
        self,
        content: Content = "",
        *,
        end_of_segment: bool = False,
        stage_params: Mapping[str, Params] | None = None,
        format: AudioFormat | None = None,
    ) -> None:
        """Appends input. Waits while the server does not take any more.

        `stage_params` go with a segment's first chunk and hold for it; `format` with the first
        chunk of sound. Raises OmniCallError when the request, or a chunk before, is refused."""
        chunk = build_chunk(self.next_seq, content, end_of_segment, stage_params, format)
        async with self._turn:
            if self._half_closed:
                raise RuntimeError("the input has ended")
            self._keep(chunk)
            await self._delivered(lambda: self._write(StreamingUpdateRequest(chunk=chunk)))

    async def end_segment(self) -> None:
        """Ends the segment that is open: now it is answered."""
        await self.send(end_of_segment=True)

    async def finish(self) -> FeedSummary | None:
        """Ends the input, and the segment that is open. Again: nothing, but the summary.

        None where the answer was lost and the request has ended since: its events tell how."""
        async with self._turn:
            self._half_closed = True
            try:
                await self._delivered(self._half_close)
            except NotFoundError:
                if not self._answer_lost:
                    raise
                return None
            assert self._answer is not None
            response = self._answer.result()
        return FeedSummary(response.accepted_chunks, response.duplicate_chunks, response.segments)

    def acknowledge(self, segment: int) -> None:
        """A segment was answered: its chunks, and those before, need not be kept."""
        while self._segment_of and self._segment_of[0] <= segment:
            self._segment_of.popleft()
            self._kept.popleft()

    async def close(self) -> None:
        """Breaks off: the request waits for another feeder. Idempotent."""
        if self._call is not None:
            self._call.cancel()
        if self._answer is not None:
            await asyncio.gather(self._answer, return_exceptions=True)

    # ------------------------------------------------------------ the call

    def _keep(self, chunk: UpdateChunk) -> None:
        self._kept.append(chunk)
        self._segment_of.append(self._segment)
        self._segment += chunk.end_of_segment
        self.next_seq += 1

    async def _delivered(self, step: Callable[[], Any]) -> None:
        """Takes a step of the call; where it breaks off, a new call says everything again."""
        delay = RETRY_S
        for attempt in range(RETRIES + 1):
            try:
                if self._call is None:
                    await self._begin(delay if attempt else 0.0)
                elif attempt == 0:
                    await step()
                if self._half_closed:
                    await self._half_close()
                return
            except OmniCallError as error:
                again = error.reason == "FEEDER_ACTIVE" and attempt > 0
                if not (again or (error.code in BROKEN and not error.reason)):
                    raise
                if attempt == RETRIES:
                    raise
                self._answer_lost = self._answer_lost or self._end_sent
            self._call = None
            await asyncio.sleep(delay)
            delay *= 2

    async def _begin(self, patience: float) -> None:
        """A new call: the header and all chunks that are kept. Then, after one that broke off,
        waits a little: a refusal is heard best while nothing is written."""
        self._call = self._open_call()
        self._answer = asyncio.create_task(_answered(self._call))
        self._answer.add_done_callback(_heard)
        header = UpdateHeader(request_id=self.request_id)
        await self._write(StreamingUpdateRequest(header=header))
        for chunk in list(self._kept):
            await self._write(StreamingUpdateRequest(chunk=chunk))
        if patience:
            await asyncio.wait([self._answer], timeout=patience)
        if self._answer.done():
            self._answer.result()

    async def _write(self, message: StreamingUpdateRequest) -> None:
        assert self._answer is not None
        if not self._answer.done():
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(message)
                return
        # The call has ended: its status says why.
        await self._ended()

    async def _half_close(self) -> None:
        assert self._answer is not None
        if not self._answer.done():
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()
                self._end_sent = True
        await self._ended()

    async def _ended(self) -> None:
        assert self._answer is not None
        # Shielded: the answer belongs to the call, whoever waits for it.
        await asyncio.shield(self._answer)


def build_chunk(
    seq: int,
    content: Content,
    end_of_segment: bool,
    stage_params: Mapping[str, Params] | None,
    format: AudioFormat | None,
) -> UpdateChunk:
    """A chunk of input as the contract's message."""
    chunk = UpdateChunk(
        seq=seq, end_of_segment=end_of_segment, stage_params=encode_stage_params(stage_params)
    )
    if isinstance(content, bytes):
        sound = AudioInput(data=content)
        if format is not None:
            sound.format.CopyFrom(encode_audio_format(format))
        chunk.audio.CopyFrom(sound)
    elif not isinstance(content, str):
        chunk.prompt.CopyFrom(encode_prompt(content))
    elif content or not end_of_segment:
        chunk.text = content
    return chunk


async def _answered(call: Any) -> StreamingUpdateResponse:
    try:
        response: StreamingUpdateResponse = await call
    except grpc.aio.AioRpcError as error:
        raise decode_error(error) from None
    except asyncio.CancelledError:
        # The call was cancelled, not who waits for it.
        raise CancelledCallError("CANCELLED", "the feeder's call was cancelled") from None
    return response


def _heard(answer: asyncio.Task[StreamingUpdateResponse]) -> None:
    # Who feeds no more has no use for it.
    if not answer.cancelled():
        answer.exception()


class StreamedRequest:
    """A request that is fed while its events are read; made by `OmniClient.open`.

    Iterate it for its events, Finished last, in one task, and feed it from any. `feeder` feeds it;
    `send`, `end_segment` and `finish` are the feeder's."""

    def __init__(self, events: AsyncIterator[Event], accepted: Accepted, feeder: Feeder) -> None:
        self.accepted = accepted
        self.request_id = accepted.request_id
        self.feeder = feeder
        self.send = feeder.send
        self.end_segment = feeder.end_segment
        self.finish = feeder.finish
        self._events = events
        self._first = True

    def __aiter__(self) -> StreamedRequest:
        return self

    async def __anext__(self) -> Event:
        """The next event, Accepted first. Raises OmniCallError when the request fails."""
        if self._first:
            self._first = False
            return self.accepted
        event = await anext(self._events)
        if isinstance(event, SegmentEnd):
            self.feeder.acknowledge(event.segment)
        return event
