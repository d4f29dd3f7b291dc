"""The step scheduler alone: who takes part in which tick, and with whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from omni_grpc.stages.step_scheduler import StepScheduler
from tests.support import eventually


@dataclass(frozen=True)
class Count:
    """A request that only counts its steps. `value` depends on nothing but its own steps."""

    name: str
    steps_left: int
    shape: str = "square"
    value: int = 0


@dataclass
class Model:
    """Advances counts, one batch at a time, and notes the batches. Gated: each call waits for
    `go`."""

    gated: bool = False
    bad: str = ""
    calls: list[list[str]] = field(default_factory=list)
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    threads: set[int] = field(default_factory=set)

    def advance(self, states: Sequence[Count]) -> list[Count]:
        self.calls.append([state.name for state in states])
        self.threads.add(threading.get_ident())
        if self.gated:
            assert self.go.acquire(timeout=5)
        if any(state.name == self.bad for state in states):
            raise RuntimeError("a bad one")
        return [
            replace(s, steps_left=s.steps_left - 1, value=s.value * 2 + s.steps_left)
            for s in states
        ]

    async def called(self, times: int) -> None:
        """Returns when the model was called so often, and the last call is still under way."""
        await eventually(lambda: len(self.calls) >= times)


Make = Callable[..., StepScheduler[Count]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes schedulers and closes them."""
    made: list[tuple[StepScheduler[Count], Model]] = []

    def build(model: Model, max_batch: int = 8, max_running: int = 64) -> StepScheduler[Count]:
        scheduler = StepScheduler(model.advance, max_batch, max_running)
        made.append((scheduler, model))
        return scheduler

    yield build
    for scheduler, model in made:
        model.gated = False
        model.go.release(100)
        await scheduler.close()


async def finish(scheduler: StepScheduler[Count], state: Count) -> Count:
    """The last state."""
    return [seen async for seen in scheduler.run(state)][-1]


async def test_a_tick_advances_all_by_one_step_in_one_batch(make: Make) -> None:
    model = Model()
    scheduler = make(model)
    states = [Count(str(n), 5) for n in range(4)]
    ended = await asyncio.gather(*(finish(scheduler, state) for state in states))
    assert model.calls == [["0", "1", "2", "3"]] * 5
    assert [state.steps_left for state in ended] == [0] * 4
    seen = scheduler.statistics()
    assert (seen.ticks, seen.batches, seen.steps, seen.largest_batch) == (5, 5, 20, 4)
    assert (seen.waiting, seen.running, seen.work_left) == (0, 0, 0)


async def test_every_step_is_seen_by_a_prompt_reader(make: Make) -> None:
    scheduler = make(Model())
    seen = [state.steps_left async for state in scheduler.run(Count("a", 4))]
    assert seen == [3, 2, 1, 0]


async def test_a_late_reader_gets_the_newest_state_and_holds_up_nobody(make: Make) -> None:
    model = Model()
    scheduler = make(model)
    async with aclosing(scheduler.run(Count("late", 50))) as states:
        first = await anext(states)
        assert first.steps_left == 49
        await finish(scheduler, Count("other", 60))
        assert [state.steps_left async for state in states] == [0]


async def test_who_joins_midway_starts_at_the_next_tick(make: Make) -> None:
    model = Model(gated=True)
    scheduler = make(model)
    first = asyncio.create_task(finish(scheduler, Count("first", 4)))
    model.go.release()
    await model.called(2)
    second = asyncio.create_task(finish(scheduler, Count("second", 4)))
    await asyncio.sleep(0.02)
    assert scheduler.statistics().waiting == 1
    model.go.release(100)
    await asyncio.gather(first, second)
    assert model.calls == [["first"]] * 2 + [["first", "second"]] * 2 + [["second"]] * 2


async def test_an_abort_at_step_k_frees_its_slot_at_step_k_plus_1(make: Make) -> None:
    model = Model()
    scheduler = make(model, max_running=1)
    later: asyncio.Task[Count] | None = None
    async with aclosing(scheduler.run(Count("leaves", 100))) as states:
        async for state in states:
            if later is None:
                later = asyncio.create_task(finish(scheduler, Count("waits", 2)))
            if state.steps_left == 97:
                break
    assert later is not None
    await later
    assert model.calls == [["leaves"]] * 3 + [["waits"]] * 2


