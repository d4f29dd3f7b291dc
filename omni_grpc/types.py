"""The nouns of a request: what goes in, what moves between stages, what comes out.

All are frozen msgspec structs (slotted, comparable), since most of them also travel to replica
processes as msgpack; unions are told apart by their tag. Bytes are never copied by the structs
themselves."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from omni_grpc.errors import ErrorRecord


class Modality(Enum):
    """What kind of content an input or an output is."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    TENSOR = "tensor"


class DataType(Enum):
    """Element type of a Tensor; the values are numpy's names, except bfloat16, which numpy
    lacks."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return _ITEM_SIZES[self]


_ITEM_SIZES = {
    DataType.FLOAT32: 4,
    DataType.FLOAT16: 2,
    DataType.BFLOAT16: 2,
    DataType.FLOAT64: 8,
    DataType.INT8: 1,
    DataType.UINT8: 1,
    DataType.INT16: 2,
    DataType.INT32: 4,
    DataType.INT64: 8,
    DataType.BOOL: 1,
}


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    COMPLETE = "complete"
    REPETITION = "repetition"


class AudioEncoding(Enum):
    """How samples are written; little-endian, channels interleaved."""

    PCM_S16LE = "pcm_s16le"
    PCM_F32LE = "pcm_f32le"

    @property
    def sample_width(self) -> int:
        """Bytes of one sample of one channel."""
        return 2 if self is AudioEncoding.PCM_S16LE else 4


class AudioFormat(msgspec.Struct, frozen=True, tag=True):
    """Format of a stream of sound."""

    sample_rate_hz: int
    channels: int = 1
    encoding: AudioEncoding = AudioEncoding.PCM_S16LE

    @property
    def frame_width(self) -> int:
        """Bytes of one sample over all channels."""
        return self.encoding.sample_width * self.channels


class ImageFormat(msgspec.Struct, frozen=True, tag=True):
    """Format of pictures; 0 is not known yet."""

    mime_type: str
    width: int = 0
    height: int = 0


class VideoFormat(msgspec.Struct, frozen=True, tag=True):
    """Format of film; 0 is not known yet."""

    mime_type: str
    width: int = 0
    height: int = 0
    fps: float = 0.0


MediaFormat = AudioFormat | ImageFormat | VideoFormat


class Tensor(msgspec.Struct, frozen=True, tag=True):
    """A dense array: row-major little-endian elements, product(shape) * itemsize bytes."""

    data: bytes
    dtype: DataType
    shape: tuple[int, ...]


# ---------------------------------------------------------------- prompts


class Media(msgspec.Struct, frozen=True, tag=True):
    """A picture, sound or film of a prompt; exactly one of `data`, `uri`, `tensor` is set."""

    modality: Modality
    data: bytes | None = None
    uri: str | None = None
    tensor: Tensor | None = None
    mime_type: str = ""
    uuid: str = ""


class Text(msgspec.Struct, frozen=True, tag=True):
    """A plain text prompt."""

    text: str


class TokenIds(msgspec.Struct, frozen=True, tag=True):
    """A prompt of token ids, used as they are."""

    ids: list[int]


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation: text and media in order."""

    role: str
    parts: tuple[Text | Media, ...]


class Messages(msgspec.Struct, frozen=True, tag=True):
    """A conversation, oldest message first."""

    messages: tuple[Message, ...]


class Prompt(msgspec.Struct, frozen=True):
    """What stage 0 is asked. `content` of type Tensor is embeddings [tokens, hidden size]."""

    content: Text | TokenIds | Messages | Tensor | None = None
    media: tuple[Media, ...] = ()
    negative_text: str | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is asked."""
        return self.content is None and not self.media


class Tokenization(msgspec.Struct, frozen=True):
    """How the prompt's text becomes tokens; None is the model's default."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---------------------------------------------------------------- parameters


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form that an answer must have; exactly one of the first six is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an answer counts as repeating itself (sizes in tokens)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, frozen=True, tag="sampling", forbid_unknown_fields=True):
    """How an autoregressive stage samples. Names and meanings are vLLM's; None is the model's
    default."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: int | None = None
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: bool | None = None
    extra_args: dict[str, Any] | None = None


class DiffusionParams(msgspec.Struct, frozen=True, tag="diffusion", forbid_unknown_fields=True):
    """How a diffusion stage denoises; sizes in pixels; None is the pipeline's default."""

    steps: int | None = None
    guidance_scale: float | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    frames: int | None = None
    fps: float | None = None
    scheduler: str | None = None
    preview_interval: int | None = None
    output_mime_type: str | None = None


class CodecParams(msgspec.Struct, frozen=True, tag="codec", forbid_unknown_fields=True):
    """How a speech or codec stage speaks; None is the pipeline's default."""

    voice: str | None = None
    speed: float | None = None
    seed: int | None = None
    encoding: str | None = None


class CustomParams(msgspec.Struct, frozen=True, tag="custom"):
    """Parameters of a stage of engine `fake` or `python`."""

    values: dict[str, Any]


Params = SamplingParams | DiffusionParams | CodecParams | CustomParams


# ---------------------------------------------------------------- a request


class RequestOptions(msgspec.Struct, frozen=True):
    """What goes with a prompt to stage 0; None is not set. `arrival_time` is seconds since the
    epoch."""

    lora: str | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    arrival_time: float | None = None
    reasoning_ended: bool | None = None
    tokenization: Tokenization | None = None
    cache_salt: str | None = None
    additional_information: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    tenant: str = ""
    """Whose request it is; caches that callers can name entries of are kept apart by it."""


