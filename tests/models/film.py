"""A stage of engine `python` that makes films and pictures of any size without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from omni_grpc.ipc import Task
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.encode import Pixels, Values, encode_picture, open_film
from omni_grpc.types import CustomParams, Finish, FinishReason, StageFacts, StageOutput


def frame(number: int, width: int, height: int) -> Pixels:
    """A frame that shows its number in every pixel."""
    ramp = np.add.outer(np.arange(height), np.arange(width)) + number * 3
    return np.stack([ramp, ramp // 2, np.full_like(ramp, number)], -1).astype(np.uint8)


def noise(width: int, height: int) -> Values:
    """A picture that doesn't compress."""
    values: Values = np.random.default_rng(0).random((3, height, width), np.float32)
    return values


class Film(Stage[dict[str, Any]]):
    """Makes `frames` of `width` x `height`, `fps` to the second, as `mime_type`; a picture where
    that is a picture's type."""

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> dict[str, Any]:
        return task.params.values if isinstance(task.params, CustomParams) else {}

    async def run(
        self, task: Task, prepared: dict[str, Any], inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        width, height = int(prepared["width"]), int(prepared["height"])
        mime_type = prepared["mime_type"]
        if not mime_type.startswith("video/"):
            yield StageOutput(encode_picture(noise(width, height), mime_type))
        else:
            film = open_film(mime_type, width, height, prepared["fps"])
            for number in range(int(prepared["frames"])):
                for part in film.push(frame(number, width, height)):
                    yield StageOutput(part)
                # An encoder works in a thread; here a turn of the loop is enough.
                await asyncio.sleep(0)
            for part in film.finish():
                yield StageOutput(part)
        yield StageOutput(finish=Finish(FinishReason.COMPLETE))
