"""The replicas of one stage: start, give work, supervise, restart, stop.

Each slot has one supervisor task. A replica that goes down is started again in its slot after a
backoff, within a budget; beyond it the slot stays empty and the pool says so. The pool's observers
hear every change."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from omni_grpc.balance import Balancer
from omni_grpc.config import ServerConfig, StageConfig
from omni_grpc.embedded import resolve
from omni_grpc.errors import StageUnavailable, StartError
from omni_grpc.ipc import StageSpec
from omni_grpc.placement import Starts, width_of
from omni_grpc.replica import Replica, ReplicaStatistics, State
from omni_grpc.task import TaskHandle
from omni_grpc.types import StageFacts, StageStatistics
from omni_grpc.waiting import Group, Places

log = logging.getLogger(__name__)

PAUSED_RETRY_S = 1.0
"""When to come back to a stage that an operator has paused."""
LOADING_RETRY_S = 5.0
"""When to come back to a stage that has never been ready: models take a while to load."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What all pools share: ZeroMQ, the folder of the sockets, the server's settings."""

    context: zmq.Context[Any]
    folder: Path
    settings: ServerConfig
    starts: Starts


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """One slot's load; `restarts` counts from the server's start, `capacity` is how many tasks it
    works on at once, where that is known."""

    replica: int
    device: str
    load: ReplicaStatistics
    restarts: int
    capacity: int | None = None


class Slot:
    """One place for a replica, with its number and device."""

    def __init__(self, pool: StagePool, number: int) -> None:
        self.number = number
        self.device = pool.config.device(number)
        self.replica: Replica | None = None
        self.restarts = 0
        self.given_up = False
        self.was_ready = False
        self.paused = False
        """Whether an operator keeps new work away."""
        self._pool = pool
        self._generation = 0
        self._deaths: deque[float] = deque()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether a replica serves here now."""
        return self.replica is not None and self.replica.state is State.READY

    async def start(self) -> None:
        """Starts the first replica, then supervises. Raises StartError."""
        await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        """Ends supervision, then the replica."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self.replica is not None:
            await self.replica.stop()

    async def _launch(self) -> None:
        self._generation += 1
        self.replica = self._pool.make_replica(self.number, self._generation)
        async with self._pool.runtime.starts.turn(self.device):
            await self.replica.start()
        self.was_ready, self._pool.facts = True, self.replica.facts
        self._pool.changed()

    async def _supervise(self) -> None:
        policy = self._pool.config.restart
        backoff = policy.backoff
        while True:
            assert self.replica is not None
            await self.replica.gone()
            self._pool.changed()
            await self.replica.stop()
            if not self._within_budget():
                self.given_up = True
                log.error("replica %s is beyond its restart budget", self.replica.name)
                self._pool.changed()
                return
            await asyncio.sleep(backoff)
            self.restarts += 1
            try:
                await self._launch()
                backoff = policy.backoff
            except StartError as error:
                log.error("restart failed: %s", error)
                backoff = min(backoff * 2, policy.max_backoff)

    def _within_budget(self) -> bool:
        policy, now = self._pool.config.restart, asyncio.get_running_loop().time()
        self._deaths.append(now)
        while self._deaths and now - self._deaths[0] > policy.window:
            self._deaths.popleft()
        return len(self._deaths) <= policy.budget


class StagePool:
    """The replicas of one stage."""

    def __init__(self, pipeline: str, config: StageConfig, runtime: Runtime) -> None:
        self.pipeline = pipeline
        self.config = config
        self.runtime = runtime
        self.places = Places(
            config, self._serving, Balancer(config.balance).pick, self._load_changed
        )
        self.adapters = dict(config.lora_adapters)
        """LoRA adapters that requests may name, by path."""
        self.facts = StageFacts()
        """What the stage told of itself when it was loaded last; kept while replicas restart."""
        self._slots = [Slot(self, number) for number in range(config.replicas)]
        self._observers: list[Callable[[], None]] = []
        self._load_observer: Callable[[], None] | None = None
        self._window_s = 0.0

    @property
    def ready_replicas(self) -> int:
        """Replicas that serve now."""
        return sum(slot.ready for slot in self._slots)

    @property
    def given_up(self) -> bool:
        """Whether a slot is beyond its restart budget."""
        return any(slot.given_up for slot in self._slots)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Its places, by number."""
        return tuple(self._slots)

    def observe(self, observer: Callable[[], None]) -> None:
        """Calls `observer` whenever a replica comes or goes."""
        self._observers.append(observer)

    def observe_load(self, observer: Callable[[], None]) -> None:
        """Calls `observer` also whenever a task comes or goes and when a replica tells of another
        load: thousands of times a second. One per pool."""
        self._load_observer = observer

    def changed(self) -> None:
        """Tells the observers, and those who wait for a place."""
        for observer in self._observers:
            observer()
        try:
            self._serving()
        except StageUnavailable as error:
            self.places.clear(error)
        else:
            self.places.fill()
        self._load_changed()

    def _load_changed(self) -> None:
        if self._load_observer is not None:
            self._load_observer()

    async def start(self) -> None:
        """Starts all replicas. Raises the first StartError; what was started then still needs
        `close`."""
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(slot.start())
        except* StartError as failures:
            raise failures.exceptions[0] from None

    def pace(self, window_s: float) -> None:
        """From now on, in all replicas, text that only a client takes may wait so long for more."""
        self._window_s = window_s
        for slot in self._slots:
            if slot.replica is not None:
                slot.replica.pace(window_s)

    def check_loaded(self) -> None:
        """Raises StageUnavailable where no replica has been ready yet: what the stage can do is not
        known."""
        if not any(slot.was_ready for slot in self._slots):
            raise self._unavailable()

    def submit(self, group: Group, tenant: str, *, running: bool) -> list[TaskHandle]:
        """Sends tasks of one request to the replica that the policy picks, together, or lets them
        wait where all hold as many as they may. `running`: the request runs already, and cannot be
        turned away.

        Raises StageUnavailable where no replica serves, QueueFull where no more may wait."""
        return self.places.submit(group, tenant, running=running)

    def hurry(self) -> None:
        """What was submitted in this turn leaves now, if it is much."""
        for slot in self._slots:
            if slot.replica is not None:
                slot.replica.hurry()

    def _serving(self) -> list[Replica]:
        ready = [
            slot.replica for slot in self._slots if slot.replica and slot.ready and not slot.paused
        ]
        if not ready:
            raise self._unavailable()
        return ready

    def _unavailable(self) -> StageUnavailable:
        if any(slot.ready and slot.paused for slot in self._slots):
            state, retry_s = "is paused", PAUSED_RETRY_S
        elif any(slot.was_ready for slot in self._slots):
            state, retry_s = "has no replica now", self.config.restart.backoff
        else:
            state, retry_s = "is still loading", LOADING_RETRY_S
        return StageUnavailable(f"stage {self.config.name!r} {state}", retry_after_s=retry_s)

    def statistics(self) -> list[SlotStatistics]:
        """The present load, one entry per slot."""
        absent = ReplicaStatistics(False, 0, StageStatistics(), None)
        return [
            SlotStatistics(
                slot.number,
                slot.device,
                slot.replica.statistics() if slot.replica else absent,
                slot.restarts,
                self.config.max_tasks or (slot.replica.facts.capacity if slot.replica else None),
            )
            for slot in self._slots
        ]

    async def close(self) -> None:
        """Stops all replicas."""
        await asyncio.gather(*(slot.stop() for slot in self._slots))

    def make_replica(self, number: int, generation: int) -> Replica:
        """A replica for a slot, not yet started."""
        config, settings = self.config, self.runtime.settings
        spec = StageSpec(
            pipeline=self.pipeline,
            stage=config.name,
            replica=number,
            engine=config.engine,
            model=config.model if config.engine == "python" else str(resolve(config.model)),
            device=config.device(number),
            engine_args=placed_arguments(config, config.device(number)),
            lora_adapters=self.adapters,
            media=settings.media.model_dump(),
            silence_timeout=settings.heartbeat_timeout,
        )
        socket = (
            self.runtime.folder / f"{self.pipeline[:20]}-{config.name[:20]}-{number}-{generation}"
        )
        address = f"ipc://{socket}" if settings.ipc == "ipc" else f"{settings.ipc}:*"
        replica = Replica(spec, config, settings, self.runtime.context, address)
        replica.on_freed = self.places.freed
        replica.on_load = self._load_changed
        replica.pace(self._window_s)
        return replica


def placed_arguments(config: StageConfig, device: str) -> dict[str, Any]:
    """A stage's engine arguments with what its placement says: for vLLM, its share of the memory
    and over how many devices it is spread."""
    placed: dict[str, Any] = {}
    if config.engine == "vllm":
        if config.memory_fraction is not None:
            placed["gpu_memory_utilization"] = config.memory_fraction
        if width_of(device) > 1:
            placed["tensor_parallel_size"] = width_of(device)
    return {**placed, **config.engine_args}