class StageParams(msgspec.Struct, frozen=True):
    """Parameters that a request sets for one stage."""

    stage: str
    params: Params


class Request(msgspec.Struct, frozen=True):
    """One request as the engine takes it. `timeout_s` is what is left of the caller's deadline."""

    request_id: str
    pipeline: str
    prompt: Prompt
    stage_params: tuple[StageParams, ...] = ()
    output_modalities: tuple[Modality, ...] = ()
    resumable: bool = False
    options: RequestOptions = RequestOptions()
    timeout_s: float | None = None


class AudioInput(msgspec.Struct, frozen=True):
    """A piece of sound that is fed; `format` None: that of the first one."""

    data: bytes
    format: AudioFormat | None = None


class UpdateChunk(msgspec.Struct, frozen=True):
    """A piece of a resumable request's input, as a client sends it; one of text, prompt, audio."""

    seq: int
    text: str | None = None
    prompt: Prompt | None = None
    audio: AudioInput | None = None
    stage_params: tuple[StageParams, ...] = ()
    end_of_segment: bool = False


# ---------------------------------------------------------------- what stages give


class CandidateLogprob(msgspec.Struct, frozen=True):
    """A token that could have been taken."""

    token_id: int
    logprob: float
    rank: int = 0
    text: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one token; rank 1 is the most likely, 0 not known."""

    token_id: int
    logprob: float
    rank: int = 0
    candidates: tuple[CandidateLogprob, ...] = ()


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    """New text and the tokens that it came from."""

    text: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class Audio(msgspec.Struct, frozen=True, tag=True):
    """Whole samples of sound."""

    data: bytes
    format: AudioFormat


class Image(msgspec.Struct, frozen=True, tag=True):
    """A whole picture file."""

    data: bytes
    mime_type: str
    width: int
    height: int


class Video(msgspec.Struct, frozen=True, tag=True):
    """The next part of a film; `active_event_ids` are in force in it."""

    data: bytes
    mime_type: str
    first_frame: int
    frame_count: int
    width: int
    height: int
    last: bool = False
    active_event_ids: tuple[str, ...] = ()


class Tensors(msgspec.Struct, frozen=True, tag=True):
    """Named arrays. `boundary`: a unit (an utterance, say) ends with them. `spoken`: the words that
    they stand for, if they are speech, and how long those take."""

    arrays: dict[str, Tensor]
    boundary: bool = False
    spoken: str = ""
    duration_ms: float = 0.0


Payload = TextDelta | Audio | Image | Video | Tensors


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Steps done of all steps (0: not known), with a preview if one was asked for."""

    step: int
    total_steps: int = 0
    preview: Image | None = None


class Finish(msgspec.Struct, frozen=True):
    """Why one answer ended; `stopped_by` is the stop string or token, if one did."""

    reason: FinishReason
    stopped_by: str | int | None = None


class Usage(msgspec.Struct, frozen=True):
    """What a stage used for a request: tokens, samples per channel, frames, denoise steps."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    audio_samples: int = 0
    frames: int = 0
    steps: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, f) + getattr(other, f) for f in self.__struct_fields__))


class EventState(Enum):
    """Where an event is in its life."""

    QUEUED = "queued"
    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"
    STARTED = "started"
    COMPLETED = "completed"

    @property
    def terminal(self) -> bool:
        """Whether nothing comes after it."""
        return self not in (EventState.QUEUED, EventState.STARTED)


class EventChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of an event; `chunk` is the one that it concerns, `error` why it was rejected."""

    event_id: str
    state: EventState
    chunk: int | None = None
    error: ErrorRecord | None = None


class InteractionEvent(msgspec.Struct, frozen=True):
    """A change to a running generation; at least one of prompt, negative prompt, media,
    parameters."""

    event_id: str
    prompt: str | None = None
    negative_prompt: str | None = None
    media: tuple[Media, ...] = ()
    parameters: dict[str, Any] | None = None
    transition_chunks: int = 3


class StageOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that a stage gives: content, progress, the end of one answer or of a segment, or
    usage."""

    payload: Payload | None = None
    index: int = 0
    segment: int = 0
    progress: Progress | None = None
    finish: Finish | None = None
    segment_end: bool = False
    usage: Usage | None = None
    event: EventChange | None = None


class StageFacts(msgspec.Struct, frozen=True):
    """What a loaded stage tells of itself. `params`: the parameters that it honours, each with its
    choices if it has some; None: the stage judges for itself. `resumable`: it takes segments.
    `interactive`: it takes events."""

    output_format: AudioFormat | ImageFormat | VideoFormat | None = None
    context_tokens: int = 0
    capacity: int | None = None
    versions: dict[str, str] = {}
    params: dict[str, tuple[str, ...]] | None = None
    resumable: bool = False
    interactive: bool = False


class StageStatistics(msgspec.Struct, frozen=True):
    """A stage's own view of its load; None is not known. `counters` count from the stage's start,
    by names of its own."""

    waiting: int | None = None
    work_left: float | None = None
    kv_cache_use: float | None = None
    counters: dict[str, int] = {}


# ---------------------------------------------------------------- events of a request


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


class Output(msgspec.Struct, frozen=True):
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


# ---------------------------------------------------------------- notices of a session


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
