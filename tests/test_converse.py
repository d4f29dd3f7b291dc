"""Speech in, picture in, speech out: the real pipelines on one server, over gRPC."""

from __future__ import annotations

import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from omni_grpc.server import Server
from tests.real import ANSWER, QUESTION, letters
from tests.running import HOST_MODULE
from tests.samples import page, sound_file
from tests.support import AUDIO, IMAGE, TEXT, collect, freed, refusal, sound, started, texts
from tests.test_cli import omni

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = "The moon orbits the Earth\nonce every month."
RATE = 24_000


def wav(samples: bytes) -> bytes:
    """The voice's samples as a file."""
    return sound_file(np.frombuffer(samples, "<i2"), RATE)


@pytest.fixture(scope="module")
async def question(voice: Any) -> bytes:
    """The question, spoken by our own voice."""
    said = await collect(voice, pipeline="say", prompt={"text": QUESTION}, timeout=60)
    return wav(sound(said))


async def heard(voice: Any, file: bytes) -> str:
    """What our own ear hears."""
    media = [{"modality": AUDIO, "data": file}]
    return texts(await collect(voice, pipeline="hear", prompt={"media": media}, timeout=60))


async def test_a_spoken_question_gets_a_spoken_answer(voice: Any, question: bytes) -> None:
    media = [{"modality": AUDIO, "data": question}]
    answer = await collect(voice, pipeline="smol-converse", prompt={"media": media}, timeout=120)
    assert texts(answer) == ANSWER
    assert answer[0].accepted.stages == ["ear", "thinker", "talker", "code2wav"]
    assert [output.stage for output in answer[0].accepted.outputs] == ["thinker", "code2wav"]
    assert set(answer[-1].finished.timings.stage_ms) == {"ear", "thinker", "talker", "code2wav"}
    assert letters(await heard(voice, wav(sound(answer)))) == letters(ANSWER)


async def test_text_alone_wakes_the_ear_but_not_the_voice(voice: Any, question: bytes) -> None:
    media = [{"modality": AUDIO, "data": question}]
    answer = await collect(
        voice, pipeline="smol-converse", prompt={"media": media}, output_modalities=[TEXT]
    )
    assert answer[0].accepted.stages == ["ear", "thinker"]
    assert texts(answer) == ANSWER and sound(answer) == b""


async def test_a_conversation_may_be_spoken_in_part(voice: Any, question: bytes) -> None:
    turns = [
        {"role": "user", "parts": [{"media": {"modality": AUDIO, "data": question}}]},
        {"role": "assistant", "parts": [{"text": ANSWER}]},
        {"role": "user", "parts": [{"text": "Which city did you just name?"}]},
    ]
    answer = await collect(
        voice,
        pipeline="smol-converse",
        prompt={"messages": {"messages": turns}},
        output_modalities=[TEXT],
    )
    assert "Paris" in texts(answer)


async def test_a_page_is_read_and_explained_aloud(voice: Any) -> None:
    media = [{"modality": IMAGE, "data": page(PAGE)}]
    answer = await collect(voice, pipeline="smol-read", prompt={"media": media}, timeout=120)
    assert answer[0].accepted.stages == ["reader", "thinker", "talker", "code2wav"]
    assert "moon" in texts(answer).lower()
    assert "moon" in (await heard(voice, wav(sound(answer)))).lower()


async def test_the_clients_words_go_before_those_on_the_page(voice: Any) -> None:
    prompt = {
        "text": "Answer this question:",
        "media": [{"modality": IMAGE, "data": page(QUESTION)}],
    }
    answer = await collect(voice, pipeline="smol-read", prompt=prompt, output_modalities=[TEXT])
    assert "Paris" in texts(answer)


async def test_pipelines_share_what_is_alike(voice_server: Server) -> None:
    users = {stage.stage: set(stage.pipelines) for stage in voice_server.engine.load()}
    speaking = {"smol-voice", "smol-converse", "smol-read"}
    assert users["thinker"] == speaking | {"smol-shapes"}
    assert users["talker"] == users["code2wav"] == speaking | {"say"}
    assert users["ear"] == {"smol-converse", "hear"}
    assert [len(pool.statistics()) for pool in voice_server.engine.pools] == [1] * 6
    # A replica's address ends in its first pipeline's name, its stage and two numbers.
    lines = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    addresses = {line[-1] for line in lines if HOST_MODULE in line}
    names = {address.rpartition("/")[2] for address in addresses}
    thinkers = {
        name for name in names if re.match(r"smol-(voice|converse|read|shapes)-thinker-", name)
    }
    assert len(thinkers) == 1, names


@pytest.mark.parametrize(
    ("pipeline", "prompt", "reason", "field"),
    [
        ("smol-converse", {"text": "hi"}, "INVALID_FIELD", "prompt.media"),
        (
            "smol-converse",
            {"media": [{"modality": AUDIO, "data": b"no sound"}]},
            "INVALID_MEDIA",
            "prompt.media[0]",
        ),
        (
            "smol-converse",
            {"media": [{"modality": AUDIO, "uri": "http://127.0.0.1/q.wav"}]},
            "INVALID_FIELD",
            "prompt.media[0].uri",
        ),
        (
            "smol-converse",
            {"media": [{"modality": IMAGE, "data": b"x"}]},
            "NOT_SUPPORTED",
            "prompt.media[0]",
        ),
        ("smol-converse", {"token_ids": {"ids": [1]}}, "NOT_SUPPORTED", "prompt.token_ids"),
        (
            "smol-read",
            {"media": [{"modality": IMAGE, "data": page("")}]},
            "INVALID_MEDIA",
            "prompt.media[0]",
        ),
    ],
)
async def test_what_cannot_be_heard_or_read_is_refused(
    voice: Any, pipeline: str, prompt: Any, reason: str, field: str
) -> None:
    error = await refusal(voice, pipeline=pipeline, prompt=prompt)
    assert (error.reason, list(error.violations)) == (reason, [field])


async def test_cancel_frees_the_ear(voice_server: Server, voice: Any, question: bytes) -> None:
    media = [{"modality": AUDIO, "data": question}]
    calls = [
        await started(voice, until="accepted", pipeline="smol-converse", prompt={"media": media})
        for _ in range(3)
    ]
    for call in calls:
        call.cancel()
    # What a thread computes is computed to its end.
    await freed(voice_server, within=10)


async def test_the_command_asks_with_a_file(
    voice_server: Server, voice: Any, question: bytes, tmp_path: Path
) -> None:
    asked, answered, picture = (tmp_path / name for name in ("q.wav", "a.wav", "p.png"))
    asked.write_bytes(question)
    picture.write_bytes(page(PAGE))
    target = ("--target", f"127.0.0.1:{voice_server.port}")
    result = await omni("generate", "--audio", str(asked), "--out", str(answered), *target)
    assert (result.code, result.out) == (0, ANSWER + "\n"), result.err
    with wave.open(str(answered)) as file:
        assert file.getnframes() > RATE
    assert letters(await heard(voice, answered.read_bytes())) == letters(ANSWER)
    result = await omni("generate", "--image", str(picture), "--max-tokens", "30", *target)
    assert result.code == 0 and "moon" in result.out.lower(), result
    result = await omni("generate", "--audio", str(asked), "--pipeline", "smol-voice", *target)
    assert result.code == 2 and "does not take" in result.err
