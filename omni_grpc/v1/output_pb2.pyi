from omni_grpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_COMPLETE: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_COMPLETE: FinishReason
FINISH_REASON_REPETITION: FinishReason

class Accepted(_message.Message):
    __slots__ = ("request_id", "pipeline", "stages", "outputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pipeline: str
    stages: _containers.RepeatedScalarFieldContainer[str]
    outputs: _containers.RepeatedCompositeFieldContainer[OutputFormat]
    def __init__(self, request_id: _Optional[str] = ..., pipeline: _Optional[str] = ..., stages: _Optional[_Iterable[str]] = ..., outputs: _Optional[_Iterable[_Union[OutputFormat, _Mapping]]] = ...) -> None: ...

class OutputFormat(_message.Message):
    __slots__ = ("stage", "modality", "audio", "image", "video")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    stage: str
    modality: _common_pb2.Modality
    audio: _common_pb2.AudioFormat
    image: ImageFormat
    video: VideoFormat
    def __init__(self, stage: _Optional[str] = ..., modality: _Optional[_Union[_common_pb2.Modality, str]] = ..., audio: _Optional[_Union[_common_pb2.AudioFormat, _Mapping]] = ..., image: _Optional[_Union[ImageFormat, _Mapping]] = ..., video: _Optional[_Union[VideoFormat, _Mapping]] = ...) -> None: ...

class ImageFormat(_message.Message):
    __slots__ = ("mime_type", "width", "height")
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    mime_type: str
    width: int
    height: int
    def __init__(self, mime_type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class VideoFormat(_message.Message):
    __slots__ = ("mime_type", "width", "height", "fps")
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    mime_type: str
    width: int
    height: int
    fps: float
    def __init__(self, mime_type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., fps: _Optional[float] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("stage", "index", "segment", "text", "audio", "image", "video", "tensor")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    stage: str
    index: int
    segment: int
    text: TextDelta
    audio: AudioChunk
    image: ImageChunk
    video: VideoChunk
    tensor: TensorChunk
    def __init__(self, stage: _Optional[str] = ..., index: _Optional[int] = ..., segment: _Optional[int] = ..., text: _Optional[_Union[TextDelta, _Mapping]] = ..., audio: _Optional[_Union[AudioChunk, _Mapping]] = ..., image: _Optional[_Union[ImageChunk, _Mapping]] = ..., video: _Optional[_Union[VideoChunk, _Mapping]] = ..., tensor: _Optional[_Union[TensorChunk, _Mapping]] = ...) -> None: ...

class TextDelta(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "prompt_logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "candidates")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    candidates: _containers.RepeatedCompositeFieldContainer[CandidateLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[CandidateLogprob, _Mapping]]] = ...) -> None: ...

class CandidateLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "text")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    text: str
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class AudioChunk(_message.Message):
    __slots__ = ("data", "start_sample", "format")
    DATA_FIELD_NUMBER: _ClassVar[int]
    START_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    start_sample: int
    format: _common_pb2.AudioFormat
    def __init__(self, data: _Optional[bytes] = ..., start_sample: _Optional[int] = ..., format: _Optional[_Union[_common_pb2.AudioFormat, _Mapping]] = ...) -> None: ...

class ImageChunk(_message.Message):
    __slots__ = ("data", "mime_type", "width", "height", "offset", "last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    mime_type: str
    width: int
    height: int
    offset: int
    last: bool
    def __init__(self, data: _Optional[bytes] = ..., mime_type: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., offset: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class VideoChunk(_message.Message):
    __slots__ = ("data", "mime_type", "chunk_index", "first_frame", "frame_count", "last", "active_event_ids", "width", "height")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_FIELD_NUMBER: _ClassVar[int]
    FRAME_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_EVENT_IDS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    mime_type: str
    chunk_index: int
    first_frame: int
    frame_count: int
    last: bool
    active_event_ids: _containers.RepeatedScalarFieldContainer[str]
    width: int
    height: int
    def __init__(self, data: _Optional[bytes] = ..., mime_type: _Optional[str] = ..., chunk_index: _Optional[int] = ..., first_frame: _Optional[int] = ..., frame_count: _Optional[int] = ..., last: _Optional[bool] = ..., active_event_ids: _Optional[_Iterable[str]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("name", "data", "dtype", "shape", "offset", "last")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    dtype: _common_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    last: bool
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., dtype: _Optional[_Union[_common_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class StageFinish(_message.Message):
    __slots__ = ("stage", "index", "reason", "stop_text", "stop_token_id")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    stage: str
    index: int
    reason: FinishReason
    stop_text: str
    stop_token_id: int
    def __init__(self, stage: _Optional[str] = ..., index: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_text: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class SegmentEnd(_message.Message):
    __slots__ = ("segment", "stage", "reason")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    segment: int
    stage: str
    reason: FinishReason
    def __init__(self, segment: _Optional[int] = ..., stage: _Optional[str] = ..., reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("stage", "step", "total_steps", "preview")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    stage: str
    step: int
    total_steps: int
    preview: ImageChunk
    def __init__(self, stage: _Optional[str] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., preview: _Optional[_Union[ImageChunk, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens", "audio_samples", "frames", "steps")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audio_samples: int
    frames: int
    steps: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., audio_samples: _Optional[int] = ..., frames: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("preprocess_ms", "transform_ms", "queue_wait_ms", "stage_ms", "first_output_ms", "total_ms")
    class StageMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FirstOutputMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PREPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFORM_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    STAGE_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    preprocess_ms: float
    transform_ms: float
    queue_wait_ms: float
    stage_ms: _containers.ScalarMap[str, float]
    first_output_ms: _containers.ScalarMap[str, float]
    total_ms: float
    def __init__(self, preprocess_ms: _Optional[float] = ..., transform_ms: _Optional[float] = ..., queue_wait_ms: _Optional[float] = ..., stage_ms: _Optional[_Mapping[str, float]] = ..., first_output_ms: _Optional[_Mapping[str, float]] = ..., total_ms: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reasons", "usage", "timings")
    FINISH_REASONS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    finish_reasons: _containers.RepeatedCompositeFieldContainer[StageFinish]
    usage: Usage
    timings: Timings
    def __init__(self, finish_reasons: _Optional[_Iterable[_Union[StageFinish, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...
