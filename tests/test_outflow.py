"""What a replica's tasks say leaves whole, in order and once, however it is joined on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_grpc.channel import Channel
from omni_grpc.errors import ErrorRecord
from omni_grpc.ipc import (
    OUTPUT_OVERHEAD,
    WINDOW_BYTES,
    Emitted,
    Ended,
    FromReplica,
    Spoken,
    StageSpec,
    Stop,
    Submit,
    Task,
    ToReplica,
    output_size,
    text_size,
)
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.host import Host
from omni_grpc.stages.outflow import JOINED_CHARACTERS, JOINED_TOKENS, Outflow, Stream, plain
from omni_grpc.types import (
    Audio,
    AudioFormat,
    EventChange,
    EventState,
    Finish,
    FinishReason,
    Progress,
    StageFacts,
    StageOutput,
    TextDelta,
    TokenLogprobs,
    Usage,
)

LONG = 60.0
"""A window that no test sees the end of."""
SHORT = 0.05
STOP = Finish(FinishReason.STOP)
PCM = AudioFormat(24000)
LOGPROBS = [TokenLogprobs(1, -1.0, 1)]
HUGE = StageOutput(Audio(bytes(WINDOW_BYTES), PCM))
"""Fills a window alone."""


class Line:
    """A replica's end of the line, and what left over it."""

    def __init__(self, window: float = LONG) -> None:
        self.sent: list[FromReplica] = []
        self.outflow = Outflow(self.sent.append)
        self.outflow.window = window

    def stream(self, task: int = 1, *, joins: bool = True, segment: int = 0) -> Stream:
        return Stream(self.outflow, task, joins=joins, segment=segment)

    async def begun(self, task: int = 1, **fields: Any) -> Stream:
        """A stream whose present answer's first text has left."""
        stream = self.stream(task, **fields)
        stream.put(word("first"))
        assert [text for _, text, _ in await self.taken()] == ["first"]
        return stream

    async def taken(self) -> list[tuple[int, str, list[int]]]:
        """The plain text that has left by now, task by task; nothing else has."""
        await turn()
        said: list[tuple[int, str, list[int]]] = []
        for message in self.sent:
            assert isinstance(message, Spoken)
            said += zip(message.tasks, message.texts, message.token_ids, strict=True)
        self.sent.clear()
        return said

    async def emitted(self) -> list[StageOutput]:
        """The outputs that have left by now, columns taken apart."""
        await turn()
        outputs = [output for message in self.sent for _, output in apart(message)]
        self.sent.clear()
        return outputs


async def turn() -> None:
    """The loop's present turn is over, and what it asked for next."""
    for _ in range(3):
        await asyncio.sleep(0)


def apart(message: FromReplica) -> list[tuple[int, StageOutput]]:
    """A message's outputs with their tasks."""
    match message:
        case Emitted(task, output):
            return [(task, output)]
        case Spoken(tasks, texts, token_ids):
            deltas = map(TextDelta, texts, token_ids)
            return [(t, StageOutput(d)) for t, d in zip(tasks, deltas, strict=True)]
    raise AssertionError(message)


def word(text: str, **fields: Any) -> StageOutput:
    """An output of one token, whose number is the text's length."""
    return StageOutput(TextDelta(text, [len(text)]), **fields)


# ---------------------------------------------------------------- without a window


async def test_text_of_one_turn_leaves_in_one_message() -> None:
    line = Line(window=0)
    streams = [line.stream(task) for task in (1, 2, 3)]
    for text in ("a", "b"):
        for stream in streams:
            stream.put(word(text))
    await turn()
    assert line.sent == [Spoken([1, 2, 3] * 2, ["a"] * 3 + ["b"] * 3, [[1]] * 6)]


async def test_without_a_window_text_leaves_in_its_turn() -> None:
    line = Line(window=0)
    stream = await line.begun()
    for text in ("a", "b"):
        stream.put(word(text))
        assert await line.taken() == [(1, text, [1])]


async def test_text_that_may_not_join_leaves_in_its_turn() -> None:
    line = Line()
    stream = await line.begun(joins=False)
    stream.put(word("a"))
    assert await line.taken() == [(1, "a", [1])]


