import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from omni_grpc.v1 import common_pb2 as _common_pb2
from omni_grpc.v1 import info_pb2 as _info_pb2
from omni_grpc.v1 import output_pb2 as _output_pb2
from omni_grpc.v1 import params_pb2 as _params_pb2
from omni_grpc.v1 import prompt_pb2 as _prompt_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AddRequestRequest(_message.Message):
    __slots__ = ("request_id", "pipeline", "prompt", "stage_params", "output_modalities", "resumable", "lora", "priority", "data_parallel_rank", "arrival_time", "reasoning_ended", "tokenization", "cache_salt", "additional_information")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    STAGE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MODALITIES_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_TIME_FIELD_NUMBER: _ClassVar[int]
    REASONING_ENDED_FIELD_NUMBER: _ClassVar[int]
    TOKENIZATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADDITIONAL_INFORMATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    pipeline: str
    prompt: _prompt_pb2.Prompt
    stage_params: _containers.RepeatedCompositeFieldContainer[_params_pb2.StageParams]
    output_modalities: _containers.RepeatedScalarFieldContainer[_common_pb2.Modality]
    resumable: bool
    lora: str
    priority: int
    data_parallel_rank: int
    arrival_time: _timestamp_pb2.Timestamp
    reasoning_ended: bool
    tokenization: _prompt_pb2.TokenizationOptions
    cache_salt: str
    additional_information: _struct_pb2.Struct
    def __init__(self, request_id: _Optional[str] = ..., pipeline: _Optional[str] = ..., prompt: _Optional[_Union[_prompt_pb2.Prompt, _Mapping]] = ..., stage_params: _Optional[_Iterable[_Union[_params_pb2.StageParams, _Mapping]]] = ..., output_modalities: _Optional[_Iterable[_Union[_common_pb2.Modality, str]]] = ..., resumable: _Optional[bool] = ..., lora: _Optional[str] = ..., priority: _Optional[int] = ..., data_parallel_rank: _Optional[int] = ..., arrival_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reasoning_ended: _Optional[bool] = ..., tokenization: _Optional[_Union[_prompt_pb2.TokenizationOptions, _Mapping]] = ..., cache_salt: _Optional[str] = ..., additional_information: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class AddRequestResponse(_message.Message):
    __slots__ = ("seq", "epoch", "accepted", "output", "segment_end", "progress", "finished")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_END_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    epoch: int
    accepted: _output_pb2.Accepted
    output: _output_pb2.Output
    segment_end: _output_pb2.SegmentEnd
    progress: _output_pb2.Progress
    finished: _output_pb2.Finished
    def __init__(self, seq: _Optional[int] = ..., epoch: _Optional[int] = ..., accepted: _Optional[_Union[_output_pb2.Accepted, _Mapping]] = ..., output: _Optional[_Union[_output_pb2.Output, _Mapping]] = ..., segment_end: _Optional[_Union[_output_pb2.SegmentEnd, _Mapping]] = ..., progress: _Optional[_Union[_output_pb2.Progress, _Mapping]] = ..., finished: _Optional[_Union[_output_pb2.Finished, _Mapping]] = ...) -> None: ...

class StreamingUpdateRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: UpdateHeader
    chunk: UpdateChunk
    def __init__(self, header: _Optional[_Union[UpdateHeader, _Mapping]] = ..., chunk: _Optional[_Union[UpdateChunk, _Mapping]] = ...) -> None: ...

class UpdateHeader(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class UpdateChunk(_message.Message):
    __slots__ = ("seq", "text", "prompt", "audio", "stage_params", "end_of_segment")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    STAGE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    END_OF_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    seq: int
    text: str
    prompt: _prompt_pb2.Prompt
    audio: AudioInput
    stage_params: _containers.RepeatedCompositeFieldContainer[_params_pb2.StageParams]
    end_of_segment: bool
    def __init__(self, seq: _Optional[int] = ..., text: _Optional[str] = ..., prompt: _Optional[_Union[_prompt_pb2.Prompt, _Mapping]] = ..., audio: _Optional[_Union[AudioInput, _Mapping]] = ..., stage_params: _Optional[_Iterable[_Union[_params_pb2.StageParams, _Mapping]]] = ..., end_of_segment: _Optional[bool] = ...) -> None: ...

class AudioInput(_message.Message):
    __slots__ = ("data", "format")
    DATA_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    format: _common_pb2.AudioFormat
    def __init__(self, data: _Optional[bytes] = ..., format: _Optional[_Union[_common_pb2.AudioFormat, _Mapping]] = ...) -> None: ...

class StreamingUpdateResponse(_message.Message):
    __slots__ = ("accepted_chunks", "duplicate_chunks", "segments")
    ACCEPTED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    accepted_chunks: int
    duplicate_chunks: int
    segments: int
    def __init__(self, accepted_chunks: _Optional[int] = ..., duplicate_chunks: _Optional[int] = ..., segments: _Optional[int] = ...) -> None: ...

class SubmitInteractionRequest(_message.Message):
    __slots__ = ("setup", "update", "end_input", "event", "interrupt", "abort")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    END_INPUT_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    INTERRUPT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    setup: InteractionSetup
    update: UpdateChunk
    end_input: EndInput
    event: InteractionEvent
    interrupt: Interrupt
    abort: AbortSession
    def __init__(self, setup: _Optional[_Union[InteractionSetup, _Mapping]] = ..., update: _Optional[_Union[UpdateChunk, _Mapping]] = ..., end_input: _Optional[_Union[EndInput, _Mapping]] = ..., event: _Optional[_Union[InteractionEvent, _Mapping]] = ..., interrupt: _Optional[_Union[Interrupt, _Mapping]] = ..., abort: _Optional[_Union[AbortSession, _Mapping]] = ...) -> None: ...

class InteractionSetup(_message.Message):
    __slots__ = ("open", "attach")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    open: AddRequestRequest
    attach: Attach
    def __init__(self, open: _Optional[_Union[AddRequestRequest, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("request_id", "receive_outputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    receive_outputs: bool
    def __init__(self, request_id: _Optional[str] = ..., receive_outputs: _Optional[bool] = ...) -> None: ...

class EndInput(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Interrupt(_message.Message):
    __slots__ = ("played_ms",)
    PLAYED_MS_FIELD_NUMBER: _ClassVar[int]
    played_ms: int
    def __init__(self, played_ms: _Optional[int] = ...) -> None: ...

class InteractionEvent(_message.Message):
    __slots__ = ("event_id", "prompt", "negative_prompt", "media", "parameters", "transition_chunks")
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    NEGATIVE_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    TRANSITION_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    prompt: str
    negative_prompt: str
    media: _containers.RepeatedCompositeFieldContainer[_prompt_pb2.Media]
    parameters: _struct_pb2.Struct
    transition_chunks: int
    def __init__(self, event_id: _Optional[str] = ..., prompt: _Optional[str] = ..., negative_prompt: _Optional[str] = ..., media: _Optional[_Iterable[_Union[_prompt_pb2.Media, _Mapping]]] = ..., parameters: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., transition_chunks: _Optional[int] = ...) -> None: ...

class SubmitInteractionResponse(_message.Message):
    __slots__ = ("setup_complete", "event_state", "update_rejected", "response", "interrupted", "going_away")
    SETUP_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EVENT_STATE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_REJECTED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    GOING_AWAY_FIELD_NUMBER: _ClassVar[int]
    setup_complete: SetupComplete
    event_state: EventState
    update_rejected: UpdateRejected
    response: AddRequestResponse
    interrupted: Interrupted
    going_away: GoingAway
    def __init__(self, setup_complete: _Optional[_Union[SetupComplete, _Mapping]] = ..., event_state: _Optional[_Union[EventState, _Mapping]] = ..., update_rejected: _Optional[_Union[UpdateRejected, _Mapping]] = ..., response: _Optional[_Union[AddRequestResponse, _Mapping]] = ..., interrupted: _Optional[_Union[Interrupted, _Mapping]] = ..., going_away: _Optional[_Union[GoingAway, _Mapping]] = ...) -> None: ...

class SetupComplete(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class EventState(_message.Message):
    __slots__ = ("event_id", "state", "chunk", "resubmission", "status")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[EventState.State]
        STATE_QUEUED: _ClassVar[EventState.State]
        STATE_REJECTED: _ClassVar[EventState.State]
        STATE_SUPERSEDED: _ClassVar[EventState.State]
        STATE_EXPIRED: _ClassVar[EventState.State]
        STATE_STARTED: _ClassVar[EventState.State]
        STATE_COMPLETED: _ClassVar[EventState.State]
    STATE_UNSPECIFIED: EventState.State
    STATE_QUEUED: EventState.State
    STATE_REJECTED: EventState.State
    STATE_SUPERSEDED: EventState.State
    STATE_EXPIRED: EventState.State
    STATE_STARTED: EventState.State
    STATE_COMPLETED: EventState.State
    EVENT_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESUBMISSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    event_id: str
    state: EventState.State
    chunk: int
    resubmission: bool
    status: _common_pb2.ErrorStatus
    def __init__(self, event_id: _Optional[str] = ..., state: _Optional[_Union[EventState.State, str]] = ..., chunk: _Optional[int] = ..., resubmission: _Optional[bool] = ..., status: _Optional[_Union[_common_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class UpdateRejected(_message.Message):
    __slots__ = ("seq", "status")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    status: _common_pb2.ErrorStatus
    def __init__(self, seq: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class Interrupted(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class GoingAway(_message.Message):
    __slots__ = ("time_left_ms",)
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    time_left_ms: int
    def __init__(self, time_left_ms: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("results",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[AbortResponse.Outcome]
        OUTCOME_ABORTED: _ClassVar[AbortResponse.Outcome]
        OUTCOME_ALREADY_FINISHED: _ClassVar[AbortResponse.Outcome]
        OUTCOME_NOT_FOUND: _ClassVar[AbortResponse.Outcome]
    OUTCOME_UNSPECIFIED: AbortResponse.Outcome
    OUTCOME_ABORTED: AbortResponse.Outcome
    OUTCOME_ALREADY_FINISHED: AbortResponse.Outcome
    OUTCOME_NOT_FOUND: AbortResponse.Outcome
    class Result(_message.Message):
        __slots__ = ("request_id", "outcome")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        outcome: AbortResponse.Outcome
        def __init__(self, request_id: _Optional[str] = ..., outcome: _Optional[_Union[AbortResponse.Outcome, str]] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[AbortResponse.Result]
    def __init__(self, results: _Optional[_Iterable[_Union[AbortResponse.Result, _Mapping]]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("server_version", "schema_revision", "min_client_revision", "library_versions", "default_pipeline", "pipelines", "limits", "pod")
    class LibraryVersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MIN_CLIENT_REVISION_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    schema_revision: int
    min_client_revision: int
    library_versions: _containers.ScalarMap[str, str]
    default_pipeline: str
    pipelines: _containers.RepeatedCompositeFieldContainer[_info_pb2.PipelineInfo]
    limits: _info_pb2.ServerLimits
    pod: str
    def __init__(self, server_version: _Optional[str] = ..., schema_revision: _Optional[int] = ..., min_client_revision: _Optional[int] = ..., library_versions: _Optional[_Mapping[str, str]] = ..., default_pipeline: _Optional[str] = ..., pipelines: _Optional[_Iterable[_Union[_info_pb2.PipelineInfo, _Mapping]]] = ..., limits: _Optional[_Union[_info_pb2.ServerLimits, _Mapping]] = ..., pod: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[_info_pb2.StageLoad]
    def __init__(self, stages: _Optional[_Iterable[_Union[_info_pb2.StageLoad, _Mapping]]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[_info_pb2.StageLoad]
    def __init__(self, stages: _Optional[_Iterable[_Union[_info_pb2.StageLoad, _Mapping]]] = ...) -> None: ...
