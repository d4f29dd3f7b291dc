"""What tests of streaming input share: a resumable request with its outputs read all along, and a
feeder that breaks off where it is told to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from omni_grpc.config import PipelineConfig, ServerConfig
from omni_grpc.lane import Lane
from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.support import (
    ENVIRONMENT,
    Response,
    RichError,
    client,
    echo,
    events,
    eventually,
    freed,
    rich_error,
    stub_of,
    texts,
)

Chunk = service_pb2.UpdateChunk
Update = service_pb2.StreamingUpdateRequest
Summary = service_pb2.StreamingUpdateResponse

_numbers = itertools.count()


def new_id(name: str = "stream") -> str:
    """An id that no other test uses."""
    return f"{name}-{next(_numbers)}"


def header(request_id: str) -> service_pb2.StreamingUpdateRequest:
    """A feeder's first message."""
    return Update(header={"request_id": request_id})


def chunk(seq: int, text: str | None = None, *, end: bool = False, **fields: Any) -> Chunk:
    """A chunk, of text unless `fields` bring something else."""
    if text is not None:
        fields["text"] = text
    return Chunk(seq=seq, end_of_segment=end, **fields)


class Opened:
    """A resumable request. Its events are read as they come; `pause` stops that."""

    def __init__(self, stub: Any, request_id: str, **fields: Any) -> None:
        timeout = fields.pop("timeout", 25)
        request = service_pb2.AddRequestRequest(request_id=request_id, resumable=True, **fields)
        self.id = request_id
        self.responses: list[Response] = []
        self.error: RichError | None = None
        self.call = stub.AddRequest(request, timeout=timeout)
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while True:
                await self._goes_on.wait()
                response = await self.call.read()
                if response is grpc.aio.EOF:
                    if await self.call.code() is not grpc.StatusCode.OK:
                        await self.call.read()
                    break
                self.responses.append(response)
                self._news.set()
        except grpc.aio.AioRpcError as error:
            self.error = rich_error(error)
        finally:
            self._news.set()

    def pause(self) -> None:
        """Reads no more than what is on its way to this reader."""
        self._goes_on.clear()

    def resume(self) -> None:
        """Reads on."""
        self._goes_on.set()

    async def until(self, seen: Callable[[list[Response]], object], within: float = 10) -> None:
        """Returns when what came satisfies `seen`. AssertionError if it ends, or takes too long."""
        async with asyncio.timeout(within):
            while not seen(self.responses):
                assert not self._reader.done(), (self.error, events(self.responses))
                self._news.clear()
                await self._news.wait()

    async def accepted(self) -> service_pb2.AddRequestResponse:
        """The first event."""
        await self.until(bool)
        return self.responses[0]

    async def answered(self, segment: int, *stages: str) -> None:
        """Returns when these stages have answered the segment."""
        await self.until(lambda got: set(stages) <= {s for s, n in ends(got) if n == segment})

    async def finished(self, within: float = 20) -> list[Response]:
        """All of its events, when it has succeeded."""
        async with asyncio.timeout(within):
            await self._reader
        assert self.error is None, self.error
        assert self.responses[-1].WhichOneof("event") == "finished"
        assert [r.seq for r in self.responses] == list(range(len(self.responses)))
        return self.responses

    async def failed(self, within: float = 20) -> RichError:
        """How it failed."""
        async with asyncio.timeout(within):
            await self._reader
        assert self.error is not None, events(self.responses)
        return self.error

    async def leave(self) -> None:
        """Cancels it, as its owner."""
        self.call.cancel()
        self._goes_on.set()
        await asyncio.gather(self._reader, return_exceptions=True)

    @property
    def text(self) -> str:
        """Its text so far."""
        return texts(self.responses)


@asynccontextmanager
async def opened(stub: Any, request_id: str = "", **fields: Any) -> AsyncIterator[Opened]:
    """A resumable request that was accepted; left when the block is over."""
    request = Opened(stub, request_id or new_id(), **fields)
    try:
        await request.accepted()
        yield request
    finally:
        await request.leave()


class Feeding:
    """A feeder's call. Nothing is written behind a chunk that should be refused: grpcio's asyncio
    client would make a status of its own of it."""

    def __init__(self, stub: Any, request_id: str | None, timeout: float = 20) -> None:
        self.call = stub.StreamingUpdate(timeout=timeout)
        self._header = request_id

    async def send(self, *chunks: service_pb2.UpdateChunk) -> Feeding:
        """Sends chunks, the header before the first."""
        await self.attach()
        for one in chunks:
            await self.call.write(Update(chunk=one))
        return self

    async def attach(self) -> Feeding:
        """Sends the header."""
        if self._header is not None:
            await self.call.write(header(self._header))
            self._header = None
        return self

    async def close(self) -> service_pb2.StreamingUpdateResponse:
        """Half-closes; the summary."""
        await self.attach()
        await self.call.done_writing()
        return await self.answer()

    async def answer(self) -> service_pb2.StreamingUpdateResponse:
        """The summary of a call that ends without our doing."""
        response: service_pb2.StreamingUpdateResponse = await self.call
        return response

    async def refused(self) -> RichError:
        """How the server ends the call."""
        try:
            response = await self.call
        except grpc.aio.AioRpcError as error:
            return rich_error(error)
        raise AssertionError(f"it succeeded: {response}")

    async def close_refused(self) -> RichError:
        """Half-closes; how that is refused."""
        await self.attach()
        await self.call.done_writing()
        return await self.refused()

    def cancel(self) -> None:
        """Breaks off."""
        self.call.cancel()


