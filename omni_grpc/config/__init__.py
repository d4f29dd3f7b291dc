"""Configuration: pipelines as YAML and the server's settings, checked before anything starts.

All models are frozen and refuse unknown keys; an error names the file, the path in it and the
reason."""

from omni_grpc.config.base import Frozen, Name, Port, Seconds
from omni_grpc.config.files import (
    builtin_pipelines,
    load_pipeline,
    load_settings,
    read_pipeline,
    read_yaml,
    reasons,
)
from omni_grpc.config.listening import AuthConfig, ConnectionPolicy, TlsConfig
from omni_grpc.config.pipeline import PipelineConfig, RestartPolicy, StageConfig
from omni_grpc.config.server import MediaPolicy, ServerConfig

__all__ = [
    "AuthConfig",
    "ConnectionPolicy",
    "Frozen",
    "MediaPolicy",
    "Name",
    "PipelineConfig",
    "Port",
    "RestartPolicy",
    "Seconds",
    "ServerConfig",
    "StageConfig",
    "TlsConfig",
    "builtin_pipelines",
    "load_pipeline",
    "load_settings",
    "read_pipeline",
    "read_yaml",
    "reasons",
]
