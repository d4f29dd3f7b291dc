"""The main program of a replica process: hosts one stage, runs its tasks, speaks `ipc` with the
server.

    python -m omni_grpc.stages.host SERVER_PID ADDRESS

One asyncio task per request; outputs of one turn of the loop leave in one message. Everything that
goes wrong with one task ends that task only."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import uvloop
import zmq

from omni_grpc.channel import Channel
from omni_grpc.errors import DeadlineExceeded, InternalError, OmniError, StageError
from omni_grpc.ipc import (
    CREDIT_STEP,
    Abort,
    Admitted,
    Control,
    ControlDone,
    Credit,
    Emitted,
    Ended,
    Fed,
    Feed,
    FromReplica,
    Heartbeat,
    Hello,
    Pace,
    Ready,
    Refused,
    Spoken,
    Start,
    StartFailed,
    Steer,
    Stop,
    Submit,
    Taken,
    Task,
    ToReplica,
    payload_size,
)
from omni_grpc.stages import guard, registry
from omni_grpc.stages.base import Inputs, ReplicaDead, Stage
from omni_grpc.stages.outflow import Outflow, Stream
from omni_grpc.types import (
    EventChange,
    EventState,
    InteractionEvent,
    StageOutput,
    StageStatistics,
    TextDelta,
)

log = logging.getLogger("omni_grpc.replica")

HEARTBEAT_S = 1.0


@dataclass(slots=True)
class Job:
    """A task in this process."""

    task: Task
    outputs: Stream
    inputs: Inputs = field(default_factory=Inputs)
    runner: asyncio.Task[None] | None = None
    steering: asyncio.Task[None] | None = None
    """Takes the event that came last; each waits for the one before."""
    feeder: asyncio.Task[None] | None = None
    """Checks the client's chunk that is under way; there is never more than one."""
    prepared: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    taken: int = 0
    """Bytes that the stage took and the server was not told of yet."""
    failure: OmniError | None = None
    """Why the runner was cancelled, if it was not by Abort."""


