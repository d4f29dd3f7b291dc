"""Films, large pictures and arrays on their way to a client: whole, in order, in messages that
gRPC's default limits let through."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image as Pillow

from omni_grpc.config import ServerConfig
from omni_grpc.server import Server
from omni_grpc.stages.encode import (
    FRAGMENT_FRAMES,
    RAW_VIDEO,
    encode_film,
    encode_preview,
    open_film,
    to_pixels,
)
from omni_grpc.types import Video
from omni_grpc.v1 import output_pb2
from tests.models.film import frame, noise
from tests.support import Response, ask, client, collect, freed, pipeline, script, stub_of

MIB = 1 << 20


@pytest.fixture(scope="module")
async def cinema() -> AsyncIterator[Server]:
    """A pipeline of one stage per modality."""
    films, pictures = (
        pipeline(
            f"""
            name: {name}
            stages:
              - {{name: film, engine: python, model: "tests.models.film:Film", output: {output}}}
            """
        )
        for name, output in (("films", "video"), ("pictures", "image"))
    )
    server = Server(ServerConfig(port=0), [films, pictures])
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


@pytest.fixture
async def stub(cinema: Server) -> AsyncIterator[Any]:
    """A client with gRPC's default limits: 4 MiB a message."""
    async with client(cinema) as channel:
        yield stub_of(channel)
    await freed(cinema, within=3)


def film(width: int, height: int, frames: int, mime_type: str, fps: float = 24) -> Any:
    """A request for a film."""
    values = {"width": width, "height": height, "frames": frames, "fps": fps}
    return ask(pipeline="films", stage_params=[script("film", mime_type=mime_type, **values)])


def chunks(responses: Sequence[Response]) -> list[output_pb2.VideoChunk]:
    """The film's parts, after a look at what holds of all films."""
    parts = [r.output.video for r in responses if r.output.WhichOneof("content") == "video"]
    assert [part.chunk_index for part in parts] == list(range(len(parts)))
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    begun = 0
    for part in parts:
        assert part.first_frame <= begun
        begun += part.frame_count
    assert begun == responses[-1].finished.usage.frames
    return parts


def decoded(data: bytes) -> list[np.ndarray]:
    """The frames of an mp4."""
    with av.open(io.BytesIO(data), "r") as container:
        return [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]


async def test_60_mb_of_raw_film_reach_a_client_with_default_limits(stub: Any) -> None:
    width, height, frames = 640, 360, 90
    request = film(width, height, frames, RAW_VIDEO)
    data, largest, parts, responses = bytearray(), 0, 0, []
    async for response in stub.AddRequest(request, timeout=25):
        responses.append(response)
        largest = max(largest, response.ByteSize())
        data += response.output.video.data
        parts += response.WhichOneof("event") == "output"
    assert len(data) == width * height * 3 * frames > 60_000_000
    assert largest < MIB
    assert len(chunks(responses)) == parts
    shown = np.frombuffer(data, np.uint8).reshape(frames, height, width, 3)
    assert all((shown[n] == frame(n, width, height)).all() for n in range(frames))


async def test_mp4_comes_in_parts_that_play_as_they_come(stub: Any) -> None:
    frames = 3 * FRAGMENT_FRAMES + 5
    parts = chunks(await collect(stub, film(96, 64, frames, "video/mp4", fps=12)))
    assert [(p.first_frame, p.frame_count) for p in parts] == [
        (0, 8), (8, 8), (16, 8), (24, 5)
    ]  # fmt: skip
    assert {(p.mime_type, p.width, p.height) for p in parts} == {("video/mp4", 96, 64)}
    whole = b"".join(part.data for part in parts)
    with av.open(io.BytesIO(whole), "r") as container:
        assert container.streams.video[0].average_rate == 12
    shown = decoded(whole)
    assert len(shown) == frames
    # Blue tells the frame's number; chroma is at half size, so it is only near.
    assert [abs(f[..., 2].mean() - n) < 12 for n, f in enumerate(shown)].count(False) == 0
    assert len(decoded(parts[0].data + parts[1].data)) == 16


