"""Prompt expansions: the companions that a request needs for guidance.

With classifier-free guidance a diffusion stage wants two conditionings: what to draw, and what to
move away from. The second is a companion of the request at stage 0: a prompt of its own that emits
nothing to the client and is handed on together with its parent's output, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_grpc.errors import InvalidField
from omni_grpc.pipelines.imported import imported
from omni_grpc.types import DiffusionParams, Params, Prompt, Text


@dataclass(frozen=True, slots=True)
class Companion:
    """One companion. `overrides` change its clone of the parent's stage-0 parameters, by name."""

    role: str
    prompt: Prompt
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExpansionContext:
    """What an expansion knows: the client's prompt, and the parameters per stage."""

    request_id: str
    prompt: Prompt
    params: Mapping[str, Params]


Expansion = Callable[[ExpansionContext], tuple[Companion, ...]]


def guidance(context: ExpansionContext) -> tuple[Companion, ...]:
    """The negative text as a companion, where a diffusion stage guides.

    Without negative text the diffusion stage guides away from its own empty prompt: no companion.
    Negative text without guidance would have no effect and is refused.
    """
    scales = [p.guidance_scale for p in context.params.values() if isinstance(p, DiffusionParams)]
    guided = any(scale is not None and scale > 1 for scale in scales)
    if not (context.prompt.negative_text or "").strip():
        return ()
    if not guided:
        raise InvalidField("prompt.negative_text", "needs a guidance_scale above 1")
    return (Companion("negative", Prompt(Text(context.prompt.negative_text or ""))),)


_BUILT_IN: dict[str, Expansion] = {"guidance": guidance}


def load_expansion(name: str) -> Expansion:
    """The expansion of that name, or at the import path `package.module:function`. Raises
    ConfigError."""
    expansion: Expansion = _BUILT_IN.get(name) or imported("expansion", name, _BUILT_IN)
    return expansion
