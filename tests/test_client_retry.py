"""The Python client's retries: only before anything came, and as the server asks."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from omni_grpc_client import (
    Accepted,
    AlreadyExistsError,
    InvalidArgumentError,
    OmniClient,
    ResourceExhaustedError,
    RetryPolicy,
    TextDelta,
    UnavailableError,
    UnimplementedError,
)
from tests.conftest import Serve
from tests.support import echo, eventually, freed, in_flight
from tests.test_client import ACCEPTED, FINISHED, SLOW, numbered, read_until
from tests.test_streaming_client import relay

S = grpc.StatusCode
QUICK = RetryPolicy(first_wait=0.01, jitter=0.0)
Answer = Callable[[Any], Awaitable[None]]


def refused(
    code: grpc.StatusCode, reason: str = "", pushback: str | None = None
) -> tuple[grpc.StatusCode, tuple[tuple[str, str | bytes], ...]]:
    """A status with a reason, and gRPC's word for when to come again."""
    trailers: list[tuple[str, str | bytes]] = []
    if reason:
        detail = AnyMessage()
        detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="omni-grpc"))
        status = status_pb2.Status(code=code.value[0], message="no", details=[detail])
        trailers.append(("grpc-status-details-bin", status.SerializeToString()))
    if pushback is not None:
        trailers.append(("grpc-retry-pushback-ms", pushback))
    return code, tuple(trailers)


class Refusing(service_pb2_grpc.OmniServiceServicer):
    """Refuses its first calls, one after the other, and answers the next. Where `accepts`, it
    accepts each before it fails it."""

    def __init__(self, *refusals: Any, accepts: bool = False) -> None:
        self._refusals = iter(refusals)
        self._accepts = accepts
        self.calls: list[float] = []
        self.left: list[float | None] = []

    async def AddRequest(
        self, request: service_pb2.AddRequestRequest, context: Any
    ) -> AsyncIterator[service_pb2.AddRequestResponse]:
        self._note(context)
        accepted, finished = numbered(ACCEPTED, FINISHED)
        refusal = next(self._refusals, None)
        if self._accepts or refusal is None:
            yield accepted
        if refusal is not None:
            await context.abort(refusal[0], "no", refusal[1])
        yield finished

    async def SubmitInteraction(
        self, requests: AsyncIterator[service_pb2.SubmitInteractionRequest], context: Any
    ) -> AsyncIterator[service_pb2.SubmitInteractionResponse]:
        self._note(context)
        if (refusal := next(self._refusals, None)) is not None:
            await context.abort(refusal[0], "no", refusal[1])
        yield service_pb2.SubmitInteractionResponse(setup_complete={"request_id": "r"})
        for response in numbered(ACCEPTED, FINISHED):
            yield service_pb2.SubmitInteractionResponse(response=response)

    async def GetLoad(
        self, request: service_pb2.GetLoadRequest, context: Any
    ) -> service_pb2.GetLoadResponse:
        self._note(context)
        if (refusal := next(self._refusals, None)) is not None:
            await context.abort(refusal[0], "no", refusal[1])
        return service_pb2.GetLoadResponse()

    async def WatchLoad(
        self, request: service_pb2.WatchLoadRequest, context: Any
    ) -> AsyncIterator[service_pb2.WatchLoadResponse]:
        self._note(context)
        if (refusal := next(self._refusals, None)) is not None:
            await context.abort(refusal[0], "no", refusal[1])
        for running in range(3):
            replica = {"replica": 0, "ready": True, "running": running}
            stage: dict[str, Any] = {"stage": "text", "pipelines": ["echo"], "replicas": [replica]}
            yield service_pb2.WatchLoadResponse(stages=[stage])

    def _note(self, context: Any) -> None:
        self.calls.append(time.monotonic())
        self.left.append(context.time_remaining())


@asynccontextmanager
async def at(servicer: Refusing, retry: RetryPolicy | None = QUICK) -> AsyncIterator[OmniClient]:
    """A client of a server that is `servicer`."""
    server = grpc.aio.server()
    service_pb2_grpc.add_OmniServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with OmniClient(f"127.0.0.1:{port}", retry=retry) as client:
            yield client
    finally:
        await server.stop(0)


FULL = refused(S.RESOURCE_EXHAUSTED, "QUEUE_FULL", "10")
DRAINING = refused(S.UNAVAILABLE, "DRAINING", "10")
BROKEN = refused(S.UNAVAILABLE)