class Host:
    """Runs the tasks of one loaded stage."""

    def __init__(self, stage: Stage[Any], channel: Channel[FromReplica, ToReplica]) -> None:
        self._stage = stage
        self._channel = channel
        self._outflow = Outflow(channel.send)
        self._jobs: dict[int, Job] = {}
        self._controls: set[asyncio.Task[None]] = set()
        channel.repair = self._repaired
        channel.on_unreadable = self._unreadable

    def _unreadable(self, message: dict[str, Any]) -> None:
        """The server sent what is of no known form, from a bridge of the user's own: the task that
        it is about fails, and only that."""
        about = message.get("task")
        task = about.get("id") if isinstance(about, dict) else about
        if not isinstance(task, int):
            return
        error = StageError(f"stage {self._stage.spec.stage!r} was given what it cannot read")
        job = self._jobs.get(task)
        if job is None or job.runner is None:
            self._channel.send(Refused(task, error.record()))
        else:
            job.failure = error
            job.runner.cancel()

    def _repaired(
        self, batch: list[FromReplica], sendable: Callable[[FromReplica], bool]
    ) -> list[FromReplica]:
        """A stage gave something that no message can carry: its task fails, and only that."""
        failed: set[int] = set()
        error = StageError(f"stage {self._stage.spec.stage!r} failed")
        repaired: list[FromReplica] = []
        for message in _apart(batch):
            if isinstance(message, Emitted) and (message.task in failed or not sendable(message)):
                failed.add(message.task)
            elif isinstance(message, Ended) and message.task in failed:
                repaired.append(Ended(message.task, error.record()))
            else:
                repaired.append(message)
        for task in failed:
            job = self._jobs.get(task)
            if job is not None and job.runner is not None:
                job.failure = error
                job.runner.cancel()
        return repaired

    async def serve(self) -> None:
        """Handles messages until Stop, then ends all tasks."""
        heart = asyncio.create_task(self._beat())
        try:
            while True:
                for message in await self._channel.receive():
                    if isinstance(message, Stop):
                        return
                    self._handle(message)
        finally:
            heart.cancel()
            await self._end_all()

    def _handle(self, message: ToReplica) -> None:
        match message:
            case Submit(task):
                stream = Stream(
                    self._outflow, task.id, joins=task.joins, segment=task.first_segment
                )
                job = self._jobs[task.id] = Job(task, stream)
                job.inputs = Inputs(partial(self._taken, job))
                if not task.streaming:
                    job.inputs.put(Feed(task.id, end=True))
                job.runner = asyncio.create_task(self._run(job))
            case Feed():
                if target := self._jobs.get(message.task):
                    self._feed(target, message)
            case Steer():
                if target := self._jobs.get(message.task):
                    before, event = target.steering, message.event
                    target.steering = asyncio.create_task(self._steer(target, event, before))
            case Credit():
                if target := self._jobs.get(message.task):
                    target.outputs.give(message.bytes)
            case Abort():
                if (target := self._jobs.get(message.task)) and target.runner:
                    # Soon, not now: cancelled before its first step, it would say no last word.
                    asyncio.get_running_loop().call_soon(target.runner.cancel)
            case Pace():
                self._outflow.window = message.window_s
            case Control():
                call = asyncio.create_task(self._control(message))
                self._controls.add(call)
                call.add_done_callback(self._controls.discard)
            case _:
                log.error("unexpected message %s", type(message).__name__)

    async def _run(self, job: Job) -> None:
        """One task from prepare to its last word: Refused, or Admitted … Ended."""
        task, admitted = job.task, False
        error: OmniError | None = None
        try:
            if task.timeout_s <= 0:
                raise DeadlineExceeded("the deadline had passed before the stage began")
            async with asyncio.timeout(task.timeout_s) as deadline:
                started = time.perf_counter()
                prepared = await self._stage.prepare(task)
                admitted = True
                elapsed = (time.perf_counter() - started) * 1e3
                self._channel.send(Admitted(task.id, elapsed))
                job.prepared.set_result(prepared)
                await self._pump(job, prepared)
        except OmniError as reason:
            error = reason
        except TimeoutError:
            error = (
                DeadlineExceeded("the deadline passed in a stage")
                if deadline.expired()
                else self._failed("timed out inside the engine")
            )
        except asyncio.CancelledError:
            if job.failure is not None:
                error = job.failure
            elif not _cancelled_for_real():
                error = self._failed("cancelled itself")
            elif not admitted:
                # By Abort: the server knows, and hears that all is freed.
                error = InternalError("aborted")
        except ReplicaDead:
            _die()
        except Exception:
            error = self._failed("raised")
        finally:
            del self._jobs[task.id]
            job.outputs.drop()
            for helper in (job.feeder, job.steering):
                if helper is not None:
                    helper.cancel()
            job.prepared.cancel()
            record = error.record() if error is not None else None
            if admitted or record is None:
                self._outflow.emit(Ended(task.id, record))
            else:
                self._channel.send(Refused(task.id, record))

    async def _pump(self, job: Job, prepared: Any) -> None:
        stream = job.outputs
        self._stage.shorten(prepared, stream.say)
        async with aclosing(self._stage.run(job.task, prepared, job.inputs)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                await stream.room()
                stream.put(output)
        stream.close()

    def _feed(self, job: Job, feed: Feed) -> None:
        if feed.number is None:
            job.inputs.put(feed)
        else:
            job.feeder = asyncio.create_task(self._feed_checked(job, feed, feed.number))

    def _taken(self, job: Job, feed: Feed) -> None:
        """Tells the server in steps what a stage took of other stages' outputs."""
        if feed.payload is None or feed.number is not None:
            return
        job.taken += payload_size(feed.payload)
        if job.taken >= CREDIT_STEP:
            self._channel.send(Taken(job.task.id, job.taken))
            job.taken = 0

    async def _feed_checked(self, job: Job, feed: Feed, number: int) -> None:
        """A client's chunk: checked by the stage, put when there is room, answered with Fed."""
        error: OmniError | None = None
        try:
            prepared = await job.prepared
            await self._stage.prepare_update(job.task, prepared, feed)
            await job.inputs.room()
            job.inputs.put(feed)
        except OmniError as reason:
            error = reason
        except Exception:
            error = job.failure = self._failed("raised at an update")
            if job.runner is not None:
                job.runner.cancel()
        self._channel.send(Fed(job.task.id, number, error.record() if error else None))

    async def _steer(
        self, job: Job, event: InteractionEvent, before: asyncio.Task[None] | None
    ) -> None:
        """One event: after the one before it, so that the newer one is the one that stays."""
        if before is not None:
            await asyncio.wait([before])
        changes: list[EventChange]
        try:
            prepared = await job.prepared
            changes = await self._stage.steer(job.task, prepared, event)
        except OmniError as reason:
            rejected = EventState.REJECTED
            changes = [EventChange(event.event_id, rejected, error=reason.record())]
        except Exception:
            error = self._failed("raised at an event")
            rejected = EventState.REJECTED
            changes = [EventChange(event.event_id, rejected, error=error.record())]
        for change in changes:
            self._channel.send(Emitted(job.task.id, StageOutput(event=change)))

    def _failed(self, what: str) -> StageError:
        log.exception("stage %s %s", self._stage.spec.stage, what)
        return StageError(f"stage {self._stage.spec.stage!r} failed")

    async def _control(self, message: Control) -> None:
        error: OmniError | None = None
        try:
            await self._stage.control(message.command, message.arguments)
        except OmniError as reason:
            error = reason
        except ReplicaDead:
            _die()
        except Exception:
            error = self._failed(f"failed at {message.command!r}")
        self._channel.send(ControlDone(message.call, error.record() if error else None))

    async def _beat(self) -> None:
        while True:
            self._channel.send(Heartbeat(len(self._jobs), self._statistics()))
            await asyncio.sleep(HEARTBEAT_S)

    def _statistics(self) -> StageStatistics:
        try:
            return self._stage.statistics()
        except ReplicaDead:
            _die()
        except Exception:
            # What it counts is not worth the tasks that run.
            log.exception("stage %s: its statistics", self._stage.spec.stage)
        return StageStatistics()

    async def _end_all(self) -> None:
        runners = [job.runner for job in self._jobs.values() if job.runner]
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, *self._controls, return_exceptions=True)


