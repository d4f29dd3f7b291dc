"""What a single client can tell of a server: times of single outputs, of single cancels."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import grpc

from omni_grpc.v1 import service_pb2, service_pb2_grpc

PACE_MS = 10.0
FIRST_MS = 5.0
SETTLE_S = 1.0


def _request(**fields: Any) -> service_pb2.AddRequestRequest:
    return service_pb2.AddRequestRequest(**fields)


async def hops(address: str, count: int) -> list[float]:
    """Seconds from a word's arrival to its tone's, one word after the other. Both go the same way
    to the client; what lies between them is the hop from stage to stage."""
    words = " ".join(f"w{n}" for n in range(count))
    params = [
        {"stage": "text", "custom": {"interval_ms": PACE_MS}},
        {"stage": "audio", "custom": {"bytes": 2}},
    ]
    arrived: dict[str, list[float]] = {"text": [], "audio": []}
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = service_pb2_grpc.OmniServiceStub(channel)
        async for response in stub.AddRequest(
            _request(prompt={"text": words}, stage_params=params)
        ):
            output = response.output
            if response.HasField("output"):
                # Words that came together came at one time.
                count_of = len(output.text.token_ids) if output.HasField("text") else 1
                arrived[output.stage] += [time.monotonic()] * count_of
    return [b - a for a, b in zip(arrived["text"], arrived["audio"], strict=True)]


async def first_outputs(address: str, count: int) -> list[float]:
    """Seconds to the first output, beyond what the stage takes for it, request by request."""
    params = [{"stage": "text", "custom": {"outputs": 1, "first_ms": FIRST_MS}}]
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = service_pb2_grpc.OmniServiceStub(channel)
        for _ in range(count):
            started, first = time.monotonic(), 0.0
            async for response in stub.AddRequest(
                _request(
                    prompt={"text": "go"},
                    stage_params=params,
                    output_modalities=["MODALITY_TEXT"],
                )
            ):
                if response.HasField("output"):
                    first = first or time.monotonic()
            times.append(first - started - FIRST_MS / 1e3)
    return times


async def holding(address: str, count: int, request: str, look: Callable[[], None]) -> None:
    """Looks while so many requests run, then cancels them."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = service_pb2_grpc.OmniServiceStub(channel)
        calls = [stub.AddRequest(_request(**json.loads(request))) for _ in range(count)]
        for call in calls:
            await call.read()
        reading = [asyncio.create_task(_drain(call)) for call in calls]
        await asyncio.sleep(SETTLE_S)
        look()
        for call in calls:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await _until(stub, lambda running: running == 0)


async def cancels(address: str, count: int, others: int) -> list[float]:
    """Seconds from cancelling one running stream to a replica that holds only the others."""
    request = {"outputs": 100_000, "interval_ms": 20}
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = service_pb2_grpc.OmniServiceStub(channel)
        await _until(stub, lambda running: running == others)
        for _ in range(count):
            call = stub.AddRequest(
                _request(prompt={"text": "go"}, stage_params=[{"stage": "text", "custom": request}])
            )
            for _ in range(3):
                await call.read()
            started = time.monotonic()
            call.cancel()
            await _until(stub, lambda running: running <= others)
            times.append(time.monotonic() - started)
    return times


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def _until(stub: Any, done: Callable[[int], bool]) -> None:
    """Returns when the tasks that replicas hold are as wanted."""
    async with asyncio.timeout(60):
        while True:
            load = await stub.GetLoad(service_pb2.GetLoadRequest())
            if done(sum(r.running for stage in load.stages for r in stage.replicas)):
                return
