"""The stage of engine `diffusion`: the painter, whose requests share denoise steps.

Engine arguments: `max_batch` (pictures per call of the model), `max_running` (pictures under way),
`max_steps`. `model` is `painter`, the weights in this package, or the path of other weights."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from omni_grpc.errors import InvalidField, NotSupported, StageError
from omni_grpc.ipc import StageSpec, Task
from omni_grpc.params import check_honoured
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.encode import IMAGE_TYPES, Values, encode_picture, encode_preview
from omni_grpc.stages.painter import model as painter
from omni_grpc.stages.painter import sampler
from omni_grpc.stages.painter.captions import CAPTIONS, Caption, parse, parse_optional
from omni_grpc.stages.painter.shapes import SIDE
from omni_grpc.stages.step_scheduler import StepScheduler
from omni_grpc.types import (
    DiffusionParams,
    Finish,
    FinishReason,
    ImageFormat,
    Progress,
    Prompt,
    StageFacts,
    StageOutput,
    StageStatistics,
    Text,
    TextDelta,
    Usage,
)

MODEL = "painter"
STEPS = 20
GUIDANCE = 4.0
MAX_GUIDANCE = 100.0
"""Beyond it a picture is noise, and float32 runs out."""
HONOURED: dict[str, tuple[str, ...]] = {
    "steps": (),
    "guidance_scale": (),
    "width": (),
    "height": (),
    "seed": (),
    "scheduler": ("euler",),
    "preview_interval": (),
    "output_mime_type": IMAGE_TYPES,
}


@dataclass(frozen=True, slots=True)
class Order:
    """How a picture is to be drawn, everything decided."""

    steps: int
    guidance: float
    seed: int
    preview_interval: int
    mime_type: str


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture between two steps. `x` and `clean` [3, 32, 32], `cond` and `uncond` [4, width]."""

    x: Tensor
    clean: Tensor
    """What it looks like it will become."""
    cond: Tensor
    uncond: Tensor
    guidance: float
    times: tuple[float, ...]
    step: int = 0

    @property
    def shape(self) -> torch.Size:
        """Pictures of one size share batches, whatever their steps and guidance."""
        return self.x.shape

    @property
    def steps_left(self) -> int:
        """Steps until it is done."""
        return len(self.times) - 1 - self.step


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task's order, and the picture to begin with where the prompt is known already."""

    order: Order
    picture: Picture | None


