"""Where `finished` says that the time went, and which parameters were in force: defaults, request
and constraints become one set. Times are compared with scripts and with each other, never with a
clock of the test's own alone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_grpc.config import PipelineConfig, ServerConfig
from omni_grpc.errors import InvalidField
from omni_grpc.server import Server
from omni_grpc.types import Prompt, Request, SamplingParams, StageParams, Text
from omni_grpc.v1 import output_pb2, params_pb2
from tests.guided import drawn, guided, listed, thinking
from tests.running import serving
from tests.support import (
    TEXT,
    ask,
    client,
    collect,
    echo,
    freed,
    refusal,
    script,
    stub_of,
    texts,
)

SLACK = 2.0
"""By how many milliseconds clocks of two processes may disagree on an interval."""


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """echo; `acting` with a transform; `fixed` with defaults and constraints."""
    fixed = {
        "defaults": {"outputs": 3, "interval_ms": 1.0},
        "constraints": {"first_ms": 2.0},
        "engine_args": {"own": 1},
    }
    acting = guided("acting", transform="tests.guided:acting")
    async with serving(echo(), acting, guided("fixed", fixed)) as served:
        yield served.server


@pytest.fixture
async def stub(server: Server) -> AsyncIterator[Any]:
    """A client of it. When the test is over, the server must hold nothing."""
    async with client(server) as channel:
        yield stub_of(channel)
    await freed(server, 5)


async def timed(stub: Any, **fields: Any) -> output_pb2.Timings:
    """A request's timings, after what holds for all timings."""
    before = time.perf_counter()
    finished = (await collect(stub, **fields))[-1].finished
    elapsed = (time.perf_counter() - before) * 1e3
    timings: output_pb2.Timings = finished.timings
    assert timings.total_ms <= elapsed
    parts = (timings.transform_ms, timings.preprocess_ms, timings.queue_wait_ms)
    assert all(part >= 0 for part in parts)
    assert sum(parts) <= timings.total_ms + SLACK
    before_stages = timings.transform_ms
    for stage, took in timings.stage_ms.items():
        assert 0 < took <= timings.total_ms - before_stages + SLACK, stage
    for first in timings.first_output_ms.values():
        assert sum(parts) <= first + SLACK and first <= timings.total_ms
    return timings


# ---------------------------------------------------------------- where the time goes


async def test_preparing_is_preprocessing_and_not_waiting(stub: Any) -> None:
    quick = await timed(stub)
    slow = await timed(stub, stage_params=[script(prepare_ms=300)])
    assert slow.preprocess_ms >= 298 > quick.preprocess_ms
    assert slow.queue_wait_ms < 280
    assert slow.stage_ms["text"] >= slow.preprocess_ms - SLACK
    assert quick.transform_ms == slow.transform_ms == 0


async def test_preparing_of_later_stages_is_not_preprocessing(stub: Any) -> None:
    timings = await timed(stub, stage_params=[script("audio", prepare_ms=300)])
    assert timings.preprocess_ms < 280
    assert timings.stage_ms["audio"] >= 298
    assert timings.first_output_ms["audio"] >= 298
    assert timings.first_output_ms["text"] < timings.first_output_ms["audio"]


async def test_a_first_output_and_the_rest(stub: Any) -> None:
    paced = [script(outputs=4, first_ms=60, interval_ms=40)]
    timings = await timed(stub, stage_params=paced)
    assert 58 <= timings.first_output_ms["text"] <= timings.total_ms - 3 * 40 + SLACK
    assert timings.stage_ms["text"] >= 60 + 3 * 40 - SLACK
    # A picture needs all words, a tone one.
    assert timings.first_output_ms["audio"] <= timings.first_output_ms["image"]
    assert timings.first_output_ms["image"] >= 60 + 3 * 40 - SLACK


async def test_a_stage_that_works_beside_another_counts_for_itself(stub: Any) -> None:
    late = [script("audio", first_ms=150)]
    timings = await timed(stub, stage_params=late)
    assert timings.stage_ms["audio"] >= 148
    assert timings.stage_ms["text"] < timings.stage_ms["audio"]
    assert sum(timings.stage_ms.values()) > timings.stage_ms["audio"]


async def test_a_stage_that_did_not_run_has_no_time(stub: Any) -> None:
    timings = await timed(stub, output_modalities=[TEXT])
    assert set(timings.stage_ms) == set(timings.first_output_ms) == {"text"}


async def test_no_output_has_no_first_output(stub: Any) -> None:
    fields: dict[str, Any] = {"output_modalities": [TEXT]}
    timings = await timed(stub, stage_params=[script(outputs=0, first_ms=30)], **fields)
    assert not timings.first_output_ms and timings.stage_ms["text"] >= 28


async def test_a_busy_stage_is_waited_for(stub: Any) -> None:
    """Its loop is busy for longer than preparing takes: that is waiting."""
    idle = min([(await timed(stub)).queue_wait_ms for _ in range(3)])
    flood = [script(outputs=3000), script("audio", outputs=0), script("image", outputs=0)]
    floods = [asyncio.create_task(collect(stub, stage_params=flood)) for _ in range(4)]
    await asyncio.sleep(0.05)
    busy = [await timed(stub) for _ in range(3)]
    await asyncio.gather(*floods)
    assert max(timings.queue_wait_ms for timings in busy) > idle


