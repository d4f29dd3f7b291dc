"""The ear and the reader as stages: what they take, what they say, how they stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from omni_grpc.config import MediaPolicy
from omni_grpc.embedded import prepare, resolve
from omni_grpc.errors import ConfigError, InvalidField, InvalidMedia
from omni_grpc.ipc import StageSpec, Task
from omni_grpc.pipelines import bridges
from omni_grpc.pipelines.bridges import BridgeContext, load_bridge
from omni_grpc.stages import recognition
from omni_grpc.stages.base import Inputs, Stage
from omni_grpc.stages.ear import EarStage
from omni_grpc.stages.reader import ReaderStage
from omni_grpc.types import (
    CustomParams,
    Media,
    Message,
    Messages,
    Modality,
    Prompt,
    Text,
    TextDelta,
)
from tests.samples import page, sound_file

RATE = 24_000
SENTENCES = ("The quick brown fox jumps over the lazy dog.", "A red circle lies on the table.")
slow = [pytest.mark.slow, pytest.mark.timeout(120)]


def spec(engine: str, model: str, **media: Any) -> StageSpec:
    """What a replica would be given."""
    policy = MediaPolicy(**media).model_dump()
    return StageSpec("p", engine, 0, engine, str(resolve(model)), "cpu", media=policy)


def task(prompt: Prompt, **params: Any) -> Task:
    """A request's work."""
    return Task(1, "r", CustomParams(params), 60.0, prompt)


async def said(stage: Stage[Any], prompt: Prompt) -> list[str]:
    """The stage's deltas."""
    work = task(prompt)
    prepared = await stage.prepare(work)
    outputs = [output async for output in stage.run(work, prepared, Inputs())]
    assert outputs[-1].finish is not None
    return [o.payload.text for o in outputs if isinstance(o.payload, TextDelta)]


@pytest.fixture(scope="module")
async def sounds() -> list[Media]:
    """Two sentences, said by our own voice."""
    from hibari import Hibari

    def speak() -> list[Media]:
        voice = Hibari()
        files = (sound_file(voice(sentence, seed=0), RATE) for sentence in SENTENCES)
        return [Media(Modality.AUDIO, data=data) for data in files]

    return await asyncio.to_thread(speak)


@pytest.fixture(scope="module")
async def ear() -> AsyncIterator[EarStage]:
    """A loaded ear that takes ten seconds."""
    await asyncio.to_thread(prepare, ["embedded:whisper-tiny-en"], print)
    stage = EarStage(spec("whisper", "embedded:whisper-tiny-en", max_audio_s=10))
    facts = await stage.load()
    assert set(facts.versions) == {"faster-whisper", "ctranslate2"}
    yield stage
    await stage.close()


@pytest.fixture(scope="module")
async def reader() -> AsyncIterator[ReaderStage]:
    """A loaded reader."""
    await asyncio.to_thread(prepare, ["embedded:rapidocr"], print)
    stage = ReaderStage(spec("ocr", "embedded:rapidocr"))
    await stage.load()
    yield stage
    await stage.close()


