"""How long text waits, by how busy the server is."""

from __future__ import annotations

import asyncio
import time

import pytest

from omni_grpc.config import ServerConfig
from omni_grpc.pressure import BUSY, CALM, STEPS, MachineClock, Pressure, ThreadClock, next_window

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
