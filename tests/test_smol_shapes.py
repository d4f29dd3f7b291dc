"""Free sentences become pictures: SmolLM2 writes the caption, the painter draws, a judge looks."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image

from omni_grpc.stages.painter.captions import REGEX, parse
from omni_grpc.stages.painter.judge import Judge
from omni_grpc.v1 import service_pb2
from tests.support import broken_off, collect, picture, rich_error, texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SENTENCES = (
    "draw me a big red ball on something dark",
    "a large blue square on a white background",
    "small green triangle on gray",
    "please paint a tiny yellow ring on black",
    "huge purple cross, white background",
    "an orange diamond, small, on a gray background",
    "can you draw a giant green star shape on white",
    "little red heart on the moon",
    "What is the capital of France?",
    "a small orange circle on a black background",
)


async def draw(stub: Any, text: str, **prompt: Any) -> list[service_pb2.AddRequestResponse]:
    """All events of one picture; `guidance` sets the painter's scale."""
    diffusion: dict[str, Any] = {"seed": 1}
    if (guidance := prompt.pop("guidance", None)) is not None:
        diffusion["guidance_scale"] = guidance
    request = service_pb2.AddRequestRequest(
        pipeline="smol-shapes",
        prompt={"text": text, **prompt},
        stage_params=[{"stage": "painter", "diffusion": diffusion}],
    )
    return await collect(stub, request, timeout=120)


def values(png: bytes) -> torch.Tensor:
    """A picture as the judge sees it: [1, 3, 32, 32] in [-1, 1]."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1


async def test_the_drawing_matches_the_caption(voice: Any) -> None:
    drawn = await asyncio.gather(*(draw(voice, sentence) for sentence in SENTENCES))
    captions = [parse(texts(events)) for events in drawn]
    judge = Judge()
    shown = [judge.read(values(picture(events))).captions[0] for events in drawn]
    right = sum(a == b for a, b in zip(captions, shown, strict=True))
    assert right >= 0.9 * len(SENTENCES), list(zip(captions, shown, strict=True))
    # Sentences in the grammar's own words are taken at their word.
    assert str(captions[1]) == "a large blue square on a white background"
    assert str(captions[9]) == "a small orange circle on a black background"
    assert str(captions[0]) == "a large red circle on a black background"


async def test_the_negative_text_is_a_companion_and_changes_the_picture(voice: Any) -> None:
    text = "a large red circle on a white background"
    plain = await draw(voice, text)
    other = await draw(voice, text, negative_text="a large red square on a black background")
    assert picture(plain) != picture(other)
    assert texts(other) == texts(plain) == text
    # The companion was generated too, and said nothing to the client.
    tokens = [events[-1].finished.usage.completion_tokens for events in (plain, other)]
    assert tokens[1] > tokens[0]
    assert Judge().read(values(picture(other))).captions[0] == parse(text)


async def test_guidance_changes_the_picture(voice: Any) -> None:
    text = "a small red ring on a white background"
    weak, strong = await draw(voice, text, guidance=1), await draw(voice, text, guidance=4)
    assert picture(weak) != picture(strong)
    assert picture(strong) == picture(await draw(voice, text, guidance=4))


async def test_negative_text_without_guidance_is_refused(voice: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await draw(voice, "a red ball", negative_text="a box", guidance=1)
    error = rich_error(caught.value)
    assert error.reason == "INVALID_FIELD"
    assert list(error.violations) == ["prompt.negative_text"]


async def test_the_caption_cannot_be_set_free(voice: Any) -> None:
    request = service_pb2.AddRequestRequest(
        pipeline="smol-shapes",
        prompt={"text": "a red ball"},
        stage_params=[
            {"stage": "thinker", "sampling": {"structured_outputs": {"regex": "anything"}}}
        ],
    )
    events, error = await broken_off(voice, request)
    assert not events
    assert list(error.violations) == ["stage_params[0].sampling.structured_outputs"]


def test_the_pipeline_holds_the_thinker_to_the_painters_grammar() -> None:
    from omni_grpc.config import load_pipeline

    thinker = load_pipeline("smol-shapes").stages[0]
    regex = thinker.constraints["structured_outputs"]["regex"]
    assert regex.replace("(?:", "(") == REGEX.replace("(?:", "(")
