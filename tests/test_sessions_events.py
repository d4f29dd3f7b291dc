"""Events of a running generation: each has one end, and tells of it where it belongs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from omni_grpc.ledger import MAX_PENDING
from omni_grpc.run import Run
from omni_grpc.server import Server
from omni_grpc.types import EventState
from tests.conftest import Serve
from tests.sessions import (
    PROMPT,
    Heard,
    Request,
    Session,
    attached,
    film,
    id_of,
    session,
    state_name,
    still,
    talk,
)
from tests.streaming import ends, opened
from tests.support import AUDIO, IMAGE, TEXT, client, echo, eventually, script, stream, stub_of

S = grpc.StatusCode
COMPLETED = ["QUEUED", "STARTED", "COMPLETED"]
PLAIN: dict[str, Any] = {"prompt": {"text": "x"}, "output_modalities": [TEXT]}


def shown_before(heard: list[Heard], event_id: str, state: str) -> tuple[int, int]:
    """(chunk that the state names, text chunks that were heard before it)."""
    words = 0
    for message in heard:
        event = message.event_state
        if (event.event_id, state_name(event)) == (event_id, state) and not event.resubmission:
            return event.chunk, words
        words += len(re.findall(r"word\d+ ", message.response.output.text.text))
    raise AssertionError(f"{event_id} never was {state}")


def answered(event_id: str) -> Callable[[Session], object]:
    """Whether anything was said of the event."""
    return lambda one: one.states(event_id)


def begun(run: Run, event_id: str) -> Callable[[], object]:
    """Whether the request knows the event as more than queued."""
    records = run._ledger._records
    return lambda: event_id in records and records[event_id].change.state is not EventState.QUEUED


# ---------------------------------------------------------------- their life


async def test_an_event_is_queued_started_and_completed(stub: Any) -> None:
    async with session(stub, stage_params=film(30), **PLAIN) as one:
        await one.event("e")
        await one.finished()
        assert one.states("e") == COMPLETED
        assert not one.answers("e")[0].HasField("chunk")


@pytest.mark.parametrize("transition", [0, 1, 2, 5])
async def test_states_stand_right_before_the_chunk_that_they_concern(
    stub: Any, transition: int
) -> None:
    async with session(stub, stage_params=film(40, 10), **PLAIN) as owner:
        async with attached(stub, id_of(owner), outputs=True) as two:
            await owner.until(lambda s: "word3 " in s.text)
            await owner.event("mine", transition_chunks=transition)
            await owner.settled("mine")
            await two.event("theirs", transition_chunks=transition)
            await owner.finished()
            assert await two.ended() is None
        missed = two.responses[0].seq
    for heard, event_id in ((owner.heard, "mine"), (two.heard, "theirs")):
        start, before_start = shown_before(heard, event_id, "STARTED")
        end, before_end = shown_before(heard, event_id, "COMPLETED")
        assert end == start + max(0, transition - 1)
        assert before_end - before_start == end - start
        if heard is owner.heard:
            assert before_start == start >= 4
        else:
            assert before_start <= start and missed > 0


async def test_the_default_transition_is_three_chunks(stub: Any) -> None:
    async with session(stub, stage_params=film(30, 10), **PLAIN) as one:
        await one.send(event={"event_id": "e", "prompt": "blue"})
        await one.settled("e")
        first, last = (
            shown_before(one.heard, "e", "STARTED"),
            shown_before(one.heard, "e", "COMPLETED"),
        )
        assert last[0] - first[0] == 2


async def test_of_two_events_in_one_chunk_the_newer_holds(stub: Any) -> None:
    async with session(stub, stage_params=film(4, 300), **PLAIN) as one:
        await one.until(lambda s: s.text)
        await one.event("old")
        await one.event("new", "green")
        assert await one.settled("old", "new") == ["SUPERSEDED", "COMPLETED"]
        assert one.states("old") == ["QUEUED", "SUPERSEDED"]
        assert not one.answers("old")[-1].HasField("chunk")


async def test_an_event_supersedes_one_that_is_blended_in(stub: Any) -> None:
    async with session(stub, stage_params=film(60, 20), **PLAIN) as one:
        await one.event("slow", transition_chunks=50)
        await one.until(lambda s: "STARTED" in s.states("slow"))
        await one.event("fast")
        assert await one.settled("slow", "fast") == ["SUPERSEDED", "COMPLETED"]
        assert one.states("slow") == ["QUEUED", "STARTED", "SUPERSEDED"]
        # Where the newer one begins, and not before.
        assert one.answers("slow")[-1].chunk == one.answers("fast")[-1].chunk


async def test_an_event_in_the_last_chunk_expires(stub: Any) -> None:
    async with session(stub, stage_params=film(3, 300), **PLAIN) as one:
        await one.until(lambda s: "word1 " in s.text)
        await one.event("e", transition_chunks=2)
        await one.finished()
        assert one.states("e") == ["QUEUED", "STARTED", "EXPIRED"]
        assert one.answers("e")[1].chunk == 2


async def test_an_event_after_the_last_chunk_expires(stub: Any) -> None:
    async with talk(stub, output_modalities=[TEXT]) as one:
        await one.update(0, "one two ", end=True)
        await one.until(lambda s: any(k.endswith("segment_end") for k in s.kinds))
        await one.event("e")
        await one.until(lambda s: s.states("e"))
        await one.half_close()
        await one.finished()
        assert one.states("e") == ["QUEUED", "EXPIRED"]


async def test_what_waits_expires_with_the_stage_though_others_go_on(stub: Any) -> None:
    slow = [*film(2, 200), script("audio", first_ms=1000)]
    async with session(stub, prompt={"text": "x"}, stage_params=slow) as one:
        await one.until(lambda s: "word0" in s.text)
        await one.event("cut", transition_chunks=100)
        await one.event("slow", parameters={"encode_ms": 5000})
        assert await one.settled("cut", "slow", within=0.9) == ["EXPIRED", "EXPIRED"]
        await one.event("after")
        await one.settled("after", within=0.9)
        [answer] = one.answers("after")
        assert (answer.status.reason, one.over) == ("NOT_SUPPORTED", False)
        await one.finished()


@pytest.mark.parametrize("how", ["abort", "fail", "deadline"])
async def test_a_request_that_fails_leaves_no_event_open(stub: Any, how: str) -> None:
    fields = {"timeout": 0.8} if how == "deadline" else {}
    stage = film(100, 50, fail_at=8) if how == "fail" else film(100, 50)
    async with (
        session(stub, stage_params=stage, **PLAIN, **fields) as owner,
        attached(stub, id_of(owner)) as two,
    ):
        await owner.event("mine", transition_chunks=1000)
        await two.event("theirs", transition_chunks=1000)
        await two.until(lambda s: s.states("theirs"))
        if how == "abort":
            await two.send(abort={})
        await owner.failed()
        await two.failed()
        assert two.states("theirs")[-1] == "EXPIRED"
        if how != "deadline":
            # Of its own deadline a client hears from its own side first.
            assert owner.states("mine")[-1] in ("EXPIRED", "SUPERSEDED")


async def test_states_that_wait_are_told_before_the_error(serve: Serve) -> None:
    served = await serve(echo())
    large = [script(outputs=400, bytes=60_000, interval_ms=1)]
    async with (
        client(served.server) as channel,
        session(stub_of(channel), stage_params=large, **PLAIN) as one,
        attached(served.stub, id_of(one)) as two,
    ):
        run = served.server.engine.orchestrator.find(id_of(one))
        one.pause()
        await eventually(lambda: int(run.statistics()["queued_bytes"]) > 1 << 20, 10)
        for sender, event_id in ((one, "mine"), (two, "theirs")):
            await sender.event(event_id, transition_chunks=1 if sender is one else 1000)
            await eventually(begun(run, event_id), 5)
        # What became of them waits behind outputs that are dropped now.
        await two.send(abort={})
        await two.failed()
        one.resume()
        await one.failed()
        assert one.states("mine") == COMPLETED
        assert two.states("theirs") == ["QUEUED", "STARTED", "EXPIRED"]


async def test_an_event_after_the_end_is_rejected(stub: Any, echo_server: Server) -> None:
    async with client(echo_server) as channel:
        fields = {"prompt": {"text": "x"}, "output_modalities": [AUDIO]}
        # More than the transport takes, less than makes the stage pause.
        large = [script("audio", outputs=140, bytes=60_000)]
        async with session(stub_of(channel), stage_params=large, **fields) as one:
            run = echo_server.engine.orchestrator.find(id_of(one))
            one.pause()
            # All is made, and little of it was read.
            await eventually(lambda: run.completed, 5)
            assert not run.closed
            await one.event("late")
            await asyncio.sleep(0.1)
            one.resume()
            await one.finished()
    assert one.states("late") == ["REJECTED"]
    assert one.answers("late")[0].status.reason == "NOT_SUPPORTED"


async def test_without_an_interactive_stage_events_are_rejected(serve: Serve) -> None:
    served = await serve(still())
    async with session(served.stub, stage_params=film(20), **PLAIN) as one:
        await one.event("e")
        await one.finished()
        assert one.states("e") == ["REJECTED"]
        status = one.answers("e")[0].status
        assert (status.code, status.reason) == (9, "NOT_SUPPORTED") and status.message
        assert "word19" in one.text


async def test_a_session_that_feeds_is_steered_over_its_segments(stub: Any) -> None:
    async with talk(stub, output_modalities=[TEXT], stage_params=[script(interval_ms=30)]) as one:
        for segment, event_id in enumerate(("first", "second")):
            await one.event(event_id, transition_chunks=2)
            await one.update(segment, "one two three four ", end=True)
            assert await one.settled(event_id) == ["COMPLETED"]
            await one.until(lambda s: len(ends(s.responses)) == segment + 1)  # noqa: B023
        # Chunks are counted over all segments.
        assert [a.chunk >= 4 for a in one.answers("second")] == [False, True, True]
        await one.half_close()
        await one.finished()


# ---------------------------------------------------------------- at once


async def test_events_are_answered_while_a_chunk_is_made(stub: Any) -> None:
    async with session(stub, stage_params=film(3, 1500), **PLAIN) as one:
        await one.until(lambda s: s.text)
        for number in range(20):
            sent = time.perf_counter()
            await one.event(f"e{number}")
            await one.until(answered(f"e{number}"))
            assert time.perf_counter() - sent < PROMPT
        assert len(one.text) == len("word0 ")


async def test_an_event_that_is_slow_to_encode_is_answered_at_once(stub: Any) -> None:
    async with session(stub, stage_params=film(100, 20), **PLAIN) as one:
        await one.until(lambda s: s.text)
        sent = time.perf_counter()
        await one.event("slow", parameters={"encode_ms": 600})
        await one.until(lambda s: s.states("slow") == ["QUEUED"])
        assert time.perf_counter() - sent < PROMPT
        before = len(one.text)
        await one.until(lambda s: "STARTED" in s.states("slow"))
        # Chunks went on meanwhile.
        assert len(one.text) - before > 5 * len("word0 ")
        assert await one.settled("slow") == ["COMPLETED"]


async def test_an_answer_passes_the_outputs_that_wait(serve: Serve) -> None:
    served = await serve(echo())
    large = [script("audio", outputs=400, bytes=60_000)]
    fields = {"prompt": {"text": "x"}, "output_modalities": [AUDIO], "stage_params": large}
    async with client(served.server) as channel, session(stub_of(channel), **fields) as one:
        run = served.server.engine.orchestrator.find(id_of(one))
        one.pause()
        await eventually(lambda: int(run.statistics()["queued_bytes"]) > 4 << 20, 10)
        await one.event("e")
        await asyncio.sleep(0.2)
        waits, before = int(run.statistics()["queued_bytes"]), len(one.responses)
        assert waits > 3 << 20
        resumed = time.perf_counter()
        one.resume()
        await one.until(lambda s: s.states("e"))
        assert time.perf_counter() - resumed < PROMPT
        # What was on its way is read first, what waited in the server is not.
        behind = sum(len(r.output.audio.data) for r in one.responses[before:])
        await one.finished()
        assert sum(len(r.output.audio.data) for r in one.responses) == 400 * 60_000
        assert behind < 400 * 60_000 - waits


# ---------------------------------------------------------------- again, or wrong


async def test_the_same_event_again_is_answered_and_not_applied_again(stub: Any) -> None:
    async with session(stub, stage_params=film(40), **PLAIN) as one:
        for _ in range(3):
            await one.event("e", parameters={"b": 1, "a": {"y": 1, "x": [1, 2]}})
        await one.settled("e")
        await one.event("e", parameters={"a": {"x": [1, 2], "y": 1}, "b": 1})
        await one.until(lambda s: len(s.answers("e")) == 6)
        await one.finished()
        assert one.states("e") == COMPLETED
        again = [answer for answer in one.answers("e") if answer.resubmission]
        assert len(again) == 3 and state_name(again[-1]) == "COMPLETED"
        assert again[-1].chunk == one.answers("e")[-2].chunk


async def test_the_same_id_with_another_payload_is_refused_and_the_first_goes_on(
    stub: Any,
) -> None:
    async with session(stub, stage_params=film(30), **PLAIN) as one:
        await one.event("e", transition_chunks=5)
        others: list[dict[str, Any]] = [
            {"prompt": "green"},
            {"negative_prompt": "x"},
            {"transition_chunks": 4},
            {"parameters": {"a": 1}},
            {"media": [{"modality": IMAGE, "data": b"x"}]},
        ]
        for other in others:
            await one.event("e", **{"transition_chunks": 5, **other})
        await one.finished()
        assert one.states("e") == COMPLETED
        conflicts = [answer for answer in one.answers("e") if answer.resubmission]
        assert [state_name(answer) for answer in conflicts] == ["REJECTED"] * len(others)
        assert {answer.status.reason for answer in conflicts} == {"EVENT_ID_CONFLICT"}
        assert {answer.status.code for answer in conflicts} == {6}


async def test_an_event_that_changes_nothing_is_rejected(stub: Any) -> None:
    async with session(stub, stage_params=film(20), **PLAIN) as one:
        await one.event("e", prompt=None)
        await one.event("ok")
        await one.finished()
        assert one.states("e") == ["REJECTED"] and one.states("ok") == COMPLETED
        status = one.answers("e")[0].status
        assert status.reason == "INVALID_FIELD" and status.field_violations[0].field == "event"


BAD_EVENTS: dict[str, tuple[dict[str, Any], str]] = {
    "too long a transition": ({"transition_chunks": 10_001}, "event.transition_chunks"),
    "a medium that is none": ({"media": [{}]}, "event.media[0]"),
    "too many media": ({"media": [{"modality": IMAGE, "data": b"x"}] * 17}, "event.media"),
    "a number that is none": ({"parameters": {"x": float("nan")}}, "event.parameters.x"),
    "what the stage rejects": ({"parameters": {"reject": True}}, "event.parameters.reject"),
    "what the stage cannot use": ({"parameters": {"encode_ms": -1}}, "event.parameters.encode_ms"),
}


@pytest.mark.parametrize("name", BAD_EVENTS)
async def test_a_bad_event_is_rejected_whole_and_the_generation_goes_on(
    stub: Any, name: str
) -> None:
    change, field = BAD_EVENTS[name]
    async with session(stub, stage_params=film(20), **PLAIN) as one:
        await one.event("bad", "a prompt that is good", **change)
        assert await one.settled("bad") == ["REJECTED"]
        status = one.answers("bad")[-1].status
        assert status.reason == "INVALID_FIELD"
        assert [v.field.startswith(field) for v in status.field_violations] == [True]
        assert "STARTED" not in one.states("bad")
        await one.event("good")
        await one.finished()
        assert one.states("good") == COMPLETED and "word19" in one.text


@pytest.mark.parametrize("event_id", ["", "x" * 257], ids=["empty", "long"])
async def test_an_event_without_a_usable_id_ends_the_call(
    echo_server: Server, stub: Any, event_id: str
) -> None:
    setup = {"open": {"prompt": {"text": "x"}, "stage_params": film()}}
    messages = [Request(setup=setup), Request(event={"event_id": event_id, "prompt": "x"})]
    error = await stream(
        echo_server, "SubmitInteraction", [m.SerializeToString() for m in messages]
    )
    assert error is not None
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert list(error.violations) == ["event.event_id"]


async def test_an_attached_clients_bad_id_ends_its_call_alone(stub: Any) -> None:
    async with session(stub, stage_params=film(30), **PLAIN) as owner:
        async with attached(stub, id_of(owner)) as two:
            await two.event("")
            assert (await two.failed()).reason == "INVALID_FIELD"
        await owner.finished()


async def test_too_many_that_wait_are_refused(stub: Any) -> None:
    slow = {"encode_ms": 1500}
    async with session(stub, stage_params=film(100, 30), **PLAIN) as one:
        for number in range(MAX_PENDING + 2):
            await one.event(f"e{number}", parameters=slow if number == 0 else None)
        await one.until(lambda s: s.states(f"e{MAX_PENDING + 1}"))
        for number in (MAX_PENDING, MAX_PENDING + 1):
            [answer] = one.answers(f"e{number}")
            assert (state_name(answer), answer.status.reason) == ("REJECTED", "QUEUE_FULL")
        ends = await one.settled(*(f"e{n}" for n in range(MAX_PENDING)))
        # A border between two chunks may fall among them, and takes the one that waits then.
        assert ends[-1] == "COMPLETED" and set(ends) == {"SUPERSEDED", "COMPLETED"}
        assert ends.count("SUPERSEDED") > MAX_PENDING * 3 // 4
        await one.event("room again")
        assert await one.settled("room again") == ["COMPLETED"]


# ---------------------------------------------------------------- whose they are


async def test_an_event_is_told_to_who_sent_it_alone(stub: Any) -> None:
    async with (
        session(stub, stage_params=film(60), **PLAIN) as owner,
        attached(stub, id_of(owner), outputs=True) as two,
        attached(stub, id_of(owner)) as three,
    ):
        for one, event_id in ((owner, "a"), (two, "b"), (three, "c")):
            await one.event(event_id, transition_chunks=2)
            assert await one.settled(event_id) == ["COMPLETED"]
        await owner.finished()
        for one, event_id in ((owner, "a"), (two, "b"), (three, "c")):
            assert {m.event_state.event_id for m in one.heard} - {""} == {event_id}
            assert one.states(event_id) == COMPLETED


async def test_a_plain_reader_sees_nothing_of_events(stub: Any) -> None:
    async with (
        opened(stub, stage_params=film(20), prompt={"text": "x"}) as request,
        attached(stub, request.id) as two,
    ):
        await two.send(end_input={})
        await two.event("e")
        await request.finished()
        assert two.states("e") in (COMPLETED, ["REJECTED"])


async def test_who_leaves_hears_no_more_and_its_event_goes_on(stub: Any) -> None:
    async with session(stub, stage_params=film(60), **PLAIN) as owner:
        async with attached(stub, id_of(owner)) as two:
            await two.event("e", transition_chunks=30)
            await two.until(lambda s: "STARTED" in s.states("e"))
        # It is still known: by its id, and as what a newer one supersedes.
        await owner.event("e", transition_chunks=30)
        await owner.until(lambda s: s.answers("e"))
        [answer] = owner.answers("e")
        assert answer.resubmission and state_name(answer) == "STARTED"
        await owner.event("f")
        await owner.finished()
        assert owner.states("f") == COMPLETED


async def test_a_slow_event_of_one_request_delays_no_other(stub: Any) -> None:
    async with (
        session(stub, stage_params=film(100), **PLAIN) as one,
        session(stub, stage_params=film(100), **PLAIN) as two,
    ):
        await one.event("slow", parameters={"encode_ms": 1000})
        took = []
        for number in range(20):
            sent = time.perf_counter()
            await two.event(f"e{number}")
            await two.until(answered(f"e{number}"))
            took.append(time.perf_counter() - sent)
        assert max(took) < PROMPT
        assert "STARTED" not in one.states("slow")


async def test_hundreds_of_events_each_have_one_end(stub: Any) -> None:
    async with session(stub, stage_params=film(200, 5), **PLAIN) as one:
        for number in range(300):
            await one.event(f"e{number}", transition_chunks=number % 4)
        await one.finished()
        ends = [one.states(f"e{number}")[-1] for number in range(300)]
        assert set(ends) <= {"COMPLETED", "SUPERSEDED", "EXPIRED", "REJECTED"}
        assert one.text.split() == [f"word{n}" for n in range(200)]
