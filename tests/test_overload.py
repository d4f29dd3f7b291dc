"""Ten times more than the server can do: it does what it can, refuses the rest at once and says
when to come back, and answers probes and operators all the while."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from grpc_health.v1 import health_pb2

from omni_grpc.run import Run
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.offer import Seen
from tests.running import health_stub
from tests.support import ROOT, Served, client, echo, freed, living, slowdown, stub_of

PLACES = 8
WAITING = 8
WORK_MS = 400
CAPACITY = PLACES * 1000 / WORK_MS
"""Requests a second that the fake stage can do."""


def percentile(values: list[float], percent: float) -> float:
    """The value that so many percent are not above."""
    return sorted(values)[int((len(values) - 1) * percent / 100)]


async def offered(served: Served, rate: float, seconds: float) -> tuple[Seen, int]:
    """What a client sees that offers so many requests a second; and how many there were at once."""
    arguments = (str(value) for value in (served.server.port, rate, seconds, WORK_MS))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.offer", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    answer, most = asyncio.create_task(process.communicate()), 0
    while not answer.done():
        most = max(most, len(served.server.engine.orchestrator))
        await asyncio.sleep(0.005)
    assert process.returncode == 0
    return msgspec.json.decode((await answer)[0], type=Seen), most


async def probe(calls: dict[str, Callable[[], Awaitable[object]]]) -> dict[str, list[float]]:
    """How long each call takes, again and again until cancelled; in seconds."""
    clock = asyncio.get_running_loop().time
    took: dict[str, list[float]] = {name: [] for name in calls}
    try:
        while True:
            for name, call in calls.items():
                begin = clock()
                await call()
                took[name].append(clock() - begin)
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        return took


async def overload(serve: Serve, seconds: float) -> None:
    """Ten times the capacity for so long."""
    others = living((Run,))
    served = await serve(echo(max_tasks=PLACES, max_waiting=WAITING))
    async with client(served.server) as channel:
        stub, health = stub_of(channel), health_stub(channel)
        checks: dict[str, Callable[[], Awaitable[object]]] = {
            "health": lambda: health.Check(health_pb2.HealthCheckRequest(service="")),
            "info": lambda: stub.GetServerInfo(service_pb2.GetServerInfoRequest()),
            "load": lambda: stub.GetLoad(service_pb2.GetLoadRequest()),
            "abort": lambda: stub.Abort(service_pb2.AbortRequest(request_ids=["nobody"])),
        }
        probing = asyncio.create_task(probe(checks))
        seen, most = await offered(served, 10 * CAPACITY, seconds)
        probing.cancel()
        took = await probing
    await freed(served.server)
    # Some may be on their way in or out; none is there that will be refused.
    assert most <= 2 * (PLACES + WAITING)
    report(seen, took, seconds)
    assert_bounds(seen, took, seconds)
    gc.collect()
    assert not [one for one in living((Run,)) if not any(one is other for other in others)]


def report(seen: Seen, took: dict[str, list[float]], seconds: float) -> None:
    """The figures."""
    offered = len(seen.finished) + len(seen.refusals)
    refused = [refusal.seconds for refusal in seen.refusals]
    print(
        f"  offered {offered / seconds:.0f}/s, capacity {CAPACITY:.0f}/s: "
        f"goodput {len(seen.finished) / seconds / CAPACITY:.2f} of it, "
        f"latency p99 {percentile(seen.finished, 99) * 1e3:.0f} ms; "
        f"{len(refused)} refused in {percentile(refused, 99) * 1e3:.0f} ms (p99), "
        f"told to wait {max(e.retry or 0 for e in seen.refusals):.1f} s at most; "
        f"the machine is {slowdown():.1f} times slower than idle"
    )
    for name, times in took.items():
        print(f"  {name}: {len(times)} calls, p99 {percentile(times, 99) * 1e3:.0f} ms")


def assert_bounds(seen: Seen, took: dict[str, list[float]], seconds: float) -> None:
    """The bars, with room for a busy machine: goodput 90 %, 50 ms."""
    slower = slowdown()
    assert len(seen.finished) > 0.5 * CAPACITY * seconds
    assert len(seen.refusals) > len(seen.finished), "that was no overload"
    assert percentile([refusal.seconds for refusal in seen.refusals], 99) < 0.25 * slower
    for refusal in seen.refusals:
        assert (refusal.code, refusal.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refusal.retry and refusal.pushback_ms == round(refusal.retry * 1e3)
    # Those ahead in the queue, and itself.
    longest = (WAITING / PLACES + 1) * WORK_MS / 1e3
    assert percentile(seen.finished, 99) < 5 * longest * slower
    for times in took.values():
        assert len(times) > 10 and percentile(times, 99) < 0.25 * slower


async def test_ten_times_too_much_for_a_few_seconds(serve: Serve) -> None:
    await overload(serve, seconds=5)


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_ten_times_too_much_for_half_a_minute(serve: Serve) -> None:
    await overload(serve, seconds=30)
