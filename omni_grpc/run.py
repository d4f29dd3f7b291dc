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
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from omni_grpc.artifacts import Artifacts
from omni_grpc.companions import CompanionRun, Group
from omni_grpc.conversation import Conversation, Timeline
from omni_grpc.errors import (
    DeadlineExceeded,
    InputTimeout,
    InternalError,
    NotSupported,
    OmniError,
    ReplicaLost,
    StageTimeout,
    StageUnavailable,
    Violation,
)
from omni_grpc.graph import Graph
from omni_grpc.lane import Chunk, Lane
from omni_grpc.ledger import Ledger
from omni_grpc.outbox import Numbered, Outbox, Routed
from omni_grpc.plan import Plan
from omni_grpc.replica import TaskHandle
from omni_grpc.report import Report
from omni_grpc.stage_run import StageRun
from omni_grpc.submission import DIFFUSION, Submission
from omni_grpc.types import (
    Accepted,
    AudioChunk,
    AudioFormat,
    Event,
    EventChange,
    EventNotice,
    Finished,
    FinishReason,
    InteractionEvent,
    Interrupted,
    Notice,
    Output,
    Payload,
    Prompt,
    SegmentEnd,
    StageOutput,
    StageProgress,
    Tensors,
    TextDelta,
    Usage,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

GROUP_TIMEOUT_S = 120.0
"""Longest wait of a request for its companions, once its own stage 0 has ended."""


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
        self.epoch = 0
        self.owned_by_session = False
        """Whether the reader wants notices among the events."""
        self.taps: list[Outbox] = []
        """Copies of everything from now on, for sessions that attached. One that falls behind is
        closed."""
        self._graph = Graph(self, plan)
        self._ledger = Ledger()
        self._timeline = Timeline()
        self._submission = Submission(plan, artifacts, self._deadline_at)
        self._admission: asyncio.Future[None] = self._loop.create_future()
        self._released = asyncio.Event()
        self._ended_event = asyncio.Event()
        self._emitted = False
        self._report = Report()
        self._touched_at = self._loop.time()
        self._chunk: Chunk | None = None
        self._retried = False
        self._chunk_artifacts: Artifacts | None = None
        """What the chunk that is under way brought."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._later("deadline", plan.timeout_s, self._expire)
        self._later("silence", self._silence_step(), self._watch_silence)

    # ------------------------------------------------------------ admission

    async def admit(self) -> None:
        """Submits stage 0 and waits until it has taken the request.

        Raises what refused it. On any error, and when cancelled, the run is closed and nothing is
        left."""
        try:
            self._submit_group(await self._unless_closed(self._prepared()))
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

    async def _prepared(self) -> list[CompanionRun]:
        await self._submission.transform()
        companions = await self._submission.companions()
        self._report.transform_ms = self._submission.transform_ms
        return [CompanionRun(self, role, task) for role, task in companions]

    async def _unless_closed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The work's result; the run's error as soon as it is closed. A transform in its thread is
        not waited for."""
        working = asyncio.create_task(work)
        try:
            await asyncio.wait((working, self._admission), return_when=asyncio.FIRST_COMPLETED)
            if self.closed:
                await self._admission
            return working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

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
        replica = entry.node.pool.acquire()
        # Nobody reads before all are admitted, and outputs of the first may come before the last
        # is: `accepted` is first.
        if not self._retried:
            self._put(self._accepted())
        self._report.submitted()
        for member in self._graph.group.members:
            member.began(replica.submit(member.task, member))
        entry.began(replica.submit(submission.task(entry.node, submission.prompt), entry))

    def _submit(self, stage: StageRun, prompt: Prompt | None) -> TaskHandle:
        history = stage.memory.messages() if stage.memory is not None else ()
        task = self._submission.task(stage.node, prompt, stage.answered, history)
        return stage.began(stage.node.pool.acquire().submit(task, stage))

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
            if stage.memory is not None and isinstance(item, Prompt):
                stage.memory.ask(item)
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
        artifacts = self.artifacts.part()
        try:
            prompt, _ = await self._submission.view(chunk.prompt, self.request_id, artifacts)
        except BaseException:
            artifacts.delete()
            raise
        self._chunk_artifacts = artifacts
        return replace(chunk, prompt=prompt)

    def send_chunk(self, number: int, chunk: Chunk, *, end: bool) -> None:
        """Sends a client's chunk to stage 0."""
        self._chunk = chunk
        self._graph.entry.feed(
            chunk.payload,
            prompt=chunk.prompt,
            params=chunk.params.get(self._graph.entry.node.name),
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
        else:
            self._note_params(self._chunk, self.lane.segments)
            if stage.memory is not None and self._chunk is not None:
                remember(stage.memory, self._chunk)
        brought, self._chunk_artifacts = self._chunk_artifacts, None
        if brought is not None:
            brought.keep() if error is None else brought.delete()
        self.lane.answered(number, error)

    def _note_params(self, chunk: Chunk | None, segment: int) -> None:
        """Keeps a segment's own parameters for the stages that will come to it later. Only now: a
        chunk that is refused leaves none."""
        for name, params in chunk.params.items() if chunk is not None else ():
            stage = self._graph.get(name)
            if stage is not None and stage is not self._graph.entry:
                stage.segment_params[segment] = params

    def _touched(self) -> None:
        self._touched_at = self._loop.time()

    def _watch_input(self) -> None:
        """Ends a request whose input stays away for `input_timeout` while nothing else happens."""
        assert self.lane is not None
        if self.closed or self.lane.ended:
            return
        limit = self.plan.pipeline.config.input_timeout
        idle = self._loop.time() - self._touched_at
        answering = any(s.answered < self.lane.segments for s in self._graph)
        if idle >= limit and self.lane.waits and not answering:
            self.close(InputTimeout(f"no input came for {limit:g} s"))
        else:
            self._later("input", max(limit - idle, limit / 20), self._watch_input)

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
            self._put_changes([(listener, change)])

    def put_notice(self, notice: Notice) -> None:
        """Tells the session that owns this request, before everything that waits."""
        self._outbox.put_urgent(Routed(notice, self))

    def notify(self, notice: Notice) -> None:
        """Tells every session of this request, at once."""
        if self.owned_by_session:
            self.put_notice(notice)
        for tap in self.taps:
            tap.put_urgent(Routed(notice, tap))

    def interrupt(self, played_ms: int | None) -> None:
        """Ends the present answer. Outputs that were not written are dropped, stages that work on
        it are started anew, and a conversation remembers what was heard: `played_ms` of the
        answer's sound, None all that was written. A request without further input is complete.
        Before it was admitted, and after its last event was taken, there is nothing to end."""
        if self.closed or not self._admission.done() or (self.completed and not len(self._outbox)):
            return
        self.epoch += 1
        for output in self._outbox.discard_outputs():
            if stage := self._graph.get(output.stage):
                stage.cutter.withdraw(output.content)
        keep = self._untouched()
        if keep is None or keep is not self._graph.interactive:
            self._put_changes(self._ledger.expire())
        self._outbox.put(Routed(Interrupted(self.epoch)))
        if self.completed or self.lane is None or self.lane.ended:
            self._complete()
            return
        try:
            self._restart(self.lane, keep, self._heard(played_ms))
        except OmniError as error:
            self.close(error)
        self.regulate()

    def _untouched(self) -> StageRun | None:
        """Stage 0, if it has no part in the present answer and need not begin anew."""
        entry = self._graph.entry
        if self.lane is None or entry.memory is not None or entry.answered < self.lane.segments:
            return None
        return entry

    def _heard(self, played_ms: int | None) -> str | None:
        """The words of the answer that is spoken which were heard; None: what there is, all of
        it."""
        spoken = any(isinstance(s.node.pool.facts.output_format, AudioFormat) for s in self._finals)
        if not spoken or (played_ms is None and self._timeline.answer is None):
            return None
        return self._timeline.heard(
            self._timeline.delivered_ms if played_ms is None else float(played_ms)
        )

    @property
    def _finals(self) -> list[StageRun]:
        return [stage for stage in self._graph if stage.final]

    def _restart(self, lane: Lane, keep: StageRun | None, heard: str | None) -> None:
        """New tasks for all stages but `keep`; they begin with the segment that is open."""
        for stage in self._graph:
            if stage.memory is not None:
                stage.memory.cut(heard, self._timeline.answer)
                stage.memory.next_answer = lane.segments
        self._graph.restart(keep, lane.segments)
        entry = self._graph.entry
        for chunk in lane.open_chunks:
            self._note_params(chunk, lane.segments)
            if keep is None:
                params = chunk.params.get(entry.node.name)
                entry.feed(chunk.payload, prompt=chunk.prompt, params=params)
        if keep is None:
            lane.resend()

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
        for stage in self._graph:
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
        if stage is self._graph.entry:
            return self.lane is None or self.lane.answering(stage.answered)
        return stage.input_complete or stage.congested

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
            outputs = group.outputs()
            for consumer, bridge in entry.consumers:
                join = getattr(bridge, "join", None)
                self._hand_on(consumer, join(outputs) if join is not None else bridge.finish())
                consumer.source_ended(entry.node.name)

    def companion_lost(self, companion: CompanionRun) -> None:
        """The replica of a companion is gone: so is its parent's."""
        if companion in self._graph.group.members:  # and not of a group that was sent anew
            self.stage_lost(self._graph.entry)

    def companion_failed(self, error: OmniError) -> None:
        """A companion was refused or failed: under its parent's id, the client knows no other."""
        self.stage_refused(self._graph.entry, error)

    def add_usage(self, usage: Usage) -> None:
        """Counts what a stage or a companion used."""
        self._report.usage += usage

    @property
    def _over(self) -> bool:
        return self.closed or self.completed

    def stage_refused(self, stage: StageRun, error: OmniError) -> None:
        """A stage did not take its task."""
        if not self._over:
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
        stage.heard_at, stage.gave = self._loop.time(), True
        if output.event is not None:
            self._event_changed(output.event)
        if output.usage is not None:
            self.add_usage(output.usage)
        if output.payload is not None:
            self._remember(stage, output.segment, output.payload)
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

    def _remember(self, stage: StageRun, segment: int, payload: Payload) -> None:
        if stage.memory is not None and isinstance(payload, TextDelta):
            stage.memory.answer(payload.text)
        if isinstance(payload, Tensors):
            self._timeline.speak(segment, payload)

    def _segment_ended(self, stage: StageRun, segment: int, reason: FinishReason) -> None:
        self._touched()
        stage.answered += 1
        if stage.memory is not None:
            stage.memory.close()
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
        for stage in self._graph:
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
        if stage is self._graph.interactive:
            self._put_changes(self._ledger.expire())
        if stage is self._graph.entry and self._graph.group.members:
            # Deferred until the companions are done too, but not for ever.
            self._later("group", GROUP_TIMEOUT_S, self._group_late)
            self.group_changed()
        else:
            for consumer, bridge in stage.consumers:
                self._hand_on(consumer, bridge.finish())
                consumer.source_ended(stage.node.name)
        if self._graph.done:
            self._complete()

    def _complete(self) -> None:
        """All wanted outputs are there: what else runs for them stops. The request stays in flight
        until its reader has taken everything."""
        self._put_changes(self._ledger.close())
        self._put(self._report.finished(self._graph))
        self.completed = True
        if self.lane is not None:
            self.lane.close(None)
        self._outbox.close(discard=False)
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
        if self._emitted:
            self.close(ReplicaLost(where))
        else:
            self.close(StageUnavailable(where, retry_after_s=stage.node.config.restart.backoff))

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

    def _group_late(self) -> None:
        if not self._graph.group.handed_on:
            self.close(StageTimeout("guidance companions did not finish in time"))

    # ------------------------------------------------------------ the reader

    async def next(self) -> Numbered | Notice | None:
        """The next event, or notice where a session reads; None after `finished`. Raises the
        request's error. Cancelling loses nothing."""
        while True:
            held_back = not self._outbox.drained
            item = await self._outbox.get()
            if held_back and self._outbox.drained:
                self.regulate()
            if isinstance(item, Routed):
                if self._route(item) and self.owned_by_session:
                    return item.notice
            elif item is None:
                if self.error is not None:
                    raise self.error
                self.close(None)
                return None
            elif not isinstance(item, Numbered):
                return self._number(item)

    def _route(self, routed: Routed) -> bool:
        """Hands a notice to the sessions that it is for; whether the reader is among them."""
        for tap in self.taps:
            if routed.listener in (None, tap):
                tap.put(Routed(routed.notice, tap))
        return routed.listener in (None, self)

    def _number(self, event: Event) -> Numbered:
        self._emitted = self._emitted or isinstance(event, Output)
        if isinstance(event, Output) and isinstance(event.content, AudioChunk):
            form = event.content.format
            samples = len(event.content.data) // form.frame_width
            self._timeline.deliver(event.segment, samples * 1e3 / form.sample_rate_hz)
        numbered = Numbered(self._next_seq, self.epoch, event)
        self._next_seq += 1
        for tap in self.taps:
            tap.put(numbered)
            if tap.congested:
                # Its session is told so; what it did not read is freed now.
                tap.overrun()
        if isinstance(event, Finished):
            # The client is told of success: nothing can make an error of it any more.
            self.close(None)
        return numbered

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
        # Those that listen hear of their events even where all else is dropped.
        for routed in self._outbox.abandon() if error is not None else ():
            if self._route(routed):
                self.put_notice(routed.notice)
        for listener, change in self._ledger.close():
            self._tell(listener, EventNotice(change))
        self._outbox.close(discard=False)
        for tap in self.taps:
            tap.close(discard=False)
        self._graph.abort()
        self.artifacts.delete()
        self._on_close(self)
        self._ended_event.set()
        self.stage_released()

    def _put_changes(self, changes: Iterable[tuple[Any, EventChange]]) -> None:
        """Tells what became of events, in its place among the outputs."""
        for listener, change in changes:
            self._outbox.put(Routed(EventNotice(change), self if listener is None else listener))

    def _tell(self, listener: Outbox | None, notice: Notice) -> None:
        if listener is None:
            self.put_notice(notice)
        else:
            listener.put(Routed(notice, listener))

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
            "queued_events": len(self._outbox),
            "queued_bytes": self._outbox.bytes,
            "held_by": [type(one).__name__ for one in self._graph.holders()],
            "artifacts": [str(directory) for directory in self.artifacts.directories],
        }


def remember(memory: Conversation, chunk: Chunk) -> None:
    """Adds a client's chunk to what a conversation was asked."""
    if chunk.prompt is not None:
        memory.ask(chunk.prompt)
    if isinstance(chunk.payload, TextDelta):
        memory.ask_text(chunk.payload.text)
    if chunk.end_of_segment:
        memory.asked()


def _place(field: str, params: str, root: str) -> str:
    head, dot, rest = field.partition(".")
    if head == "params":
        return params + dot + rest
    return root + field if head == "prompt" else field
