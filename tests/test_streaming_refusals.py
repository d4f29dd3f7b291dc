"""What a feeder must not send. A bad chunk ends its feeder's call and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from omni_grpc.admission import check_segment
from omni_grpc.errors import InvalidField
from omni_grpc.server import Server
from omni_grpc.types import SamplingParams
from omni_grpc.v1 import params_pb2, service_pb2
from tests.streaming import (
    Feeding,
    Update,
    by_segment,
    chunk,
    feed,
    gone,
    header,
    lane_of,
    new_id,
    opened,
    refused,
    sent,
)
from tests.support import (
    RichError,
    ask,
    eventually,
    freed,
    holdings,
    refusal,
    running,
    script,
    started,
    stream,
    texts,
)

S = grpc.StatusCode


def says(error: RichError, reason: str, path: str = "") -> None:
    """Asserts the reason, with its one code, and the field."""
    codes = {
        "INVALID_FIELD": S.INVALID_ARGUMENT,
        "PROMPT_TOO_LONG": S.INVALID_ARGUMENT,
        "NOT_SUPPORTED": S.FAILED_PRECONDITION,
        "NOT_RESUMABLE": S.FAILED_PRECONDITION,
        "REQUEST_NOT_FOUND": S.NOT_FOUND,
        "STAGE_ERROR": S.INTERNAL,
        "INTERNAL": S.INTERNAL,
    }
    assert (error.code, error.reason) == (codes[reason], reason), error
    assert list(error.violations) == ([path] if path else []), error


# ---------------------------------------------------------------- the call


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        (lambda me: [], "header"),
        (lambda me: [Update()], "header"),
        (lambda me: [Update(chunk=chunk(0, "x"))], "header"),
        (lambda me: [header("")], "header.request_id"),
        (lambda me: [header(me), header(me)], "header"),
        (lambda me: [header(me), Update(chunk=chunk(0, "x ")), header(me)], "header"),
        (lambda me: [header(me), Update()], "message"),
        (lambda me: [header(me), b"\xff\xff\xff"], "(message)"),
    ],
)
async def test_messages_in_disorder(
    stub: Any, echo_server: Server, messages: Callable[[str], list[Any]], path: str
) -> None:
    async with opened(stub) as request:
        raw = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages(request.id)]
        error = await stream(echo_server, "StreamingUpdate", raw)
        assert error is not None
        says(error, "INVALID_FIELD", path)
        await feed(stub, request.id, [chunk(lane_of(echo_server, request.id).next_seq, "y")])
        assert texts(await request.finished()) in ("y", "x y")


@pytest.mark.parametrize("end", ["never", "finished", "aborted", "left"])
async def test_an_update_creates_nothing(stub: Any, echo_server: Server, end: str) -> None:
    request_id = new_id("nobody")
    if end != "never":
        async with opened(stub, request_id) as request:
            if end == "finished":
                await feed(stub, request_id, [chunk(0, "x")])
                await request.finished()
            elif end == "aborted":
                await stub.Abort(service_pb2.AbortRequest(request_ids=[request_id]))
                await request.failed()
    await freed(echo_server)
    says(await refused(stub, request_id, chunk(0, "x")), "REQUEST_NOT_FOUND")
    says(await Feeding(stub, request_id).close_refused(), "REQUEST_NOT_FOUND")
    assert not holdings(echo_server)


async def test_a_plain_request_takes_no_input(stub: Any) -> None:
    slow, request_id = [script(outputs=2, first_ms=300)], new_id("plain")
    call = await started(stub, until="accepted", request_id=request_id, stage_params=slow)
    says(await refused(stub, request_id, chunk(0, "x")), "NOT_RESUMABLE")
    rest = [response async for response in call]
    assert texts(rest) == "word0 word1 "


# ---------------------------------------------------------------- the chunk


def bad(**fields: Any) -> service_pb2.UpdateChunk:
    """A chunk that is due, of these fields."""
    return service_pb2.UpdateChunk(**{"seq": 1, **fields})


PCM = {"encoding": "AUDIO_ENCODING_PCM_S16LE", "sample_rate_hz": 16000, "channels": 1}
BAD_CHUNKS = {
    "nothing": (bad(), "INVALID_FIELD", "chunk"),
    "gap": (bad(seq=2, text="x"), "INVALID_FIELD", "chunk.seq"),
    "empty end": (bad(end_of_segment=True), "INVALID_FIELD", "chunk.end_of_segment"),
    "empty text and end": (
        bad(text="", end_of_segment=True),
        "INVALID_FIELD",
        "chunk.end_of_segment",
    ),
    "empty prompt": (bad(prompt={}), "INVALID_FIELD", "chunk.prompt"),
    "audio": (bad(audio={"data": b"1234", "format": PCM}), "NOT_SUPPORTED", "chunk.audio"),
    "empty audio": (bad(audio={"format": PCM}), "INVALID_FIELD", "chunk.audio.data"),
    "no channels": (
        bad(audio={"data": b"1234", "format": {**PCM, "channels": 0}}),
        "INVALID_FIELD",
        "chunk.audio.format.channels",
    ),
    "embeddings": (
        bad(prompt={"embeds": {"data": bytes(8), "dtype": "DATA_TYPE_FLOAT32", "shape": [1, 2]}}),
        "NOT_SUPPORTED",
        "chunk.prompt.embeds",
    ),
    "negative text": (
        bad(prompt={"text": "x", "negative_text": "y"}),
        "NOT_SUPPORTED",
        "chunk.prompt.negative_text",
    ),
    "a picture": (
        bad(prompt={"text": "x", "media": [{"modality": "MODALITY_IMAGE", "data": b"x"}]}),
        "NOT_SUPPORTED",
        "chunk.prompt.media[0]",
    ),
    "parameters alone": (
        bad(stage_params=[script(outputs=1)]),
        "INVALID_FIELD",
        "chunk",
    ),
    "parameters with empty text": (
        bad(text="", stage_params=[script(outputs=1)]),
        "INVALID_FIELD",
        "chunk.stage_params",
    ),
    "unknown stage": (
        bad(text="x", stage_params=[script(outputs=1), script("texts", outputs=1)]),
        "INVALID_FIELD",
        "chunk.stage_params[1].stage",
    ),
    "repeated stage": (
        bad(text="x", stage_params=[script(outputs=1), script(outputs=1)]),
        "INVALID_FIELD",
        "chunk.stage_params[1].stage",
    ),
    "another kind": (
        bad(text="x", stage_params=[params_pb2.StageParams(stage="text", sampling={})]),
        "INVALID_FIELD",
        "chunk.stage_params[0].sampling",
    ),
    "no parameters": (
        bad(text="x", stage_params=[params_pb2.StageParams(stage="text")]),
        "INVALID_FIELD",
        "chunk.stage_params[0]",
    ),
    "unknown parameter": (
        bad(text="x", stage_params=[script(outptus=1)]),
        "INVALID_FIELD",
        "chunk.stage_params[0].custom.outptus",
    ),
    "negative parameter": (
        bad(text="x", stage_params=[script("audio", outputs=-1)]),
        "INVALID_FIELD",
        "chunk.stage_params[0].custom.outputs",
    ),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_a_bad_chunk_ends_its_feeder_only(stub: Any, echo_server: Server, name: str) -> None:
    """The one after it has the same number, begins the same segment, and has parameters too."""
    wrong, reason, path = BAD_CHUNKS[name]
    async with opened(stub) as request:
        await sent(stub, echo_server, request.id, chunk(0, "a", end=True))
        await request.answered(0, "text", "audio", "image")
        held, lane = running(echo_server), lane_of(echo_server, request.id)
        says(await refused(stub, request.id, wrong), reason, path)
        assert (lane.next_seq, lane.segments, lane.segment_open) == (1, 1, False)
        assert running(echo_server) == held == {"text": 1, "audio": 1, "image": 1}
        await feed(stub, request.id, [chunk(1, "b", stage_params=[script(outputs=2)])])
        assert by_segment(await request.finished()) == {0: "a", 1: "word0 word1 "}


async def test_parameters_come_with_a_segments_first_chunk(stub: Any, echo_server: Server) -> None:
    async with opened(stub) as request:
        late = chunk(1, "b", stage_params=[script(outputs=2)])
        says(await refused(stub, request.id, chunk(0, "a "), late), "INVALID_FIELD", STAGE_PARAMS)
        await feed(stub, request.id, [chunk(1, "b", end=True), *([chunk(2, "c")])])
        assert by_segment(await request.finished()) == {0: "a b", 1: "c"}


STAGE_PARAMS = "chunk.stage_params"


async def test_a_chunk_over_the_limit_is_refused_by_the_core(
    stub: Any, echo_server: Server
) -> None:
    async with opened(stub) as request:
        error = await refused(stub, request.id, chunk(0, "a "), chunk(1, "x" * (65 << 20)))
        assert (error.code, error.reason) == (S.RESOURCE_EXHAUSTED, "")
        await gone(echo_server, request.id)
        await feed(stub, request.id, [chunk(1, "b")])
        assert texts(await request.finished()) == "a b"


# ---------------------------------------------------------------- what only the stage knows


@pytest.mark.parametrize(
    ("wrong", "reason", "path"),
    [
        ({"text": "bad"}, "INVALID_FIELD", "chunk.prompt.text"),
        ({"prompt": {"text": "bad"}}, "INVALID_FIELD", "chunk.prompt.text"),
        ({"text": "bad", "end_of_segment": True}, "INVALID_FIELD", "chunk.prompt.text"),
        ({"text": "long", "end_of_segment": True}, "PROMPT_TOO_LONG", ""),
    ],
)
async def test_a_chunk_that_the_stage_refuses_leaves_no_trace(
    streams: Any, streams_server: Server, wrong: dict[str, Any], reason: str, path: str
) -> None:
    """Not even a segment's end: the parameters of the next segment still find it."""
    async with opened(streams, pipeline="careful") as request:
        await sent(streams, streams_server, request.id, chunk(0, "a "))
        says(await refused(streams, request.id, bad(**wrong)), reason, path)
        lane = lane_of(streams_server, request.id)
        assert (lane.next_seq, lane.segments, lane.segment_open) == (1, 0, True)
        marked = [script("careful", mark="> ")]
        rest = [chunk(1, "c", end=True), chunk(2, "d", end=True, stage_params=marked)]
        await feed(streams, request.id, [*rest, chunk(3, "e")])
        assert by_segment(await request.finished()) == {0: "a c", 1: "> d", 2: "e"}


