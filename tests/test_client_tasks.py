"""The Python client's tasks: text spoken while it is written, pictures, films, conversations."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image as Pictures

from omni_grpc.server import Server
from omni_grpc_client import (
    Audio,
    AudioChunk,
    AudioEncoding,
    AudioFormat,
    CancelledCallError,
    DeadlineExceededError,
    EventChanged,
    EventState,
    Image,
    InternalError,
    InvalidArgumentError,
    MissingOutputError,
    NotFoundError,
    OmniClient,
    SegmentEnd,
    TextDelta,
    Turn,
    UnservedError,
    Video,
    VideoChunk,
    VideoWriter,
    WavWriter,
    read_wav,
)
from tests.running import pipeline, text_pipeline
from tests.support import echo, eventually, freed, in_flight

TONE = 2400
"""Samples that echo gives for a word."""


@pytest.fixture
async def client(echo_server: Server) -> AsyncIterator[OmniClient]:
    """A client of `echo_server`, which must hold nothing when the test is over."""
    async with OmniClient(f"127.0.0.1:{echo_server.port}") as connected:
        yield connected
    await freed(echo_server)


def samples(chunks: list[AudioChunk]) -> int:
    """How many there are."""
    return sum(chunk.samples for chunk in chunks)


# ---------------------------------------------------------------- speak


async def words() -> AsyncIterator[str]:
    """Text that is being written."""
    for word in ("hello ", "big ", "world"):
        await asyncio.sleep(0)
        yield word


@pytest.mark.parametrize(
    "text",
    [
        "hello big world",
        ["hello ", "big ", "world"],
        words(),
        (word for word in ("hello ", "big ", "world")),
        io.StringIO("hello big\nworld"),
    ],
    ids=["text", "list", "async", "generator", "file"],
)
async def test_text_of_any_kind_is_spoken(client: OmniClient, text: Any) -> None:
    chunks = [chunk async for chunk in client.speak(text)]
    assert samples(chunks) == 3 * TONE
    assert [chunk.start_sample for chunk in chunks] == [0, TONE, 2 * TONE]


async def test_a_writer_that_blocks_blocks_nobody(client: OmniClient) -> None:
    go_on = threading.Event()

    def slow() -> Iterator[str]:
        yield "hello "
        assert go_on.wait(10)
        yield "world"

    speaking = asyncio.create_task(all_of(client.speak(slow())))
    async with asyncio.timeout(10):
        assert (await client.generate("meanwhile")).text == "meanwhile"
    assert not speaking.done()
    go_on.set()
    assert samples(await asyncio.wait_for(speaking, 10)) == 2 * TONE


async def all_of(chunks: AsyncIterator[AudioChunk]) -> list[AudioChunk]:
    """All that comes."""
    return [chunk async for chunk in chunks]


async def test_the_writers_own_error_ends_all(client: OmniClient, echo_server: Server) -> None:
    async def fails() -> AsyncIterator[str]:
        yield "hello "
        raise LookupError("no more words")

    def fails_in_a_thread() -> Iterator[str]:
        yield "hello "
        raise LookupError("no more words")

    for text in (fails(), fails_in_a_thread()):
        with pytest.raises(LookupError, match="no more words"):
            await asyncio.wait_for(all_of(client.speak(text)), 10)
        await freed(echo_server)


async def test_leaving_stops_asking_for_text(client: OmniClient, echo_server: Server) -> None:
    asked = 0

    async def endless() -> AsyncIterator[str]:
        nonlocal asked
        while True:
            asked += 1
            yield "word "
            await asyncio.sleep(0.001)

    speaking = asyncio.create_task(all_of(client.speak(endless())))
    await eventually(lambda: asked > 5 and in_flight(echo_server) > 0, within=5)
    speaking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await speaking
    await freed(echo_server)
    before = asked
    await asyncio.sleep(0.05)
    assert asked == before


async def test_a_slow_writer_is_not_taken_for_lost(serve: Any) -> None:
    served = await serve(echo({"input_timeout": 0.6}))

    async def slow() -> AsyncIterator[str]:
        yield "hello "
        await asyncio.sleep(1.5)
        yield "world"

    async with OmniClient(f"127.0.0.1:{served.server.port}") as client:
        assert samples(await all_of(client.speak(slow()))) == 2 * TONE


async def test_a_failure_of_the_request_is_the_speakers(client: OmniClient) -> None:
    with pytest.raises(InternalError) as caught:
        await all_of(client.speak("hello world", stage_params={"audio": {"fail_at": 1}}))
    assert caught.value.reason == "STAGE_ERROR"
    with pytest.raises(InvalidArgumentError):
        await all_of(client.speak("hello", stage_params={"audio": {"bogus": 1}}))
    with pytest.raises(NotFoundError):
        await all_of(client.speak("hello", pipeline="nope"))
    with pytest.raises(DeadlineExceededError):
        await all_of(client.speak("hello", timeout=0.5, stage_params={"text": {"hang_at": 0}}))


async def test_who_speaks_is_chosen_before_who_answers(serve: Any) -> None:
    text_only = await serve(text_pipeline("writes"))
    async with OmniClient(f"127.0.0.1:{text_only.server.port}") as client:
        with pytest.raises(UnservedError, match=r"output\.audio"):
            await all_of(client.speak("hello"))
        with pytest.raises(UnservedError, match=r"output\.image"):
            await client.draw("hello")
        with pytest.raises(UnservedError, match=r"output\.video"):
            async with client.live("hello"):
                pass
    served = await serve(text_pipeline("writes"), echo())
    async with OmniClient(f"127.0.0.1:{served.server.port}") as client:
        assert samples(await all_of(client.speak("hello"))) == TONE, "not the default pipeline"


# ---------------------------------------------------------------- draw, live


async def test_a_picture_is_drawn(client: OmniClient, tmp_path: Path) -> None:
    picture = await client.draw("a red ball")
    picture.save(tmp_path / "ball.png")
    with Pictures.open(tmp_path / "ball.png") as file:
        assert file.size == (picture.width, picture.height)
    with pytest.raises(ValueError, match="image/png"):
        picture.save(tmp_path / "ball.jpg")
    with pytest.raises(MissingOutputError):
        await client.draw("nothing", stage_params={"image": {"outputs": 0}})


async def test_a_film_is_steered(serve: Any, tmp_path: Path) -> None:
    film = {
        "name": "film",
        "output": "video",
        "engine_args": {"modality": "video", "interactive": True},
    }
    served = await serve(pipeline("films", film))
    async with OmniClient(f"127.0.0.1:{served.server.port}") as client:
        params = {"film": {"outputs": 6, "interval_ms": 100}}
        states = []
        async with client.live("a ring", stage_params=params) as session:
            with VideoWriter(tmp_path / "film.mp4") as writer:
                await session.event("a ball", transition_chunks=0, event_id="ball")
                async for item in session:
                    match item:
                        case VideoChunk():
                            with pytest.raises(ValueError, match="raw frames"):
                                writer.write(item)
                        case EventChanged(event_id="ball", state=state):
                            states.append(state)
        assert states == [EventState.QUEUED, EventState.STARTED, EventState.COMPLETED]


def test_a_film_is_whole_after_every_chunk(tmp_path: Path) -> None:
    place = (1, 0, "painter", 0, 0)
    with VideoWriter(tmp_path / "film.mp4") as writer:
        for n in range(3):
            chunk = VideoChunk(*place, b"part", "video/mp4", n, n * 8, 8, n == 2, (), 32, 32)
            writer.write(chunk)
            assert (tmp_path / "film.mp4").read_bytes() == b"part" * (n + 1)
    assert writer.frames == 24


def test_files_are_what_their_names_say(tmp_path: Path) -> None:
    Video(b"film", "video/mp4", 8).save(tmp_path / "a.mp4")
    Image(b"picture", "image/png", 1, 1).save(tmp_path / "a")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "a.mp4": b"film",
        "a": b"picture",
    }
    for wrong in (Video(b"x", "video/x-raw-rgb", 1), Image(b"x", "image/jpeg", 1, 1)):
        with pytest.raises(ValueError, match=r"raw frames|image/jpeg"):
            wrong.save(tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize(
    ("encoding", "subtype"),
    [(AudioEncoding.PCM_S16LE, "PCM_16"), (AudioEncoding.PCM_F32LE, "FLOAT")],
)
def test_sound_files_are_read_as_others_write_them(
    tmp_path: Path, encoding: AudioEncoding, subtype: str
) -> None:
    path, dtype = tmp_path / "a.wav", "<i2" if subtype == "PCM_16" else "<f4"
    values = (np.linspace(-0.5, 0.5, 600).reshape(300, 2) * 32767).astype("<i2")
    sound = values if subtype == "PCM_16" else (values / 32768).astype("<f4")
    for form in ("WAV", "WAVEX"):
        soundfile.write(path, sound, 16000, subtype=subtype, format=form)
        audio = Audio.load(path)
        assert audio.format == AudioFormat(encoding, 16000, 2)
        np.testing.assert_array_equal(np.frombuffer(audio.data, dtype).reshape(-1, 2), sound)
    audio.save(tmp_path / "b.wav")
    assert Audio.load(tmp_path / "b.wav") == audio


def test_a_sound_file_that_was_cut_gives_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    stream = path.open("wb")
    with stream, WavWriter(stream, AudioFormat(), streamed=True) as writer:
        writer.write(bytes(200))
    path.write_bytes(path.read_bytes() + b"\0")
    assert read_wav(path).samples == 100


@pytest.mark.parametrize(
    "data",
    [b"", b"RIFF", b"OggS" + bytes(60), b"RIFF\0\0\0\0WAVE", b"RIFF\0\0\0\0WAVEfmt \2\0\0\0ab"],
)
def test_what_is_no_sound_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="WAV"):
        read_wav(io.BytesIO(data))


# ---------------------------------------------------------------- converse


async def test_turns_of_a_conversation(client: OmniClient) -> None:
    async with client.converse() as talk:
        first = await talk.ask("hello world")
        assert (first.text, first.interrupted) == ("hello world", False)
        assert first.audio is not None and first.audio.samples == 2 * TONE
        assert len(first.images) == 1
        second = await talk.ask([("user", "good day")])
        assert second.text == "good day"
        assert second.audio is not None and second.audio.samples == 2 * TONE
        pieces = (word for word in ("in ", "pieces"))
        assert (await talk.ask(pieces)).text == "in pieces"


@pytest.mark.parametrize(
    ("opening", "said"),
    [
        ("well, ", "hello"),
        ([("system", "well, ")], "hello"),
        ([("system", "well, ")], [("user", "hello")]),
    ],
)
async def test_what_a_conversation_begins_with_goes_with_its_first_turn(
    client: OmniClient, opening: Any, said: Any
) -> None:
    async with client.converse(opening, output_modalities=["text"]) as talk:
        with pytest.raises(InvalidArgumentError):
            await talk.ask(said, stage_params={"text": {"bogus": 1}})
        # The opening was refused with it, and comes with the next one.
        first = await talk.ask(said, stage_params={"text": {"interval_ms": 1}})
        assert first.text.split()[-1] == "hello"
        assert ("well," in first.text) == isinstance(opening, str)
        assert (await talk.ask("and more")).text == "and more"


async def test_a_turns_events_come_as_they_are(client: OmniClient) -> None:
    async with client.converse(output_modalities=["text"]) as talk:
        events = [event async for event in talk.stream("hello world")]
        deltas = [event for event in events if isinstance(event, TextDelta)]
        assert "".join(event.text for event in deltas) == "hello world"
        assert isinstance(events[-1], SegmentEnd)


async def test_what_was_left_of_a_turn_is_skipped(client: OmniClient) -> None:
    params = {"text": {"outputs": 5, "interval_ms": 20}}
    async with client.converse(output_modalities=["text"]) as talk:
        async for event in talk.stream("count", stage_params=params):
            if isinstance(event, TextDelta):
                break
        assert (await talk.ask("next")).text == "next"


async def test_a_turn_is_interrupted(client: OmniClient) -> None:
    params = {"text": {"outputs": 1000, "interval_ms": 20}}
    async with client.converse(output_modalities=["text"]) as talk:
        asking = asyncio.create_task(talk.ask("count", stage_params=params))
        await asyncio.sleep(0.3)
        await talk.interrupt()
        turn = await asyncio.wait_for(asking, 5)
        assert turn.interrupted
        assert turn.text.startswith("word0 word1 ")
        assert await talk.ask("go on") == turn_of("go on")
        # Too late: nothing is being said, and the next turn is none of its business.
        await talk.interrupt()
        assert await talk.ask("and on") == turn_of("and on")


def turn_of(text: str) -> Any:
    """A whole answer of text alone."""
    return Turn(text, None, (), interrupted=False)


async def test_a_refused_turn_leaves_the_conversation(client: OmniClient) -> None:
    async with client.converse(output_modalities=["text"]) as talk:
        assert (await talk.ask("one")).text == "one"
        with pytest.raises(InvalidArgumentError) as caught:
            await talk.ask("two", stage_params={"text": {"bogus": 1}})
        assert caught.value.violations
        assert (await talk.ask("three")).text == "three"
        with pytest.raises(TypeError, match="int"):
            await talk.ask(3)  # type: ignore[arg-type]


async def test_a_failure_ends_the_conversation(client: OmniClient) -> None:
    async with client.converse(output_modalities=["text"]) as talk:
        with pytest.raises(InternalError):
            await talk.ask("one", stage_params={"text": {"fail_at": 0}})
    with pytest.raises(NotFoundError):
        async with client.converse(pipeline="nope"):
            pass


async def test_a_conversation_that_is_aborted(client: OmniClient) -> None:
    params = {"text": {"outputs": 1000, "interval_ms": 20}}
    async with client.converse(output_modalities=["text"]) as talk:
        asking = asyncio.create_task(talk.ask("count", stage_params=params))
        await asyncio.sleep(0.2)
        await client.abort(talk.request_id)
        with pytest.raises(CancelledCallError):
            await asking
