"""Health names say what the pools are; liveness and readiness are different things."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from omni_grpc.health import add_health
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from tests.running import (
    Running,
    ServerProcess,
    health_stub,
    pipeline,
    replicas,
    rest_of,
    serving,
    text_pipeline,
)
from tests.support import TEXT, ask, eventually, refusal, script, texts

Status = health_pb2.HealthCheckResponse
READINESS = ("", "omni_grpc.v1.OmniService", "omni-readiness")
QUICK_RESTART = {"backoff": 0.2, "budget": 5}


async def statuses(running: Running, *names: str) -> dict[str, str]:
    """What Check says of each name."""
    return {name: await running.check(name) for name in names}


class Watched:
    """A Watch stream that is read all the time: what it said, and how it ended."""

    def __init__(self, stub: Any, name: str) -> None:
        self.said: list[str] = []
        self.code: grpc.StatusCode | None = None
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for answer in self._call:
                self.said.append(Status.ServingStatus.Name(answer.status))
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        self.code = await self._call.code()

    async def end(self) -> None:
        """Leaves."""
        self._call.cancel()
        await self._reader


def watch(running: Running, name: str) -> Watched:
    """Watches one name."""
    return Watched(running.health, name)


# ---------------------------------------------------------------- start


async def test_names_are_not_serving_until_every_stage_is_warm() -> None:
    config = pipeline(
        "slow-start",
        {"name": "fast", "output": "text"},
        {"name": "slow", "inputs": ["fast"], "output": "audio"}
        | {"engine_args": {"modality": "audio", "load_s": 1.5}},
    )
    waiting = (*READINESS, "omni-startup", "stage/slow")
    async with serving(config, warm=False) as running:
        first = await statuses(running, *waiting, "stage/fast", "omni-liveness")
        assert first.pop("omni-liveness") == "SERVING"
        assert set(first.values()) == {"NOT_SERVING"}

        fast, slow = watch(running, "stage/fast"), watch(running, "stage/slow")
        warming = asyncio.create_task(running.server.warm())
        await eventually(lambda: fast.said[-1:] == ["SERVING"], 10)
        assert not warming.done()
        assert set((await statuses(running, *waiting)).values()) == {"NOT_SERVING"}

        await warming
        await eventually(lambda: slow.said == ["NOT_SERVING", "SERVING"], 5)
        watched = [watch(running, name) for name in READINESS]
        await eventually(lambda: all(one.said[-1:] == ["SERVING"] for one in watched), 5)
        assert await running.check("omni-startup") == "SERVING"


async def test_unwarmed_server_refuses_with_a_retry() -> None:
    config = text_pipeline("cold", engine_args={"load_s": 60})
    async with serving(config, warm=False) as running:
        warming = asyncio.create_task(running.server.warm())
        error = await refusal(running.omni)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_UNAVAILABLE")
        assert error.pushback_ms
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)


# ---------------------------------------------------------------- names


async def test_check_of_an_unknown_name_is_not_found() -> None:
    async with serving(text_pipeline("names"), warm=False) as running:
        assert await running.check("omni_grpc.v1.Nobody") == "NOT_FOUND"
        assert await running.check("stage/nobody") == "NOT_FOUND"


async def test_watch_of_an_unknown_name_waits_for_it() -> None:
    server = grpc.aio.server()
    servicer = add_health(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watched = Watched(health_stub(channel), "later")
        await eventually(lambda: watched.said == ["SERVICE_UNKNOWN"], 5)
        await servicer.set("later", Status.SERVING)
        await eventually(lambda: watched.said == ["SERVICE_UNKNOWN", "SERVING"], 5)
        await watched.end()
    await server.stop(None)


async def test_watchers_that_leave_do_not_deafen_the_others() -> None:
    async with serving(text_pipeline("watchers")) as running:
        stays, leaves = watch(running, ""), watch(running, "")
        await eventually(lambda: stays.said == leaves.said == ["SERVING"], 5)
        await leaves.end()
        await running.stop(0)
        await eventually(lambda: stays.said == ["SERVING", "NOT_SERVING"], 5)


async def test_two_pipelines_with_one_stage_name_serve_it_when_both_do() -> None:
    first = text_pipeline("first", engine_args={"load_s": 1.0})
    async with serving(first, text_pipeline("second"), warm=False) as running:
        watched = watch(running, "stage/text")
        warming = asyncio.create_task(running.server.warm())
        await eventually(lambda: replicas("second", "text"), 5)
        await warming
        await eventually(lambda: watched.said[-1:] == ["SERVING"], 5)
        assert watched.said == ["NOT_SERVING", "SERVING"]
        (replica,) = replicas("first", "text")
        replica.kill()
        await eventually(lambda: watched.said == ["NOT_SERVING", "SERVING", "NOT_SERVING"], 5)


# ---------------------------------------------------------------- replicas that die


async def test_readiness_falls_with_the_last_replica_and_comes_back() -> None:
    config = pipeline(
        "fragile",
        {"name": "text", "output": "text", "restart": QUICK_RESTART},
        {"name": "more", "inputs": ["text"], "output": "audio"}
        | {"engine_args": {"modality": "audio"}},
    )
    async with serving(config) as running:
        names = (*READINESS, "stage/text", "stage/more", "omni-liveness", "omni-startup")
        watched = {name: watch(running, name) for name in names}
        await eventually(lambda: all(one.said == ["SERVING"] for one in watched.values()), 5)
        (replica,) = replicas("fragile", "text")
        killed = time.monotonic()
        replica.kill()
        falls = [watched[name] for name in (*READINESS, "stage/text")]
        await eventually(lambda: all(one.said[1:2] == ["NOT_SERVING"] for one in falls), 5)
        assert time.monotonic() - killed < 5  # the goal is 1 s
        await eventually(lambda: all(one.said[2:] == ["SERVING"] for one in falls), 10)
        for name in ("stage/more", "omni-liveness", "omni-startup"):
            assert watched[name].said == ["SERVING"]
        assert replicas("fragile", "text") != [replica]


async def test_one_of_two_replicas_is_enough() -> None:
    config = text_pipeline("pair", replicas=2, restart={"backoff": 30})
    async with serving(config) as running:
        watched = watch(running, "omni-readiness")
        await eventually(lambda: watched.said == ["SERVING"], 5)
        replicas("pair", "text")[0].kill()
        await eventually(lambda: running.server.engine.pools[0].ready_replicas == 1, 5)
        assert await running.check("stage/text") == "SERVING"
        responses = [r async for r in running.omni.AddRequest(ask())]
        assert responses[-1].HasField("finished")
        assert watched.said == ["SERVING"]


async def test_liveness_falls_beyond_the_restart_budget() -> None:
    config = text_pipeline("doomed", restart={"backoff": 0.05, "budget": 1})
    async with serving(config) as running:
        watched = watch(running, "omni-liveness")
        (first,) = replicas("doomed", "text")
        first.kill()
        await eventually(lambda: running.server.engine.pools[0].ready_replicas == 0, 5)
        await eventually(lambda: running.server.engine.pools[0].ready_replicas == 1, 10)
        assert watched.said == ["SERVING"]
        (second,) = replicas("doomed", "text")
        assert second.pid != first.pid
        second.kill()
        await eventually(lambda: watched.said == ["SERVING", "NOT_SERVING"], 10)
        assert await running.check("omni-readiness") == "NOT_SERVING"
        assert await running.check("omni-startup") == "SERVING"
        assert replicas("doomed", "text") == []


# ---------------------------------------------------------------- clients with health checking


def health_checking(port: int) -> grpc.aio.Channel:
    """A channel that sends calls only while omni-readiness is SERVING."""
    config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "healthCheckConfig": {"serviceName": "omni-readiness"},
    }
    return grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.service_config", json.dumps(config))]
    )


async def record_states(channel: grpc.aio.Channel, seen: list[str]) -> None:
    """Notes the channel's connectivity, now and at each change, until cancelled."""
    state = channel.get_state(try_to_connect=True)
    while True:
        seen.append(state.name)
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


