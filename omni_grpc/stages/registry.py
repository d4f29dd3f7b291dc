"""From an engine's name to its class."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from omni_grpc.ipc import StageSpec
from omni_grpc.stages.base import Stage

_ENGINES = {
    "fake": "omni_grpc.stages.fake:FakeStage",
    "diffusion": "omni_grpc.stages.diffusion:DiffusionStage",
    "live": "omni_grpc.stages.live:LiveStage",
    "diffusers": "omni_grpc.stages.diffusers:DiffusersStage",
    "whisper": "omni_grpc.stages.ear:EarStage",
    "ocr": "omni_grpc.stages.reader:ReaderStage",
    "vllm": "omni_grpc.stages.vllm:VllmStage",
    "codec-talker": "omni_grpc.stages.codec:TalkerStage",
    "codec-decoder": "omni_grpc.stages.codec:DecoderStage",
}


def build(spec: StageSpec) -> Stage[Any]:
    """The stage that `spec` asks for, not yet loaded. Engine `python`: `model` is the class's
    import path."""
    path = spec.model if spec.engine == "python" else _ENGINES[_engine_key(spec)]
    module, _, name = path.partition(":")
    stage = getattr(import_module(module), name)(spec)
    if not isinstance(stage, Stage):
        raise TypeError(f"{path} is not a Stage")
    return stage


def _engine_key(spec: StageSpec) -> str:
    # One engine name, `codec`, stands for several parts of speech models: the `part` says which.
    return f"codec-{spec.engine_args['part']}" if spec.engine == "codec" else spec.engine
