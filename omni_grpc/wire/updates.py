"""Chunks of streamed input: from the contract's messages to our types, in their one order."""

from __future__ import annotations

from collections.abc import AsyncIterator

from omni_grpc.errors import InvalidField
from omni_grpc.types import AudioEncoding, AudioFormat, AudioInput, UpdateChunk
from omni_grpc.v1 import common_pb2, service_pb2
from omni_grpc.wire.params import decode_stage_params
from omni_grpc.wire.requests import MAX_STAGE_PARAMS, decode_prompt
from omni_grpc.wire.values import ENCODING_OUT

MAX_SAMPLE_RATE = 384_000
MAX_CHANNELS = 16
_ENCODING: dict[int, AudioEncoding] = {number: kind for kind, number in ENCODING_OUT.items()}

Messages = AsyncIterator[service_pb2.StreamingUpdateRequest]


async def decode_header(messages: Messages) -> str:
    """The id of the request that is fed: the stream's first message. Raises InvalidField."""
    first = await anext(messages, None)
    if first is None or first.WhichOneof("message") != "header":
        raise InvalidField("header", "must be the first message")
    if not first.header.request_id:
        raise InvalidField("header.request_id", "is empty")
    return first.header.request_id


async def decode_chunks(messages: Messages) -> AsyncIterator[UpdateChunk]:
    """The chunks behind the header. Raises InvalidField."""
    async for message in messages:
        match message.WhichOneof("message"):
            case "chunk":
                yield decode_chunk(message.chunk, "chunk")
            case "header":
                raise InvalidField("header", "comes once, first")
            case _:
                raise InvalidField("message", "holds neither header nor chunk")


def decode_chunk(message: service_pb2.UpdateChunk, path: str) -> UpdateChunk:
    """One chunk, checked by itself. Raises InvalidField."""
    if len(message.stage_params) > MAX_STAGE_PARAMS:
        raise InvalidField(f"{path}.stage_params", f"has more than {MAX_STAGE_PARAMS} entries")
    params = tuple(
        decode_stage_params(entry, f"{path}.stage_params[{place}]")
        for place, entry in enumerate(message.stage_params)
    )
    kind = message.WhichOneof("input")
    prompt = decode_prompt(message.prompt, f"{path}.prompt") if kind == "prompt" else None
    if prompt is not None and prompt.empty:
        raise InvalidField(f"{path}.prompt", "is empty")
    return UpdateChunk(
        seq=message.seq,
        text=message.text if kind == "text" else None,
        prompt=prompt,
        audio=_audio(message.audio, f"{path}.audio") if kind == "audio" else None,
        stage_params=params,
        end_of_segment=message.end_of_segment,
    )


def _audio(message: service_pb2.AudioInput, path: str) -> AudioInput:
    if not message.data:
        raise InvalidField(f"{path}.data", "is empty")
    form = None
    if message.HasField("format"):
        form = decode_audio_format(message.format, f"{path}.format")
    return AudioInput(message.data, form)


def decode_audio_format(message: common_pb2.AudioFormat, path: str) -> AudioFormat:
    """The format of a stream of sound. Raises InvalidField."""
    if message.encoding not in _ENCODING:
        raise InvalidField(f"{path}.encoding", "is not a known encoding")
    if not 1 <= message.sample_rate_hz <= MAX_SAMPLE_RATE:
        raise InvalidField(f"{path}.sample_rate_hz", f"must be 1 to {MAX_SAMPLE_RATE}")
    if not 1 <= message.channels <= MAX_CHANNELS:
        raise InvalidField(f"{path}.channels", f"must be 1 to {MAX_CHANNELS}")
    return AudioFormat(message.sample_rate_hz, message.channels, _ENCODING[message.encoding])
