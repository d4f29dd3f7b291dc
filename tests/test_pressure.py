"""How long text waits, by how busy the server is."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_grpc import pressure as pressures
from omni_grpc.config import ServerConfig
from omni_grpc.pressure import (
    BUSY,
    CALM,
    SCARCE,
    STEPS,
    MachineClock,
    Pressure,
    ThreadClock,
    next_window,
)
from tests.support import eventually

MOST = 0.08
LEAST = MOST / STEPS


def test_a_busy_loop_opens_the_window_step_by_step_to_its_most() -> None:
    window, seen = 0.0, []
    for _ in range(6):
        window = next_window(window, BUSY + 0.1, MOST)
        seen.append(window)
    assert seen == pytest.approx([LEAST, 2 * LEAST, 4 * LEAST, MOST, MOST, MOST])


def test_a_calm_loop_closes_it() -> None:
    window, seen = MOST, []
    for _ in range(5):
        window = next_window(window, CALM / 2, MOST)
        seen.append(window)
    assert seen == pytest.approx([MOST / 2, MOST / 4, LEAST, 0, 0])


@given(st.lists(st.floats(0, 20), max_size=30), st.floats(0.001, 10))
def test_a_window_is_none_or_within_its_bounds(shares: list[float], most: float) -> None:
    window = 0.0
    for share in shares:
        window = next_window(window, share, most)
        assert window == 0 or most / STEPS <= window <= most


def test_between_the_two_it_stays() -> None:
    assert next_window(2 * LEAST, (BUSY + CALM) / 2, MOST) == 2 * LEAST
    assert next_window(0.0, (BUSY + CALM) / 2, MOST) == 0.0


def test_the_thread_clock_counts_work_and_not_sleep() -> None:
    clock = ThreadClock()
    before = clock.seconds()
    time.sleep(0.2)
    slept = clock.seconds() - before
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    worked = clock.seconds() - before - slept
    clock.close()
    # A processor that it had to wait for counts too, so there is no upper bound.
    assert worked >= 0.19
    assert slept < worked


def test_the_machine_is_between_idle_and_full() -> None:
    clock = MachineClock()
    time.sleep(0.1)
    assert 0 <= clock.share() <= 1
    clock.close()


async def test_a_loop_that_works_opens_the_window_and_one_that_rests_closes_it() -> None:
    told: list[float] = []
    pressure = Pressure(told.append, 0.001, MOST)
    pressure.start()
    async with asyncio.timeout(30):
        while told[-1] < MOST:
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                pass
            await asyncio.sleep(0)
        while told[-1] > 0.001:  # noqa: ASYNC110 - to rest is the point
            await asyncio.sleep(0.05)
    await pressure.stop()
    assert told[0] == 0.001, "what is always wanted holds from the start"
    assert max(told) == MOST


async def test_without_a_larger_window_nothing_is_measured() -> None:
    told: list[float] = []
    pressure = Pressure(told.append, 0.5, 0.0)
    pressure.start()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:  # noqa: ASYNC110 - to work is the point
        await asyncio.sleep(0)
    await pressure.stop()
    assert told == [0.5]


def test_by_default_only_a_busy_server_lets_text_wait() -> None:
    settings = ServerConfig()
    assert (settings.merge_window, settings.busy_merge_window) == (0.0, 0.1)


# ---------------------------------------------------------------- under a load that tests set


class Load:
    """Both clocks: of a loop that is `busy` for this share of the time, and of a machine."""

    def __init__(self) -> None:
        self.busy = self.machine = 0.0
        self.closed = 0
        self._worked, self._then = 0.0, time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._worked += self.busy * (now - self._then)
        self._then = now
        return self._worked

    def share(self) -> float:
        return self.machine

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """In the place of real clocks, which are looked at often."""
    load = Load()
    monkeypatch.setattr(pressures, "TICK_S", 0.005)
    monkeypatch.setattr(pressures, "ThreadClock", lambda: load)
    monkeypatch.setattr(pressures, "MachineClock", lambda: load)
    return load


async def test_a_window_is_told_when_it_changes_and_only_then(load: Load) -> None:
    told: list[float] = []
    pressure = Pressure(told.append, 0.0, MOST)
    pressure.start()
    await asyncio.sleep(0.03)
    load.busy = 2 * BUSY
    await eventually(lambda: told[-1] == MOST, 5)
    await asyncio.sleep(0.03)
    load.busy = CALM / 4
    await eventually(lambda: not told[-1], 5)
    await pressure.stop()
    up = [LEAST, 2 * LEAST, 4 * LEAST]
    assert told == pytest.approx([0, *up, MOST, *reversed(up), 0])
    assert load.closed == 2


@pytest.mark.parametrize("most", [0.0, 0.2, 0.3])
async def test_what_cannot_grow_is_told_once(load: Load, most: float) -> None:
    load.busy = 2 * BUSY
    told: list[float] = []
    pressure = Pressure(told.append, 0.3, most)
    pressure.start()
    await asyncio.sleep(0.05)
    await pressure.stop()
    assert told == [0.3]


async def test_a_machine_with_no_time_left_makes_a_loop_busy_sooner(load: Load) -> None:
    load.busy = 0.9 * CALM
    assert SCARCE * load.busy > BUSY
    told: list[float] = []
    pressure = Pressure(told.append, 0.0, MOST)
    pressure.start()
    await asyncio.sleep(0.05)
    assert told == [0.0]
    load.machine = 1.0
    await eventually(lambda: told[-1] == MOST, 5)
    await pressure.stop()


async def test_a_measuring_that_ended_tells_nothing(load: Load) -> None:
    told: list[float] = []
    pressure = Pressure(told.append, 0.0, MOST)
    pressure.start()
    await pressure.stop()
    load.busy = 2 * BUSY
    await asyncio.sleep(0.03)
    assert told == [0.0]
