"""Input by chunks: their order, whoever feeds, and what must not show in the answer."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_grpc.server import Server
from tests.streaming import Feeding, chunk, feed, gone, lane_of, opened, pieces, refused, taken
from tests.support import (
    ROOT,
    Response,
    ask,
    client,
    collect,
    eventually,
    freed,
    picture,
    script,
    sound,
    stub_of,
    texts,
)

S = grpc.StatusCode
TEXT = "hello big  world, this\nis a line of words"


async def spoken(stub: Any, parts: Sequence[str]) -> list[Response]:
    """What comes of a text that is fed in these parts."""
    async with opened(stub) as request:
        summary = await feed(stub, request.id, [chunk(n, part) for n, part in enumerate(parts)])
        assert (summary.accepted_chunks, summary.duplicate_chunks) == (len(parts), 0)
        return await request.finished()


# ---------------------------------------------------------------- chunking


@pytest.fixture(scope="module")
async def whole(echo_server: Server) -> list[Response]:
    """The answer to TEXT in one piece."""
    async with client(echo_server) as channel:
        return await spoken(stub_of(channel), [TEXT])


def same(one: list[Response], other: list[Response]) -> None:
    """Asserts that two answers hold the same, byte for byte."""
    assert texts(one) == texts(other)
    assert sound(one) == sound(other)
    assert picture(one) == picture(other)
    usage = [responses[-1].finished.usage for responses in (one, other)]
    assert usage[0] == usage[1]


@pytest.mark.parametrize("count", [1, 2, 7, len(TEXT)])
async def test_chunking_does_not_show(stub: Any, whole: list[Response], count: int) -> None:
    cuts = sorted(random.Random(count).sample(range(1, len(TEXT)), count - 1))
    parts = await spoken(stub, pieces(TEXT, cuts))
    assert texts(parts) == TEXT
    same(parts, whole)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
async def test_no_chunking_shows(
    echo_server: Server, whole: list[Response], cuts: list[int]
) -> None:
    async with client(echo_server) as channel:
        same(await spoken(stub_of(channel), pieces(TEXT, cuts)), whole)
    await freed(echo_server)


async def test_a_first_prompt_and_chunks_are_one_input(stub: Any, whole: list[Response]) -> None:
    async with opened(stub, prompt={"text": TEXT[:9]}) as request:
        await feed(stub, request.id, [chunk(0, TEXT[9:20]), chunk(1, prompt={"text": TEXT[20:]})])
        same(await request.finished(), whole)


async def test_streamed_input_says_what_a_plain_request_says(stub: Any) -> None:
    plain, streamed = await collect(stub, ask(TEXT)), await spoken(stub, [TEXT])
    assert (texts(plain), sound(plain), picture(plain)) == (
        texts(streamed),
        sound(streamed),
        picture(streamed),
    )


# ---------------------------------------------------------------- seq


async def test_a_repeated_chunk_is_ignored_and_counted(stub: Any) -> None:
    async with opened(stub) as request:
        chunks = [chunk(0, "a "), chunk(1, "b "), chunk(0, "x "), chunk(1, "b "), chunk(2, "c")]
        summary = await feed(stub, request.id, chunks)
        assert (summary.accepted_chunks, summary.duplicate_chunks, summary.segments) == (3, 2, 1)
        assert texts(await request.finished()) == "a b c"


@pytest.mark.parametrize("seq", [2, 3, 2**63, 2**64 - 1])
async def test_a_gap_is_refused_and_leaves_no_trace(stub: Any, seq: int) -> None:
    async with opened(stub) as request:
        error = await refused(stub, request.id, chunk(0, "a "), chunk(seq, "lost "))
        assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
        assert error.violations == {"chunk.seq": f"is {seq}, the next is 1"}
        await feed(stub, request.id, [chunk(1, "b")])
        assert texts(await request.finished()) == "a b"


async def test_a_feeder_that_breaks_off_is_followed_by_another(
    stub: Any, echo_server: Server
) -> None:
    async with opened(stub) as request:
        words = [f"word{n} " for n in range(12)]
        lane = lane_of(echo_server, request.id)
        for n in range(0, 12, 3):
            three = [chunk(m, words[m]) for m in range(n, n + 3)]
            feeding = await Feeding(stub, request.id).send(*three)
            await eventually(partial(lambda due: lane.next_seq == due, n + 3))
            feeding.cancel()
            await gone(echo_server, request.id)
        summary = await feed(stub, request.id, [])
        assert (summary.accepted_chunks, summary.segments) == (0, 1)
        assert texts(await request.finished()) == "".join(words)


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_or_repeated_by_cancels(
    stub: Any, echo_server: Server, seed: int
) -> None:
    """Cancelled at any moment; the next feeder begins where this one was sure, or before."""
    chance, words = random.Random(seed), [f"{n} " for n in range(40)]
    async with opened(stub) as request:
        lane, sure = lane_of(echo_server, request.id), 0
        while sure < len(words) - 3:
            upto = min(len(words), sure + chance.randint(4, 12))
            some = [chunk(n, words[n]) for n in range(sure, upto)]
            feeding = await Feeding(stub, request.id).send(*some)
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.02]))
            feeding.cancel()
            await gone(echo_server, request.id)
            sure = max(0, lane.next_seq - chance.randint(0, 3))
        await feed(stub, request.id, [chunk(n, words[n]) for n in range(sure, len(words))])
        assert texts(await request.finished()) == "".join(words)


@pytest.mark.parametrize("seed", range(3))
async def test_a_lost_connection_is_no_half_close(
    stub: Any, echo_server: Server, seed: int
) -> None:
    chance, words = random.Random(seed), [f"{n} " for n in range(24)]
    async with opened(stub) as request:
        lane = lane_of(echo_server, request.id)
        for _ in range(8):
            async with client(echo_server) as channel:
                some = [chunk(n, words[n]) for n in range(lane.next_seq, lane.next_seq + 2)]
                await Feeding(stub_of(channel), request.id).send(*some)
                await asyncio.sleep(chance.choice([0, 0.001, 0.02]))
            await gone(echo_server, request.id)
        sure = lane.next_seq
        await feed(stub, request.id, [chunk(n, words[n]) for n in range(sure, len(words))])
        assert texts(await request.finished()) == "".join(words)


KILLED = """
import os, sys, time
import grpc
from omni_grpc.v1 import service_pb2 as s, service_pb2_grpc as g
def feed():
    yield s.StreamingUpdateRequest(header={"request_id": sys.argv[2]})
    for n in range(3):
        yield s.StreamingUpdateRequest(chunk=s.UpdateChunk(seq=n, text=f"word{n} "))
    print("sent", flush=True)
    time.sleep(60)
