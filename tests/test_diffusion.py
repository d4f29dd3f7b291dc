"""Pictures over gRPC: pipeline `shapes`, its denoise steps shared by all requests, and what it
refuses."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import yaml
from PIL import Image as Pillow

from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline
from omni_grpc.ipc import StageSpec
from omni_grpc.pipelines.bridges import BridgeContext
from omni_grpc.replica import ReplicaStatistics
from omni_grpc.server import Server
from omni_grpc.stages.diffusion import DiffusionStage
from omni_grpc.stages.painter.captions import CAPTIONS, HELD_OUT, Caption
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.types import Payload, Prompt, Text, TextDelta
from omni_grpc.v1 import info_pb2, output_pb2, params_pb2, service_pb2
from tests.models import tiny_painter
from tests.support import (
    ROOT,
    Response,
    ask,
    client,
    collect,
    events,
    eventually,
    freed,
    picture,
    refusal,
    started,
    stub_of,
)

CAPTION = "a large red circle on a white background"
OTHER = "a small blue cross on a gray background"
LIMIT = 5000
"""Steps: enough for a request that is still under way when another comes and goes."""
LEVELS = 1
"""By how many levels of 8 bits a picture may differ with the batch that it was drawn in: float32
sums in another order move values by less than 1e-3 of 2, which can tip a rounding."""


class Opposed:
    """A bridge to a stage that takes pairs: what is left of "but not" is to be drawn, what is right
    of it is to be drawn away from."""

    def __init__(self, context: BridgeContext) -> None:
        self._text = ""

    def push(self, payload: Payload) -> Iterable[Prompt]:
        if isinstance(payload, TextDelta):
            self._text += payload.text
        return ()

    def finish(self) -> Iterable[Prompt]:
        wanted, _, unwanted = self._text.partition(" but not ")
        yield Prompt(Text(wanted), negative_text=unwanted or None)


@pytest.fixture(scope="module")
async def painting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """The pipeline `shapes` with small weights of chance: how it behaves, not what it draws; and
    `told`, whose painter has a stage before it."""
    weights = tiny_painter.build(tmp_path_factory.mktemp("painter") / "weights.safetensors")
    shapes = yaml.safe_load((ROOT / "omni_grpc/pipelines/shapes.yaml").read_text())
    (painter,) = shapes["stages"]
    painter["model"], painter["engine_args"]["max_steps"] = str(weights), LIMIT
    teller = {"name": "teller", "engine": "fake", "engine_args": {"modality": "text"}}
    bridge = {"inputs": ["teller"], "bridge": f"{__name__}:Opposed"}
    told = {"name": "told", "stages": [teller, painter | bridge]}
    pipelines = [PipelineConfig.model_validate(content) for content in (shapes, told)]
    server = Server(ServerConfig(port=0), pipelines)
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


@pytest.fixture
async def stub(painting: Server) -> AsyncIterator[Any]:
    """A client of `painting`, which holds nothing when the test is over."""
    async with client(painting) as channel:
        yield stub_of(channel)
    await freed(painting)


def draw(stage: str = "painter", **values: Any) -> list[params_pb2.StageParams]:
    """Parameters of a diffusion stage."""
    return [params_pb2.StageParams(stage=stage, diffusion=params_pb2.DiffusionParams(**values))]


def pixels(responses: Sequence[Response]) -> np.ndarray:
    """The picture that came, [height, width, 3], as signed numbers."""
    with Pillow.open(io.BytesIO(picture(responses))) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def progress(responses: Sequence[Response]) -> list[output_pb2.Progress]:
    """All signs of progress."""
    return [r.progress for r in responses if r.WhichOneof("event") == "progress"]


def replica(server: Server) -> ReplicaStatistics:
    """The painter's load, as old as its last heartbeat."""
    (painter,) = [stage for stage in server.engine.load() if stage.stage == "painter"]
    return painter.replicas[0].load


async def settled(server: Server) -> dict[str, int]:
    """The step scheduler's counters after one more heartbeat: nothing runs, so they are final."""
    begun = time.monotonic()
    await eventually(
        lambda: time.monotonic() - (replica(server).sample_age_s or 1e9) > begun + 0.05, within=5
    )
    return replica(server).own.counters


