"""Any diffusers pipeline as a stage: a picture family and a film family, both tiny and drawn at
random, over gRPC and alone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import grpc
import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from omni_grpc.config import ServerConfig
from omni_grpc.errors import InvalidField, NotSupported, StageError
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.replica import ReplicaStatistics
from omni_grpc.server import Server
from omni_grpc.stages.base import Inputs
from omni_grpc.stages.diffusers import DiffusersStage
from omni_grpc.stages.diffusers_model import Adapter, DiffusersModel, Drawing
from omni_grpc.types import DiffusionParams, Prompt, StageOutput, Tensors, Text, TextDelta
from omni_grpc.v1 import params_pb2
from tests.models import tiny_diffusers
from tests.support import (
    Response,
    ask,
    client,
    collect,
    events,
    eventually,
    freed,
    picture,
    pipeline,
    refusal,
    stub_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    # Of diffusers itself, beside numpy 2.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

LONG = 5000
"""Steps that nobody waits for."""
PROMPT = "a red ball on the lawn"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks as small as these lose by every thread more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folders(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny pipelines."""
    root = tmp_path_factory.mktemp("diffusers")
    image = tiny_diffusers.build_image(root / "image")
    video = tiny_diffusers.build_video(root / "video")
    return {
        "image": image,
        "video": video,
        "packed": tiny_diffusers.build_packed(root / "packed"),
        "lora": tiny_diffusers.build_lora(video, root / "lora"),
    }


@pytest.fixture(scope="module")
async def studio(folders: dict[str, Path]) -> AsyncIterator[Server]:
    """A server of pipelines `image` and `video`."""
    pipelines = [
        pipeline(
            f"""
            name: {kind}
            guidance: true
            stages:
              - name: {kind}
                engine: diffusers
                model: {folders[kind]}
                threads: 1
                engine_args: {{max_steps: {LONG}, max_side: 128, max_frames: 9}}
                defaults: {{steps: 3, width: 64, height: 48, {frames}guidance_scale: 4}}
                output: {kind}
            """
        )
        for kind, frames in (("image", ""), ("video", "frames: 5, fps: 8, "))
    ]
    server = Server(ServerConfig(port=0), pipelines)
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=0)


@pytest.fixture
async def stub(studio: Server) -> AsyncIterator[Any]:
    """A client of `studio`, which holds nothing when the test is over."""
    async with client(studio) as channel:
        yield stub_of(channel)
    await freed(studio, within=5)


def request(
    kind: str = "image", text: str = PROMPT, negative: str | None = None, **values: Any
) -> Any:
    """A request for a picture or a film."""
    params = params_pb2.DiffusionParams(**values)
    prompt = {"text": text} | ({} if negative is None else {"negative_text": negative})
    asked = [params_pb2.StageParams(stage=kind, diffusion=params)]
    return ask(prompt=prompt, pipeline=kind, stage_params=asked)


def pixels(responses: Sequence[Response]) -> np.ndarray:
    """The picture that came."""
    with Pillow.open(io.BytesIO(picture(responses))) as image:
        return np.asarray(image)


def film(responses: Sequence[Response]) -> bytes:
    """The film that came."""
    return b"".join(r.output.video.data for r in responses)


def load(server: Server, stage: str) -> ReplicaStatistics:
    """The stage's load at its last heartbeat."""
    (found,) = [s for s in server.engine.load() if s.stage == stage]
    return found.replicas[0].load


async def test_a_prompt_becomes_a_picture_with_progress_and_usage(stub: Any) -> None:
    responses = await collect(stub, request(seed=1, steps=4))
    form = responses[0].accepted.outputs[0].image
    assert (form.mime_type, form.width, form.height) == ("image/png", 64, 48)
    assert pixels(responses).shape == (48, 64, 3)
    progress = [r.progress for r in responses if r.WhichOneof("event") == "progress"]
    assert (progress[-1].step, progress[-1].total_steps) == (4, 4)
    assert responses[-1].finished.usage.steps == 4
    assert "output" in events(responses)


async def test_what_is_set_decides_the_picture(stub: Any) -> None:
    async def drawn(text: str = PROMPT, negative: str | None = None, **values: Any) -> bytes:
        return picture(
            await collect(stub, request("image", text, negative, **{"seed": 1, **values}))
        )

    first = await drawn()
    assert first == await drawn() == await drawn(guidance_scale=4, steps=3)
    others = [
        await drawn(seed=2),
        await drawn(text="seven blue owls"),
        await drawn(negative="seven blue owls"),
        await drawn(guidance_scale=1),
        await drawn(steps=4),
        await drawn(scheduler="EulerDiscreteScheduler"),
        await drawn(width=80),
    ]
    assert len({first, *others}) == 8
    assert first == await drawn(), "a scheduler holds for its own request only"


