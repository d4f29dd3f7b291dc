"""The server's load for who watches it: balancers, autoscalers, people.

Pools tell of every change at once; what is pushed is the state at the moment of pushing, so that
nobody gets an older one after a newer one, and a slow watcher none that is old."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass

from omni_grpc.engine import Engine, StageStatistics

HEARTBEAT_S = 0.9
"""Longest time between two states; the contract says a second."""
SETTLE_S = 0.02
"""How long changes are gathered before they are told."""
RATE_WINDOW_S = 10


class LoadFeed:
    """The states of one engine's load, for any number of watchers. It costs nothing while there
    are none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.watchers = 0
        """Who watches now."""
        self._moved = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        for pool in engine.pools:
            pool.observe_load(self._changed)

    async def states(self) -> AsyncGenerator[list[StageStatistics]]:
        """The load now, then on each change and every HEARTBEAT_S, until the server drains. Close
        it when done."""
        self.watchers += 1
        try:
            while True:
                moved, ending = self._moved, self._ended.is_set()
                yield self._engine.load()
                if ending:
                    return
                await _until(moved, HEARTBEAT_S)
        finally:
            self.watchers -= 1

    @property
    def idle(self) -> bool:
        """Whether nothing is about to be told."""
        return self._timer is None

    def utilization(self) -> Utilization:
        """The load now, in a few figures."""
        return utilization(self._engine)

    async def rest(self, seconds: float) -> bool:
        """Waits; whether the server drains meanwhile, and there is nothing more to wait for."""
        return await _until(self._ended, seconds)

    def end(self) -> None:
        """The server drains: watchers get one more state, and their streams end."""
        self._ended.set()
        self._publish()

    def _changed(self) -> None:
        if self.watchers and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._publish)

    def _publish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._moved.set()
        self._moved = asyncio.Event()


async def _until(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


@dataclass(frozen=True, slots=True)
class Utilization:
    """A server's load in a few figures; None is not known."""

    used: float
    """Of what is fullest (places for requests, or in a stage whose capacity is known): 1 is full,
    more than that means that requests wait."""
    requests: int
    running: int
    waiting: int
    """Before stages, and in engines as far as these tell."""
    work_left: float
    kv_cache_use: float | None
    """Of the fullest."""


def utilization(engine: Engine) -> Utilization:
    """The load now."""
    stages = engine.load()
    slots = [slot for stage in stages for slot in stage.replicas if slot.load.ready]
    inside = sum(slot.load.own.waiting or 0 for slot in slots)
    caches = [u for slot in slots if (u := slot.load.own.kv_cache_use) is not None]
    full = [slot.load.running / slot.capacity for slot in slots if slot.capacity]
    requests = len(engine.orchestrator)
    return Utilization(
        used=max(requests / engine.settings.max_requests, *full, 0.0),
        requests=requests,
        running=sum(slot.load.running for slot in slots),
        waiting=sum(stage.waiting for stage in stages) + inside,
        work_left=sum(slot.load.work for slot in slots),
        kv_cache_use=max(caches, default=None),
    )


class Rate:
    """Events a second, over the last RATE_WINDOW_S seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        self._started = time.monotonic()

    def add(self) -> None:
        """One happened."""
        second = int(time.monotonic())
        count = self._seconds.pop()[1] if self._seconds and self._seconds[-1][0] == second else 0
        self._seconds.append((second, count + 1))
        self._forget(second)

    @property
    def per_second(self) -> float:
        """The rate now."""
        now = time.monotonic()
        self._forget(int(now))
        span = min(float(RATE_WINDOW_S), max(1.0, now - self._started))
        return sum(count for _, count in self._seconds) / span

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - RATE_WINDOW_S:
            self._seconds.popleft()
