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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from omni_grpc.artifacts import Artifacts
from omni_grpc.companions import CompanionRun, Group
from omni_grpc.errors import (
    DeadlineExceeded,
    InputTimeout,
    InternalError,
    OmniError,
    ReplicaLost,
    StageTimeout,
    StageUnavailable,
    Violation,
)
from omni_grpc.ipc import Task
from omni_grpc.lane import Chunk, Lane
from omni_grpc.outbox import Outbox
from omni_grpc.pipelines.bridges import BridgeContext
from omni_grpc.plan import Plan
from omni_grpc.replica import TaskHandle
from omni_grpc.report import Report
from omni_grpc.stage_run import StageRun
from omni_grpc.submission import DIFFUSION, Submission
from omni_grpc.types import (
    Accepted,
    Event,
    FinishReason,
    Output,
    Payload,
    Prompt,
    SegmentEnd,
    StageOutput,
    StageProgress,
    Usage,
)

log = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 120.0
"""Longest wait of a request for its companions, once its own stage 0 has ended."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """An event as it is written: `seq` counts from 0 without a gap."""

    seq: int
    epoch: int
    event: Event


class Run:
    """One admitted or soon to be admitted request. One reader iterates it with `next`."""

    def __init__(
        self, plan: Plan, queue_bytes: int, artifacts: Artifacts, on_close: Callable[[Run], None]
    ) -> None:
        self.plan = plan
        self.request_id = plan.request.request_id
        self.error: OmniError | None = None
        self.closed = False
        self.completed = False
        """Whether all wanted outputs are there; they may still wait for the client."""
        self.artifacts = artifacts
        self._loop = asyncio.get_running_loop()
        self._deadline_at = self._loop.time() + plan.timeout_s
        self._on_close = on_close
        self._outbox = Outbox(queue_bytes)
        self.lane = Lane(self, self._touched) if plan.request.resumable else None
        """The input of a resumable request."""
        self._next_seq = 0
        self._stages = self._build_stages()
        self._group = Group([])
        self._submission = Submission(plan, artifacts, self._deadline_at)
        self._admission: asyncio.Future[None] = self._loop.create_future()
        self._released = asyncio.Event()
        self._ended_event = asyncio.Event()
        self._emitted = False
        self._report = Report()
        self._touched_at = self._loop.time()
        self._chunk: Chunk | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._later("deadline", plan.timeout_s, self._expire)
        self._later("silence", self._silence_step(), self._watch_silence)

    def _build_stages(self) -> dict[str, StageRun]:
        needed = {node.name for node in self.plan.needed}
        stages = {node.name: StageRun(self, node) for node in self.plan.needed}
        for stage in stages.values():
            stage.final = stage.node in self.plan.finals
            for target in stage.node.consumers:
                if target in needed:
                    context = BridgeContext(
                        self.request_id, self.plan.request.prompt, stage.node.name, target
                    )
                    consumer = stages[target]
                    stage.consumers.append((consumer, consumer.node.bridge(context)))
        return stages

    # ------------------------------------------------------------ admission

    async def admit(self) -> None:
        """Submits stage 0 and waits until it has taken the request.

        Raises what refused it. On any error, and when cancelled, the run is closed and nothing is
        left."""
        try:
            await self._submission.transform()
            self._report.transform_ms = self._submission.transform_ms
            self._submit_group(await self._submission.companions())
            if self.lane is not None:
                # Its prompt is input like any other: what refuses it refuses the request.
                if not self.plan.request.prompt.empty:
                    await self.lane.begin(self._submission.prompt)
                self._watch_input()
            await self._admission
        except OmniError as error:
            self.close(error)
            raise
        except BaseException:
            self.close(InternalError("internal error"))
            raise

    @property
    def _entry(self) -> StageRun:
        return self._stages[self.plan.pipeline.entry.name]

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

    def _submit_group(self, companions: list[Task]) -> None:
        """Sends the request and its companions, in one turn of the loop and so in one message, to
        one replica of stage 0. All are registered before any is sent."""
        entry, submission = self._entry, self._submission
        self._group = Group([CompanionRun(self, task) for task in companions])
        replica = entry.node.pool.acquire()
        self._report.submitted()
        for member in self._group.members:
            member.began(replica.submit(member.task, member))
        entry.began(replica.submit(submission.task(entry.node, submission.prompt), entry))

    def _submit(self, stage: StageRun, prompt: Prompt | None) -> TaskHandle:
        replica = stage.node.pool.acquire()
        return stage.began(replica.submit(self._submission.task(stage.node, prompt), stage))

    def ensure_started(self, stage: StageRun, prompt: Prompt | None = None) -> TaskHandle:
        """The stage's task, submitted now if it was not."""
        try:
            return stage.handle or self._submit(stage, prompt)
        except StageUnavailable as error:
            # With outputs gone out, a retry would repeat them: that is a lost replica to the
            # client.
            raise (ReplicaLost(error.message) if self._emitted else error) from None

    def _hand_on(self, stage: StageRun, items: Iterable[Payload | Prompt]) -> None:
        """Gives a stage its next input. Where there are no segments, a prompt is what a task
        begins with."""
        for item in items:
            if not isinstance(item, Prompt):
                stage.feed(item)
            elif stage.handle is None and not self.plan.request.resumable:
                self.ensure_started(stage, item)
            else:
                stage.feed(prompt=item)

    # ------------------------------------------------------------ input

    async def viewed(self, chunk: Chunk) -> Chunk:
        """A client's chunk with its prompt as stage 0 sees it."""
        if chunk.prompt is None:
            return chunk
        try:
            prompt, _ = await self._submission.view(chunk.prompt, self.request_id)
        except BaseException:
            self.artifacts.drop_new()
            raise
        return replace(chunk, prompt=prompt)

    def send_chunk(self, number: int, chunk: Chunk, *, end: bool) -> None:
        """Sends a client's chunk to stage 0."""
        self._chunk = chunk
        self._entry.feed(
            chunk.payload,
            prompt=chunk.prompt,
            params=chunk.params.get(self._entry.node.name),
            end_of_segment=chunk.end_of_segment,
            end=end,
            number=number,
        )

    def stage_fed(self, stage: StageRun, number: int, error: OmniError | None) -> None:
        """Stage 0's word on a client's chunk."""
        if self.lane is None or self._over:
            return
        if error is not None:
            error = self._placed(stage, error, self._chunk)
            self.artifacts.drop_new()
        else:
            self.artifacts.keep_new()
            self._note_params(self._chunk, self.lane.segments)
        self.lane.answered(number, error)

    def _note_params(self, chunk: Chunk | None, segment: int) -> None:
        """Keeps a segment's own parameters for the stages that will come to it later. Only now: a
        chunk that is refused leaves none."""
        for name, params in chunk.params.items() if chunk is not None else ():
            if name in self._stages and name != self._entry.node.name:
                self._stages[name].segment_params[segment] = params

    def _touched(self) -> None:
        self._touched_at = self._loop.time()

    def _watch_input(self) -> None:
        """Ends a request whose input stays away for `input_timeout` while nothing else happens."""
        assert self.lane is not None
        if self.closed or self.lane.ended:
            return
        limit = self.plan.pipeline.config.input_timeout
        idle = self._loop.time() - self._touched_at
        answering = any(s.answered < self.lane.segments for s in self._stages.values())
        if idle >= limit and self.lane.waits and not answering:
            self.close(InputTimeout(f"no input came for {limit:g} s"))
        else:
            self._later("input", max(limit - idle, limit / 20), self._watch_input)

    async def ended(self) -> None:
        """Returns when the run takes no more input: it is complete, or closed."""
        await self._ended_event.wait()

    # ------------------------------------------------------------ clocks

    def _later(self, name: str, delay: float, call: Callable[[], None]) -> None:
        """Calls back after `delay` seconds, unless the run is closed by then. One timer per
        name."""
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_later(delay, call)

    def _silence_step(self) -> float:
        return min(node.config.stage_timeout for node in self.plan.needed) / 4

    def _watch_silence(self) -> None:
        """Ends a request of which a stage that has input to work on has said nothing for its
        `stage_timeout`."""
        if self.closed or self.completed:
            return
        now = self._loop.time()
        for stage in self._stages.values():
            limit = stage.node.config.stage_timeout
            if self._works(stage) and now - stage.heard_at > limit:
                name = stage.node.name
                self.close(StageTimeout(f"stage {name!r} gave nothing for {limit:g} s"))
                return
        self._later("silence", self._silence_step(), self._watch_silence)

    def _works(self, stage: StageRun) -> bool:
        """Whether it is this stage's turn: it holds a task, is not held back, and waits neither for
        another stage nor for the client."""
        if not stage.holds or stage.handle is None or stage.handle.held:
            return False
        if stage is self._entry:
            return self.lane is None or self.lane.answering(stage.answered)
        return stage.input_complete or stage.congested

    # ------------------------------------------------------------ what stages say

    def stage_admitted(self, stage: StageRun, prepare_ms: float) -> None:
        """A stage has taken its task; at stage 0 this is the request's admission."""
        if self._over or stage is not self._entry:
            return
        self._report.admitted(0.0 if stage.node.config.engine in DIFFUSION else prepare_ms)
        stage.admitted = True
        self.group_changed()

    def group_changed(self) -> None:
        """Something became of stage 0's task or of a companion: is the group admitted, is it
        complete?"""
        if self._over:
            return
        entry, group = self._entry, self._group
        if not self._admission.done() and entry.admitted and group.admitted:
            # Here and not in `admit`: outputs may come in this same turn of the loop, and
            # `accepted` is first.
            self._put(self._accepted())
            self._admission.set_result(None)
        if group.members and entry.ended and group.complete and not group.handed_on:
            group.handed_on = True
            outputs = group.outputs()
            for consumer, bridge in entry.consumers:
                join = getattr(bridge, "join", None)
                self._hand_on(consumer, join(outputs) if join is not None else bridge.finish())
                consumer.source_ended(entry.node.name)

    def companion_lost(self) -> None:
        """The replica of a companion is gone: so is its parent's."""
        self.stage_lost(self._entry)

    def add_usage(self, usage: Usage) -> None:
        """Counts what a stage or a companion used."""
        self._report.usage += usage

    @property
    def _over(self) -> bool:
        return self.closed or self.completed

    def stage_refused(self, stage: StageRun, error: OmniError) -> None:
        """A stage did not take its task."""
        self.close(self._placed(stage, error))

    def _placed(self, stage: StageRun, error: OmniError, chunk: Chunk | None = None) -> OmniError:
        """The error with the client's own paths: a stage knows "params" and "prompt" only, of the
        request or of the chunk that it refuses."""
        paths, root = self.plan.params_paths, ""
        if chunk is not None and chunk.seq >= 0:
            paths, root = paths | chunk.paths, "chunk."
        params = paths.get(stage.node.name, f"stage_params({stage.node.name})")
        if error.violations:
            error.violations = tuple(
                Violation(_place(v.field, params, root), v.description) for v in error.violations
            )
            error.message = "; ".join(f"{v.field}: {v.description}" for v in error.violations[:5])
        return error

    def stage_output(self, stage: StageRun, output: StageOutput) -> None:
        """A stage gave something: to the client if it is final, and over bridges to its
        consumers."""
        if self._over:
            return
        stage.heard_at = self._loop.time()
        if output.usage is not None:
            self.add_usage(output.usage)
        if output.payload is not None:
            if stage.final:
                self._emit(stage, output)
            if output.index == 0:
                for consumer, bridge in stage.consumers:
                    self._hand_on(consumer, bridge.push(output.payload))
        if output.progress is not None:
            self._put(StageProgress(stage.node.name, output.progress))
        if output.finish is not None:
            self._report.finish(stage.node.name, output.index, output.finish)
            if output.segment_end:
                self._segment_ended(stage, output.segment, output.finish.reason)

    def _segment_ended(self, stage: StageRun, segment: int, reason: FinishReason) -> None:
        self._touched()
        stage.answered += 1
        self._put(SegmentEnd(segment, stage.node.name, reason))
        for consumer, bridge in stage.consumers:
            self._hand_on(consumer, bridge.finish())
            consumer.source_segment_ended(stage.node.name)

    def _emit(self, stage: StageRun, output: StageOutput) -> None:
        assert output.payload is not None and stage.node.config.output is not None
        self._report.output(stage.node.config.output)
        self._touched()
        for content in stage.cutter.cut(output.payload):
            self._put(Output(stage.node.name, output.index, output.segment, content))

    def _put(self, event: Event) -> None:
        self._outbox.put(event)
        if self._outbox.congested:
            self.regulate()

    def regulate(self) -> None:
        """Holds back the credit of stages that run ahead of the client or of a stage behind them,
        and gives it where nothing is in the way any more."""
        slow_client = not self._outbox.drained
        for stage in self._stages.values():
            if stage.handle is None or not stage.holds:
                continue
            ahead = any(consumer.congested for consumer, _ in stage.consumers)
            if slow_client or ahead:
                stage.handle.held = True
            elif stage.handle.held:
                stage.handle.release_credit()

    def stage_ended(self, stage: StageRun, error: OmniError | None) -> None:
        """A stage's task ended. The request ends with an error, or when all its final stages have
        ended."""
        if self._over:
            return
        if error is not None:
            self.close(self._placed(stage, error))
            return
        stage.ended, stage.ended_at = True, time.perf_counter()
        if stage is self._entry and self._group.members:
            # Deferred until the companions are done too, but not for ever.
            self._later("group", GROUP_TIMEOUT_S, self._group_late)
            self.group_changed()
        else:
            for consumer, bridge in stage.consumers:
                self._hand_on(consumer, bridge.finish())
                consumer.source_ended(stage.node.name)
        if all(s.ended for s in self._stages.values() if s.final):
            self._complete()

    def _complete(self) -> None:
        """All wanted outputs are there: what else runs for them stops. The request stays in flight
        until its reader has taken everything."""
        self._put(self._report.finished(self._stages.values()))
        self.completed = True
        if self.lane is not None:
            self.lane.close(None)
        self._outbox.close(discard=False)
        self._abort_holders()
        self._ended_event.set()

    def stage_lost(self, stage: StageRun) -> None:
        """The replica of a stage is gone."""
        if self._over:
            return
        where = f"a replica of stage {stage.node.name!r} was lost"
        if self._emitted:
            self.close(ReplicaLost(where))
        else:
            self.close(StageUnavailable(where, retry_after_s=stage.node.config.restart.backoff))

    def _group_late(self) -> None:
        if not self._group.handed_on:
            self.close(StageTimeout("guidance companions did not finish in time"))

    # ------------------------------------------------------------ the reader

    async def next(self) -> Numbered | None:
        """The next event; None after `finished`. Raises the request's error. Cancelling loses
        nothing."""
        held_back = not self._outbox.drained
        event = await self._outbox.get()
        if event is None:
            if self.error is not None:
                raise self.error
            self.close(None)
            return None
        if held_back and self._outbox.drained:
            self.regulate()
        self._emitted = self._emitted or isinstance(event, Output)
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return Numbered(seq, 0, event)

    # ------------------------------------------------------------ the end

    def _expire(self) -> None:
        self.close(DeadlineExceeded("the request's deadline passed"))

    def close(self, error: OmniError | None) -> None:
        """Ends the request: None is success, after everything was read; an error drops what waits.

        Synchronous and idempotent; the first call decides. Stages that still hold the request are
        aborted."""
        if self.closed:
            return
        self.closed, self.error = True, error
        for timer in self._timers.values():
            timer.cancel()
        if not self._admission.done():
            # Nobody may be waiting (the caller was cancelled): then there is nobody to tell.
            self._admission.set_exception(error or InternalError("internal error"))
            self._admission.exception()
        if self.lane is not None:
            self.lane.close(error)
        self._outbox.close(discard=error is not None)
        self._abort_holders()
        self.artifacts.delete()
        self._on_close(self)
        self._ended_event.set()
        self.stage_released()

    def _abort_holders(self) -> None:
        for holder in self._holders():
            if holder.handle is not None:
                holder.handle.abort()

    def stage_released(self) -> None:
        """Notes that a replica let go; with the last one the run is released."""
        if self.closed and not self._holders():
            self._released.set()

    def _holders(self) -> list[StageRun | CompanionRun]:
        """Whose tasks replicas still hold."""
        stages = [stage for stage in self._stages.values() if stage.holds]
        return [*stages, *(member for member in self._group.members if member.holds)]

    async def released(self) -> None:
        """Returns when the run is closed and no replica holds anything of it."""
        await self._released.wait()

    def statistics(self) -> dict[str, Any]:
        """What the run holds, for debugging and tests."""
        return {
            "request_id": self.request_id,
            "closed": self.closed,
            "queued_events": len(self._outbox),
            "queued_bytes": self._outbox.bytes,
            "held_by": [type(one).__name__ for one in self._holders()],
            "artifacts": [str(directory) for directory in self.artifacts.directories],
        }


def _place(field: str, params: str, root: str) -> str:
    head, dot, rest = field.partition(".")
    if head == "params":
        return params + dot + rest
    return root + field if head == "prompt" else field