# ---------------------------------------------------------------- within a window


async def test_text_of_a_begun_answer_is_held_and_joined() -> None:
    line = Line()
    stream = await line.begun()
    for text in ("a", "b"):
        stream.put(word(text))
        assert await line.taken() == []
    stream.close()
    assert await line.emitted() == [StageOutput(TextDelta("ab", [1, 1]))]


async def test_held_text_leaves_when_the_window_ends_with_all_else_that_is_held() -> None:
    line = Line(SHORT)
    streams = [await line.begun(task) for task in (1, 2)]
    loop = asyncio.get_running_loop()
    start = loop.time()
    for stream in streams:
        stream.put(word("a"))
        stream.put(word("b"))
    while not line.sent:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(SHORT / 10)
    assert loop.time() - start > SHORT * 0.9
    assert line.sent == [Spoken([1, 2], ["ab"] * 2, [[1, 1]] * 2)]


async def test_a_window_that_is_closed_holds_only_what_it_held() -> None:
    line = Line()
    stream, other = await line.begun(1), await line.begun(2)
    stream.put(word("a"))
    line.outflow.window = 0
    other.put(word("b"))
    assert await line.taken() == [(2, "b", [1])]
    stream.close()
    assert await line.emitted() == [word("a")]


async def test_the_end_takes_held_text_along_as_one_output() -> None:
    line = Line()
    stream = await line.begun()
    stream.put(word("a"))
    stream.put(word("bc", finish=STOP, usage=Usage(1, 0, 2)))
    (end,) = await line.emitted()
    assert end == StageOutput(TextDelta("abc", [1, 2]), finish=STOP, usage=Usage(1, 0, 2))


@pytest.mark.parametrize(
    "output",
    [
        StageOutput(finish=STOP),
        StageOutput(usage=Usage(1, 0, 2)),
        StageOutput(progress=Progress(1)),
        StageOutput(event=EventChange("e", EventState.REJECTED)),
        StageOutput(Audio(b"ab", PCM)),
        word("other", index=1),
        StageOutput(TextDelta("sure", [1], LOGPROBS)),
        StageOutput(TextDelta("sure", [1], [], LOGPROBS)),
        StageOutput(TextDelta("sure", [1], LOGPROBS), finish=STOP),
    ],
    ids=["finish", "usage", "progress", "event", "sound", "index", "logprobs", "prompt", "both"],
)
async def test_what_is_not_held_sends_held_text_before_it(output: StageOutput) -> None:
    assert not plain(output)
    line = Line()
    stream = await line.begun()
    stream.put(word("a"))
    stream.put(output)
    assert line.sent == [Emitted(1, word("a")), Emitted(1, output)], "in the same turn"
    assert await line.emitted() == [word("a"), output], "and only once"


async def test_each_segments_first_text_is_not_held() -> None:
    line = Line()
    stream = await line.begun()
    stream.put(word("held", segment_end=True, finish=STOP))
    stream.put(word("again"))
    first, second = await line.emitted()
    assert (first.segment, first.segment_end) == (0, True)
    assert second == word("again", segment=1)
    stream.put(word("a"))
    assert await line.taken() == []
    stream.put(word("b", segment_end=True))
    assert await line.emitted() == [
        StageOutput(TextDelta("ab", [1, 1]), segment=1, segment_end=True)
    ]


async def test_text_of_a_later_segment_tells_its_number() -> None:
    line = Line(SHORT)
    stream = line.stream(segment=3)
    stream.put(word("first"))
    assert await line.emitted() == [word("first", segment=3)]
    stream.put(word("a"))
    await asyncio.sleep(2 * SHORT)
    assert await line.emitted() == [word("a", segment=3)]


