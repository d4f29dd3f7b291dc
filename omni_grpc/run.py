"""One request on its way through the stages.

A Run is a state machine that messages from replicas drive; it has no task of its own. Stage 0 is
submitted at admission, each later stage with its first input. Outputs of final stages go to the
outbox, outputs with consumers over their bridges to the next stages. `close` is the one way out,
for every ending: synchronous, idempotent; it frees what the request holds here and asks the
replicas to free the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from omni_grpc import epoch
from omni_grpc.artifacts import Artifacts
from omni_grpc.companions import CompanionRun, Group
from omni_grpc.delivery import Delivery
from omni_grpc.errors import (
    InternalError,
    NotSupported,
    OmniError,
    ReplicaLost,
    StageUnavailable,
)
from omni_grpc.feeding import Feeding
from omni_grpc.graph import Graph
from omni_grpc.lane import Lane
from omni_grpc.ledger import Ledger
from omni_grpc.metrics import Metrics
from omni_grpc.outbox import Numbered, Outbox
from omni_grpc.plan import Plan
from omni_grpc.report import Report
from omni_grpc.routing import Routing
from omni_grpc.stage_run import StageRun
from omni_grpc.submission import DIFFUSION, Submission
from omni_grpc.task import TaskHandle
from omni_grpc.tracing import RequestTrace
from omni_grpc.types import (
    Accepted,
    EventChange,
    EventNotice,
    Finished,
    InteractionEvent,
    Interrupted,
    Notice,
    Prompt,
    StageOutput,
    TextDelta,
    Usage,
)
from omni_grpc.watch import Watch

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TASK_PREFIX = "request "
"""What the names of asyncio tasks begin with that belong to a request."""


def owned_task(
    work: Coroutine[Any, Any, Result], request_id: str, what: str
) -> asyncio.Task[Result]:
    """An asyncio task that belongs to a request, and tells so by its name."""
    return asyncio.create_task(work, name=f"{TASK_PREFIX}{request_id}: {what}")


class Run:
    """One admitted or soon to be admitted request. One reader iterates it with `next`."""

    def __init__(
        self,
        plan: Plan,
        outbox: Outbox,
        artifacts: Artifacts,
        on_close: Callable[[Run], None],
        metrics: Metrics,
    ) -> None:
        self.plan = plan
        self.request_id = plan.request.request_id
        self.trace = RequestTrace(self.request_id, plan.pipeline.name)
        self.error: OmniError | None = None
        self.closed = False
        self.completed = False
        """Whether all wanted outputs are there; they may still wait for the client."""
        self.artifacts = artifacts
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close
        self.delivery = Delivery(outbox, self.regulate)
        self._graph = Graph(self, plan)
        self._submission = Submission(plan, artifacts, self._loop.time() + plan.timeout_s)
        self._feeding = (
            Feeding(plan, self._graph, self._submission, artifacts, self.close, self._touched)
            if plan.request.resumable
            else None
        )
        self.watch = Watch(plan, self._graph, self.delivery, self.lane, self.close)
        self._ledger = Ledger()
        self._admission: asyncio.Future[None] = self._loop.create_future()
        self._released = asyncio.Event()
        self._ended_event = asyncio.Event()
        self._report = Report(metrics, plan.pipeline.name)
        self._routing = Routing(
            plan, self._graph, self.delivery, self._report, self.ensure_started, self._touched
        )
        self._retried = False

    @property
    def first_output_ms(self) -> float | None:
        """From its arrival to its first output; None while there is none."""
        seconds = self._report.pace.first_output_s
        return None if seconds is None else seconds * 1e3

    @property
    def lane(self) -> Lane | None:
        """The input of a resumable request."""
        return self._feeding.lane if self._feeding is not None else None

    def _touched(self) -> None:
        self.watch.touched()

    # ------------------------------------------------------------ admission

    async def admit(self) -> None:
        """Submits stage 0 and waits until it has taken the request.

        Raises what refused it. On any error, and when cancelled, the run is closed and nothing is
        left."""
        try:
            prepared = self._prepared()
            if self._submission.waits:
                # A task of its own, that closing the run can leave behind.
                prepared = self._unless_closed(prepared)
            self._submit_group(await prepared)
            self._graph.entry.node.pool.hurry()
            if self._feeding is not None:
                # Its prompt is input like any other: what refuses it refuses the request.
                await self._feeding.begin(self._submission.prompt)
                self.watch.input()
            await self._admission
        except OmniError as error:
            self.close(error)
            raise
        except BaseException:
            self.close(InternalError("internal error"))
            raise

    async def _prepared(self) -> list[CompanionRun]:
        await self._submission.transform()
        companions = await self._submission.companions()
        self._report.transform_ms = self._submission.transform_ms
        return [CompanionRun(self, role, task) for role, task in companions]

    async def _unless_closed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result; the run's error as soon as it is closed. A transform in its thread is
        not waited for."""
        working = owned_task(work, self.request_id, "preparing")
        try:
            await asyncio.wait((working, self._admission), return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        # Only now, and with no turn of the loop until the tasks are sent: what is sent for a run
        # that is closed already would never be aborted.
        if self.closed:
            await self._admission
        return working.result()

    def _accepted(self) -> Accepted:
        plan = self.plan
        return Accepted(
            self.request_id,
            plan.pipeline.name,
            tuple(node.name for node in plan.needed),
            tuple(
                plan.pipeline.output_format(node, plan.params[node.name]) for node in plan.finals
            ),
        )

    def _submit_group(self, companions: list[CompanionRun]) -> None:
        """Sends the request and its companions, in one turn of the loop and so in one message, to
        one replica of stage 0. All are registered before any is sent."""
        entry, submission = self._graph.entry, self._submission
        if companions and not any(hasattr(bridge, "join") for _, bridge in entry.consumers):
            log.error("pipeline %s: no bridge can hand on companions", self.plan.pipeline.name)
            raise InternalError("internal error")
        self._graph.group = Group(companions)
        # Nobody reads before all are admitted, and outputs of the first may come before the last
        # is: `accepted` is first.
        if not self._retried:
            self._routing.put(self._accepted())
        self._report.submitted()
        members: list[CompanionRun | StageRun] = [*companions, entry]
        tasks = [member.task for member in companions]
        tasks.append(submission.task(entry.node, submission.prompt))
        handles = entry.node.pool.submit(
            list(zip(tasks, members, strict=True)), self._tenant, running=self._retried
        )
        for member, handle in zip(members, handles, strict=True):
            member.began(handle)

    def _submit(self, stage: StageRun, prompt: Prompt | None) -> TaskHandle:
        history = stage.memory.messages() if stage.memory is not None else ()
        task = self._submission.task(stage.node, prompt, stage.answered, history)
        (handle,) = stage.node.pool.submit([(task, stage)], self._tenant, running=True)
        stage.began(handle)
        return handle

    @property
    def _tenant(self) -> str:
        return self.plan.request.options.tenant

    def ensure_started(self, stage: StageRun, prompt: Prompt | None = None) -> TaskHandle:
        """The stage's task, submitted now if it was not."""
        try:
            return stage.handle or self._submit(stage, prompt)
        except StageUnavailable as error:
            raise self._lost(error) from None

    def _lost(self, error: StageUnavailable) -> OmniError:
        """A stage without a replica, to this request's client: with outputs gone out, a retry would
        repeat them."""
        return ReplicaLost(error.message) if self.delivery.emitted else error

    def stage_fed(self, stage: StageRun, number: int, error: OmniError | None) -> None:
        """Stage 0's word on a client's chunk."""
        if self._feeding is not None and not self._over:
            self._feeding.answered(stage, number, error)

    async def ended(self) -> None:
        """Returns when the run takes no more input: it is complete, or closed."""
        await self._ended_event.wait()

    # ------------------------------------------------------------ events and interrupts

    def steer(
        self, event: InteractionEvent, listener: object | None, refusal: OmniError | None = None
    ) -> EventNotice:
        """An event for the running generation: the answer to it. What becomes of it later is heard
        by `listener` (a tap; None: the reader), in its place among the outputs. `refusal` is what
        is wrong with it, if that was seen before."""
        stage = self._graph.interactive
        if refusal is not None:
            pass
        elif self._over:
            refusal = NotSupported("the request has ended")
        elif stage is None or stage.handle is None or not stage.holds:
            refusal = NotSupported("no stage of the request takes events")
        notice, goes_on = self._ledger.submit(event, listener, refusal)
        if goes_on and stage is not None and stage.handle is not None:
            stage.handle.steer(event)
        return notice

    def _event_changed(self, change: EventChange) -> None:
        known, listener = self._ledger.changed(change)
        if known:
            self.delivery.put_changes([(listener, change)])

    def interrupt(self, played_ms: int | None) -> None:
        """Ends the present answer. Outputs that were not written are dropped, stages that work on
        it are started anew, and a conversation remembers what was heard: `played_ms` of the
        answer's sound, None all that was written. A request without further input is complete.
        Before it was admitted, and after its last event was taken, there is nothing to end."""
        if self.closed or not self._admission.done() or (self.completed and not len(self.delivery)):
            return
        epoch.withdraw(self._graph, self.delivery)
        self._report.pace.interrupted()
        keep = epoch.untouched(self._graph, self.lane)
        if keep is None or keep is not self._graph.interactive:
            self.delivery.put_changes(self._ledger.expire())
        self.delivery.put_for_all(Interrupted(self.delivery.epoch))
        if self.completed or self._feeding is None or self._feeding.lane.ended:
            self._complete()
            return
        try:
            epoch.restart(self._graph, self.delivery, self._feeding, keep, played_ms)
        except OmniError as error:
            self.close(error)
        self.regulate()

    # ------------------------------------------------------------ what stages say

    def stage_admitted(self, stage: StageRun, prepare_ms: float) -> None:
        """A stage has taken its task; at stage 0 this is the request's admission."""
        if self._over or stage is not self._graph.entry:
            return
        self._report.admitted(prepare_ms, told=stage.node.config.engine not in DIFFUSION)
        stage.admitted = True
        self.group_changed()

    def group_changed(self) -> None:
        """Something became of stage 0's task or of a companion: is the group admitted, is it
        complete?"""
        if self._over:
            return
        entry, group = self._graph.entry, self._graph.group
        if not self._admission.done() and entry.admitted and group.admitted:
            self._admission.set_result(None)
        if group.members and entry.ended and group.complete and not group.handed_on:
            group.handed_on = True
            self._routing.join(entry, group.outputs())

    def companion_lost(self, companion: CompanionRun) -> None:
        """The replica of a companion is gone: so is its parent's."""
        if companion in self._graph.group.members:  # and not of a group that was sent anew
            self.stage_lost(self._graph.entry)

    def companion_failed(self, error: OmniError) -> None:
        """A companion was refused or failed: under its parent's id, the client knows no other."""
        self.stage_refused(self._graph.entry, error)

    @property
    def _over(self) -> bool:
        return self.closed or self.completed

    def stage_refused(self, stage: StageRun, error: OmniError) -> None:
        """A stage did not take its task."""
        if self._over:
            return
        if isinstance(error, StageUnavailable):
            error = self._lost(error)
        self.close(self.plan.placed(stage.node.name, error))

    def stage_output(self, stage: StageRun, output: StageOutput) -> None:
        """A stage gave something: to the client if it is final, and over bridges to its
        consumers."""
        if self._over:
            return
        stage.heard_at, stage.gave = self._loop.time(), True
        if output.event is not None:
            self._event_changed(output.event)
        self._routing.route(stage, output)

    def stage_text(self, stage: StageRun, delta: TextDelta) -> None:
        """A stage gave plain text: what `stage_output` does, for what comes most."""
        if self._over:
            return
        stage.heard_at, stage.gave = self._loop.time(), True
        self._routing.route_text(stage, delta)

    def add_usage(self, usage: Usage) -> None:
        """Counts what a companion used."""
        self._report.usage += usage

    def regulate(self) -> None:
        """Something is taken, or is not: stages go on, or pause."""
        self._routing.regulate()

    def stage_ended(self, stage: StageRun, error: OmniError | None) -> None:
        """A stage's task ended. The request ends with an error, or when all its final stages have
        ended."""
        if self._over:
            return
        if error is not None:
            self.close(self.plan.placed(stage.node.name, error))
            return
        stage.ended, stage.ended_at = True, time.perf_counter()
        if stage is self._graph.interactive:
            self.delivery.put_changes(self._ledger.expire())
        if stage is self._graph.entry and self._graph.group.members:
            # Deferred until the companions are done too, but not for ever.
            self.watch.group()
            self.group_changed()
        else:
            self._routing.ended(stage)
        if self._graph.done:
            self._complete()

    def _complete(self) -> None:
        """All wanted outputs are there: what else runs for them stops. The request stays in flight
        until its reader has taken everything."""
        self.delivery.put_changes(self._ledger.close())
        self._routing.put(self._report.finished(self._graph))
        self.completed = True
        if self.lane is not None:
            self.lane.close(None)
        self.watch.rest()
        self.delivery.complete()
        self._graph.abort()
        self._ended_event.set()

    def stage_lost(self, stage: StageRun) -> None:
        """The replica of a stage is gone."""
        if self._over:
            return
        if self._may_retry(stage):
            self._retry()
            return
        where = f"a replica of stage {stage.node.name!r} was lost"
        retry_s = stage.node.config.restart.backoff
        self.close(self._lost(StageUnavailable(where, retry_after_s=retry_s)))

    def _may_retry(self, stage: StageRun) -> bool:
        """Whether the request can go to another replica as if nothing had been: stage 0 was lost
        before it gave anything, and all of its input is still here."""
        return (
            stage is self._graph.entry
            and self.plan.pipeline.config.retry
            and self.lane is None
            and not stage.gave
            and not self._retried
        )

    def _retry(self) -> None:
        self._retried = True
        members = self._graph.group.members
        again = [
            CompanionRun(self, member.role, self._submission.again(member.task))
            for member in members
        ]
        self._graph.restart(None, 0)
        self._submit_group(again)

    # ------------------------------------------------------------ the reader

    async def next(self) -> Numbered | Notice | None:
        """The next event, or notice where a session reads; None after `finished`. Raises the
        request's error. Cancelling loses nothing."""
        item = await self.delivery.next()
        if item is None:
            if self.error is not None:
                raise self.error
            self.close(None)
        elif isinstance(item, Numbered) and isinstance(item.event, Finished):
            # The client is told of success: nothing can make an error of it any more.
            self.close(None)
        return item

    # ------------------------------------------------------------ the end

    def close(self, error: OmniError | None) -> None:
        """Ends the request: None is success, after everything was read; an error drops what waits.

        Synchronous and idempotent; the first call decides. Stages that still hold the request are
        aborted."""
        if self.closed:
            return
        self.closed, self.error = True, error
        self.watch.stop()
        if self._admission.done():
            self._report.ended(self._graph, error)
        else:
            # Nobody may be waiting (the caller was cancelled): then there is nobody to tell.
            self._admission.set_exception(error or InternalError("internal error"))
            self._admission.exception()
        if self.lane is not None:
            self.lane.close(error)
        self.delivery.close(self._ledger.close(), discard=error is not None)
        self._graph.abort()
        self.artifacts.delete()
        self._on_close(self)
        self._ended_event.set()
        self.stage_released()

    def stage_released(self) -> None:
        """Notes that a replica let go; with the last one the run is released."""
        if self.closed and not self._graph.holders():
            self._released.set()

    async def released(self) -> None:
        """Returns when the run is closed and nothing is left of it, in replicas and on disk."""
        await self._released.wait()
        await self.artifacts.deleted()

    def statistics(self) -> dict[str, Any]:
        """What the run holds, for debugging and tests."""
        return {
            "request_id": self.request_id,
            "closed": self.closed,
            "completed": self.completed,
            "timers": self.watch.timers,
            "feeders": int(self.lane is not None and self.lane.fed),
            "attached_sessions": len(self.delivery.taps),
            "queued_events": len(self.delivery),
            "queued_bytes": self.delivery.bytes,
            "queued_notices": self.delivery.urgent,
            "held_by": [type(one).__name__ for one in self._graph.holders()],
            "artifacts": [str(directory) for directory in self.artifacts.directories],
        }
