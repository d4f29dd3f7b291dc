"""Servers behind HAProxy, as docs/load-balancing.md shows it: they are restarted and killed under
load, calls about one request meet, and sessions move on."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import hpack
import pytest
from grpc_health.v1 import health_pb2
from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame

from omni_grpc.health import READINESS
from omni_grpc.v1 import service_pb2
from omni_grpc_client import AbortOutcome, Finished, OmniClient
from omni_grpc_client.errors import decode_error
from tests.balanced import PODS, Farm, balancing, block, channel, hashed, require_haproxy, where
from tests.load import WORKERS, Load, Report
from tests.running import rest_of
from tests.sessions import Session, talk
from tests.streaming import new_id, opened
from tests.support import (
    RichError,
    ask,
    collect,
    rich_error,
    script,
    started,
    stub_of,
    texts,
)

# Three servers start, and some start again: a busy machine takes long.
pytestmark = pytest.mark.timeout(120)

BROKEN_OFF = (("UNAVAILABLE", ""), ("UNKNOWN", ""))
"""Code and reason of a call whose server is gone: of a response that breaks off HAProxy makes one
that ends without a status, which gRPC calls UNKNOWN."""


@pytest.fixture(scope="module")
def running_farm() -> Iterator[Farm]:
    """Three servers and the balancer."""
    require_haproxy()
    with Farm() as farm:
        yield farm


@pytest.fixture
def farm(running_farm: Farm) -> Farm:
    """The same, all up whatever the test before did to them."""
    running_farm.heal()
    return running_farm


def show(title: str, report: Report, **more: object) -> None:
    """Prints the figures; pytest -s shows them."""
    failed = Counter((failure.kind, failure.code) for failure in report.failures)
    print(f"\n{title}: done {report.done}, slowest {report.slowest}, failed {dict(failed)}, {more}")


# ---------------------------------------------------------------- restarts


@pytest.mark.slow
def test_rolling_restart_under_load_fails_no_call(farm: Farm) -> None:
    with Load(farm.port) as load:
        time.sleep(1)
        for pod in PODS:
            farm.end(pod)
            farm.launch(pod)
            farm.await_serving(pod)
        time.sleep(1)
    report = load.report
    show("rolling restart", report, refused=farm.refusals(), told_to_go=report.told_to_go)
    assert report.failures == []
    # By no luck of a retry: the balancer had gone elsewhere before anything was refused.
    assert farm.refusals() == 0
    assert report.pods == sorted(PODS)
    assert report.told_to_go > 0
    least = {"short": 100, "long": 20, "session": 8, "fed": 20, "aborted": 20}
    assert all(report.done[kind] >= count for kind, count in least.items()), report.done


def test_refused_call_is_retried_on_another_server(farm: Farm) -> None:
    """A server that drains at once refuses what still comes; the retry policy takes it on."""
    farm.kill(PODS[0])
    farm.launch(PODS[0], drain_delay=0)
    farm.heal()

    async def calls() -> list[str]:
        async with channel(farm.port) as to_all, channel(farm.ports[PODS[0]]) as to_one:
            work = script(outputs=15, interval_ms=100)
            holding = await started(stub_of(to_one), stage_params=[work])
            farm.servers[PODS[0]].process.send_signal(signal.SIGTERM)
            asked = [new_id("word") for _ in range(60)]
            answers = await asyncio.gather(*(collect(stub_of(to_all), ask(one)) for one in asked))
            assert [texts(answer) for answer in answers] == asked
            # Read with `async for` so far.
            return [response.WhichOneof("event") or "" async for response in holding]

    before = farm.refusals()
    assert asyncio.run(calls())[-1] == "finished"
    assert farm.refusals() > before
    assert farm.servers[PODS[0]].await_exit(10) == 0


def test_killed_server_costs_only_calls_that_had_begun(farm: Farm) -> None:
    async def kill_under_a_call() -> RichError:
        async with channel(farm.port) as to_all:
            endless = script(outputs=1000, interval_ms=50)
            while (
                await pod_of(call := await started(stub_of(to_all), stage_params=[endless]))
                != (PODS[1])
            ):
                call.cancel()
            farm.kill(PODS[1])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            return rich_error(caught.value)

    with Load(farm.port, "short", "long", "info", "health") as load:
        time.sleep(1)
        error = asyncio.run(kill_under_a_call())
        time.sleep(1.5)
    report = load.report
    show("a server killed", report)
    assert (error.code.name, error.reason) in BROKEN_OFF
    for failure in report.failures:
        assert failure.kind in ("short", "long") and failure.begun, failure
        assert (failure.code, failure.reason) in BROKEN_OFF, failure
    # No more than that server can have held.
    assert len(report.failures) <= WORKERS["short"] + WORKERS["long"]
    assert report.done["short"] > 50 and report.done["long"] > 3


async def test_client_that_balances_by_itself_leaves_a_server_that_stops(farm: Farm) -> None:
    before = farm.refusals()
    async with balancing(farm.ports.values()) as to_all:

        async def answering() -> str:
            call = stub_of(to_all).AddRequest(ask("a b"), timeout=10)
            assert texts(await rest_of(call)) == "a b"
            return await pod_of(call)

        async with asyncio.timeout(10):
            seen: set[str] = set()
            while seen != set(PODS):
                seen.add(await answering())
        ending = asyncio.create_task(asyncio.to_thread(farm.end, PODS[0]))
        last = ""
        while not ending.done():
            last = await answering()
        await ending
    assert farm.refusals() == before
    assert last in PODS[1:]


# ---------------------------------------------------------------- calls about one request


async def test_calls_about_one_request_meet_on_one_server(farm: Farm) -> None:
    """AddRequest, StreamingUpdate and Abort, each on a connection of its own."""
    async with AsyncExitStack() as stack:
        one, two, three = [
            stub_of(await stack.enter_async_context(channel(farm.port))) for _ in range(3)
        ]
        pods = set()
        for number in range(12):
            request_id = new_id("meet")
            metadata = hashed(request_id)
            request = service_pb2.AddRequestRequest(request_id=request_id, resumable=True)
            call = one.AddRequest(request, metadata=metadata, timeout=10)
            pods.add(await pod_of(call))
            if number % 2:
                feeding = two.StreamingUpdate(metadata=metadata, timeout=10)
                await feed(feeding, request_id, "hello")
                assert (await feeding).accepted_chunks == 1
                assert texts(await rest_of(call)) == "hello"
            else:
                abort = service_pb2.AbortRequest(request_ids=[request_id])
                answer = await three.Abort(abort, metadata=metadata, timeout=10)
                outcome = answer.results[0].outcome
                assert outcome == service_pb2.AbortResponse.OUTCOME_ABORTED
    # They met, and not because all went to one.
    assert pods == set(PODS)


async def feed(call: Any, request_id: str, text: str) -> None:
    """Writes a header, a chunk and the half-close."""
    update = service_pb2.StreamingUpdateRequest
    await call.write(update(header={"request_id": request_id}))
    await call.write(update(chunk={"text": text}))
    await call.done_writing()


async def test_calls_of_the_python_client_meet_too(farm: Farm) -> None:
    target = f"127.0.0.1:{farm.port}"
    async with OmniClient(target) as one, OmniClient(target) as two:
        for _ in range(6):
            request_id = new_id("client")
            async with one.open(request_id=request_id) as request:
                async with two.feed(request_id) as feeder:
                    await feeder.send("hello")
                    await feeder.finish()
                assert isinstance([event async for event in request][-1], Finished)
            request_id = new_id("client")
            async with one.open(request_id=request_id):
                assert await two.abort(request_id) == {request_id: AbortOutcome.ABORTED}


async def pod_of(call: Any) -> str:
    """The server that accepted a call."""
    return str(dict(await call.initial_metadata())["omni-pod"])


async def test_call_that_lands_elsewhere_is_not_found_and_can_follow(farm: Farm) -> None:
    async with channel(farm.port) as to_all:
        stub = stub_of(to_all)
        async with opened(stub, new_id("lost")) as request:
            pod = await pod_of(request.call)
            other = next(name for name in PODS if name != pod)
            elsewhere = (("omni-pod", other),)
            abort = service_pb2.AbortRequest(request_ids=[request.id])
            call = stub.Abort(abort, metadata=elsewhere)
            assert (await call).results[0].outcome == service_pb2.AbortResponse.OUTCOME_NOT_FOUND
            assert dict(await call.trailing_metadata())["omni-pod"] == other

            feeding = stub.StreamingUpdate(metadata=elsewhere, timeout=10)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await feed(feeding, request.id, "hello")
                await feeding
            failure = decode_error(caught.value)
            assert (failure.code, failure.reason) == ("NOT_FOUND", "REQUEST_NOT_FOUND")
            # Not the one that said `accepted`: so the request is not gone, but the call astray.
            assert failure.pod == other != pod

            followed = stub.StreamingUpdate(metadata=(("omni-pod", pod),), timeout=10)
            await feed(followed, request.id, "hello")
            assert (await followed).accepted_chunks == 1
            await request.until(lambda responses: texts(responses) == "hello")


# ---------------------------------------------------------------- sessions


async def test_sessions_that_finish_before_their_client_half_closes_lose_nothing(
    farm: Farm,
) -> None:
    """HAProxy 2.6 resets such a call, and gRPC takes that for its status."""
    async with OmniClient(f"127.0.0.1:{farm.port}") as client:
        for _ in range(30):
            async with client.interact("a b c") as one:
                items = [item async for item in one]
            assert isinstance(items[-1], Finished)


async def test_sessions_of_a_server_that_stops_finish_there_and_new_ones_go_elsewhere(
    farm: Farm,
) -> None:
    async with AsyncExitStack() as stack:
        stub = stub_of(await stack.enter_async_context(channel(farm.port)))
        sessions: dict[str, Session] = {}
        for _ in range(6):
            one = await stack.enter_async_context(talk(stub))
            sessions[await pod_of(one.call)] = one
        assert set(sessions) == set(PODS), "a session needs no header to be anywhere"
        stopping, stays = sessions[PODS[2]], sessions[PODS[0]]
        farm.servers[PODS[2]].process.terminate()
        await stopping.until(lambda s: going_away(s))
        assert 0 < going_away(stopping)[0] <= 15
        assert not going_away(stays)

        # Down for what is new, and as it was for what it has.
        assert farm.balancer.states()[PODS[2]] == "DOWN"
        for _ in range(6):
            one = await stack.enter_async_context(talk(stub))
            assert await pod_of(one.call) in PODS[:2]
        for one in (stopping, stays):
            await one.update(0, "goes on", end=True)
            await one.half_close()
            await one.finished()
            assert one.text == "goes on"
    assert await asyncio.to_thread(farm.servers[PODS[2]].await_exit, 10) == 0


def going_away(one: Session) -> list[float]:
    """The times that the session's server gave it, in seconds."""
    told = [message.going_away for message in one.heard if message.HasField("going_away")]
    return [notice.time_left_ms / 1000 for notice in told]


