"""Requests: from what a caller writes to the contract's message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.struct_pb2 import Struct

from omni_grpc.v1.params_pb2 import CodecParams, DiffusionParams, SamplingParams, StageParams
from omni_grpc.v1.prompt_pb2 import Media, Message, MessagePart, Messages, Prompt
from omni_grpc.v1.service_pb2 import AddRequestRequest
from omni_grpc_client.media import Modality, encode_modality

PromptLike = str | Prompt | Sequence[tuple[str, str]]
"""Text; or a conversation as (role, text) pairs, oldest first; or the contract's own message."""

Params = SamplingParams | DiffusionParams | CodecParams | Mapping[str, Any]
"""Parameters of one stage; a mapping is for a stage of engine `fake` or `python`."""

URI_SCHEMES = ("http://", "https://", "file:", "data:")

ParamsKind = Literal["sampling", "diffusion", "codec", "custom"]

_MESSAGES: dict[ParamsKind, type[SamplingParams | DiffusionParams | CodecParams]] = {
    "sampling": SamplingParams,
    "diffusion": DiffusionParams,
    "codec": CodecParams,
}


def build_request(
    prompt: PromptLike,
    *,
    pipeline: str = "",
    request_id: str = "",
    stage_params: Mapping[str, Params] | None = None,
    output_modalities: Iterable[Modality | str] = (),
    media: Iterable[Media] = (),
) -> AddRequestRequest:
    """The contract's message. Raises ValueError for a modality or a value that it cannot hold."""
    return AddRequestRequest(
        request_id=request_id,
        pipeline=pipeline,
        prompt=encode_prompt(prompt, tuple(media)),
        stage_params=encode_stage_params(stage_params),
        output_modalities=[encode_modality(modality) for modality in output_modalities],
    )


def whole_request(
    prompt: PromptLike | AddRequestRequest,
    pipeline: str,
    request_id: str,
    stage_params: Mapping[str, Params] | None,
    output_modalities: Iterable[Modality | str],
    media: tuple[Media, ...],
) -> AddRequestRequest:
    """The contract's message: the one that is given as a whole, or built from what is given.
    Raises ValueError for both at once."""
    modalities = tuple(output_modalities)
    if not isinstance(prompt, AddRequestRequest):
        return build_request(
            prompt,
            pipeline=pipeline,
            request_id=request_id,
            stage_params=stage_params,
            output_modalities=modalities,
            media=media,
        )
    if pipeline or request_id or stage_params or modalities or media:
        raise ValueError("a whole AddRequestRequest is sent as it is: set its own fields")
    return prompt


def mirrored(request_id: str) -> tuple[tuple[str, str], ...]:
    """The id as metadata, so that a gateway can keep all calls about a request on one pod."""
    if not request_id:
        return ()
    # Percent-encoded where it is not printable ASCII, as the server mirrors it.
    return (("omni-request-id", quote(request_id, safe="!#$&'()*+,-./:;<=>?@[]^_`{|}~ \"\\")),)


def make_params(kind: ParamsKind, values: Mapping[str, Any]) -> Params:
    """Parameters of a kind from plain values by field name, lists and mappings as in JSON.

    Raises ValueError that names the field where the kind has none of that name or type."""
    if kind == "custom":
        return dict(values)
    message = _MESSAGES[kind]()
    known = message.DESCRIPTOR.fields_by_name
    for name in values:
        # Before ParseDict, which would take camel case too and list only that.
        if name not in known:
            raise ValueError(f"{name}: is not one of {', '.join(known)}")
    try:
        ParseDict(dict(values), message)
    except ParseError as error:
        raise ValueError(str(error)) from None
    return message


def make_media(source: str | PathLike[str], modality: Modality | str, mime_type: str = "") -> Media:
    """A picture, sound or film of a prompt: the file at a path, read now, or a URI for the server.

    `mime_type` empty: the server finds out. Raises OSError for a file that cannot be read."""
    kind = encode_modality(modality)
    if isinstance(source, str) and source.lower().startswith(URI_SCHEMES):
        return Media(modality=kind, uri=source, mime_type=mime_type)
    return Media(modality=kind, data=Path(source).read_bytes(), mime_type=mime_type)


def encode_prompt(prompt: PromptLike, media: tuple[Media, ...] = ()) -> Prompt:
    """A prompt as the contract's message."""
    if isinstance(prompt, Prompt):
        if media:
            raise ValueError("a whole Prompt is sent as it is: set its own media")
        return prompt
    if isinstance(prompt, str):
        # No text is not empty text: then the media are the prompt.
        return Prompt(text=prompt if prompt or not media else None, media=media)
    turns = [Message(role=role, parts=[MessagePart(text=text)]) for role, text in prompt]
    if media:
        if not turns:
            raise ValueError("media go with the last turn of a conversation, and it has none")
        # With the last turn's words, and in their place where it has none.
        turns[-1].parts.extend(MessagePart(media=item) for item in media)
        if not turns[-1].parts[0].text:
            del turns[-1].parts[0]
    return Prompt(messages=Messages(messages=turns))


def encode_stage_params(stage_params: Mapping[str, Params] | None) -> list[StageParams]:
    """Parameters by stage as the contract's messages."""
    return [_stage_params(*item) for item in (stage_params or {}).items()]


def _stage_params(stage: str, params: Params) -> StageParams:
    match params:
        case SamplingParams():
            return StageParams(stage=stage, sampling=params)
        case DiffusionParams():
            return StageParams(stage=stage, diffusion=params)
        case CodecParams():
            return StageParams(stage=stage, codec=params)
    custom = Struct()
    custom.update(params)
    return StageParams(stage=stage, custom=custom)
