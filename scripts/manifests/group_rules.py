"""A replica over several nodes: vLLM on the leader, told by a pipeline, and on the workers, told
by their arguments, must agree on how the model is divided."""

from __future__ import annotations

from collections.abc import Iterator

from omni_grpc.config import StageConfig
from omni_grpc.errors import ConfigError
from scripts.manifests.build import Build, Object
from scripts.manifests.pod_rules import GPU, pipelines_of
from scripts.manifests.pods import Pod, pods_of


def group_problems(build: Build) -> Iterator[str]:
    """What is wrong with groups of pods."""
    for item in build.of("LeaderWorkerSet"):
        name = f"LeaderWorkerSet/{item['metadata']['name']}"
        try:
            yield from (f"{name}: {found}" for found in _disagreements(build, item))
        except ConfigError as error:
            yield f"{name}: {error}"


def _disagreements(build: Build, item: Object) -> Iterator[str]:
    leader, worker = pods_of(item)
    spread = [
        stage
        for config in pipelines_of(build, leader)
        for stage in config.stages
        if stage.engine_args.get("nnodes", 1) > 1
    ]
    if len(spread) != 1:
        yield f"{len(spread)} stages are spread over nodes; a group carries one"
        return
    (stage,) = spread
    size = item["spec"]["leaderWorkerTemplate"]["size"]
    if stage.engine_args["nnodes"] != size:
        yield f"stage {stage.name} has {stage.engine_args['nnodes']} nodes, the group {size}"
    if stage.restart.budget:
        yield f"stage {stage.name} restarts alone, and its worker would never know"
    container = worker.spec["containers"][0]
    if container.get("command", [])[-1:] != [stage.model]:
        yield f"the worker doesn't serve {stage.model}"
    wanted = _wanted(stage)
    given = dict(argument.partition("=")[::2] for argument in container["args"])
    for option, value in wanted.items():
        if given.get(option) != value:
            yield f"the worker has {option} {given.get(option)}, the pipeline {value}"
    yield from _width(stage, size, leader, worker)


def _wanted(stage: StageConfig) -> dict[str, str]:
    arguments = stage.engine_args
    return {
        "--headless": "",
        "--nnodes": str(arguments["nnodes"]),
        "--tensor-parallel-size": str(arguments.get("tensor_parallel_size", 1)),
        "--pipeline-parallel-size": str(arguments.get("pipeline_parallel_size", 1)),
        "--gpu-memory-utilization": f"{stage.memory_fraction:g}",
        "--worker-extension-cls": "omni_grpc.stages.vllm.worker.SessionWorker",
    }


def _width(stage: StageConfig, size: int, leader: Pod, worker: Pod) -> Iterator[str]:
    arguments = stage.engine_args
    ranks = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    gpus = [int(pod.spec["containers"][0]["resources"]["limits"][GPU]) for pod in (leader, worker)]
    if gpus[0] + gpus[1] * (size - 1) != ranks:
        yield f"stage {stage.name} has {ranks} ranks, the group {gpus} GPUs"
