"""A request after admission's checks: what will run, with which parameters, for how long."""

from __future__ import annotations

from dataclasses import dataclass

from omni_grpc.topology import Pipeline, StageNode
from omni_grpc.types import Params, Request


@dataclass(frozen=True, slots=True)
class Plan:
    """A request after admission's checks: what will run, with which parameters, for how long."""

    request: Request
    pipeline: Pipeline
    finals: tuple[StageNode, ...]
    needed: tuple[StageNode, ...]
    params: dict[str, Params]
    timeout_s: float
    params_paths: dict[str, str]
    """Where the request set a stage's parameters, by stage: "stage_params[1].sampling"."""