@pytest.mark.parametrize("refusal", [FULL, DRAINING, BROKEN], ids=["full", "draining", "broken"])
async def test_what_a_retry_can_help_is_tried_again(refusal: Any) -> None:
    for rpc in ("generate", "load", "interact", "open"):
        servicer = Refusing(refusal, refusal)
        async with at(servicer) as client:
            match rpc:
                case "generate":
                    assert (await client.generate("x")).request_id == "r"
                case "load":
                    assert await client.load() == ()
                case "interact":
                    async with client.interact("x") as session:
                        assert session.request_id == "r"
                case "open":
                    async with client.open("x") as request:
                        assert request.request_id == "r"
        assert len(servicer.calls) == 3, rpc


async def test_the_load_is_watched() -> None:
    servicer = Refusing(BROKEN)
    async with at(servicer) as client:
        moments = [stages async for stages in client.watch_load()]
        assert [stage.replicas[0].running for [stage] in moments] == [0, 1, 2]
        async for _ in client.watch_load():
            break
    async with at(Refusing(refused(S.UNIMPLEMENTED, "NOT_IMPLEMENTED"))) as client:
        with pytest.raises(UnimplementedError):
            await anext(client.watch_load())


async def test_attempts_have_an_end() -> None:
    servicer = Refusing(*itertools.repeat(FULL, 50))
    async with at(servicer) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.generate("x")
    assert len(servicer.calls) == QUICK.max_attempts
    assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 0.01)


@pytest.mark.parametrize("retry", [None, RetryPolicy(max_attempts=1)])
async def test_retries_may_be_off(retry: RetryPolicy | None) -> None:
    servicer = Refusing(FULL)
    async with at(servicer, retry) as client:
        with pytest.raises(ResourceExhaustedError):
            await client.generate("x")
    assert len(servicer.calls) == 1


async def test_nothing_is_tried_again_once_it_was_accepted() -> None:
    servicer = Refusing(DRAINING, accepts=True)
    async with at(servicer) as client:
        with pytest.raises(UnavailableError):
            await client.generate("x")
    assert len(servicer.calls) == 1


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (refused(S.INVALID_ARGUMENT, "INVALID_FIELD"), InvalidArgumentError),
        (refused(S.ALREADY_EXISTS, "DUPLICATE_REQUEST"), AlreadyExistsError),
        # Without a word on when, the server's own refusal stands.
        (refused(S.UNAVAILABLE, "MEDIA_SOURCE"), UnavailableError),
        (refused(S.RESOURCE_EXHAUSTED), ResourceExhaustedError),
        # "Do not retry", in gRPC's own form.
        (refused(S.UNAVAILABLE, "", "-1"), UnavailableError),
        (refused(S.UNAVAILABLE, "", "soon"), UnavailableError),
    ],
)
async def test_what_a_retry_cannot_help_is_raised_at_once(refusal: Any, kind: Any) -> None:
    servicer = Refusing(refusal)
    async with at(servicer) as client:
        with pytest.raises(kind):
            await client.generate("x")
    assert len(servicer.calls) == 1


async def test_the_servers_pushback_is_the_least_wait() -> None:
    servicer = Refusing(refused(S.RESOURCE_EXHAUSTED, "QUEUE_FULL", "400"))
    async with at(servicer) as client:
        await client.generate("x")
    first, second = servicer.calls
    assert second - first >= 0.4


async def test_waits_grow() -> None:
    servicer = Refusing(*itertools.repeat(BROKEN, 3))
    async with at(servicer, RetryPolicy(first_wait=0.1, jitter=0.5)) as client:
        await client.generate("x")
    gaps = [after - before for before, after in itertools.pairwise(servicer.calls)]
    assert [gap >= least for gap, least in zip(gaps, (0.1, 0.2, 0.4), strict=True)] == [True] * 3


async def test_a_timeout_is_for_all_attempts() -> None:
    servicer = Refusing(refused(S.RESOURCE_EXHAUSTED, "QUEUE_FULL", "300"))
    async with at(servicer) as client:
        await client.generate("x", timeout=5)
    first, second = servicer.left
    assert first is not None and second is not None
    # On its way a time is rounded up, to about a tenth here.
    assert second <= first - 0.15


