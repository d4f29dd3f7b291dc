"""A replica's outputs on their way to the server: in columns, joined within a window, in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_grpc.ipc import (
    OUTPUT_OVERHEAD,
    WINDOW_BYTES,
    Emitted,
    FromReplica,
    Spoken,
    output_size,
    text_size,
)
from omni_grpc.stages.outflow import JOINED_TOKENS, Outflow, Stream
from omni_grpc.types import (
    Finish,
    FinishReason,
    Progress,
    StageOutput,
    TextDelta,
    TokenLogprobs,
    Usage,
)

LONG = 10.0
"""Longer than any test waits."""
END = Finish(FinishReason.STOP)


class Line:
    """What was sent, and the outflow that sent it."""

    def __init__(self, window: float = 0.0) -> None:
        self.sent: list[FromReplica] = []
        self.outflow = Outflow(self.sent.append)
        self.outflow.window = window

    def stream(self, task: int = 1, *, joins: bool = True, segment: int = 0) -> Stream:
        return Stream(self.outflow, task, joins=joins, segment=segment)

    async def turn(self) -> list[FromReplica]:
        """What was sent until the end of this turn of the loop, taken."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent = list(self.sent)
        self.sent.clear()
        return sent


def spoken(task: int, text: str, *ids: int) -> Spoken:
    return Spoken([task], [text], [list(ids)])


def delta(text: str, *ids: int) -> StageOutput:
    return StageOutput(TextDelta(text, list(ids)))


async def begun(line: Line, **fields: Any) -> Stream:
    """A stream whose first text has left."""
    stream = line.stream(**fields)
    stream.say("first", [1])
    await line.turn()
    return stream


# ---------------------------------------------------------------- columns and windows


async def test_tasks_that_speak_in_one_turn_share_a_message() -> None:
    line = Line()
    one, two = line.stream(1), line.stream(2)
    one.put(delta("a", 1))
    two.put(delta("b", 2))
    one.say("c", [3])
    assert await line.turn() == [Spoken([1, 2], ["ac", "b"], [[1, 3], [2]])]


async def test_only_the_first_text_of_an_answer_leaves_at_once() -> None:
    line = Line(LONG)
    stream = line.stream()
    stream.say("a", [1])
    assert await line.turn() == [spoken(1, "a", 1)]
    stream.say("b", [2])
    assert await line.turn() == []


async def test_text_leaves_when_the_window_ends() -> None:
    line = Line(0.05)
    one, two = await begun(line, task=1), await begun(line, task=2)
    one.say("a", [1])
    two.say("b", [2])
    one.say("c", [3])
    async with asyncio.timeout(5):
        while not line.sent:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    assert await line.turn() == [Spoken([1, 2], ["ac", "b"], [[1, 3], [2]])]


async def test_text_of_a_task_that_does_not_join_never_waits() -> None:
    line = Line(LONG)
    stream = await begun(line, joins=False)
    stream.say("a", [1])
    assert await line.turn() == [spoken(1, "a", 1)]


async def test_a_full_message_does_not_wait() -> None:
    line = Line(LONG)
    stream = await begun(line)
    for token in range(JOINED_TOKENS + 1):
        stream.say("x", [token])
    (message,) = await line.turn()
    assert isinstance(message, Spoken)
    assert message.token_ids == [list(range(JOINED_TOKENS + 1))]
    stream.say("y", [0])
    assert await line.turn() == []


# ---------------------------------------------------------------- what comes behind text


async def test_an_end_and_the_text_before_it_are_one_output() -> None:
    line = Line(LONG)
    stream = await begun(line)
    stream.say("a", [1])
    stream.put(StageOutput(TextDelta("b", [2]), finish=END))
    assert await line.turn() == [Emitted(1, StageOutput(TextDelta("ab", [1, 2]), finish=END))]


@pytest.mark.parametrize(
    "output",
    [
        StageOutput(progress=Progress(1)),
        StageOutput(usage=Usage(1, 0, 1)),
        StageOutput(finish=END),
        StageOutput(TextDelta("b", [2]), index=1),
        StageOutput(TextDelta("b", [2], [TokenLogprobs(2, -1.0)])),
        StageOutput(TextDelta("b", [2], [], [TokenLogprobs(2, -1.0)]), finish=END),
    ],
    ids=["progress", "usage", "end alone", "another answer", "logprobs", "prompt logprobs"],
)
async def test_another_output_takes_the_text_before_it_along(output: StageOutput) -> None:
    line = Line(LONG)
    stream = await begun(line)
    stream.say("a", [1])
    stream.put(output)
    assert await line.turn() == [Emitted(1, delta("a", 1)), Emitted(1, output)]


