"""An operator's calls to a real vLLM stage: caches, adapters, sleep."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from omni_grpc.embedded import resolve
from omni_grpc.server import Server
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.models import random_lora
from tests.real import LANGUAGE_MODEL
from tests.support import collect, refusal, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TARGET = {"stage": "thinker"}
# More than a block of the cache (128 tokens), of which it keeps whole ones.
LONG = {"token_ids": {"ids": [504 + n % 50 for n in range(400)]}}


@pytest.fixture
async def admin(options_server: Server) -> AsyncIterator[Any]:
    """A stub of AdminService."""
    address = f"127.0.0.1:{options_server.admin_port}"
    async with grpc.aio.insecure_channel(address) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def outcome(response: Any) -> list[tuple[int, str]]:
    """Code and reason of each replica."""
    return [(result.status.code, result.status.reason) for result in response.results]


async def cached(stub: Any) -> int:
    """How many tokens of the long prompt were in the cache."""
    responses = await collect(stub, prompt=LONG, timeout=60)
    return int(responses[-1].finished.usage.cached_tokens)


async def test_a_cache_that_was_reset_is_empty(options: Any, admin: Any) -> None:
    await cached(options)
    assert await cached(options) >= 128
    request = admin_pb2.ResetCacheRequest(target=TARGET, prefix_cache=True)
    assert outcome(await admin.ResetCache(request)) == [(0, "")]
    assert await cached(options) == 0


async def test_an_adapter_comes_and_goes(options: Any, admin: Any, tmp_path: Path) -> None:
    assert (await refusal(options, text="The moon", lora="late")).reason == "LORA_NOT_FOUND"
    random_lora.build_in_child(resolve(LANGUAGE_MODEL), tmp_path)
    load = admin_pb2.LoadLoraRequest(target=TARGET, name="late", path=str(tmp_path))
    assert outcome(await admin.LoadLora(load)) == [(0, "")]
    plain = texts(await collect(options, text="The moon", timeout=60))
    assert texts(await collect(options, text="The moon", lora="late", timeout=60)) != plain
    unload = admin_pb2.UnloadLoraRequest(target=TARGET, name="late")
    assert outcome(await admin.UnloadLora(unload)) == [(0, "")]
    assert (await refusal(options, text="The moon", lora="late")).reason == "LORA_NOT_FOUND"


async def test_a_folder_that_holds_no_adapter_is_refused(
    options: Any, admin: Any, tmp_path: Path
) -> None:
    load = admin_pb2.LoadLoraRequest(target=TARGET, name="empty", path=str(tmp_path))
    ((_, reason),) = outcome(await admin.LoadLora(load))
    assert reason == "INVALID_FIELD"
    assert (await refusal(options, text="The moon", lora="empty")).reason == "LORA_NOT_FOUND"
    assert texts(await collect(options, text="The moon", timeout=60))


async def test_an_engine_without_sleep_mode_says_so_and_serves_on(options: Any, admin: Any) -> None:
    response = await admin.SleepStage(admin_pb2.SleepStageRequest(target=TARGET))
    ((_, reason),) = outcome(response)
    assert reason == "NOT_SUPPORTED"
    assert texts(await collect(options, text="The moon", timeout=60))
