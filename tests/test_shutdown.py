"""However the server ends, running requests are answered for and no process is left."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.config import PipelineConfig
from omni_grpc.v1 import service_pb2_grpc
from tests.running import (
    ServerProcess,
    alive,
    pipeline,
    replicas,
    rest_of,
    serving,
    text_pipeline,
    wait_until,
)
from tests.support import (
    TEXT,
    ask,
    broken_off,
    client,
    collect,
    eventually,
    in_flight,
    refusal,
    rich_error,
    script,
    stub_of,
    texts,
)

SLOW = script(outputs=10, interval_ms=150)
ENDLESS = script(outputs=1000, interval_ms=100)


def python_stage(name: str, stage: str, **fields: Any) -> PipelineConfig:
    """A pipeline of one of the example stages."""
    return text_pipeline(name, engine="python", model=f"tests.example_stages:{stage}", **fields)


@asynccontextmanager
async def calling(server: ServerProcess) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server process that serves."""
    port = await asyncio.to_thread(server.await_serving)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel


async def exit_status(server: ServerProcess, seconds: float = 15) -> int:
    """Waits for the server's end."""
    return await asyncio.to_thread(server.await_exit, seconds)


def check_nothing_is_left(server: ServerProcess) -> None:
    """Neither replicas nor watchers nor files."""
    wait_until(lambda: not server.family(), 5, "processes are left")
    assert list(server.folder.iterdir()) == []


# ---------------------------------------------------------------- SIGTERM under load


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
async def test_signal_under_load_loses_no_running_request(number: int) -> None:
    with ServerProcess("echo") as server:
        async with calling(server) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            health: Any = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            request = ask(stage_params=[SLOW], output_modalities=[TEXT])
            calls = [stub.AddRequest(request) for _ in range(20)]
            for call in calls:
                await call.read()
            signalled = time.monotonic()
            server.process.send_signal(number)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            error = await refusal(stub)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert error.pushback_ms and error.retry
            assert await watch.read() is grpc.aio.EOF
            answers = await asyncio.gather(*(rest_of(call) for call in calls))
        assert all(len(texts(answer).split()) == 10 for answer in answers)
        assert all(answer[-1].HasField("finished") for answer in answers)
        assert await exit_status(server) == 0
        # Well within the grace of 30 s: it waits for nothing but the requests.
        assert time.monotonic() - signalled < 10
        check_nothing_is_left(server)
        assert "Traceback" not in server.log


async def test_after_the_end_connections_are_refused() -> None:
    with ServerProcess("echo") as server:
        async with calling(server) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            await collect(stub)
            server.process.terminate()
            assert await exit_status(server) == 0
            error = await refusal(stub)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "")


