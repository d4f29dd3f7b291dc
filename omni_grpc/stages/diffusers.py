"""The stage of engine `diffusers`: any text-to-picture or text-to-film pipeline of diffusers, from
a folder.

One request at a time per replica, in order of arrival: a pipeline's call is one loop that nobody
can join midway. More at once need more replicas.

Engine arguments, all optional:

    dtype        name of a torch type, or a mapping of component ("default" for the rest) to name;
                 by default float32 on a CPU, bfloat16 elsewhere
    scheduler    class that takes the place of the pipeline's own where a request names none
    lora         LoRAs that are in force from the start: paths, or {path, scale, weight_name}
    max_steps, max_side, max_frames    the most that a request may ask for
    load_args    further arguments of DiffusionPipeline.from_pretrained"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from omni_grpc.errors import (
    InvalidField,
    NotSupported,
    PromptTooLong,
    StageError,
    Violation,
)
from omni_grpc.ipc import StageSpec, Task
from omni_grpc.params import check_honoured
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.diffusers_model import Adapter, DiffusersModel, Drawing
from omni_grpc.stages.diffusion import read_inputs
from omni_grpc.stages.encode import (
    IMAGE_TYPES,
    VIDEO_TYPES,
    Values,
    encode_film,
    encode_picture,
    encode_preview,
)
from omni_grpc.types import (
    DiffusionParams,
    Finish,
    FinishReason,
    Image,
    ImageFormat,
    Progress,
    Prompt,
    StageFacts,
    StageOutput,
    StageStatistics,
    Tensors,
    Text,
    Usage,
    Video,
    VideoFormat,
)

STEPS = 20
"""Where neither the request nor the pipeline says how many."""
FPS = 16.0
MAX_FPS = 240.0
MAX_GUIDANCE = 100.0


@dataclass(frozen=True, slots=True)
class Order:
    """A drawing, and how it is to be handed over."""

    drawing: Drawing
    preview_interval: int
    mime_type: str
    fps: float


class Interrupted(Exception):  # noqa: N818 - named after its cause, as all errors are
    """Raised inside a pipeline's loop, to leave it."""


