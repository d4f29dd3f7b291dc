"""The extension point: a stage and a bridge of the user's own, by import path."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
import pytest

from omni_grpc.config import PipelineConfig
from omni_grpc.errors import NotSupported, StageUnavailable
from omni_grpc.v1 import service_pb2
from tests.running import pipeline, replicas, serving, text_pipeline
from tests.support import (
    ask,
    broken_off,
    collect,
    eventually,
    freed,
    refusal,
    script,
    started,
    texts,
)

EXAMPLES = "tests.example_stages"


def shouting(name: str, **stage: Any) -> PipelineConfig:
    """A fake stage that says the prompt's words, and the worked example behind it."""
    shout = {"name": "shout", "engine": "python", "model": f"{EXAMPLES}:Shout", "output": "text"}
    wiring = {"inputs": ["words"], "bridge": f"{EXAMPLES}:Exclaim"}
    return pipeline(name, {"name": "words"}, {**shout, **wiring, **stage})


def alone(name: str, stage: str, **fields: Any) -> PipelineConfig:
    """A pipeline of one example stage."""
    return text_pipeline(name, engine="python", model=f"{EXAMPLES}:{stage}", **fields)


async def test_own_stage_and_bridge_work_behind_a_built_in_stage() -> None:
    async with serving(shouting("example")) as running:
        answer = await collect(running.omni)
        assert texts(answer) == "HELLO! BIG! WORLD! (3 FROM WORDS TO SHOUT)"
        assert [finish.stage for finish in answer[-1].finished.finish_reasons] == ["words", "shout"]


async def test_each_request_has_a_bridge_of_its_own() -> None:
    async with serving(shouting("own-bridge")) as running:
        prompts = [" ".join(["word"] * count) for count in range(1, 21)]
        answers = await asyncio.gather(*(collect(running.omni, ask(p)) for p in prompts))
        for count, answer in enumerate(answers, 1):
            assert texts(answer) == "WORD! " * count + f"({count} FROM WORDS TO SHOUT)"


async def test_parameters_reach_the_stage() -> None:
    async with serving(shouting("parameters", defaults={"times": 2})) as running:
        assert texts(await collect(running.omni, ask("a"))).startswith("A! A! (1")
        own = script("shout", times=3)
        assert texts(await collect(running.omni, ask("a"), stage_params=[own])).startswith(
            "A! A! (1"
        )
        answer = await collect(running.omni, ask("a", stage_params=[own]))
        assert texts(answer).startswith("A! A! A! (1")


async def test_constraint_of_the_pipeline_holds() -> None:
    async with serving(shouting("constrained", constraints={"times": 2})) as running:
        assert texts(await collect(running.omni, ask("a"))).startswith("A! A! (1")
        error = await refusal(running.omni, stage_params=[script("shout", times=1)])
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(error.violations) == ["stage_params[0].custom.times"]


async def test_refusal_of_a_first_stage_names_the_requests_field() -> None:
    async with serving(alone("first", "Shout")) as running:
        seen, error = await broken_off(running.omni, stage_params=[script(times=9)])
        assert seen == []
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.violations == {"stage_params[0].custom.times": "must be 1, 2 or 3"}


async def test_refusal_of_a_later_stage_names_the_requests_field() -> None:
    async with serving(shouting("later")) as running:
        params = [script("words", interval_ms=1), script("shout", times=0)]
        error = await refusal(running.omni, stage_params=params)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.violations == {"stage_params[1].custom.times": "must be 1, 2 or 3"}
        # Where the request set nothing, the pipeline's own default is to blame, and named.
    async with serving(shouting("default", defaults={"times": 7})) as running:
        error = await refusal(running.omni)
        assert list(error.violations) == ["stage_params(shout).times"]


async def test_facts_and_arguments_of_the_stage_are_told() -> None:
    config = shouting("facts", engine_args={"version": "1.2"})
    async with serving(config) as running:
        info = await running.omni.GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=5)
        assert info.library_versions["shout"] == "1.2"
        stage = info.pipelines[0].stages[1]
        assert (stage.engine, stage.model) == ("python", f"{EXAMPLES}:Shout")
        assert stage.ready_replicas == 1


async def test_what_a_stage_raises_is_in_the_log_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(alone("raises", "Raises")) as running:
        seen, error = await broken_off(running.omni)
        assert texts(seen) == "so far "
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "STAGE_ERROR")
        assert "4711" not in error.message + str(error.trailers)
        await eventually(lambda: "[text/0] RuntimeError: the secret is 4711" in caplog.text, 5)
        # The replica and its other requests go on.
        assert (await refusal(running.omni)).reason == "STAGE_ERROR"


async def test_stage_that_is_slow_to_cancel_holds_nobody_up() -> None:
    async with serving(alone("stubborn", "Stubborn")) as running:
        call = await started(running.omni)
        cancelled = time.monotonic()
        call.cancel()
        load = running.server.engine.load
        await eventually(lambda: not running.server.engine.orchestrator.statistics(), 5)
        assert time.monotonic() - cancelled < 0.45
        assert load()[0].replicas[0].load.running == 1
        other = await started(running.omni)
        other.cancel()
        # A task counts until the stage has let go.
        await freed(running.server, 5)
        assert time.monotonic() - cancelled >= 0.5


async def test_abort_waits_until_the_stage_has_let_go() -> None:
    async with serving(alone("let-go", "Stubborn")) as running:
        call = await started(running.omni, request_id="held")
        began = time.monotonic()
        answer = await running.omni.Abort(service_pb2.AbortRequest(request_ids=["held"]), timeout=5)
        assert time.monotonic() - began >= 0.5
        assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
        assert running.server.engine.load()[0].replicas[0].load.running == 0
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_command_that_the_stage_does_not_know_is_not_supported() -> None:
    async with serving(alone("commands", "Shout")) as running:
        replica = running.server.engine.pools[0].slots[0].replica
        assert replica is not None
        with pytest.raises(NotSupported, match="engine 'python' does not support 'reset_cache'"):
            await asyncio.wait_for(replica.control("reset_cache", {}), 5)


async def test_command_to_a_lost_replica_fails_at_once() -> None:
    async with serving(alone("lost", "Shout", restart={"backoff": 60})) as running:
        replica = running.server.engine.pools[0].slots[0].replica
        assert replica is not None
        replicas("lost", "text")[0].kill()
        await replica.gone()
        with pytest.raises(StageUnavailable):
            await asyncio.wait_for(replica.control("reset_cache", {}), 5)
