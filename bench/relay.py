"""A stage that hands on every text at once: what the curve over a pipeline's length is made of."""

from __future__ import annotations

from collections.abc import AsyncIterator

from omni_grpc.ipc import Task
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.types import Finish, FinishReason, StageFacts, StageOutput, TextDelta


class Relay(Stage[None]):
    """Text in, the same text out."""

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> None:
        pass

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        async for feed in inputs:
            if isinstance(feed.payload, TextDelta):
                yield StageOutput(feed.payload)
        yield StageOutput(finish=Finish(FinishReason.COMPLETE))