async def test_no_wait_goes_past_the_deadline() -> None:
    for timeout, policy in ((2.0, RetryPolicy()), (None, RetryPolicy(total=2.0))):
        servicer = Refusing(refused(S.RESOURCE_EXHAUSTED, "QUEUE_FULL", "60000"))
        async with at(servicer, policy) as client:
            begun = time.monotonic()
            with pytest.raises(ResourceExhaustedError) as caught:
                await client.generate("x", timeout=timeout)
            assert time.monotonic() - begun < 10, "it said when, and that is too late"
        assert (caught.value.retry_after, len(servicer.calls)) == (60, 1)


async def test_an_id_of_an_attempt_that_broke_is_tried_again() -> None:
    duplicate = refused(S.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    servicer = Refusing(BROKEN, duplicate)
    async with at(servicer) as client:
        assert await client.generate("x", request_id="r")
    assert len(servicer.calls) == 3


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"first_wait": -1}, {"factor": 0.5}])
def test_a_policy_makes_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"or more|at least"):
        RetryPolicy(**wrong)


# ---------------------------------------------------------------- real servers


async def test_a_full_server_is_waited_for(serve: Serve) -> None:
    served = await serve(echo(), max_requests=1)
    target = f"127.0.0.1:{served.server.port}"
    async with OmniClient(target, retry=RetryPolicy(max_attempts=50, total=20)) as client:
        async with aclosing(client.stream("x", stage_params=SLOW)) as events:
            await read_until(events, Accepted)
            waiting = asyncio.create_task(client.generate("hello"))
            # The second is refused at least once before there is room.
            _, pending = await asyncio.wait([waiting], timeout=0.3)
            assert pending
        assert (await waiting).text == "hello"


async def test_a_server_that_starts_late_is_found(echo_server: Server) -> None:
    path: Any
    async with relay(echo_server.port) as path:
        pass
    quick = {"grpc.initial_reconnect_backoff_ms": 50, "grpc.min_reconnect_backoff_ms": 50}
    patient = RetryPolicy(max_attempts=100, max_wait=0.1, total=20)
    async with OmniClient(f"127.0.0.1:{path.port}", retry=patient, options=quick) as client:
        calling = asyncio.create_task(client.generate("hello"))
        _, pending = await asyncio.wait([calling], timeout=0.3)
        assert pending
        server = await asyncio.start_server(path.handle, "127.0.0.1", path.port)
        try:
            assert (await asyncio.wait_for(calling, 20)).text == "hello"
        finally:
            server.close()
            path.cut()


async def test_a_connection_that_breaks_before_anything_came(serve: Serve) -> None:
    """The request was there, and is put away before the next attempt has its id."""
    served = await serve(echo())
    quick = {"grpc.initial_reconnect_backoff_ms": 50, "grpc.min_reconnect_backoff_ms": 50}
    patient = RetryPolicy(max_attempts=20, max_wait=0.2, total=20)
    slow = {"text": {"prepare_ms": 700}}
    async with (
        relay(served.server.port) as path,
        OmniClient(f"127.0.0.1:{path.port}", retry=patient, options=quick) as client,
    ):
        calling = asyncio.create_task(
            client.generate("hello", request_id="once", stage_params=slow)
        )
        runs = served.server.engine.orchestrator.statistics
        await eventually(lambda: runs(), within=5)
        path.cut()
        assert (await asyncio.wait_for(calling, 20)).text == "hello"
    await freed(served.server)


async def test_a_connection_that_breaks_later_is_the_callers(echo_server: Server) -> None:
    async with (
        relay(echo_server.port) as path,
        OmniClient(f"127.0.0.1:{path.port}") as client,
        aclosing(client.stream("x", stage_params=SLOW)) as events,
    ):
        await read_until(events, TextDelta)
        path.cut()
        with pytest.raises(UnavailableError):
            await read_until(events, Accepted)
    await freed(echo_server)


async def test_cancelling_ends_the_wait(echo_server: Server) -> None:
    servicer = Refusing(refused(S.RESOURCE_EXHAUSTED, "QUEUE_FULL", "20000"))
    async with at(servicer, RetryPolicy(total=60)) as client:
        calling = asyncio.create_task(client.generate("x"))
        await eventually(lambda: servicer.calls, within=5)
        await asyncio.sleep(0.05)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(calling, 5)
    assert len(servicer.calls) == 1
    assert in_flight(echo_server) == 0
