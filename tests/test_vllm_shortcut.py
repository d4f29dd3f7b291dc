"""Plain tokens' short cut past vLLM: over its real output processor, without an engine; and that a
real engine's answers are the same on both ways."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_grpc.embedded import prepare, resolve
from omni_grpc.server import Server
from tests.real import ANSWER, LANGUAGE_MODEL, QUESTION
from tests.support import TEXT, collect, freed, started
from tests.test_vllm_answers import answer, fields, finish, text, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WRITTEN = "🧑🏽\u200d🚀 naïve e\u0301 नि 한국 🏳️\u200d🌈!"


class Engine:
    """vLLM's output processor, whose engine core is the test."""

    def __init__(self, tokenizer: Any, *, shortened: bool = True, **sampling: Any) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

        from omni_grpc.stages.vllm.shortcut import ShortCut

        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.short_cut = ShortCut(self.processor)
        self.short: list[tuple[str, list[int]]] = []
        """What took the short cut."""
        self.said: list[tuple[str, list[int]]] = []
        """All that was said, in the order in which it was."""
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        params.update_from_tokenizer(tokenizer)
        prompt = tokenizer.encode(QUESTION)
        request = EngineCoreRequest(
            "r", prompt, None, params, None, 0.0, None, None, None, external_req_id="r"
        )
        self.collector = RequestOutputCollector(params.output_kind, "r")
        self.processor.add_request(request, None, queue=self.collector)
        self.line = self.short_cut.open("r", self._say) if shortened else None

    def _say(self, piece: str, ids: list[int]) -> None:
        self.short.append((piece, ids))
        self.said.append((piece, ids))

    def give(self, ids: list[int], *, end: bool = False) -> None:
        """What the engine core computed."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        reason = FinishReason.LENGTH if end else None
        self.processor.process_outputs([EngineCoreOutput("r", ids, finish_reason=reason)])

    def fetch(self) -> bool:
        """The task takes what came on vLLM's own way; whether that was the end."""
        output = self.collector.get_nowait()
        if output is None:
            return False
        for completion in output.outputs:
            self.said.append((completion.text, list(completion.token_ids)))
        return bool(output.finished)

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.said)

    @property
    def ids(self) -> list[int]:
        return [token for _, ids in self.said for token in ids]


