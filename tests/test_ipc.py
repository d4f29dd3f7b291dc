"""What travels between the server and its replicas arrives as it was sent, and in order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_grpc.channel import Channel
from omni_grpc.errors import Code, ErrorRecord, InternalError, InvalidField, OmniError, Violation
from omni_grpc.ipc import (
    Abort,
    Credit,
    Emitted,
    FromReplica,
    Submit,
    Task,
    ToReplica,
    output_size,
)
from omni_grpc.types import Audio, AudioFormat, StageOutput, TextDelta

free_data = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    Any: free_data,
    type(None): st.none(),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**64 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=8),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type as our messages use them."""
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of([values(argument) for argument in arguments])
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    assert issubclass(kind, msgspec.Struct), kind
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


@pytest.mark.parametrize("kind", get_args(ToReplica), ids=lambda kind: kind.__name__)
def test_messages_to_a_replica_round_trip(kind: Any) -> None:
    round_trips(kind, ToReplica)


@pytest.mark.parametrize("kind", get_args(FromReplica), ids=lambda kind: kind.__name__)
def test_messages_from_a_replica_round_trip(kind: Any) -> None:
    round_trips(kind, FromReplica)


def round_trips(kind: Any, union: Any) -> None:
    """Lists of such messages are decoded as the union to equal ones."""
    decoder = msgspec.msgpack.Decoder(list[union])

    @settings(max_examples=30)
    @given(st.lists(values(kind), min_size=1, max_size=2))
    def check(messages: list[Any]) -> None:
        again = decoder.decode(msgspec.msgpack.encode(messages))
        assert again == messages
        assert [type(message) for message in again] == [type(message) for message in messages]

    check()


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("reason", sorted(OmniError.by_reason))
def test_an_error_is_itself_again(reason: str) -> None:
    record = ErrorRecord(reason, "what", (Violation("a.b", "is bad"),), 1.5)
    error = OmniError.from_record(record)
    assert type(error) is OmniError.by_reason[reason]
    assert isinstance(error.code, Code)
    assert str(error) == "what"
    assert error.record() == record


def test_an_invalid_field_is_itself_again() -> None:
    error = OmniError.from_record(InvalidField("a", "is bad", Violation("b", "too")).record())
    assert isinstance(error, InvalidField)
    assert [v.field for v in error.violations] == ["a", "b"]


def test_an_unknown_reason_is_a_bug() -> None:
    assert type(OmniError.from_record(ErrorRecord("WHAT", "x"))) is InternalError


# ---------------------------------------------------------------- the channel


@pytest.fixture
async def line(tmp_path: Path) -> Any:
    """Both ends of a line."""
    context = zmq.Context()
    address = f"ipc://{tmp_path / 'line'}"
    server: Channel[Any, Any] = Channel.bind(context, address, FromReplica)
    replica: Channel[Any, Any] = Channel.connect(context, address, ToReplica)
    yield server, replica
    server.close()
    replica.close()
    context.destroy(linger=0)


async def test_messages_of_one_turn_travel_together(line: Any) -> None:
    server, replica = line
    sent = [Submit(Task(n, "id", None, 1.0)) for n in range(3)] + [Abort(1), Credit(2, 5)]
    for message in sent:
        server.send(message)
    assert await replica.receive() == sent
    replica.send(Emitted(1, StageOutput(TextDelta("x"))))
    assert await server.receive() == [Emitted(1, StageOutput(TextDelta("x")))]


async def test_order_is_kept_over_many_turns(line: Any) -> None:
    server, replica = line
    for number in range(1000):
        server.send(Abort(number))
        if number % 7 == 0:
            await asyncio.sleep(0)
    got: list[int] = []
    while len(got) < 1000:
        got += [message.task for message in await replica.receive()]
    assert got == list(range(1000))


async def test_a_receive_that_is_cancelled_loses_nothing(line: Any) -> None:
    server, replica = line
    for number in range(20):
        receiving = asyncio.create_task(replica.receive())
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        server.send(Abort(number))
        assert await replica.receive() == [Abort(number)]


async def test_a_line_that_nobody_receives_from_keeps_no_processor_busy(line: Any) -> None:
    """As while a model loads, and the server has already sent something."""
    server, replica = line
    server.send(Abort(1))
    await asyncio.sleep(0.1)
    used = time.process_time()
    await asyncio.sleep(0.4)
    assert time.process_time() - used < 0.1
    assert await replica.receive() == [Abort(1)]


async def test_what_is_sent_before_there_is_another_end_waits_for_it(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path / 'line'}"
    server: Channel[Any, Any] = Channel.bind(context, address, FromReplica)
    server.send(Abort(1))
    await asyncio.sleep(0.05)
    server.send(Abort(2))
    await asyncio.sleep(0.05)
    replica: Channel[Any, Any] = Channel.connect(context, address, ToReplica)
    async with asyncio.timeout(5):
        got = await replica.receive()
        while len(got) < 2:
            got += await replica.receive()
    assert got == [Abort(1), Abort(2)]
    server.close()
    replica.close()
    context.destroy(linger=0)


async def test_many_messages_both_ways_at_once_all_arrive(line: Any) -> None:
    """Sending takes news of the line in; it must not be lost on who waits."""
    server, replica = line

    async def echo() -> None:
        for _ in range(500):
            for message in await replica.receive():
                replica.send(Emitted(message.task, StageOutput()))

    echoing = asyncio.create_task(echo())
    got: list[int] = []
    async with asyncio.timeout(20):
        for number in range(500):
            server.send(Abort(number))
            if number % 3:
                got += [message.task for message in await server.receive()]
        while len(got) < 500:
            got += [message.task for message in await server.receive()]
    echoing.cancel()
    assert got == list(range(500))


async def test_one_message_that_cannot_be_encoded_keeps_no_other_back(line: Any) -> None:
    server, replica = line
    bad = Emitted(1, StageOutput(TextDelta("x", [object()])))  # type: ignore[list-item]
    replica.send(Emitted(1, StageOutput(TextDelta("before"))))
    # Refusing it at once is as good as dropping it.
    with contextlib.suppress(Exception):
        replica.send(bad)
    replica.send(Emitted(1, StageOutput(TextDelta("after"))))
    async with asyncio.timeout(2):
        texts = [message.output.payload.text for message in await server.receive()]
    assert texts == ["before", "after"]


def test_every_output_counts_against_the_window() -> None:
    assert output_size(StageOutput()) > 0
    empty, full = Audio(b"", AudioFormat(1)), Audio(bytes(1000), AudioFormat(1))
    assert output_size(StageOutput(full)) - output_size(StageOutput(empty)) == 1000


async def test_who_always_finds_something_lets_others_have_their_turn(line: Any) -> None:
    server, replica = line
    for number in range(200):
        server.send(Abort(number))
        await asyncio.sleep(0)  # a batch for each
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await asyncio.sleep(0.2)  # all of them are there
    task = asyncio.create_task(other())
    async with asyncio.timeout(5):
        received = 0
        while received < 200:
            received += len(await replica.receive())
    task.cancel()
    assert turns >= 10
