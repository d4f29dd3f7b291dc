"""What a vLLM stage tells of its load: what waits, and how full its KV cache is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from omni_grpc.server import Server
from omni_grpc.types import StageStatistics
from omni_grpc.v1 import params_pb2
from tests.support import ask, eventually, freed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def told(server: Server) -> StageStatistics:
    """What its only replica told last."""
    return server.engine.load()[0].replicas[0].load.own


async def test_what_waits_and_what_the_cache_holds_is_told(
    options: Any, options_server: Server
) -> None:
    """One request runs at a time there."""
    sampling = params_pb2.SamplingParams(max_tokens=900, min_tokens=900)
    params = [params_pb2.StageParams(stage="thinker", sampling=sampling)]
    calls = [options.AddRequest(ask(stage_params=params)) for _ in range(3)]
    # Each is accepted at once, though two of them wait in the engine.
    await asyncio.gather(*(call.read() for call in calls))
    await eventually(lambda: told(options_server).waiting == 2, within=20)
    use = told(options_server).kv_cache_use
    assert use is not None and 0 < use <= 1
    slot = options_server.engine.load()[0].replicas[0]
    assert slot.load.running == 3 and slot.capacity == 1
    assert slot.load.work > 900
    for call in calls:
        call.cancel()
    await freed(options_server, within=20)
    # Aborted without another step of the engine: it is told to be idle all the same.
    idle = StageStatistics(0, kv_cache_use=0.0, counters=told(options_server).counters)
    await eventually(lambda: told(options_server) == idle, within=20)
