"""What can be known of a request without a model: whether its pipeline takes it. Binds nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from omni_grpc.errors import InvalidField, LoraNotFound, NotSupported, OmniError, Violation
from omni_grpc.lane import Chunk, Lane
from omni_grpc.params import FIELD_BY_KIND, check_honoured, merge, parse_fake_script
from omni_grpc.plan import Plan
from omni_grpc.topology import Pipeline, StageNode
from omni_grpc.types import (
    Audio,
    AudioInput,
    CustomParams,
    Media,
    Messages,
    Modality,
    Params,
    Payload,
    Prompt,
    Request,
    RequestOptions,
    SamplingParams,
    StageParams,
    Tensor,
    Text,
    TextDelta,
    TokenIds,
    UpdateChunk,
)

GUIDED = ("diffusion", "live", "diffusers", "fake", "python")
"""Engines that a negative text may guide."""


def check_prompt(request: Request, pipeline: Pipeline) -> None:
    """Whether the pipeline takes such a prompt."""
    if not request.prompt.empty:
        check_content(request.prompt, pipeline, "prompt")
    elif not request.resumable:
        raise InvalidField("prompt", "is required")


def check_content(prompt: Prompt, pipeline: Pipeline, path: str) -> None:
    """Whether the pipeline takes a prompt of this form and these modalities."""
    for where, item in media_of(prompt, path):
        if item.modality not in pipeline.config.inputs:
            raise unsupported(
                where, f"pipeline {pipeline.name!r} does not take {item.modality.value}"
            )
    form = _prompt_form(prompt)
    if form is not None and form not in pipeline.config.prompts:
        described = "media alone" if form == "media" else form
        raise unsupported(f"{path}.{form}", f"pipeline {pipeline.name!r} does not take {described}")
    if prompt.negative_text is not None and not pipeline.config.guidance:
        raise unsupported(f"{path}.negative_text", f"pipeline {pipeline.name!r} has no guidance")


def check_guidance(prompt: Prompt, needed: Iterable[StageNode]) -> None:
    """Refuses a negative text where no stage that will run is guided by it."""
    if prompt.negative_text is None:
        return
    if not any(node.config.engine in GUIDED for node in needed):
        raise InvalidField("prompt.negative_text", "guides none of the wanted outputs")


def media_bytes(prompt: Prompt) -> int:
    """Bytes of media that the request itself brings."""
    sizes = (
        len(item.data or b"") + (len(item.tensor.data) if item.tensor else 0)
        for _, item in media_of(prompt, "prompt")
    )
    return sum(sizes)


def media_of(prompt: Prompt, path: str) -> Iterator[tuple[str, Media]]:
    """(path, item) of every medium of a prompt, in order."""
    for place, item in enumerate(prompt.media):
        yield f"{path}.media[{place}]", item
    if isinstance(prompt.content, Messages):
        for i, message in enumerate(prompt.content.messages):
            for j, part in enumerate(message.parts):
                if isinstance(part, Media):
                    yield f"{path}.messages.messages[{i}].parts[{j}].media", part


def _prompt_form(prompt: Prompt) -> str | None:
    match prompt.content:
        case Text():
            return "text"
        case TokenIds():
            return "token_ids"
        case Messages():
            return "messages"
        case Tensor():
            return "embeds"
    return "media" if prompt.media else None


def check_options(options: RequestOptions, entry: StageNode) -> None:
    """Whether stage 0 can honour what goes with the prompt."""
    if options.lora is not None and options.lora not in entry.pool.adapters:
        raise LoraNotFound(f"stage {entry.name!r} has no adapter {options.lora!r}")
    if entry.config.engine == "vllm":
        return
    for name in (
        "priority",
        "data_parallel_rank",
        "reasoning_ended",
        "tokenization",
        "cache_salt",
    ):
        if getattr(options, name) is not None:
            raise unsupported(name, f"engine {entry.config.engine!r} cannot honour it")


def requested_params(
    entries: Iterable[StageParams], pipeline: Pipeline, root: str
) -> tuple[dict[str, Params], dict[str, str]]:
    requested: dict[str, Params] = {}
    paths: dict[str, str] = {}
    for place, entry in enumerate(entries):
        where = f"{root}[{place}]"
        if entry.stage not in pipeline.stages:
            known = ", ".join(pipeline.stages)
            raise InvalidField(
                f"{where}.stage",
                f"pipeline {pipeline.name!r} has no stage {entry.stage!r}, only {known}",
            )
        if entry.stage in requested:
            raise InvalidField(f"{where}.stage", f"stage {entry.stage!r} is repeated")
        node = pipeline.stages[entry.stage]
        given = FIELD_BY_KIND[type(entry.params)]
        if not isinstance(entry.params, node.kind):
            raise InvalidField(
                f"{where}.{given}", f"stage {entry.stage!r} takes {node.params_field!r} parameters"
            )
        path = f"{where}.{given}"
        if node.config.engine == "fake" and isinstance(entry.params, CustomParams):
            parse_fake_script(entry.params.values, path)
        honoured = node.pool.facts.params
        if honoured is not None and not isinstance(entry.params, CustomParams):
            check_honoured(entry.params, honoured, path)
        requested[entry.stage], paths[entry.stage] = entry.params, path
    return requested, paths


def check_answers(
    params: Params, node: StageNode, needed: tuple[StageNode, ...], path: str
) -> None:
    if isinstance(params, SamplingParams) and (params.n or 1) > 1:
        taken = [other.name for other in needed if node.name in other.config.inputs]
        if taken:
            raise InvalidField(f"{path}.n", f"must be 1 where stage {taken[0]!r} takes the answer")


def unsupported(field: str, description: str) -> OmniError:
    return NotSupported(f"{field}: {description}", violations=(Violation(field, description),))


def check_resumable(
    needed: Iterable[StageNode], params: Mapping[str, Params], paths: Mapping[str, str]
) -> None:
    """Whether all stages that will run take input in segments, with these parameters. `paths`:
    where the client set them."""
    for node in needed:
        node.pool.check_loaded()
        if not node.pool.facts.resumable:
            raise unsupported("resumable", f"stage {node.name!r} does not take input in segments")
        check_segment(params[node.name], paths.get(node.name, f"stage_params({node.name})"))


def check_segment(params: Params, path: str) -> None:
    """Refuses parameters that cannot hold for a segment: an answer must be one, and end by
    itself."""
    if isinstance(params, SamplingParams):
        if (params.n or 1) > 1:
            raise InvalidField(f"{path}.n", "must be 1 for a resumable request")
        if params.stop:
            raise InvalidField(f"{path}.stop", "cannot be set for a resumable request")


def resolve_chunk(update: UpdateChunk, plan: Plan, lane: Lane) -> Chunk:
    """A client's chunk, checked against the request's pipeline; parameters merged per stage."""
    pipeline = plan.pipeline
    requested, paths = requested_params(update.stage_params, pipeline, "chunk.stage_params")
    params = {}
    for name, asked in requested.items():
        node = pipeline.stages[name]
        params[name] = merge(plan.params[name], asked, node.constraints, paths[name])
        check_segment(params[name], paths[name])
    payload: Payload | None = None
    if update.text is not None:
        check_content(Prompt(Text(update.text)), pipeline, "chunk")
        payload = TextDelta(update.text)
    if update.prompt is not None:
        check_content(update.prompt, pipeline, "chunk.prompt")
        if update.prompt.negative_text is not None:
            raise unsupported("chunk.prompt.negative_text", "streamed input has no guidance")
    if update.audio is not None:
        payload = _resolve_audio(update.audio, pipeline, lane)
    return Chunk(update.seq, payload, update.prompt, params, update.end_of_segment, paths)


def _resolve_audio(audio: AudioInput, pipeline: Pipeline, lane: Lane) -> Audio:
    if Modality.AUDIO not in pipeline.config.inputs:
        raise unsupported("chunk.audio", f"pipeline {pipeline.name!r} does not take audio")
    form = audio.format or lane.audio_format
    if form is None:
        raise InvalidField("chunk.audio.format", "is required in the first chunk of sound")
    if lane.audio_format is not None and form != lane.audio_format:
        raise InvalidField("chunk.audio.format", "differs from the first chunk's")
    if len(audio.data) % form.frame_width:
        raise InvalidField("chunk.audio.data", f"is not whole samples of {form.frame_width} bytes")
    return Audio(audio.data, form)
