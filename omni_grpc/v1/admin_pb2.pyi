import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from omni_grpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageTarget(_message.Message):
    __slots__ = ("stage", "replicas")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    stage: str
    replicas: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage: _Optional[str] = ..., replicas: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplicaResult(_message.Message):
    __slots__ = ("replica", "status")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    replica: int
    status: _common_pb2.ErrorStatus
    def __init__(self, replica: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ErrorStatus, _Mapping]] = ...) -> None: ...

class PauseStageRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ...) -> None: ...

class PauseStageResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class ResumeStageRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ...) -> None: ...

class ResumeStageResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ("target", "prefix_cache", "media_cache")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    MEDIA_CACHE_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    prefix_cache: bool
    media_cache: bool
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ..., prefix_cache: _Optional[bool] = ..., media_cache: _Optional[bool] = ...) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class SleepStageRequest(_message.Message):
    __slots__ = ("target", "level")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    level: int
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ..., level: _Optional[int] = ...) -> None: ...

class SleepStageResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class WakeStageRequest(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ...) -> None: ...

class WakeStageResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("target", "name", "path")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    name: str
    path: str
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ..., name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("target", "name")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    target: StageTarget
    name: str
    def __init__(self, target: _Optional[_Union[StageTarget, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReplicaResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReplicaResult, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout",)
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    timeout: _duration_pb2.Duration
    def __init__(self, timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running",)
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    running: int
    def __init__(self, running: _Optional[int] = ...) -> None: ...

class GetCensusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCensusResponse(_message.Message):
    __slots__ = ("holdings", "standing")
    class StandingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    standing: _containers.ScalarMap[str, int]
    def __init__(self, holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., standing: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("kind", "request_id", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    request_id: str
    detail: str
    def __init__(self, kind: _Optional[str] = ..., request_id: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
