"""The Python client on real models: text that is spoken, and a conversation in speech and text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from omni_grpc.server import Server
from omni_grpc_client import Audio, Media, OmniClient, SamplingParams, make_media
from tests.real import ANSWER, QUESTION, letters
from tests.support import freed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = {"thinker": SamplingParams(max_tokens=12)}


async def words() -> AsyncIterator[str]:
    """The question, while it is being written."""
    for word in QUESTION.split():
        yield f"{word} "


def as_media(audio: Audio, folder: Path) -> Media:
    """The sound as a file that goes with a prompt."""
    audio.save(folder / "sound.wav")
    return make_media(folder / "sound.wav", "audio")


async def test_a_spoken_question_is_answered_and_so_is_the_next(
    voice_server: Server, tmp_path: Path
) -> None:
    async with OmniClient(f"127.0.0.1:{voice_server.port}") as client:
        chunks = [chunk async for chunk in client.speak(words(), timeout=60)]
        question = Audio(b"".join(chunk.data for chunk in chunks), chunks[0].format)
        chunks = [chunk async for chunk in client.speak("What is the capital of Italy?")]
        other = Audio(b"".join(chunk.data for chunk in chunks), chunks[0].format)
        assert 0.5 < question.seconds < 10, "the words alone, and no answer to them"
        async with client.converse(pipeline="smol-converse", timeout=200) as talk:
            first = await talk.ask(question)
            second = await talk.ask(other)
        assert first.text == ANSWER
        # A small model: that it heard the question, and answers it, is what counts here.
        assert "Ital" in second.text
        assert first.audio is not None and first.audio.seconds > 1
        heard = await client.generate("", pipeline="hear", media=[as_media(first.audio, tmp_path)])
        assert letters(heard.text) == letters(ANSWER)
        async with client.converse([("system", "Be brief.")], pipeline="smol-voice") as talk:
            turns = [await talk.ask(text, stage_params=SHORT) for text in (QUESTION, "Thank you.")]
        assert all(turn.text and turn.audio and turn.audio.seconds > 0.2 for turn in turns)
    await freed(voice_server, within=10)
