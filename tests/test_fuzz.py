"""Whatever a client sends, the answer is a success or says what is wrong with it: never UNKNOWN,
never INTERNAL. And the server serves the next one."""

from __future__ import annotations

import random
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_grpc.server import Server
from omni_grpc.v1 import service_pb2
from tests.support import ask, client, collect, freed, script, stream, stub_of

S = grpc.StatusCode
BAD = (S.UNKNOWN, S.INTERNAL)
DEPTH = 5

fuzz = settings(
    max_examples=150,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)

text = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["text", "audio", "image", "echo", "nope", "\0", "%s", "../..", "é" * 300]),
    st.integers(0, 20_000).map(lambda n: "x" * n),
)
numbers: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 6) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_STRING: text,
}


def value_of(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """One value of a field."""
    if (kind := field.message_type) is not None:
        return st.deferred(lambda: message_of(kind, depth - 1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40)
    return numbers[field.cpp_type]


@st.composite
def message_of(draw: st.DrawFn, descriptor: Any, depth: int = DEPTH) -> Message:
    """A message with some of its fields set to anything."""
    message = GetMessageClass(descriptor)()
    fields = [f for f in descriptor.fields if depth > 0 or f.message_type is None]
    if not fields:
        return message
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=id)):
        put(draw, message, field, depth)
    return message


