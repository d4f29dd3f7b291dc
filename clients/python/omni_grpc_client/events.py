"""The events of a request's life, as frozen dataclasses, and how they are read from messages.

Accepted, then any number of outputs (TextDelta, AudioChunk, ImageChunk, VideoChunk, TensorChunk),
SegmentEnd and Progress, then Finished."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from omni_grpc.v1 import common_pb2, output_pb2, service_pb2
from omni_grpc_client.media import (
    AudioFormat,
    Image,
    OutputFormat,
    decode_audio_format,
    decode_enum,
    decode_name,
    decode_output_format,
)


class FinishReason(StrEnum):
    """Why an answer or a segment ended."""

    STOP = "stop"
    LENGTH = "length"
    COMPLETE = "complete"
    REPETITION = "repetition"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Numbered:
    """What every event carries."""

    seq: int
    """Number of the event, from 0, without a gap."""
    epoch: int
    """0; one more after each interrupt."""


@dataclass(frozen=True, slots=True)
class Output(Numbered):
    """What every piece of a final output carries."""

    stage: str
    index: int
    """Which answer, for sampling with n above 1."""
    segment: int
    """Which segment of streamed input it answers."""


@dataclass(frozen=True, slots=True)
class Accepted(Numbered):
    """First, once: the request was admitted."""

    request_id: str
    pipeline: str
    stages: tuple[str, ...]
    """The stages that will run, in the order in which data flows."""
    outputs: tuple[OutputFormat, ...]


@dataclass(frozen=True, slots=True)
class CandidateLogprob:
    """A token that could have been taken. `rank` from 1; 0: not known."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one token. `rank` from 1; 0: not known."""

    token_id: int
    logprob: float
    rank: int
    candidates: tuple[CandidateLogprob, ...]


@dataclass(frozen=True, slots=True)
class TextDelta(Output):
    """New text, and the tokens that came; text can lag behind its tokens."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class AudioChunk(Output):
    """Whole samples. Chunks of one stage are contiguous."""

    data: bytes
    start_sample: int
    """Number of samples (per channel) before this chunk."""
    format: AudioFormat

    @property
    def samples(self) -> int:
        """Number of samples per channel."""
        return len(self.data) // self.format.frame_bytes


@dataclass(frozen=True, slots=True)
class ImageChunk(Output):
    """A picture or the next part of one; `offset` is the part's place in the file, in bytes."""

    data: bytes
    mime_type: str
    width: int
    height: int
    offset: int
    last: bool


@dataclass(frozen=True, slots=True)
class VideoChunk(Output):
    """The next part of a film."""

    data: bytes
    mime_type: str
    chunk_index: int
    first_frame: int
    frame_count: int
    last: bool
    active_event_ids: tuple[str, ...]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class TensorChunk(Output):
    """An array or the next part of one; `offset` is the part's place in the whole, in bytes."""

    name: str
    data: bytes
    dtype: str
    shape: tuple[int, ...]
    offset: int
    last: bool


@dataclass(frozen=True, slots=True)
class SegmentEnd(Numbered):
    """One segment of streamed input was answered; the request goes on."""

    stage: str
    segment: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Progress(Numbered):
    """How far a long stage is. `total_steps` 0: not known."""

    stage: str
    step: int
    total_steps: int
    preview: Image | None = None


