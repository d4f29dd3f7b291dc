"""Pipelines that declare an identical stage run it once, and stay apart in all else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_grpc.config import PipelineConfig
from omni_grpc.v1 import service_pb2
from tests.running import Running, pipeline, replicas, serving
from tests.support import ENVIRONMENT, ask, collect, eventually, freed, refusal, script, texts

LONG = 3_600_000
WORDS: dict[str, Any] = {"name": "words", "output": "text"}
SHOUT: dict[str, Any] = {
    "name": "shout",
    "engine": "python",
    "model": "tests.example_stages:Shout",
    "inputs": ["words"],
    "output": "text",
}


def configs() -> list[PipelineConfig]:
    """`one` and `two` share both stages but differ per request; `three` shares none: its `words`
    have other arguments, its `shout` another name."""
    silent = {"name": "words"}
    return [
        pipeline("one", silent | {"defaults": {"outputs": 2}}, SHOUT | {"defaults": {"times": 2}}),
        pipeline(
            "two",
            silent | {"constraints": {"outputs": 1}},
            SHOUT | {"bridge": "tests.example_stages:Exclaim"},
        ),
        pipeline("three", WORDS | {"engine_args": {"modality": "text", "load_s": 0.01}}),
    ]


@pytest.fixture(scope="module")
async def served() -> AsyncIterator[Running]:
    """A server of the three."""
    async with serving(*configs()) as running:
        yield running


async def load(served: Running) -> dict[tuple[str, ...], Any]:
    """The replicas' load, by (stage, pipelines)."""
    answer = await served.omni.GetLoad(service_pb2.GetLoadRequest(), timeout=5)
    return {(one.stage, *one.pipelines): one.replicas for one in answer.stages}


async def test_an_identical_stage_runs_once(served: Running) -> None:
    found = await load(served)
    assert set(found) == {("words", "one", "two"), ("shout", "one", "two"), ("words", "three")}
    assert all(len(replicas_) == 1 for replicas_ in found.values())
    # Processes are named after the pipeline that declared the stage first.
    counts = {
        (name, stage): len(replicas(name, stage))
        for name in ("one", "two", "three")
        for stage in ("words", "shout")
    }
    assert {key for key, count in counts.items() if count} == {
        ("one", "words"),
        ("one", "shout"),
        ("three", "words"),
    }
    assert set(counts.values()) == {0, 1}


async def test_defaults_constraints_and_bridges_stay_apart(served: Running) -> None:
    async def said(name: str) -> str:
        return texts(await collect(served.omni, ask("a b c", pipeline=name)))

    expected = {
        "one": "WORD0 WORD0 WORD1 WORD1 ",
        "two": "WORD0! (1 FROM WORDS TO SHOUT)",
        "three": "a b c",
    }
    for _ in range(2):  # whoever came before
        assert {name: await said(name) for name in expected} == expected
    mixed = await asyncio.gather(*(said(name) for name in list(expected) * 10))
    assert mixed == list(expected.values()) * 10
    params = [script("words", outputs=3)]
    error = await refusal(served.omni, pipeline="two", stage_params=params)
    assert list(error.violations) == ["stage_params[0].custom.outputs"]
    assert texts(await collect(served.omni, pipeline="one", stage_params=params)).count("WORD") == 6


async def test_one_pipelines_traffic_shows_in_the_shared_stage(served: Running) -> None:
    slow = [script("words", first_ms=LONG)]
    calls = [
        served.omni.AddRequest(ask(pipeline=name, stage_params=slow))
        for name in ("one", "two", "two")
    ]
    for call in calls:
        await call.read()
    found = await load(served)
    assert found["words", "one", "two"][0].running == 3
    assert found["words", "three"][0].running == 0
    for call in calls:
        call.cancel()
    await freed(served.server, 5)


async def test_information_names_it_in_both_pipelines(served: Running) -> None:
    info = await served.omni.GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=5)
    stages = {
        p.name: [(s.name, s.replicas, s.ready_replicas) for s in p.stages] for p in info.pipelines
    }
    both = [("words", 1, 1), ("shout", 1, 1)]
    assert stages == {"one": both, "two": both, "three": [("words", 1, 1)]}
    defaults = {p.name: dict(p.stages[0].defaults) for p in info.pipelines}
    assert defaults == {"one": {"outputs": 2}, "two": {}, "three": {}}


async def test_health_names_stages_once(served: Running) -> None:
    for name in ("stage/words", "stage/shout", ""):
        assert await served.check(name) == "SERVING"
    assert await served.check("stage/other") == "NOT_FOUND"


async def test_a_shared_stage_that_is_lost_is_lost_for_both() -> None:
    """And only there: a pipeline with a stage of its own goes on."""
    gone = {"restart": {"backoff": 3600}}
    first, second = (pipeline(name, WORDS | gone) for name in ("left", "right"))
    other = pipeline("other", {**WORDS, "name": "own"})
    async with serving(first, second, other) as served:
        assert len(await load(served)) == 2
        await refusal(served.omni, pipeline="left", stage_params=[script("words", die_at=0)])
        for name in ("left", "right"):
            assert (await refusal(served.omni, pipeline=name)).reason == "STAGE_UNAVAILABLE"
        assert texts(await collect(served.omni, ask("a b", pipeline="other"))) == "a b"
        await eventually(lambda: served.server.engine.pools[0].ready_replicas == 0, 5)
        assert await served.check("stage/words") == "NOT_SERVING"
        assert await served.check("stage/own") == "SERVING"


DIFFERENT: dict[str, dict[str, Any]] = {
    "engine_args": {"engine_args": {"load_s": 0.0}},
    "threads": {"threads": 1},
    "environment": {"environment": {**ENVIRONMENT, "OTHER": "1"}},
    "replicas": {"replicas": 2},
    "max_tasks": {"max_tasks": 2},
    "balance": {"balance": "random"},
    "restart": {"restart": {"budget": 3}},
    "name": {"name": "others"},
}
SAME: dict[str, dict[str, Any]] = {
    "defaults": {"defaults": {"outputs": 2}},
    "constraints": {"constraints": {"outputs": 2}},
    "stage_timeout": {"stage_timeout": 5},
}


@pytest.mark.parametrize("what", [*DIFFERENT, *SAME])
async def test_what_makes_stages_identical(what: str) -> None:
    changes = DIFFERENT.get(what) or SAME[what]
    async with serving(pipeline("a", WORDS), pipeline("b", WORDS | changes)) as served:
        assert len(served.server.engine.pools) == (1 if what in SAME else 2)
        for name in ("a", "b"):
            assert texts(await collect(served.omni, pipeline=name))


async def test_health_of_a_name_that_two_pools_have() -> None:
    """It is well only if both are."""
    gone = {"restart": {"backoff": 3600}}
    first = pipeline("left", WORDS | gone)
    second = pipeline("right", WORDS | gone | {"engine_args": {"load_s": 0.0}})
    for dying in ("left", "right"):
        async with serving(first, second) as served:
            await refusal(served.omni, pipeline=dying, stage_params=[script("words", die_at=0)])
            await eventually(
                lambda: not all(p.ready_replicas for p in served.server.engine.pools),
                5,
            )
            await asyncio.sleep(0.1)
            assert await served.check("stage/words") == "NOT_SERVING", dying
            assert await served.check("") == "NOT_SERVING"
