"""The lane alone: order, one feeder, chunks that are under way; the stage is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_grpc.errors import (
    AbortedByClient,
    FeederActive,
    InternalError,
    InvalidField,
    NotResumable,
    OmniError,
    PromptTooLong,
)
from omni_grpc.lane import Chunk, Feeder, Lane
from omni_grpc.types import CustomParams, Prompt, Text, TextDelta

T = TypeVar("T")


class ScriptedSink:
    """Takes chunks and answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Chunk, bool]] = []
        self.lane = Lane(self, self.touch)
        self.touched = 0
        self.error: OmniError | None = None

    def touch(self) -> None:
        self.touched += 1

    async def viewed(self, chunk: Chunk) -> Chunk:
        return chunk

    def send_chunk(self, number: int, chunk: Chunk, *, end: bool) -> None:
        self.sent.append((number, chunk, end))

    def close(self, error: OmniError | None) -> None:
        self.error = error
        self.lane.close(error)

    def answer(self, error: OmniError | None = None) -> None:
        """What became of the last chunk."""
        self.lane.answered(self.sent[-1][0], error)


class Obliging(ScriptedSink):
    """Takes every chunk at once."""

    def send_chunk(self, number: int, chunk: Chunk, *, end: bool) -> None:
        super().send_chunk(number, chunk, end=end)
        self.lane.answered(number, None)


def text(seq: int, text: str = "x", *, end: bool = False, **fields: Any) -> Chunk:
    """A chunk of text."""
    return Chunk(seq, TextDelta(text), end_of_segment=end, **fields)


async def chunks_of(*chunks: Chunk) -> AsyncIterator[Chunk]:
    """A feeder's stream."""
    for chunk in chunks:
        yield chunk


async def turns() -> None:
    """Lets everything that can go on do so."""
    for _ in range(8):
        await asyncio.sleep(0)


# ---------------------------------------------------------------- examples


async def test_a_stream_is_added_and_summed_up() -> None:
    sink = Obliging()
    with sink.lane.attach() as feeder:
        summary = await feeder.drive(chunks_of(text(0), text(0), text(1, end=True), text(2)))
    assert (summary.accepted_chunks, summary.duplicate_chunks, summary.segments) == (3, 1, 2)
    [*_, (_, last, end)] = sink.sent
    assert end and last.end_of_segment and last.payload is None
    assert sink.lane.ended and not sink.lane.fed


async def test_half_close_of_a_closed_segment_ends_the_input_only() -> None:
    sink = Obliging()
    with sink.lane.attach() as feeder:
        assert (await feeder.drive(chunks_of(text(0, end=True)))).segments == 1
    assert [(chunk.end_of_segment, end) for _, chunk, end in sink.sent] == [
        (True, False),
        (False, True),
    ]


async def test_the_number_counts_when_the_stage_has_taken_it() -> None:
    sink = ScriptedSink()
    adding = asyncio.create_task(sink.lane.add(text(0)))
    await turns()
    assert (sink.lane.next_seq, sink.lane.waits) == (0, False)
    sink.answer()
    assert await adding and sink.lane.next_seq == 1 and sink.lane.waits


async def test_a_refused_chunk_may_come_again() -> None:
    sink = ScriptedSink()
    adding = asyncio.create_task(sink.lane.add(text(0, end=True)))
    await turns()
    sink.answer(PromptTooLong("too long"))
    with pytest.raises(PromptTooLong):
        await adding
    assert (sink.lane.next_seq, sink.lane.segments, sink.lane.holds_nothing) == (0, 0, True)
    adding = asyncio.create_task(sink.lane.add(text(0)))
    await turns()
    sink.answer()
    assert await adding


@pytest.mark.parametrize("error", [None, PromptTooLong("too long")])
async def test_a_chunk_that_its_feeder_left_under_way(error: OmniError | None) -> None:
    """It counts if the stage takes it; the next feeder hears of it by its number."""
    sink = ScriptedSink()
    feeder = sink.lane.attach()
    pushing = asyncio.create_task(feeder.push(text(0)))
    await turns()
    pushing.cancel()
    await asyncio.wait([pushing])
    sink.lane.detach(feeder)
    again = asyncio.create_task(sink.lane.add(text(0, "again")))
    await turns()
    assert len(sink.sent) == 1, "one at a time"
    sink.answer(error)
    await turns()
    if error is None:
        assert await again is False
    else:
        assert len(sink.sent) == 2
        sink.answer()
        assert await again is True
    assert sink.lane.next_seq == 1


async def test_an_end_that_its_feeder_left_under_way() -> None:
    sink = ScriptedSink()
    await _added(sink, text(0))
    ending = asyncio.create_task(sink.lane.end())
    await turns()
    ending.cancel()
    await asyncio.wait([ending])
    sink.answer()
    await sink.lane.end()
    assert sink.lane.ended and sink.lane.segments == 1 and len(sink.sent) == 2


async def _added(sink: ScriptedSink, chunk: Chunk) -> None:
    adding = asyncio.create_task(sink.lane.add(chunk))
    await turns()
    sink.answer()
    assert await adding


async def test_an_answer_to_another_chunk_changes_nothing() -> None:
    sink = ScriptedSink()
    adding = asyncio.create_task(sink.lane.add(text(0)))
    await turns()
    sink.lane.answered(7, None)
    sink.lane.answered(7, InternalError("x"))
    await turns()
    assert not adding.done() and sink.lane.next_seq == 0
    sink.answer()
    sink.answer()
    assert await adding and sink.lane.next_seq == 1, "an answer counts once"


@pytest.mark.parametrize("error", [None, AbortedByClient("left")])
async def test_the_requests_end_ends_a_wait(error: OmniError | None) -> None:
    sink = ScriptedSink()
    adding = asyncio.create_task(sink.lane.add(text(0)))
    await turns()
    sink.lane.close(error)
    with pytest.raises(AbortedByClient if error else NotResumable):
        await adding


async def test_input_without_anything_is_the_requests_error() -> None:
    sink = Obliging()
    with sink.lane.attach() as feeder, pytest.raises(InvalidField):
        await feeder.drive(chunks_of(text(0, "")))
    assert isinstance(sink.error, InvalidField) and not sink.lane.ended


async def test_the_requests_own_prompt_is_input() -> None:
    sink = Obliging()
    await sink.lane.begin(Prompt(Text("x")))
    assert (sink.lane.next_seq, sink.lane.holds_nothing) == (0, False)
    with sink.lane.attach() as feeder:
        assert (await feeder.drive(chunks_of())).segments == 1


@pytest.mark.parametrize(
    ("chunk", "field"),
    [
        (Chunk(0), "chunk"),
        (Chunk(0, end_of_segment=True), "chunk.end_of_segment"),
        (text(0, "", end=True), "chunk.end_of_segment"),
        (text(1), "chunk.seq"),
        (text(0, "", params={"a": CustomParams({})}), "chunk.stage_params"),
    ],
)
async def test_bad_chunks(chunk: Chunk, field: str) -> None:
    sink = Obliging()
    with pytest.raises(InvalidField) as error:
        await sink.lane.add(chunk)
    assert [violation.field for violation in error.value.violations] == [field]
    assert not sink.sent


# ---------------------------------------------------------------- any order of things


class LaneMachine(RuleBasedStateMachine):
    """A feeder that pushes, breaks off and comes back, and a stage that takes or refuses, in any
    order. The model is what the stage has taken."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.sink = self.run(self._made())
        self.lane = self.sink.lane
        self.taken: list[Chunk] = []
        self.open = False
        self.segments = 0
        self.answered = 0
        self.ended = False
        self.feeder: Feeder | None = None
        self.push: asyncio.Task[None] | None = None

    async def _made(self) -> ScriptedSink:
        return ScriptedSink()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it to its end."""
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.lane.close(AbortedByClient("over"))
        if self.push is not None:
            self.run(self._settled(self.push))
        self.loop.close()

    async def _settled(self, task: asyncio.Task[None]) -> BaseException | None:
        await asyncio.wait([task])
        return None if task.cancelled() else task.exception()

    @property
    def under_way(self) -> bool:
        """Whether the stage owes its word."""
        return len(self.sink.sent) > self.answered

    @property
    def idle(self) -> bool:
        """Whether the feeder may push."""
        return self.feeder is not None and self.push is None

    @precondition(lambda self: self.feeder is None)
    @rule()
    def attach(self) -> None:
        self.feeder = self.lane.attach()

    @precondition(lambda self: self.feeder is not None)
    @rule()
    def a_second_feeder_is_refused(self) -> None:
        with pytest.raises(FeederActive):
            self.lane.attach()

    @precondition(lambda self: self.feeder is not None)
    @rule()
    def break_off(self) -> None:
        assert self.feeder is not None
        if self.push is not None:
            self.push.cancel()
            self.run(self._settled(self.push))
            self.push = None
        self.lane.detach(self.feeder)
        self.feeder = None

    @precondition(lambda self: self.idle and not self.under_way)
    @rule(
        ahead=st.integers(-2, 1),
        word=st.sampled_from(["", "x"]),
        end=st.booleans(),
        params=st.booleans(),
    )
    def push_one(self, ahead: int, word: str, end: bool, params: bool) -> None:
        seq = max(0, len(self.taken) + ahead)
        own = {"text": CustomParams({})} if params else {}
        chunk = text(seq, word, end=end, params=own)
        assert self.feeder is not None
        before = self.feeder.summary.duplicate_chunks
        self.push = self.loop.create_task(self.feeder.push(chunk))
        self.run(turns())
        if seq < len(self.taken):
            assert self.feeder.summary.duplicate_chunks == before + 1
        elif (error := self._refusal(chunk)) is not None:
            assert isinstance(self.run(self._settled(self.push)), error)
        else:
            assert self.under_way and not self.push.done()
            return
        assert self.push.done() and not self.under_way
        self.push = None

    def _refusal(self, chunk: Chunk) -> type[OmniError] | None:
        if chunk.seq > len(self.taken):
            return InvalidField
        if self.ended:
            return NotResumable
        empty_end = chunk.end_of_segment and not (self.open or chunk.holds)
        misplaced = chunk.params and (self.open or not chunk.holds)
        return InvalidField if empty_end or misplaced else None

    @precondition(lambda self: self.idle and not self.under_way and self.taken and not self.ended)
    @rule()
    def half_close(self) -> None:
        if self.lane.holds_nothing:
            return
        self.push = self.loop.create_task(self.lane.end())
        self.run(turns())
        assert self.sink.sent[-1][2] and self.sink.sent[-1][1].end_of_segment == self.open

    @precondition(lambda self: self.under_way)
    @rule(refuse=st.booleans())
    def the_stage_answers(self, refuse: bool) -> None:
        _, chunk, end = self.sink.sent[-1]
        self.sink.answer(PromptTooLong("x") if refuse else None)
        self.answered = len(self.sink.sent)
        if self.push is not None:
            error = self.run(self._settled(self.push))
            assert isinstance(error, PromptTooLong) if refuse else error is None
            self.push = None
        if not refuse:
            self.open = (self.open or chunk.holds) and not chunk.end_of_segment
            self.segments += chunk.end_of_segment
            self.ended = end
            if not end:
                self.taken.append(chunk)

    @invariant()
    def what_was_taken_counts(self) -> None:
        assert [chunk.seq for chunk in self.taken] == list(range(len(self.taken)))
        assert self.lane.next_seq == len(self.taken)
        assert (self.lane.segments, self.lane.segment_open) == (self.segments, self.open)
        assert (self.lane.ended, self.lane.fed) == (self.ended, self.feeder is not None)
        assert self.lane.waits == (not self.ended and not self.under_way)


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