async def test_a_caption_becomes_a_picture_with_progress_and_usage(stub: Any) -> None:
    responses = await collect(stub, ask(CAPTION, stage_params=draw(steps=5, seed=1)))
    accepted, *middle, done = responses
    form = accepted.accepted.outputs[0].image
    assert (form.mime_type, form.width, form.height) == ("image/png", 32, 32)
    assert pixels(responses).shape == (32, 32, 3)
    seen = [(p.stage, p.step, p.total_steps) for p in progress(responses)]
    assert seen[-1] == ("painter", 5, 5), seen
    assert [step for _, step, _ in seen] == sorted({step for _, step, _ in seen})
    assert events(middle)[-1] == "output" and middle[-1].output.image.last
    assert done.finished.usage.steps == 5
    # S4: stage 0 is diffusion, there is nothing to tokenize.
    assert done.finished.timings.preprocess_ms < 100
    assert done.finished.finish_reasons[0].reason == output_pb2.FINISH_REASON_COMPLETE


async def test_a_seed_decides_the_picture_and_none_is_random(stub: Any) -> None:
    def request(**values: Any) -> Any:
        return collect(stub, ask(CAPTION, stage_params=draw(steps=3, **values)))

    once, again, other, chance, luck = [
        picture(r)
        for r in await asyncio.gather(
            request(seed=7), request(seed=7), request(seed=2**64 - 1), request(), request()
        )
    ]
    assert once == again
    assert len({once, other, chance, luck}) == 4


