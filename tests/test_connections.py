"""How long a connection lives, what it may carry, and that silence does not end it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from omni_grpc.config import ConnectionPolicy
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.raw_http2 import raw_client
from tests.running import rest_of, serving, text_pipeline
from tests.support import (
    ask,
    client,
    collect,
    echo,
    events,
    in_flight,
    refusal,
    script,
    started,
    stub_of,
)

INFO = service_pb2.GetServerInfoRequest()


def policy(**fields: float) -> ConnectionPolicy:
    """Settings of connections."""
    return ConnectionPolicy.model_validate(fields)


# ---------------------------------------------------------------- pings


async def test_client_may_ping_every_ten_seconds_without_calls() -> None:
    async with (
        serving(text_pipeline("pinged"), warm=False) as running,
        raw_client(running.server.port) as raw,
    ):
        # gRPC forgives two pings that come too soon. They are used up here, so that the next
        # one shows whether ten seconds are enough (the core's default is 5 minutes, and 2 hours
        # where there is no call).
        for _ in range(3):
            raw.ping()
        heard = await raw.listen(10.2)
        assert (heard.acknowledged, heard.reason) == (3, None)
        raw.ping()
        assert (await raw.listen(0.5)).acknowledged == 1
        # The floor holds: now one ping too soon is one too many.
        raw.ping()
        assert (await raw.listen(5)).reason == b"too_many_pings"


async def test_the_least_time_between_pings_is_a_setting() -> None:
    settings = policy(min_ping_interval=0.2)
    async with (
        serving(text_pipeline("pinged"), warm=False, connections=settings) as running,
        raw_client(running.server.port) as raw,
    ):
        for _ in range(6):
            raw.ping()
            heard = await raw.listen(0.3)
            assert (heard.acknowledged, heard.reason) == (1, None)
        for _ in range(4):
            raw.ping()
        assert (await raw.listen(5)).reason == b"too_many_pings"


async def test_a_client_that_is_silent_is_asked_and_one_that_does_not_answer_is_cut() -> None:
    settings = policy(keepalive_time=0.5, keepalive_timeout=1)
    async with serving(text_pipeline("asking"), warm=False, connections=settings) as running:
        async with raw_client(running.server.port) as raw:
            heard = await raw.listen(3)
            assert heard.pings >= 2 and not heard.closed
        async with raw_client(running.server.port) as raw:
            began = time.monotonic()
            heard = await raw.listen(10, answer=False)
            assert (heard.pings, heard.reason) == (1, b"ping_timeout")
            assert 1.2 < time.monotonic() - began < 8  # the goal is 1.5 s


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_client_that_pings_every_ten_seconds_survives_a_minute_of_silence() -> None:
    pings = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    # Without signs of life: data from the server would let it forget the pings that came before.
    async with (
        serving(text_pipeline("silent"), progress_interval=1000) as running,
        client(running.server, *pings) as channel,
    ):
        silent = [script(outputs=2, interval_ms=62_000)]
        responses = await collect(stub_of(channel), timeout=100, stage_params=silent)
    assert events(responses) == ["accepted", "output", "output", "finished"]


# ---------------------------------------------------------------- age


async def test_a_connection_that_grows_old_loses_no_call() -> None:
    async with serving(text_pipeline("aging"), connections=policy(max_age=0.5)) as running:
        async with raw_client(running.server.port) as raw:
            assert (await raw.listen(3)).reason == b"max_age"
        until = time.monotonic() + 3
        calls = 0

        async def one_after_another() -> None:
            nonlocal calls
            while time.monotonic() < until:
                await running.omni.GetServerInfo(INFO, timeout=5)
                calls += 1

        slow = [script(outputs=30, interval_ms=100)]
        async with asyncio.TaskGroup() as group:
            long = group.create_task(collect(running.omni, stage_params=slow))
            for _ in range(4):
                group.create_task(one_after_another())
        assert events(long.result())[-1] == "finished", "a stream outlives its connection's age"
        assert calls > 50


async def test_connections_do_not_grow_old_all_at_once() -> None:
    async with serving(text_pipeline("aging"), connections=policy(max_age=3)) as running:

        async def age() -> float:
            async with raw_client(running.server.port) as raw:
                began = time.monotonic()
                assert (await raw.listen(10)).reason == b"max_age"
                return time.monotonic() - began

        ages = await asyncio.gather(*(age() for _ in range(20)))
    assert max(ages) - min(ages) > 0.1


async def test_a_connection_without_calls_is_closed_where_that_is_set() -> None:
    async with serving(text_pipeline("idle"), connections=policy(max_idle=0.5)) as running:
        async with raw_client(running.server.port) as raw:
            assert (await raw.listen(5)).reason == b"connection idle"
        slow = [script(outputs=2, interval_ms=1500)]
        responses = await collect(running.omni, stage_params=slow)
        assert events(responses)[-1] == "finished", "one with a call is not idle"


# ---------------------------------------------------------------- size and number


async def test_message_over_the_limit_is_refused_and_one_below_is_not() -> None:
    async with serving(text_pipeline("sizes"), max_receive_bytes=1 << 20) as running:
        below = await collect(running.omni, ask("x" * ((1 << 20) - 1000)))
        assert below[-1].HasField("finished")
        error = await refusal(running.omni, ask("x" * ((1 << 20) + 1000)))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in error.message


async def test_calls_over_the_limit_of_a_connection_wait_for_their_turn() -> None:
    settings = policy(max_concurrent_streams=2)
    async with serving(text_pipeline("narrow"), connections=settings) as running:
        async with raw_client(running.server.port) as raw:
            await raw.listen(0.5)
            assert raw.max_streams == 2
        slow = [script(outputs=2, hang_at=1)]
        first, second = [await started(running.omni, stage_params=slow) for _ in "ab"]
        third = asyncio.create_task(collect(running.omni, text="at last"))
        await asyncio.sleep(0.3)
        assert not third.done() and in_flight(running.server) == 2
        first.cancel()
        assert events(await third)[-1] == "finished"
        second.cancel()


# ---------------------------------------------------------------- signs of life


def numbered(responses: list[Any]) -> list[int]:
    """The numbers of the responses."""
    return [response.seq for response in responses]


async def test_silence_is_broken_by_progress(serve: Serve) -> None:
    served = await serve(text_pipeline("silent"), progress_interval=0.2)
    responses = await collect(served.stub, stage_params=[script(outputs=2, interval_ms=1100)])
    kinds = events(responses)
    assert kinds[:2] == ["accepted", "output"] and kinds[-2:] == ["output", "finished"]
    signs = responses[2:-2]
    assert 2 <= len(signs) <= 6
    assert {(sign.progress.stage, sign.progress.step) for sign in signs} == {("text", 0)}
    assert numbered(responses) == list(range(len(responses)))


async def test_nothing_comes_before_the_request_is_accepted(serve: Serve) -> None:
    served = await serve(text_pipeline("slow"), progress_interval=0.1)
    responses = await collect(served.stub, stage_params=[script(outputs=1, prepare_ms=600)])
    assert events(responses) == ["accepted", "output", "finished"]


async def test_the_stage_that_still_works_is_the_one_that_is_named(serve: Serve) -> None:
    served = await serve(echo(), progress_interval=0.2)
    silent = [script("audio", outputs=2, interval_ms=900)]
    responses = await collect(served.stub, text="one", stage_params=silent)
    stages = [r.progress.stage for r in responses if r.HasField("progress")]
    assert stages and set(stages) <= {"audio", "image"}
    assert numbered(responses) == list(range(len(responses)))


async def test_a_stage_that_counts_its_steps_is_not_set_back(serve: Serve) -> None:
    stepping = text_pipeline("steps", engine="python", model="tests.example_stages:Stepping")
    served = await serve(stepping, progress_interval=0.2)
    responses = await collect(served.stub)
    steps = [(r.progress.step, r.progress.total_steps) for r in responses if r.HasField("progress")]
    assert len(steps) > 3, "its own two, and signs of life between"
    assert steps == sorted(steps) and set(steps) == {(1, 2), (2, 2)}


async def test_a_client_that_does_not_read_gets_no_signs(serve: Serve) -> None:
    served = await serve(text_pipeline("unread"), progress_interval=0.05, queue_bytes=1 << 16)
    flood = [script(outputs=300, bytes=1 << 16)]
    call = served.stub.AddRequest(ask(stage_params=flood))
    assert (await call.read()).HasField("accepted")
    await asyncio.sleep(1)
    kinds = events(await rest_of(call))
    assert set(kinds) == {"output", "finished"}


async def test_a_request_that_waits_for_its_input_gives_signs_too(serve: Serve) -> None:
    served = await serve(text_pipeline("waiting"), progress_interval=0.2)
    call = served.stub.AddRequest(ask(resumable=True))
    kinds = [(await call.read()).WhichOneof("event") for _ in range(3)]
    assert kinds[0] == "accepted" and kinds[-1] == "progress"
    call.cancel()


async def test_a_session_gets_signs_too(serve: Serve) -> None:
    served = await serve(text_pipeline("session"), progress_interval=0.2)
    opening = service_pb2.SubmitInteractionRequest(
        setup={"open": ask(stage_params=[script(outputs=2, interval_ms=900)])}
    )
    call = served.stub.SubmitInteraction(iter([opening]))
    heard = [message.response async for message in call if message.HasField("response")]
    assert "progress" in events(heard)
    assert numbered(heard) == list(range(len(heard)))
