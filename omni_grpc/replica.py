"""One replica, seen from the server: a spawned process that hosts one stage, and its tasks.

    STARTING → READY → STOPPING → GONE     and GONE from any state, when the process ends or shows
                                           no sign of life

Each task has a sink that hears its life in order: `on_placed`, then `on_admitted` or `on_refused`,
then `on_output`s and `on_fed`s, then exactly one of `on_ended` and `on_lost`. A task counts as
running until the replica says that nothing of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import zmq

from omni_grpc.channel import Channel
from omni_grpc.config import ServerConfig, StageConfig
from omni_grpc.errors import InternalError, OmniError, StageUnavailable, StartError
from omni_grpc.ipc import (
    Admitted,
    Control,
    ControlDone,
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
    StageSpec,
    Start,
    StartFailed,
    Stop,
    Submit,
    Taken,
    Task,
    ToReplica,
    output_size,
    text_size,
)
from omni_grpc.process import ReplicaProcess, replica_environment
from omni_grpc.task import TaskHandle, new_task_id
from omni_grpc.types import (
    StageFacts,
    StageStatistics,
    TextDelta,
)

log = logging.getLogger(__name__)


class State(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GONE = "gone"


@dataclass(slots=True, frozen=True)
class ReplicaStatistics:
    """A replica's load. `work` is what is left, `busy_s` how long it has held tasks, since its
    start. `sample_age_s` is the age of `own`; None where nothing came yet."""

    ready: bool
    running: int
    own: StageStatistics
    sample_age_s: float | None
    work: float = 0.0
    busy_s: float = 0.0


def _nobody() -> None:
    """Hears of load where nobody watches."""


class Replica:
    """One replica process. Make it, `start` it, `submit` to it while READY, `stop` it once."""

    def __init__(
        self,
        spec: StageSpec,
        config: StageConfig,
        settings: ServerConfig,
        context: zmq.Context[Any],
        address: str,
    ) -> None:
        self.spec = spec
        self.state = State.STARTING
        self.facts = StageFacts()
        self._config = config
        self._settings = settings
        self._context = context
        self._address = address
        self._loop = asyncio.get_running_loop()
        self.on_freed: Callable[[], None] = lambda: None
        """Called when a task is gone from it, in whatever way."""
        self._tasks: dict[int, TaskHandle] = {}
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._statistics = StageStatistics()
        self._sent_work = 0.0
        self._window = 0.0
        """How long its text may wait for more, in seconds."""
        self._last_sign = self._loop.time()
        self._sampled: float | None = None
        self.on_load: Callable[[], None] = _nobody
        """Called whenever a task comes or goes, and when the stage tells of another load."""
        self._busy_s = 0.0
        self._busy_since: float | None = None
        self._ready = self._loop.create_future()
        self._gone = asyncio.Event()
        self._channel: Channel[ToReplica, FromReplica] | None = None
        stage_log = logging.getLogger(f"omni_grpc.stage.{spec.stage}")
        self._process = ReplicaProcess(self.name, stage_log)
        self._helpers: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        """Stage and number, for logs."""
        return f"{self.spec.stage}/{self.spec.replica}"

    @property
    def pid(self) -> int:
        """Its process id; 0 before it was spawned."""
        return self._process.pid

    @property
    def running(self) -> int:
        """Tasks that the replica holds, being aborted included."""
        return len(self._tasks)

    @property
    def tasks(self) -> tuple[TaskHandle, ...]:
        """The tasks that it holds."""
        return tuple(self._tasks.values())

    @property
    def work(self) -> float:
        """Work that is left: what the last heartbeat told and what was sent since, or, from a stage
        that does not tell, what its tasks were taken to be."""
        told = self._statistics.work_left
        if told is not None:
            return told + self._sent_work
        return sum(handle.work for handle in self._tasks.values())

    def statistics(self) -> ReplicaStatistics:
        """The present load."""
        age = None if self._sampled is None else self._loop.time() - self._sampled
        ready = self.state is State.READY
        return ReplicaStatistics(
            ready, self.running, self._statistics, age, self.work, self._busy()
        )

    def _busy(self) -> float:
        since = self._busy_since
        return self._busy_s if since is None else self._busy_s + self._loop.time() - since

    def _load_changed(self) -> None:
        """Tasks came or went, or the stage told of another load."""
        if self._busy_since is None and self._tasks:
            self._busy_since = self._loop.time()
        elif self._busy_since is not None and not self._tasks:
            self._busy_s, self._busy_since = self._busy(), None
        self.on_load()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Spawns the process and waits until its stage is warm.

        Raises StartError with the cause. On an error, and when cancelled, nothing is left running.
        """
        try:
            await self._spawn()
            async with asyncio.timeout(self._config.start_timeout):
                self.facts = await self._ready
        except TimeoutError:
            await self._kill()
            raise StartError(
                f"stage {self.name}: not ready within {self._config.start_timeout:g} s"
            ) from None
        except BaseException:
            await self._kill()
            raise
        self.state = State.READY
        self._last_sign = self._loop.time()
        if self._window:
            self.pace(self._window)
        self._helpers.append(asyncio.create_task(self._watch_signs()))

    async def _spawn(self) -> None:
        self._channel = Channel.bind(self._context, self._address, FromReplica)
        self._channel.repair = self._repaired
        environment = replica_environment(self._config, self.spec.device)
        await self._process.spawn(self._channel.endpoint, environment)
        self._helpers += [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch_exit()),
        ]

    async def gone(self) -> None:
        """Returns when the replica is GONE."""
        await self._gone.wait()

    async def stop(self) -> None:
        """Ends the process: asks, waits `stop_timeout`, kills. Tasks that it holds are lost."""
        if self.state is State.READY:
            self.state = State.STOPPING
            self.send(Stop())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.stop_timeout):
                    await self._gone.wait()
        await self._kill()

    async def _kill(self) -> None:
        await self._process.gone()
        self._lose("was stopped")
        for helper in self._helpers:
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)
        self._close_channel()

    def kill(self) -> None:
        """Kills the process and all that it started; what it holds is lost."""
        self._process.kill()

    def _lose(self, why: str) -> None:
        """The one way into GONE. Idempotent."""
        if self.state is State.GONE:
            return
        if self.state is not State.STOPPING:
            log.warning("replica %s %s; it held %d tasks", self.name, why, self.running)
        self.state = State.GONE
        if not self._ready.done():
            said = "".join(f"\n  {line}" for line in self._process.last_lines)
            self._ready.set_exception(StartError(f"stage {self.name}: the process {why}{said}"))
            # Nobody may be waiting: its start was cancelled because another replica's failed.
            self._ready.exception()
        tasks, self._tasks = self._tasks, {}
        self._load_changed()
        calls, self._calls = self._calls, {}
        for handle in tasks.values():
            handle.sink.on_lost()
            self.on_freed()
        for call in calls.values():
            if not call.done():
                call.set_exception(StageUnavailable(f"replica {self.name} was lost"))
        self._gone.set()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            if self._address.startswith("ipc://"):
                Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)
            self._channel = None

    async def _watch_exit(self) -> None:
        how = await self._process.ended()
        if not self._ready.done():
            # Its own account of a failed start may still be on the way.
            await asyncio.wait([self._ready], timeout=1.0)
        self._lose(how)

    async def _watch_signs(self) -> None:
        """Kills a replica that shows no sign of life, or does not free what was aborted."""
        silence, abort = self._settings.heartbeat_timeout, self._settings.abort_timeout
        while self.state is State.READY:
            await asyncio.sleep(min(silence, abort) / 4)
            if self._loop.time() - self._last_sign > silence:
                log.error("replica %s: no sign of life for %g s", self.name, silence)
            elif self._holds_aborted(abort):
                log.error("replica %s: an aborted task is not free after %g s", self.name, abort)
            else:
                continue
            self.kill()
            return

    def _holds_aborted(self, seconds: float) -> bool:
        horizon = self._loop.time() - seconds
        return any(
            handle.aborted_at is not None and handle.aborted_at < horizon
            for handle in self._tasks.values()
        )

    def pace(self, window_s: float) -> None:
        """From now on text of tasks that join may wait so long for more."""
        self._window = window_s
        if self.state is State.READY:
            self.send(Pace(window_s))

    # ------------------------------------------------------------ tasks

    def submit(self, task: Task, handle: TaskHandle) -> None:
        """Sends a task; the handle's sink hears the rest. Raises StageUnavailable if the replica is
        not READY."""
        if self.state is not State.READY:
            raise StageUnavailable(f"replica {self.name} is {self.state.value}")
        self._tasks[task.id] = handle
        handle.send, handle.waits = self.send, False
        self._sent_work += handle.work
        self.send(Submit(handle.sink.on_placed(task, self.spec.replica, self.spec.device)))
        self._load_changed()

    def hurry(self) -> None:
        """Of what was sent in this turn, much leaves now."""
        if self._channel is not None:
            self._channel.hurry()

    async def control(self, command: str, arguments: dict[str, Any]) -> None:
        """Carries out an operator's command in the replica. Raises what the stage raised, and
        StageUnavailable where the replica is not READY, or is lost."""
        if self.state is not State.READY:
            raise StageUnavailable(f"replica {self.name} is {self.state.value}")
        call = new_task_id()
        answer = self._calls[call] = self._loop.create_future()
        try:
            self.send(Control(call, command, arguments))
            await answer
        finally:
            self._calls.pop(call, None)

    def send(self, message: ToReplica) -> None:
        """Sends a message, in order, without waiting. To a replica that is gone: nothing."""
        if self._channel is not None and self.state is not State.GONE:
            self._channel.send(message)

    def _repaired(
        self, batch: list[ToReplica], sendable: Callable[[ToReplica], bool]
    ) -> list[ToReplica]:
        """A bridge or a transform gave what no message can carry: the request that it is about
        fails, and only that."""
        error = InternalError("internal error")
        kept: list[ToReplica] = []
        for message in batch:
            if sendable(message):
                kept.append(message)
            elif isinstance(message, Submit):
                if handle := self._tasks.pop(message.task.id, None):
                    self._load_changed()
                    handle.sink.on_refused(error)
                    self.on_freed()
            elif isinstance(message, Feed) and (handle := self._tasks.get(message.task)):
                handle.sink.on_unsendable(error)
        return kept

    async def _receive(self) -> None:
        assert self._channel is not None
        while True:
            try:
                messages = await self._channel.receive()
            except msgspec.MsgspecError:
                # Whatever was in it is lost, and with it the order of every task.
                log.exception("replica %s sent what cannot be read", self.name)
                self.kill()
                return
            self._last_sign = self._loop.time()
            for message in messages:
                self._handle(message)

    def _handle(self, message: FromReplica) -> None:
        match message:
            case Emitted(task_id, output):
                # A task that is not there was lost or ended: late words about it are dropped.
                if handle := self._tasks.get(task_id):
                    handle.owe(output_size(output))
                    if isinstance(output.payload, TextDelta):
                        handle.work = max(0.0, handle.work - len(output.payload.token_ids))
                    handle.sink.on_output(output)
            case Spoken(task_ids, texts, token_ids):
                for task_id, text, ids in zip(task_ids, texts, token_ids, strict=True):
                    if handle := self._tasks.get(task_id):
                        handle.owe(text_size(text, ids))
                        handle.work = max(0.0, handle.work - len(ids))
                        handle.sink.on_text(TextDelta(text, ids))
            case Admitted(task_id, prepare_ms):
                if handle := self._tasks.get(task_id):
                    handle.sink.on_admitted(prepare_ms)
            case Refused(task_id, record):
                if handle := self._tasks.pop(task_id, None):
                    self._load_changed()
                    handle.sink.on_refused(OmniError.from_record(record))
                    self.on_freed()
            case Ended(task_id, record_or_none):
                if handle := self._tasks.pop(task_id, None):
                    self._load_changed()
                    error = OmniError.from_record(record_or_none) if record_or_none else None
                    handle.sink.on_ended(error)
                    self.on_freed()
            case Fed(task_id, number, record_or_none):
                if handle := self._tasks.get(task_id):
                    error = OmniError.from_record(record_or_none) if record_or_none else None
                    handle.sink.on_fed(number, error)
            case Taken(task_id, size):
                if handle := self._tasks.get(task_id):
                    handle.sink.on_taken(size)
            case Heartbeat():
                before = self._statistics
                self._statistics, self._sampled = message.statistics, self._loop.time()
                self._sent_work = 0.0
                if message.statistics != before:
                    self._load_changed()
            case _:
                self._handle_control(message)

    def _handle_control(self, message: FromReplica) -> None:
        match message:
            case Hello():
                self.send(Start(self.spec))
            case Ready(facts):
                if not self._ready.done():
                    self._ready.set_result(facts)
            case StartFailed(cause):
                if not self._ready.done():
                    self._ready.set_exception(StartError(f"stage {self.name}:\n{cause}"))
            case ControlDone(call, record):
                answer = self._calls.get(call)
                if answer is not None and not answer.done():
                    if record is None:
                        answer.set_result(None)
                    else:
                        answer.set_exception(OmniError.from_record(record))
            case _:
                log.error("replica %s sent %s", self.name, type(message).__name__)