class TestEar:
    """Whisper."""

    pytestmark = slow

    async def test_it_hears_what_was_said(self, ear: EarStage, sounds: list[Media]) -> None:
        assert "".join(await said(ear, Prompt(media=(sounds[0],)))) == SENTENCES[0]

    async def test_texts_of_several_sounds_stay_apart(
        self, ear: EarStage, sounds: list[Media]
    ) -> None:
        text = "".join(await said(ear, Prompt(media=tuple(sounds))))
        assert text.split(recognition.SEPARATOR) == list(SENTENCES)
        turn = Message("user", (Text("Listen:"), sounds[1]))
        assert "".join(await said(ear, Prompt(Messages((turn,))))) == SENTENCES[1]

    async def test_silence_and_noise_are_not_made_words_of(self, ear: EarStage) -> None:
        for samples in (np.zeros(RATE * 2), np.random.default_rng(0).normal(0, 0.01, RATE * 2)):
            media = Media(Modality.AUDIO, data=sound_file(samples.astype(np.float32), RATE))
            with pytest.raises(InvalidMedia, match=r"prompt.media\[0\]: nothing was said"):
                await said(ear, Prompt(media=(media,)))

    async def test_the_limit_holds_for_all_sounds_together(self, ear: EarStage) -> None:
        six = Media(Modality.AUDIO, data=bytes(6 * 32_000), mime_type="audio/L16;rate=16000")
        with pytest.raises(InvalidMedia, match="over 10 s") as caught:
            await ear.prepare(task(Prompt(media=(six, six))))
        assert [v.field for v in caught.value.violations] == ["prompt.media[1]"]

    @pytest.mark.parametrize(
        ("prompt", "field"),
        [
            (Prompt(Text("hi")), "prompt.media"),
            (Prompt(Messages((Message("user", (Text("hi"),)),))), "prompt.messages"),
            (Prompt(media=(Media(Modality.IMAGE, data=b"x"),)), "prompt.media[0].modality"),
        ],
    )
    async def test_a_prompt_without_sound_is_refused(
        self, ear: EarStage, prompt: Prompt, field: str
    ) -> None:
        with pytest.raises(InvalidField) as caught:
            await ear.prepare(task(prompt))
        assert [v.field for v in caught.value.violations] == [field]

    async def test_it_has_no_settings(self, ear: EarStage, sounds: list[Media]) -> None:
        with pytest.raises(InvalidField) as caught:
            await ear.prepare(task(Prompt(media=(sounds[0],)), language="fr"))
        assert [v.field for v in caught.value.violations] == ["params.language"]

    async def test_it_stops_between_segments(self, ear: EarStage, sounds: list[Media]) -> None:
        work = task(Prompt(media=tuple(sounds)))
        outputs = ear.run(work, await ear.prepare(work), Inputs())
        assert isinstance((await anext(outputs)).payload, TextDelta)
        rest = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        rest.cancel()
        with pytest.raises((asyncio.CancelledError, StopAsyncIteration)):
            await rest
        assert "".join(await said(ear, Prompt(media=(sounds[1],)))) == SENTENCES[1]


class TestReader:
    """OCR."""

    pytestmark = slow

    async def test_it_reads_line_by_line(self, reader: ReaderStage) -> None:
        text = "The moon orbits the Earth\nonce every month."
        picture = Media(Modality.IMAGE, data=page(text))
        assert "".join(await said(reader, Prompt(media=(picture,)))) == text

    async def test_what_holds_no_text_is_unfit(self, reader: ReaderStage) -> None:
        empty = Media(Modality.IMAGE, data=page(""))
        with pytest.raises(InvalidMedia, match="no text was found"):
            await said(reader, Prompt(media=(empty,)))
        filled = Media(Modality.IMAGE, data=page("A few words"))
        parts = await said(reader, Prompt(media=(empty, filled)))
        assert "".join(parts) == recognition.SEPARATOR + "A few words"


# ---------------------------------------------------------------- the bridge behind them


def told(prompt: Prompt, *deltas: str, **arguments: str) -> list[Any]:
    """What the thinker is asked."""
    bridge = load_bridge("transcript", arguments)(BridgeContext("r", prompt, "ear", "thinker"))
    for delta in deltas:
        assert list(bridge.push(TextDelta(delta))) == []
    return list(bridge.finish())


SOUND = Media(Modality.AUDIO, data=b"x")


def test_the_transcript_stands_for_the_media() -> None:
    assert bridges.MEDIA_SEPARATOR == recognition.SEPARATOR
    alone = Prompt(media=(SOUND, SOUND))
    two = ("What is", " this?", "\n\n", "And that?")
    assert told(alone, *two) == [Prompt(Text("What is this?\nAnd that?"))]
    assert told(alone, *two, instruction="Say:") == [Prompt(Text("Say: What is this?\nAnd that?"))]
    beside = Prompt(Text("Be brief."), (SOUND,))
    assert told(beside, "Hello?", instruction="Say:") == [Prompt(Text("Be brief. Hello?"))]
    assert told(alone) == []


def test_a_conversation_keeps_its_turns() -> None:
    turns = (
        Message("system", (Text("Be brief."),)),
        Message("user", (SOUND,)),
        Message("assistant", (Text("Paris."),)),
        Message("user", (Text("Listen:"), SOUND, Text("Well?"))),
    )
    (prompt,) = told(Prompt(Messages(turns)), "What?", "\n\n", "And Italy?")
    assert prompt.content == Messages(
        (
            turns[0],
            Message("user", (Text("What?"),)),
            turns[2],
            Message("user", (Text("Listen:"), Text("\nAnd Italy?\n"), Text("Well?"))),
        )
    )


def test_arguments_that_a_bridge_does_not_take_are_a_wrong_configuration() -> None:
    with pytest.raises(ConfigError, match=r"bridge_args.*voice"):
        load_bridge("transcript", {"voice": "x"})
    with pytest.raises(ConfigError, match="bridge_args"):
        load_bridge("forward", {"instruction": "x"})
