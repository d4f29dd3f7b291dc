"""A stage whose replicas hold as many tasks as they may: who comes now waits, is refused, or
leaves, and whoever had waited runs as if nothing had been."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from omni_grpc.config import PipelineConfig
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, service_pb2
from tests import guided
from tests.conftest import Serve
from tests.noting_stages import seen, time_left
from tests.running import pipeline
from tests.sessions import session
from tests.streaming import Opened, by_segment, chunk, feed
from tests.support import (
    ENVIRONMENT,
    Response,
    Served,
    ask,
    collect,
    echo,
    eventually,
    freed,
    refusal,
    rich_error,
    running,
    script,
    sound,
    started,
    texts,
)

S = grpc.StatusCode
HANGING = [script(outputs=9, hang_at=1)]


def noting(notes: Path, **stage: Any) -> PipelineConfig:
    """One stage that notes what it sees, with one place."""
    engine = {"engine": "python", "model": "tests.noting_stages:Noting"}
    arguments = {"engine_args": {"notes": str(notes)}, "max_tasks": 1}
    first = {"name": "text", "output": "text", **engine, **arguments, **stage}
    return pipeline("noting", first)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where the stage writes what it sees."""
    return tmp_path / "notes"


def waiting(served: Served) -> int:
    """Requests that wait for a place, over all stages."""
    return sum(stage.waiting for stage in served.server.engine.load())


async def queued(served: Served, count: int = 1, **fields: Any) -> asyncio.Task[list[Response]]:
    """A request that waits, the `count`th of those that do."""
    call = asyncio.create_task(collect(served.stub, **fields))
    await eventually(lambda: waiting(served) == count)
    return call


# ---------------------------------------------------------------- waiting


async def test_who_waits_runs_when_there_is_room(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes))
    held = await started(served.stub, request_id="held", stage_params=HANGING)
    waiter = await queued(served, request_id="waiter", text="my turn", timeout=10)
    load = await served.stub.GetLoad(service_pb2.GetLoadRequest())
    assert [(s.waiting, s.replicas[0].running) for s in load.stages] == [(1, 1)]
    await asyncio.sleep(0.3)
    assert seen(notes) == ["held"] and not waiter.done()
    held.cancel()
    responses = await waiter
    assert texts(responses) == "my turn"
    timings = responses[-1].finished.timings
    assert 280 < timings.queue_wait_ms < timings.total_ms
    # It is the queue's time, not the stage's, and the deadline has come nearer.
    assert timings.stage_ms["text"] < timings.total_ms - 280
    assert time_left(notes, "waiter") < 9.95


async def test_nothing_is_told_before_a_place_is_there(serve: Serve, notes: Path) -> None:
    """So a client may still be sent elsewhere."""
    served = await serve(noting(notes))
    held = await started(served.stub, stage_params=HANGING)
    call = served.stub.AddRequest(ask())
    await eventually(lambda: waiting(served) == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(call.initial_metadata()), 0.3)
    held.cancel()
    assert [r async for r in call][-1].HasField("finished")


async def test_no_more_wait_than_may(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes, max_waiting=2))
    held = await started(served.stub, stage_params=HANGING)
    waiters = [await queued(served, number) for number in (1, 2)]
    clock = asyncio.get_running_loop().time
    begin = clock()
    error = await refusal(served.stub)
    assert clock() - begin < 0.25
    assert (error.code, error.reason) == (S.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert "2 requests wait" in error.message
    assert error.retry and error.pushback_ms == round(error.retry * 1e3)
    held.cancel()
    for waiter in waiters:
        assert (await waiter)[-1].HasField("finished")


async def test_tenants_take_turns(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes))
    held = await started(served.stub, request_id="held", stage_params=HANGING)
    calls = []
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        metadata = [("omni-tenant", name[0])]
        calls.append(served.stub.AddRequest(ask(request_id=name), metadata=metadata))
        await eventually(lambda: waiting(served) == len(calls))
    held.cancel()
    for call in calls:
        assert [r async for r in call][-1].HasField("finished")
    assert seen(notes) == ["held", "a1", "b1", "c1", "a2", "b2", "a3"]


# ---------------------------------------------------------------- leaving


