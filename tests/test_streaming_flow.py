"""Slow readers, slow stages, slow feeders; and many sessions at once."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import grpc
import psutil

from omni_grpc.lane import Lane
from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.running import family, replicas
from tests.streaming import (
    Feeding,
    Opened,
    by_segment,
    chunk,
    ends,
    feed,
    lane_of,
    new_id,
    opened,
)
from tests.support import (
    TEXT,
    client,
    echo,
    eventually,
    freed,
    script,
    stub_of,
)

S = grpc.StatusCode
SIZE = 200_000
"""Of a segment's output, in bytes."""
MANY = 300
"""Segments: 60 MB of output."""


async def stalled(lane: Lane) -> int:
    """Returns when no chunk was taken for a while: their number."""
    taken = -1
    while taken != lane.next_seq:
        taken = lane.next_seq
        await asyncio.sleep(0.4)
    return taken


async def test_a_slow_reader_holds_back_a_fast_feeder(serve: Serve) -> None:
    served = await serve(echo({"name": "flow"}), queue_bytes=1 << 16)
    large = [script(outputs=1, bytes=SIZE)]
    async with opened(served.stub, stage_params=large, output_modalities=[TEXT]) as request:
        [replica] = replicas("flow", "text")
        request.pause()
        before = replica.memory_info().rss
        chunks = [chunk(n, "x", end=True) for n in range(MANY)]
        feeding = asyncio.create_task(feed(served.stub, request.id, chunks))
        taken = await stalled(lane_of(served.server, request.id))
        [run] = served.server.engine.orchestrator.statistics()
        assert 0 < taken < MANY * 2 // 3 and not feeding.done()
        # Text counts as if every character took four bytes.
        assert int(str(run["queued_bytes"])) < 4 * ((1 << 16) + (1 << 20) + 2 * SIZE)
        assert replica.memory_info().rss - before < 20 << 20
        request.resume()
        assert (await feeding).accepted_chunks == MANY
        responses = await request.finished()
    assert ends(responses) == [("text", n) for n in range(MANY)]
    assert {len(text) for text in by_segment(responses).values()} == {SIZE}


async def test_a_slow_stage_holds_back_a_fast_feeder(serve: Serve) -> None:
    """What waits between two stages is bounded too."""
    served = await serve(echo({"name": "flow"}))
    params = [script(outputs=1, bytes=SIZE), script("audio", outputs=1, bytes=2, first_ms=1500)]
    async with opened(served.stub, stage_params=params, output_modalities=[2]) as request:
        chunks = [chunk(n, "x", end=True) for n in range(120)]
        feeding = asyncio.create_task(feed(served.stub, request.id, chunks))
        taken = await stalled(lane_of(served.server, request.id))
        assert 0 < taken < 80, "two windows of a few outputs each, and the queue of chunks"
        assert (await feeding).segments == 120
        responses = await request.finished()
    assert [n for stage, n in ends(responses) if stage == "audio"] == list(range(120))


async def test_a_slow_feeder_sees_every_answer_before_it_goes_on(stub: Any) -> None:
    async with opened(stub) as request:
        feeding = Feeding(stub, request.id)
        for n in range(30):
            await feeding.send(chunk(2 * n, f"{n} "), chunk(2 * n + 1, "x", end=True))
            await request.answered(n, "text", "audio", "image")
            assert by_segment(request.responses)[n] == f"{n} x"
        assert (await feeding.close()).segments == 30
        await request.finished()


# ---------------------------------------------------------------- many at once


