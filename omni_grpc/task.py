"""A task that a replica holds or will hold, and who hears about it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from omni_grpc.errors import OmniError
from omni_grpc.ipc import CREDIT_STEP, Abort, Credit, Feed, Steer, Task, ToReplica
from omni_grpc.types import (
    InteractionEvent,
    Params,
    Payload,
    Prompt,
    StageOutput,
    TextDelta,
)

_task_ids = itertools.count(1)


def new_task_id() -> int:
    """An id that no task of this server had before."""
    return next(_task_ids)


class TaskSink(Protocol):
    """Who hears about a task. The methods are called on the event loop and do not raise."""

    def on_placed(self, task: Task, replica: int, device: str) -> Task:
        """A replica, with its number and device, takes the task; before that it may have waited for
        a place. What is given back is sent in its stead."""

    def on_admitted(self, prepare_ms: float) -> None:
        """The task runs."""

    def on_refused(self, error: OmniError) -> None:
        """The task was not taken. The last word."""

    def on_fed(self, number: int, error: OmniError | None) -> None:
        """A numbered Feed was taken, or refused with `error` and left no trace."""

    def on_taken(self, size: int) -> None:
        """The stage took `size` bytes of what other stages fed it."""

    def on_unsendable(self, error: OmniError) -> None:
        """Input of the task could not be sent. It still runs."""

    def on_output(self, output: StageOutput) -> None:
        """The task gave something."""

    def on_text(self, delta: TextDelta) -> None:
        """The task gave plain text, as `on_output` would tell with nothing else in it."""

    def on_ended(self, error: OmniError | None) -> None:
        """Nothing of the task is left in the replica, or it was aborted while it waited. The last
        word."""

    def on_lost(self) -> None:
        """The replica is gone, and the task with it. The last word."""


@dataclass(slots=True, eq=False)
class TaskHandle:
    """A task that a replica holds, or that waits for a place in one."""

    id: int
    request_id: str
    send: Callable[[ToReplica], None]
    """Sends a message to the replica that holds it; while it waits, keeps it for then."""
    sink: TaskSink
    work: float
    """What it was taken to be when it was sent, less what it has given since."""
    waits: bool = field(default=True, init=False)
    """Whether no replica has it yet."""
    _owed: int = field(default=0, init=False)
    """Bytes of output that were taken and not yet credited."""
    held: bool = field(default=False, init=False)
    """While true, credit is kept back, so that the stage pauses when its window is full."""

    def feed(
        self,
        payload: Payload | None = None,
        *,
        prompt: Prompt | None = None,
        params: Params | None = None,
        end_of_segment: bool = False,
        end: bool = False,
        number: int | None = None,
    ) -> None:
        """Sends more input. `end`: there is no more after it. With a `number` the sink hears what
        became of it."""
        self.send(Feed(self.id, number, payload, prompt, params, end_of_segment, end))

    def steer(self, event: InteractionEvent) -> None:
        """Sends an event; the sink hears what becomes of it in outputs with `event` set."""
        self.send(Steer(self.id, event))

    aborted_at: float | None = field(default=None, init=False)
    """When it was first aborted, by the loop's clock."""

    def abort(self) -> None:
        """Asks the replica to stop the task; the sink's last word comes when all is freed."""
        if self.aborted_at is None:
            self.aborted_at = asyncio.get_running_loop().time()
        self.send(Abort(self.id))

    def release_credit(self) -> None:
        """Lets the stage go on: gives back what was held."""
        self.held = False
        if self._owed:
            self.send(Credit(self.id, self._owed))
            self._owed = 0

    def owe(self, size: int) -> None:
        """Counts output that came; credits it in steps, unless held."""
        self._owed += size
        if self._owed >= CREDIT_STEP and not self.held:
            self.release_credit()
