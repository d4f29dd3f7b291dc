"""One replica, seen from the server: a spawned process that hosts one stage, and its tasks.

    STARTING → READY → STOPPING → GONE     and GONE from any state, when the process ends or shows
                                           no sign of life

Each task has a sink that hears its life in order: `on_admitted` or `on_refused`, then `on_output`s
and `on_fed`s, then exactly one of `on_ended` and `on_lost`. A task counts as running until the
replica says that nothing of it is left.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq.asyncio

from omni_grpc.balance import estimate
from omni_grpc.config import ServerConfig, StageConfig
from omni_grpc.errors import InternalError, OmniError, StageUnavailable, StartError
from omni_grpc.ipc import (
    CREDIT_STEP,
    Abort,
    Admitted,
    Channel,
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
    Ready,
    Refused,
    StageSpec,
    Start,
    StartFailed,
    Steer,
    Stop,
    Submit,
    Taken,
    Task,
    ToReplica,
    output_size,
)
from omni_grpc.types import (
    InteractionEvent,
    Params,
    Payload,
    Prompt,
    StageFacts,
    StageOutput,
    StageStatistics,
    TextDelta,
)

log = logging.getLogger(__name__)

_task_ids = itertools.count(1)
PIPE_TIMEOUT_S = 5.0
"""How long the last processes of a replica's group may take to go once they are killed."""
LAST_LINES = 12
"""How much of what a process printed is shown when it does not start."""


