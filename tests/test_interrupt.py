"""Interrupts: what was not written is dropped, nothing of the old answer follows, the next turn is
answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import pytest

from omni_grpc.server import Server
from tests.conftest import Serve
from tests.sessions import (
    PROMPT,
    Session,
    attached,
    check_order,
    film,
    id_of,
    session,
    talk,
)
from tests.streaming import by_segment, ends, lane_of, new_id, opened
from tests.support import AUDIO, TEXT, client, echo, eventually, running, script, sound, stub_of

WORDS: dict[str, Any] = {"output_modalities": [TEXT]}


def new_answers(one: Session, epoch: int) -> dict[int, str]:
    """The text of each segment, of responses from this epoch on."""
    return by_segment(r for r in one.responses if r.epoch >= epoch)


def speaks(segment: int) -> Callable[[Session], object]:
    """Whether text of the segment has come."""
    return lambda one: segment in by_segment(one.responses[-5:])


def text_over(segment: int) -> Callable[[Session], object]:
    """Whether the segment's text is complete."""
    return lambda one: ("text", segment) in ends(one.responses)


def state(event_id: str, name: str) -> Callable[[Session], object]:
    """Whether the event has been in that state."""
    return lambda one: name in one.states(event_id)


async def interrupted(one: Session, epoch: int) -> None:
    """Returns when the interrupt was told."""
    await one.until(lambda s: epoch in s.interrupts)


async def next_turn(one: Session, seq: int, segment: int, epoch: int) -> None:
    """Asks once more, and checks that it is answered, and nothing else."""
    short = [script(outputs=3), script("audio", outputs=2)]
    await one.update(seq, "again", end=True, stage_params=short)
    stages = one.responses[0].accepted.stages
    await one.until(
        lambda s: {(stage, segment) for stage in stages} <= set(ends(s.responses)),
    )
    assert new_answers(one, epoch) == {segment: "word0 word1 word2 "}