class DiffusersStage(Stage[Order]):
    """Prompts in, pictures or films out."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        arguments = dict(spec.engine_args)
        # Its own devices are all that a replica sees, so they count from 0.
        self._device = "cuda" if spec.device.startswith("cuda") else "cpu"
        self._dtype = arguments.pop("dtype", "float32" if self._device == "cpu" else "bfloat16")
        self._scheduler: str | None = arguments.pop("scheduler", None)
        self._adapters = [
            Adapter(entry) if isinstance(entry, str) else Adapter(**entry)
            for entry in arguments.pop("lora", [])
        ]
        self._max_steps = int(arguments.pop("max_steps", 200))
        self._max_side = int(arguments.pop("max_side", 2048))
        self._max_frames = int(arguments.pop("max_frames", 257))
        self._load_args: dict[str, Any] = arguments.pop("load_args", {})
        if arguments:
            raise ValueError(f"engine 'diffusers' knows no {', '.join(arguments)}")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="diffusers")
        self._turn = asyncio.Lock()
        self._steps_left: dict[int, int] = {}
        self._running: int | None = None
        self._steps = 0

    async def load(self) -> StageFacts:
        loop = asyncio.get_running_loop()
        previews = await loop.run_in_executor(self._executor, self._load)
        self._honoured = self._honours(previews)
        return StageFacts(
            output_format=VideoFormat(VIDEO_TYPES[0])
            if self._model.video
            else ImageFormat(IMAGE_TYPES[0]),
            capacity=1,
            versions={name: metadata.version(name) for name in ("diffusers", "torch")},
            params=self._honoured,
        )

    def _load(self) -> bool:
        self._model = DiffusersModel(self.spec.model, self._device, self._dtype, **self._load_args)
        if self._scheduler is not None and self._scheduler not in self._model.schedulers:
            known = ", ".join(self._model.schedulers)
            raise ValueError(f"scheduler {self._scheduler!r} does not fit, only {known}")
        self._model.load_adapters(self._adapters)
        return self._model.warm_up()

    def _honours(self, previews: bool) -> dict[str, tuple[str, ...]]:
        model = self._model
        honoured: dict[str, tuple[str, ...]] = {"seed": (), "scheduler": tuple(model.schedulers)}
        for name, argument in (
            ("steps", "num_inference_steps"),
            ("guidance_scale", "guidance_scale"),
            ("width", "width"),
            ("height", "height"),
            ("frames", "num_frames"),
        ):
            if model.takes(argument):
                honoured[name] = ()
        if model.video:
            honoured["fps"] = ()
        if previews:
            honoured["preview_interval"] = ()
        honoured["output_mime_type"] = VIDEO_TYPES if model.video else IMAGE_TYPES
        return honoured

    # ------------------------------------------------------------ prepare

    async def prepare(self, task: Task) -> Order:
        params = task.params if isinstance(task.params, DiffusionParams) else DiffusionParams()
        check_honoured(params, self._honoured, "params")
        self._check_limits(params)
        order = self._order(params)
        return order if task.prompt is None else self._asked(task, order, task.prompt)

    def _check_limits(self, params: DiffusionParams) -> None:
        for name, most in (
            ("steps", self._max_steps),
            ("width", self._max_side),
            ("height", self._max_side),
            ("frames", self._max_frames),
            ("fps", MAX_FPS),
            ("guidance_scale", MAX_GUIDANCE),
        ):
            value = getattr(params, name)
            if value is not None and not 1 <= value <= most:
                raise InvalidField(f"params.{name}", f"must be from 1 to {most:g}")
        for name in ("width", "height"):
            if (getattr(params, name) or 0) % self._model.multiple:
                raise InvalidField(
                    f"params.{name}", f"must be a multiple of {self._model.multiple}"
                )
        group = self._model.frame_multiple
        if params.frames is not None and (params.frames - 1) % group:
            raise InvalidField("params.frames", f"must be a multiple of {group}, and one")

    def _order(self, params: DiffusionParams) -> Order:
        model = self._model
        types = VIDEO_TYPES if model.video else IMAGE_TYPES
        drawing = Drawing(
            prompt="",
            steps=params.steps or model.default("num_inference_steps") or STEPS,
            guidance=params.guidance_scale,
            width=params.width,
            height=params.height,
            frames=params.frames,
            fps=params.fps,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            scheduler=params.scheduler or self._scheduler,
        )
        return Order(
            drawing,
            preview_interval=params.preview_interval or 0,
            mime_type=params.output_mime_type or types[0],
            fps=params.fps or model.default("frame_rate") or FPS,
        )

    def _asked(self, task: Task, order: Order, prompt: Prompt) -> Order:
        try:
            return self._with_prompt(order, prompt)
        except (InvalidField, PromptTooLong) as error:
            of_params = any(v.field.startswith("params.") for v in error.violations)
            if not task.streaming or of_params:
                raise
            # Another stage wrote it: no field of the client's is wrong.
            raise StageError(f"stage {self.spec.stage!r} was given no fit prompt") from error

    def _with_prompt(self, order: Order, prompt: Prompt) -> Order:
        if not isinstance(prompt.content, Text):
            raise NotSupported("the pipeline takes text only")
        negative, guidance = prompt.negative_text, order.drawing.guidance
        if negative is not None and not self._model.guided_by_negative:
            where = Violation("prompt.negative_text", "the model takes none")
            raise NotSupported("prompt.negative_text: the model takes none", violations=(where,))
        if negative is not None and guidance == 1:
            raise InvalidField("prompt.negative_text", "has no effect at guidance scale 1")
        for text in (prompt.content.text, negative or ""):
            if excess := self._model.excess_tokens(text):
                raise PromptTooLong(f"the prompt has {excess[0]} tokens; the most is {excess[1]}")
        drawing = replace(order.drawing, prompt=prompt.content.text, negative=negative)
        if words := self._model.refusal(drawing):
            raise InvalidField(_blamed(words), words)
        return replace(order, drawing=drawing)

    # ------------------------------------------------------------ run

    async def run(self, task: Task, prepared: Order, inputs: Inputs) -> AsyncIterator[StageOutput]:
        order, steps = prepared, 0
        if task.prompt is None:
            prompt = await read_inputs(inputs)
            if prompt is None:
                yield StageOutput(finish=Finish(FinishReason.COMPLETE))
                return
            order = self._asked(task, order, prompt)
        drawn: Values | None = None
        async with aclosing(self._draw(task.id, order)) as news:
            async for new in news:
                if isinstance(new, Progress):
                    steps = new.step
                    yield StageOutput(progress=new)
                else:
                    drawn = new
        assert drawn is not None
        async with aclosing(_encoded(drawn, order, video=self._model.video)) as payloads:
            async for payload in payloads:
                yield StageOutput(payload)
        yield StageOutput(finish=Finish(FinishReason.COMPLETE), usage=Usage(steps=steps))

    async def _draw(self, task_id: int, order: Order) -> AsyncGenerator[Progress | Values, None]:
        """Progress, step by step, then what was drawn. Closing it ends the pipeline's loop at its
        next step, and returns when the thread is free."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        news: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._steps_left[task_id] = order.drawing.steps

        def on_step(step: int, total: int, latents: Any) -> None:
            if stop.is_set():
                raise Interrupted
            due = order.preview_interval and step % order.preview_interval == 0
            preview = encode_preview(self._model.glimpse(latents, order.drawing)) if due else None
            loop.call_soon_threadsafe(self._count, task_id, total - step)
            loop.call_soon_threadsafe(news.put_nowait, Progress(step, total, preview))

        try:
            async with self._turn:
                self._running = task_id
                drawing = loop.run_in_executor(
                    self._executor, self._model.draw, order.drawing, on_step
                )
                drawing.add_done_callback(lambda _: news.put_nowait(None))
                try:
                    while (progress := await news.get()) is not None:
                        yield progress
                    yield await drawing
                finally:
                    stop.set()
                    await asyncio.wait([drawing])
                    self._running = None
                    # Nobody may be left to hear of it.
                    drawing.cancelled() or drawing.exception()
        finally:
            del self._steps_left[task_id]

    def _count(self, task_id: int, steps_left: int) -> None:
        self._steps += 1
        if task_id in self._steps_left:
            self._steps_left[task_id] = steps_left

    def statistics(self) -> StageStatistics:
        waiting = len(self._steps_left) - (self._running is not None)
        work_left = float(sum(self._steps_left.values()))
        return StageStatistics(waiting, work_left, counters={"steps": self._steps})

    async def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


async def _encoded(
    drawn: Values, order: Order, *, video: bool
) -> AsyncGenerator[Image | Video | Tensors, None]:
    """What was drawn in the form that was asked for; a film part by part."""
    if not video:
        yield await asyncio.to_thread(encode_picture, drawn, order.mime_type)
        return
    parts = encode_film(drawn, order.fps, order.mime_type)
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part


def _blamed(words: str) -> str:
    """The field that a pipeline's own refusal is about."""
    for word, field in (("height", "height"), ("width", "width"), ("num_frames", "frames")):
        if word in words:
            return f"params.{field}"
    return "prompt.text"
