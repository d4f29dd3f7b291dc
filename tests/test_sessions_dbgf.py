"""Whatever a session's client says, the answer says what is wrong with it: never UNKNOWN, never
INTERNAL, and nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.sessions import Heard, Request, check_order
from tests.support import client, collect, freed, script, stub_of
from tests.test_fuzz import BAD, of

pytestmark = pytest.mark.timeout(150)
fuzz = settings(
    max_examples=1200, derandomize=False,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
INTERNAL = {grpc.StatusCode.UNKNOWN.value[0], grpc.StatusCode.INTERNAL.value[0]}
PACE = [script(outputs=5, interval_ms=1)]
SETUPS: list[Any] = [
    {"open": {"resumable": True, "stage_params": PACE}},
    {"open": {"resumable": True, "prompt": {"text": "a"}, "stage_params": PACE}},
    {"open": {"prompt": {"text": "a b c"}, "stage_params": PACE}},
]


def parts(name: str, kind: type[Message]) -> st.SearchStrategy[Any]:
    """Messages that hold one kind of thing, with anything in it."""
    return of(kind).map(lambda content: Request(**{name: content}))


said = st.one_of(
    parts("update", service_pb2.UpdateChunk),
    parts("event", service_pb2.InteractionEvent),
    parts("interrupt", service_pb2.Interrupt),
    of(Request),
    st.builds(
        lambda seq, end: Request(update={"seq": seq, "text": "x ", "end_of_segment": end}),
        st.integers(0, 4),
        st.booleans(),
    ),
    st.builds(
        lambda name, text: Request(event={"event_id": name, "prompt": text}),
        st.sampled_from(["a", "b"]),
        st.text(max_size=5),
    ),
    st.just(Request(interrupt={})),
    st.just(Request(end_input={})),
)


@pytest.fixture(scope="module")
async def fuzzed(echo_server: Server) -> AsyncIterator[Server]:
    """A server; after all examples it serves and holds nothing."""
    yield echo_server
    await freed(echo_server, within=3)
    async with client(echo_server) as channel:
        await collect(stub_of(channel))


async def answers(server: Server, messages: list[bytes]) -> list[Heard]:
    """All that is heard when this is said; from a thread, whose client keeps the server's status
    whenever it comes."""

    def call() -> list[Heard]:
        heard: list[Heard] = []
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            method: Any = channel.stream_stream(
                "/omni_grpc.v1.OmniService/SubmitInteraction",
                response_deserializer=Heard.FromString,
            )
            try:
                heard.extend(method(iter(messages), timeout=5))
            except grpc.RpcError as error:
                assert error.code() not in BAD, error
        return heard

    return await asyncio.to_thread(call)


def check(heard: list[Heard]) -> None:
    """What holds of all that is heard."""
    check_order(heard)
    for message in heard:
        assert message.event_state.status.code not in INTERNAL, message
        assert message.update_rejected.status.code not in INTERNAL, message


@fuzz
@given(setup=st.sampled_from(SETUPS), messages=st.lists(said, max_size=8))
@example(setup=SETUPS[0], messages=[Request(end_input={}), Request(interrupt={})])
@example(setup=SETUPS[1], messages=[Request(interrupt={}), Request(abort={})])
async def test_anything_behind_a_good_setup(
    fuzzed: Server, setup: Any, messages: list[Message]
) -> None:
    data = [Request(setup=setup), *messages]
    check(await answers(fuzzed, [message.SerializeToString() for message in data]))


@fuzz
@given(
    setup=of(service_pb2.InteractionSetup), messages=st.lists(said, max_size=2), good=st.booleans()
)
async def test_any_setup(fuzzed: Server, setup: Any, messages: list[Message], good: bool) -> None:
    if good:
        setup.open.prompt.text = "a"
        setup.open.pipeline = ""
    data = [Request(setup=setup), *messages]
    check(await answers(fuzzed, [message.SerializeToString() for message in data]))


@settings(fuzz, max_examples=60)
@given(messages=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=3))
async def test_bytes_that_do_not_parse_behind_a_good_setup(
    fuzzed: Server, messages: list[bytes]
) -> None:
    check(await answers(fuzzed, [Request(setup=SETUPS[0]).SerializeToString(), *messages]))
