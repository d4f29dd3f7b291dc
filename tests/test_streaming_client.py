"""The Python client's streaming input: on a real server, and through connections that break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from omni_grpc.server import Server
from omni_grpc_client import (
    Accepted,
    AddRequestRequest,
    AlreadyExistsError,
    AudioFormat,
    CancelledCallError,
    Event,
    FailedPreconditionError,
    Finished,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OmniClient,
    Prompt,
    SegmentEnd,
    StreamedRequest,
    TextDelta,
)
from tests.streaming import lane_of, new_id, taken
from tests.support import eventually, freed, in_flight


@pytest.fixture
async def client(echo_server: Server) -> AsyncIterator[OmniClient]:
    """A client of `echo_server`, which must hold nothing when the test is over."""
    async with OmniClient(f"127.0.0.1:{echo_server.port}") as connected:
        yield connected
    await freed(echo_server)


async def rest(request: StreamedRequest) -> list[Event]:
    """All events that are still to come."""
    return [event async for event in request]


def text_of(events: list[Event], segment: int | None = None) -> str:
    """The text of all segments, or of one."""
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return "".join(d.text for d in deltas if segment in (None, d.segment))


# ---------------------------------------------------------------- a request


async def test_a_request_is_fed_while_it_is_read(client: OmniClient) -> None:
    async with client.open(output_modalities=["text"], request_id=new_id()) as request:
        assert isinstance(await anext(request), Accepted)
        for n in range(3):
            await request.send("hello ")
            await request.send(f"{n}")
            await request.end_segment()
            events = []
            async for event in request:
                events.append(event)
                if isinstance(event, SegmentEnd):
                    break
            assert text_of(events, n) == f"hello {n}"
            assert request.feeder.unacknowledged == 0
        summary = await request.finish()
        assert summary is not None
        assert (summary.accepted_chunks, summary.duplicate_chunks, summary.segments) == (9, 0, 3)
        assert await request.finish() == summary
        [finished] = await rest(request)
        assert isinstance(finished, Finished)


async def test_a_request_may_begin_with_a_prompt(client: OmniClient) -> None:
    async with client.open("hello ", output_modalities=["text"]) as request:
        await request.send([("user", "big ")])
        await request.send(Prompt(text="world"), end_of_segment=True)
        await request.finish()
        assert text_of(await rest(request)) == "hello big world"


async def test_a_segments_parameters(client: OmniClient) -> None:
    async with client.open(output_modalities=["text"]) as request:
        await request.send("a", end_of_segment=True, stage_params={"text": {"outputs": 2}})
        await request.send("b")
        await request.finish()
        events = await rest(request)
        assert (text_of(events, 0), text_of(events, 1)) == ("word0 word1 ", "b")


async def test_leaving_the_block_aborts(client: OmniClient, echo_server: Server) -> None:
    async with client.open() as request:
        await request.send("a ")
        await eventually(lambda: lane_of(echo_server, request.request_id).next_seq == 1)
    await freed(echo_server)


async def test_another_may_feed(client: OmniClient, echo_server: Server) -> None:
    async with client.open(output_modalities=["text"]) as request:
        async with client.feed(request.request_id) as feeder:
            await feeder.send("a ")
            lane = lane_of(echo_server, request.request_id)
            await eventually(lambda: lane.next_seq == 1)
        async with client.feed(request.request_id, next_seq=feeder.next_seq) as feeder:
            await feeder.send("b")
            await feeder.finish()
        assert text_of(await rest(request)) == "a b"


async def test_a_whole_request_must_be_resumable(client: OmniClient) -> None:
    whole = AddRequestRequest(request_id=new_id(), output_modalities=["MODALITY_TEXT"])
    with pytest.raises(ValueError, match="resumable"):
        async with client.open(whole):
            pass
    whole.resumable = True
    async with client.open(whole) as request:
        await request.send("x")
        await request.finish()
        assert text_of(await rest(request)) == "x"


# ---------------------------------------------------------------- errors


async def test_a_refused_request_does_not_enter_the_block(client: OmniClient) -> None:
    with pytest.raises(NotFoundError):
        async with client.open(pipeline="nope"):
            pytest.fail("it was entered")


@pytest.mark.parametrize("many", [0, 200])
async def test_a_refused_chunk_says_why(client: OmniClient, many: int) -> None:
    """However much is written behind it before that is heard."""
    async with client.open(output_modalities=["text"]) as request:
        await request.send("a ")
        with pytest.raises(InvalidArgumentError) as error:
            await request.send("b", stage_params={"text": {"outputs": 2}})
            for _ in range(many):
                await request.send("c")
            await request.finish()
        assert [v.field for v in error.value.violations] == ["chunk.stage_params"]
        async with client.feed(request.request_id, next_seq=1) as feeder:
            await feeder.send("d")
            await feeder.finish()
        assert text_of(await rest(request)) == "a d"


async def test_sound_to_a_pipeline_of_text(client: OmniClient) -> None:
    async with client.open() as request:
        with pytest.raises(FailedPreconditionError) as error:
            await request.send(bytes(8), format=AudioFormat())
            await request.finish()
        assert error.value.reason == "NOT_SUPPORTED"


async def test_unknown_requests_and_second_feeders(client: OmniClient, echo_server: Server) -> None:
    with pytest.raises(NotFoundError):
        async with client.feed("nobody") as feeder:
            await feeder.send("x")
            await feeder.finish()
    async with client.open() as request:
        await request.send("x")
        await taken(echo_server, request.request_id, 1)
        with pytest.raises(AlreadyExistsError) as error:
            async with client.feed(request.request_id) as second:
                await second.finish()
        assert error.value.reason == "FEEDER_ACTIVE"


async def test_no_input_is_an_error_for_feeder_and_reader(client: OmniClient) -> None:
    async with client.open() as request:
        with pytest.raises(InvalidArgumentError):
            await request.finish()
        with pytest.raises(InvalidArgumentError):
            await rest(request)


async def test_the_requests_own_failure_reaches_both(client: OmniClient) -> None:
    async with client.open(stage_params={"text": {"fail_at": 0}}) as request:
        await request.send("x", end_of_segment=True)
        with pytest.raises(InternalError) as failed:
            await rest(request)
        assert failed.value.reason == "STAGE_ERROR"
        with pytest.raises((InternalError, NotFoundError)):
            await request.finish()


async def test_abort_reaches_both(client: OmniClient) -> None:
    async with client.open() as request:
        await request.send("x")
        reading = asyncio.create_task(rest(request))
        await client.abort(request.request_id)
        with pytest.raises(CancelledCallError):
            await reading
        with pytest.raises((CancelledCallError, NotFoundError)):
            await request.finish()


async def test_input_that_has_ended_takes_no_more(client: OmniClient) -> None:
    async with client.open(output_modalities=["text"]) as request:
        await request.send("x")
        await request.finish()
        with pytest.raises(RuntimeError):
            await request.send("y")


async def test_a_send_that_is_cancelled_is_sent_all_the_same(
    client: OmniClient, echo_server: Server
) -> None:
    async with client.open(output_modalities=["text"]) as request:
        await request.send("a ")
        sending = asyncio.create_task(request.send("b "))
        await asyncio.sleep(0)
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
        await request.send("c")
        await request.finish()
        text = text_of(await rest(request))
        # Cancelled before it had begun, it is no chunk; else it is one, once.
        assert text in ("a b c", "a c")
        assert len(text.split()) == request.feeder.next_seq


# ---------------------------------------------------------------- broken connections


class Relay:
    """A path to the server that can be cut."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._to = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        onward_reader, onward = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, onward}
        one = asyncio.create_task(self._copy(reader, onward))
        other = asyncio.create_task(self._copy(onward_reader, writer))
        self._tasks |= {one, other}
        await asyncio.gather(one, other)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Resets every connection."""
        writers, self._writers = self._writers, set()
        for writer in writers:
            writer.transport.abort()


@asynccontextmanager
async def relay(port: int) -> AsyncIterator[Relay]:
    """A relay to that port, on a free one."""
    path = Relay(port)
    server = await asyncio.start_server(path.handle, "127.0.0.1", 0)
    path.port = server.sockets[0].getsockname()[1]
    try:
        yield path
    finally:
        server.close()
        path.cut()
        await asyncio.gather(*path._tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(3))
async def test_a_feeder_goes_on_after_broken_connections(
    client: OmniClient, echo_server: Server, seed: int
) -> None:
    chance, words = random.Random(seed), [f"{n} " for n in range(30)]
    quick = {"grpc.initial_reconnect_backoff_ms": 50, "grpc.min_reconnect_backoff_ms": 50}
    async with (
        client.open(output_modalities=["text"]) as request,
        relay(echo_server.port) as path,
        OmniClient(f"127.0.0.1:{path.port}", options=quick) as shaky,
    ):
        reading = asyncio.create_task(rest(request))
        async with shaky.feed(request.request_id) as feeder:
            for n, word in enumerate(words):
                await feeder.send(word, end_of_segment=n % 10 == 9)
                if n % 7 == 3:
                    await asyncio.sleep(chance.choice([0, 0.005, 0.05]))
                    path.cut()
            summary = await feeder.finish()
        events = await reading
        assert summary is not None and summary.segments == 3
        assert text_of(events) == "".join(words)
        assert [event.segment for event in events if isinstance(event, SegmentEnd)] == [0, 1, 2]


async def test_a_lost_answer_to_a_half_close(client: OmniClient, echo_server: Server) -> None:
    slow = {"text": {"outputs": 3, "interval_ms": 200}}
    quick = {"grpc.initial_reconnect_backoff_ms": 50, "grpc.min_reconnect_backoff_ms": 50}
    async with (
        client.open(output_modalities=["text"], stage_params=slow) as request,
        relay(echo_server.port) as path,
        OmniClient(f"127.0.0.1:{path.port}", options=quick) as shaky,
    ):
        reading = asyncio.create_task(rest(request))
        async with shaky.feed(request.request_id) as feeder:
            await feeder.send("x")
            finishing = asyncio.create_task(feeder.finish())
            await asyncio.sleep(0)
            path.cut()
            summary = await finishing
        assert summary is not None and summary.segments == 1
        assert text_of(await reading) == "word0 word1 word2 "


async def test_a_server_that_is_gone(client: OmniClient, echo_server: Server) -> None:
    async with client.open() as request:
        async with OmniClient("127.0.0.1:1") as lost, lost.feed(request.request_id) as feeder:
            with pytest.raises(Exception, match="UNAVAILABLE"):
                await feeder.send("x")
        assert in_flight(echo_server) == 1


# ---------------------------------------------------------------- pods


@pytest.mark.parametrize("told", [True, False])
async def test_calls_about_a_request_follow_its_pod_where_told(
    echo_server: Server, told: bool
) -> None:
    names: list[str] = []
    async with relay(echo_server.port) as path:

        def pod(name: str) -> str:
            names.append(name)
            return f"127.0.0.1:{path.port}"

        target = f"127.0.0.1:{echo_server.port}"
        async with OmniClient(target, pods=pod if told else None) as client:
            await client.generate("x")
            assert not path._tasks, "only what is about a request that runs follows it"
            async with client.open(output_modalities=["text"]) as request:
                await request.send("hello")
                await request.finish()
                assert text_of(await rest(request)) == "hello"
            assert bool(path._tasks) is told
            async with client.interact(resumable=True) as session:
                async with client.attach(session.request_id):
                    pass
                await client.abort(session.request_id)
        assert set(names) == ({echo_server.pod} if told else set())
    await freed(echo_server)
