"""What tests of sessions share: a client of SubmitInteraction that keeps all that it hears, and
what must hold of that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from omni_grpc.config import PipelineConfig
from omni_grpc.v1 import params_pb2, service_pb2
from tests.streaming import new_id
from tests.support import Response, RichError, echo, rich_error, script, texts

Request = service_pb2.SubmitInteractionRequest
Heard = service_pb2.SubmitInteractionResponse

PROMPT = 0.25
"""Within how many seconds a session answers, whatever goes on: five times what is asked for."""


def state_name(event: service_pb2.EventState) -> str:
    """QUEUED, STARTED …"""
    return service_pb2.EventState.State.Name(event.state).removeprefix("STATE_")


TERMINAL = {"REJECTED", "SUPERSEDED", "EXPIRED", "COMPLETED"}


class Session:
    """A session's client. What comes is read at once; `pause` stops that."""

    def __init__(self, stub: Any, timeout: float = 25, **setup: Any) -> None:
        self.heard: list[Heard] = []
        self.times: list[float] = []
        self.error: RichError | None = None
        self.call = stub.SubmitInteraction(timeout=timeout)
        self._setup = setup
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._news = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def begin(self) -> Session:
        """Sends the setup."""
        await self.send(setup=self._setup)
        self._reader = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        try:
            while True:
                await self._goes_on.wait()
                message = await self.call.read()
                if message is grpc.aio.EOF:
                    if await self.call.code() is not grpc.StatusCode.OK:
                        await self.call.read()
                    break
                self.heard.append(message)
                self.times.append(time.perf_counter())
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.error = rich_error(error)
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
        finally:
            self._news.set()

    # ------------------------------------------------------------ to the server

    async def send(self, **message: Any) -> None:
        """Sends a message."""
        await self.call.write(Request(**message))

    async def update(self, seq: int, text: str | None = None, **fields: Any) -> None:
        """A chunk, of text unless `fields` bring something else; `end` closes the segment."""
        end = fields.pop("end", False)
        if text is not None:
            fields["text"] = text
        await self.send(update={"seq": seq, "end_of_segment": end, **fields})

    async def event(self, event_id: str, prompt: str | None = "blue", **fields: Any) -> None:
        """An event, at once in force unless `transition_chunks` says otherwise."""
        change = {"event_id": event_id, "prompt": prompt, "transition_chunks": 0, **fields}
        await self.send(event={k: v for k, v in change.items() if v is not None})

    async def interrupt(self, played_ms: int | None = None) -> None:
        """Interrupts."""
        await self.send(interrupt={} if played_ms is None else {"played_ms": played_ms})

    async def half_close(self) -> None:
        """Says no more."""
        await self.call.done_writing()

    def pause(self) -> None:
        """Reads no more than what is on its way to this reader."""
        self._goes_on.clear()

    def resume(self) -> None:
        """Reads on."""
        self._goes_on.set()

    async def leave(self) -> None:
        """Cancels the call."""
        self.call.cancel()
        self._goes_on.set()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    # ------------------------------------------------------------ from the server

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return self._reader is not None and self._reader.done()

    async def until(self, seen: Callable[[Session], object], within: float = 10) -> Session:
        """Returns when `seen` holds. AssertionError if it ends before, or takes too long."""
        try:
            async with asyncio.timeout(within):
                while not seen(self):
                    assert not self.over, (self.error, self.kinds[-20:])
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not within {within:g} s: {self.kinds[-20:]}") from None
        return self

    async def stands(self) -> Session:
        """Returns at setup_complete."""
        return await self.until(lambda s: s.heard)

    async def ended(self, within: float = 15) -> RichError | None:
        """Reads to the end: how it failed, None for a success."""
        assert self._reader is not None
        async with asyncio.timeout(within):
            await self._reader
        return self.error

    async def finished(self, within: float = 15) -> list[Heard]:
        """All that was heard of a session that succeeded."""
        assert await self.ended(within) is None, self.error
        assert self.heard[-1].response.WhichOneof("event") == "finished", self.kinds[-5:]
        return self.heard

    async def failed(self, within: float = 15) -> RichError:
        """How it failed."""
        error = await self.ended(within)
        assert error is not None, self.kinds[-5:]
        return error

    @property
    def kinds(self) -> list[str]:
        """What each message is, shortly."""
        return [kind_of(message) for message in self.heard]

    @property
    def responses(self) -> list[Response]:
        """The request's own events."""
        return [m.response for m in self.heard if m.WhichOneof("message") == "response"]

    @property
    def text(self) -> str:
        """The text so far."""
        return texts(self.responses)

    def states(self, event_id: str) -> list[str]:
        """An event's states, in the order in which they were heard; resubmissions apart."""
        return [
            state_name(m.event_state)
            for m in self.heard
            if m.event_state.event_id == event_id and not m.event_state.resubmission
        ]

    async def settled(self, *event_ids: str, within: float = 10) -> list[str]:
        """The last state of each event, once it has one that is terminal."""
        await self.until(lambda s: all(TERMINAL & set(s.states(i)) for i in event_ids), within)
        return [self.states(event_id)[-1] for event_id in event_ids]

    def answers(self, event_id: str) -> list[service_pb2.EventState]:
        """All that was said of an event."""
        return [m.event_state for m in self.heard if m.event_state.event_id == event_id]

    @property
    def rejected(self) -> dict[int, service_pb2.UpdateRejected]:
        """The last refusal of each chunk."""
        found = [m.update_rejected for m in self.heard if m.HasField("update_rejected")]
        return {message.seq: message for message in found}

    @property
    def interrupts(self) -> list[int]:
        """The epochs that were told."""
        return [m.interrupted.epoch for m in self.heard if m.HasField("interrupted")]