with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    g.OmniServiceStub(channel).StreamingUpdate(feed())
"""


async def test_a_feeder_that_is_killed_is_followed_by_another(
    stub: Any, echo_server: Server
) -> None:
    async with opened(stub) as request:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            KILLED,
            str(echo_server.port),
            request.id,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        lane = lane_of(echo_server, request.id)
        try:
            await eventually(lambda: lane.next_seq == 3, within=20)
        finally:
            process.kill()
            await process.wait()
        await gone(echo_server, request.id)
        await feed(stub, request.id, [chunk(2, "word2 "), chunk(3, "word3")])
        assert texts(await request.finished()) == "word0 word1 word2 word3"


async def test_a_lost_answer_can_be_asked_for_again(stub: Any) -> None:
    slow = [script("audio", outputs=1, first_ms=600)]
    async with opened(stub, stage_params=slow) as request:
        first = await feed(stub, request.id, [chunk(0, "a "), chunk(1, "b", end=True)])
        again = await feed(stub, request.id, [chunk(0, "a "), chunk(1, "b", end=True)])
        assert (first.accepted_chunks, first.segments) == (2, 1)
        assert (again.accepted_chunks, again.duplicate_chunks, again.segments) == (0, 2, 1)
        error = await refused(stub, request.id, chunk(1, "b"), chunk(2, "c"))
        assert (error.code, error.reason) == (S.FAILED_PRECONDITION, "NOT_RESUMABLE")
        assert texts(await request.finished()) == "a b"


@pytest.mark.parametrize("delay", [0, 0.001, 0.03])
async def test_a_feeder_lost_behind_its_half_close_changes_nothing(
    stub: Any, echo_server: Server, delay: float
) -> None:
    """Whether its half-close arrived or not: the next feeder says it all again."""
    chunks = [chunk(0, "a "), chunk(1, "b")]
    async with opened(stub, stage_params=[script("audio", outputs=1, first_ms=500)]) as request:
        feeding = await Feeding(stub, request.id).send(*chunks)
        await feeding.call.done_writing()
        await asyncio.sleep(delay)
        feeding.cancel()
        await eventually(lambda: not lane_of(echo_server, request.id).fed)
        summary = await feed(stub, request.id, chunks)
        assert (summary.accepted_chunks + summary.duplicate_chunks, summary.segments) == (2, 1)
        assert texts(await request.finished()) == "a b"


async def test_only_one_feeds_at_a_time(stub: Any, echo_server: Server) -> None:
    async with opened(stub) as request:
        first = await Feeding(stub, request.id).send(chunk(0, "a "))
        await taken(echo_server, request.id, 1)
        error = await refused(stub, request.id)
        assert (error.code, error.reason) == (S.ALREADY_EXISTS, "FEEDER_ACTIVE")
        await first.send(chunk(1, "b"))
        summary = await first.close()
        assert summary.accepted_chunks == 2
        assert texts(await request.finished()) == "a b"


async def test_chunks_may_hold_nothing(stub: Any) -> None:
    """An empty text is a chunk: a model that writes token by token has such."""
    async with opened(stub) as request:
        chunks = [chunk(0, ""), chunk(1, "a "), chunk(2, ""), chunk(3, "b"), chunk(4, "")]
        summary = await feed(stub, request.id, chunks)
        assert (summary.accepted_chunks, summary.segments) == (5, 1)
        assert texts(await request.finished()) == "a b"
