"""A merge window: text waits a moment for more to join it, and nothing else waits.

Windows here are so long that a wait which should not be there runs into a test's own limit."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from omni_grpc import pressure
from omni_grpc.config import ServerConfig
from tests.conftest import Serve
from tests.running import replicas, text_pipeline
from tests.support import (
    AUDIO,
    TEXT,
    Response,
    ask,
    collect,
    echo,
    events,
    eventually,
    refusal,
    script,
    sound,
    started,
    texts,
)

LONG = 10.0
"""Longer than any test waits."""
SOON = 2.0


def tokens(responses: list[Response]) -> list[int]:
    """All token ids."""
    return [token for r in responses for token in r.output.text.token_ids]


def always_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that start now take themselves for busy, and soon."""
    monkeypatch.setattr(pressure, "BUSY", -1.0)
    monkeypatch.setattr(pressure, "TICK_S", 0.01)


async def test_tokens_share_messages_and_none_is_lost(serve: Serve) -> None:
    fields: dict[str, Any] = {
        "stage_params": [script(outputs=60, interval_ms=5)],
        "output_modalities": [TEXT],
    }
    at_once = await collect((await serve(echo())).stub, **fields)
    merged = await collect((await serve(echo(), merge_window=0.1)).stub, **fields)
    assert texts(merged) == texts(at_once) == "".join(f"word{n} " for n in range(60))
    assert tokens(merged) == tokens(at_once)
    # 60 tokens in 0.3 s at least, windows of 0.1 s; on a busy machine the tokens come slower.
    assert len(merged) < len(at_once) // 2
    assert [r.seq for r in merged] == list(range(len(merged)))


@pytest.mark.parametrize("busy", [False, True])
async def test_without_a_window_each_token_is_a_message(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    assert ServerConfig().merge_window == 0
    if busy:
        always_busy(monkeypatch)
    server = await serve(echo(), busy_merge_window=0)
    scripts = [script(outputs=5, interval_ms=100)]
    responses = await collect(server.stub, stage_params=scripts, output_modalities=[TEXT])
    assert events(responses) == ["accepted", *["output"] * 5, "finished"]


async def test_tokens_share_messages_while_the_server_is_busy(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_busy(monkeypatch)
    stub = (await serve(echo(), busy_merge_window=0.2)).stub
    await asyncio.sleep(20 * pressure.TICK_S)
    scripts = [script(outputs=40, interval_ms=10)]
    responses = await collect(stub, stage_params=scripts, output_modalities=[TEXT])
    assert texts(responses) == "".join(f"word{n} " for n in range(40))
    assert len(responses) < 20


async def test_a_replica_that_was_restarted_keeps_the_window(serve: Serve) -> None:
    config = text_pipeline("paced-again", restart={"backoff": 0.05, "budget": 10})
    served = await serve(config, merge_window=LONG)
    (slot,) = served.server.engine.pools[0].slots
    (process,) = replicas("paced-again", "text")
    process.kill()
    await eventually(lambda: slot.restarts == 1 and slot.ready, 15)
    fields: dict[str, Any] = {"stage_params": [script(outputs=10, interval_ms=20)]}
    responses = await collect(served.stub, timeout=SOON, **fields)
    assert [r.output.text.text for r in responses[1:-1]] == [
        "word0 ",
        "".join(f"word{n} " for n in range(1, 10)),
    ]


async def test_text_that_another_stage_takes_does_not_wait(serve: Serve) -> None:
    stub = (await serve(echo(), merge_window=LONG)).stub
    scripts = [script(outputs=5, interval_ms=20, hang_at=3)]
    call = stub.AddRequest(ask(stage_params=scripts, output_modalities=[TEXT, AUDIO]))
    said = ""
    async with asyncio.timeout(SOON):
        async for response in call:
            said += response.output.text.text
            if said == "word0 word1 word2 ":
                break
    call.cancel()


async def test_neither_the_first_text_nor_the_end_waits(serve: Serve) -> None:
    stub = (await serve(echo(), merge_window=LONG)).stub
    fields: dict[str, Any] = {
        "stage_params": [script(outputs=10, interval_ms=20)],
        "output_modalities": [TEXT],
    }
    async with asyncio.timeout(SOON):
        call = await started(stub, **fields)
        call.cancel()
    responses = await collect(stub, timeout=SOON, **fields)
    assert [r.output.text.text for r in responses[1:-1]] == [
        "word0 ",
        "".join(f"word{n} " for n in range(1, 10)),
    ]


async def test_text_waits_no_longer_than_the_window(serve: Serve) -> None:
    stub = (await serve(echo(), merge_window=0.3)).stub
    loop = asyncio.get_running_loop()
    # Nothing comes behind the second word that could send it on its way.
    scripts = [script(outputs=3, interval_ms=20, hang_at=2)]
    call = stub.AddRequest(ask(stage_params=scripts, output_modalities=[TEXT]))
    times = []
    async for response in call:
        times.append(loop.time())
        if response.output.text.text == "word1 ":
            break
    assert 0.2 < times[2] - times[1] < 5 * 0.3
    call.cancel()


async def test_sound_does_not_wait_and_takes_the_text_before_it_along(serve: Serve) -> None:
    stub = (await serve(echo(), merge_window=LONG)).stub
    fields: dict[str, Any] = {"prompt": {"text": "one two three four"}}
    responses = await collect(
        stub,
        stage_params=[script(interval_ms=50)],
        output_modalities=[TEXT, AUDIO],
        timeout=SOON,
        **fields,
    )
    assert texts(responses) == "one two three four"
    heard = [r.output.stage for r in responses[1:-1]]
    assert heard.count("audio") == 4
    # Each word comes no later than its tone.
    spoken = [n for n, stage in enumerate(heard) if stage == "audio"]
    assert all("text" in heard[a:b] for a, b in pairwise([0, *spoken]))
    assert len(sound(responses)) == 4 * 4800


async def test_an_error_does_not_wait(serve: Serve) -> None:
    stub = (await serve(echo(), merge_window=LONG)).stub
    scripts = [script(outputs=5, interval_ms=20, fail_at=3)]
    error = await refusal(stub, stage_params=scripts, output_modalities=[TEXT], timeout=SOON)
    assert error.reason == "STAGE_ERROR"
