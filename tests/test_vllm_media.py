"""Pictures for vLLM's own multimodal models: a tiny one of random weights, two replicas of it.

It knows nothing; but what it thinks of some tokens tells which pictures it saw, in what order."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image

from omni_grpc.config import PipelineConfig
from omni_grpc.embedded import prepare
from omni_grpc.server import Server
from omni_grpc.v1 import common_pb2
from tests.models import tiny_vision
from tests.real import LANGUAGE_MODEL, SMALL_ENGINE, SMALL_ENVIRONMENT, real_server
from tests.support import AUDIO, IMAGE, client, collect, eventually, refusal, stub_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PROBES = [100, 2000, 3000, 10000, 20000, 30000, 40000, 45000]
SAME = 0.05
"""Log-probabilities of one thing differ by less; bfloat16 and other company in a batch see to it
that they are not equal."""
QUESTION = "What is it?"


@pytest.fixture(scope="module")
async def vision_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """Two replicas of the tiny model."""
    await asyncio.to_thread(prepare, [LANGUAGE_MODEL], print)
    folder = tmp_path_factory.mktemp("tiny_vision")
    await asyncio.to_thread(tiny_vision.build_in_child, folder)
    stage = {
        "name": "eye",
        "engine": "vllm",
        "model": str(folder),
        "replicas": 2,
        "engine_args": {
            **SMALL_ENGINE,
            "max_model_len": 512,
            "limit_mm_per_prompt": {"image": 3},
        },
        "environment": SMALL_ENVIRONMENT,
        "defaults": {"temperature": 0.0, "max_tokens": 1},
        "output": "text",
    }
    pipeline = {
        "name": "tiny-vision",
        "inputs": ["text", "image", "audio"],
        "prompts": ["text", "token_ids", "messages", "media"],
        "stages": [stage],
    }
    async with real_server(PipelineConfig.model_validate(pipeline)) as server:
        yield server


@pytest.fixture(scope="module")
async def vision(vision_server: Server) -> AsyncIterator[Any]:
    """A stub of it."""
    async with client(vision_server) as channel:
        yield stub_of(channel)


def picture(colour: str, uuid: str = "", form: str = "PNG") -> dict[str, Any]:
    """A picture of two halves, the upper one white."""
    image = Image.new("RGB", (56, 56), "white")
    image.paste(Image.new("RGB", (56, 28), colour), (0, 28))
    if form == "tensor":
        tensor = {
            "data": image.tobytes(),
            "dtype": common_pb2.DATA_TYPE_UINT8,
            "shape": [56, 56, 3],
        }
        return {"modality": IMAGE, "tensor": tensor, "uuid": uuid}
    file = io.BytesIO()
    image.save(file, form)
    return {"modality": IMAGE, "data": file.getvalue(), "uuid": uuid}


def beside(*media: dict[str, Any], text: str = QUESTION) -> dict[str, Any]:
    """Pictures beside a text."""
    return {"text": text, "media": media}


def message(*parts: dict[str, Any] | str) -> dict[str, Any]:
    """Texts and pictures in one message."""
    listed = [{"text": part} if isinstance(part, str) else {"media": part} for part in parts]
    return {"messages": {"messages": [{"role": "user", "parts": listed}]}}


async def thought(stub: Any, prompt: dict[str, Any]) -> list[float]:
    """What the model thinks of PROBES after that prompt."""
    params = [{"stage": "eye", "sampling": {"logprob_token_ids": PROBES}}]
    responses = await collect(stub, prompt=prompt, stage_params=params, timeout=120)
    (entry,) = [e for r in responses if r.HasField("output") for e in r.output.text.logprobs]
    found = {candidate.token_id: candidate.logprob for candidate in entry.candidates}
    return [found[token] for token in PROBES]


def distance(a: list[float], b: list[float]) -> float:
    """How far two thoughts are apart."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def test_a_picture_changes_what_is_said(vision: Any) -> None:
    nothing = await thought(vision, {"text": QUESTION})
    red, blue = [await thought(vision, beside(picture(c))) for c in ("red", "blue")]
    again = await thought(vision, beside(picture("red")))
    assert distance(red, again) < SAME
    assert min(distance(red, blue), distance(red, nothing), distance(blue, nothing)) > 4 * SAME


async def test_pictures_keep_their_order_and_their_places(vision: Any) -> None:
    red, blue = picture("red"), picture("blue")
    one_way = await thought(vision, beside(red, blue))
    other_way = await thought(vision, beside(blue, red))
    assert distance(one_way, other_way) > 4 * SAME
    assert distance(one_way, await thought(vision, message(red, blue, QUESTION))) < SAME
    interleaved = await thought(vision, message(red, QUESTION, blue))
    assert distance(one_way, interleaved) > 4 * SAME
    assert distance(interleaved, await thought(vision, message(blue, QUESTION, red))) > 4 * SAME


async def test_a_picture_is_the_same_whatever_brings_it(vision: Any) -> None:
    file = await thought(vision, beside(picture("green")))
    assert distance(file, await thought(vision, beside(picture("green", form="tensor")))) < SAME
    alone = await thought(vision, {"media": [picture("green")]})
    assert distance(alone, await thought(vision, message(picture("green")))) < SAME
    assert distance(alone, file) > 4 * SAME