async def test_a_film_is_sent_while_it_is_made() -> None:
    maker, given = open_film("video/mp4", 64, 64, 24), []
    for number in range(FRAGMENT_FRAMES + 1):
        given = list(maker.push(frame(number, 64, 64)))
    assert len(given) == 1, "with the first frame of the second fragment, the first is out"
    assert len(decoded(given[0].data)) == FRAGMENT_FRAMES


@pytest.mark.parametrize("mime_type", ["video/mp4", RAW_VIDEO])
async def test_parts_name_the_events_in_force(mime_type: str) -> None:
    maker = open_film(mime_type, 32, 32, 24)
    parts: list[Video] = []
    for number in range(6):
        parts += maker.push(frame(number, 32, 32), ("rain",) if number >= 2 else ())
    parts += maker.finish()
    told = [(p.first_frame, p.frame_count, p.active_event_ids, p.last) for p in parts]
    assert told == [(0, 2, (), False), (2, 4, ("rain",), True)]


async def test_odd_sizes_and_single_frames_are_films_too(stub: Any) -> None:
    (part,) = chunks(await collect(stub, film(33, 17, 1, "video/mp4")))
    (shown,) = decoded(part.data)
    assert shown.shape == (17, 33, 3) and abs(shown.astype(int) - frame(0, 33, 17)).max() < 16


async def test_a_picture_above_1_mib_comes_in_ordered_parts(stub: Any) -> None:
    values = {"mime_type": "image/png", "width": 1000, "height": 700}
    request = ask(pipeline="pictures", stage_params=[script("film", **values)])
    responses = await collect(stub, request)
    parts = [r.output.image for r in responses if r.WhichOneof("event") == "output"]
    assert len(parts) > 1 and max(r.ByteSize() for r in responses) < MIB
    offsets = np.cumsum([0, *(len(part.data) for part in parts)])
    assert [part.offset for part in parts] == offsets[:-1].tolist() and offsets[-1] > MIB
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    with Pillow.open(io.BytesIO(b"".join(part.data for part in parts))) as image:
        assert (np.asarray(image) == to_pixels(noise(1000, 700))).all()


async def test_raw_values_above_1_mib_come_in_ordered_parts(stub: Any) -> None:
    values = {"mime_type": "tensor", "width": 640, "height": 480}
    request = ask(pipeline="pictures", stage_params=[script("film", **values)])
    responses = await collect(stub, request)
    parts = [r.output.tensor for r in responses if r.WhichOneof("event") == "output"]
    assert len(parts) > 1 and all(list(part.shape) == [3, 480, 640] for part in parts)
    data = b"".join(part.data for part in parts)
    assert (np.frombuffer(data, "<f4").reshape(3, 480, 640) == noise(640, 480)).all()
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_a_film_of_values_is_the_same_in_every_form() -> None:
    values = np.stack([noise(48, 32)] * 3)
    raw = b"".join(p.data for p in encode_film(values, 24, RAW_VIDEO) if isinstance(p, Video))
    assert (np.frombuffer(raw, np.uint8).reshape(3, 32, 48, 3) == to_pixels(values)).all()
    (tensors,) = encode_film(values, 24, "tensor")
    assert not isinstance(tensors, Video)
    kept = tensors.arrays["video"]
    assert kept.shape == (3, 3, 32, 48) and kept.data == values.tobytes()


async def test_a_preview_fits_a_message_whatever_the_pictures_size() -> None:
    preview = encode_preview(noise(1500, 1000))
    assert (preview.width, preview.height) == (256, 171) and len(preview.data) < MIB // 2


async def test_a_client_that_leaves_midway_ends_the_film(cinema: Server, stub: Any) -> None:
    call = stub.AddRequest(film(640, 360, 2000, RAW_VIDEO), timeout=20)
    async for response in call:
        if response.WhichOneof("event") == "output":
            break
    await asyncio.sleep(0.1)
    call.cancel()
    await freed(cinema, within=2)
