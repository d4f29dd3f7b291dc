"""How a request with streamed input ends: for its owner, and for its feeder."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.streaming import (
    Feeding,
    chunk,
    ends,
    feed,
    opened,
    sent,
    taken,
)
from tests.support import (
    AUDIO,
    RichError,
    freed,
    in_flight,
    script,
    sound,
    texts,
)

S = grpc.StatusCode
STAGES = ("text", "audio", "image")


def is_error(error: RichError, code: grpc.StatusCode, reason: str) -> None:
    """Asserts what a call ended with."""
    assert (error.code, error.reason) == (code, reason), error


# ---------------------------------------------------------------- the end of the input


async def test_input_that_ends_while_stages_are_idle_ends_them_all(
    stub: Any, echo_server: Server
) -> None:
    async with opened(stub) as request:
        await sent(stub, echo_server, request.id, chunk(0, "a b", end=True))
        await request.answered(0, *STAGES)
        before = list(request.responses)
        assert in_flight(echo_server) == 3
        summary = await feed(stub, request.id, [])
        assert (summary.accepted_chunks, summary.segments) == (0, 1)
        responses = await request.finished()
        assert [r.WhichOneof("event") for r in responses[len(before) :]] == ["finished"]
        assert responses[-1].finished.usage.audio_samples == 2 * 2400
        reasons = responses[-1].finished.finish_reasons
        assert {reason.stage for reason in reasons} == set(STAGES)


async def test_a_stage_that_never_heard_anything_ends_too(stub: Any) -> None:
    """Text that comes to no word: not a sample of sound, but its rate was told."""
    async with opened(stub, output_modalities=[AUDIO]) as request:
        nothing = [script(outputs=0)]
        await feed(stub, request.id, [chunk(0, "x", stage_params=nothing)])
        responses = await request.finished()
        [output] = responses[0].accepted.outputs
        assert (output.audio.sample_rate_hz, output.audio.channels) == (24000, 1)
        assert sound(responses) == b""
        assert responses[-1].finished.usage.audio_samples == 0
        assert ends(responses) == [("text", 0), ("audio", 0)]


async def test_the_feeders_answer_comes_when_the_input_is_taken(stub: Any) -> None:
    """And not when it is answered."""
    async with opened(stub, stage_params=[script(first_ms=1000)]) as request:
        summary = await asyncio.wait_for(feed(stub, request.id, [chunk(0, "x")]), 0.9)
        assert summary.segments == 1
        assert not request.text


async def test_a_feeder_that_is_open_when_the_request_finishes(stub: Any) -> None:
    slow = [script(outputs=2, interval_ms=150)]
    async with opened(stub, stage_params=slow) as request:
        await feed(stub, request.id, [chunk(0, "x")])
        late = await Feeding(stub, request.id).attach()
        summary = await late.answer()
        assert (summary.accepted_chunks, summary.segments) == (0, 1)
        assert texts(await request.finished()) == "word0 word1 "


# ---------------------------------------------------------------- other ends


async def test_the_owner_leaves(stub: Any, echo_server: Server) -> None:
    async with opened(stub) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, "a", end=True))
        await request.answered(0, *STAGES)
        await request.leave()
        is_error(await feeding.refused(), S.CANCELLED, "ABORTED_BY_CLIENT")
        await freed(echo_server)


async def test_abort_ends_both_calls(stub: Any, echo_server: Server) -> None:
    async with opened(stub) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, "a", end=True), chunk(1, "b"))
        await taken(echo_server, request.id, 2)
        answer = await stub.Abort(service_pb2.AbortRequest(request_ids=[request.id]))
        assert [r.outcome for r in answer.results] == [service_pb2.AbortResponse.OUTCOME_ABORTED]
        assert in_flight(echo_server) == 0
        is_error(await feeding.refused(), S.CANCELLED, "ABORTED_BY_CLIENT")
        is_error(await request.failed(), S.CANCELLED, "ABORTED_BY_CLIENT")


async def test_the_owners_deadline_ends_the_feeder(stub: Any, echo_server: Server) -> None:
    async with opened(stub, timeout=0.6) as request:
        feeding = await Feeding(stub, request.id).send(chunk(0, "a"))
        await taken(echo_server, request.id, 1)
        error, failed = await feeding.refused(), await request.failed()
        # Whoever is first: the server's clock, or the owner's, which then cancels.
        assert (error.code, error.reason) in (
            (S.DEADLINE_EXCEEDED, "DEADLINE"),
            (S.CANCELLED, "ABORTED_BY_CLIENT"),
        )
        assert failed.code is S.DEADLINE_EXCEEDED
        await freed(echo_server)


async def test_the_feeders_deadline_is_its_own(stub: Any, echo_server: Server) -> None:
    async with opened(stub) as request:
        feeding = await Feeding(stub, request.id, timeout=0.5).send(chunk(0, "a "))
        await taken(echo_server, request.id, 1)
        assert (await feeding.refused()).code is S.DEADLINE_EXCEEDED
        await sent(stub, echo_server, request.id, chunk(1, "b"))
        await feed(stub, request.id, [])
        assert texts(await request.finished()) == "a b"


# ---------------------------------------------------------------- waiting


async def test_nobody_feeds(streams: Any) -> None:
    loop = asyncio.get_running_loop()
    async with opened(streams, pipeline="hasty") as request:
        begun = loop.time()
        is_error(await request.failed(), S.DEADLINE_EXCEEDED, "INPUT_TIMEOUT")
        assert 0.25 < loop.time() - begun < 3


async def test_a_feeder_that_says_nothing(streams: Any) -> None:
    async with opened(streams, pipeline="hasty") as request:
        feeding = await Feeding(streams, request.id).send(chunk(0, "a"))
        is_error(await feeding.refused(), S.DEADLINE_EXCEEDED, "INPUT_TIMEOUT")
        is_error(await request.failed(), S.DEADLINE_EXCEEDED, "INPUT_TIMEOUT")


async def test_a_feeder_that_went_and_nobody_came(streams: Any, streams_server: Server) -> None:
    async with opened(streams, pipeline="hasty") as request:
        await sent(streams, streams_server, request.id, chunk(0, "a", end=True))
        is_error(await request.failed(), S.DEADLINE_EXCEEDED, "INPUT_TIMEOUT")
        assert request.text == "a"


@pytest.mark.parametrize("stage", ["text", "audio"])
async def test_a_stage_that_still_answers_is_waited_for(streams: Any, stage: str) -> None:
    """However long, and however silent: that is not the client's doing."""
    async with opened(streams, pipeline="hasty", output_modalities=[1, 2]) as request:
        slow = [script(stage, outputs=2, interval_ms=900)]
        feeding = await Feeding(streams, request.id).send(
            chunk(0, "a", end=True, stage_params=slow)
        )
        await request.answered(0, "text", "audio")
        await feeding.send(chunk(1, "b"))
        assert (await feeding.close()).segments == 2
        await request.finished()


async def test_a_feeder_that_goes_on_is_not_hurried(streams: Any) -> None:
    async with opened(streams, pipeline="hasty") as request:
        feeding = Feeding(streams, request.id)
        for n in range(8):
            await feeding.send(chunk(n, f"{n} "))
            await asyncio.sleep(0.1)
        assert (await feeding.close()).accepted_chunks == 8
        assert texts(await request.finished()) == "".join(f"{n} " for n in range(8))


async def test_input_that_has_ended_is_not_waited_for(streams: Any) -> None:
    slow = [script(outputs=1, first_ms=900)]
    async with opened(streams, pipeline="hasty", stage_params=slow) as request:
        await feed(streams, request.id, [chunk(0, "x")])
        assert texts(await request.finished()) == "word0 "
