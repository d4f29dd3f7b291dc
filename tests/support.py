"""What behaviour tests share: a served pipeline, calls on it, and what a refusal says."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import yaml
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from omni_grpc.config import PipelineConfig
from omni_grpc.outbox import Numbered
from omni_grpc.server import Server
from omni_grpc.types import Event
from omni_grpc.v1 import common_pb2, params_pb2, service_pb2, service_pb2_grpc
from omni_grpc.wire.events import encode_event

ROOT = Path(__file__).parents[1]
# A replica process imports the stages that tests bring from here, wherever pytest was started.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}

TEXT = common_pb2.MODALITY_TEXT
AUDIO = common_pb2.MODALITY_AUDIO
IMAGE = common_pb2.MODALITY_IMAGE

Response = service_pb2.AddRequestResponse


@dataclass(frozen=True)
class Served:
    """A running server and a client of it that shares its connection with nobody."""

    server: Server
    stub: Any
    channel: grpc.aio.Channel


class RichError(NamedTuple):
    """A status with its details. `violations`: description by path; `retry`: seconds, or None."""

    code: grpc.StatusCode
    reason: str
    violations: dict[str, str]
    retry: float | None
    pushback_ms: int | None
    domain: str
    message: str
    trailers: dict[str, str | bytes]


def rich_error(error: Any) -> RichError:
    """What the status and its details say: of an AioRpcError, or of a call that failed."""
    trailers = dict(error.trailing_metadata() or ())
    reason, domain, violations, retry = "", "", {}, None
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # The client's own status (trailers too large, for one) over the server's details.
        status = None
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason, domain = info.reason, info.domain
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            request = error_details_pb2.BadRequest()
            detail.Unpack(request)
            violations = {v.field: v.description for v in request.field_violations}
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry = info.retry_delay.ToTimedelta().total_seconds()
    pushback = trailers.get("grpc-retry-pushback-ms")
    return RichError(
        error.code(),
        reason,
        violations,
        retry,
        None if pushback is None else int(pushback),
        domain,
        error.details() or "",
        trailers,
    )


def ask(text: str = "hello big world", **fields: Any) -> service_pb2.AddRequestRequest:
    """A request with a text prompt, unless `fields` bring another."""
    return service_pb2.AddRequestRequest(**{"prompt": {"text": text}, **fields})


def script(stage: str = "text", **values: Any) -> params_pb2.StageParams:
    """What a fake (or python) stage shall do."""
    message = params_pb2.StageParams(stage=stage)
    message.custom.SetInParent()
    message.custom.update(values)
    return message


async def collect(
    stub: Any,
    request: service_pb2.AddRequestRequest | None = None,
    *,
    timeout: float = 20,
    **fields: Any,
) -> list[Response]:
    """All responses to a request that succeeds."""
    call = stub.AddRequest(request or ask(**fields), timeout=timeout)
    return [response async for response in call]


async def refusal(
    stub: Any,
    request: service_pb2.AddRequestRequest | None = None,
    *,
    timeout: float = 20,
    **fields: Any,
) -> RichError:
    """How a request fails; what came before is dropped."""
    return (await broken_off(stub, request, timeout=timeout, **fields))[1]


async def broken_off(
    stub: Any,
    request: service_pb2.AddRequestRequest | None = None,
    *,
    timeout: float = 20,
    **fields: Any,
) -> tuple[list[Response], RichError]:
    """What came of a request, and how it fails."""
    responses: list[Response] = []
    call = stub.AddRequest(request or ask(**fields), timeout=timeout)
    try:
        async for response in call:
            responses.append(response)  # noqa: PERF401 - what came before the error counts
    except grpc.aio.AioRpcError as error:
        return responses, rich_error(error)
    raise AssertionError(f"it succeeded: {events(responses)}")


async def started(stub: Any, *, until: str = "output", **fields: Any) -> Any:
    """A call that was read up to its first event of the kind `until`."""
    call = stub.AddRequest(ask(**fields))
    async for response in call:
        if response.WhichOneof("event") == until:
            return call
    raise AssertionError(f"it ended before {until!r}")


def texts(responses: Sequence[Response]) -> str:
    """The text of all text outputs."""
    return "".join(
        r.output.text.text for r in responses if r.output.WhichOneof("content") == "text"
    )


def sound(responses: Sequence[Response]) -> bytes:
    """The samples of all audio outputs."""
    return b"".join(r.output.audio.data for r in responses)


def picture(responses: Sequence[Response]) -> bytes:
    """The bytes of all image outputs."""
    return b"".join(r.output.image.data for r in responses)


def events(responses: Sequence[Response]) -> list[str | None]:
    """What each response is."""
    return [response.WhichOneof("event") for response in responses]


def encoded(seq: int, epoch: int, event: Event) -> Response:
    """An event as it is written."""
    return encode_event(Numbered(seq, epoch, event))


def in_flight(server: Server) -> int:
    """Tasks that the server's replicas hold, over all stages."""
    return sum(running(server).values())


