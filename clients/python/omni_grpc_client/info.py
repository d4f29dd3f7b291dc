"""What a server tells of itself: what it serves, and its load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from omni_grpc.v1 import info_pb2, service_pb2
from omni_grpc_client.media import Modality, OutputFormat, decode_modality, decode_output_format
from omni_grpc_client.request import ParamsKind

KIND_BY_ENGINE: dict[str, ParamsKind] = {
    "vllm": "sampling",
    "diffusion": "diffusion",
    "live": "diffusion",
    "diffusers": "diffusion",
    "codec": "codec",
    "fake": "custom",
    "python": "custom",
}


@dataclass(frozen=True, slots=True)
class StageInfo:
    """One stage. `output` is None where it gives nothing to the client."""

    name: str
    engine: str
    model: str
    devices: tuple[str, ...]
    replicas: int
    ready_replicas: int
    inputs: tuple[str, ...]
    output: Modality | None
    defaults: Mapping[str, Any]
    context_tokens: int

    @property
    def params_kind(self) -> ParamsKind:
        """Which kind of parameters the stage takes."""
        return KIND_BY_ENGINE.get(self.engine, "custom")


@dataclass(frozen=True, slots=True)
class PipelineInfo:
    """One pipeline; its stages in the order in which data flows. Times in seconds."""

    name: str
    description: str
    stages: tuple[StageInfo, ...]
    input_modalities: tuple[Modality, ...]
    outputs: tuple[OutputFormat, ...]
    capabilities: Mapping[str, bool | None]
    """True: supported; False: refused; None: the server does not know."""
    max_duration: float
    input_timeout: float

    def can(self, *capabilities: str) -> bool:
        """Whether it has all of these ("resumable", "prompt.text", "output.audio", ...)."""
        return all(self.capabilities.get(name) for name in capabilities)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the server; sizes in bytes."""

    max_receive_bytes: int
    max_send_bytes: int
    max_requests: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served."""

    server_version: str
    schema_revision: int
    min_client_revision: int
    library_versions: Mapping[str, str]
    default_pipeline: str
    pipelines: tuple[PipelineInfo, ...]
    limits: ServerLimits
    pod: str

    def pipeline(self, name: str = "") -> PipelineInfo | None:
        """The pipeline of that name, "" is the default one; None if there is none."""
        name = name or self.default_pipeline
        return next((pipeline for pipeline in self.pipelines if pipeline.name == name), None)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Load of one replica. None is not known, which is not 0."""

    replica: int
    ready: bool
    restarts: int
    waiting: int | None
    running: int | None
    work_left: float | None
    kv_cache_use: float | None
    capacity: int | None
    sample_age_ms: float | None


@dataclass(frozen=True, slots=True)
class StageLoad:
    """Load of one stage; a stage that pipelines share comes once."""

    pipelines: tuple[str, ...]
    stage: str
    replicas: tuple[ReplicaLoad, ...]


def decode_server_info(message: service_pb2.GetServerInfoResponse) -> ServerInfo:
    """What is served."""
    limits = message.limits
    return ServerInfo(
        message.server_version,
        message.schema_revision,
        message.min_client_revision,
        dict(message.library_versions),
        message.default_pipeline,
        tuple(_pipeline(pipeline) for pipeline in message.pipelines),
        ServerLimits(limits.max_receive_bytes, limits.max_send_bytes, limits.max_requests),
        message.pod,
    )


def _pipeline(message: info_pb2.PipelineInfo) -> PipelineInfo:
    supported = {info_pb2.CAPABILITY_SUPPORTED: True, info_pb2.CAPABILITY_UNSUPPORTED: False}
    limits = message.limits
    return PipelineInfo(
        message.name,
        message.description,
        tuple(_stage(stage) for stage in message.stages),
        tuple(decode_modality(modality) for modality in message.input_modalities),
        tuple(decode_output_format(output) for output in message.outputs),
        {name: supported.get(value) for name, value in sorted(message.capabilities.items())},
        limits.max_duration.ToTimedelta().total_seconds(),
        limits.input_timeout.ToTimedelta().total_seconds(),
    )


def _stage(message: info_pb2.StageInfo) -> StageInfo:
    return StageInfo(
        message.name,
        message.engine,
        message.model,
        tuple(message.devices),
        message.replicas,
        message.ready_replicas,
        tuple(message.inputs),
        decode_modality(message.output) if message.output else None,
        MessageToDict(message.defaults),
        message.context_tokens,
    )


def decode_load(
    message: service_pb2.GetLoadResponse | service_pb2.WatchLoadResponse,
) -> tuple[StageLoad, ...]:
    """The load at one moment."""
    return tuple(
        StageLoad(tuple(s.pipelines), s.stage, tuple(_replica(r) for r in s.replicas))
        for s in message.stages
    )


def _replica(message: info_pb2.ReplicaLoad) -> ReplicaLoad:
    return ReplicaLoad(
        message.replica,
        message.ready,
        message.restarts,
        _known(message, "waiting"),
        _known(message, "running"),
        _known(message, "work_left"),
        _known(message, "kv_cache_use"),
        _known(message, "capacity"),
        _known(message, "sample_age_ms"),
    )


def _known(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
