"""What the edge makes of a handler's end, in all four shapes of rpc: over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from omni_grpc.errors import InternalError, OmniError, Violation
from omni_grpc.interceptors import Edge, set_request_id
from tests.faulty import SECRET, leak_cancellation
from tests.support import rich_error

SERVICE = "omni_grpc.v1.Test"


async def end(what: str) -> None:
    """Ends as `what` says."""
    set_request_id("the-id")
    match what.split():
        case ["raise", "bug"]:
            raise ValueError(SECRET)
        case ["raise", "group"]:
            raise ExceptionGroup(SECRET, [ValueError(SECRET)])
        case ["raise", "timeout"]:
            raise TimeoutError(SECRET)
        case ["raise", reason]:
            error = OmniError.by_reason[reason].__new__(OmniError.by_reason[reason])
            OmniError.__init__(error, "why", violations=(Violation("f", "d"),), retry_after_s=0.25)
            raise error
        case ["leak"]:
            await leak_cancellation()
        case ["hang"]:
            await asyncio.Event().wait()


async def unary_unary(request: bytes, context: Any) -> bytes:
    await end(request.decode())
    return b"ok"


async def unary_stream(request: bytes, context: Any) -> None:
    await context.write(b"first")
    await end(request.decode())


async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
    async for request in requests:
        await end(request.decode())
    return b"ok"


async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(b"one")
        await end(request.decode())


def same(data: bytes) -> bytes:
    return data


@pytest.fixture(scope="module")
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """A client of a server with one method of each shape behind the edge."""
    server = grpc.aio.server(interceptors=(Edge("the-pod"),))
    coders: dict[str, Any] = {"request_deserializer": same, "response_serializer": same}
    methods = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary_unary, **coders),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream, **coders),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary, **coders),
        "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream, **coders),
    }
    handler = grpc.method_handlers_generic_handler(SERVICE, methods)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


SHAPES = ["UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream"]


async def call(channel: grpc.aio.Channel, shape: str, what: str) -> Any:
    """One call to its end. Raises its error."""
    path, message = f"/{SERVICE}/{shape}", what.encode()
    # Untyped: without coders the stubs' types have no message.
    methods: Any = channel
    match shape:
        case "UnaryUnary":
            return await methods.unary_unary(path)(message, timeout=5)
        case "StreamUnary":
            return await methods.stream_unary(path)(iter([message]), timeout=5)
        case "UnaryStream":
            return [part async for part in methods.unary_stream(path)(message, timeout=5)]
    return [part async for part in methods.stream_stream(path)(iter([message]), timeout=5)]


async def failure(channel: grpc.aio.Channel, shape: str, what: str) -> Any:
    """How the call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, shape, what)
    return rich_error(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
async def test_success_passes(channel: grpc.aio.Channel, shape: str) -> None:
    assert await call(channel, shape, "fine") in (b"ok", [b"first"], [b"one"])


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_error_keeps_its_details(channel: grpc.aio.Channel, shape: str) -> None:
    for reason, kind in OmniError.by_reason.items():
        error = await failure(channel, shape, f"raise {reason}")
        assert error.code.name == kind.code.name
        assert (error.reason, error.domain, error.message) == (reason, "omni-grpc", "why")
        assert error.violations == {"f": "d"}
        assert (error.retry, error.pushback_ms) == (0.25, 250)
        assert error.trailers["omni-request-id"] == "the-id"
        assert error.trailers["omni-pod"] == "the-pod"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("what", ["bug", "group", "timeout"])
async def test_text_of_a_bug_stays_inside(channel: grpc.aio.Channel, shape: str, what: str) -> None:
    error = await failure(channel, shape, f"raise {what}")
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, InternalError.reason)
    assert error.message == "internal error"
    assert error.trailers["omni-request-id"] == "the-id"
    assert not any(SECRET in str(value) for value in error.trailers.values())


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_leaked_cancellation_is_an_error_at_once(
    channel: grpc.aio.Channel, shape: str
) -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    error = await failure(channel, shape, "leak")
    assert loop.time() - begin < 1
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_real_cancellation_is_none(channel: grpc.aio.Channel, shape: str) -> None:
    calling = asyncio.create_task(call(channel, shape, "hang"))
    await asyncio.sleep(0.05)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert await call(channel, shape, "fine")