async def test_request_beyond_the_drain_timeout_is_told_draining() -> None:
    with ServerProcess("echo", arguments=("--port", "0", "--drain-timeout", "1")) as server:
        async with calling(server) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            call = stub.AddRequest(ask(stage_params=[ENDLESS]))
            await call.read()
            signalled = time.monotonic()
            server.process.terminate()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest_of(call)
            assert 1 <= time.monotonic() - signalled < 5
            error = rich_error(caught.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert await exit_status(server) == 0
        check_nothing_is_left(server)


async def test_second_signal_while_draining_changes_nothing() -> None:
    with ServerProcess("echo") as server:
        async with calling(server) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            call = stub.AddRequest(ask(stage_params=[SLOW], output_modalities=[TEXT]))
            await call.read()
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                server.process.send_signal(number)
                assert (await refusal(stub)).reason == "DRAINING"
            answer = await rest_of(call)
        assert answer[-1].HasField("finished")
        assert await exit_status(server) == 0
        check_nothing_is_left(server)


async def test_client_that_reads_slowly_gets_all_before_the_end() -> None:
    """The stages are done long before the client has read what they made."""
    async with (
        serving(text_pipeline("slow-reader"), queue_bytes=32 << 20) as running,
        # Its window stays small, so most of the answer waits in the server.
        client(running.server, ("grpc.http2.bdp_probe", 0)) as channel,
    ):
        work = script(outputs=60, bytes=1 << 16)
        call = stub_of(channel).AddRequest(ask(stage_params=[work]))
        await call.read()
        await eventually(lambda: not in_flight(running.server), 10)
        stopping = asyncio.create_task(running.stop())
        # Longer than the grace of gRPC itself, shorter than write_timeout and drain_timeout.
        await asyncio.sleep(3)
        assert len(texts(await rest_of(call))) == 60 << 16
        await asyncio.wait_for(stopping, 5)


async def test_requests_are_taken_until_the_drain_delay_is_over() -> None:
    """As long as a balancer needs to see NOT_SERVING."""
    async with serving(text_pipeline("delayed"), drain_delay=2.0) as running:
        held = running.omni.AddRequest(ask(stage_params=[script(outputs=60, interval_ms=100)]))
        await held.read()
        began = time.monotonic()
        stopping = asyncio.create_task(running.stop())
        await asyncio.sleep(0)
        assert await running.check("omni-readiness") == "NOT_SERVING"
        while time.monotonic() < began + 1:
            assert texts(await collect(running.omni, ask("still here"))) == "still here"
        await asyncio.sleep(1.2)
        assert (await refusal(running.omni)).reason == "DRAINING"
        assert (await rest_of(held))[-1].HasField("finished")
        await asyncio.wait_for(stopping, 5)


async def test_server_that_never_served_has_no_drain_delay() -> None:
    async with serving(text_pipeline("cold"), warm=False, drain_delay=60.0) as running:
        await asyncio.wait_for(running.stop(), 5)


async def test_calls_that_come_while_it_stops_are_refused_not_cancelled() -> None:
    """CANCELLED is what gRPC makes of them by itself; a client's retry policy stops at that."""
    with ServerProcess("echo") as server:
        async with calling(server) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)

            async def until_refused() -> grpc.StatusCode:
                while True:
                    call = stub.AddRequest(ask("a b", output_modalities=[TEXT]), timeout=20)
                    try:
                        await rest_of(call)
                    except grpc.aio.AioRpcError as error:
                        return error.code()

            callers = [asyncio.create_task(until_refused()) for _ in range(32)]
            await asyncio.sleep(0.5)
            server.process.terminate()
            assert set(await asyncio.gather(*callers)) == {grpc.StatusCode.UNAVAILABLE}
        assert await exit_status(server) == 0


async def test_replica_that_does_not_close_is_killed() -> None:
    async with serving(python_stage("slow-close", "SlowClose"), stop_timeout=1.0) as running:
        (replica,) = replicas("slow-close", "text")
        started = time.monotonic()
        await running.stop(0)
        assert 1 <= time.monotonic() - started < 5
        assert not alive(replica)


# ---------------------------------------------------------------- while loading


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
@pytest.mark.parametrize(
    "config",
    [
        text_pipeline("slow-load", engine_args={"load_s": 1000}),
        python_stage("blocked-load", "BlockedLoad"),
    ],
    ids=lambda config: config.name,
)
def test_signal_while_loading_ends_at_once(number: int, config: PipelineConfig) -> None:
    with ServerProcess(config) as server:
        server.await_port()
        # The replica and its watcher stand.
        wait_until(lambda: len(server.family()) == 2, 10)
        started = time.monotonic()
        assert server.end(number) == 0
        assert time.monotonic() - started < 5
        check_nothing_is_left(server)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("tests.nothing_here:Stage", "No module named 'tests.nothing_here'"),
        ("tests.example_stages:Nobody", "has no attribute 'Nobody'"),
        ("tests.example_stages:NotAStage", "tests.example_stages:NotAStage is not a Stage"),
        ("tests.example_stages:Unloadable", "weights.bin is not where it should be"),
    ],
)
def test_stage_that_does_not_load_ends_the_server_with_the_cause(model: str, cause: str) -> None:
    config = pipeline(
        "broken",
        {"name": "text", "output": "text"},
        {"name": "bad", "engine": "python", "model": model}
        | {"inputs": ["text"], "output": "audio", "replicas": 2},
    )
    with ServerProcess(config) as server:
        assert server.await_exit() == 2
        last = server.log[server.log.index("omni-grpc: ") :]
        assert "stage bad/" in last
        assert cause in last
        # Its own traceback is not buried under one of the server.
        assert last.count("Traceback") <= 1
        check_nothing_is_left(server)


def test_stage_that_loads_too_long_ends_the_server() -> None:
    config = text_pipeline("too-long", engine_args={"load_s": 60}, start_timeout=0.5)
    with ServerProcess(config) as server:
        assert server.await_exit() == 2
        assert "stage text/0: not ready within 0.5 s" in server.log
        check_nothing_is_left(server)