def running(server: Server) -> dict[str, int]:
    """Tasks that replicas hold, by stage."""
    return {
        stage.stage: sum(slot.load.running for slot in stage.replicas)
        for stage in server.engine.load()
    }


def holdings(server: Server, *but: str) -> str:
    """What is left in a server, but for these kinds; empty where nothing is."""
    return "; ".join(str(one) for one in server.holdings() if one.kind not in but)


async def eventually(predicate: Callable[[], object], within: float = 1.0) -> None:
    """Returns when the predicate holds. AssertionError if it doesn't in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not predicate():
        assert loop.time() < end, f"not within {within:g} s"
        await asyncio.sleep(0.005)


def slowdown() -> float:
    """How many times slower than when it is idle this machine is: what wants to run, per core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def living(types: tuple[type, ...]) -> list[Any]:
    """The objects of exactly these types that there are: of other tests too, whose failures pytest
    may keep. (To ask every object for its class would be a warning of some library's.)"""
    return [one for one in gc.get_objects() if type(one) in types]


async def freed(server: Server, within: float = 1.0, *but: str) -> None:
    """Returns when the server holds nothing, but for these kinds. AssertionError with what it holds
    if it takes too long."""
    try:
        await eventually(lambda: not holdings(server, *but), within)
    except AssertionError:
        raise AssertionError(f"still held after {within:g} s: {holdings(server)}") from None


def pipeline(text: str) -> PipelineConfig:
    """A pipeline from YAML; its stages of engine `python` may come from `tests`."""
    content = yaml.safe_load(text)
    for stage in content["stages"]:
        stage.setdefault("environment", ENVIRONMENT)
    return PipelineConfig.model_validate(content)


def echo(changes: dict[str, Any] | None = None, **stage_changes: Any) -> PipelineConfig:
    """The pipeline echo, with changes to it and to every one of its stages."""
    content = yaml.safe_load((ROOT / "omni_grpc/pipelines/echo.yaml").read_text())
    content |= changes or {}
    content["stages"] = [stage | stage_changes for stage in content["stages"]]
    return PipelineConfig.model_validate(content)


def client(server: Server, *options: tuple[str, Any]) -> grpc.aio.Channel:
    """A channel with a connection of its own."""
    return grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1), *options]
    )


def stub_of(channel: grpc.aio.Channel) -> Any:
    """The service's stub."""
    return service_pb2_grpc.OmniServiceStub(channel)


async def stream(server: Server, method: str, messages: Sequence[bytes]) -> RichError | None:
    """Sends a stream of messages; how the call fails, None for a success.

    From a thread: grpcio's asyncio client makes INTERNAL of its own of whatever status the server
    ends a call with while the client still writes."""

    def call() -> RichError | None:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            path = f"/omni_grpc.v1.OmniService/{method}"
            method_of: Any = channel.stream_stream(path)
            answers = method_of(iter(messages), timeout=5)
            try:
                for _ in answers:
                    pass
            except grpc.RpcError:
                return rich_error(answers)
        return None

    return await asyncio.to_thread(call)
