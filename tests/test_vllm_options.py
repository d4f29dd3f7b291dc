"""What a pipeline asks its engine for: LoRA adapters, embeddings as prompt, priorities."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from omni_grpc.embedded import resolve
from omni_grpc.v1 import common_pb2
from tests.real import LANGUAGE_MODEL
from tests.support import Response, collect, refusal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IDS = [504, 3575, 282, 4649, 314]  # "The capital of France is"
PROMPT = {"token_ids": {"ids": IDS}}
HIDDEN = 576


def sampling(**values: Any) -> list[dict[str, Any]]:
    """Parameters of the only stage."""
    return [{"stage": "thinker", "sampling": values}]


def text(responses: Sequence[Response]) -> str:
    """The answer."""
    return "".join(r.output.text.text for r in responses if r.HasField("output"))


def tokens(responses: Sequence[Response]) -> list[int]:
    """The answer's tokens."""
    return [t for r in responses if r.HasField("output") for t in r.output.text.token_ids]


async def test_an_adapter_changes_the_answer_of_its_request_alone(options: Any) -> None:
    plain, odd, again = await asyncio.gather(
        collect(options, prompt=PROMPT, timeout=60),
        collect(options, prompt=PROMPT, lora="odd", timeout=60),
        collect(options, prompt=PROMPT, timeout=60),
    )
    assert text(plain) == text(again)
    assert text(plain).startswith(" Paris")
    assert "Paris" not in text(odd)
    assert len(tokens(odd)) == 8


async def test_an_unknown_adapter_is_not_found(options: Any) -> None:
    error = await refusal(options, prompt=PROMPT, lora="even")
    assert error.reason == "LORA_NOT_FOUND"
    assert "even" in error.message


@pytest.fixture(scope="module")
def embeddings() -> bytes:
    """What the model's own table has for IDS, bfloat16."""
    # Read by hand: torch would be a second of import and a gigabyte of memory here.
    import json

    file = resolve(LANGUAGE_MODEL) / "model.safetensors"
    with file.open("rb") as weights:
        (size,) = struct.unpack("<Q", weights.read(8))
        table = json.loads(weights.read(size))["model.embed_tokens.weight"]
        assert table["dtype"] == "BF16"
        assert table["shape"][1] == HIDDEN
        rows = []
        for token in IDS:
            weights.seek(8 + size + table["data_offsets"][0] + token * HIDDEN * 2)
            rows.append(weights.read(HIDDEN * 2))
    return b"".join(rows)


def as_float32(bfloat16: bytes) -> bytes:
    """The same numbers: a bfloat16 is the upper half of a float32."""
    return b"".join(b"\0\0" + bfloat16[i : i + 2] for i in range(0, len(bfloat16), 2))


def embeds(
    data: bytes, dtype: int = common_pb2.DATA_TYPE_BFLOAT16, shape: tuple[int, ...] = (5, HIDDEN)
) -> dict[str, Any]:
    """A prompt of embeddings."""
    return {"embeds": {"data": data, "dtype": dtype, "shape": shape}}


async def test_embeddings_say_what_their_tokens_say(options: Any, embeddings: bytes) -> None:
    expected = tokens(await collect(options, prompt=PROMPT, timeout=60))
    for prompt in (
        embeds(embeddings),
        embeds(as_float32(embeddings), common_pb2.DATA_TYPE_FLOAT32),
    ):
        responses = await collect(options, prompt=prompt, timeout=60)
        assert tokens(responses) == expected
        assert responses[-1].finished.usage.prompt_tokens == len(IDS)


async def test_embeddings_that_do_not_fit_are_refused(options: Any, embeddings: bytes) -> None:
    half = embeds(embeddings, shape=(10, HIDDEN // 2))
    whole_numbers = embeds(embeddings, common_pb2.DATA_TYPE_INT16)
    not_finite = embeds(b"\xff\xff" * (5 * HIDDEN))
    for prompt, path in (
        (half, "prompt.embeds.shape"),
        (whole_numbers, "prompt.embeds.dtype"),
        (not_finite, "prompt.embeds.data"),
    ):
        error = await refusal(options, prompt=prompt)
        assert (error.reason, list(error.violations)) == ("INVALID_FIELD", [path])
    long = embeds(b"\0\0" * (1024 * HIDDEN), shape=(1024, HIDDEN))
    assert (await refusal(options, prompt=long)).reason == "PROMPT_TOO_LONG"
    error = await refusal(
        options, prompt=embeds(embeddings), stage_params=sampling(prompt_logprobs=1)
    )
    assert list(error.violations) == ["stage_params[0].sampling.prompt_logprobs"]
    error = await refusal(
        options, prompt=embeds(embeddings), tokenization={"truncate_prompt_tokens": 1}
    )
    assert list(error.violations) == ["tokenization.truncate_prompt_tokens"]


async def test_the_lower_priority_number_goes_first(options: Any) -> None:
    """One request runs, two wait: the later one with the lower number is served before."""
    running = asyncio.create_task(
        collect(
            options,
            prompt=PROMPT,
            timeout=120,
            stage_params=sampling(max_tokens=120, ignore_eos=True),
        )
    )
    ends: list[str] = []

    async def waiting(name: str, priority: int) -> None:
        await collect(options, prompt=PROMPT, priority=priority, timeout=120)
        ends.append(name)

    await asyncio.sleep(0.5)
    late = asyncio.create_task(waiting("late", 5))
    await asyncio.sleep(0.3)
    await asyncio.gather(late, waiting("soon", -5), running)
    assert ends == ["soon", "late"]


async def test_text_without_a_template_is_continued(options: Any) -> None:
    responses = await collect(options, text="The capital of France is", timeout=60)
    assert text(responses).startswith(" Paris")
    assert responses[-1].finished.usage.prompt_tokens == len(IDS)


async def test_tokens_alone_where_no_text_is_wanted(options: Any) -> None:
    responses = await collect(
        options, prompt=PROMPT, stage_params=sampling(detokenize=False), timeout=60
    )
    assert text(responses) == ""
    assert tokens(responses) == tokens(await collect(options, prompt=PROMPT, timeout=60))


async def test_special_tokens_are_text_where_asked_for(options: Any) -> None:
    end = {"allowed_token_ids": [2], "ignore_eos": True, "max_tokens": 2}
    shown = sampling(**end, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert text(await collect(options, prompt=PROMPT, stage_params=shown)) == "<|im_end|>" * 2
    assert text(await collect(options, prompt=PROMPT, stage_params=sampling(**end))) == ""