@pytest.mark.parametrize(
    ("kind", "values", "field", "says"),
    [
        ("image", {"width": 40}, "width", "multiple of 16"),
        ("video", {"height": 56}, "height", "multiple of 16"),
        ("image", {"width": 1024}, "width", "from 1 to 128"),
        ("image", {"steps": 0}, "steps", "1 or more"),
        ("image", {"steps": 10**6}, "steps", f"from 1 to {LONG}"),
        ("image", {"guidance_scale": float("nan")}, "guidance_scale", "finite"),
        ("image", {"scheduler": "Magic"}, "scheduler", "EulerDiscreteScheduler"),
        ("video", {"scheduler": "DDIMScheduler"}, "scheduler", "UniPCMultistepScheduler"),
        ("image", {"frames": 5}, "frames", "no such setting"),
        ("image", {"fps": 5}, "fps", "no such setting"),
        ("video", {"frames": 6}, "frames", "multiple of 4, and one"),
        ("video", {"frames": 101}, "frames", "from 1 to 9"),
        ("video", {"fps": 1000}, "fps", "from 1 to 240"),
        ("video", {"output_mime_type": "image/png"}, "output_mime_type", "video/mp4"),
    ],
)
async def test_a_wrong_parameter_is_named(
    stub: Any, kind: str, values: dict[str, Any], field: str, says: str
) -> None:
    error = await refusal(stub, request(kind, **values))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    (path, description), *more = error.violations.items()
    assert path == f"stage_params[0].diffusion.{field}" and says in description and not more


async def test_a_prompt_whose_end_would_be_cut_off_is_refused(stub: Any) -> None:
    error = await refusal(stub, request(text="x" * 400))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert "300" in error.message


async def test_a_negative_text_that_would_not_act_is_refused(stub: Any) -> None:
    error = await refusal(stub, request(negative="owls", guidance_scale=1))
    assert list(error.violations) == ["prompt.negative_text"]


@pytest.mark.parametrize("kind", ["image", "video"])
async def test_cancel_leaves_the_loop_at_the_next_step(
    studio: Server, stub: Any, kind: str
) -> None:
    call = stub.AddRequest(request(kind, steps=LONG))
    async for response in call:
        if response.WhichOneof("event") == "progress":
            break
    call.cancel()
    await freed(studio, within=2)
    assert film(await collect(stub, request(kind))) or kind == "image"


async def test_requests_take_turns_and_one_that_waits_is_gone_at_once(
    studio: Server, stub: Any
) -> None:
    first = stub.AddRequest(request(steps=LONG))
    async for response in first:
        if response.WhichOneof("event") == "progress":
            break
    waits = [stub.AddRequest(request(steps=100)) for _ in range(2)]
    await eventually(lambda: load(studio, "image").own.waiting == 2, within=3)
    assert 200 < (load(studio, "image").own.work_left or 0) < LONG + 200
    waits[0].cancel()
    await eventually(lambda: load(studio, "image").running == 2, within=1)
    first.cancel()
    responses = [response async for response in waits[1]]
    assert responses[-1].finished.usage.steps == 100


@pytest.mark.parametrize("kind", ["image", "video"])
async def test_previews_come_where_asked(stub: Any, kind: str) -> None:
    responses = await collect(stub, request(kind, steps=4, preview_interval=4))
    (preview,) = [r.progress.preview for r in responses if r.progress.HasField("preview")]
    assert (preview.mime_type, preview.width, preview.height) == ("image/png", 64, 48)
    with Pillow.open(io.BytesIO(preview.data)) as image:
        assert image.size == (64, 48)


async def test_a_preview_of_the_last_step_is_the_picture(stub: Any) -> None:
    responses = await collect(stub, request(steps=3, preview_interval=3, seed=1))
    (preview,) = [r.progress.preview for r in responses if r.progress.HasField("preview")]
    with Pillow.open(io.BytesIO(preview.data)) as image:
        difference = np.asarray(image).astype(int) - pixels(responses)
    assert abs(difference).max() <= 1


async def test_a_prompt_becomes_a_film(stub: Any) -> None:
    def drawn(mime_type: str) -> Any:
        return collect(stub, request("video", seed=1, fps=12, output_mime_type=mime_type))

    coded, raw, values = [await drawn(kind) for kind in ("video/mp4", "video/x-raw-rgb", "tensor")]
    form = coded[0].accepted.outputs[0].video
    assert (form.mime_type, form.width, form.height, form.fps) == ("video/mp4", 64, 48, 12)
    assert [r.finished.usage.frames for r in (coded[-1], raw[-1])] == [5, 5]
    shown = np.frombuffer(film(raw), np.uint8).reshape(5, 48, 64, 3)
    with av.open(io.BytesIO(film(coded)), "r") as container:
        assert container.streams.video[0].average_rate == 12
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    assert len(frames) == 5 and abs(np.stack(frames).astype(int) - shown).mean() < 12
    array = np.frombuffer(b"".join(r.output.tensor.data for r in values), "<f4")
    assert (np.round(array.reshape(5, 3, 48, 64) * 255) == np.moveaxis(shown, -1, -3)).all()


# ------------------------------------------------------------ without a server


def spec(model: Path, **engine_args: Any) -> StageSpec:
    """A stage on the CPU."""
    return StageSpec("alone", "painter", 0, "diffusers", str(model), "cpu", engine_args)


