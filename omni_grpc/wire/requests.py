"""Requests: from the contract's messages to our types, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from omni_grpc import types as t
from omni_grpc.errors import InvalidField
from omni_grpc.v1 import common_pb2, prompt_pb2, service_pb2
from omni_grpc.wire.params import decode_stage_params
from omni_grpc.wire.values import DATA_TYPE, decode_modality, decode_struct, optional

MAX_ID = 256
MAX_STAGE_PARAMS = 64
MAX_ABORTS = 1000
MAX_AXES = 16


def decode_request(
    message: service_pb2.AddRequestRequest, trace: Mapping[str, str], timeout_s: float | None
) -> t.Request:
    """The request, checked field by field. Raises InvalidField."""
    if len(message.request_id) > MAX_ID:
        raise InvalidField("request_id", f"is longer than {MAX_ID} characters")
    if len(message.stage_params) > MAX_STAGE_PARAMS:
        raise InvalidField("stage_params", f"has more than {MAX_STAGE_PARAMS} entries")
    return t.Request(
        request_id=message.request_id,
        pipeline=message.pipeline,
        prompt=decode_prompt(message.prompt, "prompt"),
        stage_params=tuple(
            decode_stage_params(entry, f"stage_params[{place}]")
            for place, entry in enumerate(message.stage_params)
        ),
        output_modalities=tuple(
            decode_modality(value, f"output_modalities[{place}]")
            for place, value in enumerate(message.output_modalities)
        ),
        resumable=message.resumable,
        options=_options(message, trace),
        timeout_s=timeout_s,
    )


def _options(message: service_pb2.AddRequestRequest, trace: Mapping[str, str]) -> t.RequestOptions:
    arrival = None
    if message.HasField("arrival_time"):
        stamp = message.arrival_time
        if not (0 <= stamp.nanos < 10**9 and 0 <= stamp.seconds < 253402300800):
            raise InvalidField("arrival_time", "is not a time between 1970 and 9999")
        arrival = stamp.seconds + stamp.nanos / 1e9
    return t.RequestOptions(
        lora=optional(message, "lora"),
        priority=optional(message, "priority"),
        data_parallel_rank=optional(message, "data_parallel_rank"),
        arrival_time=arrival,
        reasoning_ended=optional(message, "reasoning_ended"),
        tokenization=_tokenization(message.tokenization)
        if message.HasField("tokenization")
        else None,
        cache_salt=optional(message, "cache_salt"),
        additional_information=decode_struct(
            message.additional_information, "additional_information"
        )
        if message.HasField("additional_information")
        else None,
        trace_headers=dict(trace) or None,
    )


def _tokenization(message: prompt_pb2.TokenizationOptions) -> t.Tokenization:
    truncate = optional(message, "truncate_prompt_tokens")
    if truncate == 0:
        raise InvalidField("tokenization.truncate_prompt_tokens", "must be 1 or more")
    return t.Tokenization(
        add_special_tokens=optional(message, "add_special_tokens"),
        truncate_prompt_tokens=truncate,
        add_generation_prompt=optional(message, "add_generation_prompt"),
        continue_final_message=optional(message, "continue_final_message"),
        chat_template_kwargs=decode_struct(
            message.chat_template_kwargs, "tokenization.chat_template_kwargs"
        )
        if message.HasField("chat_template_kwargs")
        else None,
    )


def decode_prompt(message: prompt_pb2.Prompt, path: str) -> t.Prompt:
    """The prompt; one without content and media is `empty`, which the engine judges."""
    content: t.Text | t.TokenIds | t.Messages | t.Tensor | None = None
    match message.WhichOneof("content"):
        case "text":
            if not message.text:
                raise InvalidField(f"{path}.text", "is empty")
            content = t.Text(message.text)
        case "token_ids":
            if not message.token_ids.ids:
                raise InvalidField(f"{path}.token_ids.ids", "is empty")
            content = t.TokenIds(list(message.token_ids.ids))
        case "messages":
            content = _messages(message.messages, f"{path}.messages")
        case "embeds":
            content = decode_tensor(message.embeds, f"{path}.embeds")
            if len(content.shape) != 2:
                raise InvalidField(f"{path}.embeds.shape", "is not [tokens, hidden size]")
    if isinstance(content, t.Messages) and message.media:
        raise InvalidField(f"{path}.media", "must be empty beside messages: media are their parts")
    return t.Prompt(
        content,
        tuple(decode_media(m, f"{path}.media[{i}]") for i, m in enumerate(message.media)),
        optional(message, "negative_text"),
    )


def _messages(message: prompt_pb2.Messages, path: str) -> t.Messages:
    if not message.messages:
        raise InvalidField(f"{path}.messages", "is empty")
    return t.Messages(
        tuple(
            _message(entry, f"{path}.messages[{place}]")
            for place, entry in enumerate(message.messages)
        )
    )


def _message(message: prompt_pb2.Message, path: str) -> t.Message:
    if not message.role:
        raise InvalidField(f"{path}.role", "is empty")
    if not message.parts:
        raise InvalidField(f"{path}.parts", "is empty")
    parts: list[t.Text | t.Media] = []
    for place, part in enumerate(message.parts):
        match part.WhichOneof("part"):
            case "text":
                parts.append(t.Text(part.text))
            case "media":
                parts.append(decode_media(part.media, f"{path}.parts[{place}].media"))
            case _:
                raise InvalidField(f"{path}.parts[{place}]", "holds neither text nor media")
    return t.Message(message.role, tuple(parts))


def decode_media(message: prompt_pb2.Media, path: str) -> t.Media:
    """A picture, sound or film as the client sent it: nothing is read or decoded here."""
    modality = decode_modality(message.modality, f"{path}.modality")
    if modality is t.Modality.TEXT:
        raise InvalidField(f"{path}.modality", "TEXT is not media")
    match message.WhichOneof("source"):
        case "data":
            # Each look at a field of protobuf's copies it.
            if not (data := message.data):
                raise InvalidField(f"{path}.data", "is empty")
            source: dict[str, Any] = {"data": data}
        case "uri":
            if not (uri := message.uri):
                raise InvalidField(f"{path}.uri", "is empty")
            source = {"uri": uri}
        case "tensor":
            source = {"tensor": decode_tensor(message.tensor, f"{path}.tensor")}
        case _:
            raise InvalidField(path, "holds none of data, uri and tensor")
    if len(message.uuid) > MAX_ID:
        raise InvalidField(f"{path}.uuid", f"is longer than {MAX_ID} characters")
    return t.Media(modality, mime_type=message.mime_type, uuid=message.uuid, **source)


def decode_tensor(message: common_pb2.Tensor, path: str) -> t.Tensor:
    """An array whose bytes fit its shape."""
    if message.dtype not in DATA_TYPE:
        raise InvalidField(f"{path}.dtype", "is not a known type")
    # Counted before it is copied: a shape may be as long as a message.
    axes = len(message.shape)
    dtype, shape = DATA_TYPE[message.dtype], tuple(message.shape[: MAX_AXES + 1])
    if axes > MAX_AXES:
        raise InvalidField(f"{path}.shape", f"has more than {MAX_AXES} axes")
    if any(length < 0 for length in shape):
        raise InvalidField(f"{path}.shape", "has a negative length")
    # Once: each look at it copies it.
    data, expected = message.data, math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InvalidField(
            f"{path}.data", f"has {len(data)} bytes, but its shape and type need {expected}"
        )
    return t.Tensor(data, dtype, shape)


def decode_abort(message: service_pb2.AbortRequest) -> list[str]:
    """The ids to abort. Raises InvalidField."""
    if not 1 <= len(message.request_ids) <= MAX_ABORTS:
        raise InvalidField("request_ids", f"must hold 1 to {MAX_ABORTS} ids")
    for place, request_id in enumerate(message.request_ids):
        if not request_id:
            raise InvalidField(f"request_ids[{place}]", "is empty")
    return list(message.request_ids)
