"""The client's sessions against a real server: steering, feeding, interrupting, attaching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from omni_grpc.server import Server
from omni_grpc_client import (
    Accepted,
    AudioChunk,
    CancelledCallError,
    EventChanged,
    EventState,
    Finished,
    Interaction,
    Interrupted,
    InvalidArgumentError,
    NotFoundError,
    OmniClient,
    SegmentEnd,
    SessionItem,
    TextDelta,
    UpdateRejected,
)
from tests.support import eventually, freed, in_flight

SLOW = {"text": {"outputs": 1000, "interval_ms": 20}}


@pytest.fixture
async def client(echo_server: Server) -> AsyncIterator[OmniClient]:
    """A client of `echo_server`, which must hold nothing when the test is over."""
    async with OmniClient(f"127.0.0.1:{echo_server.port}") as connected:
        yield connected
    await freed(echo_server)


async def until(
    session: Interaction, enough: Callable[[SessionItem], bool], within: float = 10
) -> list[SessionItem]:
    """What a session says up to the first item that is enough."""
    items: list[SessionItem] = []
    async with asyncio.timeout(within):
        async for item in session:
            items.append(item)
            if enough(item):
                return items
    raise AssertionError(f"it ended before: {items}")


def changed(item: SessionItem, state: EventState) -> bool:
    return isinstance(item, EventChanged) and item.state is state


def lives(items: list[SessionItem]) -> list[tuple[str, EventState]]:
    return [(item.event_id, item.state) for item in items if isinstance(item, EventChanged)]


async def test_a_session_is_a_request_that_can_be_steered(client: OmniClient) -> None:
    async with client.interact("x", request_id="mine", stage_params=SLOW) as session:
        assert (session.request_id, session.epoch) == ("mine", 0)
        accepted, *_ = await until(session, lambda item: isinstance(item, TextDelta))
        assert isinstance(accepted, Accepted) and accepted.request_id == "mine"
        name = await session.event("anything", transition_chunks=2)
        items = await until(session, lambda item: changed(item, EventState.COMPLETED))
    assert lives(items) == [
        (name, EventState.QUEUED),
        (name, EventState.STARTED),
        (name, EventState.COMPLETED),
    ]
    began, done = [i.chunk for i in items if isinstance(i, EventChanged)][1:]
    assert began is not None and done == began + 1
    assert any(isinstance(item, TextDelta) for item in items), "it goes on meanwhile"


async def test_a_rejected_event_says_why_and_ends_nothing(client: OmniClient) -> None:
    async with client.interact("x", stage_params=SLOW) as session:
        await until(session, lambda item: isinstance(item, TextDelta))
        await session.event(parameters={"reject": True}, event_id="no")
        *_, rejected = await until(session, lambda item: changed(item, EventState.REJECTED))
        assert isinstance(rejected, EventChanged) and rejected.event_id == "no"
        assert isinstance(rejected.error, InvalidArgumentError)
        assert rejected.error.reason == "INVALID_FIELD"
        assert [v.field for v in rejected.error.violations] == ["event.parameters.reject"]
        await session.event("same", event_id="no")
        *_, again = await until(session, lambda item: changed(item, EventState.REJECTED))
        assert isinstance(again, EventChanged) and again.error is not None
        assert (again.resubmission, again.error.reason) == (True, "EVENT_ID_CONFLICT")
        await until(session, lambda item: isinstance(item, TextDelta))


async def test_input_is_fed_and_answered_in_a_session(client: OmniClient) -> None:
    async with client.interact(resumable=True, output_modalities=["text"]) as session:
        assert await session.send("hello ") == 0
        assert await session.send("you", end_of_segment=True) == 1
        items = await until(session, lambda item: isinstance(item, SegmentEnd))
        assert "".join(i.text for i in items if isinstance(i, TextDelta)) == "hello you"
        session.next_seq = 7
        await session.send("lost")
        *_, refused = await until(session, lambda item: isinstance(item, UpdateRejected))
        assert isinstance(refused, UpdateRejected) and refused.seq == 7
        assert isinstance(refused.error, InvalidArgumentError)
        session.next_seq = 2
        await session.send("again")
        await session.end_input()
        items = await until(session, lambda item: isinstance(item, Finished))
        assert "".join(i.text for i in items if isinstance(i, TextDelta)) == "again"
        assert [item async for item in session] == []
    await session.event("too late")
    await session.interrupt()


async def test_nothing_of_an_old_epoch_follows_an_interrupt(client: OmniClient) -> None:
    async with client.interact(resumable=True, stage_params=SLOW) as session:
        await session.send("x", end_of_segment=True)
        await until(session, lambda item: isinstance(item, AudioChunk))
        await session.interrupt(played_ms=100)
        items = await until(session, lambda item: isinstance(item, Interrupted))
        assert isinstance(items[-1], Interrupted) and items[-1].epoch == session.epoch == 1
        quick = {"text": {"outputs": 2}}
        await session.send("y", end_of_segment=True, stage_params=quick)
        items = await until(session, lambda item: isinstance(item, TextDelta))
        assert all(i.epoch == 1 for i in items if isinstance(i, TextDelta | AudioChunk))
        await session.end_input()
        await until(session, lambda item: isinstance(item, Finished))


async def test_leaving_a_session_aborts_what_it_opened(
    client: OmniClient, echo_server: Server
) -> None:
    async with client.interact("x", stage_params=SLOW) as session:
        await until(session, lambda item: isinstance(item, TextDelta))
        assert in_flight(echo_server)
    await freed(echo_server)


async def test_a_session_attaches_to_a_request_of_somebody_else(client: OmniClient) -> None:
    async with client.interact("x", request_id="shared", stage_params=SLOW) as owner:
        await until(owner, lambda item: isinstance(item, TextDelta))
        async with client.attach("shared", receive_outputs=True) as guest:
            await guest.event("anything", transition_chunks=0, event_id="mine")
            items = await until(guest, lambda item: changed(item, EventState.COMPLETED))
            assert lives(items)[0] == ("mine", EventState.QUEUED)
            await until(guest, lambda item: isinstance(item, TextDelta))
        items = await until(owner, lambda item: isinstance(item, TextDelta))
        assert lives(items) == [], "who sent an event hears of it"
        async with client.attach("shared") as guest:
            await guest.abort()
            with pytest.raises(CancelledCallError):
                await until(guest, lambda item: False)
        with pytest.raises(CancelledCallError):
            await until(owner, lambda item: False)


async def test_what_cannot_be_opened_is_told_before_the_block(client: OmniClient) -> None:
    with pytest.raises(NotFoundError) as unknown:
        async with client.attach("nobody"):
            raise AssertionError("it was entered")
    assert unknown.value.reason == "REQUEST_NOT_FOUND"
    with pytest.raises(InvalidArgumentError) as refused:
        async with client.interact("x", stage_params={"text": {"nope": 1}}):
            raise AssertionError("it was entered")
    assert "nope" in refused.value.violations[0].field


async def test_cancelling_who_reads_ends_the_session(
    client: OmniClient, echo_server: Server
) -> None:
    async def read() -> None:
        async with client.interact("x", stage_params=SLOW) as session:
            await until(session, lambda item: False, within=60)

    reader = asyncio.create_task(read())
    await eventually(lambda: in_flight(echo_server), within=5)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await freed(echo_server)
