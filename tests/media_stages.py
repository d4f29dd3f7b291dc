"""A stage of engine `python` that takes any media, for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

from omni_grpc.ipc import Task
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.media import (
    Decoded,
    DecodedAudio,
    DecodedImage,
    load_media,
    media_policy,
    prompt_media,
)
from omni_grpc.types import Finish, FinishReason, StageFacts, StageOutput, TextDelta


class Describe(Stage[list[Decoded]]):
    """Says what each medium is, a line each."""

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> list[Decoded]:
        assert task.prompt is not None
        policy = media_policy(self.spec)
        found = prompt_media(task.prompt, policy)
        return [await load_media(media, policy, path) for path, media in found]

    async def run(
        self, task: Task, prepared: list[Decoded], inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        for item in prepared:
            yield StageOutput(TextDelta(describe(item) + "\n"))
        yield StageOutput(finish=Finish(FinishReason.STOP))


def describe(item: Decoded) -> str:
    """One line."""
    match item:
        case DecodedImage(image):
            return f"image {image.width}x{image.height} {image.mode}"
        case DecodedAudio(samples, rate):
            return f"audio {len(samples)} at {rate}"
    count, height, width, _ = item.frames.shape
    return f"video {count} of {width}x{height} at {item.fps:g}"
