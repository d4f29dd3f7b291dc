"""An operator's calls: on their own listener, per stage or replica, each replica reported apart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from omni_grpc.v1 import admin_pb2, admin_pb2_grpc, service_pb2
from tests.conftest import Serve
from tests.support import (
    Served,
    collect,
    echo,
    eventually,
    refusal,
    rich_error,
    script,
    started,
    texts,
)

TARGET = {"stage": "text"}


@pytest.fixture
async def served(serve: Serve) -> Served:
    """Two replicas a stage, with an admin listener; control calls fail on replica 1."""
    content = echo().model_dump()
    for stage in content["stages"]:
        stage |= {"replicas": 2}
        stage["engine_args"] |= {"control_fails_on": [1]}
    return await serve(type(echo()).model_validate(content), admin_port=0)


@pytest.fixture
async def admin(served: Served) -> AsyncIterator[Any]:
    """A stub of AdminService."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.server.admin_port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def codes(response: Any) -> dict[int, int]:
    """The status code of each replica."""
    return {result.replica: result.status.code for result in response.results}


async def test_a_paused_stage_refuses_and_what_runs_goes_on(served: Served, admin: Any) -> None:
    running = await started(served.stub, stage_params=[script(outputs=4, interval_ms=50)])
    assert codes(await admin.PauseStage(admin_pb2.PauseStageRequest(target=TARGET))) == {0: 0, 1: 0}
    error = await refusal(served.stub)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_UNAVAILABLE")
    assert "paused" in error.message and error.retry
    rest = [response async for response in running]
    assert rest[-1].HasField("finished")
    await admin.ResumeStage(admin_pb2.ResumeStageRequest(target=TARGET))
    assert texts(await collect(served.stub, text="again")) == "again"


async def test_one_paused_replica_gets_no_work(served: Served, admin: Any) -> None:
    target = {"stage": "echo/text", "replicas": [0]}
    await admin.PauseStage(admin_pb2.PauseStageRequest(target=target))
    calls = [await started(served.stub, stage_params=[script(outputs=2, hang_at=1)]) for _ in "abc"]
    assert await running_in(served, "text") == [0, 3]
    for call in calls:
        call.cancel()
    await eventually(lambda: not served.server.engine.orchestrator.statistics())


async def test_a_replica_that_fails_is_reported_apart(served: Served, admin: Any) -> None:
    response = await admin.ResetCache(admin_pb2.ResetCacheRequest(target=TARGET))
    assert codes(response) == {0: 0, 1: grpc.StatusCode.INTERNAL.value[0]}
    assert response.results[1].status.reason == "STAGE_ERROR"
    assert "script" not in response.results[1].status.message


async def test_a_replica_that_cannot_sleep_takes_work_as_before(served: Served, admin: Any) -> None:
    slept = await admin.SleepStage(admin_pb2.SleepStageRequest(target=TARGET))
    assert codes(slept) == {0: 0, 1: grpc.StatusCode.INTERNAL.value[0]}
    calls = [await started(served.stub, stage_params=[script(outputs=2, hang_at=1)]) for _ in "ab"]
    assert await running_in(served, "text") == [0, 2]
    one = {"stage": "text", "replicas": [1]}
    await admin.PauseStage(admin_pb2.PauseStageRequest(target=one))
    assert (await refusal(served.stub)).reason == "STAGE_UNAVAILABLE"
    woken = await admin.WakeStage(admin_pb2.WakeStageRequest(target=TARGET))
    assert codes(woken) == {0: 0, 1: grpc.StatusCode.INTERNAL.value[0]}
    # Replica 1 did not wake, and stays as it was: paused.
    assert texts(await collect(served.stub, text="awake")) == "awake"
    assert await running_in(served, "text") == [0, 2]
    for call in calls:
        call.cancel()