Reached = Callable[[Session], object]
PHASES: dict[str, tuple[list[Any], Reached]] = {
    "before the first output": ([script(hang_at=0, outputs=1)], lambda s: s.responses),
    "in the text": (film(), lambda s: "word2 " in s.text),
    "in the sound": (
        [script(outputs=2), script("audio", outputs=500, interval_ms=20)],
        lambda s: len(sound(s.responses)) > 10_000,
    ),
    "before the sound": (
        [script(outputs=2), script("audio", outputs=1, hang_at=0)],
        lambda s: ("text", 0) in ends(s.responses),
    ),
    "after the answer": (
        [script(outputs=2)],
        lambda s: {("audio", 0), ("image", 0)} <= set(ends(s.responses)),
    ),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_it_ends_the_answer_in_every_phase_and_the_next_turn_is_answered(
    stub: Any, echo_server: Server, phase: str
) -> None:
    stage_params, reached = PHASES[phase]
    async with talk(stub) as one:
        await one.update(0, "x", end=True, stage_params=stage_params)
        await one.until(reached)
        lane = lane_of(echo_server, id_of(one))
        await eventually(lambda: lane.segments == 1)
        await one.interrupt()
        await interrupted(one, 1)
        place = one.kinds.index("interrupted 1")
        await asyncio.sleep(0.15)
        assert one.kinds[place + 1 :] == []
        await next_turn(one, 1, 1, epoch=1)
        await one.half_close()
        await one.finished()
        assert {r.epoch for r in one.responses} == {0, 1}


async def test_before_any_input_it_changes_the_epoch_only(stub: Any) -> None:
    async with talk(stub) as one:
        await one.interrupt()
        await interrupted(one, 1)
        await next_turn(one, 0, 0, epoch=1)
        await one.half_close()
        await one.finished()


async def test_a_chunk_that_waits_is_answered_after_it(stub: Any, echo_server: Server) -> None:
    async with talk(stub, **WORDS) as one:
        lane = lane_of(echo_server, id_of(one))
        await one.update(0, "x", end=True, stage_params=film())
        for seq in range(1, 60):
            await one.update(seq, f"w{seq} ", end=True)
        taken = -1
        while taken != lane.next_seq:
            taken = lane.next_seq
            await asyncio.sleep(0.2)
        assert 2 < taken < 60
        await one.interrupt()
        await one.half_close()
        await one.finished()
        # Those that stage 0 had taken end with the answer; the one under way, and later, come.
        assert new_answers(one, 1) == {n: f"w{n} " for n in range(taken, 60)}


@pytest.mark.parametrize("busy", [True, False], ids=["in an answer", "between answers"])
async def test_the_open_segment_survives_with_its_parameters(stub: Any, busy: bool) -> None:
    async with talk(stub) as one:
        await one.update(0, "x", end=True, stage_params=film() if busy else [script(outputs=2)])
        done = PHASES["in the text" if busy else "after the answer"][1]
        await one.until(done)
        own = [script(bytes=4), script("audio", outputs=3, bytes=100)]
        await one.update(1, "a ", stage_params=own)
        await one.update(2, "b ")
        await one.send(update={"seq": 9, "text": "gap"})
        await one.until(lambda s: s.rejected)
        await one.interrupt()
        await one.update(3, "c ", end=True)
        await one.half_close()
        await one.finished()
        assert new_answers(one, 1) == {1: "a a b b c c "}
        assert len(sound([r for r in one.responses if r.epoch == 1])) == 300


async def test_without_further_input_it_completes_the_request(stub: Any) -> None:
    async with session(stub, prompt={"text": "x"}, stage_params=film()) as one:
        await one.until(lambda s: s.text)
        await one.interrupt()
        await one.finished(within=2)
        assert one.kinds[-2] == "interrupted 1" and one.kinds[-1].endswith("/1 finished")
    async with talk(stub, stage_params=film()) as one:
        await one.update(0, "x", end=True)
        await one.send(end_input={})
        await one.until(lambda s: s.text)
        await one.interrupt()
        await one.finished(within=2)
        assert one.kinds[-2] == "interrupted 1"


async def test_who_attached_may_interrupt_and_a_plain_reader_sees_the_epoch(stub: Any) -> None:
    async with opened(stub, **WORDS) as request, attached(stub, request.id, outputs=True) as two:
        await two.update(0, "x", end=True, stage_params=film())
        await request.until(lambda got: len(got) > 3)
        await two.interrupt()
        await interrupted(two, 1)
        await two.update(1, "again ", end=True)
        await two.send(end_input={})
        responses = await request.finished()
        assert await two.ended() is None
    assert [r.epoch for r in responses] == sorted(r.epoch for r in responses)
    assert responses[0].epoch == 0 and responses[-1].epoch == 1
    assert by_segment(r for r in responses if r.epoch == 1) == {1: "again "}
    assert new_answers(two, 1) == {1: "again "}


async def test_all_sessions_of_a_request_hear_of_it(stub: Any) -> None:
    async with (
        talk(stub, stage_params=film()) as owner,
        attached(stub, id_of(owner), outputs=True) as two,
        attached(stub, id_of(owner)) as three,
    ):
        await owner.update(0, "x", end=True)
        await two.until(lambda s: s.text)
        await three.interrupt()
        for one in (owner, two, three):
            await interrupted(one, 1)
        async with attached(stub, id_of(owner)) as four:
            assert four.heard[0].setup_complete.epoch == 1


# ---------------------------------------------------------------- what is dropped, what counts


async def test_what_was_not_written_is_dropped(serve: Serve) -> None:
    served = await serve(echo())
    long = [script(outputs=1), script("audio", outputs=400, bytes=60_000)]
    async with (
        client(served.server) as channel,
        talk(stub_of(channel), output_modalities=[AUDIO]) as one,
    ):
        run = served.server.engine.orchestrator.find(id_of(one))
        one.pause()
        await one.update(0, "x", end=True, stage_params=long)
        await eventually(lambda: int(run.statistics()["queued_bytes"]) > 4 << 20, 10)
        await one.interrupt()
        await eventually(lambda: int(run.statistics()["queued_bytes"]) < 100_000)
        one.resume()
        await interrupted(one, 1)
        delivered = len(sound(one.responses))
        assert delivered < 400 * 60_000 - (3 << 20)
        own = [script(outputs=1), script("audio", outputs=2, bytes=1000)]
        await one.update(1, "x", end=True, stage_params=own)
        await one.half_close()
        await one.finished()
        news = [r.output.audio for r in one.responses if r.epoch and r.output.HasField("audio")]
        assert [audio.start_sample for audio in news] == [delivered // 2, delivered // 2 + 500]
        usage = one.responses[-1].finished.usage
        assert usage.audio_samples == delivered // 2 + 1000


async def test_what_is_made_and_waits_is_dropped_too(stub: Any, echo_server: Server) -> None:
    fields = {"prompt": {"text": "x"}, "output_modalities": [AUDIO]}
    large = [script("audio", outputs=200, bytes=60_000)]
    async with (
        client(echo_server) as channel,
        session(stub_of(channel), stage_params=large, **fields) as one,
    ):
        run = echo_server.engine.orchestrator.find(id_of(one))
        one.pause()
        await eventually(lambda: int(run.statistics()["queued_bytes"]) > 4 << 20, 10)
        # Until the last of it is made, a little is read.
        while not run.completed:
            one.resume()
            await asyncio.sleep(0.001)
            one.pause()
            await asyncio.sleep(0.02)
        waits = int(run.statistics()["queued_bytes"])
        assert waits > 1 << 20
        await one.interrupt()
        await eventually(lambda: int(run.statistics()["queued_bytes"]) < 10_000)
        one.resume()
        await one.finished()
        assert one.kinds[-2:] == ["interrupted 1", f"{one.responses[-1].seq}/1 finished"]
        delivered = len(sound(one.responses))
        assert delivered <= 200 * 60_000 - waits + 100_000
        assert one.responses[-1].finished.usage.audio_samples == delivered // 2


async def test_a_stage_that_was_held_back_goes_on(stub: Any) -> None:
    # The sound hangs, so the text, longer than a window, is held back; yet it comes to its end.
    first = [script(outputs=8, bytes=190_000), script("audio", hang_at=0, outputs=1)]
    then = [script(outputs=8, bytes=190_000), script("audio", outputs=1, bytes=100)]
    async with talk(stub, output_modalities=[AUDIO]) as one:
        for seq in range(3):
            await one.update(seq, "x", end=True, stage_params=then if seq == 2 else first)
            if seq < 2:
                await one.until(text_over(seq))
                await one.interrupt()
                await interrupted(one, seq + 1)
        await one.half_close()
        await one.finished()
        assert len(sound(one.responses)) == 100


async def test_nothing_of_the_old_answer_is_left_in_replicas(
    stub: Any, echo_server: Server
) -> None:
    async with talk(
        stub, stage_params=[*film(), script("audio", outputs=500, interval_ms=20)]
    ) as one:
        for seq in range(5):
            await one.update(seq, "x", end=True)
            await one.until(speaks(seq))
            assert any(running(echo_server).values())
            await one.interrupt()
            await interrupted(one, seq + 1)
            await eventually(lambda: not any(running(echo_server).values()))
        run = echo_server.engine.orchestrator.find(id_of(one))
        assert run.statistics()["held_by"] == []
        assert len(run._graph._retired) <= 3


async def test_events_of_the_old_answer_expire_before_it_is_told(stub: Any) -> None:
    async with talk(stub, stage_params=film(), **WORDS) as owner:
        async with attached(stub, id_of(owner)) as two:
            for turn in range(3):
                await owner.update(turn, "x", end=True)
                await owner.until(speaks(turn))
                await owner.event(f"a{turn}", transition_chunks=1000)
                await owner.until(state(f"a{turn}", "STARTED"))
                await two.event(f"b{turn}", parameters={"encode_ms": 2000})
                await two.until(state(f"b{turn}", "QUEUED"))
                await owner.interrupt()
                await interrupted(owner, turn + 1)
                await interrupted(two, turn + 1)
                assert owner.states(f"a{turn}")[-1] == "EXPIRED"
                assert two.states(f"b{turn}") == ["QUEUED", "EXPIRED"]
        short = [script(outputs=10, interval_ms=10)]
        await owner.update(3, "x", end=True, stage_params=short)
        await owner.until(lambda s: 3 in by_segment(s.responses))
        await owner.event("new")
        assert await owner.settled("new") == ["COMPLETED"]


# ---------------------------------------------------------------- when, and how often


async def test_several_in_a_row_each_tell_their_epoch(stub: Any) -> None:
    async with talk(stub, stage_params=film()) as one:
        await one.update(0, "x", end=True)
        await one.until(lambda s: s.text)
        for _ in range(5):
            await one.interrupt()
        await interrupted(one, 5)
        assert one.interrupts == [1, 2, 3, 4, 5]
        await next_turn(one, 1, 1, epoch=5)
        await one.half_close()
        await one.finished()


@pytest.mark.parametrize("played_ms", [0, 1, 2**64 - 1])
async def test_however_much_was_heard(stub: Any, played_ms: int) -> None:
    async with talk(stub, stage_params=film()) as one:
        await one.update(0, "x", end=True)
        await one.until(lambda s: s.text)
        await one.interrupt(played_ms)
        await interrupted(one, 1)
        await next_turn(one, 1, 1, epoch=1)


async def test_before_the_request_is_admitted_there_is_nothing_to_end(
    stub: Any, echo_server: Server
) -> None:
    request_id = new_id("early")
    stage_params = [script(prepare_ms=500, outputs=3)]
    opening = Session(
        stub, open={"request_id": request_id, "prompt": {"text": "x"}, "stage_params": stage_params}
    )
    await opening.begin()
    await eventually(lambda: len(echo_server.engine.orchestrator) == 1)
    async with attached(stub, request_id, outputs=True) as two:
        await two.interrupt()
        await two.event("e", parameters={"reject": True})
        await two.until(lambda s: s.states("e"))
        assert opening.heard == []
        await opening.finished()
        assert await two.ended() is None
    check_order(opening.heard)
    assert opening.text == "word0 word1 word2 " and opening.interrupts == two.interrupts == []


async def test_it_is_told_at_once(stub: Any) -> None:
    took, endless = [], [*film(1000, 2), script("audio", outputs=1000, interval_ms=2)]
    async with talk(stub, stage_params=endless, output_modalities=[TEXT, AUDIO]) as one:
        for turn in range(100):
            await one.update(turn, "x", end=True)
            await one.until(speaks(turn))
            sent = time.perf_counter()
            await one.interrupt()
            await interrupted(one, turn + 1)
            took.append(time.perf_counter() - sent)
    assert sorted(took)[98] < PROMPT, sorted(took)[-5:]


async def test_it_passes_the_updates_that_wait(stub: Any, echo_server: Server) -> None:
    async with talk(stub, **WORDS) as one:
        await one.update(0, "x", end=True, stage_params=film())
        await one.until(lambda s: s.text)
        for seq in range(1, 200):
            await one.update(seq, "y ", end=True)
        sent = time.perf_counter()
        await one.interrupt()
        await interrupted(one, 1)
        assert time.perf_counter() - sent < PROMPT
        lane = lane_of(echo_server, id_of(one))
        await eventually(lambda: lane.next_seq == 200, 5)


async def test_a_chunk_behind_an_abort_wakes_no_stage(stub: Any, echo_server: Server) -> None:
    async with talk(stub, stage_params=film(), **WORDS) as one:
        await one.update(0, "x", end=True)
        await one.until(lambda s: s.text)
        # Stage 0 holds no task behind it, and the chunk would begin one.
        await one.interrupt()
        await one.send(abort={})
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            await one.update(1, "y", end=True)
        await one.failed()
        await eventually(lambda: not any(running(echo_server).values()))