def kind_of(message: Heard) -> str:
    """A message's kind: an event's name and state, a response's seq, epoch and what it is."""
    kind = message.WhichOneof("message")
    if kind == "event_state":
        event = message.event_state
        return f"{event.event_id} {state_name(event)}"
    if kind == "response":
        response = message.response
        return f"{response.seq}/{response.epoch} {response.WhichOneof('event')}"
    if kind == "interrupted":
        return f"interrupted {message.interrupted.epoch}"
    return str(kind)


def check_order(heard: Iterable[Heard], first_seq: int | None = 0) -> None:
    """What holds of every session: setup_complete first, seq without a gap, sound contiguous,
    nothing of an epoch once a later one was told; each event at most one terminal state, last."""
    seq, sample = first_seq, None if first_seq is None else 0
    epoch, interrupted = 0, 0
    ended: set[str] = set()
    for place, message in enumerate(heard):
        assert (place == 0) == message.HasField("setup_complete"), kind_of(message)
        epoch = max(epoch, message.setup_complete.epoch)
        if message.HasField("interrupted"):
            # Who attached just now may hear of an interrupt that was before.
            assert message.interrupted.epoch > interrupted, kind_of(message)
            epoch = interrupted = message.interrupted.epoch
        if message.HasField("event_state") and not message.event_state.resubmission:
            event = message.event_state
            assert event.event_id not in ended, f"{kind_of(message)} after its end"
            if state_name(event) in TERMINAL:
                ended.add(event.event_id)
        if message.HasField("response"):
            response = message.response
            assert seq in (None, response.seq), f"{kind_of(message)} in place of {seq}"
            assert response.epoch >= epoch, f"{kind_of(message)} after interrupted {epoch}"
            seq = response.seq + 1
            if response.output.WhichOneof("content") == "audio":
                audio = response.output.audio
                assert sample in (None, audio.start_sample), kind_of(message)
                sample = audio.start_sample + len(audio.data) // 2


@asynccontextmanager
async def session(stub: Any, **fields: Any) -> AsyncIterator[Session]:
    """A session that opened a request with these fields, and stands; left when the block is
    over, and checked."""
    timeout = fields.pop("timeout", 25)
    fields.setdefault("request_id", new_id("session"))
    one = Session(stub, timeout, open=fields)
    try:
        await (await one.begin()).stands()
        yield one
    finally:
        await one.leave()
    check_order(one.heard)


@asynccontextmanager
async def talk(stub: Any, **fields: Any) -> AsyncIterator[Session]:
    """A session on a resumable request without a prompt."""
    async with session(stub, resumable=True, **fields) as one:
        yield one


@asynccontextmanager
async def attached(
    stub: Any, request_id: str, *, outputs: bool = False, timeout: float = 25
) -> AsyncIterator[Session]:
    """A session that attached to a request, and stands; left when the block is over, and
    checked."""
    attach = {"request_id": request_id, "receive_outputs": outputs}
    one = Session(stub, timeout, attach=attach)
    try:
        await (await one.begin()).stands()
        yield one
    finally:
        await one.leave()
    check_order(one.heard, first_seq=None)


def id_of(one: Session) -> str:
    """The id of its request."""
    return one.heard[0].setup_complete.request_id


def film(
    chunks: int = 1000, interval_ms: float = 20, **fields: Any
) -> list[params_pb2.StageParams]:
    """A script for the text stage: so many chunks, at this pace."""
    return [script(outputs=chunks, interval_ms=interval_ms, **fields)]


def still() -> PipelineConfig:
    """As echo, but no stage takes events."""
    stages = [stage.model_dump() for stage in echo({"name": "still"}).stages]
    for stage in stages:
        stage["engine_args"].pop("interactive", None)
    return PipelineConfig.model_validate({"name": "still", "stages": stages})
