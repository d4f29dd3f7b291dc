"""The step scheduler: one loop per replica that advances all its requests by one denoise step per
tick.

    join      at the next tick, in order of arrival, while there is a free slot
    advance   every running request once per tick, so none gets ahead of another; requests of equal
              shape share batches of at most `max_batch`
    leave     when its steps are done, or when its reader goes: the slot is free at the next tick

The states are immutable: a step makes new ones. So a reader may hold on to one, a step is thrown
away if its request has gone, and a batch that failed is tried again one request at a time, which
ends only those that are at fault."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

log = logging.getLogger("omni_grpc.replica")


class Steps(Protocol):
    """One request on its way: what the scheduler must know of a state."""

    @property
    def shape(self) -> Hashable:
        """Equal for states that can share a batch."""

    @property
    def steps_left(self) -> int:
        """Steps until it is done; 0 is done."""


State = TypeVar("State", bound=Steps)

Advance = Callable[[Sequence[State]], Sequence[State]]
"""Takes states of equal shape one step further, in order. Runs in the worker thread."""


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counters since the start, and the present load."""

    ticks: int
    batches: int
    """Calls of the model: one or more per tick."""
    steps: int
    """Steps of single requests: the sum of all batches' sizes."""
    largest_batch: int
    waiting: int
    running: int
    work_left: int
    """Steps that all present requests still need."""


class _Ticket(Generic[State]):
    """One request's place. `fresh` is the newest state that its reader has not seen."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.left = False
        self.error: Exception | None = None
        self._fresh = asyncio.Event()

    def set(self, outcome: State | Exception) -> None:
        if isinstance(outcome, Exception):
            self.error = outcome
        else:
            self.state = outcome
        self._fresh.set()

    @property
    def ended(self) -> bool:
        return self.left or self.error is not None or self.state.steps_left == 0

    async def next(self) -> State:
        await self._fresh.wait()
        self._fresh.clear()
        if self.error is not None:
            raise self.error
        return self.state


class StepScheduler(Generic[State]):
    """Advances states with `advance`, at most `max_batch` in one call and `max_running` at once.

    Made and used on one event loop; `close` it."""

    def __init__(self, advance: Advance[State], max_batch: int, max_running: int) -> None:
        self._advance = advance
        self._max_batch = max_batch
        self._max_running = max_running
        self._waiting: deque[_Ticket[State]] = deque()
        self._running: list[_Ticket[State]] = []
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self._arrived = asyncio.Event()
        self._ticks = self._batches = self._steps = self._largest = 0
        self._loop = asyncio.create_task(self._run())

    async def run(self, state: State) -> AsyncGenerator[State, None]:
        """The state after each of its steps, the last one with no steps left; a reader that is late
        gets the newest only. Raises what `advance` raised for it.

        Closing the iterator, or cancelling, ends the request: no later step includes it."""
        ticket = _Ticket(state)
        self._waiting.append(ticket)
        self._arrived.set()
        try:
            while state.steps_left:
                state = await ticket.next()
                yield state
        finally:
            ticket.left = True

    def statistics(self) -> SchedulerStatistics:
        """The present load and the counters."""
        waiting = [t for t in self._waiting if not t.ended]
        running = [t for t in self._running if not t.ended]
        return SchedulerStatistics(
            ticks=self._ticks,
            batches=self._batches,
            steps=self._steps,
            largest_batch=self._largest,
            waiting=len(waiting),
            running=len(running),
            work_left=sum(t.state.steps_left for t in (*waiting, *running)),
        )

    async def close(self) -> None:
        """Stops after the step that is under way. Requests that are left get nothing more."""
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        self._executor.shutdown(cancel_futures=True)

    async def _run(self) -> None:
        while True:
            if not self._fill():
                self._arrived.clear()
                await self._arrived.wait()
                continue
            await self._tick()
            # Readers go first: one that leaves at the sight of a step takes no part in the next.
            await asyncio.sleep(0)

    def _fill(self) -> int:
        """Free slots to those that wait longest; how many run then."""
        self._running = [ticket for ticket in self._running if not ticket.ended]
        while self._waiting and len(self._running) < self._max_running:
            ticket = self._waiting.popleft()
            if not ticket.ended:
                self._running.append(ticket)
        return len(self._running)

    async def _tick(self) -> None:
        self._ticks += 1
        for batch in self._divide():
            # One that left during this tick, while other batches were computed, costs no step.
            present = [ticket for ticket in batch if not ticket.ended]
            if present:
                await self._step(present)

    def _divide(self) -> list[list[_Ticket[State]]]:
        """All that run, in batches of equal shape; within a shape in order of arrival."""
        by_shape: dict[Hashable, list[_Ticket[State]]] = {}
        for ticket in self._running:
            by_shape.setdefault(ticket.state.shape, []).append(ticket)
        size = self._max_batch
        return [
            tickets[start : start + size]
            for tickets in by_shape.values()
            for start in range(0, len(tickets), size)
        ]

    async def _step(self, batch: Sequence[_Ticket[State]]) -> None:
        outcomes = await self._compute([ticket.state for ticket in batch])
        self._batches += 1
        self._steps += len(batch)
        self._largest = max(self._largest, len(batch))
        for ticket, outcome in zip(batch, outcomes, strict=True):
            ticket.set(outcome)

    async def _compute(self, states: list[State]) -> Sequence[State | Exception]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._advance, states)
        except Exception as error:
            if len(states) == 1:
                return [error]
        log.exception("a step of %d requests failed; trying them one by one", len(states))
        return [(await self._compute([state]))[0] for state in states]