class Session:
    """One request with a feeder that does what its seed says."""

    def __init__(self, server: Server, stub: Any, seed: int) -> None:
        self.server = server
        self.stub = stub
        self.chance = random.Random(seed)
        self.id = new_id(f"session-{seed}-")
        count = self.chance.randint(1, 12)
        self.chunks = [chunk(n, f"{n} ", end=self.chance.random() < 0.3) for n in range(count)]
        self.ending = self.chance.choices(["half-close", "leave", "abort", "fail"], [6, 1, 1, 1])[0]
        self.pipeline = self.chance.choice(["echo", "careful"])

    async def run(self) -> str:
        """Runs it: how it ended."""
        fields = {"pipeline": self.pipeline, "prompt": {"text": "begin "}}
        async with opened(self.stub, self.id, **fields) as request:
            sure = 0
            while sure < len(self.chunks):
                sure = await self.feed_some(sure)
            return await self.end(request)

    async def feed_some(self, sure: int) -> int:
        """One feeder, from the chunk that is due; it breaks off in some way. The chunk that is due
        then, or one before: what had arrived is not known to who was cut off."""
        upto = min(len(self.chunks), sure + self.chance.randint(1, 5))
        way = self.chance.choice(["cancel", "connection", "gap", "wait"])
        async with AsyncExitStack() as stack:
            stub = self.stub
            if way == "connection":
                stub = stub_of(await stack.enter_async_context(client(self.server)))
            feeding = await self.attached(stub)
            await feeding.send(*self.chunks[sure:upto])
            await asyncio.sleep(self.chance.choice([0, 0.002, 0.02]))
            if way == "gap":
                await feeding.send(chunk(len(self.chunks) + 7, "lost"))
                assert (await feeding.refused()).violations.keys() == {"chunk.seq"}
            elif way == "wait":
                await eventually(lambda: self.lane.next_seq >= upto, within=10)
            if way != "connection":
                feeding.cancel()
        await eventually(lambda: not self.lane.fed, within=10)
        return max(sure, self.lane.next_seq - self.chance.randint(0, 2))

    @property
    def lane(self) -> Lane:
        """Its input, in the server."""
        return lane_of(self.server, self.id)

    async def attached(self, stub: Any) -> Feeding:
        """A feeder; waits for the last one to be gone."""
        await eventually(lambda: not self.lane.fed, within=10)
        return await Feeding(stub, self.id).attach()

    async def end(self, request: Opened) -> str:
        """Ends it as the seed says."""
        if self.ending == "leave":
            await request.leave()
            return "left"
        if self.ending == "abort":
            await self.stub.Abort(service_pb2.AbortRequest(request_ids=[self.id]))
            return (await request.failed()).reason
        feeding = await self.attached(self.stub)
        rest = self.chunks[self.lane.next_seq :]
        if self.ending == "fail":
            # In a segment of its own: parameters come with a segment's first chunk.
            rest.append(chunk(len(self.chunks), "x", end=True))
            own = [script(fail_at=0)] if self.pipeline == "echo" else []
            rest.append(chunk(len(self.chunks) + 1, "broken", end=True, stage_params=own))
        await feeding.send(*rest)
        if self.ending == "fail":
            return (await request.failed()).reason
        await feeding.close()
        self.check(await request.finished())
        return "finished"

    def check(self, responses: list[service_pb2.AddRequestResponse]) -> None:
        """Asserts that nothing was lost or repeated."""
        due, segment = {0: "begin "}, 0
        for one in self.chunks:
            due[segment] = due.get(segment, "") + one.text
            segment += one.end_of_segment
        assert by_segment(responses) == due


def descriptors() -> int:
    """Open files of this process and of its replicas."""
    processes = [psutil.Process(), *family(psutil.Process().pid)]
    return sum(process.num_fds() for process in processes)


async def test_a_hundred_sessions_leave_nothing(streams: Any, streams_server: Server) -> None:
    async def run(seeds: range) -> Counter[str]:
        sessions = [Session(streams_server, streams, seed) for seed in seeds]
        return Counter(await asyncio.gather(*(session.run() for session in sessions)))

    await run(range(1000, 1010))
    await freed(streams_server)
    gc.collect()
    files, tasks = descriptors(), len(asyncio.all_tasks())
    endings = await run(range(100))
    assert sum(endings.values()) == 100
    assert set(endings) == {"finished", "left", "ABORTED_BY_CLIENT", "STAGE_ERROR"}, endings
    await freed(streams_server, within=5)
    await eventually(lambda: gc.collect() >= 0 and len(asyncio.all_tasks()) <= tasks, within=5)
    # gRPC takes its time with sockets of lost connections, ZeroMQ makes a few descriptors of its
    # own once; something left by each of a hundred sessions would be many more.
    await eventually(lambda: descriptors() <= files + 20, within=10)
