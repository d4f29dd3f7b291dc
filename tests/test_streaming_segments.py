"""Segments: their numbers, their order, and what holds for one of them alone."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import output_pb2
from tests.conftest import Serve
from tests.running import replicas
from tests.streaming import (
    Feeding,
    by_segment,
    chunk,
    ends,
    feed,
    lane_of,
    opened,
    refused,
    sent,
    taken,
)
from tests.support import (
    AUDIO,
    TEXT,
    Response,
    echo,
    events,
    script,
    sound,
    texts,
)

S = grpc.StatusCode
STAGES = ("text", "audio", "image")


def sounds(responses: list[Response]) -> dict[int, int]:
    """Bytes of sound by segment."""
    found: dict[int, int] = {}
    for response in responses:
        if response.output.WhichOneof("content") == "audio":
            segment = response.output.segment
            found[segment] = found.get(segment, 0) + len(response.output.audio.data)
    return found


async def test_every_stage_ends_every_segment_in_order(stub: Any) -> None:
    async with opened(stub) as request:
        chunks = [chunk(n, f"segment {n}", end=n < 4) for n in range(5)]
        summary = await feed(stub, request.id, chunks)
        assert (summary.accepted_chunks, summary.segments) == (5, 5)
        responses = await request.finished()
    for stage in STAGES:
        assert [n for s, n in ends(responses) if s == stage] == list(range(5))
    assert by_segment(responses) == {n: f"segment {n}" for n in range(5)}
    assert sounds(responses) == dict.fromkeys(range(5), 2 * 4800)


async def test_outputs_of_a_segment_come_before_its_end(stub: Any) -> None:
    async with opened(stub) as request:
        await feed(stub, request.id, [chunk(n, f"a b {n}", end=True) for n in range(4)])
        responses = await request.finished()
    ended = dict.fromkeys(STAGES, -1)
    for response in responses:
        match response.WhichOneof("event"):
            case "output":
                assert response.output.segment == ended[response.output.stage] + 1
            case "segment_end":
                ended[response.segment_end.stage] += 1
                assert response.segment_end.segment == ended[response.segment_end.stage]
    assert ended == dict.fromkeys(STAGES, 3)
    samples = [r.output.audio for r in responses if r.output.WhichOneof("content") == "audio"]
    starts = [0]
    for audio in samples:
        starts.append(starts[-1] + len(audio.data) // 2)
    assert [audio.start_sample for audio in samples] == starts[:-1], "counted over all segments"


async def test_a_segment_is_answered_at_its_end_and_not_before(
    stub: Any, echo_server: Server
) -> None:
    async with opened(stub) as request:
        await sent(stub, echo_server, request.id, chunk(0, "a "), chunk(1, "b "))
        assert events(request.responses) == ["accepted"]
        await sent(stub, echo_server, request.id, chunk(2, end=True))
        await request.answered(0, *STAGES)
        assert request.text == "a b "
        await sent(stub, echo_server, request.id, chunk(3, "c", end=True))
        await request.answered(1, *STAGES)
        assert by_segment(request.responses) == {0: "a b ", 1: "c"}


async def test_a_segments_own_parameters_hold_for_it_alone(stub: Any) -> None:
    async with opened(stub, stage_params=[script(outputs=2)]) as request:
        own = [script(outputs=4), script("audio", bytes=100)]
        chunks = [
            chunk(0, "x", end=True),
            chunk(1, "x", stage_params=own),
            chunk(2, "x", end=True),
            chunk(3, "x", end=True),
            chunk(4, "x", stage_params=[script("audio", outputs=1, bytes=6)]),
        ]
        await feed(stub, request.id, chunks)
        responses = await request.finished()
    assert {n: len(t.split()) for n, t in by_segment(responses).items()} == {0: 2, 1: 4, 2: 2, 3: 2}
    assert sounds(responses) == {0: 2 * 4800, 1: 4 * 100, 2: 2 * 4800, 3: 6}


async def test_parameters_of_segments_that_wait_stay_with_them(stub: Any) -> None:
    """All input is there before the first segment is answered."""
    params = [[script("audio", outputs=1, bytes=2 * n, first_ms=0)] for n in range(1, 6)]
    async with opened(stub, stage_params=[script(first_ms=200)]) as request:
        chunks = [chunk(n, f"{n}", end=True, stage_params=own) for n, own in enumerate(params)]
        await feed(stub, request.id, chunks)
        assert sounds(await request.finished()) == {n: 2 * n + 2 for n in range(5)}


async def test_updates_that_come_while_a_segment_is_answered_wait_in_order(stub: Any) -> None:
    slow = [script(outputs=5, interval_ms=60)]
    async with opened(stub, output_modalities=[TEXT]) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, "x", stage_params=slow, end=True))
        await request.until(lambda got: "output" in events(got))
        await feeding.send(*(chunk(n, f"{n} ", end=n % 2 == 0) for n in range(1, 8)))
        assert not ends(request.responses), "the first is still being answered"
        summary = await feeding.close()
        assert summary.segments == 5
        responses = await request.finished()
    assert by_segment(responses) == {
        0: "word0 word1 word2 word3 word4 ",
        1: "1 2 ",
        2: "3 4 ",
        3: "5 6 ",
        4: "7 ",
    }


async def test_finish_reasons_and_usage_are_of_the_whole(stub: Any) -> None:
    async with opened(stub) as request:
        await feed(stub, request.id, [chunk(n, "a b c", end=True) for n in range(3)])
        finished = (await request.finished())[-1].finished
    reasons = {(f.stage, f.index): f.reason for f in finished.finish_reasons}
    assert reasons == {
        ("text", 0): output_pb2.FINISH_REASON_STOP,
        ("audio", 0): output_pb2.FINISH_REASON_COMPLETE,
        ("image", 0): output_pb2.FINISH_REASON_COMPLETE,
    }
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (9, 9)
    assert finished.usage.audio_samples == 9 * 2400
    assert set(finished.timings.stage_ms) == set(STAGES)


async def test_only_wanted_stages_have_segments(stub: Any) -> None:
    async with opened(stub, output_modalities=[AUDIO]) as request:
        await feed(stub, request.id, [chunk(0, "a", end=True), chunk(1, "b")])
        responses = await request.finished()
    assert {stage for stage, _ in ends(responses)} == {"text", "audio"}
    assert texts(responses) == "" and len(sound(responses)) == 2 * 4800


@pytest.mark.parametrize("stage", STAGES)
async def test_an_error_in_a_segment_ends_the_request(stub: Any, stage: str) -> None:
    async with opened(stub) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, "a", end=True))
        await request.answered(0, *STAGES)
        failing = chunk(1, "b", end=True, stage_params=[script(stage, fail_at=0)])
        await feeding.send(failing)
        error, failed = await feeding.refused(), await request.failed()
        assert (error.code, error.reason) == (failed.code, failed.reason)
        assert (failed.code, failed.reason) == (S.INTERNAL, "STAGE_ERROR")
        assert by_segment(request.responses)[0] == "a", "what came before stays valid"


async def test_a_replica_lost_in_a_session(serve: Serve) -> None:
    served = await serve(echo({"name": "mortal"}, restart={"backoff": 0.05}))
    stub = served.stub
    async with opened(stub) as other, opened(stub) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, "a", end=True))
        await request.answered(0, *STAGES)
        [voice] = replicas("mortal", "audio")
        voice.kill()
        failed, error = await request.failed(), await feeding.refused()
        assert (failed.code, failed.reason) == (S.ABORTED, "REPLICA_LOST")
        assert (error.code, error.reason) == (S.ABORTED, "REPLICA_LOST")
        # The other one has never reached the stage that was lost.
        assert lane_of(served.server, other.id).next_seq == 0
        await sent(stub, served.server, other.id, chunk(0, "b"))
        await other.leave()


async def test_a_replica_lost_before_anything_came(serve: Serve) -> None:
    served = await serve(echo({"name": "mortal"}, restart={"backoff": 0.05}))
    async with opened(served.stub) as request:
        feeding = await Feeding(served.stub, request.id).send(chunk(0, "a"))
        await taken(served.server, request.id, 1)
        dying = chunk(1, "b", end=True)
        [thinker] = replicas("mortal", "text")
        thinker.kill()
        failed, error = await request.failed(), await feeding.refused()
        assert (failed.code, failed.reason) == (S.UNAVAILABLE, "STAGE_UNAVAILABLE")
        assert (error.code, error.reason) == (S.UNAVAILABLE, "STAGE_UNAVAILABLE")
        assert failed.retry is not None
        missing = await refused(served.stub, request.id, dying)
        assert missing.reason == "REQUEST_NOT_FOUND", "a session is never moved silently"
