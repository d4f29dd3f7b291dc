"""Many films at once, their pace, and what the stage of engine `live` says of itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from omni_grpc.config import load_pipeline
from omni_grpc.params import KIND_BY_ENGINE
from omni_grpc.stages.live import LiveStage
from omni_grpc.stages.pace import Pace
from omni_grpc.stages.painter.captions import CAPTIONS
from omni_grpc.types import (
    DiffusionParams,
    EventState,
    InteractionEvent,
    VideoFormat,
)
from tests.films import BLUE, K, Session, loaded, spec
from tests.support import eventually

STARTED = EventState.STARTED


@pytest.fixture(scope="module")
async def stage() -> AsyncIterator[LiveStage]:
    """As fast as it can."""
    async with loaded(realtime=False) as stage:
        yield stage


@pytest.fixture(scope="module")
async def watched() -> AsyncIterator[LiveStage]:
    """In real time, chunks of 0.2 s."""
    async with loaded(fps=20, buffer_chunks=2) as stage:
        yield stage


# ------------------------------------------------------------ many, and the clock


async def test_films_share_batches_and_do_not_mix(stage: LiveStage) -> None:
    captions = CAPTIONS[::36]
    before = stage.statistics().counters
    sessions = [Session(stage, str(c), frames=12, seed=n) for n, c in enumerate(captions)]
    for place, session in enumerate(sessions):
        session.at(place % 2, "cut", str(captions[place - 1]), transition_chunks=0)
    await asyncio.gather(*(session.run() for session in sessions))
    for place, session in enumerate(sessions):
        shown = session.shown()
        assert set(shown[0]) == {captions[place]} and set(shown[-1]) == {captions[place - 1]}
    after = stage.statistics().counters
    assert after["largest_batch"] >= 3
    assert after["chunks"] - before["chunks"] == 3 * len(sessions)
    assert after["batches"] - before["batches"] < after["steps"] - before["steps"]


async def test_a_film_without_an_end_stops_at_once_when_cancelled(stage: LiveStage) -> None:
    session = Session(stage, seed=1, steps=200)
    running = asyncio.create_task(session.run())
    await eventually(lambda: stage.statistics().work_left, within=5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not stage.statistics().work_left and not session.chunks
    await asyncio.sleep(0.1)  # the step that was under way
    steps = stage.statistics().counters["steps"]
    await asyncio.sleep(0.1)
    assert stage.statistics().counters["steps"] == steps


async def test_a_film_keeps_its_pace_and_is_never_far_ahead(watched: LiveStage) -> None:
    session = await Session(watched, frames=10 * K, seed=1).run()
    chunk_s, buffer = K / 20, 2
    since = [at - session.arrived[0] for at in session.arrived]
    for chunk, at in enumerate(since):
        assert at >= (chunk - buffer) * chunk_s - 0.02, f"chunk {chunk} is too far ahead"
    assert since[-1] < 12 * chunk_s
    assert watched.statistics().counters["underruns"] <= 2


async def test_events_are_taken_while_a_film_waits_for_its_time(watched: LiveStage) -> None:
    session = Session(watched, frames=8 * K, seed=1)

    async def steer_between(chunk: int) -> None:
        if chunk == 3:
            loop = asyncio.get_running_loop()
            event = InteractionEvent("cut", BLUE, transition_chunks=0)
            later = loop.call_later(0.05, lambda: tasks.append(loop.create_task(steer(event))))
            assert later

    async def steer(event: InteractionEvent) -> None:
        begun = time.monotonic()
        await session.steer(event)
        took.append(time.monotonic() - begun)

    tasks: list[asyncio.Task[None]] = []
    took: list[float] = []
    await session.run(steer_between)
    assert took and took[0] < 0.15
    assert session.life[0][:2] == ("cut", STARTED) and session.life[0][2] in (4, 5)


class Clock:
    """A clock that only sleeping and `now` move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def paced(
    makes: Sequence[float], holds: Sequence[float], buffer_chunks: int = 1
) -> tuple[list[float], int]:
    """When each chunk of 1 s was ready, if making it takes that long and the consumer then holds it
    that long; and how many underruns there were."""
    clock = Clock()
    pace = Pace(1.0, buffer_chunks, clock, clock.sleep)
    times = []
    for chunk, (make, hold) in enumerate(zip(makes, holds, strict=True)):
        await pace.turn(chunk)
        clock.now += make
        pace.ready(chunk)
        times.append(round(clock.now - 100, 6))
        clock.now += hold
        pace.taken(chunk)
    return times, pace.underruns


@pytest.mark.parametrize(
    ("buffer_chunks", "times"),
    [(1, [0.25, 0.5, 1.5, 2.5]), (2, [0.25, 0.5, 0.75, 1.5]), (9, [0.25, 0.5, 0.75, 1.0])],
)
async def test_what_is_made_fast_waits_for_its_viewer(
    buffer_chunks: int, times: list[float]
) -> None:
    assert await paced([0.25] * 4, [0.0] * 4, buffer_chunks) == (times, 0)


async def test_what_is_made_late_is_an_underrun_and_is_not_caught_up_with() -> None:
    # Chunk 1 is due 1 s after chunk 0 came, and is made in 3 s: all after it is 2 s late.
    times, underruns = await paced([0.25, 3.0, 0.25, 0.25], [0.0] * 4)
    assert (times, underruns) == ([0.25, 3.25, 3.5, 4.5], 1)
    slow, underruns = await paced([0.25, 1.5, 1.5, 1.5], [0.0] * 4)
    assert (slow, underruns) == ([0.25, 1.75, 3.25, 4.75], 3)


async def test_a_consumer_that_holds_chunks_back_makes_no_underrun() -> None:
    times, underruns = await paced([0.25] * 4, [0.0, 30.0, 0.0, 0.0])
    assert (times, underruns) == ([0.25, 0.5, 30.75, 31.75], 0)


# ------------------------------------------------------------ what it says of itself


async def test_the_pipeline_tells_its_rate_and_that_it_takes_events() -> None:
    config = load_pipeline("shapes-live")
    (painter,) = config.stages
    arguments = painter.engine_args
    stage = LiveStage(spec(**arguments))
    try:
        facts = await stage.load()
    finally:
        await stage.close()
    assert facts.interactive and not facts.resumable
    assert facts.output_format == VideoFormat("video/x-raw-rgb", 32, 32, 12.0)
    assert KIND_BY_ENGINE["live"] is DiffusionParams


@pytest.mark.parametrize(
    "arguments", [{"fps": 0}, {"chunk_frames": 0}, {"buffer_chunks": 0}, {"speed": 2}]
)
async def test_an_engine_argument_that_is_wrong_is_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        LiveStage(spec(**arguments))