@pytest.mark.parametrize(
    ("text", "token_ids"),
    [("x" * (JOINED_CHARACTERS // 8), [1]), ("x", [*range(JOINED_TOKENS // 8)]), ("", [])],
    ids=["characters", "tokens", "nothing"],
)
async def test_joined_text_has_a_limit(text: str, token_ids: list[int]) -> None:
    line = Line()
    stream = await line.begun()
    said = 0
    while not line.sent:
        assert said < 2 * JOINED_TOKENS
        stream.put(StageOutput(TextDelta(text, token_ids)))
        line.outflow.flush()
        said += 1
    (whole,) = await line.emitted()
    assert isinstance(whole.payload, TextDelta)
    assert (whole.payload.text, whole.payload.token_ids) == (text * said, token_ids * said)
    assert len(whole.payload.text) <= JOINED_CHARACTERS + len(text)
    assert len(whole.payload.token_ids) <= JOINED_TOKENS + len(token_ids)


async def test_what_is_dropped_never_leaves() -> None:
    line = Line(SHORT)
    stream, other = await line.begun(1), await line.begun(2)
    stream.put(word("a"))
    other.put(word("b"))
    stream.drop()
    await asyncio.sleep(2 * SHORT)
    assert await line.taken() == [(2, "b", [1])]


async def test_text_that_left_early_does_not_leave_again() -> None:
    """Its stream is still among those that wait for the window's end."""
    line = Line(SHORT)
    stream = await line.begun()
    stream.put(word("a"))
    stream.put(StageOutput(progress=Progress(1)))
    stream.put(word("b"))
    await asyncio.sleep(2 * SHORT)
    assert [output.payload for output in await line.emitted()] == [
        TextDelta("a", [1]),
        None,
        TextDelta("b", [1]),
    ]
    await asyncio.sleep(2 * SHORT)
    assert not line.sent


# ---------------------------------------------------------------- the window of bytes


def behind(stream: Stream) -> bool:
    """Whether it would have its task wait."""
    waiting = stream.room()
    try:
        waiting.send(None)
    except StopIteration:
        return False
    waiting.close()
    return True


@pytest.mark.parametrize("window", [0.0, LONG])
async def test_a_consumer_that_is_behind_holds_text_until_it_takes(window: float) -> None:
    line = Line(window)
    stream = line.stream()
    stream.put(HUGE)
    assert behind(stream)
    line.sent.clear()
    for text in ("a", "b"):
        stream.say(text, [1])
        assert await line.taken() == []
    stream.give(OUTPUT_OVERHEAD)
    assert behind(stream), "no less than a window is under way"
    assert await line.taken() == []
    stream.give(1)
    assert await line.taken() == [(1, "ab", [1, 1])]


async def test_a_task_that_waits_goes_on_when_its_consumer_took() -> None:
    line = Line(0)
    stream = line.stream()
    stream.put(HUGE)
    waiting = asyncio.create_task(stream.room())
    await turn()
    assert not waiting.done()
    stream.give(output_size(HUGE))
    async with asyncio.timeout(1):
        await waiting


async def test_text_in_columns_counts_as_much_as_the_consumer_counts() -> None:
    line, owed = Line(0), 0
    stream = line.stream()
    while not behind(stream):
        stream.put(word("x" * 8000))
        owed += sum(text_size(text, ids) for _, text, ids in await line.taken())
    assert WINDOW_BYTES <= owed < WINDOW_BYTES + 9000
    stream.give(owed - WINDOW_BYTES)
    assert behind(stream)
    stream.give(1)
    assert not behind(stream)


async def test_a_task_that_never_waits_for_anything_fills_its_window_all_the_same() -> None:
    """The loop has no turn meanwhile in which its text could leave."""
    line, given = Line(0), 0
    stream = line.stream()
    while not behind(stream):
        stream.put(word("x" * 1000))
        given += 1
    assert given <= WINDOW_BYTES // 1000
    assert sum(output_size(output) for output in await line.emitted()) >= WINDOW_BYTES


async def test_a_text_that_is_none_is_refused_and_leaves_no_trace() -> None:
    line = Line(window=0)
    stream, other = line.stream(1), line.stream(2)
    stream.put(word("a"))
    other.put(word("b"))
    with pytest.raises(TypeError):
        stream.put(StageOutput(TextDelta(b"no")))  # type: ignore[arg-type]
    stream.drop()
    assert await line.taken() == [(1, "a", [1]), (2, "b", [1])]


async def test_text_behind_an_unread_window_leaves_when_the_task_ends() -> None:
    line = Line(0)
    stream = line.stream()
    stream.put(HUGE)
    stream.say("a", [1])
    stream.close()
    assert [message.output for message in line.sent if isinstance(message, Emitted)] == [
        HUGE,
        word("a"),
    ]


def test_plain_text_has_one_size() -> None:
    assert text_size("añ🧑", [1, 2]) == output_size(StageOutput(TextDelta("añ🧑", [1, 2])))


# ---------------------------------------------------------------- whatever happens

tasks = st.integers(0, 2)
small = st.text("añ🧑 ", max_size=4)
large = st.sampled_from([100, JOINED_CHARACTERS + 1, WINDOW_BYTES // 2]).map(lambda n: "x" * n)
ids = st.lists(st.integers(0, 9), max_size=4)
words = st.builds(TextDelta, small | large, ids)
plain_outputs = st.builds(StageOutput, words)
others = st.one_of(
    st.builds(StageOutput, words, index=st.just(1)),
    st.builds(StageOutput, words, segment_end=st.just(True), finish=st.just(STOP)),
    st.builds(StageOutput, st.builds(TextDelta, small, ids, st.just(LOGPROBS))),
    st.just(StageOutput(progress=Progress(1))),
    st.builds(lambda n: StageOutput(Audio(bytes(n), PCM)), st.sampled_from([2, WINDOW_BYTES])),
)
actions = st.one_of(
    st.tuples(st.just("say"), tasks, words),
    st.tuples(st.just("put"), tasks, plain_outputs | others),
    st.tuples(st.just("give"), tasks, st.none()),
    st.tuples(st.just("pace"), tasks, st.sampled_from([0.0, 0.002, LONG])),
    st.tuples(st.just("turn"), tasks, st.sampled_from([0.0, 0.003])),
)


class Pair:
    """A stream and its consumer; what went in, and what came out."""

    def __init__(self, line: Line, task: int, *, joins: bool) -> None:
        self.stream = line.stream(task, joins=joins, segment=0)
        self._line = line
        self.given: list[StageOutput] = []
        self.got: list[StageOutput] = []
        self.owed = 0

    def put(self, output: StageOutput) -> None:
        """As a task does: it waits while the consumer is behind."""
        if behind(self.stream):
            self.take()
        self._note(output)
        self.stream.put(output)

    def say(self, delta: TextDelta) -> None:
        """As a short cut does: it cannot wait."""
        self._note(StageOutput(delta))
        self.stream.say(delta.text, delta.token_ids)

    def _note(self, output: StageOutput) -> None:
        self.given.append(output)

    def take(self) -> None:
        """The consumer takes all that is under way, and what was kept because of that."""
        self._line.outflow.flush()
        self.stream.give(self.owed)
        self.owed = 0
        assert not behind(self.stream), "both count the same"

    def check_count(self) -> None:
        """Of what its consumer has taken, nothing counts any more, and not more than that."""
        self.take()
        self.stream.put(StageOutput(Audio(bytes(WINDOW_BYTES - OUTPUT_OVERHEAD - 1), PCM)))
        assert not behind(self.stream)
        self.stream.put(StageOutput(progress=Progress(1)))
        assert behind(self.stream), "less is counted than was sent"

    def end(self) -> None:
        """The task says its last word, or has said it."""
        if len(self.given) % 2:
            self.put(StageOutput(TextDelta("end", [7]), finish=STOP))
        self.stream.close()
        self.stream.drop()


def flat(outputs: list[StageOutput]) -> list[Any]:
    """Outputs as one sees them who takes plain text letter by letter, and token by token. What
    joins an end is plain text in front of it."""
    seen: list[Any] = []
    segment, tokens = 0, []
    for output in outputs:
        payload = output.payload
        if isinstance(payload, TextDelta) and not (output.index or payload.logprobs):
            seen += payload.text
            tokens += payload.token_ids
            payload = None
        else:
            seen.append((payload, output.index, segment))
        if output.finish or output.progress:
            seen.append((output.finish, output.progress, segment))
        segment += output.segment_end
    return [seen, tokens]


@settings(max_examples=150)
@given(st.lists(actions, max_size=30), st.sampled_from([0.0, 0.002, LONG]))
def test_whatever_is_said_arrives_whole_in_order_and_once(
    steps: list[tuple[str, int, Any]], window: float
) -> None:
    asyncio.run(played(steps, window))


async def played(steps: list[tuple[str, int, Any]], window: float) -> None:
    """Plays the steps, and ends all tasks."""
    line = Line(window)
    pairs = [Pair(line, task, joins=task != 2) for task in range(3)]

    def receive(message: FromReplica) -> None:
        for task, output in apart(message):
            pairs[task].got.append(output)
            pairs[task].owed += output_size(output)

    line.outflow.send = receive
    for what, task, value in steps:
        match what:
            case "say" | "put":
                getattr(pairs[task], what)(value)
            case "give":
                pairs[task].take()
            case "pace":
                line.outflow.window = value
            case "turn":
                await asyncio.sleep(value)
    for pair in pairs:
        pair.end()
        segments = [output.segment for output in pair.got]
        assert segments == sorted(segments)
        assert flat(pair.got) == flat(pair.given)
        assert all(one.segment == n for one, n in zip(pair.got, counted(pair.got), strict=True))
    said = [len(pair.got) for pair in pairs]
    await asyncio.sleep(0.005)
    assert [len(pair.got) for pair in pairs] == said, "nothing comes behind an end"
    for pair in pairs:
        pair.check_count()


def counted(outputs: list[StageOutput]) -> list[int]:
    """Each output's segment, by the ends of segments before it."""
    numbers, segment = [], 0
    for output in outputs:
        numbers.append(segment)
        segment += output.segment_end
    return numbers


# ---------------------------------------------------------------- what no message can carry


class Careless(Stage[None]):
    """Says what it is asked as `request_id`, of "bad" half a character; more when it may."""

    def __init__(self) -> None:
        super().__init__(StageSpec("p", "careless", 0, "python", "model", "cpu"))
        self.gate = asyncio.Event()

    async def load(self) -> StageFacts:
        return StageFacts()

    async def prepare(self, task: Task) -> None: ...

    async def run(self, task: Task, prepared: None, inputs: Inputs) -> AsyncIterator[StageOutput]:
        yield word("one ")
        yield word("\ud83d" if task.request_id == "bad" else task.request_id)
        await self.gate.wait()
        yield word(" two")


@pytest.fixture
async def line(tmp_path: Path) -> AsyncIterator[tuple[Careless, Channel[Any, Any]]]:
    """A stage that is hosted, and the server's end of its line."""
    context = zmq.Context()
    address = f"ipc://{tmp_path / 'line'}"
    server: Channel[Any, Any] = Channel.bind(context, address, FromReplica)
    replica: Channel[Any, Any] = Channel.connect(context, address, ToReplica)
    stage = Careless()
    serving = asyncio.create_task(Host(stage, replica).serve())
    yield stage, server
    server.send(Stop())
    await serving
    server.close()
    replica.close()
    context.destroy(linger=0)


def text_of(output: StageOutput) -> str:
    """An output's text."""
    return output.payload.text if isinstance(output.payload, TextDelta) else ""


async def test_text_that_cannot_be_encoded_fails_its_own_task_only(
    line: tuple[Careless, Channel[Any, Any]],
) -> None:
    stage, server = line
    said: dict[int, list[StageOutput]] = {1: [], 2: [], 3: []}
    ends: dict[int, ErrorRecord | None] = {}

    async def receive(count: int) -> None:
        """Until so many tasks have ended, and the others have said something."""
        while len(ends) < count or not (said[1] and said[3]):
            for message in await server.receive():
                if isinstance(message, Ended):
                    ends[message.task] = message.error
                elif isinstance(message, Emitted | Spoken):
                    for task, output in apart(message):
                        said[task].append(output)

    for task, name in enumerate(("good", "bad", "fine"), 1):
        server.send(Submit(Task(task, name, None, 10.0)))
    async with asyncio.timeout(5):
        await receive(1)
        (error,) = ends.values()
        assert (list(ends), error and error.reason) == ([2], "STAGE_ERROR")
        stage.gate.set()
        await receive(3)
    assert ends[1] is ends[3] is None
    whole = {task: "".join(map(text_of, outputs)) for task, outputs in said.items()}
    assert whole == {1: "one good two", 2: "one ", 3: "one fine two"}
