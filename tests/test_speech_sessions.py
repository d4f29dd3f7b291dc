"""Speech to speech over one stream, with real models: turns, chunks of any size, interruption."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import soxr

from omni_grpc.server import Server
from omni_grpc.v1 import common_pb2, service_pb2
from tests.real import ANSWER, letters
from tests.samples import sound_file
from tests.streaming import Feeding, chunk, opened
from tests.support import AUDIO, Response, collect, freed, in_flight, sound, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RATE = 24_000
MESSAGE = service_pb2.SubmitInteractionRequest
FORMAT = {
    "encoding": common_pb2.AUDIO_ENCODING_PCM_S16LE,
    "sample_rate_hz": 16_000,
    "channels": 1,
}


async def spoken(voice: Any, text: str) -> bytes:
    """The text in our own voice, as 16 kHz PCM: what a microphone sends."""
    said = sound(await collect(voice, pipeline="say", prompt={"text": text}, timeout=60))
    samples = soxr.resample(np.frombuffer(said, "<i2").astype(np.float32), RATE, 16_000)
    return bytes(samples.astype("<i2").tobytes())


async def heard(voice: Any, samples: bytes) -> str:
    """What our own ear hears in the answer's samples."""
    file = sound_file(np.frombuffer(samples, "<i2"), RATE)
    media = [{"modality": AUDIO, "data": file}]
    return texts(await collect(voice, pipeline="hear", prompt={"media": media}, timeout=60))


class Talk:
    """One session on smol-converse."""

    def __init__(self, voice: Any, **fields: Any) -> None:
        self._call = voice.SubmitInteraction()
        self._fields = fields
        self._seq = 0
        self._messages: AsyncIterator[service_pb2.SubmitInteractionResponse]

    async def __aenter__(self) -> Talk:
        opened = {"pipeline": "smol-converse", "resumable": True, **self._fields}
        await self._call.write(MESSAGE(setup={"open": opened}))
        self._messages = aiter(self._call)
        assert (await anext(self._messages)).HasField("setup_complete")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._call.cancel()

    async def say(self, samples: bytes, step: int = 3200) -> None:
        """Sends sound in chunks of `step` bytes, and ends the segment with the last."""
        starts = range(0, len(samples), step)
        for start in starts:
            audio: dict[str, Any] = {"data": samples[start : start + step]}
            if self._seq == 0:
                audio["format"] = FORMAT
            last = start == starts[-1]
            chunk = {"seq": self._seq, "audio": audio, "end_of_segment": last}
            await self._call.write(MESSAGE(update=chunk))
            self._seq += 1

    async def send(self, **message: Any) -> None:
        """Sends any other message."""
        await self._call.write(MESSAGE(**message))

    async def messages(self) -> AsyncIterator[service_pb2.SubmitInteractionResponse]:
        """What comes, to the end."""
        async for message in self._messages:
            yield message

    async def answer(self) -> list[Response]:
        """The responses up to the end of code2wav's segment."""
        responses: list[Response] = []
        async for message in self.messages():
            assert not message.HasField("update_rejected"), message
            if message.HasField("response"):
                responses.append(message.response)
                end = message.response.segment_end
                if message.response.HasField("segment_end") and end.stage == "code2wav":
                    return responses
        raise AssertionError(f"it ended: {responses[-1:]}")


async def test_two_turns_over_one_stream(voice: Any, voice_server: Server) -> None:
    async with Talk(voice) as talk:
        await talk.say(await spoken(voice, "What is the capital of France?"))
        first = await talk.answer()
        await talk.say(await spoken(voice, "What is the capital of Italy?"))
        second = await talk.answer()
    assert texts(first) == ANSWER
    # A small model: that it heard the question, and answers it, is what counts here.
    assert "Ital" in texts(second)
    assert letters(await heard(voice, sound(first))) == letters(ANSWER)
    assert "Ital" in await heard(voice, sound(second))
    await freed(voice_server, within=10)


async def test_the_same_sound_in_any_chunks_is_heard_the_same(voice: Any) -> None:
    samples = await spoken(voice, "What is the capital of Germany?")
    answers = []
    for step in (len(samples), 2, 1234 * 2):
        if step == 2:
            step = 641 * 2
        async with Talk(voice) as talk:
            await talk.say(samples, step)
            answers.append(await talk.answer())
    assert "Berlin" in texts(answers[0])
    assert len({texts(answer) for answer in answers}) == 1
    assert len({sound(answer) for answer in answers}) == 1


async def test_silence_is_answered_with_nothing_and_the_talk_goes_on(voice: Any) -> None:
    async with Talk(voice) as talk:
        await talk.say(bytes(32_000))
        nothing = await talk.answer()
        await talk.say(await spoken(voice, "What is the capital of France?"))
        answer = await talk.answer()
    assert texts(nothing) == "" and sound(nothing) == b""
    assert texts(answer) == ANSWER


async def test_an_ear_refuses_text_and_waits_for_sound(voice: Any, voice_server: Server) -> None:
    async with opened(voice, pipeline="smol-converse") as request:
        feeder = await Feeding(voice, request.id).send(chunk(0, "hello", end=True))
        error = await feeder.refused()
        assert (error.reason, list(error.violations)) == ("NOT_SUPPORTED", ["chunk.text"])
        assert in_flight(voice_server), "the request waits for another feeder"
    await freed(voice_server, within=10)


async def test_an_interrupted_answer_ends_and_the_next_turn_is_answered(
    voice: Any, voice_server: Server
) -> None:
    long = [{"stage": "thinker", "sampling": {"min_tokens": 150, "max_tokens": 180}}]
    async with Talk(voice, stage_params=long) as talk:
        await talk.say(await spoken(voice, "Tell me a long story about the sea."))
        async for message in talk.messages():
            if message.response.output.HasField("audio"):
                break
        await talk.send(interrupt={"played_ms": 200})
        old, epoch = 0, None
        async for message in talk.messages():
            if message.HasField("interrupted"):
                epoch = message.interrupted.epoch
                break
            old += 1
        assert epoch == 1
        question = await asyncio.wait_for(spoken(voice, "What is the capital of France?"), 60)
        await talk.say(question)
        answer = await talk.answer()
    assert {response.epoch for response in answer} == {1}
    assert "Paris" in texts(answer)
    starts = [r.output.audio.start_sample for r in answer if r.output.HasField("audio")]
    sizes = [len(r.output.audio.data) // 2 for r in answer if r.output.HasField("audio")]
    assert starts[1:] == [a + b for a, b in zip(starts, sizes, strict=True)][:-1]
    await freed(voice_server, within=10)
