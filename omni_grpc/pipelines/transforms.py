"""Prompt transforms: what turns a client's prompt into stage 0's view of it.

A transform is called once per request, in a thread, with a copy of the prompt; later stages still
see the prompt as the client sent it. It may make directories for the request (`context.artifacts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_grpc.artifacts import Artifacts
from omni_grpc.pipelines.imported import imported
from omni_grpc.types import Params, Prompt

OWNED_KEYS = frozenset({"global_request_id", "artifact_directories", "transform"})
"""Keys of `additional_information` that only the server and its transforms set: what a client sends
under them is dropped."""


@dataclass(frozen=True, slots=True)
class TransformContext:
    """What a transform knows: the request's id, the parameters per stage, its artifacts."""

    request_id: str
    params: Mapping[str, Params]
    artifacts: Artifacts
    additional_information: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transformed:
    """A transform's result: stage 0's prompt, metadata that joins the request's additional
    information, and directories below the artifact root that it made by itself."""

    prompt: Prompt
    additional_information: dict[str, Any] = field(default_factory=dict)
    artifact_directories: tuple[Path, ...] = ()


Transform = Callable[[Prompt, TransformContext], Transformed]


def load_transform(name: str) -> Transform:
    """The transform at the import path `package.module:function`. Raises ConfigError."""
    transform: Transform = imported("transform", name)
    return transform
