"""What a stage is: six verbs that a replica process calls. Write one to add an engine.

    load        weights in, warm-up; tells the stage's facts
    prepare     one task's input checked and made ready (tokenize, decode media); may refuse.
                `prepare_update` does the same for a chunk of input that a client sends later
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
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

from omni_grpc.errors import NotSupported
from omni_grpc.ipc import Feed, StageSpec, Task
from omni_grpc.types import (
    EventChange,
    InteractionEvent,
    Params,
    StageFacts,
    StageOutput,
    StageStatistics,
)

Prepared = TypeVar("Prepared")

QUEUED_FEEDS = 32
"""Chunks of a client's input that may wait for a stage."""


class Inputs:
    """The Feeds of one task in order, as an async iterator that ends after the one with `end`.

    One consumer. Memory is bounded by the sender's windows.
    """

    def __init__(self, on_taken: Callable[[Feed], None] | None = None) -> None:
        self._feeds: deque[Feed] = deque()
        self._on_taken = on_taken
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._taken = asyncio.Event()

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
        self._taken.set()
        if self._on_taken is not None:
            self._on_taken(feed)
        return feed

    def __len__(self) -> int:
        return len(self._feeds)

    @property
    def ended(self) -> bool:
        """Whether the Feed with `end` was taken."""
        return self._ended

    async def room(self) -> None:
        """Returns when less than QUEUED_FEEDS wait: what keeps a client's feeder from running
        ahead."""
        while len(self._feeds) >= QUEUED_FEEDS:
            self._taken.clear()
            await self._taken.wait()


class Segment:
    """One segment of a task's input: iterate its Feeds, then see how it ended.

    `params` are the segment's own, if its first Feed brought some; known once `begun` has returned.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.params: Params | None = None
        self.closed = False
        """Whether `end_of_segment` ended it: then it wants its answer. Else the whole input
        ended."""
        self._inputs = inputs
        self._first: Feed | None = None
        self._over = False

    async def begun(self) -> bool:
        """Waits for the first Feed. False: there is none, the input ended before."""
        if self._first is None and not self._over:
            self._first = await self._take()
        return self._first is not None and not (self._first.end and not self.closed)

    def __aiter__(self) -> Segment:
        return self

    async def __anext__(self) -> Feed:
        """The next Feed of this segment."""
        taken, self._first = self._first, None
        if taken is None and not self._over:
            taken = await self._take()
        if taken is None:
            raise StopAsyncIteration
        return taken

    async def _take(self) -> Feed | None:
        feed = await anext(self._inputs, None)
        if feed is None:
            self._over = True
            return None
        self.params = self.params or feed.params
        self.closed = feed.end_of_segment
        self._over = feed.end_of_segment or feed.end
        return feed


async def segments(inputs: Inputs) -> AsyncIterator[Segment]:
    """The input's segments in order. The last one has `closed` False where the input ended
    alone."""
    while not inputs.ended:
        segment = Segment(inputs)
        yield segment
        async for _ in segment:
            # What the stage did not read of a segment is not part of the next.
            pass


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

    async def prepare_update(self, task: Task, prepared: Prepared, feed: Feed) -> None:
        """Checks a chunk of a resumable task's input, before it counts.

        Raises OmniError to refuse it; the task, and what `prepared` holds, are then as they were.
        `feed.params` come with a segment's first chunk. By default everything is taken.
        """

    async def steer(
        self, task: Task, prepared: Prepared, event: InteractionEvent
    ) -> list[EventChange]:
        """Takes an event for a running task: checks all of it, makes ready what it needs (off the
        loop, and off the thread that generates), and lets it wait for the next chunk's border.

        Returns what became of other events by that. Raises OmniError to reject it; the generation
        goes on as before. What becomes of it later, `run` says in outputs with `event` set.
        """
        raise NotSupported(f"stage {self.spec.stage!r} takes no events")

    @abstractmethod
    def run(self, task: Task, prepared: Prepared, inputs: Inputs) -> AsyncIterator[StageOutput]:
        """The task's outputs. The consumer may pause between two of them when the client is slow.

        `inputs` holds the outputs of the stages before, or, at stage 0 of a resumable request, the
        client's chunks; at stage 0 of a plain request it ends at once. A resumable task answers at
        each Feed with `end_of_segment`: its last output there has `segment_end` and `finish` set.
        """

    def shorten(self, prepared: Prepared, say: Callable[[str, list[int]], None]) -> None:
        """Offers a short cut, before `run`: plain text (with its token ids) of the only answer may
        go to `say` in the engine's own turn, where `run` would only hand it through. Order is the
        stage's to keep. By default it is not taken."""

    async def control(self, command: str, arguments: dict[str, Any]) -> None:
        """Carries out an operator's command; NotSupported if this engine does not know it."""
        raise NotSupported(f"engine {self.spec.engine!r} does not support {command!r}")

    def statistics(self) -> StageStatistics:
        """The present load; None for what is not known. Called with every heartbeat: raises
        ReplicaDead where the engine cannot go on."""
        return StageStatistics()

    async def close(self) -> None:
        """Frees everything. Called once; no task is left then."""


class ReplicaDead(Exception):  # noqa: N818 - named after its cause, as all errors are
    """The engine cannot go on: the process ends, the server restarts it and answers its tasks."""
