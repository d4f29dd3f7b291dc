"""Parameters of one stage, by kind of stage; None is not set."""

from __future__ import annotations

from typing import Any

import msgspec


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form that an answer must have; exactly one of the first six is set."""

    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class RepetitionDetection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an answer counts as repeating itself (sizes in tokens)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class SamplingParams(msgspec.Struct, frozen=True, tag="sampling", forbid_unknown_fields=True):
    """How an autoregressive stage samples. Names and meanings are vLLM's; None is the model's
    default."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream_interval: int | None = None
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: bool | None = None
    extra_args: dict[str, Any] | None = None


class DiffusionParams(msgspec.Struct, frozen=True, tag="diffusion", forbid_unknown_fields=True):
    """How a diffusion stage denoises; sizes in pixels; None is the pipeline's default."""

    steps: int | None = None
    guidance_scale: float | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    frames: int | None = None
    fps: float | None = None
    scheduler: str | None = None
    preview_interval: int | None = None
    output_mime_type: str | None = None


class CodecParams(msgspec.Struct, frozen=True, tag="codec", forbid_unknown_fields=True):
    """How a speech or codec stage speaks; None is the pipeline's default."""

    voice: str | None = None
    speed: float | None = None
    seed: int | None = None
    encoding: str | None = None


class CustomParams(msgspec.Struct, frozen=True, tag="custom"):
    """Parameters of a stage of engine `fake` or `python`."""

    values: dict[str, Any]


Params = SamplingParams | DiffusionParams | CodecParams | CustomParams