async def test_each_segment_begins_at_once_and_has_its_number() -> None:
    line = Line(LONG)
    stream = await begun(line)
    stream.say("a", [1])
    stream.put(StageOutput(finish=END, segment_end=True))
    await line.turn()
    stream.say("b", [2])
    stream_of_one = Emitted(1, StageOutput(TextDelta("b", [2]), segment=1))
    assert await line.turn() == [stream_of_one]
    stream.say("c", [3])
    assert await line.turn() == []
    stream.put(StageOutput(finish=END, segment_end=True))
    held = Emitted(1, StageOutput(TextDelta("c", [3]), segment=1))
    end = Emitted(1, StageOutput(finish=END, segment_end=True, segment=1))
    assert await line.turn() == [held, end]


async def test_a_task_that_has_said_all_leaves_nothing_behind() -> None:
    line = Line(LONG)
    stream = await begun(line)
    stream.say("a", [1])
    stream.close()
    stream.close()
    assert await line.turn() == [Emitted(1, delta("a", 1))]


async def test_what_a_failed_task_would_have_said_is_dropped() -> None:
    line = Line(0.02)
    stream = await begun(line)
    stream.say("a", [1])
    stream.drop()
    await asyncio.sleep(0.1)
    assert await line.turn() == []


# ---------------------------------------------------------------- a consumer that is behind


async def test_text_is_kept_while_the_consumer_is_behind() -> None:
    line = Line()
    stream = line.stream()
    big = StageOutput(TextDelta("x" * WINDOW_BYTES, [1]), finish=END)
    stream.put(big)
    await line.turn()
    waiting = asyncio.create_task(stream.room())
    stream.say("a", [1])
    stream.say("b", [2])
    assert await line.turn() == []
    assert not waiting.done()
    stream.give(output_size(big))
    async with asyncio.timeout(5):
        await waiting
    assert await line.turn() == [spoken(1, "ab", 1, 2)]


async def test_both_ends_count_alike() -> None:
    assert text_size("abc", [1, 2]) == output_size(delta("abc", 1, 2)) == OUTPUT_OVERHEAD + 19
    line = Line()
    stream = line.stream()
    # As much as the window holds, credited as the server counts it: there is always room again.
    for _ in range(3):
        while stream._open is None:
            stream.say("x" * 4096, [1])
            await asyncio.sleep(0)
        sent = await line.turn()
        assert all(isinstance(message, Spoken) for message in sent)
        for message in sent:
            assert isinstance(message, Spoken)
            stream.give(text_size(message.texts[0], message.token_ids[0]))
        async with asyncio.timeout(5):
            await stream.room()
    assert stream._outstanding < WINDOW_BYTES


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "put", "progress", "turn", "window", "none", "full", "give"]),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_each_task_is_heard_whole_and_in_order(steps: list[Step]) -> None:
    asyncio.run(_heard_whole(steps))


async def _heard_whole(steps: list[Step]) -> None:
    line = Line()
    streams = {task: line.stream(task) for task in (1, 2, 3)}
    said: dict[int, list[object]] = {task: [] for task in streams}
    for number, (step, task) in enumerate(steps):
        stream = streams[task]
        match step:
            case "say":
                stream.say(f"{number} ", [number])
                said[task].append(number)
            case "put":
                stream.put(delta(f"{number} ", number))
                said[task].append(number)
            case "progress":
                stream.put(StageOutput(progress=Progress(number)))
                said[task].append(Progress(number))
            case "turn":
                await asyncio.sleep(0)
            case "window":
                line.outflow.window = LONG
            case "none":
                line.outflow.window = 0.0
            case "full":
                stream._count(WINDOW_BYTES)
            case "give":
                stream.give(WINDOW_BYTES)
    for stream in streams.values():
        stream.close()
    heard: dict[int, list[object]] = {task: [] for task in streams}
    texts = dict.fromkeys(streams, "")
    for message in await line.turn():
        if isinstance(message, Spoken):
            for task, text, ids in zip(
                message.tasks, message.texts, message.token_ids, strict=True
            ):
                heard[task] += ids
                texts[task] += text
        elif isinstance(message, Emitted):
            if isinstance(payload := message.output.payload, TextDelta):
                heard[message.task] += payload.token_ids
                texts[message.task] += payload.text
            if message.output.progress is not None:
                heard[message.task].append(message.output.progress)
    assert heard == said
    for task, text in texts.items():
        assert text == "".join(f"{one} " for one in said[task] if isinstance(one, int))