@pytest.fixture(scope="module")
async def tokenizer() -> Any:
    """The language model's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.output_processor  # noqa: F401
        from vllm.tokenizers import get_tokenizer

        import omni_grpc.stages.vllm.shortcut  # noqa: F401

        await asyncio.to_thread(prepare, [LANGUAGE_MODEL], print)
        return get_tokenizer(str(resolve(LANGUAGE_MODEL)))


async def test_all_but_the_first_and_the_last_take_the_short_cut(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    ids = tokenizer.encode(ANSWER)
    for token in ids[:-1]:
        engine.give([token])
        assert not engine.fetch()
    engine.give(ids[-1:], end=True)
    assert engine.fetch()
    assert (engine.text, engine.ids) == (ANSWER, ids)
    assert engine.line is not None
    assert engine.line.tokens == len(engine.short) == len(ids) - 2


async def test_nothing_overtakes_what_its_task_has_not_fetched(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    ids = tokenizer.encode(ANSWER)
    for token in ids[:5]:
        engine.give([token])
    assert not engine.short
    engine.fetch()
    assert engine.ids == ids[:5]
    engine.give(ids[5:6])
    assert engine.short
    engine.give(ids[6:], end=True)
    assert engine.fetch()
    assert (engine.text, engine.ids) == (ANSWER, ids)


async def test_a_short_cut_that_is_closed_says_nothing(tokenizer: Any) -> None:
    engine = Engine(tokenizer)
    ids = tokenizer.encode(ANSWER)
    engine.give(ids[:1])
    engine.fetch()
    engine.give(ids[1:2])
    engine.short_cut.close("r")
    engine.processor.abort_requests(["r"], internal=True)
    engine.give(ids[2:3])
    engine.fetch()
    assert len(engine.short) == 1
    engine.short_cut.close("r")


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 1}, {"logprobs": 0}, {"prompt_logprobs": 1}, {"stop": ["Paris"]}],
    ids=str,
)
async def test_who_wants_more_than_text_has_no_short_cut(tokenizer: Any, sampling: Any) -> None:
    engine = Engine(tokenizer, **sampling)
    assert engine.line is None
    assert engine.short_cut.open("unknown", engine._say) is None


async def test_tokens_without_text_take_the_short_cut_too(tokenizer: Any) -> None:
    engine = Engine(tokenizer, detokenize=False)
    ids = tokenizer.encode(ANSWER)
    for token in ids[:-1]:
        engine.give([token])
        engine.fetch()
    engine.give(ids[-1:], end=True)
    assert engine.fetch()
    assert (engine.text, engine.ids) == ("", ids)
    assert len(engine.short) == len(ids) - 2


steps = st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=40)


async def test_both_ways_say_the_same_however_tokens_come(tokenizer: Any) -> None:
    ids = tokenizer.encode(WRITTEN + ANSWER + WRITTEN)

    @settings(max_examples=60)
    @given(steps)
    def play(steps: list[tuple[int, bool]]) -> None:
        ways = [Engine(tokenizer, shortened=shortened) for shortened in (True, False)]
        at = 0
        for size, fetched in steps:
            for way in ways:
                if at + size < len(ids):
                    way.give(ids[at : at + size])
                if fetched:
                    way.fetch()
            at += size if at + size < len(ids) else 0
        for way in ways:
            way.give(ids[at:], end=True)
            assert way.fetch()
        assert ways[0].ids == ways[1].ids == ids
        assert ways[0].text == ways[1].text == WRITTEN + ANSWER + WRITTEN
        assert not ways[1].short

    play()


# ---------------------------------------------------------------- a real engine

PLAIN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.0}


async def test_characters_of_several_tokens_come_whole_on_both_ways(voice: Any) -> None:
    form = {"choice": {"options": [WRITTEN]}}
    asked: dict[str, Any] = {
        "structured_outputs": form,
        "max_tokens": 150,
        "repetition_penalty": 1.0,
    }
    plain = await answer(voice, **asked)
    told = await answer(voice, logprobs=1, **asked)
    assert text(plain) == text(told) == WRITTEN
    assert tokens(plain) == tokens(told)


@pytest.mark.parametrize("stop", ["Paris", "of Fra"])
async def test_a_stop_string_ends_both_ways_alike(voice: Any, stop: str) -> None:
    plain = await answer(voice, stop=[stop])
    told = await answer(voice, stop=[stop], logprobs=1)
    assert text(plain) == text(told) == ANSWER[: ANSWER.index(stop)]
    assert tokens(plain) == tokens(told)
    assert finish(plain) == finish(told)
    assert plain[-1].finished.usage == told[-1].finished.usage


async def test_several_answers_are_each_whole(voice: Any, tokenizer: Any) -> None:
    responses = await answer(voice, **{**PLAIN, "n": 2, "temperature": 1.0, "seed": 5})
    for index in (0, 1):
        ids = tokens(responses, index)
        assert len(ids) == 24
        assert text(responses, index) == tokenizer.decode(ids, skip_special_tokens=True)
    assert text(responses, 0) != text(responses, 1)
    assert responses[-1].finished.usage.completion_tokens == 48


async def test_plain_requests_beside_each_other_say_what_each_says_alone(voice: Any) -> None:
    """Some with log-probabilities, one that is left in the middle."""
    left = await started(voice, **fields(**{**PLAIN, "max_tokens": 500}))
    mixed = [{**PLAIN, **({"logprobs": 1} if number % 2 else {})} for number in range(6)]
    answers = asyncio.gather(*(answer(voice, **asked) for asked in mixed))
    await asyncio.sleep(0.2)
    left.cancel()
    for responses in await answers:
        assert text(responses).startswith(ANSWER)
        assert len(tokens(responses)) == 24 == responses[-1].finished.usage.completion_tokens


async def test_a_request_that_is_left_in_the_middle_leaves_nothing(
    voice_server: Server, voice: Any
) -> None:
    calls = [await started(voice, **fields(**{**PLAIN, "max_tokens": 1500})) for _ in range(3)]
    seen = [await anext(aiter(call)) for call in calls for _ in range(4)]
    assert all(response.HasField("output") for response in seen)
    for call in calls:
        call.cancel()
    await freed(voice_server, within=5)
    after = await collect(voice, text=QUESTION, output_modalities=[TEXT], timeout=60)
    assert text(after) == ANSWER