async def test_health_checking_client_waits_for_warmth_and_survives_a_restart() -> None:
    config = text_pipeline("checked", engine_args={"load_s": 0.5}, restart=QUICK_RESTART)
    async with (
        serving(config, warm=False) as running,
        health_checking(running.server.port) as channel,
    ):
        stub = service_pb2_grpc.OmniServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetServerInfo(service_pb2.GetServerInfoRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        patient = asyncio.create_task(stub.AddRequest(ask(), wait_for_ready=True).read())
        await running.server.warm()
        assert (await patient).HasField("accepted")
        replicas("checked", "text")[0].kill()
        await eventually(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY, 5)
        again = await stub.AddRequest(ask(), wait_for_ready=True, timeout=10).read()
        assert again.HasField("accepted")


async def test_health_checking_client_does_not_flap() -> None:
    seen: list[str] = []

    async with (
        serving(text_pipeline("calm")) as running,
        health_checking(running.server.port) as channel,
    ):
        recorder = asyncio.create_task(record_states(channel, seen))
        # The measured time of the bar: at most three transitions in 8 s.
        await asyncio.sleep(8)
        recorder.cancel()
        await asyncio.gather(recorder, return_exceptions=True)
    assert seen[-1] == "READY"
    assert len(seen) - 1 <= 3, seen


# ---------------------------------------------------------------- drain and load


async def test_drain_makes_unready_ends_watches_and_lets_the_request_finish() -> None:
    async with serving(text_pipeline("drained")) as running:
        watched = {name: watch(running, name) for name in (*READINESS, "omni-liveness")}
        work = script(outputs=8, interval_ms=150)
        call = running.omni.AddRequest(ask(stage_params=[work]))
        await call.read()
        stopping = asyncio.create_task(running.stop())
        await eventually(lambda: all(one.code for one in watched.values()), 5)
        assert not stopping.done()
        assert {one.code for one in watched.values()} == {grpc.StatusCode.OK}
        assert watched["omni-liveness"].said == ["SERVING"]
        for name in READINESS:
            assert watched[name].said == ["SERVING", "NOT_SERVING"]
        assert await running.check("omni-readiness") == "NOT_SERVING"
        assert await running.check("omni-liveness") == "SERVING"
        responses = await rest_of(call)
        assert responses[-1].HasField("finished")
        await asyncio.wait_for(stopping, 5)


async def test_watch_that_begins_while_draining_is_told_so() -> None:
    async with serving(text_pipeline("late-watch")) as running:
        work = script(outputs=1, first_ms=60_000)
        call = running.omni.AddRequest(ask(stage_params=[work]))
        await call.read()
        early = watch(running, "")
        stopping = asyncio.create_task(running.stop())
        await eventually(lambda: early.code, 5)
        late = [watch(running, "") for _ in range(20)]
        await eventually(lambda: all(one.code for one in late), 5)
        assert [one.said for one in late] == [["NOT_SERVING"]] * 20
        call.cancel()
        await asyncio.wait_for(stopping, 5)


async def test_open_watch_does_not_use_up_the_stop_grace() -> None:
    async with serving(text_pipeline("watched-stop")) as running:
        watched = watch(running, "")
        await eventually(lambda: watched.said == ["SERVING"], 5)
        started = time.monotonic()
        await running.stop(0)
        assert time.monotonic() - started < 1.5  # the grace is 2 s


async def test_health_answers_quickly_while_the_server_is_busy() -> None:
    with ServerProcess("echo") as server:
        port = await asyncio.to_thread(server.await_serving)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            health = health_stub(channel)
            work = script(outputs=200, interval_ms=5)
            request = ask(stage_params=[work], output_modalities=[TEXT])

            async def one() -> int:
                return len(texts([r async for r in stub.AddRequest(request)]).split())

            load = [asyncio.create_task(one()) for _ in range(64)]
            times = []
            while not all(task.done() for task in load):
                started = time.monotonic()
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                times.append(time.monotonic() - started)
                assert answer.status == Status.SERVING
                await asyncio.sleep(0.005)
            assert [task.result() for task in load] == [200] * 64
        assert len(times) > 50
        assert sorted(times)[len(times) * 99 // 100] < 0.25  # the goal is 50 ms


async def test_health_is_silent_while_the_loop_is_blocked() -> None:
    config = pipeline(
        "blocked",
        {"name": "text", "output": "text"},
        {"name": "more", "inputs": ["text"], "output": "audio"}
        | {"engine_args": {"modality": "audio"}, "bridge": "tests.example_stages:Sleepy"},
    )
    with ServerProcess(config) as server:
        port = await asyncio.to_thread(server.await_serving)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            health = health_stub(channel)
            request = health_pb2.HealthCheckRequest(service="omni-liveness")
            assert (await health.Check(request, timeout=5)).status == Status.SERVING
            call = stub.AddRequest(ask(stage_params=[script(outputs=3, first_ms=300)]))
            await call.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    await health.Check(request, timeout=0.5)
                    await asyncio.sleep(0.05)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (await rest_of(call))[-1].HasField("finished")
            assert (await health.Check(request, timeout=5)).status == Status.SERVING
