"""A hundred clients that stop reading: what they cost is bounded, nobody else notices, and after
`write_timeout` they are dropped."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import grpc
import psutil
import pytest

from omni_grpc.delivery import Delivery
from omni_grpc.ipc import OUTPUT_OVERHEAD, WINDOW_BYTES
from omni_grpc.outbox import EVENT_OVERHEAD, URGENT_NOTICES, Outbox
from omni_grpc.run import Run
from omni_grpc.server import Server
from tests.conftest import Serve
from tests.sessions import Session, id_of, talk
from tests.support import (
    AUDIO,
    ask,
    client,
    echo,
    eventually,
    freed,
    in_flight,
    rich_error,
    script,
    slowdown,
    stub_of,
)

READERS = 100
EVENTS = 5_000
MIB = 1 << 20
OUTPUT = MIB // 4
FLOOD = [script(), script("audio", outputs=100_000, bytes=OUTPUT)]
# A client that absorbs little by itself: what is measured is the server.
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))


def queued(server: Server, what: str = "queued_bytes") -> list[int]:
    """What waits in the server for each slow client."""
    return [int(str(run[what])) for run in server.engine.orchestrator.statistics()]


def runs(server: Server) -> list[Run]:
    """The requests that run."""
    names = [str(run["request_id"]) for run in server.engine.orchestrator.statistics()]
    return [server.engine.orchestrator.find(name) for name in names]


async def stalled(stub: Any, scripts: list[Any]) -> Any:
    """A call that read `accepted`, and reads no more."""
    call = stub.AddRequest(ask(stage_params=scripts, output_modalities=[AUDIO]), timeout=60)
    assert (await anext(aiter(call))).HasField("accepted")
    return call


async def gaps(stub: Any) -> list[float]:
    """The times between the outputs of a stage that gives one every 10 ms, in ms, ascending."""
    clock = asyncio.get_running_loop().time
    scripts = [script(), script("audio", outputs=120, interval_ms=10)]
    call = stub.AddRequest(ask(stage_params=scripts, output_modalities=[AUDIO]))
    times = [clock() async for response in call if response.HasField("output")]
    return sorted((after - before) * 1e3 for before, after in pairwise(times))


@pytest.mark.timeout(120)
async def test_a_hundred_stalled_readers(serve: Serve) -> None:
    limit, timeout = MIB // 4, 4.0 * slowdown()
    served = await serve(echo(), queue_bytes=limit, write_timeout=timeout)
    server, resident = served.server, psutil.Process().memory_info
    async with client(server, *SMALL_WINDOW) as channel:
        alone, before = await gaps(served.stub), resident().rss
        calls = [stalled(stub_of(channel), FLOOD) for _ in range(READERS)]
        calls = await asyncio.gather(*calls)
        # All stages pause: what they made and may not hand on yet is all that there will be.
        await eventually(lambda: min(queued(server)) > limit, timeout)
        beside, most = await gaps(served.stub), max(queued(server))
        memory = resident().rss - before
        assert in_flight(server) == READERS
        await eventually(lambda: in_flight(server) == 0, 2 * timeout)
        await freed(server)
        report(alone, beside, most, memory)
        assert most <= limit + WINDOW_BYTES + 2 * OUTPUT
        # Beside the queues: what gRPC buffers, on both of its sides.
        assert memory < READERS * (limit + 4 * WINDOW_BYTES)
        # The bar is 10 % more; a busy machine gets room to miss it.
        assert p99(beside) < 1.5 * max(20.0, p99(alone)) * slowdown()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [response async for response in call]
            assert rich_error(caught.value).reason == "SLOW_CONSUMER"


def p99(ascending: list[float]) -> float:
    """The value that one in a hundred is above."""
    return ascending[int(len(ascending) * 0.99)]


def report(alone: list[float], beside: list[float], most: int, memory: int) -> None:
    """The figures."""
    print(
        f"  {READERS} stalled readers: {most / MIB:.2f} MiB wait for one at most, "
        f"{memory / MIB:.0f} MiB more resident; another's gap p50 {beside[len(beside) // 2]:.1f} "
        f"p99 {p99(beside):.1f} ms (alone {alone[len(alone) // 2]:.1f}, {p99(alone):.1f})"
    )


async def test_a_million_tiny_outputs_cost_a_bounded_number_of_events(serve: Serve) -> None:
    """One sample each: their bytes are nothing, they themselves are something."""
    limit = MIB
    served = await serve(echo(), queue_bytes=limit)
    async with client(served.server, *SMALL_WINDOW) as channel:
        tiny = [script(), script("audio", outputs=1_000_000, bytes=2)]
        call = await stalled(stub_of(channel), tiny)
        last, most = -1, limit // EVENT_OVERHEAD + 2 * WINDOW_BYTES // OUTPUT_OVERHEAD
        while (now := queued(served.server, "queued_events")[0]) != last or not now:
            last = now
            await asyncio.sleep(0.3)
        print(f"  {now} tiny outputs wait")
        assert limit // EVENT_OVERHEAD < now <= most
        assert in_flight(served.server) == 1, "the stage waits too"
        call.cancel()


@pytest.mark.parametrize("attach", [False, True], ids=["owner", "attached"])
async def test_who_sends_and_does_not_read_is_not_heard_for_ever(
    serve: Serve, attach: bool
) -> None:
    """Each event is answered: the answers may not fill the server."""
    served = await serve(echo())
    async with client(served.server, *SMALL_WINDOW) as channel, talk(served.stub) as owner:
        setup: dict[str, Any] = {"attach": {"request_id": id_of(owner)}}
        one = Session(stub_of(channel), **(setup if attach else {"open": {"resumable": True}}))
        await (await one.begin()).stands()
        one.pause()

        async def flood() -> None:
            for number in range(EVENTS):
                await one.event(f"{number}-" + "x" * 200)

        def waiting() -> int:
            boxes: list[Delivery | Outbox] = [run.delivery for run in runs(served.server)]
            taps = [tap for run in runs(served.server) for tap in run.delivery.taps]
            return max(box.urgent for box in (*boxes, *taps))

        flooding = asyncio.create_task(flood())
        await eventually(lambda: waiting() >= URGENT_NOTICES, within=10)
        await asyncio.wait([flooding], timeout=1)
        assert waiting() <= URGENT_NOTICES + 1
        # Nothing is lost: once it reads, all is answered.
        one.resume()
        await flooding
        await one.until(lambda s: len(s.heard) > EVENTS, within=20)
        await one.leave()
