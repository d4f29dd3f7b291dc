"""Parameters of stages: from the contract's messages to our types, in range."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from omni_grpc import types as t
from omni_grpc.errors import InvalidField
from omni_grpc.v1 import params_pb2
from omni_grpc.wire.values import decode_struct, optional

INT64_MAX = (1 << 63) - 1
MAX_FORM = 64 << 10
"""Most characters of the form of an answer: engines read it while others wait."""

Check = Callable[[Any], str | None]


def at_least(least: float) -> Check:
    """A check that a number is `least` or more."""
    return lambda v: None if v >= least else f"must be {least:g} or more"


def above(bound: float) -> Check:
    """A check that a number is above `bound`."""
    return lambda v: None if v > bound else f"must be above {bound:g}"


def within(least: float, most: float, *, open_below: bool = False) -> Check:
    """A check that a number is in [least, most], or in (least, most]."""
    bracket = "(" if open_below else "["
    return lambda v: (
        None
        if (v > least if open_below else v >= least) and v <= most
        else f"must be in {bracket}{least:g}, {most:g}]"
    )


SAMPLING_CHECKS: dict[str, Check] = {
    "n": within(1, 128),
    "presence_penalty": within(-2, 2),
    "frequency_penalty": within(-2, 2),
    "repetition_penalty": above(0),
    "temperature": at_least(0),
    "top_p": within(0, 1, open_below=True),
    "top_k": at_least(-1),
    "min_p": within(0, 1),
    "seed": lambda v: None if v <= INT64_MAX else "must be at most 2^63 - 1",
    "max_tokens": at_least(1),
    "logprobs": at_least(-1),
    "prompt_logprobs": at_least(-1),
    "stream_interval": at_least(1),
    "thinking_token_budget": at_least(-1),
}
DIFFUSION_CHECKS: dict[str, Check] = {
    "steps": at_least(1),
    "guidance_scale": at_least(1),
    "width": at_least(1),
    "height": at_least(1),
    "frames": at_least(1),
    "fps": above(0),
}
CODEC_CHECKS: dict[str, Check] = {"speed": within(0.25, 4)}


def decode_stage_params(message: params_pb2.StageParams, path: str) -> t.StageParams:
    """Parameters of one stage, in range. Raises InvalidField."""
    if not message.stage:
        raise InvalidField(f"{path}.stage", "is empty")
    kind = message.WhichOneof("params")
    params: t.Params
    match kind:
        case "sampling":
            params = _sampling(message.sampling, f"{path}.sampling")
        case "diffusion":
            values = _scalars(message.diffusion, DIFFUSION_CHECKS, f"{path}.diffusion")
            params = t.DiffusionParams(**values)
        case "codec":
            params = t.CodecParams(**_scalars(message.codec, CODEC_CHECKS, f"{path}.codec"))
        case "custom":
            params = t.CustomParams(decode_struct(message.custom, f"{path}.custom"))
        case _:
            raise InvalidField(path, "holds no parameters")
    return t.StageParams(message.stage, params)


def _sampling(message: params_pb2.SamplingParams, path: str) -> t.SamplingParams:
    values = _scalars(message, SAMPLING_CHECKS, path)
    for name in ("stop", "bad_words"):
        if strings := tuple(getattr(message, name)):
            if "" in strings:
                raise InvalidField(f"{path}.{name}[{strings.index('')}]", "is empty")
            values[name] = strings
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        if ids := tuple(getattr(message, name)):
            values[name] = ids
    if message.logit_bias:
        values["logit_bias"] = _logit_bias(message.logit_bias, f"{path}.logit_bias")
    if message.HasField("structured_outputs"):
        values["structured_outputs"] = _structured(
            message.structured_outputs, f"{path}.structured_outputs"
        )
    if message.HasField("repetition_detection"):
        values["repetition_detection"] = _repetition(
            message.repetition_detection, f"{path}.repetition_detection"
        )
    if message.HasField("extra_args"):
        values["extra_args"] = decode_struct(message.extra_args, f"{path}.extra_args")
    least, most = values.get("min_tokens", 0), values.get("max_tokens")
    if most is not None and least > most:
        raise InvalidField(f"{path}.min_tokens", "must be at most max_tokens")
    return t.SamplingParams(**values)


def _scalars(message: ProtoMessage, checks: Mapping[str, Check], path: str) -> dict[str, Any]:
    """The message's set `optional` scalars, checked."""
    values: dict[str, Any] = {}
    # Of dozens of fields, few are set.
    for field, value in message.ListFields():
        if field.message_type is not None or not field.has_presence:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidField(f"{path}.{field.name}", "is not a finite number")
        if problem := checks.get(field.name, _no_check)(value):
            raise InvalidField(f"{path}.{field.name}", problem)
        values[field.name] = value
    return values


def _no_check(value: Any) -> None:
    return None


def _logit_bias(entries: Iterable[params_pb2.LogitBias], path: str) -> dict[int, float]:
    biases: dict[int, float] = {}
    for place, entry in enumerate(entries):
        if not -100 <= entry.bias <= 100:
            raise InvalidField(f"{path}[{place}].bias", "must be in [-100, 100]")
        if entry.token_id in biases:
            raise InvalidField(f"{path}[{place}].token_id", "is repeated")
        biases[entry.token_id] = entry.bias
    return biases


def _structured(message: params_pb2.StructuredOutputs, path: str) -> t.StructuredOutputs:
    kind = message.WhichOneof("constraint")
    if kind is None:
        raise InvalidField(path, "holds no constraint")
    value: Any = getattr(message, kind)
    if kind == "choice":
        value = tuple(message.choice.options)
        if not value or "" in value:
            raise InvalidField(f"{path}.choice.options", "needs strings, none of them empty")
    elif not value:
        raise InvalidField(f"{path}.{kind}", "is empty")
    size = sum(map(len, value)) if kind == "choice" else len(value) if kind != "json_object" else 0
    if size > MAX_FORM:
        raise InvalidField(f"{path}.{kind}", f"is longer than {MAX_FORM} characters")
    return t.StructuredOutputs(
        disable_any_whitespace=optional(message, "disable_any_whitespace"),
        disable_additional_properties=optional(message, "disable_additional_properties"),
        whitespace_pattern=optional(message, "whitespace_pattern"),
        **{kind: value},
    )


def _repetition(message: params_pb2.RepetitionDetection, path: str) -> t.RepetitionDetection:
    longest, shortest, count = (
        message.max_pattern_size,
        message.min_pattern_size,
        message.min_count,
    )
    if shortest > longest:
        raise InvalidField(f"{path}.min_pattern_size", "must be at most max_pattern_size")
    if longest and count < 2:
        raise InvalidField(f"{path}.min_count", "must be 2 or more")
    return t.RepetitionDetection(longest, shortest, count)
