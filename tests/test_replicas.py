"""Replicas that are lost, full, or unevenly loaded: who takes a request, and where it goes then."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import grpc
import psutil
import pytest

from omni_grpc.balance import Balancer, Policy, estimate
from omni_grpc.config import StageConfig
from omni_grpc.errors import ConfigError
from omni_grpc.placement import Starts, check_memory, devices_of, width_of
from omni_grpc.types import DiffusionParams, Prompt, SamplingParams, Text
from omni_grpc.v1 import service_pb2
from tests.conftest import Serve
from tests.streaming import Feeding, opened
from tests.support import (
    ask,
    collect,
    echo,
    eventually,
    refusal,
    rich_error,
    running,
    script,
    started,
    texts,
)

# ---------------------------------------------------------------- lost


def processes(stage: str) -> list[psutil.Process]:
    """The replica processes of that stage."""
    found = psutil.Process().children()
    return [p for p in found if f"/echo-{stage}-" in "".join(p.cmdline()[-1:])]


async def test_a_request_that_gave_nothing_goes_to_another_replica(serve: Serve) -> None:
    served = await serve(echo(replicas=2, restart={"backoff": 3600}))
    slow = [script(first_ms=800)]
    calls = [
        asyncio.create_task(collect(served.stub, text="one two", stage_params=slow))
        for _ in range(6)
    ]
    await eventually(lambda: running(served.server)["text"] == 6, within=5)
    processes("text")[0].send_signal(signal.SIGKILL)
    answers = await asyncio.gather(*calls)
    assert [texts(answer) for answer in answers] == ["one two"] * 6
    assert all([r.seq for r in answer] == list(range(len(answer))) for answer in answers)


async def test_a_replica_that_restarts_does_not_change_what_the_stage_can_do(serve: Serve) -> None:
    config = echo(replicas=2, restart={"backoff": 0.05, "max_backoff": 10.0})
    slow_start = config.model_dump()
    for stage in slow_start["stages"]:
        stage["engine_args"] |= {"load_s": 1.0}
    served = await serve(type(config).model_validate(slow_start))
    before = await served.stub.GetServerInfo(service_pb2.GetServerInfoRequest())
    for pool in served.server.engine.pools:
        replica = pool.slots[0].replica
        assert replica is not None
        replica.kill()
        await replica.gone()
    await eventually(lambda: all(pool.slots[0].restarts for pool in served.server.engine.pools), 5)
    assert {pool.ready_replicas for pool in served.server.engine.pools} == {1}
    during = await served.stub.GetServerInfo(service_pb2.GetServerInfoRequest())
    assert during.pipelines[0].capabilities == before.pipelines[0].capabilities
    assert list(during.pipelines[0].outputs) == list(before.pipelines[0].outputs)
    async with opened(served.stub, prompt={"text": "still there"}) as request:
        await (await Feeding(served.stub, request.id).attach()).close()
        assert texts(await request.finished()) == "still there"


async def test_a_request_is_retried_once_only(serve: Serve) -> None:
    served = await serve(echo(replicas=3, restart={"backoff": 3600}))
    error = await refusal(served.stub, stage_params=[script(die_at=0)])
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STAGE_UNAVAILABLE")
    # It took two replicas with it, not the third.
    assert texts(await collect(served.stub, text="still here")) == "still here"


async def test_a_request_that_gave_something_is_not_retried(serve: Serve) -> None:
    served = await serve(echo(replicas=2, restart={"backoff": 3600}))
    error = await refusal(served.stub, stage_params=[script(outputs=4, interval_ms=50, die_at=2)])
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "REPLICA_LOST")


# ---------------------------------------------------------------- full


async def test_full_replicas_refuse_with_a_time_to_come_back(serve: Serve) -> None:
    served = await serve(echo(replicas=2, max_tasks=1, max_waiting=0))
    held = [await started(served.stub, stage_params=[script(outputs=9, hang_at=1)]) for _ in "ab"]
    error = await refusal(served.stub)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry and error.pushback_ms
    for call in held:
        call.cancel()
    await eventually(lambda: not running(served.server)["text"], within=5)
    assert texts(await collect(served.stub, text="room again")) == "room again"


async def test_each_tenant_has_its_own_budget(serve: Serve) -> None:
    served = await serve(echo(), max_tenant_requests=1)
    mine, yours = [("omni-tenant", "me")], [("omni-tenant", "you")]
    held = served.stub.AddRequest(ask(stage_params=[script(outputs=9, hang_at=1)]), metadata=mine)
    assert (await held.read()).HasField("accepted")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.AddRequest(ask(), metadata=mine).read()
    error = rich_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_BUDGET")
    other = [r async for r in served.stub.AddRequest(ask(), metadata=yours)]
    assert other[-1].HasField("finished")
    held.cancel()


# ---------------------------------------------------------------- balanced


class Simulated:
    """A replica that works off its queue, one unit a second."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.now = 0.0

    @property
    def work(self) -> float:
        return max(0.0, self.free_at - self.now)


