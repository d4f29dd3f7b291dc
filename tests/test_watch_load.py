"""WatchLoad: at once, on change, never old; and ends when the server drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from omni_grpc.load import Rate
from omni_grpc.server import Server
from omni_grpc.v1 import info_pb2, service_pb2
from tests.conftest import Serve
from tests.running import replicas, serving, text_pipeline
from tests.support import ask, collect, echo, eventually, script

SEEN_S = 0.5
"""A change is visible within 100 ms; five times that here."""


class Watcher:
    """A watch that is read all the time, with the time of each state."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.WatchLoad(service_pb2.WatchLoadRequest())
        self.states: list[tuple[float, list[info_pb2.StageLoad]]] = []
        self._reading = asyncio.create_task(self._read())
        self._more = asyncio.Event()

    async def _read(self) -> None:
        async for response in self.call:
            self.states.append((time.monotonic(), list(response.stages)))
            self._more.set()

    def replica(self, stage: str) -> info_pb2.ReplicaLoad:
        """Replica 0 of a stage in the newest state."""
        return next(one for one in self.states[-1][1] if one.stage == stage).replicas[0]

    async def until(self, stage: str, within: float = SEEN_S, **fields: Any) -> None:
        """Returns when the newest state has these values."""
        async with asyncio.timeout(within):
            while not self.states or any(
                getattr(self.replica(stage), name) != value for name, value in fields.items()
            ):
                self._more.clear()
                await self._more.wait()

    async def over(self) -> Any:
        """The call's status, when it has ended."""
        async with asyncio.timeout(5):
            await asyncio.gather(self._reading, return_exceptions=True)
            return await self.call.code()

    async def leave(self) -> None:
        """Ends it."""
        self.call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@pytest.fixture
async def watcher(stub: Any, echo_server: Server) -> AsyncIterator[Watcher]:
    """A watch of `echo` that has told its first state."""
    one = Watcher(stub)
    await one.until("text", within=5, ready=True)
    yield one
    await one.leave()


async def test_the_first_state_comes_at_once_and_is_getloads(stub: Any) -> None:
    call = stub.WatchLoad(service_pb2.WatchLoadRequest(), timeout=5)
    first = await call.read()
    told = (await stub.GetLoad(service_pb2.GetLoadRequest())).stages
    call.cancel()
    assert [stage.stage for stage in first.stages] == ["text", "audio", "image"]
    for ours, theirs in zip(first.stages, told, strict=True):
        for replica in (*ours.replicas, *theirs.replicas):
            replica.ClearField("sample_age_ms")
        assert ours == theirs


async def test_a_change_is_seen_at_once(stub: Any, echo_server: Server, watcher: Watcher) -> None:
    slow = [script("text", outputs=1000, interval_ms=10)]
    call = stub.AddRequest(ask(stage_params=slow))
    await call.read()
    await watcher.until("text", running=1)
    call.cancel()
    await watcher.until("text", running=0)


async def test_it_beats_every_second_while_nothing_changes(watcher: Watcher) -> None:
    before = len(watcher.states)
    await asyncio.sleep(3.0)
    times = [at for at, _ in watcher.states[before - 1 :]]
    assert 3 <= len(times) <= 5, "every second, and not more often"
    assert max(b - a for a, b in pairwise(times)) < 5.0


async def test_absent_is_not_zero_and_a_sample_has_an_age(watcher: Watcher) -> None:
    replica = watcher.replica("text")
    assert replica.HasField("running") and replica.running == 0
    assert replica.HasField("work_left")
    for unknown in ("waiting", "kv_cache_use", "capacity"):
        assert not replica.HasField(unknown)
    assert 0 <= replica.sample_age_ms < 5000


async def test_a_replica_that_comes_and_goes_is_seen() -> None:
    config = text_pipeline("coming", restart={"backoff": 0.3})
    async with serving(config) as server:
        watcher = Watcher(server.omni)
        await watcher.until("text", within=5, ready=True)
        replicas("coming", "text")[0].kill()
        await watcher.until("text", ready=False)
        assert not watcher.replica("text").HasField("running")
        await watcher.until("text", within=20, ready=True, restarts=1)
        await watcher.leave()


async def test_capacity_is_told_where_it_is_known() -> None:
    async with serving(text_pipeline("narrow", max_tasks=3)) as server:
        load = await server.omni.GetLoad(service_pb2.GetLoadRequest())
        assert load.stages[0].replicas[0].capacity == 3


async def test_a_storm_of_changes_is_gathered(
    stub: Any, echo_server: Server, watcher: Watcher
) -> None:
    before, began = len(watcher.states), time.monotonic()
    requests = [collect(stub, output_modalities=["MODALITY_TEXT"]) for _ in range(60)]
    await asyncio.gather(*requests)
    await watcher.until("text", running=0)
    elapsed = time.monotonic() - began
    # 120 changes and more; at most one state in 20 ms.
    assert len(watcher.states) - before <= elapsed / 0.02 + 2


async def test_a_slow_watcher_gets_the_newest_and_no_backlog(serve: Serve) -> None:
    served = await serve(echo())
    feed = served.server._load
    states = feed.states()
    assert await anext(states)
    for _ in range(20):
        await collect(served.stub, output_modalities=["MODALITY_TEXT"])
    slow = [script("text", outputs=1000, interval_ms=10)]
    call = served.stub.AddRequest(ask(stage_params=slow, output_modalities=["MODALITY_TEXT"]))
    await call.read()
    await asyncio.sleep(0.1)
    async with asyncio.timeout(5):
        # Who took nothing all the while gets one state: the present one.
        state = await anext(states)
        assert state[0].replicas[0].load.running == 1
        following = asyncio.ensure_future(anext(states))
        await asyncio.sleep(0.1)
        assert not following.done(), "there is nothing else to tell"
        call.cancel()
        assert (await following)[0].replicas[0].load.running == 0
    await states.aclose()


async def test_it_ends_well_when_the_server_drains() -> None:
    async with serving(text_pipeline("leaving")) as server:
        watcher = Watcher(server.omni)
        await watcher.until("text", within=5, ready=True)
        began = time.monotonic()
        stopping = asyncio.create_task(server.stop(5))
        assert (await watcher.over()).name == "OK"
        await stopping
        assert time.monotonic() - began < 5


async def test_nobody_watching_costs_nothing(stub: Any, echo_server: Server) -> None:
    feed = echo_server._load
    await eventually(lambda: not feed.watchers, within=5)
    await collect(stub, output_modalities=["MODALITY_TEXT"])
    assert feed.idle


async def test_a_watcher_that_leaves_is_forgotten(stub: Any, echo_server: Server) -> None:
    watchers = [Watcher(stub) for _ in range(5)]
    for one in watchers:
        await one.until("text", within=5, ready=True)
    for one in watchers:
        await one.leave()
    await eventually(lambda: not echo_server._load.watchers, within=5)


def test_a_rate_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    rate = Rate()
    clock = 1020.0
    for _ in range(30):
        rate.add()
    assert rate.per_second == 3.0
    clock = 1031.0
    assert rate.per_second == 0.0
