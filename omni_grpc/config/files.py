"""Configuration from YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from omni_grpc.config.pipeline import PipelineConfig
from omni_grpc.config.server import ServerConfig
from omni_grpc.errors import ConfigError


def builtin_pipelines() -> dict[str, Path]:
    """The pipelines that the package brings, by name."""
    folder = Path(str(resources.files("omni_grpc") / "pipelines"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_pipeline(reference: str) -> PipelineConfig:
    """The pipeline named `reference`, or the one in the file at that path. Raises ConfigError."""
    builtin = builtin_pipelines()
    if reference in builtin:
        return read_pipeline(builtin[reference])
    path = Path(reference)
    if not path.is_file():
        raise ConfigError(
            f"{reference}: neither a file nor a built-in pipeline (those are {', '.join(builtin)})"
        )
    return read_pipeline(path)


def read_pipeline(path: Path) -> PipelineConfig:
    """The pipeline in a YAML file. Raises ConfigError that names file, path and reason."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a pipeline is a mapping with 'name' and 'stages'")
    try:
        return PipelineConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n  ".join([f"{path}:", *reasons(error)])) from None


def load_settings(path: Path | None, options: Mapping[str, Any]) -> ServerConfig:
    """The server's settings: those in a YAML file, and over them `options`, by their path with dots
    ("tls.cert"). Raises ConfigError."""
    content = {} if path is None else read_yaml(path)
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: settings are a mapping of their names")
    for name, value in options.items():
        group, _, field = name.rpartition(".")
        if not group:
            content[field] = value
        elif isinstance(content.get(group) or {}, dict):
            content[group] = {**(content.get(group) or {}), field: value}
    try:
        return ServerConfig.model_validate(content)
    except ValidationError as error:
        source = "" if path is None else f"{path}: "
        raise ConfigError(source + "; ".join(reasons(error))) from None


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises ConfigError."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        # Without the line itself, which may hold a secret.
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: not YAML: {line}{error.problem}") from None
    except yaml.YAMLError:
        raise ConfigError(
            f"{path}: not YAML: it holds characters that YAML does not allow"
        ) from None


def reasons(error: ValidationError) -> list[str]:
    """What is wrong, each with the path of it. Never the value: it may be a secret."""
    return [f"{_where(e['loc'])}{_reason(e)}" for e in error.errors()]


def _where(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"{text.lstrip('.')}: " if text else ""


def _reason(error: Any) -> str:
    message: str = error["msg"]
    return message.removeprefix("Value error, ")