async def test_refused_parameters_leave_no_trace(streams: Any, streams_server: Server) -> None:
    async with opened(streams, pipeline="careful") as request:
        wrong = chunk(0, "a", end=True, stage_params=[script("careful", nark="!")])
        error = await refused(streams, request.id, wrong)
        says(error, "INVALID_FIELD", "chunk.stage_params[0].custom.mark")
        marked = [script("careful", mark="> ")]
        await feed(streams, request.id, [chunk(0, "a", end=True, stage_params=marked)])
        assert by_segment(await request.finished()) == {0: "> a"}


async def test_refused_parameters_of_a_later_stage_are_gone(
    streams: Any, streams_server: Server
) -> None:
    """The first stage refuses the chunk; what it brought for the second goes too."""
    async with opened(streams, pipeline="read") as request:
        loud = [script("voice", bytes=10)]
        wrong = chunk(0, "bad", end=True, stage_params=loud)
        says(await refused(streams, request.id, wrong), "INVALID_FIELD", "chunk.prompt.text")
        rest = [chunk(0, "a", end=True), chunk(1, "b", end=True, stage_params=loud)]
        await feed(streams, request.id, rest)
        sounds = [(r.output.segment, len(r.output.audio.data)) for r in await request.finished()]
        assert [size for size in sounds if size[1]] == [(0, 4800), (1, 10)]


