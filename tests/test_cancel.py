"""Whoever leaves, and whenever: within a second no stage holds anything of the request."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import grpc
import psutil
import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.support import (
    AUDIO,
    ROOT,
    TEXT,
    Served,
    ask,
    broken_off,
    client,
    collect,
    echo,
    events,
    eventually,
    freed,
    in_flight,
    refusal,
    rich_error,
    running,
    script,
    started,
    stub_of,
)

S = grpc.StatusCode
ABORTED = service_pb2.AbortResponse.OUTCOME_ABORTED
ALREADY_FINISHED = service_pb2.AbortResponse.OUTCOME_ALREADY_FINISHED
NOT_FOUND = service_pb2.AbortResponse.OUTCOME_NOT_FOUND

LONG = 3_600_000
# What each phase is made of, and which stages hold the request in it.
PHASES: dict[str, tuple[list[Any], dict[str, int]]] = {
    "preprocessing": ([script(prepare_ms=LONG)], {"text": 1, "audio": 0, "image": 0}),
    "prefill": ([script(first_ms=LONG)], {"text": 1, "audio": 0, "image": 0}),
    "decode": (
        [script(outputs=1000, interval_ms=5)],
        {"text": 1, "audio": 1, "image": 1},
    ),
    "hanging": ([script(outputs=3, hang_at=1)], {"text": 1, "audio": 1, "image": 1}),
    "between stages": (
        [script(), script("audio", prepare_ms=LONG), script("image", prepare_ms=LONG)],
        {"text": 0, "audio": 1, "image": 1},
    ),
    "sound": (
        [script(), script("audio", outputs=1000, interval_ms=5)],
        {"text": 0, "audio": 1, "image": 0},
    ),
    "picture": ([script("image", first_ms=LONG)], {"text": 0, "audio": 0, "image": 1}),
}


async def reached(server: Server, holders: dict[str, int]) -> None:
    """Returns when exactly these stages hold a request."""
    await eventually(lambda: running(server) == holders, 5)


async def reading(call: Any) -> None:
    """Reads a call to its end, whatever that is."""
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_frees_every_stage(stub: Any, echo_server: Server, phase: str) -> None:
    scripts, holders = PHASES[phase]
    call = stub.AddRequest(ask(stage_params=scripts))
    reader = asyncio.create_task(reading(call))
    await reached(echo_server, holders)
    call.cancel()
    await freed(echo_server)
    await reader


@pytest.mark.parametrize("phase", PHASES)
async def test_the_clients_deadline_frees_every_stage(
    stub: Any, echo_server: Server, phase: str
) -> None:
    scripts, holders = PHASES[phase]
    call = stub.AddRequest(ask(stage_params=scripts), timeout=0.3)
    reader = asyncio.create_task(reading(call))
    await reached(echo_server, holders)
    await reader
    assert await call.code() is S.DEADLINE_EXCEEDED
    await freed(echo_server)


@pytest.mark.parametrize("phase", PHASES)
async def test_abort_frees_every_stage(stub: Any, echo_server: Server, phase: str) -> None:
    scripts, holders = PHASES[phase]
    failing = asyncio.create_task(refusal(stub, request_id="mine", stage_params=scripts))
    await reached(echo_server, holders)
    answer = await stub.Abort(service_pb2.AbortRequest(request_ids=["mine"]))
    # It answers when all is free, not sooner.
    assert in_flight(echo_server) == 0
    assert [(r.request_id, r.outcome) for r in answer.results] == [("mine", ABORTED)]
    error = await failing
    assert (error.code, error.reason) == (S.CANCELLED, "ABORTED_BY_CLIENT")


async def test_cancel_at_once_frees_every_stage(stub: Any, echo_server: Server) -> None:
    """Before the server has seen anything, or while it does."""
    for pause in (0, 0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.008):
        call = stub.AddRequest(ask())
        await asyncio.sleep(pause)
        call.cancel()
    await freed(echo_server)


async def test_random_cancels_leave_nothing(stub: Any, echo_server: Server) -> None:
    dice = random.Random(4)

    async def one(number: int) -> None:
        scripts = [
            script(outputs=3, interval_ms=dice.choice([0, 2]), prepare_ms=dice.choice([0, 2])),
            script("audio", interval_ms=dice.choice([0, 3])),
        ]
        call = stub.AddRequest(ask(stage_params=scripts))
        reader = asyncio.create_task(reading(call))
        await asyncio.sleep(dice.uniform(0, 0.03))
        call.cancel()
        await reader

    before = len(asyncio.all_tasks())
    for _ in range(6):
        await asyncio.gather(*(one(number) for number in range(50)))
    await freed(echo_server)
    await eventually(lambda: len(asyncio.all_tasks()) <= before + 2)


async def test_a_cancel_disturbs_nobody_else(stub: Any) -> None:
    other = asyncio.create_task(
        collect(stub, stage_params=[script(outputs=50, interval_ms=5)], output_modalities=[TEXT])
    )
    for _ in range(20):
        call = await started(stub, stage_params=[script(outputs=100, interval_ms=1)])
        call.cancel()
    assert events(await other)[-1] == "finished"


CLIENT = """
import grpc, sys
from omni_grpc.v1 import service_pb2, service_pb2_grpc

