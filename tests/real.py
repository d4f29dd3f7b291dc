"""Servers of real models, one of each for all tests that need it: a start takes half a minute.

`voice` is the product's pipelines as they are, on one thinker; `options` is the same language model
with what a pipeline must ask its engine for (LoRA, embeddings, priorities) and without a chat
template."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline
from omni_grpc.embedded import prepare, resolve
from omni_grpc.server import Server
from tests.models import random_lora
from tests.support import client, stub_of

LANGUAGE_MODEL = "embedded:smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris, also known as the City of Light."
"""What smol-voice says to that. At each token the model is far from saying anything else, so that
processors which round bfloat16 differently agree (the nearest rival is 0.9 nats away)."""

SMALL_ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_num_seqs": 4,
    "block_size": 128,
    "num_gpu_blocks_override": 64,
}
SMALL_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@asynccontextmanager
async def real_server(*configs: PipelineConfig, **settings: Any) -> AsyncIterator[Server]:
    """A server of these pipelines, warm, their embedded models built."""
    models = {stage.model for config in configs for stage in config.stages}
    await asyncio.to_thread(prepare, models, print)
    server = Server(ServerConfig(port=0, **settings), configs)
    try:
        await server.start()
        await server.warm()
        yield server
    finally:
        await server.stop(drain_timeout=1.0)


@pytest.fixture(scope="session")
async def voice_server() -> AsyncIterator[Server]:
    """smol-voice, and what shares its thinker or its voice."""
    names = ("smol-voice", "smol-converse", "smol-read", "smol-shapes")
    async with real_server(*map(load_pipeline, names), say_pipeline(), hear_pipeline()) as server:
        yield server


@pytest.fixture(scope="session")
async def voice(voice_server: Server) -> AsyncIterator[Any]:
    """A stub of it."""
    async with client(voice_server) as channel:
        yield stub_of(channel)


@pytest.fixture(scope="session")
async def options_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """smol-options, warm: one stage, `thinker`, with the adapter `odd`."""
    await asyncio.to_thread(prepare, [LANGUAGE_MODEL], print)
    adapter = tmp_path_factory.mktemp("adapter")
    await asyncio.to_thread(random_lora.build_in_child, resolve(LANGUAGE_MODEL), adapter)
    async with real_server(options_pipeline(adapter), admin_port=0) as server:
        yield server


@pytest.fixture(scope="session")
async def options(options_server: Server) -> AsyncIterator[Any]:
    """A stub of it."""
    async with client(options_server) as channel:
        yield stub_of(channel)


def say_pipeline() -> PipelineConfig:
    """The voice alone, on smol-voice's replicas: says what it is given."""
    _, talker, code2wav = load_pipeline("smol-voice").model_dump()["stages"]
    talker |= {"inputs": (), "bridge": "forward"}
    return PipelineConfig.model_validate({"name": "say", "stages": [talker, code2wav]})


def hear_pipeline() -> PipelineConfig:
    """The ear alone, on smol-converse's replica: writes what it hears."""
    stage = load_pipeline("smol-converse").model_dump()["stages"][0] | {"output": "text"}
    content = {"name": "hear", "inputs": ["audio"], "prompts": ["media"], "stages": [stage]}
    return PipelineConfig.model_validate(content)


def options_pipeline(adapter: Path) -> PipelineConfig:
    """The language model alone, with every option that the engine has."""
    stage = {
        "name": "thinker",
        "engine": "vllm",
        "model": LANGUAGE_MODEL,
        "engine_args": {
            **SMALL_ENGINE,
            "max_model_len": 1024,
            "chat": False,
            "enable_prompt_embeds": True,
            "scheduling_policy": "priority",
            "max_lora_rank": 8,
            # One at a time, so that it shows who is first.
            "max_num_seqs": 1,
        },
        "lora_adapters": {"odd": str(adapter)},
        "environment": SMALL_ENVIRONMENT,
        "defaults": {"temperature": 0.0, "max_tokens": 8},
        "output": "text",
    }
    return PipelineConfig.model_validate(
        {"name": "smol-options", "prompts": ["text", "token_ids", "embeds"], "stages": [stage]}
    )


def letters(text: str) -> str:
    """The text's words, lower case, without marks."""
    return " ".join(re.sub(r"[^a-z' ]", " ", text.lower()).split())