async def outputs(stage: DiffusersStage, task: Task, *feeds: Feed) -> list[StageOutput]:
    """All that a stage makes of a task."""
    inputs = Inputs()
    for feed in (*feeds, Feed(task.id, end=True)):
        inputs.put(feed)
    prepared = await stage.prepare(task)
    return [output async for output in stage.run(task, prepared, inputs)]


async def test_a_lora_changes_what_is_drawn(folders: dict[str, Path]) -> None:
    drawing = Drawing(PROMPT, steps=2, guidance=4.0, width=32, height=32, frames=1, seed=1)
    drawn = []
    for scale in (None, 0.0, 1.0):
        model = await asyncio.to_thread(DiffusersModel, str(folders["video"]), "cpu", "float32")
        if scale is not None:
            model.load_adapters([Adapter(str(folders["lora"]), scale)])
        drawn.append(model.draw(drawing, lambda *_: None))
    plain, off, on = drawn
    assert np.allclose(plain, off, atol=1e-6)
    assert abs(plain - on).max() > 0.01


async def test_latents_in_a_row_are_previewed_too(folders: dict[str, Path]) -> None:
    model = DiffusersModel(str(folders["packed"]), "cpu", "float32")
    assert model.warm_up() and model.multiple == 2 and not model.guided_by_negative
    drawing, seen = Drawing(PROMPT, steps=2, width=32, height=48, seed=1), []
    drawn = model.draw(drawing, lambda *step: seen.append(model.glimpse(step[2], drawing)))
    assert drawn.shape == (3, 48, 32) and np.allclose(seen[-1], drawn, atol=1e-5)


async def test_negative_text_is_refused_where_guidance_is_distilled(
    folders: dict[str, Path],
) -> None:
    stage = DiffusersStage(spec(folders["packed"]))
    await stage.load()
    prompt = Prompt(Text(PROMPT), negative_text="owls")
    with pytest.raises(NotSupported) as caught:
        await stage.prepare(Task(1, "r", DiffusionParams(guidance_scale=3.5), 60, prompt))
    await stage.close()
    assert [v.field for v in caught.value.violations] == ["prompt.negative_text"]


async def test_values_that_are_no_numbers_are_no_picture(folders: dict[str, Path]) -> None:
    model = DiffusersModel(str(folders["image"]), "cpu", "float32")
    # As an autoencoder gives in half precision, when it runs over.
    torch.nn.init.constant_(model.pipe.vae.decoder.conv_out.bias, float("nan"))
    with pytest.raises(ArithmeticError, match="dtype"):
        model.draw(Drawing(PROMPT, width=32, height=32), lambda *_: None)


async def test_a_stage_before_gives_the_prompt(folders: dict[str, Path]) -> None:
    stage = DiffusersStage(spec(folders["image"], lora=[], scheduler="DDIMScheduler"))
    facts = await stage.load()
    assert facts.params is not None and "preview_interval" in facts.params
    params = DiffusionParams(steps=2, width=32, height=32, seed=1, output_mime_type="tensor")
    whole = await outputs(stage, Task(1, "r", params, 60, Prompt(Text(PROMPT))))
    parts = [Feed(2, payload=TextDelta(text)) for text in (PROMPT[:5], PROMPT[5:])]
    pieces = await outputs(stage, Task(2, "r", params, 60, streaming=True), *parts)
    nothing = await outputs(stage, Task(3, "r", params, 60, streaming=True))
    with pytest.raises(StageError):
        # Too long, and not the client's fault.
        await outputs(stage, Task(4, "r", params, 60, Prompt(Text("x" * 400)), streaming=True))
    await stage.close()
    first, second = (next(o.payload for o in out if o.payload) for out in (whole, pieces))
    assert isinstance(first, Tensors) and first == second
    assert [bool(output.finish) for output in nothing] == [True]


@pytest.mark.parametrize(
    ("engine_args", "says"),
    [({"scheduler": "Magic"}, "does not fit"), ({"dtype": "float99"}, "float99")],
)
async def test_an_engine_argument_that_is_wrong_fails_the_start(
    folders: dict[str, Path], engine_args: dict[str, Any], says: str
) -> None:
    stage = DiffusersStage(spec(folders["image"], **engine_args))
    with pytest.raises((ValueError, AttributeError), match=says):
        await stage.load()
    await stage.close()


async def test_an_unknown_engine_argument_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="knows no guidance"):
        DiffusersStage(spec(folders["image"], guidance=3))


async def test_a_pipelines_own_refusal_names_the_field(folders: dict[str, Path]) -> None:
    stage = DiffusersStage(spec(folders["video"]))
    await stage.load()
    stage._model.refusal = lambda drawing: "`num_frames` is not what I like"  # type: ignore[method-assign]
    with pytest.raises(InvalidField) as caught:
        await stage.prepare(Task(1, "r", DiffusionParams(), 60, Prompt(Text(PROMPT))))
    await stage.close()
    assert caught.value.violations[0].field == "params.frames"