class State(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    GONE = "gone"


class TaskSink(Protocol):
    """Who hears about a task. The methods are called on the event loop and do not raise."""

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

    def on_ended(self, error: OmniError | None) -> None:
        """Nothing of the task is left in the replica. The last word."""

    def on_lost(self) -> None:
        """The replica is gone, and the task with it. The last word."""


@dataclass(slots=True, eq=False)
class TaskHandle:
    """A task that a replica holds."""

    id: int
    replica: Replica
    sink: TaskSink
    work: float
    """What it was taken to be when it was sent, less what it has given since."""
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
        self.replica.send(Feed(self.id, number, payload, prompt, params, end_of_segment, end))

    def steer(self, event: InteractionEvent) -> None:
        """Sends an event; the sink hears what becomes of it in outputs with `event` set."""
        self.replica.send(Steer(self.id, event))

    def abort(self) -> None:
        """Asks the replica to stop the task; the sink's last word comes when all is freed."""
        self.replica.send(Abort(self.id))

    def release_credit(self) -> None:
        """Lets the stage go on: gives back what was held."""
        self.held = False
        if self._owed:
            self.replica.send(Credit(self.id, self._owed))
            self._owed = 0

    def owe(self, size: int) -> None:
        """Counts output that came; credits it in steps, unless held."""
        self._owed += size
        if self._owed >= CREDIT_STEP and not self.held:
            self.release_credit()


@dataclass(slots=True, frozen=True)
class ReplicaStatistics:
    """A replica's load. `sample_age_s` is the age of `own`; None where nothing came yet."""

    ready: bool
    running: int
    own: StageStatistics
    sample_age_s: float | None


class Replica:
    """One replica process. Make it, `start` it, `submit` to it while READY, `stop` it once."""

    def __init__(
        self,
        spec: StageSpec,
        config: StageConfig,
        settings: ServerConfig,
        context: zmq.asyncio.Context,
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
        self._tasks: dict[int, TaskHandle] = {}
        self._calls: dict[int, asyncio.Future[None]] = {}
        self._statistics = StageStatistics()
        self._sent_work = 0.0
        self._last_sign = self._loop.time()
        self._sampled: float | None = None
        self._ready = self._loop.create_future()
        self._gone = asyncio.Event()
        self._channel: Channel[ToReplica, FromReplica] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._helpers: list[asyncio.Task[None]] = []
        self._relay: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def name(self) -> str:
        """Stage and number, for logs."""
        return f"{self.spec.stage}/{self.spec.replica}"

    @property
    def running(self) -> int:
        """Tasks that the replica holds, being aborted included."""
        return len(self._tasks)

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
        return ReplicaStatistics(self.state is State.READY, self.running, self._statistics, age)

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
        self._helpers.append(asyncio.create_task(self._watch_signs()))

    async def _spawn(self) -> None:
        self._channel = Channel.bind(self._context, self._address, FromReplica)
        self._channel.repair = self._repaired
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "omni_grpc.stages.host",
            str(os.getpid()),
            self._channel.endpoint,
            env=replica_environment(self._config, self.spec.device),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Leader of its own process group: it and all that it starts can be killed as one.
            start_new_session=True,
        )
        self._relay = asyncio.create_task(self._relay_log())
        self._helpers += [
            self._relay,
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
        if self._process is not None and self._process.returncode is None:
            self._kill_group()
            await self._process.wait()
        self._lose("was stopped")
        if self._relay is not None:
            # The last of its process group closes the pipe: then nothing of it is left.
            await asyncio.wait([self._relay], timeout=PIPE_TIMEOUT_S)
        for helper in self._helpers:
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)
        self._close_channel()

    def _kill_group(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _lose(self, why: str) -> None:
        """The one way into GONE. Idempotent."""
        if self.state is State.GONE:
            return
        if self.state is not State.STOPPING:
            log.warning("replica %s %s; it held %d tasks", self.name, why, self.running)
        self.state = State.GONE
        if not self._ready.done():
            said = "".join(f"\n  {line}" for line in self._last_lines)
            self._ready.set_exception(StartError(f"stage {self.name}: the process {why}{said}"))
        tasks, self._tasks = self._tasks, {}
        calls, self._calls = self._calls, {}
        for handle in tasks.values():
            handle.sink.on_lost()
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
        assert self._process is not None
        status = await self._process.wait()
        if not self._ready.done():
            # Its own account of a failed start may still be on the way.
            await asyncio.wait([self._ready], timeout=1.0)
        how = f"was ended by {_signal_name(-status)}" if status < 0 else f"exited with {status}"
        self._lose(how)

    async def _watch_signs(self) -> None:
        limit = self._settings.heartbeat_timeout
        while self.state is State.READY:
            await asyncio.sleep(limit / 4)
            if self._loop.time() - self._last_sign > limit and self._process is not None:
                log.error("replica %s: no sign of life for %g s", self.name, limit)
                self._kill_group()
                return

    async def _relay_log(self) -> None:
        """Passes what the process prints on to the server's log, line by line, with its name."""
        assert self._process is not None and self._process.stdout is not None
        logger, rest = logging.getLogger(f"omni_grpc.stage.{self.spec.stage}"), b""
        while chunk := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            rest = rest[-(1 << 16) :]
            self._log_lines(logger, lines)
        self._log_lines(logger, [rest])

    def _log_lines(self, logger: logging.Logger, lines: list[bytes]) -> None:
        for line in lines:
            if line.strip():
                text = line.decode(errors="replace").rstrip()
                self._last_lines.append(text)
                logger.info("[%s] %s", self.name, text)

    # ------------------------------------------------------------ tasks

    def submit(self, task: Task, sink: TaskSink) -> TaskHandle:
        """Sends a task; `sink` hears the rest. Raises StageUnavailable if the replica is not
        READY."""
        if self.state is not State.READY:
            raise StageUnavailable(f"replica {self.name} is {self.state.value}")
        work = estimate(task.params, task.prompt)
        handle = self._tasks[task.id] = TaskHandle(task.id, self, sink, work)
        self._sent_work += work
        self.send(Submit(task))
        return handle

    async def control(self, command: str, arguments: dict[str, Any]) -> None:
        """Carries out an operator's command in the replica. Raises what the stage raised, and
        StageUnavailable where the replica is not READY, or is lost."""
        if self.state is not State.READY:
            raise StageUnavailable(f"replica {self.name} is {self.state.value}")
        call = next(_task_ids)
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
                    handle.sink.on_refused(error)
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
                self._kill_group()
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
            case Admitted(task_id, prepare_ms):
                if handle := self._tasks.get(task_id):
                    handle.sink.on_admitted(prepare_ms)
            case Refused(task_id, record):
                if handle := self._tasks.pop(task_id, None):
                    handle.sink.on_refused(OmniError.from_record(record))
            case Ended(task_id, record_or_none):
                if handle := self._tasks.pop(task_id, None):
                    error = OmniError.from_record(record_or_none) if record_or_none else None
                    handle.sink.on_ended(error)
            case Fed(task_id, number, record_or_none):
                if handle := self._tasks.get(task_id):
                    error = OmniError.from_record(record_or_none) if record_or_none else None
                    handle.sink.on_fed(number, error)
            case Taken(task_id, size):
                if handle := self._tasks.get(task_id):
                    handle.sink.on_taken(size)
            case Heartbeat():
                self._statistics, self._sampled = message.statistics, self._loop.time()
                self._sent_work = 0.0
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


def new_task_id() -> int:
    """An id that no task of this server had before."""
    return next(_task_ids)


def replica_environment(config: StageConfig, device: str) -> Mapping[str, str]:
    """Environment of a replica process: the server's, its own devices and threads, its stage's
    variables."""
    kind, _, numbers = device.partition(":")
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    # "" hides every device: a CPU replica cannot touch a GPU by accident.
    environment["CUDA_VISIBLE_DEVICES"] = numbers if kind == "cuda" else ""
    if config.threads is not None:
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[variable] = str(config.threads)
    return environment | config.environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