def makespan(policy: Policy, costs: list[float], replicas: int, rate: float) -> float:
    """When the last of the requests is done, arriving at `rate` a second."""
    balancer, pool, now = Balancer(policy, seed=3), [Simulated() for _ in range(replicas)], 0.0
    for cost in costs:
        now += rate
        for replica in pool:
            replica.now = now
        chosen = balancer.pick(pool)
        chosen.free_at = max(chosen.free_at, now) + cost
    return max(replica.free_at for replica in pool)


def test_least_work_beats_counting_with_heavy_tails(capsys: Any) -> None:
    generator = random.Random(7)
    costs = [min(400.0, generator.paretovariate(1.1)) for _ in range(4000)]
    replicas = 8
    bound = sum(costs) / replicas
    policies: tuple[Policy, ...] = ("least-work", "round-robin", "random")
    table = {policy: makespan(policy, costs, replicas, 0.0) / bound for policy in policies}
    with capsys.disabled():
        print()
        for policy, ratio in table.items():
            print(f"  makespan / (sum of costs / {replicas} replicas), {policy}: {ratio:.3f}")
    assert table["least-work"] < 1.1
    assert table["least-work"] < table["round-robin"]
    assert table["least-work"] < table["random"]


def test_equals_take_turns() -> None:
    pool = [Simulated() for _ in range(3)]
    balancer = Balancer("least-work")
    assert len({id(balancer.pick(pool)) for _ in range(3)}) == 3


def test_work_is_estimated_in_the_engines_units() -> None:
    long = estimate(SamplingParams(max_tokens=1000), Prompt(Text("x" * 400)))
    short = estimate(SamplingParams(max_tokens=10), Prompt(Text("x" * 400)))
    assert long - short == pytest.approx(990)
    assert estimate(SamplingParams(max_tokens=10, n=4), None) == 40
    assert estimate(DiffusionParams(steps=5, frames=3), None) == 15


# ---------------------------------------------------------------- placed


def stage(name: str, **fields: Any) -> StageConfig:
    """A stage's configuration."""
    return StageConfig.model_validate({"name": name, "engine": "fake", **fields})


def test_memory_shares_that_do_not_fit_are_shown() -> None:
    fits = [
        stage("a", devices=["cuda:0"], replicas=2, memory_fraction=0.3),
        stage("b", devices=["cuda:0"], memory_fraction=0.4),
    ]
    check_memory(fits)
    with pytest.raises(ConfigError) as caught:
        check_memory([*fits, stage("c", devices=["cuda:0,1"], memory_fraction=0.1)])
    text = str(caught.value)
    assert "cuda:0" in text and "0.3 (a/0) + 0.3 (a/1) + 0.4 (b/0) + 0.1 (c/0) = 1.1" in text


def test_devices_are_lists_templates_and_groups() -> None:
    four = stage("a", devices=["cuda:{replica}"], replicas=4)
    assert [four.device(n) for n in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert devices_of("cuda:0,1") == ("cuda:0", "cuda:1")
    assert width_of("cuda:2,3,4") == 3
    assert devices_of("cpu") == ("cpu",)


async def test_replicas_of_one_device_start_one_after_another() -> None:
    starts, under_way, most = Starts(), {"cuda:0": 0, "cuda:1": 0}, {"cuda:0": 0, "cuda:1": 0}

    async def start(device: str) -> None:
        async with starts.turn(device):
            for name in devices_of(device):
                under_way[name] += 1
                most[name] = max(most[name], under_way[name])
            await asyncio.sleep(0.01)
            for name in devices_of(device):
                under_way[name] -= 1

    await asyncio.gather(*(start(d) for d in ("cuda:0", "cuda:0", "cuda:0,1", "cuda:1", "cuda:1")))
    assert most == {"cuda:0": 1, "cuda:1": 1}
