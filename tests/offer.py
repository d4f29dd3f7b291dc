"""A client that offers a server so many requests a second, however it takes them, from a process of
its own: what it costs must not slow the server down. Run: python -m tests.offer PORT RATE SECONDS
WORK_MS; prints what it saw as JSON."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import msgspec
import uvloop

from omni_grpc.v1 import service_pb2_grpc
from tests.support import TEXT, ask, rich_error, script


class Refusal(msgspec.Struct, frozen=True):
    """How a request was refused, after so many seconds."""

    seconds: float
    code: str
    reason: str
    retry: float | None
    pushback_ms: int | None


class Seen(msgspec.Struct):
    """Seconds that requests took which succeeded, and those that were refused."""

    finished: list[float] = []
    refusals: list[Refusal] = []


async def one(stub: Any, work_ms: int, seen: Seen) -> None:
    """One request. AssertionError if it ends otherwise than it may."""
    clock = asyncio.get_running_loop().time
    request = ask("one", stage_params=[script(first_ms=work_ms)], output_modalities=[TEXT])
    begin, last = clock(), None
    try:
        async for response in stub.AddRequest(request, timeout=20):
            last = response
    except grpc.aio.AioRpcError as error:
        took, rich = clock() - begin, rich_error(error)
        refusal = Refusal(took, rich.code.name, rich.reason, rich.retry, rich.pushback_ms)
        seen.refusals.append(refusal)
        return
    assert last is not None and last.HasField("finished")
    seen.finished.append(clock() - begin)


async def offer(port: int, rate: float, seconds: float, work_ms: int) -> Seen:
    """Offers requests for so long, and waits until all have ended."""
    clock, seen = asyncio.get_running_loop().time, Seen()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        asyncio.TaskGroup() as group,
    ):
        stub, sent = service_pb2_grpc.OmniServiceStub(channel), 0
        await channel.channel_ready()
        begin = clock()
        while clock() < begin + seconds:
            due = int((clock() - begin) * rate)
            for _ in range(due - sent):
                group.create_task(one(stub, work_ms, seen))
            sent = due
            await asyncio.sleep(0.002)
    return seen


if __name__ == "__main__":
    port, rate, seconds, work_ms = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(offer(int(port), float(rate), float(seconds), int(work_ms)))
    sys.stdout.buffer.write(msgspec.json.encode(seen))
