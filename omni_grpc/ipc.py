"""The typed messages between the server and a replica process, and the channel that carries them.

One ZeroMQ message is one msgpack list of structs: everything that one side had to say in one turn
of its event loop, so all outputs of one engine step travel together. Both ends are DEALER sockets;
the server binds, the replica connects. The address is configuration: `ipc://` on one host, `tcp://`
across hosts.

The life of a replica, seen from the server:

    ← Hello → Start ← Ready | StartFailed     then, at any time: ← Heartbeat, → Stop
    → Submit ← Admitted | Refused             a task's prepare
    → Feed* ← Emitted* → Credit*              input and output, in order
    → Feed of another stage's output ← Taken  so that a source pauses when it runs ahead
    → Feed with a number ← Fed                a client's chunk, checked before it counts
    → Steer ← Emitted (event)                 a change to what is being generated
    → Abort ← Ended                           one Ended per admitted task, the last word on it
    → Control ← ControlDone
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from omni_grpc.errors import ErrorRecord
from omni_grpc.types import (
    Audio,
    Image,
    InteractionEvent,
    Message,
    Params,
    Payload,
    Prompt,
    RequestOptions,
    StageFacts,
    StageOutput,
    StageStatistics,
    Tensors,
    TextDelta,
    Video,
)

log = logging.getLogger(__name__)

WINDOW_BYTES = 1 << 20
"""Bytes of output that a task may have under way before its consumer gives credit. Bounds the
server's memory: a stage that outruns its reader pauses."""

CREDIT_STEP = WINDOW_BYTES // 4
"""Credit goes in steps of this size, so that a stream of tokens costs no messages back."""

OUTPUT_OVERHEAD = 64
"""What an output counts against the window beside its content, in bytes, so that empty outputs
count too."""


class StageSpec(msgspec.Struct, frozen=True):
    """What a replica process needs to build its stage."""

    pipeline: str
    stage: str
    replica: int
    engine: str
    model: str
    device: str
    engine_args: dict[str, Any] = {}
    lora_adapters: dict[str, str] = {}
    media: dict[str, Any] = {}
    """The server's MediaPolicy, as a mapping."""
    silence_timeout: float = 30.0
    """Seconds after which an engine that shows no sign of life is lost."""


class Task(msgspec.Struct, frozen=True):
    """One request's work at one stage.

    `id` is unique over the server's life, so late messages about an old task meet nobody. `prompt`
    is what the task begins with, if it begins with one. `streaming`: more input comes by Feed.
    `resumable`: the input comes in segments, all of it by Feed, and each is answered at its end.
    `first_segment` is the number of the first one; `history` is the conversation before it.
    `timeout_s` is what is left of the request's deadline when the task is sent.
    """

    id: int
    request_id: str
    params: Params | None
    timeout_s: float
    prompt: Prompt | None = None
    streaming: bool = False
    resumable: bool = False
    first_segment: int = 0
    history: tuple[Message, ...] = ()
    options: RequestOptions = RequestOptions()


# ---------------------------------------------------------------- to the replica


class Start(msgspec.Struct, frozen=True, tag=True):
    """Build, load and warm this stage."""

    spec: StageSpec


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Take this task."""

    task: Task


class Feed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """More input of a task. `end`: there is no more after it. `number`: the stage checks it first
    and answers with Fed; set for what a client sends. `params` hold for the segment that begins."""

    task: int
    number: int | None = None
    payload: Payload | None = None
    prompt: Prompt | None = None
    params: Params | None = None
    end_of_segment: bool = False
    end: bool = False


class Steer(msgspec.Struct, frozen=True, tag=True):
    """An event for a running task. What becomes of it comes as outputs with `event` set."""

    task: int
    event: InteractionEvent


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop this task and free what it holds."""

    task: int


class Credit(msgspec.Struct, frozen=True, tag=True):
    """The consumer took this many bytes of a task's output."""

    task: int
    bytes: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """An operator's command to the stage."""

    call: int
    command: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the stage and exit."""


ToReplica = Start | Submit | Feed | Steer | Abort | Credit | Control | Stop

# ---------------------------------------------------------------- from the replica


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The process stands."""

    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The stage is loaded and warm."""

    facts: StageFacts


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The stage could not be built; the process exits."""

    error: str


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A task was prepared and runs. `prepare_ms` is tokenization and media processing."""

    task: int
    prepare_ms: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A task was not taken; nothing of it is left in the replica."""

    task: int
    error: ErrorRecord


class Fed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What became of a numbered Feed. `error`: it was refused, and the task is as it was before."""

    task: int
    number: int
    error: ErrorRecord | None = None


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A task's stage took this many bytes of what other stages fed it."""

    task: int
    bytes: int


class Emitted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An output of a task."""

    task: int
    output: StageOutput


class Ended(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A task's end: nothing of it is left in the replica. `error` None: it did all that was
    asked."""

    task: int
    error: ErrorRecord | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sign of life from the replica's own event loop, with its load."""

    running: int
    statistics: StageStatistics


class ControlDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Control."""

    call: int
    error: ErrorRecord | None = None


FromReplica = (
    Hello
    | Ready
    | StartFailed
    | Admitted
    | Refused
    | Fed
    | Taken
    | Emitted
    | Ended
    | Heartbeat
    | ControlDone
)

Out = TypeVar("Out")
In = TypeVar("In")


class Channel(Generic[Out, In]):
    """One end of the line. `send` never blocks and keeps order; what is sent in one turn of the
    loop goes out as one ZeroMQ message. One task receives.

    The socket is read when its descriptor says so, without `zmq.asyncio`, whose futures cost more
    than all else that is done for a message."""

    def __init__(self, socket: zmq.Socket[bytes], receives: Any) -> None:
        self._socket = socket
        self._waiter: asyncio.Future[None] | None = None
        self._unsent: deque[bytes] = deque()
        """Batches that wait for the other end."""
        self._encoder = msgspec.msgpack.Encoder()
        self._receives = receives
        self.on_unreadable: Callable[[dict[str, Any]], None] | None = None
        """Hears of a message that is of no known form, as a mapping; the rest of its batch is read.
        By default the whole batch is refused."""
        self._decoder: msgspec.msgpack.Decoder[list[In]] = msgspec.msgpack.Decoder(list[receives])
        self._outbox: list[Out] = []
        self.repair: Callable[[list[Out], Callable[[Out], bool]], list[Out]] | None = None
        """Makes a batch that can be encoded of one that cannot, given the test for a message. By
        default what cannot be encoded is left out."""
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._attend)

    @classmethod
    def bind(cls, context: zmq.Context[Any], address: str, receives: Any) -> Channel[Out, In]:
        """The server's end, listening at `address`."""
        channel = cls(_dealer(context), receives)
        channel._socket.bind(address)
        return channel

    @classmethod
    def connect(cls, context: zmq.Context[Any], address: str, receives: Any) -> Channel[Out, In]:
        """The replica's end."""
        channel = cls(_dealer(context), receives)
        channel._socket.connect(address)
        return channel

    @property
    def endpoint(self) -> str:
        """The address that was bound, with a real port in place of a wildcard."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, message: Out) -> None:
        """Queues one message. It leaves when this turn of the event loop is over."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if self._socket.closed:
            return
        self._unsent.append(self._encoded(batch))
        self._attend()

    def _attend(self) -> None:
        """Sends what waits and wakes who receives, if there is news for either.

        The descriptor tells of news once, and whatever is done with the socket may take it in: so
        this comes after all of that. It comes too where nobody receives, or the loop would turn
        without end on news that nobody takes."""
        while True:
            # Again: the other end is not there yet, or not any more.
            with suppress(zmq.Again):
                while self._unsent:
                    self._socket.send(self._unsent[0], zmq.NOBLOCK, copy=False)
                    self._unsent.popleft()
            events = int(self._socket.getsockopt(zmq.EVENTS))
            if not (self._unsent and events & zmq.POLLOUT):
                break
        if events & zmq.POLLIN:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _encoded(self, batch: list[Out]) -> bytes:
        try:
            return self._encoder.encode(batch)
        except (TypeError, ValueError, OverflowError):
            if self.repair is not None:
                return self._encoder.encode(self.repair(batch, self._sendable))
            return self._encoder.encode([one for one in batch if self._sendable(one)])

    def _sendable(self, message: Out) -> bool:
        try:
            self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError):
            log.exception("%s cannot be encoded", type(message).__name__)
            return False
        return True

    async def receive(self) -> list[In]:
        """The next batch, without what cannot be read. Cancelling loses nothing."""
        data = await self._data()
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError:
            if self.on_unreadable is None:
                raise
            return self._readable(data, self.on_unreadable)

    async def _data(self) -> bytes:
        while True:
            try:
                return self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._waiter = self._loop.create_future()
            try:
                self._attend()
                await self._waiter
            finally:
                self._waiter = None

    def _readable(self, data: bytes, on_unreadable: Callable[[dict[str, Any]], None]) -> list[In]:
        batch: list[In] = []
        for message in msgspec.msgpack.decode(data):
            try:
                batch += msgspec.convert([message], list[self._receives])  # type: ignore[name-defined]
            except msgspec.ValidationError:
                log.exception("a message cannot be read")
                on_unreadable(message)
        return batch

    def close(self, linger_ms: int = 0) -> None:
        """Closes the socket; what was sent and is not out yet is dropped after `linger_ms`."""
        if self._outbox:
            self._flush()
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=linger_ms)


def _dealer(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    # Unlimited queues: the bound is the tasks' windows and admission, never a silently blocked
    # send.
    socket.set_hwm(0)
    return socket


def output_size(output: StageOutput) -> int:
    """What an output counts against its task's window, in bytes."""
    size = OUTPUT_OVERHEAD
    if output.payload is not None:
        size += payload_size(output.payload)
    if output.progress is not None and output.progress.preview is not None:
        size += len(output.progress.preview.data)
    return size


def payload_size(payload: Payload) -> int:
    """Approximate size of a payload's content, in bytes."""
    match payload:
        case TextDelta():
            return len(payload.text) + 8 * len(payload.token_ids) + 64 * len(payload.logprobs)
        case Tensors():
            return sum(len(tensor.data) for tensor in payload.arrays.values())
        case Audio() | Image() | Video():
            return len(payload.data)