async def test_a_stage_that_breaks_at_a_chunk_fails_the_request(
    streams: Any, streams_server: Server
) -> None:
    async with opened(streams, pipeline="careful") as request:
        error = await refused(streams, request.id, chunk(0, "a "), chunk(1, "broken"))
        says(error, "STAGE_ERROR")
        failed = await request.failed()
        says(failed, "STAGE_ERROR")
        assert "secret" not in error.message + failed.message


# ---------------------------------------------------------------- artifacts


def directories(server: Server, request_id: str) -> list[Path]:
    """What a running request owns."""
    return server.engine.orchestrator.find(request_id).artifacts.directories


@pytest.mark.parametrize("how", ["finished", "aborted", "left", "timeout", "error"])
async def test_every_ending_deletes_the_directories(
    streams: Any, streams_server: Server, how: str
) -> None:
    timeout = 0.5 if how == "timeout" else 20
    async with opened(
        streams, pipeline="careful", prompt={"text": "a"}, timeout=timeout
    ) as request:
        chunks = [chunk(n, prompt={"text": f"own {n}"}) for n in range(2)]
        await sent(streams, streams_server, request.id, *chunks)
        owned = directories(streams_server, request.id)
        assert len(owned) == 5 and all(path.is_dir() for path in owned)
        if how == "finished":
            await feed(streams, request.id, [])
            await request.finished()
        elif how == "aborted":
            await streams.Abort(service_pb2.AbortRequest(request_ids=[request.id]))
        elif how == "error":
            says(await refused(streams, request.id, chunk(2, "broken")), "STAGE_ERROR")
        elif how == "timeout":
            assert (await request.failed()).code is S.DEADLINE_EXCEEDED
    await eventually(lambda: not any(path.exists() for path in owned))


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [("bad", "INVALID_FIELD"), ("raise", "INTERNAL"), ("own bad", "INVALID_FIELD")],
)
async def test_a_bad_chunk_takes_its_own_directories_only(
    streams: Any, streams_server: Server, prompt: str, reason: str
) -> None:
    async with opened(streams, pipeline="careful", prompt={"text": "a"}) as request:
        await sent(streams, streams_server, request.id, chunk(0, prompt={"text": "b"}))
        owned = directories(streams_server, request.id)
        error = await refused(streams, request.id, chunk(1, prompt={"text": prompt}))
        assert error.reason == reason and "secret" not in error.message
        root = streams_server.engine.orchestrator.artifact_root
        await eventually(lambda: below(root) == set(owned))
        assert directories(streams_server, request.id) == owned
        assert [(path / "prompt").read_text() for path in owned] == ["a", "b"]
        await feed(streams, request.id, [chunk(1, prompt={"text": "c"})])
        assert texts(await request.finished()) == "abc"


