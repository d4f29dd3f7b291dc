"""Budgets of requests, tokens and media, per server and tenant, and when those that are refused are
told to come back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from omni_grpc.balance import UNKNOWN_TOKENS, tokens
from omni_grpc.budget import Budget, Share
from omni_grpc.config import ServerConfig
from omni_grpc.errors import MediaBudget, QueueFull, TenantBudget
from omni_grpc.turns import MAX_RETRY_S, TURNS_S, UNKNOWN_RETRY_S, Turns
from omni_grpc.types import (
    CustomParams,
    DataType,
    Message,
    Messages,
    Params,
    Prompt,
    SamplingParams,
    Tensor,
    Text,
    TokenIds,
)
from tests.conftest import Serve
from tests.support import ask, client, collect, echo, eventually, freed, refusal, script, stub_of

HANGING = [script(outputs=9, hang_at=1)]
FORTY_TOKENS = "x" * 160


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens"),
    [
        (Prompt(Text("x" * 9)), 3),
        (Prompt(TokenIds([5, 6, 7, 8])), 4),
        (Prompt(Messages((Message("user", (Text("x" * 8),)), Message("user", (Text("y"),))))), 3),
        (Prompt(Tensor(b"\0" * 24, DataType.FLOAT32, (3, 2))), 3),
        (Prompt(), 0),
    ],
    ids=["text", "ids", "messages", "embeds", "none"],
)
def test_tokens_are_the_prompts_and_the_longest_answers(prompt: Prompt, prompt_tokens: int) -> None:
    assert tokens(prompt, []) == prompt_tokens
    answers: list[Params] = [
        SamplingParams(max_tokens=100, n=2),
        CustomParams({}),
        SamplingParams(),
    ]
    assert tokens(prompt, answers) == prompt_tokens + 200 + UNKNOWN_TOKENS


async def test_the_servers_tokens_are_bounded(serve: Serve) -> None:
    served = await serve(echo(), max_tokens_in_flight=100)
    budget = served.server.engine.budget
    calls = [served.stub.AddRequest(ask(FORTY_TOKENS, stage_params=HANGING)) for _ in "ab"]
    for call in calls:
        assert (await call.read()).HasField("accepted")
    assert budget.statistics()["tokens"] == 80
    error = await refusal(served.stub, text=FORTY_TOKENS)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry and error.pushback_ms
    # A smaller one has room.
    assert (await collect(served.stub, text="small"))[-1].HasField("finished")
    calls[0].cancel()
    await eventually(lambda: budget.statistics()["tokens"] == 40)
    assert (await collect(served.stub, text=FORTY_TOKENS))[-1].HasField("finished")
    calls[1].cancel()


async def test_a_request_over_the_whole_budget_is_not_told_to_come_back(serve: Serve) -> None:
    served = await serve(echo(), max_tokens_in_flight=39)
    error = await refusal(served.stub, text=FORTY_TOKENS)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert "40 tokens" in error.message and "39 at most" in error.message
    assert error.retry is None and error.pushback_ms is None


async def test_a_tenants_tokens_are_bounded_apart(serve: Serve) -> None:
    served = await serve(echo(), max_tenant_tokens=50)

    def call(tenant: str, **fields: Any) -> Any:
        metadata = [("omni-tenant", tenant)]
        return served.stub.AddRequest(ask(FORTY_TOKENS, **fields), metadata=metadata)

    held = call("me", stage_params=HANGING)
    assert (await held.read()).HasField("accepted")
    with pytest.raises(grpc.aio.AioRpcError, match="the tenant holds 40 tokens"):
        await call("me").read()
    assert [r async for r in call("you")][-1].HasField("finished")
    held.cancel()


# ---------------------------------------------------------------- what is taken is given back


async def test_a_budget_gives_back_what_it_took() -> None:
    settings = ServerConfig(max_requests=3, max_tenant_requests=2, max_media_bytes=100)
    budget = Budget(settings)
    a, b = Share("a", 60, 7), Share("b", 60)
    budget.take(a)
    with pytest.raises(MediaBudget) as media:
        budget.take(b)
    assert media.value.retry_after_s
    with pytest.raises(MediaBudget) as media:
        budget.take(Share("c", 101))
    assert media.value.retry_after_s is None, "it would never fit"
    budget.take(Share("a", 0))
    with pytest.raises(TenantBudget):
        budget.take(Share("a", 0))
    budget.take(Share("b", 0))
    with pytest.raises(QueueFull) as full:
        budget.take(Share("c", 0))
    assert full.value.retry_after_s
    assert budget.statistics() == {"requests": 3, "tokens": 7, "media_bytes": 60, "tenants": 2}
    for share in (a, Share("a", 0), Share("b", 0)):
        budget.give(share)
    assert not any(budget.statistics().values())


# ---------------------------------------------------------------- when to come back


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ends(clock: Clock, turns: Turns, number: int, each_s: float) -> None:
    """One after the other, that many things take so long each."""
    for _ in range(number):
        turns.began()
        clock.now += each_s
        turns.ended()


def test_the_wait_is_what_the_drain_rate_says() -> None:
    clock = Clock()
    turns = Turns(clock)
    ends(clock, turns, 8, 0.25)
    assert turns.step_s() == pytest.approx(0.25)
    # Each that is refused gets a place of its own.
    assert [turns.next_s() for _ in range(3)] == pytest.approx([0.25, 0.5, 0.75])
    clock.now += 0.75
    # Turns that have passed count no more, and neither does time without work.
    assert turns.next_s() == pytest.approx(0.25)


def test_the_rate_is_of_the_last_seconds() -> None:
    clock = Clock()
    turns = Turns(clock)
    ends(clock, turns, 1000, 0.01)
    ends(clock, turns, 20, 1.0)
    assert turns.step_s() == pytest.approx(1.0, rel=0.15)


def test_while_nothing_ends_the_wait_grows_up_to_a_limit() -> None:
    clock = Clock()
    turns = Turns(clock)
    turns.began()
    assert turns.next_s() == UNKNOWN_RETRY_S
    clock.now += 7
    assert turns.step_s() == 7
    clock.now += 70
    assert turns.next_s() == MAX_RETRY_S


def test_turns_are_not_given_for_ever_ahead() -> None:
    clock = Clock()
    turns = Turns(clock)
    ends(clock, turns, 8, 0.25)
    assert max(turns.next_s() for _ in range(1000)) == pytest.approx(TURNS_S + 0.25)
    clock.now += TURNS_S + 0.25
    assert turns.next_s() == pytest.approx(0.25)


async def test_refused_clients_that_come_back_when_told_get_in(serve: Serve) -> None:
    """Ten of them at once, for the one place that there is: told the same time they would meet
    again, and again be refused."""
    served = await serve(echo(), max_requests=1)
    policy = {
        "maxAttempts": 5,
        # Far too late: only the server's pushback lets them in in time.
        "initialBackoff": "25s",
        "maxBackoff": "25s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    service = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    work: dict[str, Any] = {"stage_params": [script(outputs=2, interval_ms=50)]}
    for _ in range(10):  # so that the rate is known
        await collect(served.stub, **work)
    option = ("grpc.service_config", json.dumps(service))
    async with client(served.server, option) as channel:
        stub = stub_of(channel)
        done = await asyncio.gather(*(collect(stub, timeout=20, **work) for _ in range(10)))
    assert all(responses[-1].HasField("finished") for responses in done)
    await freed(served.server)