async def test_who_is_too_late_never_starts(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes))
    held = await started(served.stub, request_id="held", stage_params=HANGING)
    error = await refusal(served.stub, timeout=0.3)
    assert error.code is S.DEADLINE_EXCEEDED
    await eventually(lambda: not waiting(served))
    assert len(served.server.engine.orchestrator) == 1
    held.cancel()
    await freed(served.server)
    assert seen(notes) == ["held"]


@pytest.mark.parametrize("leave", ["cancel", "abort", "drain"])
async def test_who_leaves_never_starts(serve: Serve, notes: Path, leave: str) -> None:
    served = await serve(noting(notes))
    held = await started(served.stub, request_id="held", stage_params=HANGING)
    call = served.stub.AddRequest(ask(request_id="waiter"))
    behind = served.stub.AddRequest(ask(request_id="behind"))
    await eventually(lambda: waiting(served) == 2)
    if leave == "cancel":
        call.cancel()
        await eventually(lambda: waiting(served) == 1)
    elif leave == "abort":
        answer = await served.stub.Abort(service_pb2.AbortRequest(request_ids=["waiter"]))
        assert answer.results[0].outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
        assert waiting(served) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert rich_error(caught.value).reason == "ABORTED_BY_CLIENT"
    else:
        await served.server.engine.drain(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await behind.read()
        assert rich_error(caught.value).reason == "DRAINING"
        await freed(served.server)
    held.cancel()
    if leave != "drain":
        assert [r async for r in behind][-1].HasField("finished")
    await freed(served.server)
    assert "waiter" not in seen(notes)


# ---------------------------------------------------------------- replicas that go and come


async def test_who_waits_for_a_stage_that_is_lost_may_try_again(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes, restart={"backoff": 3600}))
    dying = [script(outputs=3, interval_ms=300, die_at=1)]
    held = await started(served.stub, request_id="held", stage_params=dying)
    error = await refusal(served.stub)
    assert (error.code, error.reason) == (S.UNAVAILABLE, "STAGE_UNAVAILABLE")
    assert error.retry == 3600
    with pytest.raises(grpc.aio.AioRpcError):
        [r async for r in held]
    assert seen(notes) == ["held"]


async def test_who_waits_goes_to_the_replica_that_is_left(serve: Serve) -> None:
    served = await serve(echo(replicas=2, max_tasks=1, restart={"backoff": 3600}))
    dying = [script(outputs=3, interval_ms=300, die_at=1)]
    first = await started(served.stub, stage_params=dying)
    second = await started(served.stub, stage_params=[script(outputs=5, interval_ms=200)])
    waiter = await queued(served, text="after all")
    assert texts(await waiter) == "after all"
    with pytest.raises(grpc.aio.AioRpcError):
        [r async for r in first]
    assert [r async for r in second][-1].HasField("finished")


async def test_who_waits_for_a_stage_that_is_paused_is_told(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes), admin_port=0)
    held = await started(served.stub, request_id="held", stage_params=HANGING)
    call = served.stub.AddRequest(ask())
    await eventually(lambda: waiting(served) == 1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.admin_port}") as channel:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        await admin.PauseStage(admin_pb2.PauseStageRequest(target={"stage": "text"}))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert rich_error(caught.value).reason == "STAGE_UNAVAILABLE"
    held.cancel()


# ---------------------------------------------------------------- later stages


async def test_a_full_later_stage_lets_running_requests_wait(serve: Serve) -> None:
    """However many there are, and longer than its silence may be: they are not refused, and lose
    nothing."""
    voice = {"name": "audio", "engine_args": {"modality": "audio"}, "output": "audio"}
    limits = {"max_tasks": 1, "max_waiting": 0, "stage_timeout": 0.3}
    served = await serve(
        pipeline("line", {"name": "text"}, {**voice, **limits, "inputs": ["text"]})
    )
    slow = [script("audio", interval_ms=60)]
    alone = sound(await collect(served.stub, text="one two three", stage_params=slow))
    together = await asyncio.gather(
        *(collect(served.stub, text="one two three", stage_params=slow) for _ in range(6))
    )
    assert [sound(responses) for responses in together] == [alone] * 6


