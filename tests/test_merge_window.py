"""A merge window: text waits a moment for more to join it, and nothing else waits.

Windows here are so long that a wait which should not be there runs into a test's own limit."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from omni_grpc.config import ServerConfig
from omni_grpc.errors import InvalidField
from omni_grpc.outbox import Outbox, Queued, Routed
from omni_grpc.types import (
    Event,
    Finished,
    Output,
    Progress,
    StageProgress,
    TextDelta,
    Timings,
    UpdateRejected,
    Usage,
)
from tests.conftest import Serve
from tests.support import (
    AUDIO,
    TEXT,
    Response,
    ask,
    collect,
    echo,
    events,
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


def word(text: str, *, stage: str = "text", index: int = 0, segment: int = 0) -> Output:
    return Output(stage, index, segment, TextDelta(text, [len(text)]))


# ---------------------------------------------------------------- over the wire


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


async def test_without_a_window_each_token_is_a_message(serve: Serve) -> None:
    assert ServerConfig().merge_window == 0
    scripts = [script(outputs=5, interval_ms=100)]
    responses = await collect(
        (await serve(echo())).stub, stage_params=scripts, output_modalities=[TEXT]
    )
    assert events(responses) == ["accepted", *["output"] * 5, "finished"]


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


# ---------------------------------------------------------------- the outbox alone


async def taken(box: Outbox) -> Queued | None:
    """What is given out without a wait; None: what waits is held."""
    try:
        async with asyncio.timeout(0.02):
            return await box.get()
    except TimeoutError:
        return None


async def begun(*, window: float = LONG) -> Outbox:
    """An outbox whose reader has taken the first text of the answer `text`, 0, 0."""
    box = Outbox(1 << 20, window)
    box.put(word("first"))
    assert await taken(box) == word("first")
    return box


async def test_text_of_a_begun_answer_is_held() -> None:
    box = await begun()
    box.put(word("a"))
    assert await taken(box) is None
    box.put(word("b"))
    assert await taken(box) is None
    assert len(box) == 1
    box.close(discard=False)
    held = await taken(box)
    assert held == Output("text", 0, 0, TextDelta("ab", [1, 1]))


@pytest.mark.parametrize(
    "other", [{"stage": "other"}, {"index": 1}, {"segment": 1}], ids=lambda o: next(iter(o))
)
async def test_the_first_text_of_another_answer_is_not_held(other: dict[str, Any]) -> None:
    box = await begun()
    box.put(word("a", **other))
    assert await taken(box) == word("a", **other)


@pytest.mark.parametrize(
    "event",
    [
        StageProgress("text", Progress(1)),
        Finished((), Usage(), Timings(0, 0, 0, {}, {}, 0)),
        word("x" * 9000),
    ],
    ids=["progress", "finished", "text that does not fit"],
)
async def test_what_comes_behind_held_text_sends_it_on_its_way(event: Event) -> None:
    box = await begun()
    box.put(word("a"))
    box.put(event)
    assert await taken(box) == word("a")
    assert await taken(box) == event


async def test_a_notice_goes_before_held_text() -> None:
    box = await begun()
    notice = Routed(UpdateRejected(0, InvalidField("text", "no").record()))
    box.put(word("a"))
    box.put_urgent(notice)
    assert await taken(box) == notice
    assert await taken(box) == word("a")


async def test_the_first_text_after_an_interrupt_is_not_held() -> None:
    box = await begun()
    box.put(word("dropped"))
    assert box.discard_outputs() == [word("dropped")]
    box.put(word("again"))
    assert await taken(box) == word("again")


async def test_a_reader_that_is_cancelled_while_text_is_held_loses_nothing() -> None:
    box = await begun(window=0.2)
    box.put(word("a"))
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    async with asyncio.timeout(SOON):
        assert await box.get() == word("a")


async def test_a_closed_outbox_holds_nothing_and_no_timer() -> None:
    box = await begun()
    box.put(word("a"))
    box.close(discard=True)
    async with asyncio.timeout(SOON):
        assert await box.get() is None
    assert box.bytes == 0
