"""The film that obeys: engine `live`, driven as its host drives it."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import av
import numpy as np
import pytest
import torch

from omni_grpc.config import load_pipeline
from omni_grpc.errors import InvalidField, NotSupported, OmniError
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.params import KIND_BY_ENGINE
from omni_grpc.stages.base import Inputs
from omni_grpc.stages.live import Film, LiveStage
from omni_grpc.stages.pace import Pace
from omni_grpc.stages.painter.captions import CAPTIONS, Caption, Colour, Shape, parse
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.types import (
    DiffusionParams,
    EventState,
    InteractionEvent,
    Media,
    Modality,
    Prompt,
    StageOutput,
    Text,
    TokenIds,
    Video,
    VideoFormat,
)
from tests.support import eventually

RED = "a large red circle on a white background"
BLUE = "a large blue square on a white background"
GREEN = "a small green ring on a black background"
K = 4
"""Frames of a chunk."""

QUEUED, STARTED, COMPLETED, SUPERSEDED, EXPIRED = (
    EventState.QUEUED,
    EventState.STARTED,
    EventState.COMPLETED,
    EventState.SUPERSEDED,
    EventState.EXPIRED,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def spec(**arguments: Any) -> StageSpec:
    return StageSpec("film", "painter", 0, "live", "painter", "cpu", arguments)


async def loaded(**arguments: Any) -> LiveStage:
    stage = LiveStage(spec(chunk_frames=K, **arguments))
    await stage.load()
    return stage


@pytest.fixture(scope="module")
async def stage() -> AsyncIterator[LiveStage]:
    """As fast as it can."""
    stage = await loaded(realtime=False)
    yield stage
    await stage.close()


@pytest.fixture(scope="module")
async def watched() -> AsyncIterator[LiveStage]:
    """In real time, chunks of 0.2 s."""
    stage = await loaded(fps=20, buffer_chunks=2)
    yield stage
    await stage.close()


class Session:
    """One film as a host runs it: what it gave, and events for it at chosen chunks."""

    def __init__(self, stage: LiveStage, text: str = RED, **params: Any) -> None:
        self.stage = stage
        self.task = Task(1, "film", DiffusionParams(**params), 60, prompt=Prompt(Text(text)))
        self.outputs: list[StageOutput] = []
        self.arrived: list[float] = []
        """When each chunk came."""
        self.plan: dict[int, list[InteractionEvent]] = {}
        """Events to send when the chunk of that number has come."""
        self.refused: list[OmniError] = []
        self.film: Film | None = None

    def at(self, chunk: int, name: str, prompt: str | None = None, **changes: Any) -> Session:
        self.plan.setdefault(chunk, []).append(InteractionEvent(name, prompt, **changes))
        return self

    async def run(self, on_chunk: Callable[[int], Awaitable[None]] | None = None) -> Session:
        self.film = await self.stage.prepare(self.task)
        inputs = Inputs()
        inputs.put(Feed(1, end=True))
        running: Any = self.stage.run(self.task, self.film, inputs)
        async with aclosing(running) as outputs:
            async for output in outputs:
                self.outputs.append(output)
                if output.payload is not None:
                    self.arrived.append(time.monotonic())
                    for event in self.plan.get(len(self.arrived) - 1, []):
                        await self.steer(event)
                    if on_chunk is not None:
                        await on_chunk(len(self.arrived) - 1)
        return self

    async def steer(self, event: InteractionEvent) -> None:
        assert self.film is not None
        try:
            changes = await self.stage.steer(self.task, self.film, event)
        except OmniError as error:
            self.refused.append(error)
        else:
            self.outputs += [StageOutput(event=change) for change in changes]

    @property
    def chunks(self) -> list[Video]:
        return [o.payload for o in self.outputs if isinstance(o.payload, Video)]

    @property
    def pixels(self) -> np.ndarray:
        """[frames, 32, 32, 3]"""
        data = b"".join(chunk.data for chunk in self.chunks)
        return np.frombuffer(data, np.uint8).reshape(-1, 32, 32, 3)

    @property
    def life(self) -> list[tuple[str, EventState, int | None]]:
        changes = [o.event for o in self.outputs if o.event is not None]
        return [(c.event_id, c.state, c.chunk) for c in changes]

    def shown(self, judge: Judge) -> list[list[Caption]]:
        """What each frame of each chunk is read as."""
        values = torch.tensor(self.pixels).movedim(-1, 1) / 127.5 - 1
        read = judge.read(values).captions
        return [read[c.first_frame : c.first_frame + c.frame_count] for c in self.chunks]


def all_of(frames: Sequence[Caption], colour: Colour, shape: Shape) -> bool:
    return all((c.colour, c.shape) == (colour, shape) for c in frames)


# ------------------------------------------------------------ films


async def test_a_film_is_read_as_its_caption_and_moves(stage: LiveStage, judge: Judge) -> None:
    session = await Session(stage, frames=60, seed=1).run()
    read = [caption for chunk in session.shown(judge) for caption in chunk]
    assert sum(caption == parse(RED) for caption in read) >= 57
    steps = np.abs(np.diff(session.pixels.astype(int), axis=0)).mean((1, 2, 3))
    far = np.abs(session.pixels[0].astype(int) - session.pixels[16]).mean()
    assert steps.min() > 0, "it moves"
    assert steps.max() < 0.75 * far, "from frame to frame only a little"


async def test_frames_are_numbered_and_the_last_chunk_says_so(stage: LiveStage) -> None:
    session = await Session(stage, frames=10, seed=1).run()
    places = [(c.first_frame, c.frame_count, c.last) for c in session.chunks]
    assert places == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert {(c.mime_type, c.width, c.height) for c in session.chunks} == {
        ("video/x-raw-rgb", 32, 32)
    }
    finish = session.outputs[-1]
    assert finish.finish is not None and finish.usage is not None
    assert finish.usage.steps == 12 + 3 * 2


async def test_a_seed_decides_the_film(stage: LiveStage) -> None:
    once, again, other = [
        await Session(stage, frames=8, seed=seed).run() for seed in (7, 7, 2**64 - 1)
    ]
    assert (once.pixels == again.pixels).all()
    assert (once.pixels != other.pixels).any()


async def test_an_mp4_is_written_chunk_by_chunk(stage: LiveStage) -> None:
    session = await Session(stage, frames=22, seed=1, output_mime_type="video/mp4", fps=12.5).run()
    assert [c.frame_count for c in session.chunks] == [4, 4, 4, 4, 4, 2]
    for count in (1, 3, 6):
        data = b"".join(c.data for c in session.chunks[:count])
        with av.open(io.BytesIO(data), "r") as film:
            frames = list(film.decode(video=0))
        assert len(frames) == sum(c.frame_count for c in session.chunks[:count])
        assert [f.time for f in frames] == pytest.approx([n / 12.5 for n in range(len(frames))])
    raw = (await Session(stage, frames=22, seed=1, fps=12.5).run()).pixels
    decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    assert np.abs(decoded.astype(int) - raw).mean() < 12


# ------------------------------------------------------------ events


async def test_a_hard_cut_shows_the_new_caption_in_the_first_chunk_that_names_it(
    stage: LiveStage, judge: Judge
) -> None:
    session = Session(stage, frames=24, seed=2).at(2, "cut", BLUE, transition_chunks=0)
    shown = (await session.run()).shown(judge)
    active = [c.active_event_ids for c in session.chunks]
    assert active == [(), (), (), ("cut",), ("cut",), ("cut",)]
    assert all(all_of(chunk, Colour.RED, Shape.CIRCLE) for chunk in shown[:3])
    assert all(all_of(chunk, Colour.BLUE, Shape.SQUARE) for chunk in shown[3:])
    assert session.life == [("cut", STARTED, 3), ("cut", COMPLETED, 3)]


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_transition_goes_steadily_and_ends_with_its_last_chunk(
    stage: LiveStage, judge: Judge, seed: int
) -> None:
    session = Session(stage, frames=24, seed=seed).at(1, "fade", BLUE)
    shown = (await session.run()).shown(judge)
    assert session.life == [("fade", STARTED, 2), ("fade", COMPLETED, 4)]
    assert [c.active_event_ids for c in session.chunks] == [(), (), *[("fade",)] * 4]
    assert all_of(shown[1], Colour.RED, Shape.CIRCLE)
    assert all_of(shown[4], Colour.BLUE, Shape.SQUARE)
    red, blue = [
        [float(session.pixels[K * n : K * n + K, ..., channel].mean()) for n in range(1, 5)]
        for channel in (0, 2)
    ]
    assert red == sorted(red, reverse=True) and red[0] - red[-1] > 50
    assert blue[-1] - blue[0] > 50 and blue == sorted(blue)


async def test_states_come_right_before_the_chunk_that_they_concern(stage: LiveStage) -> None:
    session = Session(stage, frames=20, seed=1).at(0, "fade", BLUE, transition_chunks=2)
    await session.run()
    order = [o.event.state if o.event else "chunk" for o in session.outputs if not o.finish]
    assert order == ["chunk", STARTED, "chunk", COMPLETED, "chunk", "chunk", "chunk"]


async def test_the_newer_of_two_events_in_one_chunk_is_the_one_that_counts(
    stage: LiveStage, judge: Judge
) -> None:
    session = Session(stage, frames=16, seed=1)
    session.at(0, "first", GREEN, transition_chunks=0).at(0, "second", BLUE, transition_chunks=0)
    shown = (await session.run()).shown(judge)
    assert session.life == [
        ("first", SUPERSEDED, None),
        ("second", STARTED, 1),
        ("second", COMPLETED, 1),
    ]
    assert all_of(shown[1], Colour.BLUE, Shape.SQUARE)


async def test_an_event_takes_over_from_where_another_one_is(
    stage: LiveStage, judge: Judge
) -> None:
    session = Session(stage, frames=32, seed=1)
    session.at(0, "fade", BLUE).at(1, "turn", GREEN, transition_chunks=4)
    shown = (await session.run()).shown(judge)
    assert session.life == [
        ("fade", STARTED, 1),
        ("fade", SUPERSEDED, 2),
        ("turn", STARTED, 2),
        ("turn", COMPLETED, 5),
    ]
    assert all(caption == parse(GREEN) for chunk in shown[5:] for caption in chunk)
    jumps = np.abs(np.diff(session.pixels.astype(int), axis=0)).mean((1, 2, 3))
    cut = np.abs(session.pixels[-1].astype(int) - session.pixels[0]).mean()
    assert jumps.max() < 0.75 * cut, "there is no cut"


async def test_what_is_not_complete_at_the_end_expires(stage: LiveStage) -> None:
    session = Session(stage, frames=12, seed=1)
    session.at(1, "begun", BLUE).at(2, "late", GREEN, transition_chunks=0)
    await session.run()
    assert session.life == [
        ("begun", STARTED, 2),
        ("begun", EXPIRED, None),
        ("late", EXPIRED, None),
    ]
    await session.steer(InteractionEvent("after", RED))
    assert session.life[-1] == ("after", EXPIRED, None)


async def test_an_event_changes_only_what_it_names(stage: LiveStage, judge: Judge) -> None:
    session = Session(stage, frames=28, seed=1).at(0, "caption", BLUE, transition_chunks=3)
    session.at(1, "scale", parameters={"guidance_scale": 2.0}, transition_chunks=0)
    session.at(4, "seed", parameters={"seed": 5.0}, transition_chunks=0)
    session.at(5, "not", negative_prompt=GREEN, transition_chunks=0)
    shown = (await session.run()).shown(judge)
    # The caption was on its way when another event took over; it is asked for still.
    assert ("caption", SUPERSEDED, 2) in session.life and ("not", COMPLETED, 6) in session.life
    assert all(all_of(chunk, Colour.BLUE, Shape.SQUARE) for chunk in shown[2:])
    assert session.film is not None
    assert (session.film.scene.guidance, session.film.scene.seed) == (2.0, 5)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a huge ball"}, "event.prompt"),
    ({"prompt": ""}, "event.prompt"),
    ({"prompt": GREEN, "negative_prompt": "ugly"}, "event.negative_prompt"),
    ({"prompt": GREEN, "parameters": {"guidance_scale": 0.5}}, "event.parameters.guidance_scale"),
    ({"prompt": GREEN, "parameters": {"guidance_scale": "4"}}, "event.parameters.guidance_scale"),
    ({"prompt": GREEN, "parameters": {"seed": 1.5}}, "event.parameters.seed"),
    ({"prompt": GREEN, "parameters": {"seed": float("nan")}}, "event.parameters.seed"),
    ({"prompt": GREEN, "parameters": {"seed": True}}, "event.parameters.seed"),
    ({"prompt": GREEN, "parameters": {"fps": 24.0}}, "event.parameters.fps"),
    ({"prompt": GREEN, "media": (Media(Modality.IMAGE, b"x"),)}, "event.media"),
    (
        {"negative_prompt": GREEN, "parameters": {"guidance_scale": 1.0}},
        "event.negative_prompt",
    ),
]


async def test_an_event_with_a_bad_part_changes_nothing(stage: LiveStage) -> None:
    plain = await Session(stage, frames=20, seed=1).at(0, "good", BLUE).run()
    tried = Session(stage, frames=20, seed=1).at(0, "good", BLUE)
    for number, (changes, _) in enumerate(WRONG):
        tried.at(0, f"bad{number}", **changes)
    await tried.run()
    assert [e.violations[0].field for e in tried.refused] == [path for _, path in WRONG]
    assert all(isinstance(error, InvalidField) for error in tried.refused)
    assert tried.life == plain.life
    assert (tried.pixels == plain.pixels).all()


async def test_what_is_wrong_with_a_film_is_said_before_it_begins(stage: LiveStage) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"frames": 0}, "params.frames"),
        ({"fps": 0.5}, "params.fps"),
        ({"steps": 10_000}, "params.steps"),
        ({"guidance_scale": 0.0}, "params.guidance_scale"),
        ({"width": 64}, "params.width"),
        ({"output_mime_type": "image/png"}, "params.output_mime_type"),
    ]
    for params, path in wrong:
        with pytest.raises(InvalidField) as refusal:
            await Session(stage, **params).run()
        assert refusal.value.violations[0].field == path
    with pytest.raises(InvalidField, match="a caption is like"):
        await Session(stage, "a ball").run()
    ids = Task(1, "film", None, 60, prompt=Prompt(TokenIds([1])))
    with pytest.raises(NotSupported):
        await stage.prepare(ids)


# ------------------------------------------------------------ many, and the clock


async def test_films_share_batches_and_do_not_mix(stage: LiveStage, judge: Judge) -> None:
    captions = CAPTIONS[::36]
    before = stage.statistics().counters
    sessions = [Session(stage, str(c), frames=12, seed=n) for n, c in enumerate(captions)]
    for place, session in enumerate(sessions):
        session.at(place % 2, "cut", str(captions[place - 1]), transition_chunks=0)
    await asyncio.gather(*(session.run() for session in sessions))
    for place, session in enumerate(sessions):
        shown = session.shown(judge)
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
