"""The film that obeys: engine `live`, its films and its events."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import av
import numpy as np
import pytest
import torch

from omni_grpc.errors import InvalidField, NotSupported
from omni_grpc.ipc import Task
from omni_grpc.stages.drift import Scene, mix
from omni_grpc.stages.live import LiveStage
from omni_grpc.stages.painter.captions import Colour, Shape, parse
from omni_grpc.types import (
    EventState,
    InteractionEvent,
    Media,
    Modality,
    Prompt,
    TokenIds,
)
from tests.films import BLUE, GREEN, RED, K, Session, all_of, loaded

QUEUED, STARTED, COMPLETED, SUPERSEDED, EXPIRED = (
    EventState.QUEUED,
    EventState.STARTED,
    EventState.COMPLETED,
    EventState.SUPERSEDED,
    EventState.EXPIRED,
)


@pytest.fixture(scope="module")
async def stage() -> AsyncIterator[LiveStage]:
    """As fast as it can."""
    async with loaded(realtime=False) as stage:
        yield stage


# ------------------------------------------------------------ films


async def test_a_film_is_read_as_its_caption_and_moves(stage: LiveStage) -> None:
    session = await Session(stage, frames=60, seed=1).run()
    read = [caption for chunk in session.shown() for caption in chunk]
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
    stage: LiveStage,
) -> None:
    session = Session(stage, frames=24, seed=2).at(2, "cut", BLUE, transition_chunks=0)
    shown = (await session.run()).shown()
    active = [c.active_event_ids for c in session.chunks]
    assert active == [(), (), (), ("cut",), ("cut",), ("cut",)]
    assert all(all_of(chunk, Colour.RED, Shape.CIRCLE) for chunk in shown[:3])
    assert all(all_of(chunk, Colour.BLUE, Shape.SQUARE) for chunk in shown[3:])
    assert session.life == [("cut", STARTED, 3), ("cut", COMPLETED, 3)]


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_transition_goes_steadily_and_ends_with_its_last_chunk(
    stage: LiveStage, seed: int
) -> None:
    session = Session(stage, frames=24, seed=seed).at(1, "fade", BLUE)
    shown = (await session.run()).shown()
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
    stage: LiveStage,
) -> None:
    session = Session(stage, frames=16, seed=1)
    session.at(0, "first", GREEN, transition_chunks=0).at(0, "second", BLUE, transition_chunks=0)
    shown = (await session.run()).shown()
    assert session.life == [
        ("first", SUPERSEDED, None),
        ("second", STARTED, 1),
        ("second", COMPLETED, 1),
    ]
    assert all_of(shown[1], Colour.BLUE, Shape.SQUARE)


async def test_an_event_takes_over_from_where_another_one_is(stage: LiveStage) -> None:
    session = Session(stage, frames=32, seed=1)
    session.at(0, "fade", BLUE).at(1, "turn", GREEN, transition_chunks=4)
    shown = (await session.run()).shown()
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


async def test_an_event_changes_only_what_it_names(stage: LiveStage) -> None:
    session = Session(stage, frames=28, seed=1).at(0, "caption", BLUE, transition_chunks=3)
    session.at(1, "scale", parameters={"guidance_scale": 2.0}, transition_chunks=0)
    session.at(4, "seed", parameters={"seed": 5.0}, transition_chunks=0)
    session.at(5, "not", negative_prompt=GREEN, transition_chunks=0)
    shown = (await session.run()).shown()
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


def test_scenes_blend_in_all_that_can_be_blended() -> None:
    zero, one = torch.zeros(4, 8), torch.ones(4, 8)
    base, target = Scene(zero, one, 1.0, seed=1), Scene(one, zero, 5.0, seed=2)
    blend = mix(base, target, 0.25)
    assert (blend.guidance, blend.seed) == (2.0, 2)
    assert (blend.cond == 0.25).all() and (blend.uncond == 0.75).all()
    assert mix(base, target, 1.0) is target