@dataclass(frozen=True, slots=True)
class StageFinish:
    """Why one answer of one stage ended; `stopped_by` is the stop string or the stop token."""

    stage: str
    index: int
    reason: FinishReason
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What the request used; field by field as the contract's Usage."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_samples: int = 0
    frames: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in milliseconds, as the server measured it."""

    preprocess_ms: float
    transform_ms: float
    queue_wait_ms: float
    stage_ms: Mapping[str, float]
    first_output_ms: Mapping[str, float]
    total_ms: float


@dataclass(frozen=True, slots=True)
class Finished(Numbered):
    """Last, once, on success."""

    finish_reasons: tuple[StageFinish, ...]
    usage: Usage
    timings: Timings


Event = (
    Accepted
    | TextDelta
    | AudioChunk
    | ImageChunk
    | VideoChunk
    | TensorChunk
    | SegmentEnd
    | Progress
    | Finished
)


def decode_event(message: service_pb2.AddRequestResponse) -> Event | None:
    """The event in a message; None for a kind that a newer contract added."""
    seq, epoch = message.seq, message.epoch
    match message.WhichOneof("event"):
        case "output":
            return _output(seq, epoch, message.output)
        case "progress":
            return _progress(seq, epoch, message.progress)
        case "accepted":
            accepted = message.accepted
            return Accepted(
                seq,
                epoch,
                accepted.request_id,
                accepted.pipeline,
                tuple(accepted.stages),
                tuple(decode_output_format(output) for output in accepted.outputs),
            )
        case "segment_end":
            end = message.segment_end
            return SegmentEnd(seq, epoch, end.stage, end.segment, _reason(end.reason))
        case "finished":
            return _finished(seq, epoch, message.finished)
    return None


def _output(seq: int, epoch: int, output: output_pb2.Output) -> Event | None:
    place = (seq, epoch, output.stage, output.index, output.segment)
    match output.WhichOneof("content"):
        case "text":
            text = output.text
            return TextDelta(
                *place,
                text.text,
                tuple(text.token_ids),
                tuple(_logprobs(entry) for entry in text.logprobs),
                tuple(_logprobs(entry) for entry in text.prompt_logprobs),
            )
        case "audio":
            audio = output.audio
            form = decode_audio_format(audio.format)
            return AudioChunk(*place, audio.data, audio.start_sample, form)
        case "image":
            part = output.image
            return ImageChunk(
                *place, part.data, part.mime_type, part.width, part.height, part.offset, part.last
            )
        case "video":
            return _video(place, output.video)
        case "tensor":
            tensor = output.tensor
            dtype = decode_name(common_pb2.DataType, tensor.dtype, "DATA_TYPE_")
            shape = tuple(tensor.shape)
            return TensorChunk(
                *place, tensor.name, tensor.data, dtype, shape, tensor.offset, tensor.last
            )
    return None


def _video(place: tuple[int, int, str, int, int], chunk: output_pb2.VideoChunk) -> VideoChunk:
    return VideoChunk(
        *place,
        chunk.data,
        chunk.mime_type,
        chunk.chunk_index,
        chunk.first_frame,
        chunk.frame_count,
        chunk.last,
        tuple(chunk.active_event_ids),
        chunk.width,
        chunk.height,
    )


def _logprobs(entry: output_pb2.TokenLogprobs) -> TokenLogprobs:
    candidates = tuple(
        CandidateLogprob(c.token_id, c.logprob, c.rank, c.text) for c in entry.candidates
    )
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, candidates)


def _progress(seq: int, epoch: int, progress: output_pb2.Progress) -> Progress:
    preview = None
    if progress.HasField("preview"):
        part = progress.preview
        preview = Image(part.data, part.mime_type, part.width, part.height)
    return Progress(seq, epoch, progress.stage, progress.step, progress.total_steps, preview)


def _finished(seq: int, epoch: int, finished: output_pb2.Finished) -> Finished:
    usage, timings = finished.usage, finished.timings
    return Finished(
        seq,
        epoch,
        tuple(_stage_finish(entry) for entry in finished.finish_reasons),
        Usage(**{name: getattr(usage, name) for name in Usage.__dataclass_fields__}),
        Timings(
            timings.preprocess_ms,
            timings.transform_ms,
            timings.queue_wait_ms,
            dict(timings.stage_ms),
            dict(timings.first_output_ms),
            timings.total_ms,
        ),
    )


def _stage_finish(entry: output_pb2.StageFinish) -> StageFinish:
    stopped_by: str | int | None = None
    match entry.WhichOneof("stopped_by"):
        case "stop_text":
            stopped_by = entry.stop_text
        case "stop_token_id":
            stopped_by = entry.stop_token_id
    return StageFinish(entry.stage, entry.index, _reason(entry.reason), stopped_by)


def _reason(number: int) -> FinishReason:
    return decode_enum(FinishReason, output_pb2.FinishReason, number, "FINISH_REASON_")