def put(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    """Sets one field."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        for key in draw(st.lists(st.text(max_size=4), max_size=2)):
            entry = draw(value_of(value, depth))
            if value.message_type is not None:
                getattr(message, field.name)[key].CopyFrom(entry)
            else:
                getattr(message, field.name)[key] = entry
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(value_of(field, depth), max_size=3)))
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(draw(value_of(field, depth)))
    else:
        setattr(message, field.name, draw(value_of(field, depth)))


def of(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Messages of a kind."""
    return message_of(kind.DESCRIPTOR)


async def outcome(call: Any) -> grpc.StatusCode:
    """Reads a call to its end."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        assert error.code() not in BAD, error
        return error.code()
    return S.OK


async def streamed(server: Server, method: str, messages: list[bytes]) -> None:
    """A call with a stream of messages."""
    error = await stream(server, method, messages)
    assert error is None or error.code not in BAD, error


@pytest.fixture(scope="module")
async def fuzzed(echo_server: Server) -> AsyncIterator[grpc.aio.Channel]:
    """A channel; after all examples the server serves and holds nothing."""
    async with client(echo_server) as channel:
        yield channel
        assert (await collect(stub_of(channel)))[-1].HasField("finished")
    await freed(echo_server)


@fuzz
@given(request=of(service_pb2.AddRequestRequest))
async def test_any_fields(fuzzed: grpc.aio.Channel, request: Any) -> None:
    # A resumable one waits for input that nobody sends.
    await outcome(stub_of(fuzzed).AddRequest(request, timeout=0.3 if request.resumable else 5))


@fuzz
@given(request=of(service_pb2.AddRequestRequest), words=st.text(min_size=1, max_size=20))
async def test_any_fields_beside_a_good_prompt(
    fuzzed: grpc.aio.Channel, request: Any, words: str
) -> None:
    request.prompt.Clear()
    request.prompt.text = words
    for name in ("resumable", "pipeline", "request_id", "lora"):
        request.ClearField(name)
    await outcome(stub_of(fuzzed).AddRequest(request, timeout=5))


harmless = st.fixed_dictionaries(
    {},
    optional={
        "outputs": st.integers(0, 20),
        "bytes": st.integers(0, 3000),
        "interval_ms": st.floats(0, 2),
        "first_ms": st.floats(0, 2),
        "prepare_ms": st.floats(0, 2),
        "prepare_fail": st.booleans(),
        "junk": st.none(),
    },
)


@fuzz
@given(
    prompt=st.text(min_size=1, max_size=30),
    scripts=st.dictionaries(st.sampled_from(["text", "audio", "image"]), harmless),
    modalities=st.lists(st.integers(0, 5), max_size=3),
    request_id=st.text(max_size=20),
)
async def test_scripts_that_are_nearly_right(
    fuzzed: grpc.aio.Channel,
    prompt: str,
    scripts: dict[str, Any],
    modalities: list[int],
    request_id: str,
) -> None:
    request = ask(
        prompt,
        request_id=request_id,
        output_modalities=modalities,
        stage_params=[script(stage, **values) for stage, values in scripts.items()],
    )
    code = await outcome(stub_of(fuzzed).AddRequest(request, timeout=5))
    right = not any(v.get("prepare_fail") or "junk" in v for v in scripts.values())
    if right and not modalities:
        assert code is S.OK


@fuzz
@given(request=of(service_pb2.AbortRequest))
async def test_any_abort(fuzzed: grpc.aio.Channel, request: Any) -> None:
    await outcome(stub_of(fuzzed).Abort(request, timeout=5))


@settings(fuzz, max_examples=60)
@given(requests=st.lists(of(service_pb2.StreamingUpdateRequest), max_size=3))
async def test_any_update(echo_server: Server, requests: list[Any]) -> None:
    await streamed(echo_server, "StreamingUpdate", [r.SerializeToString() for r in requests])


@settings(fuzz, max_examples=60)
@given(requests=st.lists(of(service_pb2.SubmitInteractionRequest), max_size=3))
async def test_any_session(echo_server: Server, requests: list[Any]) -> None:
    await streamed(echo_server, "SubmitInteraction", [r.SerializeToString() for r in requests])


# ---------------------------------------------------------------- bytes

METHODS = list(service_pb2.DESCRIPTOR.services_by_name["OmniService"].methods)
GOOD = ask(
    "hello",
    request_id="id",
    stage_params=[script(outputs=2)],
    output_modalities=[1, 2],
    additional_information={"a": [1, "b", None, {"c": True}]},
    tokenization={"truncate_prompt_tokens": 3},
).SerializeToString()


def damaged(seed: int) -> bytes:
    """A good request with some bytes changed, left out or doubled."""
    dice, data = random.Random(seed), bytearray(GOOD)
    for _ in range(dice.randint(1, 4)):
        place = dice.randrange(len(data))
        match dice.randrange(3):
            case 0:
                data[place] = dice.randrange(256)
            case 1:
                del data[place : place + dice.randint(1, 8)]
            case _:
                data[place:place] = data[place : place + dice.randint(1, 8)]
    return bytes(data)


raw_bytes = st.one_of(
    st.binary(max_size=60),
    st.integers(0, 2**32).map(damaged),
    # Nested deeper than any parser goes.
    st.integers(1, 300).map(lambda depth: b"\x1a\x02" * depth),
    st.integers(0, 2**64 - 1).map(lambda n: b"\x0a" + struct.pack("<Q", n)),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@settings(fuzz, max_examples=60)
@given(messages=st.lists(raw_bytes, min_size=1, max_size=2))
async def test_any_bytes(
    fuzzed: grpc.aio.Channel, echo_server: Server, method: Any, messages: list[bytes]
) -> None:
    if method.client_streaming:
        await streamed(echo_server, method.name, messages)
    else:
        path = f"/{method.containing_service.full_name}/{method.name}"
        call: Any = fuzzed.unary_stream(path)
        await outcome(call(messages[0], timeout=5))


printable = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=50)


@settings(fuzz, max_examples=50)
@given(
    metadata=st.lists(
        st.tuples(
            st.sampled_from(["traceparent", "tracestate", "omni-request-id", "authorization"]),
            printable,
        ),
        max_size=4,
    )
)
async def test_any_metadata(fuzzed: grpc.aio.Channel, metadata: list[tuple[str, str]]) -> None:
    call = stub_of(fuzzed).AddRequest(ask(), metadata=tuple(metadata), timeout=5)
    assert await outcome(call) is S.OK