async def test_a_running_request_loses_the_stage_that_it_waits_for(serve: Serve) -> None:
    """With outputs gone out that is a lost replica, not a stage to try again."""
    text = {"name": "text", "output": "text"}
    voice = {"name": "audio", "engine_args": {"modality": "audio"}, "output": "audio"}
    limits = {"max_tasks": 1, "inputs": ["text"], "restart": {"backoff": 3600}}
    served = await serve(pipeline("line", text, {**voice, **limits}))
    scripts = [script(outputs=3), script("audio", outputs=3, interval_ms=300, die_at=2)]
    first = served.stub.AddRequest(ask(stage_params=scripts))
    await eventually(lambda: running(served.server) == {"text": 0, "audio": 1})
    second = await started(served.stub, stage_params=[script(outputs=3)])
    assert waiting(served) == 1
    for call in (first, second):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [r async for r in call]
        error = rich_error(caught.value)
        assert (error.code, error.reason) == (S.ABORTED, "REPLICA_LOST")


async def test_a_request_that_runs_goes_before_new_ones(serve: Serve, notes: Path) -> None:
    """At a stage that is one pipeline's second and another's first."""
    noting_stage = noting(notes).stages[0].model_dump() | {"environment": ENVIRONMENT}
    first = {"name": "source"}
    long = pipeline("long", first, noting_stage | {"inputs": ["source"]})
    short = pipeline("short", noting_stage)
    served = await serve(long, short)
    held = await started(served.stub, request_id="held", pipeline="short", stage_params=HANGING)
    new = await queued(served, 1, request_id="new", pipeline="short")
    old = await queued(served, 2, request_id="old", pipeline="long")
    held.cancel()
    assert (await old)[-1].HasField("finished") and (await new)[-1].HasField("finished")
    assert seen(notes) == ["held", "old", "new"]


# ---------------------------------------------------------------- requests of all kinds


async def test_input_that_streams_waits_with_its_request(serve: Serve, notes: Path) -> None:
    served = await serve(noting(notes))
    held = await started(served.stub, request_id="held", stage_params=HANGING)
    request = Opened(served.stub, "fed")
    await eventually(lambda: waiting(served) == 1)
    feeding = asyncio.create_task(
        feed(served.stub, "fed", [chunk(0, "one two", end=True), chunk(1, "three", end=True)])
    )
    await asyncio.sleep(0.2)
    assert not feeding.done() and not request.responses
    held.cancel()
    assert (await feeding).accepted_chunks == 2
    assert by_segment(await request.finished()) == {0: "one two", 1: "three"}


async def test_an_interrupted_answer_makes_room_for_the_next_one(serve: Serve, notes: Path) -> None:
    """The only place is the one that the old answer still has."""
    served = await serve(noting(notes, max_waiting=0))
    async with session(served.stub, request_id="talk", resumable=True) as one:
        await one.update(0, "old", end=True, stage_params=[script(outputs=500, interval_ms=20)])
        await one.until(lambda s: "word1 " in s.text)
        await one.interrupt()
        await one.until(lambda s: 1 in s.interrupts)
        await one.update(1, "new answer", end=True)
        await one.until(lambda s: "new answer" in s.text)
    await freed(served.server)


async def test_companions_and_their_parent_wait_together(serve: Serve) -> None:
    """For one replica with room for all three."""
    served = await serve(guided.guided("group", {"replicas": 2, "max_tasks": 3}))
    fields: dict[str, Any] = {
        "prompt": {
            "text": "a ring",
            "negative_text": guided.listed(("first", "one", {}), ("second", "two", {})),
        }
    }
    hanging = guided.thinking(outputs=2, hang_at=1)
    held = [served.stub.AddRequest(ask("x", stage_params=hanging)) for _ in "ab"]
    await eventually(lambda: running(served.server)["thinker"] == 2)
    group = await queued(served, **fields)
    assert running(served.server)["thinker"] == 2, "none of them has begun"
    held[0].cancel()
    prompt, companions = guided.drawn(await group)
    assert [role for role, _ in companions] == ["first", "second"]
    assert prompt is not None
    held[1].cancel()


async def test_a_group_larger_than_a_replica_gets_one_for_itself(serve: Serve) -> None:
    served = await serve(guided.guided("group", {"max_tasks": 2}))
    negative = guided.listed(("first", "one", {}), ("second", "two", {}))
    prompt = {"text": "a ring", "negative_text": negative}
    drawn = await asyncio.gather(*(collect(served.stub, prompt=prompt) for _ in range(3)))
    assert all(len(guided.drawn(responses)[1]) == 2 for responses in drawn)