async def test_request_on_a_server_that_stops_is_still_fed_and_aborted(farm: Farm) -> None:
    async with channel(farm.port) as to_all:
        stub = stub_of(to_all)
        async with opened(stub, new_id("drained")) as request:
            pod = await pod_of(request.call)
            farm.servers[pod].process.terminate()
            await asyncio.to_thread(farm.balancer.await_state, "DOWN", pod)
            # By its id alone it is looked for where it would go now.
            abort = service_pb2.AbortRequest(request_ids=[request.id])
            astray = await stub.Abort(abort, metadata=hashed(request.id), timeout=10)
            assert astray.results[0].outcome == service_pb2.AbortResponse.OUTCOME_NOT_FOUND
            there = await where(request.call, request.id)
            feeding = stub.StreamingUpdate(metadata=there, timeout=10)
            await feed(feeding, request.id, "hello")
            await feeding
            await request.until(lambda responses: texts(responses) == "hello")
    assert await asyncio.to_thread(farm.servers[pod].await_exit, 10) == 0


# ---------------------------------------------------------------- the page itself


def test_health_check_of_the_page_asks_for_readiness() -> None:
    """Its bytes, taken apart by another HTTP/2 implementation."""
    sent = re.findall(r"tcp-check send-binary ([0-9a-f]+)", block("haproxy"))
    preface, *frames = (bytes.fromhex(one) for one in sent)
    assert preface == b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings, headers, data = (parsed(one) for one in frames)
    assert isinstance(settings, SettingsFrame)
    assert isinstance(headers, HeadersFrame) and isinstance(data, DataFrame)
    fields = dict(hpack.Decoder().decode(headers.data, raw=True))
    assert fields[b":path"] == b"/grpc.health.v1.Health/Check"
    assert (fields[b":method"], fields[b"content-type"]) == (b"POST", b"application/grpc")
    assert "END_HEADERS" in headers.flags and "END_STREAM" in data.flags
    request = health_pb2.HealthCheckRequest.FromString(data.data[5:])
    assert data.data[:5] == b"\0" + len(data.data[5:]).to_bytes(4, "big")
    assert request.service == "omni-readiness" in READINESS
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    answer = b"\0" + (2).to_bytes(4, "big") + serving.SerializeToString()
    assert f"binary {answer.hex()} " in block("haproxy")


def parsed(data: bytes) -> Frame:
    """One frame, whole."""
    frame, length = Frame.parse_frame_header(memoryview(data[:9]))
    assert len(data) == 9 + length
    frame.parse_body(memoryview(data[9:]))
    return frame