request = service_pb2.AddRequestRequest(prompt={"text": "hello"})
request.stage_params.add(stage="text").custom.update({"outputs": 100000, "interval_ms": 5})
with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    for _ in service_pb2_grpc.OmniServiceStub(channel).AddRequest(request):
        print("got one", flush=True)
"""


async def test_a_killed_client_frees_every_stage(stub: Any, echo_server: Server) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CLIENT,
        str(echo_server.port),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    for _ in range(3):
        assert await process.stdout.readline() == b"got one\n"
    await eventually(lambda: in_flight(echo_server) == 3)
    process.send_signal(signal.SIGKILL)
    await freed(echo_server)
    await process.wait()


async def test_a_closed_connection_frees_every_stage(stub: Any, echo_server: Server) -> None:
    channel = client(echo_server)
    call = await started(stub_of(channel), stage_params=[script(outputs=3, hang_at=1)])
    await eventually(lambda: in_flight(echo_server) == 3)
    await channel.close()
    await freed(echo_server)
    assert await call.code() is S.CANCELLED


# ---------------------------------------------------------------- a reader that does not read


def blocked_on_write(server: Server) -> Callable[[], bool]:
    """Whether a request's outputs pile up behind a write."""
    queue = server.settings.queue_bytes

    def check() -> bool:
        runs = server.engine.orchestrator.statistics()
        return any(int(str(run["queued_bytes"])) > queue // 2 for run in runs)

    return check


FLOOD = [script(outputs=100_000), script("audio", outputs=100_000, bytes=60_000)]


async def stalled(served: Served, **fields: Any) -> Any:
    """A call whose client has stopped to read, so that the server's write is blocked."""
    call = served.stub.AddRequest(
        ask(stage_params=FLOOD, output_modalities=[AUDIO], **fields), timeout=60
    )
    assert (await anext(aiter(call))).HasField("accepted")
    await eventually(blocked_on_write(served.server), 10)
    return call


async def test_cancel_while_a_write_is_blocked(serve: Serve) -> None:
    served = await serve(echo())
    call = await stalled(served)
    call.cancel()
    await freed(served.server)
    assert (await collect(served.stub))[-1].HasField("finished")


async def test_a_connection_lost_while_a_write_is_blocked(serve: Serve) -> None:
    served = await serve(echo())
    async with client(served.server) as channel:
        call = await stalled(Served(served.server, stub_of(channel), channel))
    await freed(served.server)
    assert call.done()


async def test_abort_while_a_write_is_blocked(serve: Serve) -> None:
    """The stages are free at once; the client learns it when it reads on."""
    served = await serve(echo())
    call = await stalled(served, request_id="slow")
    async with client(served.server) as channel:
        answer = await stub_of(channel).Abort(service_pb2.AbortRequest(request_ids=["slow"]))
    assert [r.outcome for r in answer.results] == [ABORTED]
    # The write waits for the client, and the call with it.
    await freed(served.server, 1, "call")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    assert rich_error(caught.value).reason == "ABORTED_BY_CLIENT"


async def test_the_pipelines_longest_while_a_write_is_blocked(serve: Serve) -> None:
    served = await serve(echo({"max_duration": 2}))
    call = await stalled(served)
    await eventually(lambda: not served.server.engine.orchestrator.statistics(), 5)
    # The write waits for the client, and the call with it.
    await freed(served.server, 1, "call")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    assert rich_error(caught.value).reason == "DEADLINE"


# ---------------------------------------------------------------- abort


async def test_abort_gives_one_outcome_per_id(stub: Any) -> None:
    await collect(stub, request_id="finished")
    failed = await refusal(stub, request_id="failed", stage_params=[script(fail_at=0)])
    assert failed.code is S.INTERNAL
    ids = ["nobody", "runs", "finished", "failed", "runs"]
    call = await started(stub, request_id="runs", stage_params=[script(hang_at=1)])
    answer = await stub.Abort(service_pb2.AbortRequest(request_ids=ids))
    assert [r.request_id for r in answer.results] == ids
    assert [r.outcome for r in answer.results] == [
        NOT_FOUND,
        ABORTED,
        ALREADY_FINISHED,
        ALREADY_FINISHED,
        ALREADY_FINISHED,
    ]
    await reading(call)


async def test_abort_is_idempotent(stub: Any) -> None:
    call = await started(stub, request_id="twice", stage_params=[script(hang_at=1)])
    request = service_pb2.AbortRequest(request_ids=["twice"])
    outcomes = [(await stub.Abort(request)).results[0].outcome for _ in range(3)]
    assert outcomes == [ABORTED, ALREADY_FINISHED, ALREADY_FINISHED]
    await reading(call)


async def test_an_aborted_id_can_be_used_at_once(stub: Any) -> None:
    call = await started(stub, request_id="reused", stage_params=[script(hang_at=1)])
    await stub.Abort(service_pb2.AbortRequest(request_ids=["reused"]))
    assert (await collect(stub, request_id="reused"))[-1].HasField("finished")
    await reading(call)


async def test_an_id_is_in_flight_until_its_client_has_everything(serve: Serve) -> None:
    """Stages that are done do not end a request: its outputs are still on the way."""
    served = await serve(echo(), queue_bytes=32 << 20)
    # 20 MiB: the stages can finish, the transport cannot hold it.
    scripts = [script("audio", outputs=400, bytes=52_428)]
    fields: dict[str, Any] = {"request_id": "late", "output_modalities": [AUDIO]}
    call = served.stub.AddRequest(ask(stage_params=scripts, **fields), timeout=60)
    assert (await anext(aiter(call))).HasField("accepted")
    await eventually(lambda: in_flight(served.server) == 0, 15)
    async with client(served.server) as channel:
        other = stub_of(channel)
        error = await refusal(other, **fields)
        assert error.reason == "DUPLICATE_REQUEST"
        answer = await other.Abort(service_pb2.AbortRequest(request_ids=["late"]))
        assert [r.outcome for r in answer.results] == [ABORTED]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    assert rich_error(caught.value).reason == "ABORTED_BY_CLIENT"


# ---------------------------------------------------------------- lost replicas


async def test_a_replica_lost_before_any_output(serve: Serve) -> None:
    served = await serve(echo(restart={"backoff": 0.1}))
    for scripts in ([script(die_at=0)], [script(first_ms=50, die_at=0)]):
        responses, error = await broken_off(served.stub, stage_params=scripts)
        assert "output" not in events(responses)
        assert (error.code, error.reason) == (S.UNAVAILABLE, "STAGE_UNAVAILABLE")
        assert error.retry == 0.1 and error.pushback_ms == 100
        await eventually(served_again(served, "text"), 10)


async def test_a_replica_lost_after_outputs_began(serve: Serve) -> None:
    served = await serve(echo(restart={"backoff": 0.1}))
    responses, error = await broken_off(
        served.stub, stage_params=[script(outputs=5, interval_ms=30, die_at=2)]
    )
    assert "output" in events(responses)
    assert (error.code, error.reason) == (S.ABORTED, "REPLICA_LOST")
    assert error.retry is None and error.pushback_ms is None
    await freed(served.server)


async def test_a_later_replica_lost(serve: Serve) -> None:
    served = await serve(echo(restart={"backoff": 0.1}))
    for stage, wanted, reason in (
        ("audio", [TEXT, AUDIO], "REPLICA_LOST"),
        ("image", [3], "STAGE_UNAVAILABLE"),
    ):
        scripts = [script(outputs=2, interval_ms=20), script(stage, die_at=0)]
        error = await refusal(served.stub, stage_params=scripts, output_modalities=wanted)
        assert error.reason == reason
        await freed(served.server)


def served_again(served: Served, stage: str, replicas: int = 1) -> Callable[[], bool]:
    """Whether all replicas of a stage serve."""
    pools = {pool.config.name: pool for pool in served.server.engine.pools}
    return lambda: pools[stage].ready_replicas == replicas


async def test_a_lost_replica_ends_only_its_own(serve: Serve) -> None:
    served = await serve(echo(replicas=2, restart={"backoff": 0.1}))
    slow = [script(outputs=20, interval_ms=30)]
    # Two replicas: the first and the third request meet, the second is elsewhere.
    first = await started(served.stub, stage_params=slow)
    second = await started(served.stub, stage_params=slow)
    third = await refusal(served.stub, stage_params=[script(outputs=5, interval_ms=20, die_at=1)])
    assert third.reason == "REPLICA_LOST"
    survivors, lost = [], []
    for call in (first, second):
        try:
            survivors.append([r async for r in call][-1].WhichOneof("event"))
        except grpc.aio.AioRpcError as error:
            lost.append(rich_error(error).reason)
    assert survivors == ["finished"]
    assert lost == ["REPLICA_LOST"]


async def test_a_lost_replica_comes_back_and_serves(serve: Serve) -> None:
    served = await serve(echo(restart={"backoff": 0.1}))
    pool = {p.config.name: p for p in served.server.engine.pools}["text"]
    for deaths in (1, 2):
        await refusal(served.stub, stage_params=[script(die_at=0)])
        await eventually(served_again(served, "text"), 10)
        assert pool.statistics()[0].restarts == deaths
        assert (await collect(served.stub))[-1].HasField("finished")


async def test_with_a_replica_left_requests_go_on(serve: Serve) -> None:
    served = await serve(echo({"retry": False}, replicas=2, restart={"backoff": 3600}))
    await refusal(served.stub, stage_params=[script(die_at=0)])
    for _ in range(10):
        assert (await collect(served.stub))[-1].HasField("finished")
    assert not served_again(served, "text", 2)()


def newest_replica(stage: str) -> psutil.Process:
    """The process of the replica of that stage that was started last."""
    # Its address, the last argument, names pipeline, stage and number.
    processes = [
        process
        for process in psutil.Process().children()
        if f"/echo-{stage}-" in "".join(process.cmdline()[-1:])
    ]
    return max(processes, key=lambda process: process.create_time())


async def test_a_replica_killed_from_outside(serve: Serve) -> None:
    """As the kernel does when memory runs out."""
    served = await serve(echo(restart={"backoff": 0.1}))
    call = await started(served.stub, stage_params=[script(outputs=3, hang_at=1)])
    newest_replica("audio").kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    assert rich_error(caught.value).reason == "REPLICA_LOST"
    await freed(served.server)
    await eventually(served_again(served, "audio"), 10)
