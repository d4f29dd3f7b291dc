"""From what the command line asks for to a request that this server understands."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_grpc.cli.call import CommandError
from omni_grpc_client import (
    Media,
    Modality,
    Params,
    PipelineInfo,
    PromptLike,
    ServerInfo,
    StageInfo,
    make_media,
    make_params,
)

if TYPE_CHECKING:
    from omni_grpc.cli.generate import Wish
    from omni_grpc.cli.outfile import OutFile


@dataclass(frozen=True, slots=True)
class Plan:
    """The arguments of the call."""

    prompt: PromptLike
    stage_params: dict[str, Params]
    modalities: tuple[Modality, ...]
    pipeline: str = ""
    media: tuple[Media, ...] = ()


def plan_call(info: ServerInfo, wish: Wish, files: Sequence[OutFile]) -> Plan:
    """The call that the wish means on this server. Raises CommandError where it means none."""
    prompt: PromptLike = wish.prompt
    if wish.system is not None:
        prompt = [("system", wish.system), ("user", wish.prompt)]
    media = tuple(_media(*item) for item in wish.media)
    name = wish.pipeline or _taking(info, {modality for modality, _ in wish.media})
    pipeline = info.pipeline(name)
    wanted = [*(Modality(name) for name in wish.modalities), *(file.modality for file in files)]
    if pipeline is None:
        # The server says so better than we could.
        return Plan(prompt, {}, tuple(dict.fromkeys(wanted)), name, media)
    if not wish.modalities:
        wanted = [*_default_modalities(pipeline, wanted), *wanted]
    params = stage_params(pipeline, wish)
    return Plan(prompt, params, tuple(dict.fromkeys(wanted)), name, media)


def _media(modality: str, source: str) -> Media:
    try:
        return make_media(source, modality)
    except OSError as error:
        raise CommandError(f"--{modality} {source}: cannot be read: {error.strerror}") from None


def _taking(info: ServerInfo, modalities: set[str]) -> str:
    """The first pipeline that takes such media, the default one before others; "" is that one."""
    default = info.pipeline()
    for pipeline in (*filter(None, [default]), *info.pipelines):
        if modalities.issubset(pipeline.input_modalities):
            return "" if pipeline is default else pipeline.name
    if not modalities:
        return ""
    raise CommandError(
        f"no pipeline here takes {' and '.join(sorted(modalities))}",
        "omni-grpc describe lists what each takes; smol-converse hears, smol-read reads",
    )


def _default_modalities(pipeline: PipelineInfo, wanted: list[Modality]) -> list[Modality]:
    offered = [output.modality for output in pipeline.outputs]
    if Modality.TEXT in offered:
        return [Modality.TEXT]
    if not wanted:
        raise CommandError(
            f"pipeline {pipeline.name!r} gives no text, only {', '.join(offered)}",
            "name a file for it with --out, or ask with --modality",
        )
    return []


def stage_params(pipeline: PipelineInfo, wish: Wish) -> dict[str, Params]:
    """Parameters by stage: what --set says, over what the options mean."""
    values: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for stage, name, value in _options(pipeline, wish):
        values[stage.name][name] = value
    stages = {stage.name: stage for stage in pipeline.stages}
    for setting in wish.settings:
        name, field, value = parse_setting(setting, stages)
        values[name][field] = value
    return {name: _params(stages[name], fields) for name, fields in values.items()}


def _params(stage: StageInfo, values: dict[str, Any]) -> Params:
    try:
        return make_params(stage.params_kind, values)
    except ValueError as error:
        kind = stage.params_kind
        raise CommandError(f"stage {stage.name!r} takes {kind} parameters: {error}") from None


def _options(pipeline: PipelineInfo, wish: Wish) -> Iterator[tuple[StageInfo, str, Any]]:
    sampled = {"max_tokens": wish.max_tokens, "temperature": wish.temperature}
    for name, value in sampled.items():
        if value is not None:
            yield _sampling_stage(pipeline, name), name, value
    if wish.seed is not None:
        stages = [stage for stage in pipeline.stages if _draws(stage)]
        if not stages:
            raise _no_stage(pipeline, "seed", "takes a seed")
        for stage in stages:
            yield stage, "seed", wish.seed


def _draws(stage: StageInfo) -> bool:
    """Whether the stage draws random numbers. Of several codec stages the one that makes the sound
    does; those before it refuse a seed."""
    kind = stage.params_kind
    return kind in ("sampling", "diffusion") or (kind == "codec" and stage.output is not None)


def _sampling_stage(pipeline: PipelineInfo, name: str) -> StageInfo:
    """The stage that makes the text, or the first one that samples."""
    stages = [stage for stage in pipeline.stages if stage.params_kind == "sampling"]
    if not stages:
        raise _no_stage(pipeline, name, "samples tokens")
    return next((stage for stage in stages if stage.output is Modality.TEXT), stages[0])


def _no_stage(pipeline: PipelineInfo, option: str, ability: str) -> CommandError:
    stages = ", ".join(f"{stage.name} ({stage.engine})" for stage in pipeline.stages)
    return CommandError(
        f"--{option.replace('_', '-')}: no stage of pipeline {pipeline.name!r} {ability}",
        f"its stages: {stages}; --set STAGE.FIELD=VALUE sets their own parameters",
    )


def parse_setting(setting: str, stages: Iterable[str]) -> tuple[str, str, Any]:
    """(stage, field, value) of STAGE.FIELD=VALUE. A stage's name may hold dots."""
    place, equals, text = setting.partition("=")
    stage, dot, field = place.rpartition(".")
    if not (equals and dot and stage and field):
        raise CommandError(f"--set {setting}: is not STAGE.FIELD=VALUE")
    if stage not in stages:
        known = ", ".join(stages)
        raise CommandError(f"--set {setting}: no stage {stage!r}, only {known}")
    try:
        return stage, field, json.loads(text)
    except json.JSONDecodeError:
        return stage, field, text
