"""A stage that looks at chunks before they count, and a transform that makes directories: what
tests of streaming input put into pipelines, by import path."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator

from omni_grpc.errors import InvalidField, PromptTooLong
from omni_grpc.ipc import Feed, Task
from omni_grpc.pipelines.transforms import TransformContext, Transformed
from omni_grpc.stages.base import Inputs, Stage, segments
from omni_grpc.types import (
    CustomParams,
    Finish,
    FinishReason,
    Prompt,
    StageFacts,
    StageOutput,
    Text,
    TextDelta,
    Usage,
)


class Careful(Stage[None]):
    """Echoes each segment in one piece, behind the `mark` of its parameters. Refuses chunks that
    hold "bad" or "long", breaks at "broken"."""

    async def load(self) -> StageFacts:
        return StageFacts(resumable=True)

    async def prepare(self, task: Task) -> None:
        return None

    async def prepare_update(self, task: Task, prepared: None, feed: Feed) -> None:
        text = heard(feed)
        if "bad" in text:
            raise InvalidField("prompt.text", "is bad")
        if "long" in text:
            raise PromptTooLong("is long")
        if "broken" in text:
            raise ZeroDivisionError("a secret")
        if isinstance(feed.params, CustomParams) and "mark" not in feed.params.values:
            raise InvalidField("params.mark", "is missing")

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        async for segment in segments(inputs):
            if not await segment.begun():
                continue
            text = "".join([heard(feed) async for feed in segment])
            params = segment.params or task.params
            mark = params.values.get("mark", "") if isinstance(params, CustomParams) else ""
            yield StageOutput(TextDelta(f"{mark}{text}"))
            usage = Usage(prompt_tokens=1, completion_tokens=1)
            yield StageOutput(finish=Finish(FinishReason.STOP), usage=usage, segment_end=True)


def heard(feed: Feed) -> str:
    """The text of a chunk."""
    if isinstance(feed.payload, TextDelta):
        return feed.payload.text
    content = feed.prompt.content if feed.prompt is not None else None
    return content.text if isinstance(content, Text) else ""


def noting(prompt: Prompt, context: TransformContext) -> Transformed:
    """Puts each prompt into a directory of its own; breaks at "raise" once it has made it."""
    text = prompt.content.text if isinstance(prompt.content, Text) else ""
    directory = context.artifacts.make_directory()
    (directory / "prompt").write_text(text)
    if "raise" in text:
        raise ZeroDivisionError("a secret")
    if "own" in text:
        mine = tempfile.mkdtemp(dir=directory.parent)
        return Transformed(prompt, artifact_directories=(directory.parent / mine,))
    return Transformed(prompt)
