import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from omni_grpc.v1 import common_pb2 as _common_pb2
from omni_grpc.v1 import output_pb2 as _output_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_SUPPORTED: _ClassVar[Capability]
    CAPABILITY_UNSUPPORTED: _ClassVar[Capability]
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_SUPPORTED: Capability
CAPABILITY_UNSUPPORTED: Capability

class PipelineInfo(_message.Message):
    __slots__ = ("name", "description", "stages", "input_modalities", "outputs", "capabilities", "limits")
    class CapabilitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Capability
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Capability, str]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    INPUT_MODALITIES_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    stages: _containers.RepeatedCompositeFieldContainer[StageInfo]
    input_modalities: _containers.RepeatedScalarFieldContainer[_common_pb2.Modality]
    outputs: _containers.RepeatedCompositeFieldContainer[_output_pb2.OutputFormat]
    capabilities: _containers.ScalarMap[str, Capability]
    limits: PipelineLimits
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageInfo, _Mapping]]] = ..., input_modalities: _Optional[_Iterable[_Union[_common_pb2.Modality, str]]] = ..., outputs: _Optional[_Iterable[_Union[_output_pb2.OutputFormat, _Mapping]]] = ..., capabilities: _Optional[_Mapping[str, Capability]] = ..., limits: _Optional[_Union[PipelineLimits, _Mapping]] = ...) -> None: ...

class StageInfo(_message.Message):
    __slots__ = ("name", "engine", "model", "devices", "replicas", "ready_replicas", "inputs", "output", "defaults", "context_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    READY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: str
    model: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    replicas: int
    ready_replicas: int
    inputs: _containers.RepeatedScalarFieldContainer[str]
    output: _common_pb2.Modality
    defaults: _struct_pb2.Struct
    context_tokens: int
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[str] = ..., model: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., replicas: _Optional[int] = ..., ready_replicas: _Optional[int] = ..., inputs: _Optional[_Iterable[str]] = ..., output: _Optional[_Union[_common_pb2.Modality, str]] = ..., defaults: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class PipelineLimits(_message.Message):
    __slots__ = ("max_duration", "input_timeout")
    MAX_DURATION_FIELD_NUMBER: _ClassVar[int]
    INPUT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    max_duration: _duration_pb2.Duration
    input_timeout: _duration_pb2.Duration
    def __init__(self, max_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., input_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ServerLimits(_message.Message):
    __slots__ = ("max_receive_bytes", "max_requests", "max_send_bytes")
    MAX_RECEIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_receive_bytes: int
    max_requests: int
    max_send_bytes: int
    def __init__(self, max_receive_bytes: _Optional[int] = ..., max_requests: _Optional[int] = ..., max_send_bytes: _Optional[int] = ...) -> None: ...

class StageLoad(_message.Message):
    __slots__ = ("pipelines", "stage", "replicas", "waiting")
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    pipelines: _containers.RepeatedScalarFieldContainer[str]
    stage: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    waiting: int
    def __init__(self, pipelines: _Optional[_Iterable[str]] = ..., stage: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ..., waiting: _Optional[int] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("replica", "ready", "waiting", "running", "work_left", "kv_cache_use", "capacity", "sample_age_ms", "restarts", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WORK_LEFT_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    ready: bool
    waiting: int
    running: int
    work_left: float
    kv_cache_use: float
    capacity: int
    sample_age_ms: float
    restarts: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, replica: _Optional[int] = ..., ready: _Optional[bool] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., work_left: _Optional[float] = ..., kv_cache_use: _Optional[float] = ..., capacity: _Optional[int] = ..., sample_age_ms: _Optional[float] = ..., restarts: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
