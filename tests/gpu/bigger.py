"""Bigger models by shape: each starts, answers and stops. A 7 B language model and a
vision-language model of vLLM, a DiT of diffusers; what they say and draw means nothing."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from omni_grpc.v1 import common_pb2
from tests.gpu.asking import CPU, Place, ask, drawn, language, outcomes
from tests.gpu.serving import Checks, Server, calling, stopped, used_mib
from tests.gpu.shapes import BIG, SMALL, Shapes, build_llm, build_vlm, building_dit

START_S = 200.0
"""Longest start: all of it has to end before the machine is taken away."""
BUILD_S = 150.0
CAPTION = "a large red circle on a white background"
COLOURS = ("red", "green", "blue", "olive", "navy", "teal", "maroon", "black")
STEPS = 8
EAGER = {"dtype": "bfloat16", "enforce_eager": True}
"""No graphs: they make starts longer, and are not what is checked."""


async def bigger(checks: Checks, model: str, place: Place) -> None:
    """All three, whatever becomes of each."""
    small = place is CPU
    shapes = SMALL if small else BIG
    with tempfile.TemporaryDirectory(prefix="shapes-") as root:
        started = time.monotonic()
        builder = building_dit(Path(root, "dit"), small=small)
        try:
            for name, part in (
                ("LLM", large_language(checks, Path(model), shapes, place, Path(root, "llm"))),
                ("VLM", seeing(checks, Path(model), shapes, place, Path(root, "vlm"))),
                ("DiT", drawing(checks, builder, started, shapes, place, Path(root, "dit"))),
            ):
                try:
                    await part
                except Exception as error:
                    checks.note(name, False, error=f"{type(error).__name__}: {error}")
        finally:
            builder.kill()
            builder.wait()


@asynccontextmanager
async def serving(checks: Checks, name: str, pipeline: dict[str, Any]) -> AsyncIterator[Any]:
    """A stub of a server of this pipeline, which is stopped in peace. Notes how it started and how
    it stopped."""
    with Server(pipeline) as server:
        port = await asyncio.to_thread(server.port, START_S)
        (stage,) = pipeline["stages"]
        checks.note(
            f"{name} starts", True, ready_s=server.age(), used_mib=used_mib(),
            share=stage.get("memory_fraction"),
        )  # fmt: skip
        async with calling(port) as stub:
            yield stub
        await stopped(checks, f"{name} stops", server)


async def streams(
    checks: Checks, name: str, stub: Any, count: int, tokens: int, **prompt: Any
) -> None:
    """So many answers at once, after a few that warm up."""
    await outcomes(stub, 4, 8, **prompt)
    started = time.monotonic()
    ends = await outcomes(stub, count, tokens, **prompt)
    rate = count * tokens / (time.monotonic() - started)
    checks.note(
        f"{name}: {count} streams x {tokens} tokens", ends == {"whole": count}, **ends,
        tokens_per_s=round(rate),
    )  # fmt: skip


async def large_language(
    checks: Checks, model: Path, shapes: Shapes, place: Place, folder: Path
) -> None:
    """Qwen2's 7 B shape."""
    build_llm(model, shapes, folder)
    pipeline = language(place, str(folder), 1, 0.3, **EAGER)
    async with serving(checks, "LLM", pipeline) as stub:
        await streams(checks, "LLM", stub, 32, 64)


async def seeing(checks: Checks, model: Path, shapes: Shapes, place: Place, folder: Path) -> None:
    """Idefics3's 8 B shape. That a picture arrives is seen by the prompt's length: weights as small
    as the made-up ones let it change nothing."""
    build_vlm(model, shapes, folder)
    # SDPA is torch's own; the other kernels for encoders may be left out of a packed vLLM.
    arguments = {"limit_mm_per_prompt": {"image": 1}, "mm_encoder_attn_backend": "TORCH_SDPA"}
    pipeline = language(place, str(folder), 1, 0.35, **EAGER, **arguments, chat=True)
    async with serving(checks, "VLM", pipeline | {"inputs": ["text", "image"]}) as stub:
        blind, seen = [await ask(stub, prompt, 16) for prompt in ({"text": "What is it?"}, look(0))]
        parts = 5 * shapes.tile
        longer = seen.prompt - blind.prompt
        checks.note(
            "VLM: a picture is in the prompt", seen.tokens == 16 and longer >= parts,
            tokens=seen.tokens, longer_by=longer, least=parts,
        )  # fmt: skip
        await streams(checks, "VLM, a picture each", stub, 32, 64, prompt=look)


def look(number: int) -> dict[str, Any]:
    """A question about a picture, another one for each number."""
    picture = Image.new("RGB", (640, 480), COLOURS[number % len(COLOURS)])
    picture.paste("white", (0, 0, 320, 10 * (number + 1)))
    file = io.BytesIO()
    picture.save(file, "PNG")
    media = {"modality": common_pb2.MODALITY_IMAGE, "data": file.getvalue()}
    return {"text": "What is it?", "media": [media]}


async def drawing(
    checks: Checks,
    builder: subprocess.Popen[str],
    started: float,
    shapes: Shapes,
    place: Place,
    folder: Path,
) -> None:
    """PixArt-Sigma by diffusers, 1.4 B, and a text encoder of 1.2 B."""
    said, _ = await asyncio.to_thread(builder.communicate, timeout=BUILD_S)
    built = builder.returncode == 0
    checks.note(
        "DiT is made", built, weights_gb=weights_gb(folder),
        since_s=round(time.monotonic() - started), **({} if built else {"error": said[-3000:]}),
    )  # fmt: skip
    if not built:
        return
    side = shapes.picture_side
    async with serving(checks, "DiT", draws(place, folder, side)) as stub:
        first, other, again = [await dot(stub, seed) for seed in (1, 2, 1)]
        good = first.size == (side, side) and first.format == "PNG"
        differ = first.tobytes() != other.tobytes()
        checks.note(
            "DiT draws", good and differ, size=first.size, format=first.format,
            seeds_differ=differ, same_again=first.tobytes() == again.tobytes(),
        )  # fmt: skip
        begun = time.monotonic()
        sizes = [p.size for p in await asyncio.gather(*(dot(stub, seed) for seed in range(4)))]
        rate = 4 / (time.monotonic() - begun)
        checks.note(
            f"DiT: 4 pictures at once, {STEPS} steps", sizes == [(side, side)] * 4,
            pictures_per_s=round(rate, 2),
        )  # fmt: skip


def weights_gb(folder: Path) -> float:
    """The size of its weights."""
    sizes = [file.stat().st_size for file in folder.rglob("*.safetensors")]
    return round(sum(sizes) / 1e9, 2)


def draws(place: Place, folder: Path, side: int) -> dict[str, Any]:
    """One stage of diffusers."""
    stage = {
        "name": "painter",
        "engine": "diffusers",
        "model": str(folder),
        **place.share(0.2),
        "environment": {"HF_HUB_OFFLINE": "1"},
        "defaults": {"steps": STEPS, "width": side, "height": side, "guidance_scale": 4.5},
        "output": "image",
    }
    return {"name": "dit", "prompts": ["text"], "guidance": True, "stages": [stage]}


async def dot(stub: Any, seed: int) -> Image.Image:
    """One picture."""
    return await drawn(stub, "dit", "painter", CAPTION, seed=seed)
