"""Films of engine `live`, driven as a host drives them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from omni_grpc.errors import OmniError
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.stages.base import Inputs
from omni_grpc.stages.live import Film, LiveStage
from omni_grpc.stages.painter.captions import Caption, Colour, Shape
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.types import (
    DiffusionParams,
    EventState,
    InteractionEvent,
    Prompt,
    StageOutput,
    Text,
    Video,
)

RED = "a large red circle on a white background"
BLUE = "a large blue square on a white background"
GREEN = "a small green ring on a black background"
K = 4
"""Frames of a chunk."""


@cache
def judge() -> Judge:
    """Reads frames."""
    return Judge()


def spec(**arguments: Any) -> StageSpec:
    return StageSpec("film", "painter", 0, "live", "painter", "cpu", arguments)


@asynccontextmanager
async def loaded(**arguments: Any) -> AsyncIterator[LiveStage]:
    """A stage that computes with one thread, as in its pipeline."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    stage = LiveStage(spec(chunk_frames=K, **arguments))
    try:
        await stage.load()
        yield stage
    finally:
        await stage.close()
        torch.set_num_threads(threads)


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

    def shown(self) -> list[list[Caption]]:
        """What each frame of each chunk is read as."""
        values = torch.tensor(self.pixels).movedim(-1, 1) / 127.5 - 1
        read = judge().read(values).captions
        return [read[c.first_frame : c.first_frame + c.frame_count] for c in self.chunks]


def all_of(frames: Sequence[Caption], colour: Colour, shape: Shape) -> bool:
    return all((c.colour, c.shape) == (colour, shape) for c in frames)
