"""A client that reads slowly, or not at all: it costs the server a bounded amount of memory and
loses nothing of what it reads later."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import psutil
import pytest

from omni_grpc.server import Server
from tests.conftest import Serve
from tests.support import (
    AUDIO,
    IMAGE,
    TEXT,
    Response,
    Served,
    ask,
    client,
    collect,
    echo,
    eventually,
    freed,
    in_flight,
    picture,
    rich_error,
    running,
    script,
    sound,
    stub_of,
    texts,
)

MIB = 1 << 20
WINDOW = MIB
"""What one stage may have under way (the contract between server and replica)."""


def flood(outputs: int, size: int) -> dict[str, Any]:
    """A request for that many sounds of `size` bytes."""
    scripts = [script(), script("audio", outputs=outputs, bytes=size)]
    return {"stage_params": scripts, "output_modalities": [AUDIO]}


def queued(server: Server) -> int:
    """Bytes that wait in the server for slow clients."""
    return sum(int(str(run["queued_bytes"])) for run in server.engine.orchestrator.statistics())


async def settled(server: Server) -> int:
    """What waits when nothing moves any more."""
    last, since = -1, 0
    async with asyncio.timeout(15):
        while since < 20:
            now = queued(server)
            last, since = now, (since + 1 if now == last and now else 0)
            await asyncio.sleep(0.02)
    return last


async def begun(stub: Any, **fields: Any) -> Any:
    """A call that read `accepted` and reads no more for now."""
    call = stub.AddRequest(ask(**fields), timeout=60)
    assert (await anext(aiter(call))).HasField("accepted")
    return call


async def test_a_stalled_reader_costs_bounded_memory(serve: Serve) -> None:
    limit = MIB
    served = await serve(echo(), queue_bytes=limit)
    call = await begun(served.stub, **flood(10_000, 60_000))
    waiting = await settled(served.server)
    assert limit < waiting <= limit + WINDOW + 2 * 60_000
    # The stage waits too, and still holds the request.
    assert running(served.server) == {"text": 0, "audio": 1, "image": 0}
    call.cancel()


async def test_many_stalled_readers_do_not_disturb_a_good_one(serve: Serve) -> None:
    served = await serve(echo(), queue_bytes=MIB)
    resident = psutil.Process().memory_info
    async with client(served.server) as channel:
        stub, before = stub_of(channel), resident().rss
        work = flood(10_000, 60_000)
        stalled = await asyncio.gather(*(begun(stub, **work) for _ in range(20)))
        await settled(served.server)
        # Their windows and what gRPC buffers on both of its sides.
        assert resident().rss - before < 20 * (2 * WINDOW + 16 * MIB)
        assert queued(served.server) <= 20 * (MIB + WINDOW + 2 * 60_000)
        responses = await collect(served.stub, timeout=5)
        assert responses[-1].HasField("finished")
        for call in stalled:
            call.cancel()
    await freed(served.server)


async def test_a_reader_that_resumes_gets_every_byte(serve: Serve) -> None:
    served = await serve(echo(), queue_bytes=1 << 16)
    work = flood(400, 60_000)
    expected = sound(await collect(served.stub, timeout=25, **work))
    assert len(expected) == 400 * 60_000
    call = await begun(served.stub, **work)
    await settled(served.server)
    responses = []
    async for response in call:
        responses.append(response)
        if len(responses) in (50, 200):
            await asyncio.sleep(0.2)
    assert sound(responses) == expected
    assert [r.seq for r in responses] == list(range(1, len(responses) + 1))
    starts = [r.output.audio.start_sample for r in responses[:-1]]
    sizes = [len(r.output.audio.data) // 2 for r in responses[:-1]]
    assert starts == [sum(sizes[:n]) for n in range(len(sizes))]


async def test_text_that_was_merged_is_complete(serve: Serve) -> None:
    """More tokens than messages; the same text and ids as a reader that keeps up gets."""
    served = await serve(echo(), queue_bytes=1 << 16)
    scripts = [script(outputs=20_000, bytes=500)]
    fields: dict[str, Any] = {"stage_params": scripts, "output_modalities": [TEXT]}
    call = await begun(served.stub, **fields)
    await settled(served.server)
    slow = [r async for r in call]
    fast = await collect(served.stub, **fields)
    assert texts(slow) == texts(fast) == "".join((f"word{n} " * 500)[:500] for n in range(20_000))
    assert tokens(slow) == tokens(fast)
    assert len(tokens(slow)) == 20_000 > len(slow)
    assert [r.seq for r in slow] == list(range(1, len(slow) + 1))


def tokens(responses: list[Response]) -> list[int]:
    """The token ids of all text outputs."""
    return [token for r in responses for token in r.output.text.token_ids]


async def test_streams_merged_under_load_are_what_one_request_gives(stub: Any) -> None:
    """100 at once, whose writers fall behind, against one alone."""
    fields: dict[str, Any] = {
        "stage_params": [script(outputs=100), script("audio", bytes=200)],
        "output_modalities": [TEXT, AUDIO],
    }
    alone = await collect(stub, **fields)
    together = await asyncio.gather(*(collect(stub, **fields) for _ in range(100)))
    for responses in together:
        assert texts(responses) == texts(alone)
        assert tokens(responses) == tokens(alone)
        assert sound(responses) == sound(alone)
        assert [r.seq for r in responses] == list(range(len(responses)))


async def test_large_outputs_arrive_with_default_limits(stub: Any) -> None:
    size = 20 * MIB
    scripts = [
        script(outputs=1, bytes=3 * MIB),
        script("audio", outputs=1, bytes=size),
        script("image", bytes=size),
    ]
    responses = await collect(stub, stage_params=scripts, timeout=25)
    assert len(texts(responses)) == 3 * MIB
    assert len(sound(responses)) == len(picture(responses)) == size
    assert max(response.ByteSize() for response in responses) <= MIB
    assert max(len(r.output.audio.data) for r in responses) <= 64 << 10


async def test_parts_of_a_picture_join_at_their_offsets(stub: Any) -> None:
    responses = await collect(
        stub, stage_params=[script("image", bytes=2 * MIB + 1)], output_modalities=[IMAGE]
    )
    offset, parts = 0, [r.output.image for r in responses if r.output.HasField("image")]
    for part in parts:
        assert part.offset == offset
        offset += len(part.data)
    assert offset == 2 * MIB + 1
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_a_reader_that_is_too_slow_is_dropped(serve: Serve) -> None:
    served = await serve(echo(), queue_bytes=MIB, write_timeout=0.3)
    call = await begun(served.stub, **flood(10_000, 60_000))
    await eventually(lambda: in_flight(served.server) == 0, 5)
    await freed(served.server)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    error = rich_error(caught.value)
    assert (error.code, error.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "SLOW_CONSUMER",
    )
    assert error.retry is None


async def test_a_reader_that_is_slow_but_reads_is_kept(serve: Serve) -> None:
    """The timeout is for one output, not for the whole stream."""
    served = await serve(echo(), queue_bytes=1 << 16, write_timeout=1)
    call = await begun(served.stub, **flood(400, 60_000))
    kinds = []
    async for response in call:
        kinds.append(response.WhichOneof("event"))
        if len(kinds) % 40 == 0:
            await asyncio.sleep(0.25)
    assert kinds[-1] == "finished" and len(kinds) > 400


async def test_a_slow_stage_is_no_slow_reader(serve: Serve) -> None:
    served = await serve(echo(), write_timeout=0.2)
    scripts = [script(outputs=2, interval_ms=600)]
    assert (await collect(served.stub, stage_params=scripts))[-1].HasField("finished")


async def test_a_stage_that_outruns_the_next_one_pauses(serve: Serve) -> None:
    """Else what the next one has not taken yet would fill its memory."""
    served = await serve(echo())
    scripts = [script(outputs=300, bytes=MIB), script("audio", hang_at=0)]
    call = await begun(served.stub, stage_params=scripts, output_modalities=[AUDIO])
    await eventually(lambda: in_flight(served.server) == 2)
    # 300 MiB take it less than that when nothing holds it up.
    await asyncio.sleep(3)
    assert running(served.server) == {"text": 1, "audio": 1, "image": 0}
    call.cancel()


async def test_a_drain_waits_for_outputs_on_their_way(serve: Serve) -> None:
    """A client that is still reading when the server stops gets the rest."""
    served: Served = await serve(echo(), queue_bytes=32 * MIB)
    async with client(served.server) as channel:
        call = await begun(stub_of(channel), **flood(400, 52_428))
        await eventually(lambda: in_flight(served.server) == 0, 15)
        draining = asyncio.create_task(served.server.engine.drain(20))
        await asyncio.sleep(0.1)
        assert not draining.done()
        assert len(sound([r async for r in call])) == 400 * 52_428
        await draining