async def test_what_runs_finishes_before_a_stage_sleeps(served: Served, admin: Any) -> None:
    await admin.PauseStage(admin_pb2.PauseStageRequest(target={"stage": "text", "replicas": [1]}))
    running = await started(served.stub, stage_params=[script(outputs=4, interval_ms=50)])
    target = {"stage": "text", "replicas": [0]}
    sleeping = admin.SleepStage(admin_pb2.SleepStageRequest(target=target))
    rest = [response async for response in running]
    assert rest[-1].HasField("finished")
    assert codes(await sleeping) == {0: 0}


async def running_in(served: Served, name: str) -> list[int]:
    """Tasks that each replica of the stage holds."""
    load = await served.stub.GetLoad(service_pb2.GetLoadRequest())
    (stage,) = [stage for stage in load.stages if stage.stage == name]
    return [replica.running for replica in stage.replicas]


async def test_an_engine_without_adapters_says_so(served: Served, admin: Any) -> None:
    request = admin_pb2.LoadLoraRequest(target=TARGET, name="odd", path="/nowhere")
    response = await admin.LoadLora(request)
    assert {result.status.reason for result in response.results} == {"NOT_SUPPORTED"}


BAD = [
    ("PauseStage", {"target": {}}, "target.stage"),
    ("PauseStage", {"target": {"stage": "nobody"}}, "target.stage"),
    ("ResumeStage", {"target": {"stage": "text", "replicas": [0, 7]}}, "target.replicas[1]"),
    ("SleepStage", {"target": TARGET, "level": 3}, "level"),
    ("LoadLora", {"target": TARGET, "path": "/x"}, "name"),
    ("LoadLora", {"target": TARGET, "name": "x"}, "path"),
    ("UnloadLora", {"target": TARGET, "name": "x"}, "name"),
    ("Drain", {"timeout": "-1s"}, "timeout"),
]


@pytest.mark.parametrize(("method", "fields", "path"), BAD)
async def test_bad_calls_name_the_field(
    admin: Any, method: str, fields: dict[str, Any], path: str
) -> None:
    if method == "Drain":
        request = admin_pb2.DrainRequest()
        request.timeout.FromJsonString("-1s")
    else:
        request = getattr(admin_pb2, f"{method}Request")(**fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(admin, method)(request)
    error = rich_error(caught.value)
    assert (error.reason, list(error.violations)) == ("INVALID_FIELD", [path])


async def test_drain_lets_what_runs_finish(served: Served, admin: Any) -> None:
    running = await started(served.stub, stage_params=[script(outputs=4, interval_ms=50)])
    assert (await admin.Drain(admin_pb2.DrainRequest())).running == 1
    assert (await refusal(served.stub)).reason == "DRAINING"
    rest = [response async for response in running]
    assert rest[-1].HasField("finished")


async def test_the_service_is_off_by_default(serve: Serve) -> None:
    served = await serve(echo())
    assert served.server.admin_port == 0
    stub = admin_pb2_grpc.AdminServiceStub(served.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.PauseStage(admin_pb2.PauseStageRequest(target=TARGET))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_census_lists_what_a_request_holds(served: Served, admin: Any) -> None:
    request = admin_pb2.GetCensusRequest()
    before = await admin.GetCensus(request)
    assert not before.holdings
    assert before.standing["replica processes"] == 6
    call = await started(
        served.stub, request_id="held", stage_params=[script(outputs=2, hang_at=1)]
    )
    holdings = (await admin.GetCensus(request)).holdings
    assert {one.request_id for one in holdings} == {"held", ""}
    assert {one.kind for one in holdings if one.request_id} == {"request", "task"}
    assert any(one.detail.startswith("replica text/") for one in holdings)
    others = {(one.kind, one.detail) for one in holdings if not one.request_id}
    assert {("budget", "1 requests"), ("call", "1 AddRequest")} <= others
    call.cancel()
    await eventually(lambda: not served.server.holdings())
    after = await admin.GetCensus(request)
    assert not after.holdings
    assert after.standing["replica processes"] == 6
    assert after.standing["asyncio tasks"] == before.standing["asyncio tasks"]