class DiffusionStage(Stage[Prepared]):
    """Captions in, pictures out. The conditioning of a picture is the pair of its caption and its
    `negative_text`, another caption, or none: the unconditional picture."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        arguments = dict(spec.engine_args)
        self._max_batch = int(arguments.pop("max_batch", 16))
        self._max_running = int(arguments.pop("max_running", 64))
        self._max_steps = int(arguments.pop("max_steps", 200))
        if arguments:
            raise ValueError(f"engine 'diffusion' knows no {', '.join(arguments)}")
        # Its own devices are all that a replica sees, so they count from 0.
        self._device = torch.device("cuda" if spec.device.startswith("cuda") else "cpu")
        self._scheduler = StepScheduler(self._advance, self._max_batch, self._max_running)

    async def load(self) -> StageFacts:
        path = painter.WEIGHTS if self.spec.model == MODEL else Path(self.spec.model)
        self._painter = await asyncio.to_thread(painter.load, self._device, path)
        await asyncio.to_thread(self._warm_up)
        return StageFacts(
            output_format=ImageFormat(IMAGE_TYPES[0], SIDE, SIDE),
            capacity=self._max_running,
            versions={"torch": metadata.version("torch")},
            params=HONOURED,
        )

    def _warm_up(self) -> None:
        order = Order(steps=1, guidance=GUIDANCE, seed=0, preview_interval=0, mime_type="")
        for size in {1, self._max_batch}:
            self._advance([self._begin(CAPTIONS[0], None, order)] * size)

    # ------------------------------------------------------------ prepare

    async def prepare(self, task: Task) -> Prepared:
        params = task.params if isinstance(task.params, DiffusionParams) else DiffusionParams()
        check_honoured(params, HONOURED, "params")
        order = self._order(params)
        picture = self._picture(task, task.prompt, order) if task.prompt is not None else None
        return Prepared(order, picture)

    def _order(self, params: DiffusionParams) -> Order:
        for name in ("width", "height"):
            check_side(name, getattr(params, name))
        steps = STEPS if params.steps is None else params.steps
        if not 1 <= steps <= self._max_steps:
            raise InvalidField("params.steps", f"must be from 1 to {self._max_steps}")
        guidance = GUIDANCE if params.guidance_scale is None else params.guidance_scale
        if not 1 <= guidance <= MAX_GUIDANCE:
            raise InvalidField("params.guidance_scale", f"must be from 1 to {MAX_GUIDANCE:g}")
        return Order(
            steps=steps,
            guidance=guidance,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            preview_interval=params.preview_interval or 0,
            mime_type=params.output_mime_type or IMAGE_TYPES[0],
        )

    def _picture(self, task: Task, prompt: Prompt, order: Order) -> Picture:
        try:
            caption, negative = read_prompt(prompt, order.guidance)
        except InvalidField as error:
            if task.streaming:
                # Another stage wrote it: no field of the client's is wrong.
                raise StageError(f"stage {self.spec.stage!r} was given no caption") from error
            raise
        return self._begin(caption, negative, order)

    @torch.no_grad()
    def _begin(self, caption: Caption, negative: Caption | None, order: Order) -> Picture:
        cond, uncond = self._painter.encode([caption, negative])
        noise = sampler.initial_noise(order.seed).to(self._device)
        times = tuple(sampler.timesteps(order.steps).tolist())
        return Picture(noise, noise, cond, uncond, order.guidance, times)

    # ------------------------------------------------------------ run

    async def run(
        self, task: Task, prepared: Prepared, inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        order, picture = prepared.order, prepared.picture
        if picture is None:
            prompt = await read_inputs(inputs)
            picture = self._picture(task, prompt, order) if prompt is not None else None
        if picture is not None:
            shown = 0
            async with aclosing(self._scheduler.run(picture)) as pictures:
                async for picture in pictures:
                    due = order.preview_interval and picture.step // order.preview_interval
                    yield await _progress(picture, order, preview=due > shown)
                    shown = due
            values = to_values(picture.x)
            yield StageOutput(await asyncio.to_thread(encode_picture, values, order.mime_type))
        usage = Usage(steps=order.steps if picture is not None else 0)
        yield StageOutput(finish=Finish(FinishReason.COMPLETE), usage=usage)

    def _advance(self, pictures: Sequence[Picture]) -> list[Picture]:
        """One denoise step of a batch; each picture has its own time and guidance."""

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=self._device)

        x, clean = sampler.step(
            self._painter,
            torch.stack([p.x for p in pictures]),
            column([p.times[p.step] for p in pictures]),
            column([p.times[p.step + 1] for p in pictures]),
            torch.stack([p.cond for p in pictures]),
            torch.stack([p.uncond for p in pictures]),
            column([p.guidance for p in pictures]),
        )
        return [
            replace(p, x=x[place], clean=clean[place], step=p.step + 1)
            for place, p in enumerate(pictures)
        ]

    def statistics(self) -> StageStatistics:
        now = self._scheduler.statistics()
        counters = {
            "ticks": now.ticks,
            "batches": now.batches,
            "steps": now.steps,
            "largest_batch": now.largest_batch,
        }
        return StageStatistics(now.waiting, float(now.work_left), counters=counters)

    async def close(self) -> None:
        await self._scheduler.close()


def check_side(name: str, pixels: int | None) -> None:
    """Raises InvalidField for a width or height that the painter doesn't draw."""
    if pixels is None or pixels == SIDE:
        return
    if pixels % SIDE:
        raise InvalidField(f"params.{name}", f"must be a multiple of {SIDE}")
    raise InvalidField(f"params.{name}", f"must be {SIDE}: the painter draws no other size")


def read_prompt(prompt: Prompt, guidance: float) -> tuple[Caption, Caption | None]:
    """The captions to draw and to draw away from. Raises InvalidField, or NotSupported for what is
    not text."""
    if not isinstance(prompt.content, Text):
        raise NotSupported("the painter draws captions only")
    if prompt.negative_text is not None and guidance == 1:
        raise InvalidField("prompt.negative_text", "has no effect at guidance scale 1")
    return (
        _parsed(parse, prompt.content.text, "prompt.text"),
        _parsed(parse_optional, prompt.negative_text or "", "prompt.negative_text"),
    )


Parsed = TypeVar("Parsed")


def _parsed(parser: Callable[[str], Parsed], text: str, path: str) -> Parsed:
    try:
        return parser(text)
    except ValueError as error:
        raise InvalidField(path, f'{error}; a caption is like "{CAPTIONS[0]}"') from None


async def read_inputs(inputs: Inputs) -> Prompt | None:
    """What the stage before gave: its prompt, or its whole text as one; None where it gave
    nothing."""
    prompt, text = None, ""
    async for feed in inputs:
        prompt = feed.prompt or prompt
        if isinstance(feed.payload, TextDelta):
            text += feed.payload.text
    return prompt or (Prompt(Text(text)) if text else None)


async def _progress(picture: Picture, order: Order, *, preview: bool) -> StageOutput:
    image = await asyncio.to_thread(encode_preview, to_values(picture.clean)) if preview else None
    return StageOutput(progress=Progress(picture.step, order.steps, image))


def to_values(x: Tensor) -> Values:
    """Of -1 to 1 on any device → of 0 to 1."""
    values: Values = ((x.clamp(-1, 1) + 1) / 2).cpu().numpy()
    return values
