"""What parameters do to a real model's answers, over gRPC: SmolLM2 as the pipeline has it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from omni_grpc.v1 import output_pb2
from tests.real import ANSWER, QUESTION
from tests.support import TEXT, Response, collect, refusal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

IDS = [504, 3575, 282, 4649, 314]  # "The capital of France is"
OF = 282
NAMES = {kind.number: kind.name for kind in output_pb2.FinishReason.DESCRIPTOR.values}


def fields(prompt: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """A request that wants text only."""
    return {
        "prompt": prompt or {"text": QUESTION},
        "stage_params": [{"stage": "thinker", "sampling": sampling}],
        "output_modalities": [TEXT],
    }


async def answer(
    stub: Any, prompt: dict[str, Any] | None = None, **sampling: Any
) -> list[Response]:
    """All responses to a request with these parameters."""
    return await collect(stub, timeout=120, **fields(prompt, **sampling))


def deltas(responses: Sequence[Response], index: int = 0) -> list[output_pb2.TextDelta]:
    """The pieces of one answer."""
    outputs = [r.output for r in responses if r.HasField("output")]
    return [output.text for output in outputs if output.index == index]


def text(responses: Sequence[Response], index: int = 0) -> str:
    """One answer."""
    return "".join(delta.text for delta in deltas(responses, index))


def tokens(responses: Sequence[Response], index: int = 0) -> list[int]:
    """The tokens of one answer."""
    return [token for delta in deltas(responses, index) for token in delta.token_ids]


def finish(responses: Sequence[Response]) -> output_pb2.StageFinish:
    """How the only answer ended."""
    (found,) = responses[-1].finished.finish_reasons
    return found


def reason(responses: Sequence[Response]) -> str:
    """Why the only answer ended."""
    return NAMES[finish(responses).reason].removeprefix("FINISH_REASON_")


# ---------------------------------------------------------------- the short cut

UNICODE = "Repeat: 日本語 🎉 naïve"


@pytest.mark.parametrize("prompt", [QUESTION, UNICODE], ids=["english", "bytes of characters"])
@pytest.mark.parametrize("most", [1, 2, 40])
async def test_plain_text_is_what_it_is_with_all_that_vllm_tells(
    voice: Any, prompt: str, most: int
) -> None:
    # With log-probabilities a request's outputs take vLLM's own way.
    asked = {"max_tokens": most, "ignore_eos": True, "temperature": 0.0}
    plain = await answer(voice, {"text": prompt}, **asked)
    told = await answer(voice, {"text": prompt}, logprobs=1, **asked)
    assert tokens(plain) == tokens(told)
    assert text(plain) == text(told)
    assert len(tokens(plain)) == most
    ended, other = plain[-1].finished, told[-1].finished
    assert ended.usage.completion_tokens == other.usage.completion_tokens == most
    assert ended.usage.prompt_tokens == other.usage.prompt_tokens
    assert list(ended.finish_reasons) == list(other.finish_reasons)


async def test_plain_requests_beside_each_other_stay_apart(voice: Any) -> None:
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    prompts = [f"Count from {n}: {n}, {n + 1}," for n in range(8)]
    at_once = await asyncio.gather(
        *(answer(voice, {"text": prompt}, **asked) for prompt in prompts)
    )
    for responses in at_once:
        assert [r.seq for r in responses] == list(range(len(responses)))
        assert len(tokens(responses)) == responses[-1].finished.usage.completion_tokens == 24
    assert len({text(responses) for responses in at_once}) > 1


# ---------------------------------------------------------------- log-probabilities


async def test_each_token_has_its_log_probabilities(voice: Any) -> None:
    responses = await answer(voice, logprobs=2, repetition_penalty=1.0)
    for delta in deltas(responses):
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    entries = [entry for delta in deltas(responses) for entry in delta.logprobs]
    assert len(entries) == responses[-1].finished.usage.completion_tokens > 5
    for entry in entries:
        assert entry.rank == 1, "greedy takes the most likely"
        assert entry.logprob == max(c.logprob for c in entry.candidates) <= 0
        assert len(entry.candidates) == 2
    assert "".join(e.candidates[0].text for e in entries).startswith("The capital")


async def test_no_further_candidates_are_an_answer_to_zero(voice: Any) -> None:
    (first, *_) = deltas(await answer(voice, logprobs=0, max_tokens=2))
    assert [c.token_id for c in first.logprobs[0].candidates] == [first.token_ids[0]]
    assert not any(d.logprobs for d in deltas(await answer(voice, max_tokens=2)))


async def test_log_probabilities_of_chosen_tokens(voice: Any) -> None:
    responses = await answer(voice, logprob_token_ids=[1, OF], max_tokens=3)
    for delta in deltas(responses):
        for entry in delta.logprobs:
            assert {c.token_id for c in entry.candidates} == {1, OF, entry.token_id}


async def test_the_prompts_log_probabilities_come_once(voice: Any) -> None:
    prompt = {"token_ids": {"ids": IDS}}
    responses = await answer(
        voice, prompt, prompt_logprobs=1, n=2, temperature=0.8, seed=1, max_tokens=3
    )
    entries = [e for index in (0, 1) for d in deltas(responses, index) for e in d.prompt_logprobs]
    assert [entry.token_id for entry in entries] == IDS
    assert not entries[0].candidates, "nothing comes before the first token"
    assert all(entry.logprob < 0 and entry.candidates for entry in entries[1:])


# ---------------------------------------------------------------- several answers


async def test_several_answers_to_one_prompt(voice: Any) -> None:
    responses = await answer(voice, n=3, temperature=1.5, seed=7, max_tokens=12)
    answers = {text(responses, index) for index in range(3)}
    assert len(answers) == 3
    ends = responses[-1].finished.finish_reasons
    assert sorted(end.index for end in ends) == [0, 1, 2]
    total = sum(len(tokens(responses, index)) for index in range(3))
    assert responses[-1].finished.usage.completion_tokens == total


async def test_equal_answers_are_not_made_twice(voice: Any) -> None:
    error = await refusal(voice, **fields(n=2))
    assert (error.reason, list(error.violations)) == (
        "INVALID_FIELD",
        ["stage_params[0].sampling.n"],
    )


async def test_a_seed_decides_what_is_drawn(voice: Any) -> None:
    drawn = [
        text(await answer(voice, temperature=1.5, max_tokens=12, seed=seed)) for seed in (3, 3, 4)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


# ---------------------------------------------------------------- where an answer ends


@pytest.mark.parametrize(("kept", "expected"), [(False, "The capital "), (True, ANSWER[:18])])
async def test_a_stop_string_over_the_border_of_deltas(
    voice: Any, kept: bool, expected: str
) -> None:
    responses = await answer(voice, stop=["of Fra"], include_stop_str_in_output=kept)
    assert text(responses) == expected
    assert finish(responses).stop_text == "of Fra"
    assert reason(responses) == "STOP"


async def test_a_stop_token_ends_and_is_named(voice: Any) -> None:
    responses = await answer(voice, stop_token_ids=[OF])
    assert tokens(responses)[-1] == OF
    assert finish(responses).stop_token_id == OF
    assert text(responses).startswith("The capital")


async def test_length_ends_an_answer_that_ignores_its_end(voice: Any) -> None:
    responses = await answer(voice, ignore_eos=True, max_tokens=20)
    assert (reason(responses), len(tokens(responses))) == ("LENGTH", 20)


async def test_the_end_waits_for_the_least_tokens(voice: Any) -> None:
    responses = await answer(voice, min_tokens=24, max_tokens=40)
    assert len(tokens(responses)) >= 24 > len(tokens(await answer(voice)))


async def test_repetition_ends_an_answer(voice: Any) -> None:
    limits = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 4}
    responses = await answer(
        voice, allowed_token_ids=[OF], max_tokens=40, repetition_detection=limits
    )
    assert reason(responses) == "REPETITION"
    assert len(tokens(responses)) < 40


# ---------------------------------------------------------------- which tokens are drawn


async def test_biases_bans_and_allowances(voice: Any) -> None:
    pushed = await answer(voice, logit_bias=[{"token_id": OF, "bias": 100}], max_tokens=1)
    assert tokens(pushed) == [OF]
    allowed = await answer(voice, allowed_token_ids=[OF, 504], max_tokens=5)
    assert set(tokens(allowed)) <= {OF, 504}
    assert "Paris" not in text(await answer(voice, bad_words=["Paris"], max_tokens=12))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"choice": {"options": ["Lyon", "Nantes"]}}, "Lyon|Nantes"),
        ({"grammar": 'root ::= "yes, " ("he" | "she") " did"'}, "yes, (he|she) did"),
        ({"json_object": True}, r"\{.*"),
    ],
    ids=["regex", "choice", "grammar", "json_object"],
)
async def test_an_answer_holds_to_its_form(voice: Any, form: dict[str, Any], pattern: str) -> None:
    responses = await answer(voice, structured_outputs=form, max_tokens=30)
    assert re.fullmatch(pattern, text(responses), re.DOTALL)


async def test_an_answer_fits_its_json_schema(voice: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Paris", "Rome"]}, "sure": {"type": "boolean"}},
        "required": ["capital", "sure"],
        "additionalProperties": False,
    }
    form = {"json_schema": json.dumps(schema)}
    found = json.loads(text(await answer(voice, structured_outputs=form, max_tokens=60)))
    assert found["capital"] in ("Paris", "Rome")
    assert isinstance(found["sure"], bool)


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"regex": "[a-"}, "regex"),
        ({"grammar": "root ::= (((("}, "grammar"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": 7}'}, "json_schema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
async def test_a_form_that_makes_no_sense_is_refused(
    voice: Any, form: dict[str, Any], kind: str
) -> None:
    error = await refusal(voice, timeout=60, **fields(structured_outputs=form))
    assert error.reason == "INVALID_FIELD"
    assert list(error.violations) == [f"stage_params[0].sampling.structured_outputs.{kind}"]


# ---------------------------------------------------------------- text


WRITTEN = "🧑🏽\u200d🚀 naïve e\u0301 नि 한국 🏳️\u200d🌈!"


@pytest.mark.parametrize("interval", [1, 3, 1000])
async def test_characters_of_several_tokens_come_whole(voice: Any, interval: int) -> None:
    form = {"choice": {"options": [WRITTEN]}}
    responses = await answer(
        voice,
        structured_outputs=form,
        stream_interval=interval,
        max_tokens=150,
        repetition_penalty=1.0,
    )
    assert text(responses).encode() == WRITTEN.encode()
    assert len(tokens(responses)) > len(WRITTEN), "its characters are several tokens each"


async def test_outputs_wait_for_their_interval(voice: Any) -> None:
    responses = await answer(voice, stream_interval=5, ignore_eos=True, max_tokens=21)
    sizes = [len(delta.token_ids) for delta in deltas(responses)]
    assert sum(sizes) == 21
    assert all(size >= 5 for size in sizes[1:-1])
    assert len(sizes) <= 6


# ---------------------------------------------------------------- caches


async def test_a_prompts_computed_part_is_used_again_unless_asked_not_to(voice: Any) -> None:
    prompt = {"token_ids": {"ids": [*range(1000, 1300)]}}

    async def cached(**changes: Any) -> int:
        request = {**fields(prompt, max_tokens=1, **changes.pop("sampling", {})), **changes}
        responses = await collect(voice, timeout=60, **request)
        return int(responses[-1].finished.usage.cached_tokens)

    await cached()
    assert await cached() >= 256
    assert await cached(sampling={"skip_reading_prefix_cache": True}) == 0
    assert await cached(cache_salt="mine") == 0, "another's cache"
    assert await cached(cache_salt="mine") >= 256
    assert await cached(cache_salt="") >= 256, "no salt is the common cache"


# ---------------------------------------------------------------- how a prompt becomes tokens


async def prompt_tokens(stub: Any, **request: Any) -> int:
    """The length of a prompt."""
    responses = await collect(stub, timeout=60, **{**fields(max_tokens=1), **request})
    return int(responses[-1].finished.usage.prompt_tokens)


async def test_a_prompt_keeps_its_last_tokens(voice: Any) -> None:
    assert await prompt_tokens(voice, tokenization={"truncate_prompt_tokens": 9}) == 9
    prompt = {"token_ids": {"ids": [7] * 3000 + IDS}}
    cut = {**fields(prompt, max_tokens=1), "tokenization": {"truncate_prompt_tokens": len(IDS)}}
    whole = await answer(voice, {"token_ids": {"ids": IDS}}, max_tokens=1)
    assert text(await collect(voice, timeout=60, **cut)) == text(whole) == " Paris"


async def test_the_template_opens_a_turn_unless_asked_not_to(voice: Any) -> None:
    whole = await prompt_tokens(voice)
    bare = await prompt_tokens(voice, tokenization={"add_generation_prompt": False})
    assert bare < whole


async def test_the_last_message_is_continued(voice: Any) -> None:
    messages = [
        {"role": "user", "parts": [{"text": QUESTION}]},
        {"role": "assistant", "parts": [{"text": "It is the city of"}]},
    ]
    request = {
        **fields({"messages": {"messages": messages}}, max_tokens=1),
        "tokenization": {"continue_final_message": True},
    }
    assert text(await collect(voice, timeout=60, **request)) == " Paris"


@pytest.mark.parametrize(
    ("tokenization", "prompt", "path"),
    [
        ({"add_special_tokens": True}, {"token_ids": {"ids": IDS}}, "add_special_tokens"),
        ({"add_generation_prompt": True}, {"token_ids": {"ids": IDS}}, "add_generation_prompt"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            None,
            "continue_final_message",
        ),
        ({"truncate_prompt_tokens": 5000}, None, "truncate_prompt_tokens"),
        ({"chat_template_kwargs": {"mood": "bad"}}, None, "chat_template_kwargs.mood"),
        ({"chat_template_kwargs": {"messages": []}}, None, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, None,
         "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"return_tensors": "pt"}}, None,
         "chat_template_kwargs.return_tensors"),
    ],
)  # fmt: skip
async def test_tokenization_that_means_nothing_is_refused(
    voice: Any, tokenization: dict[str, Any], prompt: dict[str, Any] | None, path: str
) -> None:
    variables = tokenization.pop("chat_template_kwargs", None)
    request = fields(prompt)
    message = with_tokenization(request, tokenization, variables)
    error = await refusal(voice, message)
    assert (error.reason, list(error.violations)) == ("INVALID_FIELD", [f"tokenization.{path}"])


def with_tokenization(
    request: dict[str, Any], tokenization: dict[str, Any], variables: dict[str, Any] | None
) -> Any:
    """The request with tokenization options; a Struct is not made by keywords."""
    from omni_grpc.v1 import service_pb2

    message = service_pb2.AddRequestRequest(**request, tokenization=tokenization)
    if variables is not None:
        message.tokenization.chat_template_kwargs.update(variables)
    return message


# ---------------------------------------------------------------- what goes with a prompt


async def test_options_that_this_engine_can_honour_are_taken(voice: Any) -> None:
    request = {
        **fields(),
        "priority": 0,
        "data_parallel_rank": 0,
        "arrival_time": {"seconds": 1_700_000_000},
        "reasoning_ended": True,
    }
    assert text(await collect(voice, timeout=60, **request)) == ANSWER


async def test_what_it_would_ignore_is_refused(voice: Any) -> None:
    error = await refusal(voice, **{**fields(), "priority": 3})
    assert (error.reason, list(error.violations)) == ("NOT_SUPPORTED", ["priority"])
    error = await refusal(voice, **fields(extra_args={"knob": "up"}))
    assert list(error.violations) == ["stage_params[0].sampling.extra_args"]
    picture = {"modality": "MODALITY_IMAGE", "uri": "data:image/png;base64,AAAA"}
    error = await refusal(voice, **fields({"text": "What is this?", "media": [picture]}))
    assert (error.reason, list(error.violations)) == ("NOT_SUPPORTED", ["prompt.media[0]"])