async def test_a_transforms_time_is_its_own(stub: Any) -> None:
    information = {"do": ["block"]}
    params = thinking(prepare_ms=60)
    timings = await timed(
        stub, pipeline="acting", additional_information=information, stage_params=params
    )
    assert timings.transform_ms >= 495
    assert 58 <= timings.preprocess_ms < 400 and timings.queue_wait_ms < 400
    assert timings.stage_ms["thinker"] < 400, "a stage that was not sent anything yet"
    assert min(timings.first_output_ms.values()) >= timings.transform_ms


async def test_companions_transforms_count_too(stub: Any) -> None:
    prompt = {"text": "a ring", "negative_text": listed(("one", "x", {}), ("two", "y", {}))}
    information = {"do": ["block"]}
    request = ask(pipeline="acting", additional_information=information)
    request.prompt.CopyFrom(type(request)(prompt=prompt).prompt)
    responses = await collect(stub, request)
    timings = responses[-1].finished.timings
    assert timings.transform_ms >= 3 * 495
    assert sum((timings.transform_ms, timings.preprocess_ms)) <= timings.total_ms + SLACK
    assert len(drawn(responses)[1]) == 2


async def test_waiting_for_companions_is_nobodys_stage_time(stub: Any) -> None:
    slow = listed(("slow", "x", {"first_ms": 400.0}))
    request = ask(pipeline="acting")
    request.prompt.negative_text = slow
    timings = (await collect(stub, request))[-1].finished.timings
    assert timings.stage_ms["thinker"] < 380, "the parent had long ended"
    assert timings.stage_ms["painter"] < 380, "it was not begun"
    assert timings.first_output_ms["image"] >= 398


async def test_timings_of_many_at_once_are_plausible(stub: Any) -> None:
    async def one(number: int) -> None:
        values: dict[str, Any] = {
            "outputs": 1 + number % 3,
            "prepare_ms": number % 7,
            "first_ms": number % 5,
        }
        timings = await timed(stub, stage_params=[script(**values)])
        assert timings.preprocess_ms >= values["prepare_ms"] - SLACK

    await asyncio.gather(*(one(number) for number in range(100)))


# ---------------------------------------------------------------- which parameters are in force


async def in_force(stub: Any, **values: Any) -> dict[str, Any]:
    """What the thinker of `fixed` was told, beside the number of outputs."""
    params = thinking(**values) if values else []
    responses = await collect(
        stub, pipeline="fixed", stage_params=params, output_modalities=[TEXT], text="a b c d"
    )
    told = texts(responses)
    return json.loads(told) if told.startswith("{") else {"said": told}


async def test_left_out_is_the_pipelines_default(stub: Any) -> None:
    assert await in_force(stub) == {"said": "word0 word1 word2 "}
    assert await in_force(stub, outputs=1) == {"said": "word0 "}


async def test_what_a_constraint_fixes_is_refused_otherwise(stub: Any) -> None:
    assert await in_force(stub, outputs=1, first_ms=2) == {"said": "word0 "}
    error = await refusal(stub, pipeline="fixed", stage_params=thinking(first_ms=1))
    assert (error.reason, list(error.violations)) == (
        "INVALID_FIELD",
        ["stage_params[0].custom.first_ms"],
    )


def sampling(**stage: Any) -> PipelineConfig:
    """A pipeline whose stage takes sampling parameters; nobody loads its model."""
    thinker = {"name": "thinker", "engine": "vllm", "model": "none", "output": "text", **stage}
    return PipelineConfig.model_validate({"name": "sampling", "stages": [thinker]})


async def test_required_stop_ids_are_added() -> None:
    """To the request's own, and in place of none; what else is fixed fills and refuses."""
    config = sampling(
        defaults={"temperature": 0.5, "stop_token_ids": [1]},
        constraints={"detokenize": False, "stop_token_ids": [7, 8], "max_tokens": 10},
    )
    server = Server(ServerConfig(port=0), [config])  # asked for plans only
    try:
        engine = server.engine

        def plan(params: SamplingParams | None) -> Any:
            given = (StageParams("thinker", params),) if params is not None else ()
            return engine.plan(Request("", "", Prompt(Text("x")), given)).params["thinker"]

        own = plan(SamplingParams(stop_token_ids=(5, 7), temperature=0.0, detokenize=False))
        assert own.stop_token_ids == (5, 7, 8)
        assert (own.temperature, own.detokenize, own.max_tokens) == (0.0, False, 10)
        assert plan(None).stop_token_ids == (1, 7, 8)
        assert plan(SamplingParams(stop_token_ids=())).stop_token_ids == (7, 8)
        for wrong in (SamplingParams(detokenize=True), SamplingParams(max_tokens=9)):
            with pytest.raises(InvalidField):
                plan(wrong)
        # A request changes nothing for the next one.
        assert plan(None).stop_token_ids == (1, 7, 8) and plan(None).temperature == 0.5
    finally:
        await server.stop(0)


async def test_parameters_of_an_unknown_kind_or_stage_are_refused(stub: Any) -> None:
    wrong = [params_pb2.StageParams(stage="thinker", sampling={"n": 1})]
    error = await refusal(stub, pipeline="fixed", stage_params=wrong)
    assert list(error.violations) == ["stage_params[0].sampling"]
    twice = [*thinking(outputs=1), *thinking(outputs=1)]
    error = await refusal(stub, pipeline="fixed", stage_params=twice)
    assert list(error.violations) == ["stage_params[1].stage"]
