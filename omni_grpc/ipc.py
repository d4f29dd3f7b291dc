"""The typed messages between the server and a replica process. `channel.py` carries them.

The life of a replica, seen from the server:

    ← Hello → Start ← Ready | StartFailed     then, at any time: ← Heartbeat, → Stop
    → Submit ← Admitted | Refused             a task's prepare
    → Feed* ← Emitted*, Spoken* → Credit*     input and output, in order
    → Pace                                    how long text may wait for more
    → Feed of another stage's output ← Taken  so that a source pauses when it runs ahead
    → Feed with a number ← Fed                a client's chunk, checked before it counts
    → Steer ← Emitted (event)                 a change to what is being generated
    → Abort ← Ended                           one Ended per admitted task, the last word on it
    → Control ← ControlDone
"""

from __future__ import annotations

from typing import Any

import msgspec

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
    is what the task begins with, if it begins with one. `joins`: its text may wait within the merge
    window, because nobody but the client takes it. `streaming`: more input comes by Feed.
    `resumable`: the input comes in segments, all of it by Feed, and each is answered at its end.
    `first_segment` is the number of the first one; `history` is the conversation before it.
    `timeout_s` is what is left of the request's deadline when the task is sent.
    """

    id: int
    request_id: str
    params: Params | None
    timeout_s: float
    prompt: Prompt | None = None
    joins: bool = False
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


class Pace(msgspec.Struct, frozen=True, tag=True):
    """From now on text of tasks that join may wait so many seconds for more; 0: it does not."""

    window_s: float


class Control(msgspec.Struct, frozen=True, tag=True):
    """An operator's command to the stage."""

    call: int
    command: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the stage and exit."""


ToReplica = Start | Submit | Feed | Steer | Abort | Credit | Pace | Control | Stop

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


class Spoken(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Plain text of several tasks, in columns of one length: text of the first answer in segment 0,
    without anything else. What `Emitted` would say, for a fraction of the work."""

    tasks: list[int]
    texts: list[str]
    token_ids: list[list[int]]


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
    | Spoken
    | Ended
    | Heartbeat
    | ControlDone
)


def output_size(output: StageOutput) -> int:
    """What an output counts against its task's window, in bytes."""
    size = OUTPUT_OVERHEAD
    if output.payload is not None:
        size += payload_size(output.payload)
    if output.progress is not None and output.progress.preview is not None:
        size += len(output.progress.preview.data)
    return size


def text_size(text: str, token_ids: list[int]) -> int:
    """The same of plain text: `output_size` of an output with nothing else in it."""
    return OUTPUT_OVERHEAD + len(text) + 8 * len(token_ids)


def payload_size(payload: Payload) -> int:
    """Approximate size of a payload's content, in bytes."""
    match payload:
        case TextDelta():
            return len(payload.text) + 8 * len(payload.token_ids) + 64 * len(payload.logprobs)
        case Tensors():
            return sum(len(tensor.data) for tensor in payload.arrays.values())
        case Audio() | Image() | Video():
            return len(payload.data)