def _apart(batch: list[FromReplica]) -> Iterator[FromReplica]:
    """The batch with each task's text in a message of its own."""
    for message in batch:
        if isinstance(message, Spoken):
            for task, text, ids in zip(
                message.tasks, message.texts, message.token_ids, strict=True
            ):
                yield Emitted(task, StageOutput(TextDelta(text, ids)))
        else:
            yield message


def _die() -> NoReturn:
    """Ends the process at once and without a word about its tasks: the server answers them all
    alike."""
    log.exception("the stage cannot go on")
    os._exit(1)


def _cancelled_for_real() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_replica(address: str) -> int:
    """Connects, builds the stage that the server names, serves it. Returns the process's exit
    status."""
    context = zmq.Context()
    channel: Channel[FromReplica, ToReplica] = Channel.connect(context, address, ToReplica)
    channel.send(Hello(os.getpid()))
    stage: Stage[Any] | None = None
    try:
        start = (await channel.receive())[0]
        if not isinstance(start, Start):
            raise RuntimeError(f"expected Start, got {type(start).__name__}")
        try:
            stage = registry.build(start.spec)
            facts = await stage.load()
        except Exception:
            channel.send(StartFailed(traceback.format_exc(limit=-8)))
            return 1
        channel.send(Ready(facts))
        await Host(stage, channel).serve()
        return 0
    finally:
        if stage is not None:
            await stage.close()
        channel.close(linger_ms=1000)
        context.term()


def main() -> None:
    """Entry point of the process."""
    server_pid, address = int(sys.argv[1]), sys.argv[2]
    guard.guard_process_group(server_pid)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        status = runner.run(run_replica(address))
    # Engines leave threads behind that would keep the interpreter from ending.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