async def test_an_abort_during_a_step_is_in_no_later_step(make: Make) -> None:
    model = Model(gated=True)
    scheduler = make(model)
    leaves = asyncio.create_task(finish(scheduler, Count("leaves", 100)))
    stays = asyncio.create_task(finish(scheduler, Count("stays", 3)))
    await model.called(1)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert scheduler.statistics().running == 1, "what left counts no longer"
    model.go.release(100)
    await stays
    assert model.calls == [["leaves", "stays"]] + [["stays"]] * 2


async def test_an_abort_while_waiting_costs_no_step(make: Make) -> None:
    model = Model(gated=True)
    scheduler = make(model, max_running=1)
    runs = asyncio.create_task(finish(scheduler, Count("runs", 2)))
    await model.called(1)
    waits = asyncio.create_task(finish(scheduler, Count("waits", 2)))
    await asyncio.sleep(0.01)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    model.go.release(100)
    await runs
    assert model.calls == [["runs"]] * 2
    assert scheduler.statistics().waiting == 0


async def test_unequal_shapes_share_a_tick_but_no_batch(make: Make) -> None:
    model = Model()
    scheduler = make(model)
    states = [Count("a", 2), Count("b", 2, shape="wide"), Count("c", 2)]
    await asyncio.gather(*(finish(scheduler, state) for state in states))
    assert model.calls == [["a", "c"], ["b"]] * 2
    assert scheduler.statistics().ticks == 2


async def test_more_than_fit_in_a_batch_advance_together(make: Make) -> None:
    model = Model()
    scheduler = make(model, max_batch=3)
    order: list[str] = []

    async def run(name: str, steps: int) -> None:
        await finish(scheduler, Count(name, steps))
        order.append(name)

    await asyncio.gather(*(run(str(n), 4) for n in range(7)), run("short", 2))
    assert order[0] == "short", "nobody waits for the steps of those before"
    assert max(len(call) for call in model.calls) == 3
    seen = scheduler.statistics()
    assert (seen.ticks, seen.steps, seen.batches) == (4, 30, 3 * 4)


async def test_those_beyond_the_slots_run_in_order_of_arrival(make: Make) -> None:
    model = Model()
    scheduler = make(model, max_batch=2, max_running=2)
    await asyncio.gather(*(finish(scheduler, Count(str(n), 2)) for n in range(6)))
    assert model.calls == [["0", "1"]] * 2 + [["2", "3"]] * 2 + [["4", "5"]] * 2


async def test_one_that_fails_takes_nobody_along(make: Make) -> None:
    model = Model(bad="bad")
    scheduler = make(model)
    good, bad, other = await asyncio.gather(
        *(finish(scheduler, Count(name, 3)) for name in ("good", "bad", "other")),
        return_exceptions=True,
    )
    assert isinstance(bad, RuntimeError)
    alone = await finish(scheduler, Count("good", 3))
    assert good == alone and isinstance(other, Count) and other.steps_left == 0


async def test_steps_run_in_one_thread_that_is_not_the_loops(make: Make) -> None:
    model = Model()
    scheduler = make(model, max_batch=2)
    await asyncio.gather(*(finish(scheduler, Count(str(n), 5)) for n in range(5)))
    assert len(model.threads) == 1
    assert threading.get_ident() not in model.threads


async def test_work_left_is_the_steps_of_all_that_wait_and_run(make: Make) -> None:
    model = Model(gated=True)
    scheduler = make(model, max_running=1)
    tasks = [asyncio.create_task(finish(scheduler, Count(str(n), 10))) for n in range(3)]
    await model.called(1)
    model.go.release(4)
    await model.called(5)
    seen = scheduler.statistics()
    assert (seen.running, seen.waiting, seen.work_left) == (1, 2, 6 + 20)
    model.go.release(100)
    await asyncio.gather(*tasks)