# ---------------------------------------------------------------- SIGKILL


async def test_killed_server_leaves_no_process() -> None:
    config = pipeline(
        "orphans",
        {"name": "text", "output": "text"},
        {"name": "more", "engine": "python", "model": "tests.example_stages:Parent"}
        | {"inputs": ["text"], "output": "audio", "replicas": 2},
    )
    with ServerProcess(config) as server:
        async with calling(server) as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            call = stub.AddRequest(ask(stage_params=[ENDLESS]))
            await call.read()
            children = psutil.Process(server.pid).children(recursive=True)
            # Three replicas with a watcher each, and two shells with a sleep each.
            assert len(children) == 10
            server.process.kill()
            await eventually(lambda: not any(alive(child) for child in children), 5)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest_of(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_server_killed_while_loading_leaves_no_process() -> None:
    with ServerProcess(python_stage("orphan-load", "BlockedLoad")) as server:
        server.await_log("loading for long")
        assert len(server.family()) == 2
        server.process.kill()
        wait_until(lambda: not server.family(), 5)


async def test_killed_replica_takes_its_grandchildren_along() -> None:
    async with serving(python_stage("family", "Parent", restart={"backoff": 0.1})) as running:
        started = json.loads(texts(await collect(running.omni)))
        below = [psutil.Process(pid) for pid in started]
        assert all(alive(process) for process in below)
        (replica,) = replicas("family", "text")
        replica.kill()
        await eventually(lambda: not any(alive(process) for process in below), 5)
        await eventually(lambda: running.server.engine.pools[0].ready_replicas, 10)
        again = json.loads(texts(await collect(running.omni)))
        assert not set(again) & set(started)


@pytest.mark.parametrize("victim", ["server", "replica", "nobody"])
async def test_shared_memory_of_a_replica_goes_with_it(victim: str) -> None:
    with ServerProcess(python_stage("sharing", "Sharing")) as server:
        async with calling(server) as channel:
            names = json.loads(texts(await collect(stub_of(channel))))
        files = [Path("/dev/shm") / name.lstrip("/") for name in names]
        assert len(files) == 2 and all(file.exists() for file in files)
        match victim:
            case "server":
                server.process.kill()
            case "replica":
                replicas("sharing", "text", server.pid)[0].kill()
            case "nobody":
                assert await asyncio.to_thread(server.end) == 0
        await eventually(lambda: not any(file.exists() for file in files), 10)


async def test_killed_watcher_does_not_end_its_replica() -> None:
    async with serving(text_pipeline("unwatched")) as running:
        (replica,) = replicas("unwatched", "text")
        (watcher,) = replica.children()
        watcher.kill()
        assert (await collect(running.omni))[-1].HasField("finished")
        assert alive(replica)


# ---------------------------------------------------------------- SIGSTOP


async def test_stuck_replica_is_killed_and_replaced() -> None:
    config = text_pipeline("stuck", restart={"backoff": 0.1})
    async with serving(config, heartbeat_timeout=2.0) as running:
        (replica,) = replicas("stuck", "text")
        began = running.omni.AddRequest(ask(stage_params=[ENDLESS]))
        for _ in range(3):
            await began.read()  # accepted, and two outputs
        replica.suspend()
        before = asyncio.create_task(broken_off(running.omni))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(began)
        lost = rich_error(caught.value)
        assert (lost.code, lost.reason) == (grpc.StatusCode.ABORTED, "REPLICA_LOST")
        seen, error = await before
        assert seen == []
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_UNAVAILABLE")
        assert error.pushback_ms is not None
        assert not alive(replica)
        await eventually(lambda: running.server.engine.pools[0].ready_replicas, 10)
        assert (await collect(running.omni))[-1].HasField("finished")


async def test_server_that_stood_still_keeps_its_replicas() -> None:
    """A paused container, or a blocked loop: no replica was stuck."""
    async with serving(text_pipeline("paused", replicas=4), heartbeat_timeout=2.0) as running:
        before = replicas("paused", "text")
        time.sleep(2.6)  # noqa: ASYNC251 - blocks the server's event loop, as SIGSTOP does
        await asyncio.sleep(0.6)  # its watch comes by every 0.5 s
        assert [alive(replica) for replica in before] == [True] * 4
        assert (await collect(running.omni))[-1].HasField("finished")
