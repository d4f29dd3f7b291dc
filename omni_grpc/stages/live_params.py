"""What can be said of a film: the engine's arguments, a request's parameters, an event's change."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from omni_grpc.errors import InvalidField
from omni_grpc.params import check_honoured
from omni_grpc.stages.diffusion import GUIDANCE, MAX_GUIDANCE, check_side
from omni_grpc.stages.fragment import FILM_TYPES
from omni_grpc.stages.painter.captions import CAPTIONS, Caption, parse, parse_optional
from omni_grpc.types import DiffusionParams, InteractionEvent

STEPS = 12
MAX_FPS = 60.0
HONOURED: dict[str, tuple[str, ...]] = {
    "steps": (),
    "guidance_scale": (),
    "width": (),
    "height": (),
    "seed": (),
    "frames": (),
    "fps": (),
    "scheduler": ("euler",),
    "output_mime_type": FILM_TYPES,
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's arguments."""

    chunk_frames: int = 4
    fps: float = 12.0
    realtime: bool = True
    buffer_chunks: int = 1
    max_batch: int = 8
    max_running: int = 16
    max_steps: int = 200


@dataclass(frozen=True, slots=True)
class Order:
    """How a film is to be made, everything decided. `frames` None: without an end; `steps` are of a
    picture that is painted anew."""

    steps: int
    guidance: float
    seed: int
    frames: int | None
    fps: float
    mime_type: str


def read_settings(arguments: dict[str, Any]) -> Settings:
    """The engine's arguments. ValueError for what is none."""
    settings = msgspec.convert(arguments, Settings)
    for name in ("chunk_frames", "buffer_chunks", "max_batch", "max_running", "max_steps"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be 1 or more")
    if not 1 <= settings.fps <= MAX_FPS:
        raise ValueError(f"fps must be from 1 to {MAX_FPS:g}")
    return settings


def read_order(params: DiffusionParams, settings: Settings) -> Order:
    """A request's parameters. Raises InvalidField below "params"."""
    check_honoured(params, HONOURED, "params")
    for name in ("width", "height"):
        check_side(name, getattr(params, name))
    steps = STEPS if params.steps is None else params.steps
    if not 1 <= steps <= settings.max_steps:
        raise InvalidField("params.steps", f"must be from 1 to {settings.max_steps}")
    fps = settings.fps if params.fps is None else params.fps
    if not 1 <= fps <= MAX_FPS:
        raise InvalidField("params.fps", f"must be from 1 to {MAX_FPS:g}")
    if params.frames is not None and params.frames < 1:
        raise InvalidField("params.frames", "must be 1 or more")
    guidance = GUIDANCE if params.guidance_scale is None else params.guidance_scale
    return Order(
        steps=steps,
        guidance=_guidance(guidance, "params.guidance_scale"),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        frames=params.frames,
        fps=fps,
        mime_type=params.output_mime_type or FILM_TYPES[0],
    )


def read_event(event: InteractionEvent) -> tuple[dict[str, Caption | None], dict[str, Any]]:
    """What an event changes of a Scene: the captions of `cond` and `uncond` (None: none any more),
    and its numbers. Raises InvalidField below "event" if any part of it is wrong."""
    if event.media:
        raise InvalidField("event.media", "the painter looks at no media")
    captions: dict[str, Caption | None] = {}
    if event.prompt is not None:
        captions["cond"] = _parsed(parse, event.prompt, "event.prompt")
    if event.negative_prompt is not None:
        path = "event.negative_prompt"
        captions["uncond"] = _parsed(parse_optional, event.negative_prompt, path)
    numbers: dict[str, Any] = {}
    for name, value in (event.parameters or {}).items():
        path = f"event.parameters.{name}"
        match name:
            case "guidance_scale":
                numbers["guidance"] = _guidance(_number(value, path), path)
            case "seed":
                numbers["seed"] = _seed(_number(value, path), path)
            case _:
                raise InvalidField(path, "only guidance_scale and seed change while a film runs")
    return captions, numbers


Parsed = TypeVar("Parsed")


def _parsed(parser: Callable[[str], Parsed], text: str, path: str) -> Parsed:
    try:
        return parser(text)
    except ValueError as error:
        raise InvalidField(path, f'{error}; a caption is like "{CAPTIONS[0]}"') from None


def _number(value: object, path: str) -> float:
    # A bool is an int to Python, but not to who wrote it.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidField(path, "must be a finite number")
    return value


def _guidance(value: float, path: str) -> float:
    if not 1 <= value <= MAX_GUIDANCE:
        raise InvalidField(path, f"must be from 1 to {MAX_GUIDANCE:g}")
    return value


def _seed(value: float, path: str) -> int:
    # A Struct's numbers are all doubles: beyond 2**53 not every seed can be said in one.
    if value != int(value) or not 0 <= value < 2**64:
        raise InvalidField(path, "must be a whole number from 0 to 2^64 - 1")
    return int(value)
