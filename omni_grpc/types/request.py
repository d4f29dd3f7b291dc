"""One request as the engine takes it, and the input that comes later."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_grpc.types.media import AudioFormat, Modality
from omni_grpc.types.params import Params
from omni_grpc.types.prompt import Prompt, Tokenization


class RequestOptions(msgspec.Struct, frozen=True):
    """What goes with a prompt to stage 0; None is not set. `arrival_time` is seconds since the
    epoch."""

    lora: str | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    arrival_time: float | None = None
    reasoning_ended: bool | None = None
    tokenization: Tokenization | None = None
    cache_salt: str | None = None
    additional_information: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    tenant: str = ""
    """Whose request it is; caches that callers can name entries of are kept apart by it."""


class StageParams(msgspec.Struct, frozen=True):
    """Parameters that a request sets for one stage."""

    stage: str
    params: Params


class Request(msgspec.Struct, frozen=True):
    """One request as the engine takes it. `timeout_s` is what is left of the caller's deadline."""

    request_id: str
    pipeline: str
    prompt: Prompt
    stage_params: tuple[StageParams, ...] = ()
    output_modalities: tuple[Modality, ...] = ()
    resumable: bool = False
    options: RequestOptions = RequestOptions()
    timeout_s: float | None = None


class AudioInput(msgspec.Struct, frozen=True):
    """A piece of sound that is fed; `format` None: that of the first one."""

    data: bytes
    format: AudioFormat | None = None


class UpdateChunk(msgspec.Struct, frozen=True):
    """A piece of a resumable request's input, as a client sends it; one of text, prompt, audio."""

    seq: int
    text: str | None = None
    prompt: Prompt | None = None
    audio: AudioInput | None = None
    stage_params: tuple[StageParams, ...] = ()
    end_of_segment: bool = False
