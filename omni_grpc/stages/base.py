"""What a stage is: six verbs that a replica process calls. Write one to add an engine.

    load        weights in, warm-up; tells the stage's facts
    prepare     one task's input checked and made ready (tokenize, decode media); may refuse
    run         the prepared task's outputs, as an async generator
    control     an operator's command
    statistics  the present load
    close       everything freed

`run` is cancelled (CancelledError at its await, or `aclose`) when the task is aborted: it frees
what it holds in `finally`. Exceptions other than OmniError end the task with STAGE_ERROR; their
text stays in the log."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

from omni_grpc.errors import NotSupported
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.types import StageFacts, StageOutput, StageStatistics

Prepared = TypeVar("Prepared")


class Inputs:
    """The Feeds of one task in order, as an async iterator that ends after the one with `end`.

    One consumer. Memory is bounded by the sender's windows.
    """

    def __init__(self) -> None:
        self._feeds: deque[Feed] = deque()
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, feed: Feed) -> None:
        """Adds a Feed; never blocks."""
        self._feeds.append(feed)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> Inputs:
        return self

    async def __anext__(self) -> Feed:
        """The next Feed. Cancelling loses none."""
        while not self._feeds:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        feed = self._feeds.popleft()
        self._ended = feed.end
        return feed

    def __len__(self) -> int:
        return len(self._feeds)


class Stage(ABC, Generic[Prepared]):
    """One engine in one replica process. All methods run on the replica's event loop; work that
    takes more than a few milliseconds belongs in a thread (`asyncio.to_thread`)."""

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec

    @abstractmethod
    async def load(self) -> StageFacts:
        """Loads and warms the model. An exception fails the replica's start with its text."""

    @abstractmethod
    async def prepare(self, task: Task) -> Prepared:
        """Checks a task and makes its first input ready.

        Raises OmniError to refuse it (InvalidField paths that begin with "params." get the
        request's own path put in front). Cancelling leaves nothing behind."""

    @abstractmethod
    def run(self, task: Task, prepared: Prepared, inputs: Inputs) -> AsyncIterator[StageOutput]:
        """The task's outputs. The consumer may pause between two of them when the client is slow.

        `inputs` holds the outputs of the stages before (and, for a resumable request, further input
        of the client); at stage 0 of a plain request it ends at once."""

    async def control(self, command: str, arguments: dict[str, Any]) -> None:
        """Carries out an operator's command; NotSupported if this engine does not know it."""
        raise NotSupported(f"engine {self.spec.engine!r} does not support {command!r}")

    def statistics(self) -> StageStatistics:
        """The present load; None for what is not known."""
        return StageStatistics()

    async def close(self) -> None:
        """Frees everything. Called once; no task is left then."""


class ReplicaDead(Exception):  # noqa: N818 - named after its cause, as all errors are
    """The engine cannot go on: the process ends, the server restarts it and answers its tasks."""
