"""What the ear and the reader share: media in, one text each, out as deltas.

The text of one medium never holds a blank line, and a blank line stands between two media: so the
whole is pleasant to read, and a bridge can tell which text is whose."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Generic, TypeVar

from omni_grpc.errors import InvalidField, NotSupported
from omni_grpc.ipc import StageSpec, Task
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.media import invalid_media, media_policy, prompt_media
from omni_grpc.types import (
    CustomParams,
    Finish,
    FinishReason,
    Media,
    Messages,
    Modality,
    StageOutput,
    TextDelta,
)

Item = TypeVar("Item")

SEPARATOR = "\n\n"
"""Between the texts of two media."""


class RecognitionStage(Stage[dict[str, Item]], Generic[Item]):
    """Media of one modality to text. A task is prepared when all its media are decoded, by path."""

    modality: ClassVar[Modality]
    nothing: ClassVar[str]
    """What to say where all media together hold no text."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        self.policy = media_policy(spec)
        self.workers = int(spec.engine_args.get("workers", 1))
        """Media that are worked on at once."""
        self.threads = int(spec.engine_args.get("threads", 1))
        """Threads of one of them."""
        self._executor = ThreadPoolExecutor(self.workers, thread_name_prefix=spec.stage)

    @abstractmethod
    async def decode(self, media: Media, path: str) -> Item:
        """A medium as the model takes it."""

    @abstractmethod
    def recognize(self, item: Item) -> Iterator[str]:
        """The text of a medium, piece by piece. Runs in a thread, each step of the iterator too."""

    async def prepare(self, task: Task) -> dict[str, Item]:
        if task.prompt is None:
            raise NotSupported(f"stage {self.spec.stage!r} takes prompts, not a stage's outputs")
        refuse_params(task)
        found = prompt_media(task.prompt, self.policy)
        for path, media in found:
            if media.modality is not self.modality:
                raise InvalidField(f"{path}.modality", f"must be {self.modality.value} here")
        if not found:
            turns = isinstance(task.prompt.content, Messages)
            place = "prompt.messages" if turns else "prompt.media"
            raise InvalidField(place, f"holds no {self.modality.value}")
        return {path: await self.decode(media, path) for path, media in found}

    async def run(
        self, task: Task, prepared: dict[str, Item], inputs: Inputs
    ) -> AsyncIterator[StageOutput]:
        heard = False
        for place, item in enumerate(prepared.values()):
            if place:
                yield StageOutput(TextDelta(SEPARATOR))
            async for piece in self.pieces(item):
                heard = True
                yield StageOutput(TextDelta(piece))
        if not heard:
            raise invalid_media(next(iter(prepared)), self.nothing)
        yield StageOutput(finish=Finish(FinishReason.COMPLETE))

    async def pieces(self, item: Item) -> AsyncIterator[str]:
        """The text of a medium, piece by piece. Between two of them the task may be cancelled."""
        loop = asyncio.get_running_loop()
        pieces = await loop.run_in_executor(self._executor, self.recognize, item)
        while piece := await loop.run_in_executor(self._executor, next, pieces, ""):
            yield piece

    async def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


def refuse_params(task: Task) -> None:
    """Raises InvalidField for any parameter: these stages have none."""
    values = task.params.values if isinstance(task.params, CustomParams) else {}
    for name in values:
        raise InvalidField(f"params.{name}", "the stage has no settings")