async def test_a_picture_does_not_depend_on_who_shared_its_batches(stub: Any) -> None:
    params: list[dict[str, Any]] = [
        {"seed": n, "steps": 4 + n % 5, "guidance_scale": 1.0 + n % 3} for n in range(12)
    ]
    captions = [str(caption) for caption in CAPTIONS[:: len(CAPTIONS) // 12]]
    requests = [ask(c, stage_params=draw(**p)) for c, p in zip(captions, params, strict=False)]
    together = await asyncio.gather(*(collect(stub, request) for request in requests))
    alone = [await collect(stub, request) for request in requests]
    for ours, theirs in zip(together, alone, strict=True):
        assert abs(pixels(ours) - pixels(theirs)).max() <= LEVELS


async def test_requests_share_ticks(painting: Server, stub: Any) -> None:
    before, steps = await settled(painting), 300
    requests = [ask(CAPTION, stage_params=draw(steps=steps, seed=n)) for n in range(10)]
    await asyncio.gather(*(collect(stub, request) for request in requests))
    after = await settled(painting)
    ticks, batches = (after[name] - before[name] for name in ("ticks", "batches"))
    assert after["steps"] - before["steps"] == 10 * steps
    assert steps <= ticks < 2 * steps, "ticks, not requests x steps"
    assert batches == ticks
    assert after["largest_batch"] >= 10


async def test_who_comes_later_does_not_wait_for_who_came_before(stub: Any) -> None:
    long = await started(
        stub, text=CAPTION, until="progress", stage_params=draw(steps=LIMIT, seed=1)
    )
    responses = await collect(stub, ask(OTHER, stage_params=draw(steps=3, seed=2)))
    assert responses[-1].finished.usage.steps == 3
    step = (await anext(aiter(long))).progress.step
    assert 0 < step < LIMIT
    long.cancel()


async def test_cancel_ends_the_steps(painting: Server, stub: Any) -> None:
    long = await started(
        stub, text=CAPTION, until="progress", stage_params=draw(steps=LIMIT, seed=1)
    )
    long.cancel()
    await freed(painting, within=2)
    before = await settled(painting)
    await asyncio.sleep(0.2)
    assert await settled(painting) == before


async def test_work_left_is_told(painting: Server, stub: Any) -> None:
    def work() -> float:
        return replica(painting).own.work_left or 0.0

    long = await started(
        stub, text=CAPTION, until="progress", stage_params=draw(steps=LIMIT, seed=1)
    )
    await eventually(lambda: 0 < work() < LIMIT, within=3)
    long.cancel()
    await eventually(lambda: work() == 0, within=3)


async def test_previews_come_where_asked(stub: Any) -> None:
    asked = draw(steps=6, seed=1, preview_interval=6)
    shown = progress(await collect(stub, ask(CAPTION, stage_params=asked)))
    (preview,) = [p.preview for p in shown if p.HasField("preview")]
    with Pillow.open(io.BytesIO(preview.data)) as image:
        assert (image.format, image.size) == ("PNG", (32, 32))
    assert preview.last and shown[-1].HasField("preview")
    none = progress(await collect(stub, ask(CAPTION, stage_params=draw(steps=6, seed=1))))
    assert none and not any(p.HasField("preview") for p in none)


@pytest.mark.parametrize(
    ("mime_type", "form", "loss"),
    # The weights are noise, and so is the picture: hard for JPEG.
    [("image/png", "PNG", 0), ("image/jpeg", "JPEG", 20), ("image/webp", "WEBP", 0)],
)
async def test_the_client_chooses_the_file_format(
    stub: Any, mime_type: str, form: str, loss: float
) -> None:
    def request(kind: str) -> Any:
        asked = draw(steps=4, seed=3, output_mime_type=kind)
        return collect(stub, ask(CAPTION, stage_params=asked))

    responses = await request(mime_type)
    assert responses[0].accepted.outputs[0].image.mime_type == mime_type
    (part,) = [r.output.image for r in responses if r.WhichOneof("event") == "output"]
    assert (part.mime_type, part.width, part.height, part.last) == (mime_type, 32, 32, True)
    with Pillow.open(io.BytesIO(part.data)) as image:
        assert image.format == form
    assert abs(pixels(responses) - pixels(await request("image/png"))).mean() <= loss


async def test_raw_values_are_the_picture_before_it_is_rounded(stub: Any) -> None:
    asked = draw(steps=4, seed=3, output_mime_type="tensor")
    responses = await collect(stub, ask(CAPTION, stage_params=asked))
    assert responses[0].accepted.outputs[0].WhichOneof("format") is None
    (part,) = [r.output.tensor for r in responses if r.WhichOneof("event") == "output"]
    assert (part.name, list(part.shape), part.last) == ("image", [3, 32, 32], True)
    values = np.frombuffer(part.data, "<f4").reshape(3, 32, 32)
    file = await collect(stub, ask(CAPTION, stage_params=draw(steps=4, seed=3)))
    assert abs((values * 255).transpose(1, 2, 0) - pixels(file)).max() <= 0.5 + 255e-3


async def test_guidance_and_negative_text_change_the_picture(stub: Any) -> None:
    async def drawn(negative: str | None, **values: Any) -> bytes:
        prompt = {"text": CAPTION} | ({} if negative is None else {"negative_text": negative})
        asked = draw(steps=4, seed=5, **values)
        return picture(await collect(stub, ask(prompt=prompt, stage_params=asked)))

    default, same, empty = await drawn(None), await drawn(None, guidance_scale=4), await drawn("")
    assert default == same == empty, "the pipeline's default is guidance against no caption"
    plain, away, stronger = (
        await drawn(None, guidance_scale=1),
        await drawn(OTHER),
        await drawn(OTHER, guidance_scale=8),
    )
    assert len({default, plain, away, stronger}) == 4


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"width": 33}, "width", "multiple of 32"),
    ({"height": 64}, "height", "must be 32"),
    ({"steps": 0}, "steps", "1 or more"),
    ({"steps": 10**6}, "steps", f"from 1 to {LIMIT}"),
    ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
    ({"guidance_scale": 0.5}, "guidance_scale", "1 or more"),
    ({"guidance_scale": 1e9}, "guidance_scale", "from 1 to 100"),
    ({"scheduler": "ddim"}, "scheduler", "euler"),
    ({"frames": 2}, "frames", "no such setting"),
    ({"fps": 12.0}, "fps", "no such setting"),
    ({"output_mime_type": "image/gif"}, "output_mime_type", "image/webp"),
]


