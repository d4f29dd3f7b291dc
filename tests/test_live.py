"""Films that obey, over gRPC and from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from omni_grpc.cli.call import CommandError
from omni_grpc.cli.live import choose
from omni_grpc.cli.screen import half_blocks
from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline
from omni_grpc.server import Server
from omni_grpc.stages.painter.captions import Caption, Colour, Shape, parse
from omni_grpc.stages.painter.judge import Judge
from omni_grpc_client import (
    Accepted,
    DiffusionParams,
    EventChanged,
    EventState,
    Finished,
    OmniClient,
    SessionItem,
    VideoChunk,
    VideoFormat,
)
from tests.support import echo, eventually, freed
from tests.test_cli import omni, started
from tests.test_speak import ended, typed

RED = "a large red circle on a white background"
BLUE = "a large blue square on a white background"


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """The pipeline shapes-live, twice as fast as it is, and one that makes no film."""
    content = load_pipeline("shapes-live").model_dump()
    content["stages"][0]["engine_args"]["fps"] = 24
    server = Server(ServerConfig(port=0), [echo(), PipelineConfig.model_validate(content)])
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


@pytest.fixture
async def target(server: Server) -> AsyncIterator[str]:
    """Where it listens; it must hold nothing when the test is over."""
    yield f"127.0.0.1:{server.port}"
    await freed(server)


def read(frames: np.ndarray) -> list[Caption]:
    """What frames [n, 32, 32, 3] are read as."""
    values = torch.tensor(frames).movedim(-1, 1) / 127.5 - 1
    return Judge().read(values).captions


def frames_of(path: Path) -> np.ndarray:
    """The frames of an mp4 file."""
    with av.open(str(path), "r") as film:
        return np.stack([f.to_ndarray(format="rgb24") for f in film.decode(video=0)])


# ---------------------------------------------------------------- over gRPC


async def test_a_prompt_takes_over_in_the_first_chunk_that_names_it(target: str) -> None:
    items: list[SessionItem] = []
    params = {"painter": DiffusionParams(seed=2, frames=40)}
    async with (
        OmniClient(target) as client,
        client.interact(RED, pipeline="shapes-live", stage_params=params) as session,
    ):
        async for item in session:
            items.append(item)
            if isinstance(item, VideoChunk) and item.chunk_index == 2:
                await session.event(BLUE, transition_chunks=0, event_id="cut")
    accepted, finished = items[0], items[-1]
    assert isinstance(accepted, Accepted) and isinstance(finished, Finished)
    assert accepted.outputs[0].format == VideoFormat("video/x-raw-rgb", 32, 32, 24.0)
    assert finished.usage.frames == 40
    chunks = [item for item in items if isinstance(item, VideoChunk)]
    cut = next(n for n, chunk in enumerate(chunks) if "cut" in chunk.active_event_ids)
    assert cut in (3, 4, 5)
    data = b"".join(chunk.data for chunk in chunks)
    seen = read(np.frombuffer(data, np.uint8).reshape(-1, 32, 32, 3))
    assert seen[4 * cut - 4 : 4 * cut] == [parse(RED)] * 4
    assert seen[4 * cut : 4 * cut + 4] == [parse(BLUE)] * 4
    states = [(i.state, i.chunk) for i in items if isinstance(i, EventChanged)]
    assert states == [
        (EventState.QUEUED, None),
        (EventState.STARTED, cut),
        (EventState.COMPLETED, cut),
    ]
    assert items.index(chunks[cut]) == 1 + max(
        place for place, item in enumerate(items) if isinstance(item, EventChanged)
    )


async def test_films_are_told_apart_from_what_cannot_be_steered(target: str) -> None:
    async with OmniClient(target) as client:
        info = await client.server_info()
    assert choose(info, "").name == choose(info, "shapes-live").name == "shapes-live"
    with pytest.raises(CommandError, match="no film"):
        choose(info, "echo")


# ---------------------------------------------------------------- the command


async def test_what_is_typed_is_in_the_film(target: str, tmp_path: Path) -> None:
    out = tmp_path / "film.mp4"
    arguments = ("live", RED, "--out", str(out), "--frames", "48", "--transition", "0")
    async with started(*arguments, "--seed", "1", "--target", target, stdin=PIPE) as process:
        await eventually(lambda: out.exists() and out.stat().st_size, within=15)
        await typed(process, "draw me a ball\n\n")
        await typed(process, f"{BLUE}\n")
        result = await ended(process)
    assert (result.code, result.out) == (0, ""), result.err
    frames = frames_of(out)
    assert len(frames) == 48
    assert read(frames[:4]) == [parse(RED)] * 4
    last = read(frames[-4:])
    assert all((c.colour, c.shape) == (Colour.BLUE, Shape.SQUARE) for c in last)
    said = result.err.splitlines()
    assert said[0].startswith("prompt 1 rejected: ") and 'must be "a"' in said[0]
    assert "prompt 2 completed with chunk" in said[2]
    assert said[-1] == f"wrote {out} · 48 frames"


async def test_a_film_in_json(target: str, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "film.mp4"))
    arguments = ("live", RED, *out, "--frames", "24", "--json", "-q", "--target", target)
    result = await omni(*arguments, stdin=f"draw me a ball\n{BLUE}\n")
    assert (result.code, result.err) == (0, "")
    records = [json.loads(line) for line in result.out.splitlines()]
    assert (records[0]["event"], records[-1]["event"]) == ("Accepted", "Finished")
    changes = [one for one in records if one["event"] == "EventChanged"]
    assert [one["error"]["code"] for one in changes if one["error"]] == ["INVALID_ARGUMENT"]
    assert sum(one["frame_count"] for one in records if one["event"] == "VideoChunk") == 24
    assert (await omni("live", "--json", "--target", target)).code == 2


async def test_ctrl_c_ends_a_film_without_an_end(
    target: str, server: Server, tmp_path: Path
) -> None:
    out = tmp_path / "film.mp4"
    async with started("live", RED, "--out", str(out), "--target", target) as process:
        await eventually(lambda: out.exists() and out.stat().st_size > 3000, within=15)
        process.send_signal(signal.SIGINT)
        result = await ended(process)
    assert result.code == 0, result.err
    await freed(server)
    assert result.err == f"wrote {out} · {len(frames_of(out))} frames\n"


async def test_a_film_on_a_terminal_is_drawn_and_takes_prompts(target: str) -> None:
    master, slave = pty.openpty()
    shown = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(master, lambda: shown.extend(os.read(master, 1 << 16)))
    try:
        arguments = ("live", RED, "--frames", "72", "--target", target)
        async with started(*arguments, stdin=PIPE, stdout=slave) as process:
            await eventually(lambda: "▀".encode() in shown, within=15)
            await typed(process, f"{BLUE}\n")
            await eventually(lambda: b"prompt 1 completed with chunk" in shown, within=10)
            process.send_signal(signal.SIGINT)
            code = await asyncio.wait_for(process.wait(), 10)
    finally:
        loop.remove_reader(master)
        os.close(master)
        os.close(slave)
    assert code == 0
    assert shown.startswith(b"\x1b[2J\x1b[H")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "no terminal"),
        (("--out", "film.avi"), 2, "must be a .mp4 file"),
        (("--out", "nowhere/film.mp4"), 2, "cannot write there"),
        (("--out", "OUT", "--pipeline", "nope"), 3, "no pipeline 'nope'"),
        (("--out", "OUT", "--pipeline", "echo"), 2, "no film that can be steered"),
        (("a ball", "--out", "OUT"), 2, "prompt.text"),
        (("--out", "OUT", "--set", "painter.fps=900"), 2, "stage_params[0].diffusion.fps"),
        (("--out", "OUT", "--target", "127.0.0.1:1", "--timeout", "5"), 4, "start one with"),
    ],
)
async def test_what_goes_wrong_is_said(
    target: str, tmp_path: Path, arguments: Sequence[str], code: int, says: str
) -> None:
    given = [str(tmp_path / "x.mp4") if argument == "OUT" else argument for argument in arguments]
    result = await omni("live", "--target", target, *given)
    assert (result.code, says in result.err) == (code, True), result.err


def test_two_pixels_share_a_cell() -> None:
    red, green, black = b"\xff\0\0", b"\0\xff\0", b"\0\0\0"
    frame = red + green + red + red + green + green
    cells = [(s.text, s.style) for s in half_blocks(frame, 2, 3) if s.style is not None]

    def pair(style: Any) -> tuple[bytes, bytes]:
        return bytes(style.color.triplet), bytes(style.bgcolor.triplet)

    assert [(text, pair(style)) for text, style in cells] == [
        ("▀", (red, red)),
        ("▀", (green, red)),
        ("▀▀", (green, black)),
    ]
    doubled = [s.text for s in half_blocks(frame, 2, 3, scale=2)]
    assert doubled == ["▀▀", "▀▀", "\n", "▀▀▀▀", "\n", "▀▀▀▀", "\n"]
