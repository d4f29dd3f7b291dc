"""Clients that leave in whatever way, at random moments: thousands of them leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import grpc
import pytest

from omni_grpc.interaction import Session
from omni_grpc.lane import Lane
from omni_grpc.outbox import Outbox
from omni_grpc.run import Run
from omni_grpc.stage_run import StageRun
from omni_grpc.task import TaskHandle
from omni_grpc.v1 import service_pb2
from tests import guided
from tests.conftest import Serve
from tests.running import pipeline
from tests.sessions import Request as SessionRequest
from tests.streaming import Update, chunk, header
from tests.support import ask, client, collect, echo, eventually, freed, living, script, stub_of

OURS = (Run, StageRun, TaskHandle, Outbox, Lane, Session)
"""What there is of every request or session while it is there."""
OWN = "Internal error from Core"
AT_ONCE = 50
LATEST_S = 0.05
"""Up to when clients leave. What they ask for takes about as long."""
NEGATIVE = guided.listed(("first", "one", {}), ("second", "two", {"first_ms": 10}))


class Leaver:
    """A client that opens requests of all kinds, and leaves them."""

    def __init__(self, stub: Any, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self._stub = stub
        self._random = random.Random(seed)
        self._number = 0

    async def many(self, requests: int) -> None:
        """So many requests, AT_ONCE of them at a time."""
        places = asyncio.Semaphore(AT_ONCE)

        async def one() -> None:
            async with places:
                await self.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(requests):
                group.create_task(one())
        guided.CALLS.clear()

    async def one(self) -> None:
        """One request, left in one way; how it ended is counted."""
        self._number += 1
        kind = self._random.choice((self._plain, self._guided, self._fed, self._session))
        leave = self._random.choice(("cancel", "cancel", "abort", "deadline"))
        after, request_id = self._random.uniform(0, LATEST_S), f"leaver-{self._number}"
        call, reading = kind(request_id, after if leave == "deadline" else 20)
        await asyncio.sleep(after)
        if leave == "cancel":
            call.cancel()
        elif leave == "abort":
            await self._stub.Abort(service_pb2.AbortRequest(request_ids=[request_id]))
            # The abort may have come before it.
            await asyncio.wait([reading], timeout=LATEST_S)
            call.cancel()
        # grpcio's client may wait for ever to write to a call that was cancelled before it began.
        await asyncio.wait([reading], timeout=2)
        reading.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reading
        code = await call.code()
        # That is what grpcio's own client makes of a stream that ends while it writes.
        assert code is not grpc.StatusCode.INTERNAL or OWN in await call.details()
        self.ends[f"{leave}: {code.name}"] += 1

    def _plain(self, request_id: str, timeout: float) -> tuple[Any, asyncio.Task[None]]:
        scripts = [
            script(prepare_ms=self._some(), first_ms=self._some(), outputs=3, interval_ms=3),
            script("audio", interval_ms=self._some()),
            script("image", first_ms=self._some()),
        ]
        call = self._stub.AddRequest(
            ask(request_id=request_id, stage_params=scripts), timeout=timeout
        )
        return call, asyncio.create_task(_read(call))

    def _guided(self, request_id: str, timeout: float) -> tuple[Any, asyncio.Task[None]]:
        """With two companions, and directories of its own."""
        request = service_pb2.AddRequestRequest(
            request_id=request_id,
            pipeline="group",
            prompt={"text": "a ring", "negative_text": NEGATIVE},
            stage_params=[script("thinker", first_ms=self._some())],
        )
        request.additional_information.update({"do": ["make", "own"]})
        call = self._stub.AddRequest(request, timeout=timeout)
        return call, asyncio.create_task(_read(call))

    def _fed(self, request_id: str, timeout: float) -> tuple[Any, asyncio.Task[None]]:
        """While its input streams in."""
        call = self._stub.AddRequest(
            service_pb2.AddRequestRequest(request_id=request_id, pipeline="stream", resumable=True),
            timeout=timeout,
        )
        return call, asyncio.create_task(self._feed(request_id, call))

    async def _feed(self, request_id: str, call: Any) -> None:
        assert (await anext(aiter(call))).HasField("accepted")
        reading = asyncio.create_task(_read(call))
        feeding = self._stub.StreamingUpdate(timeout=20)
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await feeding.write(header(request_id))
            for number in range(4):
                await feeding.write(Update(chunk=chunk(number, "make", end=True)))
                await asyncio.sleep(0.01)
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reading
        feeding.cancel()

    def _session(self, request_id: str, timeout: float) -> tuple[Any, asyncio.Task[None]]:
        """A session that interrupts and is interrupted."""
        call = self._stub.SubmitInteraction(timeout=timeout)
        return call, asyncio.create_task(self._interact(request_id, call))

    async def _interact(self, request_id: str, call: Any) -> None:
        setup = {"request_id": request_id, "pipeline": "stream", "resumable": True}
        await call.write(SessionRequest(setup={"open": setup}))
        reading = asyncio.create_task(_read(call))
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for number in range(4):
                update = {"seq": number, "text": "make", "end_of_segment": True}
                await call.write(SessionRequest(update=update))
                await call.write(SessionRequest(event={"event_id": str(number), "prompt": "x"}))
                await asyncio.sleep(0.005)
                await call.write(SessionRequest(interrupt={}))
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await reading

    def _some(self) -> float:
        return self._random.choice((0, 0, 2, 10, 40))


async def _read(call: Any) -> None:
    async for _ in call:
        pass


async def leaving(serve: Serve, requests: int, seed: int) -> None:
    """So many requests, of each of which the client leaves; then a census."""
    words = {"name": "words", "output": "text"}
    served = await serve(
        echo(),
        guided.guided("group", transform="tests.guided:acting"),
        pipeline("stream", words, transform="tests.guided:acting"),
    )
    async with client(served.server) as channel:
        stub = stub_of(channel)
        leaver = Leaver(stub, seed)
        others = living(OURS)
        await leaver.many(AT_ONCE)
        await freed(served.server, 5)
        before = served.server.census().standing
        await leaver.many(requests)
        await freed(served.server, 5)
        print(f"  {requests} left: {dict(leaver.ends)}")
        await eventually(lambda: served.server.census().standing == before, 5)
        print(f"  standing before and after: {dict(before)}")
        gc.collect()
        left = [one for one in living(OURS) if not any(one is other for other in others)]
        assert not left, Counter(type(one).__name__ for one in left)
        assert (await collect(stub))[-1].HasField("finished")


async def test_clients_that_leave_at_random_leave_nothing(serve: Serve) -> None:
    await leaving(serve, requests=500, seed=21)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_ten_thousand_clients_that_leave_at_random_leave_nothing(serve: Serve) -> None:
    await leaving(serve, requests=10_000, seed=22)