async def test_pictures_beside_tokens_stand_at_the_placeholders(vision: Any) -> None:
    """The model's token of a picture; what is around it is the processor's."""
    mark = 49153
    before = {"token_ids": {"ids": [mark, 504, 505]}, "media": [picture("red")]}
    after = {"token_ids": {"ids": [504, 505, mark]}, "media": [picture("red")]}
    found = await thought(vision, before)
    assert distance(found, await thought(vision, before)) < SAME
    assert distance(found, await thought(vision, after)) > 4 * SAME


async def test_a_picture_that_is_known_is_not_prepared_again(
    vision_server: Server, vision: Any
) -> None:
    # Replicas that are equally free take turns: each has seen it after this.
    first, _ = [await thought(vision, beside(picture("olive"))) for _ in range(2)]
    await eventually(lambda: counted(vision_server), within=5)
    await asyncio.sleep(1.5)  # a heartbeat tells the counters
    hits = sum(c["media_cache_hits"] for c in counted(vision_server))
    assert distance(first, await thought(vision, beside(picture("olive", form="tensor")))) < SAME
    await eventually(
        lambda: sum(c["media_cache_hits"] for c in counted(vision_server)) == hits + 1, within=5
    )


async def test_a_callers_name_stands_for_its_content(vision: Any) -> None:
    """What one name meant once, it means again: that is what names are for."""
    red = await thought(vision, beside(picture("red", uuid="mine")))
    assert distance(red, await thought(vision, beside(picture("red")))) < SAME
    assert distance(red, await thought(vision, beside(picture("blue", uuid="mine")))) < SAME
    assert distance(red, await thought(vision, beside(picture("blue", uuid="other")))) > 4 * SAME


def counted(server: Server) -> list[dict[str, int]]:
    """Each replica's counters, as far as they are known."""
    (stage,) = server.engine.load()
    found = [slot.load.own.counters for slot in stage.replicas]
    return [counters for counters in found if counters]


async def test_two_replicas_do_not_mix_up_what_each_has_seen(
    vision_server: Server, vision: Any
) -> None:
    """Two at once go to two replicas; which gets which changes."""
    colours = ("red", "blue", "lime", "navy")
    expected = {c: await thought(vision, beside(picture(c, uuid=f"the-{c}"))) for c in colours}
    for turn in range(6):
        pair = colours[turn % 4], colours[(turn + 1 + turn // 4) % 4]
        pair = pair if turn % 2 else pair[::-1]
        found = await asyncio.gather(
            *(thought(vision, beside(picture(c, uuid=f"the-{c}"))) for c in pair)
        )
        for colour, one in zip(pair, found, strict=True):
            assert distance(one, expected[colour]) < SAME, (turn, colour)
    await asyncio.sleep(1.5)
    replicas = counted(vision_server)
    assert len(replicas) == 2
    assert all(counters["media_cache_hits"] > 0 for counters in replicas)


async def test_media_that_the_model_cannot_take_are_refused(vision: Any) -> None:
    red = picture("red")
    sound = {"modality": AUDIO, "data": b"\0\0" * 100, "mime_type": "audio/L16;rate=16000"}
    broken = {"modality": IMAGE, "data": b"\x89PNG\r\n\x1a\n and so on"}
    parts = "prompt.messages.messages[0].parts"
    for prompt, reason, paths in (
        (beside(red, sound), "NOT_SUPPORTED", ["prompt.media[1]"]),
        (message("x", sound), "NOT_SUPPORTED", [f"{parts}[1].media"]),
        (beside(red, red, red, red), "INVALID_FIELD", ["prompt.media[3]"]),
        (message(red, "x", broken), "INVALID_MEDIA", [f"{parts}[2].media"]),
        ({"token_ids": {"ids": [504]}, "media": [red]}, "INVALID_FIELD", ["prompt"]),
    ):
        error = await refusal(vision, prompt=prompt, timeout=60)
        assert (error.reason, list(error.violations)) == (reason, paths)
    whole = await thought(vision, beside(red))
    assert distance(whole, await thought(vision, beside(red))) < SAME


async def test_a_picture_of_a_refused_request_is_not_taken_for_known(vision: Any) -> None:
    """The sender's cache has it by then, the engine does not: a refusal must undo that."""
    prompt = beside(picture("teal"))
    wrong = [{"stage": "eye", "sampling": {"allowed_token_ids": [10**6]}}]
    error = await refusal(vision, prompt=prompt, stage_params=wrong, timeout=60)
    assert list(error.violations) == ["stage_params[0].sampling.allowed_token_ids"]
    misplaced = {"token_ids": {"ids": [504]}, "media": [picture("maroon")]}
    assert (await refusal(vision, prompt=misplaced, timeout=60)).reason == "INVALID_FIELD"
    teal, maroon = [await thought(vision, beside(picture(c))) for c in ("teal", "maroon")]
    assert distance(teal, maroon) > 2 * SAME


async def test_a_cut_never_goes_through_a_picture(vision: Any) -> None:
    limit = {"truncate_prompt_tokens": 12}
    error = await refusal(vision, prompt=beside(picture("red")), tokenization=limit, timeout=60)
    assert list(error.violations) == ["tokenization.truncate_prompt_tokens"]