async def feed(
    stub: Any, request_id: str, chunks: Iterable[service_pb2.UpdateChunk]
) -> service_pb2.StreamingUpdateResponse:
    """Feeds all of these and half-closes."""
    return await (await Feeding(stub, request_id).send(*chunks)).close()


async def refused(stub: Any, request_id: str, *chunks: service_pb2.UpdateChunk) -> RichError:
    """How a feeder is refused that sends these and waits."""
    feeding = await Feeding(stub, request_id).send(*chunks)
    return await feeding.refused()


def pieces(text: str, cuts: Sequence[int]) -> list[str]:
    """The text cut at these places."""
    places = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def ends(responses: Iterable[Response]) -> list[tuple[str, int]]:
    """(stage, segment) of every segment's end, in order."""
    found = [r.segment_end for r in responses if r.WhichOneof("event") == "segment_end"]
    return [(end.stage, end.segment) for end in found]


def by_segment(responses: Iterable[Response]) -> dict[int, str]:
    """The text of each segment."""
    found: dict[int, str] = {}
    for response in responses:
        if response.output.WhichOneof("content") == "text":
            output = response.output
            found[output.segment] = found.get(output.segment, "") + output.text.text
    return found


def lane_of(server: Server, request_id: str) -> Lane:
    """A running request's input, in the server."""
    lane = server.engine.orchestrator.find(request_id).lane
    assert lane is not None
    return lane


async def gone(server: Server, request_id: str) -> None:
    """Returns when the server knows that the feeder is gone. Breaking off is no half-close."""
    lane = lane_of(server, request_id)
    await eventually(lambda: not lane.fed, within=5)
    assert not lane.ended


async def taken(server: Server, request_id: str, count: int) -> None:
    """Returns when the server has taken so many chunks, over the request's life."""
    lane = lane_of(server, request_id)
    await eventually(lambda: lane.next_seq >= count, within=5)


async def sent(
    stub: Any, server: Server, request_id: str, *chunks: service_pb2.UpdateChunk
) -> None:
    """Feeds these chunks, and breaks off when the server has them."""
    lane = lane_of(server, request_id)
    feeding = await Feeding(stub, request_id).send(*chunks)
    await eventually(lambda: lane.next_seq == chunks[-1].seq + 1, within=5)
    feeding.cancel()
    await gone(server, request_id)


# ---------------------------------------------------------------- a server of more pipelines


def python_pipeline(name: str, *stages: tuple[str, str], **settings: Any) -> PipelineConfig:
    """Stages (name, class) in a line, of which the last gives text."""
    made: list[dict[str, Any]] = [
        {"name": stage, "engine": "python", "model": model, "environment": ENVIRONMENT}
        for stage, model in stages
    ]
    for before, stage in itertools.pairwise(made):
        stage["inputs"] = [before["name"]]
    made[-1]["output"] = "text"
    return PipelineConfig.model_validate({"name": name, "stages": made, **settings})


def stream_pipelines() -> list[PipelineConfig]:
    """echo; the same with little patience; a stage that refuses chunks, behind a transform that
    makes directories; the same stage before a voice; a pipeline that takes no segments."""
    careful = ("careful", "tests.streaming_stages:Careful")
    voice = {"name": "voice", "engine": "fake", "engine_args": {"modality": "audio"}}
    read = python_pipeline("careful", careful)
    read = read.model_validate(
        {
            "name": "read",
            "stages": [
                *(stage.model_dump(exclude={"output"}) for stage in read.stages),
                voice | {"inputs": ["careful"], "output": "audio"},
            ],
        }
    )
    return [
        echo(),
        echo({"name": "hasty", "input_timeout": 0.3}),
        python_pipeline("careful", careful, transform="tests.streaming_stages:noting"),
        read,
        python_pipeline("deaf", careful, ("deaf", "tests.example_stages:Shout")),
    ]


@pytest.fixture(scope="session")
async def streams_server() -> AsyncIterator[Server]:
    """A server of all of these."""
    server = Server(ServerConfig(port=0), stream_pipelines())
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


@pytest.fixture
async def streams(streams_server: Server) -> AsyncIterator[Any]:
    """A client of it. When the test is over, the server must hold nothing."""
    async with client(streams_server) as channel:
        yield stub_of(channel)
    await freed(streams_server)
    artifacts = streams_server.engine.orchestrator.artifact_root
    await eventually(lambda: not list(artifacts.glob("*")))
