"""Guidance groups: a request's companions at stage 0, and the moment when the group is complete.

All companions are built before anything is sent, and are sent in the same message as their parent,
to the same replica. Their outputs are stashed. The group is complete when parent and companions
have ended; it is handed on exactly once, never in part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from omni_grpc.errors import InternalError, OmniError, StageError
from omni_grpc.ipc import Task
from omni_grpc.task import TaskHandle
from omni_grpc.types import Payload, StageOutput, TextDelta

if TYPE_CHECKING:
    from omni_grpc.run import Run

log = logging.getLogger(__name__)


class CompanionRun:
    """One companion: the sink of its task and the stash of its outputs.

    As with a stage's task, whatever goes wrong in handling one message ends this one request.
    """

    def __init__(self, run: Run, role: str, task: Task) -> None:
        self.role = role
        self.task = task
        self.handle: TaskHandle | None = None
        self.holds = False
        self.admitted = False
        self.done = False
        self.stash: list[Payload] = []
        self._run = run
        self._trace = run.trace.task(run.plan.pipeline.entry.name, role=role)

    def began(self, handle: TaskHandle) -> None:
        """There is a task: a replica has it, or it waits for a place."""
        self.handle, self.holds = handle, True

    def on_placed(self, task: Task, replica: int, device: str) -> Task:
        return self._trace.sent(task, replica, device)

    def on_admitted(self, prepare_ms: float) -> None:
        self.admitted = True
        self._trace.admitted(prepare_ms)
        self._contained(self._run.group_changed)

    def on_refused(self, error: OmniError) -> None:
        self.holds = False
        self._trace.ended(error)
        self._contained(self._run.companion_failed, error)
        self._run.stage_released()

    def on_fed(self, number: int, error: OmniError | None) -> None:
        log.error("companion %s: nothing was fed", self.task.request_id)

    def on_unsendable(self, error: OmniError) -> None:
        self._run.close(error)

    def on_taken(self, size: int) -> None:
        log.error("companion %s: nothing was fed", self.task.request_id)

    def on_output(self, output: StageOutput) -> None:
        if output.payload is not None:
            self.stash.append(output.payload)
        if output.usage is not None:
            self._run.add_usage(output.usage)

    def on_text(self, delta: TextDelta) -> None:
        self.stash.append(delta)

    def on_ended(self, error: OmniError | None) -> None:
        self.holds = False
        self._trace.ended(error)
        if error is not None:
            self._contained(self._run.companion_failed, error)
        else:
            self.done = True
            self._contained(self._run.group_changed)
        self._run.stage_released()

    def on_lost(self) -> None:
        self.holds = False
        self._trace.ended(lost=True)
        self._contained(self._run.companion_lost, self)
        self._run.stage_released()

    def _contained(self, handler: Callable[..., None], *arguments: Any) -> None:
        try:
            handler(*arguments)
        except OmniError as error:
            self._run.close(error)
        except (Exception, asyncio.CancelledError):
            log.exception("companion %s", self.task.request_id)
            self._run.close(InternalError("internal error"))


class Group:
    """A request's companions, in order."""

    def __init__(self, companions: list[CompanionRun]) -> None:
        self.members = companions
        self.handed_on = False

    @property
    def admitted(self) -> bool:
        """Whether stage 0 has taken every companion."""
        return all(member.admitted for member in self.members)

    @property
    def complete(self) -> bool:
        """Whether every companion's output is stashed."""
        return all(member.done for member in self.members)

    def outputs(self) -> list[tuple[str, list[Payload]]]:
        """(role, outputs) of the companions in order. Raises StageError while one is missing: what
        would be made of a part of the group would be unguided."""
        done = sum(member.done for member in self.members)
        if done < len(self.members):
            raise StageError(f"guidance outputs incomplete ({done}/{len(self.members)})")
        return [(member.role, member.stash) for member in self.members]
