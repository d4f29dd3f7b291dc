"""What a client hears: a request's events, and a session's notices."""

from __future__ import annotations

import msgspec

from omni_grpc.errors import ErrorRecord
from omni_grpc.types.media import AudioFormat, DataType, MediaFormat, Modality
from omni_grpc.types.payload import Finish, FinishReason, Progress, TextDelta, Usage
from omni_grpc.types.stage import EventChange


class OutputFormat(msgspec.Struct, frozen=True):
    """The form of one final output; `format` None: each chunk says it."""

    stage: str
    modality: Modality
    format: MediaFormat | None = None


class Accepted(msgspec.Struct, frozen=True):
    """The request was admitted; `stages` will run."""

    request_id: str
    pipeline: str
    stages: tuple[str, ...]
    outputs: tuple[OutputFormat, ...]


class AudioChunk(msgspec.Struct, frozen=True):
    """Sound as it is written: `start_sample` samples (per channel) were written before."""

    data: bytes
    start_sample: int
    format: AudioFormat


class ImageChunk(msgspec.Struct, frozen=True):
    """A picture file, or the part of it from byte `offset` on."""

    data: bytes
    mime_type: str
    width: int
    height: int
    offset: int = 0
    last: bool = True


class VideoChunk(msgspec.Struct, frozen=True):
    """The next part of a film."""

    data: bytes
    mime_type: str
    chunk_index: int
    first_frame: int
    frame_count: int
    width: int
    height: int
    last: bool
    active_event_ids: tuple[str, ...] = ()


class TensorChunk(msgspec.Struct, frozen=True):
    """An array, or the part of it from byte `offset` on; `shape` is the whole array's."""

    name: str
    data: bytes
    dtype: DataType
    shape: tuple[int, ...]
    offset: int = 0
    last: bool = True


Content = TextDelta | AudioChunk | ImageChunk | VideoChunk | TensorChunk


class Output(msgspec.Struct, frozen=True, gc=False):
    """A piece of a final output."""

    stage: str
    index: int
    segment: int
    content: Content


class SegmentEnd(msgspec.Struct, frozen=True):
    """A stage answered a segment of streamed input."""

    segment: int
    stage: str
    reason: FinishReason


class StageProgress(msgspec.Struct, frozen=True):
    """How far a stage is."""

    stage: str
    progress: Progress


class StageFinish(msgspec.Struct, frozen=True):
    """Why one answer of one stage ended."""

    stage: str
    index: int
    finish: Finish


class Timings(msgspec.Struct, frozen=True):
    """Where the time went, in milliseconds; by stage and by modality."""

    preprocess_ms: float
    transform_ms: float
    queue_wait_ms: float
    stage_ms: dict[str, float]
    first_output_ms: dict[str, float]
    total_ms: float


class Finished(msgspec.Struct, frozen=True):
    """The request did all that was asked."""

    finish_reasons: tuple[StageFinish, ...]
    usage: Usage
    timings: Timings


Event = Accepted | Output | SegmentEnd | StageProgress | Finished


class SetupComplete(msgspec.Struct, frozen=True):
    """The session stands."""

    request_id: str
    epoch: int


class EventNotice(msgspec.Struct, frozen=True):
    """What became of an event, or what had become of it when it was sent again."""

    change: EventChange
    resubmission: bool = False


class UpdateRejected(msgspec.Struct, frozen=True):
    """A chunk of input was refused; the session goes on."""

    seq: int
    error: ErrorRecord


class Interrupted(msgspec.Struct, frozen=True):
    """The answer was cut off; what follows is of `epoch` or later."""

    epoch: int


class GoingAway(msgspec.Struct, frozen=True):
    """The server will stop in at most `time_left_s`."""

    time_left_s: float


Notice = SetupComplete | EventNotice | UpdateRejected | Interrupted | GoingAway