def below(root: Path) -> set[Path] | None:
    """All requests' directories; None where one goes while we look."""
    try:
        return set(root.glob("*/*"))
    except FileNotFoundError:
        return None


async def test_a_repeated_chunk_makes_no_directory(streams: Any, streams_server: Server) -> None:
    async with opened(streams, pipeline="careful") as request:
        one = chunk(0, prompt={"text": "a"})
        await sent(streams, streams_server, request.id, one)
        await sent(streams, streams_server, request.id, one)
        assert len(directories(streams_server, request.id)) == 1


# ---------------------------------------------------------------- admission


async def test_a_pipeline_without_segments_takes_no_resumable_request(
    streams: Any, streams_server: Server
) -> None:
    error = await refusal(streams, ask("x", pipeline="deaf", resumable=True))
    says(error, "NOT_SUPPORTED", "resumable")
    assert "'deaf'" in error.message
    assert not len(streams_server.engine.orchestrator)


@pytest.mark.parametrize(
    ("params", "path"),
    [
        (SamplingParams(n=2), "p.n"),
        (SamplingParams(stop=(".",)), "p.stop"),
        (SamplingParams(n=1, stop=(), stop_token_ids=(3,)), None),
    ],
)
def test_a_segment_has_one_answer_that_ends_by_itself(
    params: SamplingParams, path: str | None
) -> None:
    if path is None:
        check_segment(params, "p")
        return
    with pytest.raises(InvalidField) as error:
        check_segment(params, "p")
    assert [violation.field for violation in error.value.violations] == [path]


async def test_input_that_never_comes_is_an_error_on_both_calls(stub: Any) -> None:
    async with opened(stub) as request:
        error = await Feeding(stub, request.id).close_refused()
        says(error, "INVALID_FIELD", "prompt")
        says(await request.failed(), "INVALID_FIELD", "prompt")
        says(await refused(stub, request.id, chunk(0, "x")), "REQUEST_NOT_FOUND")


async def test_empty_texts_are_no_input(stub: Any) -> None:
    async with opened(stub) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, ""), chunk(1, ""))
        says(await feeding.close_refused(), "INVALID_FIELD", "prompt")
        says(await request.failed(), "INVALID_FIELD", "prompt")


async def test_a_refused_first_prompt_refuses_the_request(
    streams: Any, streams_server: Server
) -> None:
    error = await refusal(streams, ask("bad", pipeline="careful", resumable=True))
    says(error, "INVALID_FIELD", "prompt.text")
    assert not len(streams_server.engine.orchestrator)
