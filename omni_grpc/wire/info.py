"""What the server tells of itself: information and load, from our types to the contract's
messages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from importlib import metadata
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from omni_grpc import __version__
from omni_grpc.engine import Engine, StageStatistics
from omni_grpc.orchestrator import AbortOutcome
from omni_grpc.pool import SlotStatistics
from omni_grpc.topology import Pipeline, StageNode
from omni_grpc.types import Modality
from omni_grpc.v1 import common_pb2, info_pb2, service_pb2
from omni_grpc.wire.events import encode_output_format
from omni_grpc.wire.values import MODALITY_OUT

SCHEMA_REVISION = 1
MIN_CLIENT_REVISION = 1
MAX_SEND_BYTES = 1 << 20

_OUTCOME_OUT = {
    outcome: getattr(service_pb2.AbortResponse, f"OUTCOME_{outcome.name}")
    for outcome in AbortOutcome
}


def encode_server_info(engine: Engine, pod: str) -> service_pb2.GetServerInfoResponse:
    """What is served."""
    settings = engine.settings
    return service_pb2.GetServerInfoResponse(
        server_version=__version__,
        schema_revision=SCHEMA_REVISION,
        min_client_revision=MIN_CLIENT_REVISION,
        library_versions=_versions(engine),
        default_pipeline=engine.default,
        pipelines=[_pipeline(pipeline) for pipeline in engine.pipelines.values()],
        limits=info_pb2.ServerLimits(
            max_receive_bytes=settings.max_receive_bytes,
            max_requests=settings.max_requests,
            max_send_bytes=MAX_SEND_BYTES,
        ),
        pod=pod,
    )


def _versions(engine: Engine) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("grpcio", "protobuf")}
    for pool in engine.pools:
        versions |= pool.facts.versions
    return versions


def _pipeline(pipeline: Pipeline) -> info_pb2.PipelineInfo:
    config = pipeline.config
    finals = [node for node in pipeline.stages.values() if node.config.output is not None]
    return info_pb2.PipelineInfo(
        name=config.name,
        description=config.description,
        stages=[_stage(node) for node in pipeline.stages.values()],
        input_modalities=[MODALITY_OUT[modality] for modality in config.inputs],
        outputs=[encode_output_format(pipeline.output_format(node)) for node in finals],
        capabilities=_capabilities(pipeline),
        limits=info_pb2.PipelineLimits(
            max_duration=_duration(config.max_duration),
            input_timeout=_duration(config.input_timeout),
        ),
    )


def _capabilities(pipeline: Pipeline) -> dict[str, Any]:
    """What a client may ask for, by name; what is not served yet is unsupported."""
    config = pipeline.config
    offered = {node.config.output for node in pipeline.stages.values()}
    answers = {
        **{
            f"prompt.{form}": form in config.prompts
            for form in ("text", "token_ids", "messages", "embeds", "media")
        },
        **{f"input.{m.value}": m in config.inputs for m in Modality if m is not Modality.TENSOR},
        **{f"output.{m.value}": m in offered for m in Modality},
        "resumable": all(node.pool.facts.resumable for node in pipeline.stages.values()),
        "interaction": any(node.pool.facts.interactive for node in pipeline.stages.values()),
        "guidance": config.guidance,
        "lora": bool(pipeline.entry.pool.adapters),
        # What an autoregressive stage 0 gives beside its text.
        "logprobs": pipeline.entry.config.engine == "vllm",
        "structured_outputs": pipeline.entry.config.engine == "vllm",
    }
    return {
        name: info_pb2.CAPABILITY_SUPPORTED if yes else info_pb2.CAPABILITY_UNSUPPORTED
        for name, yes in answers.items()
    }


def _stage(node: StageNode) -> info_pb2.StageInfo:
    config = node.config
    defaults = Struct()
    defaults.update(config.defaults)
    return info_pb2.StageInfo(
        name=config.name,
        engine=config.engine,
        model=config.model,
        devices=[config.device(number) for number in range(config.replicas)],
        replicas=config.replicas,
        ready_replicas=node.pool.ready_replicas,
        inputs=config.inputs,
        output=MODALITY_OUT[config.output]
        if config.output is not None
        else common_pb2.MODALITY_UNSPECIFIED,
        defaults=defaults,
        context_tokens=node.pool.facts.context_tokens,
    )


def encode_load(stages: Iterable[StageStatistics]) -> list[info_pb2.StageLoad]:
    """The present load."""
    return [
        info_pb2.StageLoad(
            pipelines=stage.pipelines,
            stage=stage.stage,
            replicas=[_replica(slot) for slot in stage.replicas],
            waiting=stage.waiting,
        )
        for stage in stages
    ]


def _replica(slot: SlotStatistics) -> info_pb2.ReplicaLoad:
    load, own = slot.load, slot.load.own
    # Only what is known is set: absent is not 0.
    known: dict[str, Any] = {
        "waiting": own.waiting,
        "running": load.running if load.ready else None,
        "work_left": load.work if load.ready else None,
        "kv_cache_use": own.kv_cache_use,
        "capacity": slot.capacity if load.ready else None,
        "sample_age_ms": load.sample_age_s * 1e3 if load.sample_age_s is not None else None,
    }
    return info_pb2.ReplicaLoad(
        replica=slot.replica,
        ready=load.ready,
        restarts=slot.restarts,
        counters=own.counters,
        **{name: value for name, value in known.items() if value is not None},
    )


def encode_outcomes(
    request_ids: Iterable[str], outcomes: Iterable[AbortOutcome]
) -> service_pb2.AbortResponse:
    """What became of each id."""
    return service_pb2.AbortResponse(
        results=[
            service_pb2.AbortResponse.Result(request_id=i, outcome=_OUTCOME_OUT[o])
            for i, o in zip(request_ids, outcomes, strict=True)
        ]
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration
