"""The queue between stages and the client: order, merging, sizes, closing; and the cutting of
outputs to the contract's limits."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_grpc import cutter as cutting
from omni_grpc.cutter import Cutter, cut_tensors, cut_text
from omni_grpc.outbox import Outbox, event_size, merge
from omni_grpc.types import (
    Accepted,
    Audio,
    AudioChunk,
    AudioEncoding,
    AudioFormat,
    CandidateLogprob,
    DataType,
    Event,
    Finished,
    Image,
    ImageChunk,
    Output,
    Payload,
    Progress,
    StageProgress,
    Tensor,
    TensorChunk,
    Tensors,
    TextDelta,
    Timings,
    TokenLogprobs,
    Usage,
    Video,
    VideoChunk,
)
from tests.support import encoded

MIB = 1 << 20
PCM = AudioFormat(24000)
LIMIT = 4096

names = st.sampled_from(["a", "b"])
indices = st.integers(0, 1)


def text_event(stage: str, index: int, text: str, tokens: list[int]) -> Output:
    return Output(stage, index, 0, TextDelta(text, tokens))


events = st.one_of(
    st.builds(
        text_event,
        names,
        indices,
        st.text(max_size=50),
        st.lists(st.integers(0, 2**32 - 1), max_size=5),
    ),
    st.builds(
        lambda stage, data: Output(stage, 0, 0, AudioChunk(data, 0, PCM)),
        names,
        st.binary(max_size=500),
    ),
    st.builds(lambda stage, step: StageProgress(stage, Progress(step)), names, st.integers(0, 9)),
    st.just(Accepted("id", "echo", (), ())),
)


def flat(sequence: list[Event]) -> list[Any]:
    """The events as a reader sees them who takes text letter by letter and token by token.

    Of signs of progress that follow each other, the last of a stage counts."""
    seen: list[Any] = []
    for event in sequence:
        match event:
            case Output(content=TextDelta() as delta):
                key = (event.stage, event.index, event.segment)
                if not (seen and seen[-1][0] == key):
                    seen.append([key, "", []])
                seen[-1][1] += delta.text
                seen[-1][2] += delta.token_ids
            case StageProgress() if seen and seen[-1][0] == ("progress", event.stage):
                seen[-1][1] = event
            case StageProgress():
                seen.append([("progress", event.stage), event])
            case _:
                seen.append([None, event])
    return seen


class OutboxMachine(RuleBasedStateMachine):
    """An Outbox against a list of everything that was put in."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Outbox(LIMIT)
        self.put: list[Event] = []
        self.got: list[Event] = []
        self.closed = self.discarded = False

    def take(self) -> Event | None:
        """One `get` that must not wait."""
        getting = self.box.get()
        try:
            getting.send(None)
        except StopIteration as end:
            event: Event | None = end.value
            return event
        raise AssertionError("it waits")

    @rule(event=events)
    def add(self, event: Event) -> None:
        self.box.put(event)
        if not self.closed:
            self.put.append(event)

    @precondition(lambda self: len(self.box) > 0)
    @rule()
    def read(self) -> None:
        event = self.take()
        assert event is not None
        self.got.append(event)

    @rule(discard=st.booleans())
    def close(self, discard: bool) -> None:
        self.box.close(discard=discard)
        self.closed = True
        self.discarded |= discard

    @precondition(lambda self: self.closed and len(self.box) == 0)
    @rule()
    def read_the_end(self) -> None:
        assert self.take() is None

    @invariant()
    def sizes_add_up(self) -> None:
        waiting = [event for event, _ in self.box._events]
        assert self.box.bytes == sum(event_size(event) for event in waiting)
        assert len(self.box) == len(waiting)
        assert self.box.congested == (self.box.bytes > LIMIT)
        assert self.box.drained == (self.box.bytes * 2 <= LIMIT)
        assert not (self.box.congested and self.box.drained)

    @invariant()
    def nothing_is_lost_or_moved(self) -> None:
        if self.discarded:
            assert len(self.box) == 0 or not self.closed
            return
        waiting: list[Any] = [event for event, _ in self.box._events]
        assert content(self.got + waiting) == content(self.put)

    @invariant()
    def neighbours_are_merged(self) -> None:
        waiting = [event for event, _ in self.box._events]
        assert all(merge(a, b) is None for a, b in pairwise(waiting))


def content(sequence: list[Event]) -> list[Any]:
    """What nobody may lose: everything but signs of progress, whose place newer ones take."""
    return [entry for entry in flat(sequence) if not isinstance(entry[-1], StageProgress)]


TestOutbox = OutboxMachine.TestCase
TestOutbox.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- merging


def test_text_of_one_stage_and_index_is_merged() -> None:
    box = Outbox(LIMIT)
    for number in range(3):
        box.put(text_event("a", 0, f"{number} ", [number]))
    assert len(box) == 1
    assert asyncio.run(box.get()) == text_event("a", 0, "0 1 2 ", [0, 1, 2])


@pytest.mark.parametrize(
    "other",
    [
        Output("b", 0, 0, TextDelta("x")),
        Output("a", 1, 0, TextDelta("x")),
        Output("a", 0, 1, TextDelta("x")),
        Output("a", 0, 0, AudioChunk(b"", 0, PCM)),
        StageProgress("a", Progress(1)),
    ],
)
def test_only_equals_are_merged(other: Event) -> None:
    first = Output("a", 0, 0, TextDelta("x"))
    assert merge(first, other) is None
    assert merge(other, first) is None


def test_what_lies_between_keeps_text_apart() -> None:
    box = Outbox(LIMIT)
    for event in (
        text_event("a", 0, "1", []),
        StageProgress("a", Progress(1)),
        text_event("a", 0, "2", []),
    ):
        box.put(event)
    assert len(box) == 3


def test_newer_progress_takes_the_place_of_older() -> None:
    assert merge(StageProgress("a", Progress(1)), StageProgress("a", Progress(2))) == StageProgress(
        "a", Progress(2)
    )
    assert merge(StageProgress("a", Progress(1)), StageProgress("b", Progress(2))) is None


def test_merging_stops_before_it_gets_slow() -> None:
    box = Outbox(1 << 30)
    for _ in range(50_000):
        box.put(text_event("a", 0, "word ", [1]))
    assert 25 < len(box) < 200
    waiting = [event for event, _ in box._events]
    letters = [
        len(e.content.text)
        for e in waiting
        if isinstance(e, Output) and isinstance(e.content, TextDelta)
    ]
    assert sum(letters) == 250_000


def test_a_preview_counts_what_it_weighs() -> None:
    preview = Image(bytes(MIB), "image/png", 1, 1)
    assert event_size(StageProgress("a", Progress(1, 2, preview))) >= MIB


# ---------------------------------------------------------------- waiting and closing


async def test_get_waits_for_put() -> None:
    box = Outbox(LIMIT)
    getting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not getting.done()
    box.put(text_event("a", 0, "x", []))
    assert await getting == text_event("a", 0, "x", [])


@pytest.mark.parametrize("discard", [True, False])
async def test_close_ends_a_waiting_get(discard: bool) -> None:
    box = Outbox(LIMIT)
    getting = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.close(discard=discard)
    assert await getting is None
    assert await box.get() is None


async def test_a_get_that_is_cancelled_loses_nothing() -> None:
    box = Outbox(LIMIT)
    for late in (False, True):
        getting = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        if late:
            # The event is there, the reader was woken, and is cancelled before it runs.
            box.put(text_event("a", 0, "x", []))
        getting.cancel()
        await asyncio.gather(getting, return_exceptions=True)
    assert await box.get() == text_event("a", 0, "x", [])


async def test_close_without_discard_lets_the_rest_be_read() -> None:
    box = Outbox(LIMIT)
    box.put(text_event("a", 0, "x", []))
    box.close(discard=False)
    box.put(text_event("a", 0, "late", []))
    assert await box.get() == text_event("a", 0, "x", [])
    assert await box.get() is None


async def test_close_with_discard_drops_the_rest() -> None:
    box = Outbox(LIMIT)
    box.put(text_event("a", 0, "x" * LIMIT, []))
    assert box.congested
    box.close(discard=True)
    assert (len(box), box.bytes) == (0, 0)
    assert await box.get() is None


# ---------------------------------------------------------------- cutting


SMALL = {"AUDIO_BYTES": 64, "PART_BYTES": 128, "TEXT_CHARACTERS": 32}


@pytest.fixture(scope="class")
def cut_small() -> Any:
    """Limits so small that small examples have many parts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SMALL.items():
            patch.setattr(cutting, name, size)
        yield


@pytest.mark.usefixtures("cut_small")
class TestCutting:
    """Joined again, the parts are what was cut; each is within its limit."""

    @given(
        st.lists(st.integers(0, 100), max_size=6),
        st.integers(1, 3),
        st.sampled_from(AudioEncoding),
    )
    def test_audio(self, lengths: list[int], channels: int, encoding: AudioEncoding) -> None:
        form, cutter = AudioFormat(16000, channels, encoding), Cutter()
        sounds = [
            bytes([n % 256]) * (length * form.frame_width) for n, length in enumerate(lengths)
        ]
        chunks = [c for sound in sounds for c in cutter.cut(Audio(sound, form))]
        start = 0
        for chunk in chunks:
            assert isinstance(chunk, AudioChunk)
            assert chunk.start_sample == start and chunk.format == form
            assert 0 < len(chunk.data) <= cutting.AUDIO_BYTES
            assert len(chunk.data) % form.frame_width == 0
            start += len(chunk.data) // form.frame_width
        assert b"".join(c.data for c in chunks) == b"".join(sounds)  # type: ignore[union-attr]
        assert cutter.samples == start == sum(lengths)

    @given(st.binary(max_size=1000))
    def test_image(self, data: bytes) -> None:
        chunks = list(Cutter().cut(Image(data, "image/png", 3, 4)))
        offset = 0
        for chunk in chunks:
            assert isinstance(chunk, ImageChunk)
            assert (chunk.offset, chunk.width, chunk.height) == (offset, 3, 4)
            assert len(chunk.data) <= cutting.PART_BYTES
            assert chunk.last == (offset + len(chunk.data) == len(data))
            offset += len(chunk.data)
        assert b"".join(c.data for c in chunks) == data  # type: ignore[union-attr]

    @given(st.lists(st.tuples(st.binary(max_size=500), st.integers(0, 9)), min_size=1, max_size=5))
    def test_video(self, pieces: list[tuple[bytes, int]]) -> None:
        cutter, frames = Cutter(), 0
        chunks: list[VideoChunk] = []
        for place, (data, count) in enumerate(pieces):
            last = place == len(pieces) - 1
            film = Video(data, "video/mp4", frames, count, 8, 8, last, ("e",))
            frames += count
            for chunk in cutter.cut(film):
                assert isinstance(chunk, VideoChunk)
                chunks.append(chunk)
        assert b"".join(c.data for c in chunks) == b"".join(data for data, _ in pieces)
        assert [c.chunk_index for c in chunks] == list(range(len(chunks)))
        assert [c.last for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert sum(c.frame_count for c in chunks) == frames == cutter.frames
        assert all(len(c.data) <= cutting.PART_BYTES for c in chunks)
        assert {c.active_event_ids for c in chunks} == {("e",)}

    @given(
        st.dictionaries(
            st.text(max_size=3), st.tuples(st.sampled_from(DataType), st.integers(0, 200))
        )
    )
    def test_tensors(self, shapes: dict[str, tuple[DataType, int]]) -> None:
        arrays = {
            name: Tensor(bytes(length * kind.itemsize), kind, (length,))
            for name, (kind, length) in shapes.items()
        }
        joined: dict[str, bytes] = {}
        for chunk in cut_tensors(Tensors(arrays)):
            whole = arrays[chunk.name]
            assert (chunk.dtype, chunk.shape) == (whole.dtype, whole.shape)
            assert chunk.offset == len(joined.get(chunk.name, b""))
            assert len(chunk.data) <= cutting.PART_BYTES
            assert len(chunk.data) % whole.dtype.itemsize == 0
            joined[chunk.name] = joined.get(chunk.name, b"") + chunk.data
            assert chunk.last == (len(joined[chunk.name]) == len(whole.data))
        assert joined == {name: whole.data for name, whole in arrays.items()}

    @given(st.text(max_size=100), st.integers(0, 20), st.booleans(), st.integers(0, 12))
    def test_text(self, text: str, tokens: int, logprobs: bool, prompt: int) -> None:
        entries = [TokenLogprobs(n, -1.0) for n in range(tokens)]
        before = [TokenLogprobs(n, -2.0) for n in range(prompt)]
        whole = TextDelta(text, list(range(tokens)), entries if logprobs else [], before)
        parts = list(cut_text(whole))
        assert "".join(p.text for p in parts) == text
        assert [n for p in parts for n in p.token_ids] == whole.token_ids
        assert [e for p in parts for e in p.logprobs] == whole.logprobs
        assert [e for p in parts for e in p.prompt_logprobs] == before
        for part in parts:
            assert len(part.text) <= cutting.TEXT_CHARACTERS
            many = len(part.logprobs) + len(part.prompt_logprobs) + len(part.token_ids)
            assert many <= 1 or cutting.text_size(part) <= cutting.PART_BYTES
            # A token's log-probabilities come beside it.
            assert not part.logprobs or [e.token_id for e in part.logprobs] == part.token_ids


def message_sizes(payload: Payload) -> list[int]:
    """Bytes of the messages that a payload becomes."""
    return [
        encoded(1 << 40, 0, Output("s" * 63, 7, 7, part)).ByteSize()
        for part in Cutter().cut(payload)
    ]


def logprobs_of(tokens: int, candidates: int) -> list[TokenLogprobs]:
    """Log-probabilities as an engine gives them."""
    likely = tuple(CandidateLogprob(n, -1.5, n + 1, "token") for n in range(candidates))
    return [TokenLogprobs(n, -1.5, 1, likely) for n in range(tokens)]


HEAVY: dict[str, Payload] = {
    "text of 4 byte letters": TextDelta("🦜" * (2 * MIB)),
    "a million token ids": TextDelta("x", [2**32 - 1] * MIB),
    "a long text with ids": TextDelta("🦜" * (128 << 10), [2**32 - 1] * 150_000),
    "20 candidates for each of 2000 tokens": TextDelta("x", [1] * 2000, logprobs_of(2000, 20)),
    "200 candidates for each of 500 tokens": TextDelta("x", [1] * 500, logprobs_of(500, 200)),
    "1000 candidates for each of 100": TextDelta("x", [1] * 100, logprobs_of(100, 1000)),
    "the prompt's candidates": TextDelta("x", [1], prompt_logprobs=logprobs_of(500, 200)),
    "sound": Audio(bytes(5 * MIB), PCM),
    "sound of 7 channels": Audio(bytes(28 << 16), AudioFormat(48000, 7, AudioEncoding.PCM_F32LE)),
    "a picture": Image(bytes(5 * MIB), "image/png", 1, 1),
    "a film": Video(bytes(5 * MIB), "video/mp4", 0, 1, 1, 1, True, ("e" * 256,) * 100),
    "an array": Tensors({"n" * 100: Tensor(bytes(5 * MIB), DataType.INT8, (5 * MIB,))}),
}


@pytest.mark.parametrize("name", HEAVY)
def test_no_message_is_over_1_mib(name: str) -> None:
    assert max(message_sizes(HEAVY[name])) <= MIB


def test_no_sound_is_over_64_kib() -> None:
    assert max(len(c.data) for c in Cutter().cut(Audio(bytes(MIB), PCM))) <= 64 << 10  # type: ignore[union-attr]


def test_no_preview_makes_a_message_over_1_mib() -> None:
    event = StageProgress("a", Progress(1, 2, Image(bytes(3 * MIB), "image/png", 1, 1)))
    assert encoded(0, 0, event).ByteSize() <= MIB


def test_merged_text_stays_within_1_mib() -> None:
    box = Outbox(1 << 30)
    for entries in logprobs_of(2000, 20):
        box.put(Output("a", 0, 0, TextDelta("🦜" * 20, [1], [entries])))
    events: list[Any] = [event for event, _ in box._events]
    sizes = [encoded(0, 0, event).ByteSize() for event in events]
    assert max(sizes) <= MIB


def test_finished_counts_little() -> None:
    finished = Finished((), Usage(), Timings(0, 0, 0, {}, {}, 0))
    assert event_size(finished) < 1024


def test_every_content_has_its_chunk() -> None:
    kinds = [type(next(iter(Cutter().cut(payload)))) for payload in HEAVY.values()]
    assert set(kinds) == {TextDelta, AudioChunk, ImageChunk, VideoChunk, TensorChunk}
