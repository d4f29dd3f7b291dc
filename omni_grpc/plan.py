"""A request after admission's checks: what will run, with which parameters, for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omni_grpc.errors import OmniError, Violation
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
    progress_s: float = 30.0
    """Longest silence towards the client."""

    def placed(
        self,
        stage: str,
        error: OmniError,
        paths: Mapping[str, str] | None = None,
        root: str = "",
    ) -> OmniError:
        """The error with the client's own paths: a stage knows "params" and "prompt" only, of the
        request, or of the chunk whose `paths` and `root` these are."""
        params = {**self.params_paths, **(paths or {})}.get(stage, f"stage_params({stage})")
        if error.violations:
            error.violations = tuple(
                Violation(_place(v.field, params, root), v.description) for v in error.violations
            )
            error.message = "; ".join(f"{v.field}: {v.description}" for v in error.violations[:5])
        return error


def _place(field: str, params: str, root: str) -> str:
    head, dot, rest = field.partition(".")
    if head == "params":
        return params + dot + rest
    return root + field if head == "prompt" else field
