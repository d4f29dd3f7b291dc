"""The ways in which a replica fails: each ends what it must end, and nothing else, and the slot
serves again."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from omni_grpc.config import PipelineConfig
from tests.conftest import Serve
from tests.running import alive, replicas, text_pipeline
from tests.support import Served, ask, broken_off, collect, eventually, refusal, started, texts

LOST_AFTER = (grpc.StatusCode.ABORTED, "REPLICA_LOST")
LOST_BEFORE = (grpc.StatusCode.UNAVAILABLE, "STAGE_UNAVAILABLE")
FAILED = (grpc.StatusCode.INTERNAL, "STAGE_ERROR")


def failing(name: str, stage: str = "Failing", **fields: Any) -> PipelineConfig:
    """One stage that fails as the prompt says, restarted quickly."""
    model = f"tests.failing_stages:{stage}"
    restart = {"backoff": 0.1, "budget": 100}
    return text_pipeline(name, engine="python", model=model, restart=restart, **fields)


async def serves_again(served: Served, replicas_: int = 1, lost: int = 1) -> None:
    """Returns when a replica was lost and the pool is whole again, and answers."""
    pool = served.server.engine.pools[0]
    await eventually(lambda: sum(slot.restarts for slot in pool.slots) >= lost, 15)
    await eventually(lambda: pool.ready_replicas == replicas_, 15)
    assert texts(await collect(served.stub, text="fine")) == "so far fine"


@pytest.mark.parametrize("how", ["exit", "abort", "segfault", "dead"])
async def test_a_replica_that_ends_ends_its_requests_only(serve: Serve, how: str) -> None:
    served = await serve(failing(f"ends-{how}", replicas=2))
    seen, error = await broken_off(served.stub, text=how)
    assert texts(seen) == "so far "
    assert (error.code, error.reason) == LOST_AFTER
    await serves_again(served, 2)
    # Nothing was given: it went to the other one, which died of it too.
    error = await refusal(served.stub, text=f"{how} at once")
    assert (error.code, error.reason) == LOST_BEFORE
    assert error.retry and error.pushback_ms
    await serves_again(served, 2, lost=3)


@pytest.mark.parametrize("how", ["raise", "memory"])
async def test_a_step_that_fails_ends_one_request_and_no_replica(serve: Serve, how: str) -> None:
    served = await serve(failing(f"step-{how}"))
    (process,) = replicas(f"step-{how}", "text")
    beside = asyncio.create_task(collect(served.stub, text="fine"))
    seen, error = await broken_off(served.stub, text=how)
    assert texts(seen) == "so far "
    assert (error.code, error.reason) == FAILED
    assert "4711" not in error.message
    assert texts(await beside) == "so far fine"
    await serves_again(served, lost=0)
    assert alive(process)


async def test_an_engine_that_dies_idle_is_replaced_before_the_next_request(serve: Serve) -> None:
    served = await serve(failing("idle-death"))
    (process,) = replicas("idle-death", "text")
    assert texts(await collect(served.stub, text="idle-death")) == "so far idle-death"
    await eventually(lambda: not alive(process), 10)
    await serves_again(served)


async def test_a_replica_that_does_not_free_what_was_aborted_is_replaced(serve: Serve) -> None:
    served = await serve(failing("stuck"), abort_timeout=1.0)
    (process,) = replicas("stuck", "text")
    call = await started(served.stub, until="accepted", text="stuck at once")
    call.cancel()
    assert alive(process)
    await eventually(lambda: not alive(process), 10)
    await serves_again(served)


async def test_a_stage_that_cannot_tell_its_load_serves_on(serve: Serve) -> None:
    served = await serve(failing("miscounting", "Miscounting"), heartbeat_timeout=2.0)
    (process,) = replicas("miscounting", "text")
    await asyncio.sleep(4)  # two heartbeat timeouts: a lost heart would show
    assert alive(process)
    assert texts(await collect(served.stub, ask("still here"))) == "still here"
