"""The stage of engine `live`: a film of the painter's, chunk after chunk, with or without an end,
that events change while it is made.

Engine arguments: `chunk_frames`, the frames of a chunk, at whose borders events apply; `fps`;
`realtime` (false: as fast as it can); `buffer_chunks`, how far it may be ahead of its viewer;
`max_batch` (films per call of the model), `max_running`, `max_steps`. `model` is `painter`, or the
path of other weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from omni_grpc.errors import InvalidField, NotSupported
from omni_grpc.ipc import StageSpec, Task
from omni_grpc.stages import drift
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.diffusion import GUIDANCE, MODEL, read_prompt
from omni_grpc.stages.drift import Scene, Shot
from omni_grpc.stages.encode import Pixels
from omni_grpc.stages.fragment import FILM_TYPES, encode_chunk
from omni_grpc.stages.live_params import (
    HONOURED,
    MAX_FPS,
    Order,
    read_event,
    read_order,
    read_settings,
)
from omni_grpc.stages.pace import Pace
from omni_grpc.stages.painter import model as painter
from omni_grpc.stages.painter import sampler
from omni_grpc.stages.painter.captions import CAPTIONS, Caption
from omni_grpc.stages.painter.shapes import SIDE
from omni_grpc.stages.steering import Steering, Track
from omni_grpc.stages.step_scheduler import StepScheduler
from omni_grpc.types import (
    DiffusionParams,
    EventChange,
    Finish,
    FinishReason,
    InteractionEvent,
    StageFacts,
    StageOutput,
    StageStatistics,
    Usage,
    Video,
    VideoFormat,
)


@dataclass(slots=True, eq=False)
class Film:
    """A film under way. `scene` is what its last chunk shows, `picture` [3, 32, 32] its last
    frame."""

    order: Order
    track: Track[Scene]
    scene: Scene
    aim: Scene
    """What the event that was applied last asks for: what the next one changes a part of."""
    pace: Pace | None
    picture: Tensor | None = None
    active: tuple[str, ...] = ()
    frames: int = 0
    steps: int = 0

    def border(self, chunk: int) -> list[EventChange]:
        """Sets what the next chunk shows; what becomes of events with it."""
        blend, changes = self.track.border(chunk, self.scene)
        scene = drift.mix(blend.base, blend.target, blend.weight)
        if scene is not self.scene:
            self.picture = None
        self.scene, self.aim, self.active = scene, blend.target, blend.active
        return changes

    def left(self, most: int) -> int:
        """Frames of the next chunk; 0: the film is over."""
        frames = self.order.frames
        return most if frames is None else min(most, frames - self.frames)


class LiveStage(Stage[Film]):
    """Captions in, films out."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self._settings = settings = read_settings(spec.engine_args)
        # Its own devices are all that a replica sees, so they count from 0.
        self._device = torch.device("cuda" if spec.device.startswith("cuda") else "cpu")
        self._scheduler = StepScheduler(self._advance, settings.max_batch, settings.max_running)
        self._chunks = self._frames = self._underruns = 0

    async def load(self) -> StageFacts:
        path = painter.WEIGHTS if self.spec.model == MODEL else Path(self.spec.model)
        self._painter = await asyncio.to_thread(painter.load, self._device, path)
        await asyncio.to_thread(self._warm_up)
        return StageFacts(
            output_format=VideoFormat(FILM_TYPES[0], SIDE, SIDE, self._settings.fps),
            capacity=self._settings.max_running,
            versions={"torch": metadata.version("torch")},
            params=HONOURED,
            interactive=True,
        )

    def _warm_up(self) -> None:
        cond, uncond = self._encode([CAPTIONS[0], None])
        scene = Scene(cond, uncond, GUIDANCE, seed=0)
        (shot,) = self._advance([drift.afresh(scene, 1, self._device)])
        self._advance([self._onward(shot.x[0], scene, 0, self._settings.chunk_frames, MAX_FPS)])
        encode_chunk(sampler.to_image(shot.x), FILM_TYPES[-1], 0, MAX_FPS)

    # ------------------------------------------------------------ prepare

    async def prepare(self, task: Task) -> Film:
        params = task.params if isinstance(task.params, DiffusionParams) else DiffusionParams()
        order = read_order(params, self._settings)
        if task.prompt is None:
            raise NotSupported(f"stage {self.spec.stage!r} can only be a pipeline's first")
        captions = read_prompt(task.prompt, order.guidance)
        cond, uncond = await asyncio.to_thread(self._encode, captions)
        scene = Scene(cond, uncond, order.guidance, order.seed)
        return Film(order, Track(scene), scene, scene, self._pace(order))

    def _pace(self, order: Order) -> Pace | None:
        if not self._settings.realtime:
            return None
        chunk_s = self._settings.chunk_frames / order.fps
        return Pace(chunk_s, self._settings.buffer_chunks, asyncio.get_running_loop().time)

    @torch.no_grad()
    def _encode(self, captions: Sequence[Caption | None]) -> Tensor:
        return self._painter.encode(captions)

    # ------------------------------------------------------------ steer

    async def steer(self, task: Task, prepared: Film, event: InteractionEvent) -> list[EventChange]:
        """A new caption, a new negative one (empty: none any more), a new guidance scale or seed;
        what is not named stays as the event before asked."""
        captions, numbers = read_event(event)
        rows = await asyncio.to_thread(self._encode, list(captions.values()))
        # From here on without a pause: the film has gone on while the captions were encoded.
        target = replace(prepared.aim, **dict(zip(captions, rows, strict=True)), **numbers)
        if captions.get("uncond") is not None and target.guidance == 1:
            raise InvalidField("event.negative_prompt", "has no effect at guidance scale 1")
        return prepared.track.submit(Steering(event.event_id, target, event.transition_chunks))

    # ------------------------------------------------------------ run

    async def run(self, task: Task, prepared: Film, inputs: Inputs) -> AsyncIterator[StageOutput]:
        film, pace = prepared, prepared.pace
        for chunk in count():
            number = film.left(self._settings.chunk_frames)
            if not number:
                break
            if pace is not None:
                await pace.turn(chunk)
            changes = film.border(chunk)
            video = await self._chunk(film, number)
            if pace is not None:
                self._underruns += pace.ready(chunk)
            for change in changes:
                yield StageOutput(event=change)
            yield StageOutput(video)
            if pace is not None:
                pace.taken(chunk)
        for change in film.track.end():
            yield StageOutput(event=change)
        # Frames are counted where they are delivered.
        usage = Usage(steps=film.steps)
        yield StageOutput(finish=Finish(FinishReason.COMPLETE), usage=usage)

    async def _chunk(self, film: Film, number: int) -> Video:
        """The next `number` frames."""
        scene, order, first = film.scene, film.order, film.frames
        if film.picture is None:
            shot = drift.afresh(scene, order.steps, self._device)
            film.picture = (await self._painted(film, shot))[0]
        shot = await asyncio.to_thread(self._onward, film.picture, scene, first, number, order.fps)
        frames = await self._painted(film, shot)
        film.picture = frames[-1]
        data = await asyncio.to_thread(self._encoded, frames, order, first)
        film.frames += number
        self._frames += number
        self._chunks += 1
        last = film.frames == order.frames
        return Video(data, order.mime_type, first, number, SIDE, SIDE, last, film.active)

    @torch.no_grad()
    def _onward(self, picture: Tensor, scene: Scene, first: int, number: int, fps: float) -> Shot:
        return drift.onward(picture, scene, first, number, fps)

    def _encoded(self, frames: Tensor, order: Order, first: int) -> bytes:
        pixels: Pixels = sampler.to_image(frames)
        return encode_chunk(pixels, order.mime_type, first, order.fps)

    async def _painted(self, film: Film, shot: Shot) -> Tensor:
        """The shot's pictures when all of its steps are done."""
        async with aclosing(self._scheduler.run(shot)) as shots:
            async for newest in shots:
                shot = newest
        film.steps += shot.step
        return shot.x

    def _advance(self, shots: Sequence[Shot]) -> list[Shot]:
        """One denoise step of a batch; each shot has its own time, captions and guidance."""
        numbers = torch.tensor([len(shot.x) for shot in shots], device=self._device)

        def column(values: list[float]) -> Tensor:
            each = torch.tensor(values, dtype=torch.float32, device=self._device)
            return each.repeat_interleave(numbers)

        x, _ = sampler.step(
            self._painter,
            torch.cat([shot.x for shot in shots]),
            column([shot.times[shot.step] for shot in shots]),
            column([shot.times[shot.step + 1] for shot in shots]),
            torch.stack([shot.scene.cond for shot in shots]).repeat_interleave(numbers, 0),
            torch.stack([shot.scene.uncond for shot in shots]).repeat_interleave(numbers, 0),
            column([shot.scene.guidance for shot in shots]),
        )
        parts = torch.split(x, [len(shot.x) for shot in shots])
        return [replace(s, x=part, step=s.step + 1) for s, part in zip(shots, parts, strict=True)]

    def statistics(self) -> StageStatistics:
        now = self._scheduler.statistics()
        counters = {
            "chunks": self._chunks,
            "frames": self._frames,
            "underruns": self._underruns,
            "ticks": now.ticks,
            "batches": now.batches,
            "steps": now.steps,
            "largest_batch": now.largest_batch,
        }
        return StageStatistics(now.waiting, float(now.work_left), counters=counters)

    async def close(self) -> None:
        await self._scheduler.close()