@pytest.mark.parametrize(
    ("values", "field", "says"),
    WRONG,
    ids=[f"{next(iter(v))}-{n}" for n, (v, *_) in enumerate(WRONG)],
)
async def test_a_wrong_parameter_is_named(
    stub: Any, values: dict[str, Any], field: str, says: str
) -> None:
    error = await refusal(stub, ask(CAPTION, stage_params=draw(**values)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    (path, description), *more = error.violations.items()
    assert path == f"stage_params[0].diffusion.{field}" and says in description and not more


@pytest.mark.parametrize(
    ("prompt", "path", "says"),
    [
        ({"text": "a huge red circle on a white background"}, "prompt.text", '"small", "large"'),
        ({"text": "a large red circle"}, "prompt.text", '"on"'),
        ({"text": CAPTION, "negative_text": "ugly"}, "prompt.negative_text", '"a"'),
    ],
)
async def test_what_is_no_caption_is_refused_with_what_is_expected(
    stub: Any, prompt: dict[str, str], path: str, says: str
) -> None:
    error = await refusal(stub, ask(prompt=prompt))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert says in error.violations[path] and "a caption is like" in error.violations[path]


async def test_negative_text_without_guidance_is_refused(stub: Any) -> None:
    error = await refusal(
        stub,
        ask(prompt={"text": CAPTION, "negative_text": OTHER}, stage_params=draw(guidance_scale=1)),
    )
    assert (error.code, list(error.violations)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        ["prompt.negative_text"],
    )


async def test_a_pair_of_captions_from_a_stage_before_is_drawn_as_from_the_client(
    stub: Any,
) -> None:
    asked = draw(steps=4, seed=5)
    given = ask(prompt={"text": CAPTION, "negative_text": OTHER}, stage_params=asked)
    told = ask(f"{CAPTION} but not {OTHER}", pipeline="told", stage_params=asked)
    alone = ask(CAPTION, pipeline="told", stage_params=asked)
    pictures = [picture(await collect(stub, request)) for request in (given, told, alone)]
    assert pictures[0] == pictures[1] != pictures[2]


async def test_a_stage_before_that_gives_no_caption_is_not_the_clients_fault(stub: Any) -> None:
    error = await refusal(stub, ask("draw me a big red ball", pipeline="told"))
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "STAGE_ERROR")
    assert not error.violations


async def test_negative_text_is_refused_where_the_pipeline_has_no_guidance(stub: Any) -> None:
    prompt = {"text": CAPTION, "negative_text": OTHER}
    error = await refusal(stub, ask(prompt=prompt, pipeline="told"))
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_SUPPORTED")
    assert list(error.violations) == ["prompt.negative_text"]


async def test_guidance_is_told_as_a_capability(stub: Any) -> None:
    info = await stub.GetServerInfo(service_pb2.GetServerInfoRequest())
    told = {p.name: p.capabilities["guidance"] for p in info.pipelines}
    assert told == {
        "shapes": info_pb2.CAPABILITY_SUPPORTED,
        "told": info_pb2.CAPABILITY_UNSUPPORTED,
    }


async def test_a_stage_without_weights_says_which_file_it_misses(tmp_path: Path) -> None:
    spec = StageSpec("alone", "painter", 0, "diffusion", str(tmp_path / "lost"), "cpu")
    stage = DiffusionStage(spec)
    with pytest.raises(FileNotFoundError, match="lost"):
        await stage.load()
    await stage.close()


# ------------------------------------------------------------ what it draws

SEEN = [caption for caption in CAPTIONS if caption not in HELD_OUT]


@pytest.fixture(scope="module")
async def shapes() -> AsyncIterator[Server]:
    """The pipeline `shapes` as it is."""
    server = Server(ServerConfig(port=0), [load_pipeline("shapes")])
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


async def right(server: Server, captions: Sequence[Caption], **values: Any) -> float:
    """The share of captions whose pictures show them, in all four attributes."""
    async with client(server) as channel:
        stub, slots = stub_of(channel), asyncio.Semaphore(32)

        async def drawn(place: int, caption: Caption) -> np.ndarray:
            async with slots:
                asked = draw(seed=place, **values)
                return pixels(await collect(stub, ask(str(caption), stage_params=asked)))

        pictures = await asyncio.gather(*(drawn(n, c) for n, c in enumerate(captions)))
    values_of = torch.tensor(np.stack(pictures)).movedim(-1, 1) / 127.5 - 1
    shown = Judge().read(values_of.float()).captions
    return sum(a == b for a, b in zip(shown, captions, strict=True)) / len(captions)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_drawings_show_their_captions(shapes: Server) -> None:
    share = await right(shapes, SEEN)
    new = await right(shapes, HELD_OUT)
    assert share >= 0.95 and new >= 0.9, f"{share:.1%} of what training saw, {new:.1%} of the rest"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_guidance_makes_drawings_right(shapes: Server) -> None:
    plain = await right(shapes, SEEN[::4], guidance_scale=1)
    guided = await right(shapes, SEEN[::4], guidance_scale=4)
    assert guided > plain, f"{guided:.1%} with guidance, {plain:.1%} without"
