"""The real pipeline under failure: vLLM's engine is killed, and stands still; a voice is killed.
Running requests are told, the others go on, and the slot serves again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest

from omni_grpc.config import PipelineConfig, load_pipeline
from omni_grpc.server import Server
from omni_grpc.v1 import params_pb2
from tests.real import ANSWER, QUESTION, real_server
from tests.running import alive, replicas
from tests.support import (
    TEXT,
    RichError,
    client,
    collect,
    eventually,
    freed,
    refusal,
    rich_error,
    sound,
    started,
    stub_of,
    texts,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = [
    params_pb2.StageParams(stage="thinker", sampling={"max_tokens": 400, "ignore_eos": True}),
]
NAME = "failing"
RESTART_S = 120
"""Longest restart of vLLM on a busy machine."""


def pipeline() -> PipelineConfig:
    """smol-voice with two voices, under a name of its own: its processes are found by it."""
    config = load_pipeline("smol-voice").model_dump() | {"name": NAME}
    for stage in config["stages"][1:]:
        stage["replicas"] = 2
    for stage in config["stages"]:
        stage["restart"] = {"backoff": 0.2}
    return PipelineConfig.model_validate(config)


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """A server of its own: what it loses nobody else needs."""
    async with real_server(pipeline(), heartbeat_timeout=8.0) as server:
        yield server


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[Any]:
    """A client of it; what it asked for is freed in the end."""
    async with client(server) as channel:
        yield stub_of(channel)
    await freed(server, within=10)


def engine_core() -> psutil.Process:
    """vLLM's engine core, a child of the thinker's replica."""
    (thinker,) = replicas(NAME, "thinker")
    below = thinker.children(recursive=True)
    # The watcher has the replica's own command line.
    (core,) = [process for process in below if "EngineCore" in process.name()]
    return core


async def whole(server: Server) -> None:
    """Returns when every replica serves."""
    pools = server.engine.pools
    await eventually(
        lambda: all(pool.ready_replicas == pool.config.replicas for pool in pools), RESTART_S
    )


def check_lost(error: RichError) -> None:
    """A replica was lost after outputs had begun."""
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "REPLICA_LOST")


async def test_vllms_engine_is_killed_mid_answer_and_serves_again(
    server: Server, stub: Any
) -> None:
    (thinker,) = replicas(NAME, "thinker")
    before = await collect(stub, text=QUESTION, timeout=120)
    assert texts(before) == ANSWER
    speaking = await asyncio.gather(
        *(started(stub, text=f"Tell me about {what}.", stage_params=LONG) for what in "abcd")
    )
    engine_core().kill()
    ends = await asyncio.gather(*map(end_of, speaking))
    assert {(error.code, error.reason) for error in ends} == {
        (grpc.StatusCode.ABORTED, "REPLICA_LOST")
    }
    await eventually(lambda: not alive(thinker), 10)
    # Told when to come back while it loads, at once.
    error = await refusal(stub, text=QUESTION, timeout=5)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_UNAVAILABLE")
    assert error.retry and error.pushback_ms
    await whole(server)
    again = await collect(stub, text=QUESTION, timeout=120)
    assert (texts(again), sound(again)) == (ANSWER, sound(before))


async def test_an_engine_that_stands_still_is_replaced_though_its_replica_beats(
    server: Server, stub: Any
) -> None:
    await whole(server)
    (thinker,) = replicas(NAME, "thinker")
    call = await started(stub, text="Tell me about rivers.", stage_params=LONG)
    engine_core().suspend()
    check_lost(await end_of(call))
    assert not alive(thinker)
    await whole(server)
    answer = await collect(stub, text=QUESTION, output_modalities=[TEXT], timeout=120)
    assert texts(answer) == ANSWER


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
async def test_a_voice_is_killed_and_the_other_speaks_on(
    server: Server, stub: Any, stage: str
) -> None:
    await whole(server)
    before = sound(await collect(stub, text=QUESTION, timeout=120))
    victim, other = replicas(NAME, stage)
    (pool,) = [pool for pool in server.engine.pools if pool.config.name == stage]
    victim.kill()
    await eventually(lambda: pool.ready_replicas == 1, 5)
    answers = await asyncio.gather(*(collect(stub, text=QUESTION, timeout=120) for _ in range(3)))
    assert [sound(answer) == before for answer in answers] == [True] * 3
    assert alive(other)
    await whole(server)


async def end_of(call: Any) -> RichError:
    """How a call that was read in part fails."""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return rich_error(error)
    raise AssertionError("it succeeded")
