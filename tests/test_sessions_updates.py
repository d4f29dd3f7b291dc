"""Sessions that feed: chunks as in StreamingUpdate, refused one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from omni_grpc.server import Server
from tests.conftest import Serve
from tests.running import replicas
from tests.sessions import attached, film, id_of, session, talk
from tests.streaming import Feeding, by_segment, chunk, ends, feed, lane_of, opened, refused
from tests.support import TEXT, echo, eventually, running, script

pytestmark = pytest.mark.usefixtures("echo_server")

S = grpc.StatusCode
ENDS: dict[str, Any] = {"output_modalities": [TEXT]}


async def test_chunks_make_segments_and_each_is_answered(stub: Any) -> None:
    async with talk(stub, **ENDS) as one:
        await one.update(0, "hello ")
        await one.update(1, "big ", end=True)
        await one.update(2, "world", end=True)
        await one.update(3, "and more")
        await one.half_close()
        await one.finished()
        assert by_segment(one.responses) == {0: "hello big ", 1: "world", 2: "and more"}
        assert ends(one.responses) == [("text", 0), ("text", 1), ("text", 2)]
        assert one.rejected == {}


async def test_end_input_ends_it_and_the_session_stands(stub: Any) -> None:
    async with talk(stub, **ENDS) as one:
        await one.update(0, "hello ")
        await one.send(end_input={})
        await one.finished()
        assert one.text == "hello "


async def test_end_input_twice_and_then_half_close_are_one_end(stub: Any) -> None:
    async with talk(stub, **ENDS, stage_params=[script(interval_ms=20)]) as one:
        await one.update(0, "a b c d e f ")
        await one.send(end_input={})
        await one.send(end_input={})
        await one.half_close()
        await one.finished()
        assert one.text == "a b c d e f " and one.rejected == {}


async def test_a_chunk_after_the_end_is_rejected(stub: Any) -> None:
    async with talk(stub, **ENDS, stage_params=film(20)) as one:
        await one.update(0, "a")
        await one.send(end_input={})
        await one.update(1, "b")
        await one.finished()
        assert one.rejected[1].status.reason == "NOT_RESUMABLE"


async def test_a_number_that_was_seen_is_ignored(stub: Any) -> None:
    async with talk(stub, **ENDS) as one:
        await one.update(0, "a ")
        for _ in range(3):
            await one.update(0, "zzz ", end=True)
        await one.update(1, "b ", end=True)
        await one.half_close()
        await one.finished()
        assert one.text == "a b " and one.rejected == {}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a gap": ({"seq": 7, "text": "x"}, "INVALID_FIELD", "update.seq"),
    "nothing": ({"seq": 1}, "INVALID_FIELD", "update"),
    "an unknown stage": (
        {"seq": 1, "text": "x", "stage_params": [{"stage": "nope", "custom": {}}]},
        "INVALID_FIELD",
        "update.stage_params[0].stage",
    ),
    "a bad parameter": (
        {"seq": 1, "text": "x", "stage_params": [script(nonsense=1)]},
        "INVALID_FIELD",
        "update.stage_params[0].custom.nonsense",
    ),
    "parameters in the middle": (
        {"seq": 1, "text": "x", "stage_params": [script(interval_ms=1)]},
        "INVALID_FIELD",
        "update.stage_params",
    ),
    "sound": (
        {"seq": 1, "audio": {"data": b"ab", "format": {"sample_rate_hz": 16000}}},
        "INVALID_FIELD",
        "update.audio.format.encoding",
    ),
    "sound without a byte": ({"seq": 1, "audio": {}}, "INVALID_FIELD", "update.audio.data"),
    "a prompt that is none": ({"seq": 1, "prompt": {}}, "INVALID_FIELD", "update.prompt"),
    "what the pipeline does not take": (
        {"seq": 1, "prompt": {"media": [{"modality": 3, "data": b"x"}]}},
        "NOT_SUPPORTED",
        "update.prompt.media[0]",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_chunk_is_rejected_and_the_right_one_taken(stub: Any, name: str) -> None:
    update, reason, field = BAD[name]
    async with talk(stub, **ENDS) as one:
        await one.update(0, "a ")
        await one.send(update=update)
        await one.until(lambda s: s.rejected)
        [rejected] = one.rejected.values()
        assert (rejected.seq, rejected.status.reason) == (update["seq"], reason)
        assert [v.field for v in rejected.status.field_violations] == [field]
        assert field in rejected.status.message and rejected.status.code
        await one.update(1, "b ", end=True)
        await one.half_close()
        await one.finished()
        assert one.text == "a b "


async def test_what_is_not_resumable_takes_no_chunk(stub: Any) -> None:
    async with session(stub, prompt={"text": "hello "}, stage_params=film(10), **ENDS) as one:
        await one.update(0, "x", end=True)
        await one.send(end_input={})
        await one.finished()
        assert one.rejected[0].status.reason == "NOT_RESUMABLE"
        assert one.rejected[0].status.code == S.FAILED_PRECONDITION.value[0]


# ---------------------------------------------------------------- one feeder at a time


async def test_while_another_feeds_chunks_are_rejected(stub: Any, echo_server: Server) -> None:
    async with talk(stub, **ENDS) as one:
        feeding = await Feeding(stub, id_of(one)).send(chunk(0, "theirs "))
        lane = lane_of(echo_server, id_of(one))
        await eventually(lambda: lane.next_seq == 1, 5)
        await one.update(1, "mine ", end=True)
        await one.until(lambda s: s.rejected)
        assert one.rejected[1].status.reason == "FEEDER_ACTIVE"
        assert one.rejected[1].status.code == S.ALREADY_EXISTS.value[0]
        feeding.cancel()
        await eventually(lambda: not lane.fed, 5)
        await one.update(1, "mine ", end=True)
        await one.half_close()
        await one.finished()
        assert one.text == "theirs mine "


async def test_end_input_while_another_feeds_is_rejected(stub: Any, echo_server: Server) -> None:
    async with talk(stub, **ENDS) as one:
        feeding = await Feeding(stub, id_of(one)).send(chunk(0, "theirs "))
        lane = lane_of(echo_server, id_of(one))
        await eventually(lambda: lane.next_seq == 1, 5)
        await one.send(end_input={})
        await one.until(lambda s: s.rejected)
        assert one.rejected[1].status.reason == "FEEDER_ACTIVE"
        await feeding.send(chunk(1, "too "))
        await feeding.close()
        await one.finished()
        assert one.text == "theirs too "


async def test_an_owner_that_says_no_more_leaves_the_feeder_to_it(
    stub: Any, echo_server: Server
) -> None:
    async with talk(stub, **ENDS) as one:
        feeding = await Feeding(stub, id_of(one)).send(chunk(0, "theirs "))
        lane = lane_of(echo_server, id_of(one))
        await eventually(lambda: lane.next_seq == 1, 5)
        await one.half_close()
        await feeding.send(chunk(1, "too ", end=True))
        await one.until(lambda s: "too" in s.text)
        assert (await feeding.close()).segments == 1
        await one.finished()
        assert one.text == "theirs too "


async def test_a_session_that_feeds_keeps_others_out(stub: Any) -> None:
    async with talk(stub, **ENDS) as one, attached(stub, id_of(one)) as two:
        await one.update(0, "a ", end=True)
        await one.until(lambda s: s.text)
        error = await refused(stub, id_of(one), chunk(1, "b "))
        assert (error.code, error.reason) == (S.ALREADY_EXISTS, "FEEDER_ACTIVE")
        await two.update(1, "c ")
        await two.until(lambda s: s.rejected)
        assert two.rejected[1].status.reason == "FEEDER_ACTIVE"
        await two.send(end_input={})
        await two.until(lambda s: len(s.heard) > 2)
        await one.half_close()
        await one.finished()
        assert one.text == "a "


@pytest.mark.parametrize("how", ["leave", "half-close"])
async def test_a_feeder_that_attached_gives_up_its_place(
    stub: Any, echo_server: Server, how: str
) -> None:
    async with opened(stub, **ENDS) as request, attached(stub, request.id) as two:
        await two.update(0, "a ")
        lane = lane_of(echo_server, request.id)
        await eventually(lambda: lane.next_seq == 1, 5)
        await (two.leave() if how == "leave" else two.half_close())
        await eventually(lambda: not lane.fed, 5)
        assert not lane.ended
        summary = await feed(stub, request.id, [chunk(0, "zzz"), chunk(1, "b ", end=True)])
        assert (summary.accepted_chunks, summary.duplicate_chunks) == (1, 1)
        await request.finished()
    assert request.text == "a b "


async def test_who_attached_may_end_the_input(stub: Any) -> None:
    async with opened(stub, **ENDS) as request, attached(stub, request.id, outputs=True) as two:
        await two.update(0, "a ")
        await two.send(end_input={})
        await request.finished()
        assert await two.ended() is None
        assert two.text == request.text == "a "


# ---------------------------------------------------------------- what goes wrong


async def test_a_transform_that_breaks_rejects_its_chunk_only(streams: Any) -> None:
    async with talk(streams, pipeline="careful") as one:
        await one.update(0, prompt={"text": "raise"})
        await one.until(lambda s: s.rejected)
        status = one.rejected[0].status
        assert (status.reason, status.message) == ("INTERNAL", "internal error")
        await one.update(0, prompt={"text": "bad"})
        await one.until(lambda s: s.rejected[0].status.reason == "INVALID_FIELD")
        [violation] = one.rejected[0].status.field_violations
        assert violation.field == "update.prompt.text"
        await one.update(0, prompt={"text": "good"}, end=True)
        await one.half_close()
        await one.finished()
        assert one.text == "good"


async def test_a_last_chunk_that_is_refused_at_half_close_ends_it(streams: Any) -> None:
    async with talk(streams, pipeline="careful") as one:
        await one.update(0, "long")
        await one.half_close()
        error = await one.failed()
        assert error.reason in ("INVALID_FIELD", "PROMPT_TOO_LONG")
        assert one.rejected[0].status.reason == "PROMPT_TOO_LONG"


async def test_no_replica_rejects_a_chunk_and_the_session_goes_on(serve: Serve) -> None:
    served = await serve(echo({"name": "phoenix"}, restart={"backoff": 0.3}))
    async with talk(served.stub, stage_params=film(), **ENDS) as one:
        await one.update(0, "a ", end=True)
        await one.until(lambda s: s.text)
        # Between turns no stage holds a task.
        await one.interrupt()
        await one.until(lambda s: s.interrupts)
        await eventually(lambda: not any(running(served.server).values()))
        [replica] = replicas("phoenix", "text")
        replica.kill()
        await eventually(lambda: served.server.engine.pools[0].ready_replicas == 0, 5)
        await one.update(1, "b ", end=True)
        await one.until(lambda s: s.rejected)
        assert one.rejected[1].status.reason in ("REPLICA_LOST", "STAGE_UNAVAILABLE")
        await eventually(lambda: served.server.engine.pools[0].ready_replicas == 1, 10)
        short = [script(outputs=3, interval_ms=0)]
        await one.update(1, "b ", end=True, stage_params=short)
        await one.half_close()
        await one.finished()
        assert by_segment(one.responses)[1] == "word0 word1 word2 "


async def test_thousands_of_chunks_go_through(stub: Any) -> None:
    words = [f"w{n} " for n in range(2000)]
    async with talk(stub, **ENDS) as one:
        for seq, word in enumerate(words):
            await one.update(seq, word, end=seq % 100 == 99)
        await one.half_close()
        await one.finished()
        assert one.text == "".join(words) and one.rejected == {}


async def test_an_abort_passes_the_chunks_that_wait(serve: Serve) -> None:
    served = await serve(echo({"name": "busy"}))
    async with talk(served.stub, stage_params=film(1000), **ENDS) as one:
        for seq in range(100):
            await one.update(seq, "x", end=True)
        await one.send(abort={})
        async with asyncio.timeout(2):
            assert (await one.failed()).reason == "ABORTED_BY_CLIENT"
    assert replicas("busy", "text")
