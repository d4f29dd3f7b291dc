"""Parameters of a stage: which kind an engine takes, and how three sources become one set.

defaults     of the pipeline hold where the request sets nothing
request      what the caller sets
constraints  of the pipeline fill what is unset; a request that sets something else is refused;
             required stop tokens and strings are added
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omni_grpc.errors import InvalidField
from omni_grpc.types import (
    CodecParams,
    CustomParams,
    DiffusionParams,
    Params,
    SamplingParams,
)

KIND_BY_ENGINE: dict[str, type[Params]] = {
    "vllm": SamplingParams,
    "diffusion": DiffusionParams,
    "live": DiffusionParams,
    "diffusers": DiffusionParams,
    "codec": CodecParams,
    "whisper": CustomParams,
    "ocr": CustomParams,
    "fake": CustomParams,
    "python": CustomParams,
}

FIELD_BY_KIND: dict[type[Params], str] = {
    SamplingParams: "sampling",
    DiffusionParams: "diffusion",
    CodecParams: "codec",
    CustomParams: "custom",
}
"""Name of the kind in the contract's `StageParams.params`."""

_ADDED = ("stop", "stop_token_ids")
"""Constraints that are added to what the caller set instead of forbidding it."""


class FakeScript(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fake stage does. Times in milliseconds, sizes in bytes, indices count outputs from
    0."""

    outputs: int | None = None
    interval_ms: float = 0.0
    first_ms: float = 0.0
    bytes: int | None = None
    fail_at: int | None = None
    die_at: int | None = None
    hang_at: int | None = None
    prepare_fail: bool = False
    prepare_ms: float = 0.0


MAX_FAKE_OUTPUTS = 1_000_000
MAX_FAKE_BYTES = 1 << 28
MAX_FAKE_MS = 3_600_000.0


def parse_fake_script(values: dict[str, Any], path: str = "params") -> FakeScript:
    """The script that `values` holds; InvalidField with a path below `path` if it is none."""
    known = FakeScript.__struct_fields__
    for key in values:
        if key not in known:
            raise InvalidField(f"{path}.{key}", f"is not one of {', '.join(known)}")
    # A Struct's numbers are all doubles: 3.0 is the integer 3.
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in values.items()}
    try:
        script = msgspec.convert(whole, FakeScript)
    except msgspec.ValidationError as error:
        raise InvalidField(*_locate(path, str(error))) from None
    for name, most in (
        ("outputs", MAX_FAKE_OUTPUTS),
        ("bytes", MAX_FAKE_BYTES),
        ("interval_ms", MAX_FAKE_MS),
        ("first_ms", MAX_FAKE_MS),
        ("prepare_ms", MAX_FAKE_MS),
        ("fail_at", MAX_FAKE_OUTPUTS),
        ("die_at", MAX_FAKE_OUTPUTS),
        ("hang_at", MAX_FAKE_OUTPUTS),
    ):
        value = getattr(script, name)
        if value is not None and not 0 <= value <= most:
            raise InvalidField(f"{path}.{name}", f"must be from 0 to {most:g}")
    return script


def parse_params(engine: str, values: dict[str, Any]) -> Params:
    """Parameters of the kind that `engine` takes, from a configuration's mapping. ValueError names
    the field."""
    kind = KIND_BY_ENGINE[engine]
    if kind is CustomParams:
        if engine == "fake":
            try:
                parse_fake_script(values)
            except InvalidField as error:
                raise ValueError(error.message) from None
        return CustomParams(values)
    try:
        return msgspec.convert({**values, "type": FIELD_BY_KIND[kind]}, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def merge(
    defaults: Params, requested: Params | None, constraints: Params | None, path: str
) -> Params:
    """One set of parameters: what the request sets, else what the pipeline's defaults say, within
    the constraints.

    Raises InvalidField below `path` where the request sets what a constraint fixes otherwise.
    """
    if isinstance(defaults, CustomParams):
        return _merge_custom(defaults, requested, constraints, path)
    merged = msgspec.structs.asdict(defaults)
    if requested is not None:
        merged |= {k: v for k, v in msgspec.structs.asdict(requested).items() if v is not None}
    if constraints is not None:
        asked = msgspec.structs.asdict(requested) if requested is not None else {}
        for name, fixed in msgspec.structs.asdict(constraints).items():
            if fixed is not None:
                merged[name] = _constrain(name, fixed, merged[name], asked.get(name), path)
    return type(defaults)(**merged)


def check_honoured(params: Params, honoured: Mapping[str, tuple[str, ...]], path: str) -> None:
    """Raises InvalidField below `path` for a set parameter that is not among `honoured`, or is none
    of its choices there."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        if value is None:
            continue
        if name not in honoured:
            known = ", ".join(honoured)
            raise InvalidField(f"{path}.{name}", f"the stage has no such setting, only {known}")
        if honoured[name] and value not in honoured[name]:
            raise InvalidField(f"{path}.{name}", f"must be one of {', '.join(honoured[name])}")


def _constrain(name: str, fixed: Any, value: Any, asked: Any, path: str) -> Any:
    if name in _ADDED:
        return tuple(dict.fromkeys((*(value or ()), *fixed)))
    if asked is not None and asked != fixed:
        raise InvalidField(f"{path}.{name}", f"the pipeline requires {fixed!r}")
    return fixed


def _merge_custom(
    defaults: CustomParams, requested: Params | None, constraints: Params | None, path: str
) -> CustomParams:
    asked = requested.values if isinstance(requested, CustomParams) else {}
    fixed = constraints.values if isinstance(constraints, CustomParams) else {}
    for name, value in fixed.items():
        if name in asked and asked[name] != value:
            raise InvalidField(f"{path}.{name}", f"the pipeline requires {value!r}")
    return CustomParams({**defaults.values, **asked, **fixed})


def _locate(path: str, message: str) -> tuple[str, str]:
    # msgspec says "Expected `int`, got `str` - at `$.outputs`".
    description, _, place = message.partition(" - at `$")
    return path + place.rstrip("`"), description
