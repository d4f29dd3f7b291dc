"""A session: one stream that opens a request or attaches to one, feeds it, steers it, and carries
everything back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

import grpc

from omni_grpc.v1 import service_pb2
from omni_grpc.v1.prompt_pb2 import Media
from omni_grpc.v1.service_pb2 import SubmitInteractionRequest
from omni_grpc_client.errors import ProtocolError, decode_error
from omni_grpc_client.events import Event, Finished, decode_event
from omni_grpc_client.feed import Content, build_chunk
from omni_grpc_client.media import AudioFormat
from omni_grpc_client.notices import Interrupted, Notice, UpdateRejected, decode_notice
from omni_grpc_client.order import EventOrder
from omni_grpc_client.request import Params

SessionItem = Event | Notice
"""What a session says: events of its request, and notices of the session's own."""


class Interaction:
    """A session that stands; made by `OmniClient.interact` and `OmniClient.attach`.

    Iterate it, in one task, for all that it says; steer and feed it from any. Iteration ends with
    the request, and raises OmniCallError where that fails. What is sent after the end is dropped:
    the iteration tells why it ended."""

    def __init__(
        self,
        call: Any,
        messages: AsyncIterator[service_pb2.SubmitInteractionResponse],
        setup: service_pb2.SetupComplete,
        order: SessionOrder,
    ) -> None:
        self.request_id = setup.request_id
        self.epoch = setup.epoch
        """One more after each interrupt."""
        self.next_seq = 0
        """Number of the next chunk of input: of the refused one, where one was refused."""
        self._call = call
        self._messages = messages
        self._order = order
        self._items = self._read()
        self._ids = count()
        self._turn = asyncio.Lock()

    def __aiter__(self) -> Interaction:
        return self

    async def __anext__(self) -> SessionItem:
        """The next event or notice. Raises OmniCallError, ProtocolError."""
        return await anext(self._items)

    async def event(
        self,
        prompt: str | None = None,
        *,
        negative_prompt: str | None = None,
        media: Iterable[Media] = (),
        parameters: Mapping[str, Any] | None = None,
        transition_chunks: int | None = None,
        event_id: str = "",
    ) -> str:
        """Changes the running generation from a chunk's border on; its id, made up where none is
        given. What becomes of it comes as EventChanged: exactly one with a terminal state.

        All parts apply together or not at all, blended in over `transition_chunks` chunks (None:
        the server's default, 3; 0: a hard cut)."""
        event_id = event_id or f"event-{next(self._ids)}"
        message = service_pb2.InteractionEvent(
            event_id=event_id,
            prompt=prompt,
            negative_prompt=negative_prompt,
            media=media,
            transition_chunks=transition_chunks,
        )
        if parameters is not None:
            message.parameters.SetInParent()
            message.parameters.update(parameters)
        await self._send(SubmitInteractionRequest(event=message))
        return event_id

    async def send(
        self,
        content: Content = "",
        *,
        end_of_segment: bool = False,
        stage_params: Mapping[str, Params] | None = None,
        format: AudioFormat | None = None,
    ) -> int:
        """Appends input to a resumable request, as Feeder.send does; the chunk's number. A refusal
        comes as UpdateRejected."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        chunk = build_chunk(seq, content, end_of_segment, stage_params, format)
        await self._send(SubmitInteractionRequest(update=chunk))
        return seq

    async def end_segment(self) -> int:
        """Ends the segment that is open: now it is answered."""
        return await self.send(end_of_segment=True)

    async def end_input(self) -> None:
        """Ends the input, and the segment that is open. Events may still follow."""
        await self._send(SubmitInteractionRequest(end_input=service_pb2.EndInput()))

    async def interrupt(self, played_ms: int | None = None) -> None:
        """Ends the present answer; `played_ms` of its sound were heard (None: all that came).
        Interrupted comes when it has ended, and nothing of it afterwards."""
        await self._send(
            SubmitInteractionRequest(interrupt=service_pb2.Interrupt(played_ms=played_ms))
        )

    async def abort(self) -> None:
        """Aborts the request, also one that was only attached to: iteration raises
        CancelledCallError."""
        await self._send(SubmitInteractionRequest(abort=service_pb2.AbortSession()))

    async def close(self) -> None:
        """Leaves: what the session opened is aborted, unless it has finished; what it attached to
        goes on. Idempotent."""
        self._call.cancel()
        await self._items.aclose()

    async def _send(self, message: SubmitInteractionRequest) -> None:
        async with self._turn:
            # The call has ended, and whoever iterates hears how.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(message)

    async def _half_close(self) -> None:
        async with self._turn:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.done_writing()

    async def _read(self) -> AsyncGenerator[SessionItem, None]:
        finished = False
        try:
            async for message in self._messages:
                if (item := self._order.item(message)) is None:
                    continue
                if isinstance(item, Interrupted):
                    self.epoch = item.epoch
                elif isinstance(item, UpdateRejected):
                    self.next_seq = min(self.next_seq, item.seq)
                elif isinstance(item, Finished):
                    finished = True
                    # Some proxies break off a call that ends before its client has half-closed.
                    await self._half_close()
                yield item
            self._order.end()
        except grpc.aio.AioRpcError as error:
            failure = decode_error(error)
            if failure.reason or not finished:
                raise failure from None


class SessionOrder:
    """The contract's order in a session. `attached`: it joins a request that runs."""

    def __init__(self, *, attached: bool) -> None:
        self._events = None if attached else EventOrder()
        self._next_seq: int | None = None
        self._epoch = 0

    def item(self, message: service_pb2.SubmitInteractionResponse) -> SessionItem | None:
        """What a message says; None for what this client does not know yet. Raises
        ProtocolError."""
        kind = message.WhichOneof("message")
        if kind == "setup_complete":
            raise ProtocolError("setup_complete came again")
        if kind != "response":
            notice = decode_notice(message)
            if isinstance(notice, Interrupted):
                self._epoch = notice.epoch
            return notice
        response = message.response
        if response.epoch < self._epoch:
            raise ProtocolError(f"an event of epoch {response.epoch} came in {self._epoch}")
        self._number(response.seq)
        event = decode_event(response)
        if event is not None and self._events is not None:
            self._events.event(event)
        return event

    def _number(self, seq: int) -> None:
        if self._events is not None:
            self._events.number(seq)
        elif self._next_seq not in (None, seq):
            raise ProtocolError(f"event {seq} came where {self._next_seq} was due")
        self._next_seq = seq + 1

    def end(self) -> None:
        """The call ended with OK."""
        if self._events is not None:
            self._events.end()


async def begin_session(call: Any, setup: service_pb2.InteractionSetup) -> Interaction:
    """A session over a call that was just begun; returns when it stands. Raises OmniCallError,
    ProtocolError; then, and when it is cancelled, the call is too."""
    try:
        with suppress(asyncio.InvalidStateError):
            await call.write(SubmitInteractionRequest(setup=setup))
        messages = aiter(call)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "setup_complete":
            raise ProtocolError("the first message is not setup_complete")
    except BaseException as error:
        call.cancel()
        if isinstance(error, grpc.aio.AioRpcError):
            raise decode_error(error) from None
        raise
    order = SessionOrder(attached=setup.HasField("attach"))
    return Interaction(call, messages, first.setup_complete, order)
