"""Pipelines of the GPU checks, requests to them, and what became of these."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from PIL import Image

from omni_grpc.v1 import service_pb2


@dataclass(frozen=True, slots=True)
class Place:
    """Where engines run, and what they need to."""

    device: str
    engine_args: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def share(self, fraction: float) -> dict[str, Any]:
        """A stage's device, and its share of it where it is a GPU."""
        shared = {} if self.device == "cpu" else {"memory_fraction": fraction}
        return {"devices": [self.device], **shared}


GPU = Place("cuda:0")
CPU = Place(
    "cpu",
    {"dtype": "bfloat16", "enforce_eager": True, "block_size": 128, "num_gpu_blocks_override": 64},
    {"VLLM_CPU_KVCACHE_SPACE": "1"},
)
"""To try the checks themselves: what they say of a GPU they cannot say here."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answer was made of, in tokens."""

    prompt: int
    tokens: int


def language(
    place: Place, model: str, replicas: int, fraction: float, **arguments: Any
) -> dict[str, Any]:
    """One stage of vLLM with made-up weights."""
    own = {"load_format": "dummy", "max_model_len": 4096, "chat": False}
    stage = {
        "name": "llm",
        "engine": "vllm",
        "model": model,
        **place.share(fraction),
        "replicas": replicas,
        "engine_args": {**own, **place.engine_args, **arguments},
        "environment": {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **place.environment},
        "restart": {"backoff": 0.2},
        "output": "text",
    }
    return {"name": f"llm-{replicas}", "stages": [stage]}


def boats(number: int) -> dict[str, Any]:
    """A prompt."""
    return {"text": f"{number} small boats on a river"}


async def ask(stub: Any, prompt: dict[str, Any], tokens: int) -> Answer:
    """One answer of so many tokens."""
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    request = service_pb2.AddRequestRequest(
        prompt=prompt, stage_params=[{"stage": "llm", "sampling": sampling}]
    )
    count = asked = 0
    async for response in stub.AddRequest(request, timeout=120):
        count += len(response.output.text.token_ids)
        asked = asked or response.finished.usage.prompt_tokens
    return Answer(asked, count)


async def outcomes(
    stub: Any, count: int, tokens: int, prompt: Callable[[int], dict[str, Any]] = boats
) -> dict[str, int]:
    """How many of these requests gave all tokens, and how the others ended."""
    ends: dict[str, int] = {}
    results = await asyncio.gather(
        *(ask(stub, prompt(n), tokens) for n in range(count)), return_exceptions=True
    )
    for result in results:
        match result:
            case grpc.aio.AioRpcError():
                end = result.code().name
            case Answer():
                end = "whole" if result.tokens == tokens else repr(result)
            case _:
                end = repr(result)
        ends[end] = ends.get(end, 0) + 1
    return ends


async def drawn(stub: Any, pipeline: str, stage: str, caption: str, **params: Any) -> Image.Image:
    """A picture. Raises what Pillow says if it is none."""
    request = service_pb2.AddRequestRequest(
        pipeline=pipeline,
        prompt={"text": caption},
        stage_params=[{"stage": stage, "diffusion": params}],
    )
    data = b""
    async for response in stub.AddRequest(request, timeout=120):
        data += response.output.image.data
    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture
