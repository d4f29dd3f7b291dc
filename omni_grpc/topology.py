"""A pipeline ready to serve: its configuration resolved into pools, bridges and parameters, and the
question of which stages a request needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from omni_grpc.config import PipelineConfig, StageConfig
from omni_grpc.errors import ConfigError, InvalidField
from omni_grpc.params import FIELD_BY_KIND, KIND_BY_ENGINE, parse_params
from omni_grpc.pipelines.bridges import BridgeFactory, load_bridge
from omni_grpc.pipelines.expansions import Expansion, load_expansion
from omni_grpc.pipelines.transforms import Transform, load_transform
from omni_grpc.pool import StagePool
from omni_grpc.types import (
    AudioEncoding,
    AudioFormat,
    CodecParams,
    DiffusionParams,
    ImageFormat,
    MediaFormat,
    Modality,
    OutputFormat,
    Params,
    VideoFormat,
)


@dataclass(frozen=True, slots=True, eq=False)
class StageNode:
    """One stage of a pipeline."""

    config: StageConfig
    pool: StagePool
    bridge: BridgeFactory
    kind: type[Params]
    defaults: Params
    constraints: Params | None
    consumers: tuple[str, ...]
    """Names of the stages that take its outputs."""
    name: str = field(init=False)
    """The stage's name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.config.name)

    @property
    def params_field(self) -> str:
        """Name of its kind of parameters in the contract."""
        return FIELD_BY_KIND[self.kind]


Way = tuple[tuple[StageNode, ...], tuple[StageNode, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A pipeline; `stages` in the order in which data flows."""

    config: PipelineConfig
    stages: Mapping[str, StageNode]
    transform: Transform | None = None
    expansion: Expansion | None = None
    entry: StageNode = field(init=False)
    """Stage 0."""
    _ways: dict[tuple[Modality, ...], Way] = field(default_factory=dict, init=False)
    """Those that were asked for: there are not many, and they stay as they are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", next(iter(self.stages.values())))

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.config.name

    def way(self, modalities: tuple[Modality, ...], path: str) -> Way:
        """The stages that give the wanted outputs and those that must run for that, both in order.
        Raises what `finals` raises."""
        known = self._ways.get(modalities)
        if known is None:
            finals = self.finals(modalities, path)
            known = self._ways[modalities] = (finals, self.needed(finals))
        return known

    def finals(self, modalities: Iterable[Modality], path: str) -> tuple[StageNode, ...]:
        """The stages that give the wanted outputs; all of them where none is named.

        Raises InvalidField below `path` for a modality that the pipeline does not give, or that is
        repeated."""
        offered = {node.config.output: node for node in self.stages.values() if node.config.output}
        wanted: dict[Modality, StageNode] = {}
        for place, modality in enumerate(modalities):
            if modality not in offered:
                names = ", ".join(m.value for m in offered)
                raise InvalidField(f"{path}[{place}]", f"pipeline {self.name!r} gives {names} only")
            if modality in wanted:
                raise InvalidField(f"{path}[{place}]", "is repeated")
            wanted[modality] = offered[modality]
        return tuple(wanted.values() or offered.values())

    def needed(self, finals: Iterable[StageNode]) -> tuple[StageNode, ...]:
        """The stages that must run so that `finals` give their outputs, in order."""
        names = {node.name for node in finals}
        for node in reversed(list(self.stages.values())):
            if node.name in names:
                names.update(node.config.inputs)
        return tuple(node for node in self.stages.values() if node.name in names)

    def output_format(self, node: StageNode, params: Params | None = None) -> OutputFormat:
        """The form of a final output with these parameters, as far as it is known beforehand."""
        assert node.config.output is not None
        form = _with_params(node.pool.facts.output_format, params)
        return OutputFormat(node.name, node.config.output, form)


def _with_params(form: MediaFormat | None, params: Params | None) -> MediaFormat | None:
    match form, params:
        case AudioFormat(), CodecParams(encoding=str(encoding)):
            return AudioFormat(form.sample_rate_hz, form.channels, AudioEncoding(encoding))
        case ((ImageFormat() | VideoFormat()), DiffusionParams(output_mime_type="tensor")):
            return None
        case ImageFormat(), DiffusionParams():
            mime_type = params.output_mime_type or form.mime_type
            return ImageFormat(mime_type, params.width or form.width, params.height or form.height)
        case VideoFormat(), DiffusionParams():
            return VideoFormat(
                params.output_mime_type or form.mime_type,
                params.width or form.width,
                params.height or form.height,
                params.fps or form.fps,
            )
    return form


def build_pipeline(config: PipelineConfig, pools: Mapping[str, StagePool]) -> Pipeline:
    """The pipeline of a configuration over the pools of its stages. Raises ConfigError."""
    stages = {}
    for place, stage in enumerate(config.stages):
        stages[stage.name] = StageNode(
            config=stage,
            pool=pools[stage.name],
            bridge=_bridge(config, place),
            kind=KIND_BY_ENGINE[stage.engine],
            defaults=_params(config, place, "defaults", stage.defaults),
            constraints=_params(config, place, "constraints", stage.constraints)
            if stage.constraints
            else None,
            consumers=tuple(s.name for s in config.stages if stage.name in s.inputs),
        )
    transform = load_transform(config.transform) if config.transform else None
    expansion = load_expansion(config.expansion) if config.expansion else None
    return Pipeline(config, stages, transform, expansion)


def check_pipeline(config: PipelineConfig, source: str) -> None:
    """Checks what pydantic cannot see: bridges and parameters. Raises ConfigError that names
    `source`, where the configuration is from."""
    try:
        for place, stage in enumerate(config.stages):
            _bridge(config, place)
            _params(config, place, "defaults", stage.defaults)
            _params(config, place, "constraints", stage.constraints)
        if config.transform:
            load_transform(config.transform)
        if config.expansion:
            load_expansion(config.expansion)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _bridge(config: PipelineConfig, place: int) -> BridgeFactory:
    stage = config.stages[place]
    try:
        return load_bridge(stage.bridge, stage.bridge_args)
    except ConfigError as error:
        raise ConfigError(
            f"pipeline {config.name!r}: stages[{place}] ({stage.name}): {error}"
        ) from None


def _params(config: PipelineConfig, place: int, field: str, values: dict[str, object]) -> Params:
    stage = config.stages[place]
    try:
        return parse_params(stage.engine, values)
    except ValueError as error:
        raise ConfigError(
            f"pipeline {config.name!r}: stages[{place}] ({stage.name}): {field}: {error}"
        ) from None
