"""Every refusal and failure: its code, reason and details, and nothing that it must not say."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from omni_grpc.errors import Code, DeadlineExceeded, InvalidField, OmniError, Violation
from omni_grpc.interceptors import rich_status
from omni_grpc.server import Server
from omni_grpc.types import CustomParams, Prompt, Request, StageParams, Text
from tests.conftest import Serve
from tests.faulty import SECRET
from tests.support import (
    AUDIO,
    TEXT,
    RichError,
    ask,
    broken_off,
    client,
    collect,
    echo,
    events,
    eventually,
    freed,
    in_flight,
    pipeline,
    refusal,
    rich_error,
    script,
    started,
    stub_of,
    texts,
)

S = grpc.StatusCode

FAULTY = """
name: faulty
stages:
  - {name: faulty, engine: python, model: "tests.faulty:FaultyStage", output: text}
"""
BRIDGED = """
name: bridged
stages:
  - {name: text, engine: fake}
  - {name: next, engine: fake, inputs: [text], bridge: "tests.faulty:FaultyBridge", output: text}
"""
CLOCKS = """
name: clocks
max_duration: 33
stages:
  - {name: one, engine: python, model: "tests.faulty:ClockStage", engine_args: {wait: 0.2}}
  - {name: two, engine: python, model: "tests.faulty:ClockStage", inputs: [one], output: text}
"""


def assert_is(error: RichError, code: grpc.StatusCode, reason: str, *paths: str) -> None:
    """The error is exactly this one."""
    assert (error.code, error.reason, error.domain) == (code, reason, "omni-grpc"), error
    assert set(error.violations) == set(paths), error
    assert all(error.violations.values())


def assert_retryable(error: RichError) -> None:
    """It tells when to come back, in both of the two places."""
    assert error.retry is not None and error.retry > 0
    assert error.pushback_ms == round(error.retry * 1000)


# ---------------------------------------------------------------- the contract's table


def test_each_reason_has_the_contracts_code() -> None:
    table = {
        "INVALID_ARGUMENT": "INVALID_FIELD PROMPT_TOO_LONG INVALID_MEDIA",
        "NOT_FOUND": "PIPELINE_NOT_FOUND LORA_NOT_FOUND REQUEST_NOT_FOUND",
        "FAILED_PRECONDITION": "NOT_SUPPORTED NOT_RESUMABLE",
        "ALREADY_EXISTS": "DUPLICATE_REQUEST FEEDER_ACTIVE EVENT_ID_CONFLICT",
        "RESOURCE_EXHAUSTED": "QUEUE_FULL TENANT_BUDGET MEDIA_BUDGET SLOW_CONSUMER",
        "UNAVAILABLE": "DRAINING STAGE_UNAVAILABLE MEDIA_SOURCE",
        "ABORTED": "REPLICA_LOST",
        "CANCELLED": "ABORTED_BY_CLIENT",
        "DEADLINE_EXCEEDED": "DEADLINE INPUT_TIMEOUT STAGE_TIMEOUT",
        "UNAUTHENTICATED": "UNAUTHENTICATED",
        "PERMISSION_DENIED": "PERMISSION_DENIED",
        "UNIMPLEMENTED": "NOT_IMPLEMENTED",
        "INTERNAL": "STAGE_ERROR INTERNAL",
    }
    expected = {reason: code for code, reasons in table.items() for reason in reasons.split()}
    assert {reason: kind.code.name for reason, kind in OmniError.by_reason.items()} == expected


def test_codes_are_grpcs() -> None:
    assert {code.name: code.value for code in Code} == {
        status.name: status.value[0]
        for status in grpc.StatusCode
        if status.name in Code.__members__
    }


async def test_an_unknown_pipeline(stub: Any) -> None:
    error = await refusal(stub, pipeline="nope")
    assert_is(error, S.NOT_FOUND, "PIPELINE_NOT_FOUND")
    assert error.retry is None and error.pushback_ms is None


async def test_an_unknown_lora(stub: Any) -> None:
    assert_is(await refusal(stub, lora="nope"), S.NOT_FOUND, "LORA_NOT_FOUND")


async def test_an_id_in_flight(stub: Any) -> None:
    call = await started(stub, request_id="taken", stage_params=[script(hang_at=1)])
    error = await refusal(stub, request_id="taken")
    assert_is(error, S.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    assert error.trailers["omni-request-id"] == "taken"
    call.cancel()


async def test_a_full_server(serve: Serve) -> None:
    served = await serve(echo(), max_requests=2)
    hanging = [script(hang_at=1)]
    calls = [await started(served.stub, stage_params=hanging) for _ in range(2)]
    loop = asyncio.get_running_loop()
    begin = loop.time()
    error = await refusal(served.stub)
    assert loop.time() - begin < 0.25
    assert_is(error, S.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert_retryable(error)
    for call in calls:
        call.cancel()
    await freed(served.server)
    assert (await collect(served.stub))[-1].HasField("finished")


async def test_a_retrying_client_gets_in_when_there_is_room(serve: Serve) -> None:
    served = await serve(echo(), max_requests=1)
    policy = {
        "maxAttempts": 3,
        # Far too soon and far too late: only the server's pushback lets it pass in time.
        "initialBackoff": "25s",
        "maxBackoff": "25s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    first = await started(served.stub, stage_params=[script(outputs=3, interval_ms=150)])
    async with client(served.server, ("grpc.service_config", json.dumps(config))) as channel:
        second = await collect(stub_of(channel), timeout=10)
    assert second[-1].HasField("finished")
    assert [r async for r in first][-1].HasField("finished")


async def test_a_draining_server(serve: Serve) -> None:
    served = await serve(echo())
    running = await started(served.stub, stage_params=[script(outputs=3, interval_ms=200)])
    draining = asyncio.create_task(served.server.engine.drain(20))
    await eventually(lambda: served.server.engine.draining)
    error = await refusal(served.stub)
    assert_is(error, S.UNAVAILABLE, "DRAINING")
    assert_retryable(error)
    assert [r async for r in running][-1].HasField("finished")
    await draining


async def test_what_a_drain_ends_says_so(serve: Serve) -> None:
    served = await serve(echo())
    call = await started(served.stub, stage_params=[script(hang_at=1)])
    await served.server.engine.drain(0.05)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    error = rich_error(caught.value)
    assert_is(error, S.UNAVAILABLE, "DRAINING")
    assert_retryable(error)


async def test_a_stage_without_replica(serve: Serve) -> None:
    served = await serve(echo(restart={"backoff": 7, "budget": 0}))
    error = await refusal(served.stub, stage_params=[script(die_at=0)])
    assert_is(error, S.UNAVAILABLE, "STAGE_UNAVAILABLE")
    assert_retryable(error)
    # Nobody is there now.
    error = await refusal(served.stub)
    assert_is(error, S.UNAVAILABLE, "STAGE_UNAVAILABLE")
    assert_retryable(error)


async def test_a_later_stage_without_replica_after_outputs_began(serve: Serve) -> None:
    served = await serve(echo(restart={"backoff": 7, "budget": 0}))
    await refusal(served.stub, stage_params=[script("audio", die_at=0)], output_modalities=[AUDIO])
    responses, error = await broken_off(served.stub, output_modalities=[TEXT, AUDIO])
    # What was not yet written is dropped. Only with outputs at the client a retry repeats them.
    assert "finished" not in events(responses)
    if "output" in events(responses):
        assert_is(error, S.ABORTED, "REPLICA_LOST")
    else:
        assert_is(error, S.UNAVAILABLE, "STAGE_UNAVAILABLE")


async def test_a_stage_that_fails(stub: Any) -> None:
    responses, error = await broken_off(
        stub, stage_params=[script(outputs=5, interval_ms=20, fail_at=2)]
    )
    assert_is(error, S.INTERNAL, "STAGE_ERROR")
    assert "text" in error.message
    assert "finished" not in events(responses)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_a_stage_that_fails_at_once_leaves_nothing(serve: Serve, place: int) -> None:
    """The end comes in one message with the output that wakes the next stages."""
    served = await serve(echo())
    for _ in range(20):
        error = await refusal(served.stub, stage_params=[script(outputs=3, fail_at=place)])
        assert_is(error, S.INTERNAL, "STAGE_ERROR")
    await freed(served.server)


async def test_a_later_stage_that_fails(stub: Any) -> None:
    for stage in ("audio", "image"):
        error = await refusal(stub, stage_params=[script(stage, fail_at=0)])
        assert_is(error, S.INTERNAL, "STAGE_ERROR")
        assert stage in error.message


async def test_a_stage_that_refuses_names_the_requests_own_field(stub: Any) -> None:
    error = await refusal(stub, stage_params=[script("audio"), script(prepare_fail=True)])
    assert_is(error, S.INVALID_ARGUMENT, "INVALID_FIELD", "stage_params[1].custom.prepare_fail")
    assert "stage_params[1].custom.prepare_fail" in error.message


async def test_a_later_stage_that_refuses_names_the_requests_own_field(stub: Any) -> None:
    error = await refusal(stub, stage_params=[script(), script("audio", prepare_fail=True)])
    assert_is(error, S.INVALID_ARGUMENT, "INVALID_FIELD", "stage_params[1].custom.prepare_fail")


async def test_a_stage_that_is_silent_for_too_long(serve: Serve) -> None:
    served = await serve(echo(stage_timeout=0.3))
    error = await refusal(served.stub, stage_params=[script(outputs=3, hang_at=1)], timeout=5)
    assert_is(error, S.DEADLINE_EXCEEDED, "STAGE_TIMEOUT")


async def test_a_refusal_sends_no_initial_metadata(stub: Any) -> None:
    """Retries stop where initial metadata was sent."""
    for fields in ({"pipeline": "nope"}, {"stage_params": [script(prepare_fail=True)]}):
        call = stub.AddRequest(ask(**fields))
        assert "omni-request-id" not in dict(await call.initial_metadata())
        assert await call.code() in (S.NOT_FOUND, S.INVALID_ARGUMENT)


async def test_errors_name_request_and_pod(stub: Any, echo_server: Server) -> None:
    error = await refusal(stub, request_id="größe", stage_params=[script(fail_at=1)])
    assert error.trailers["omni-request-id"] == "gr%C3%B6%C3%9Fe"
    assert error.trailers["omni-pod"] == echo_server.pod


# ---------------------------------------------------------------- time


async def test_a_request_without_deadline_gets_the_pipelines_longest(serve: Serve) -> None:
    served = await serve(echo({"max_duration": 0.3}))
    call = served.stub.AddRequest(ask(stage_params=[script(hang_at=1)]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call]
    assert_is(rich_error(caught.value), S.DEADLINE_EXCEEDED, "DEADLINE")
    await freed(served.server)


async def test_a_longer_deadline_does_not_go_beyond_the_pipelines(serve: Serve) -> None:
    served = await serve(echo({"max_duration": 0.3}))
    error = await refusal(served.stub, stage_params=[script(prepare_ms=60_000)], timeout=15)
    assert_is(error, S.DEADLINE_EXCEEDED, "DEADLINE")


async def test_the_deadlines_rest_reaches_every_stage(serve: Serve) -> None:
    served = await serve(pipeline(CLOCKS))
    first, second = map(float, texts(await collect(served.stub, timeout=9)).split())
    # On the wire a deadline is a rounded duration.
    assert 8 < first < 9.2
    # Stage two begins with stage one's first output, after its wait.
    assert first - 2 < second < first - 0.19


async def test_without_deadline_stages_get_the_pipelines_longest(serve: Serve) -> None:
    served = await serve(pipeline(CLOCKS))
    call = served.stub.AddRequest(ask())
    first, second = map(float, texts([r async for r in call]).split())
    assert 32 < first <= 33 and second < first


@pytest.mark.parametrize("rest", [0.0, -1.0])
async def test_expired_work_never_starts(serve: Serve, tmp_path: Path, rest: float) -> None:
    served = await serve(pipeline(FAULTY))
    mark = tmp_path / "started"
    params = StageParams("faulty", CustomParams({"mark": str(mark)}))
    request = Request("late", "", Prompt(Text("x")), stage_params=(params,), timeout_s=rest)
    with pytest.raises(DeadlineExceeded):
        await served.server.engine.submit(request)
    await freed(served.server)
    # What comes behind it on the same line is answered: it would have started by now.
    await collect(served.stub)
    assert not mark.exists()


# ---------------------------------------------------------------- what must not get out


@pytest.fixture
async def faulty(serve: Serve) -> Any:
    """A server whose stage does as it is told."""
    return await serve(pipeline(FAULTY))


def secret_free(error: RichError) -> bool:
    """No word of the exception is in what the client gets."""
    return not any(SECRET in str(part) for part in (error.message, *error.trailers.values()))


@pytest.mark.parametrize(
    "does",
    [
        "raise in prepare",
        "raise before any output",
        "raise after an output",
        "raise a group",
        "time out by itself",
    ],
)
async def test_text_of_a_stages_exception_stays_inside(faulty: Any, does: str) -> None:
    error = await refusal(faulty.stub, stage_params=[script("faulty", does=does)])
    assert_is(error, S.INTERNAL, "STAGE_ERROR")
    assert secret_free(error)
    assert texts(await collect(faulty.stub)) == "one two "


@pytest.mark.parametrize("place", ["construction", "push", "finish"])
async def test_text_of_a_bridges_exception_stays_inside(serve: Serve, place: str) -> None:
    served = await serve(pipeline(BRIDGED))
    error = await refusal(served.stub, text=f"raise in {place}")
    assert_is(error, S.INTERNAL, "INTERNAL")
    assert secret_free(error) and error.message == "internal error"
    assert texts(await collect(served.stub, text="fine")) == "fine"


@pytest.mark.parametrize("begins", ["give", "begin with"])
@pytest.mark.parametrize("what", ["half a surrogate pair", "a number for a text"])
async def test_a_bridge_that_gives_what_no_stage_can_read(
    serve: Serve, begins: str, what: str
) -> None:
    served = await serve(pipeline(BRIDGED))
    fine = asyncio.create_task(
        collect(served.stub, text="fine", stage_params=[script(outputs=20, interval_ms=10)])
    )
    error = await refusal(served.stub, text=f"{begins} {what}", timeout=3)
    assert error.code is S.INTERNAL
    # The same replica goes on with the others.
    assert (await fine)[-1].HasField("finished")
    assert texts(await collect(served.stub, text="fine")) == "fine"


@pytest.mark.parametrize("does", ["leak a cancellation in prepare", "leak a cancellation"])
async def test_a_cancellation_inside_a_stage_is_an_error_at_once(faulty: Any, does: str) -> None:
    loop = asyncio.get_running_loop()
    begin = loop.time()
    error = await refusal(faulty.stub, stage_params=[script("faulty", does=does)])
    assert error.code is S.INTERNAL
    assert loop.time() - begin < 1
    assert texts(await collect(faulty.stub)) == "one two "


@pytest.mark.parametrize("place", ["construction", "push", "finish"])
async def test_a_cancellation_inside_a_bridge_is_an_error_at_once(serve: Serve, place: str) -> None:
    served = await serve(pipeline(BRIDGED))
    error = await refusal(served.stub, text=f"leak a cancellation in {place}", timeout=3)
    assert error.code is S.INTERNAL
    assert texts(await collect(served.stub, text="fine", timeout=3)) == "fine"


@pytest.mark.parametrize(
    "does",
    [
        "give text that is a number",
        "give bytes for a text",
        "give an object",
        "give half a surrogate pair",
        "give a negative token id",
    ],
)
async def test_an_output_that_is_none_ends_one_request_only(faulty: Any, does: str) -> None:
    other = await started(faulty.stub, stage_params=[script("faulty", does="hang")])
    error = await refusal(faulty.stub, stage_params=[script("faulty", does=does)], timeout=5)
    assert error.code is S.INTERNAL, error
    assert texts(await collect(faulty.stub, timeout=5)) == "one two "
    assert not other.done()
    other.cancel()


async def test_a_stage_that_raises_when_it_is_cancelled_is_freed(faulty: Any) -> None:
    does = script("faulty", does="raise when cancelled")
    call = await started(faulty.stub, stage_params=[does])
    call.cancel()
    await freed(faulty.server)


@pytest.mark.parametrize(
    ("does", "reason"),
    [("find the prompt too long", "PROMPT_TOO_LONG"), ("find bad media", "INVALID_MEDIA")],
)
async def test_what_only_a_model_knows_is_refused_before_accepted(
    faulty: Any, does: str, reason: str
) -> None:
    responses, error = await broken_off(faulty.stub, stage_params=[script("faulty", does=does)])
    assert responses == []
    assert_is(error, S.INVALID_ARGUMENT, reason)


# ---------------------------------------------------------------- size


def trailers_size(error: RichError) -> int:
    """What the trailers weigh as HTTP/2 counts them: names, values and 32 bytes each."""
    sizes = [
        len(name) + 32 + (-(-len(value) // 3) * 4 if isinstance(value, bytes) else len(value))
        for name, value in error.trailers.items()
    ]
    # grpc-message: percent-encoded UTF-8.
    encoded = sum(
        1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in error.message.encode()
    )
    return sum(sizes) + encoded + len("grpc-message") + len("grpc-status") + 2 + 64


def violations(status: Any) -> list[str]:
    """The paths that the status names."""
    request = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Is(request.DESCRIPTOR):
            detail.Unpack(request)
    return [violation.field for violation in request.field_violations]


@pytest.mark.parametrize("letter", ["x", "ß", "你", "🦜"])
def test_a_status_with_1000_violations_is_small_and_keeps_the_first(letter: str) -> None:
    more = [Violation(f"field[{n}]", letter * 600) for n in range(1, 1000)]
    status = rich_status(InvalidField("field[0]", letter * 600, *more))
    assert status.ByteSize() <= 4 << 10
    assert violations(status)[:1] == ["field[0]"]


@pytest.mark.parametrize("letter", ["x", "ß", "你", "🦜"])
async def test_trailers_are_small_however_much_is_wrong(stub: Any, letter: str) -> None:
    """8 KiB is where peers begin to drop trailers."""
    request = ask(request_id=letter * 256, stage_params=[script(letter * 5000)])
    error = await refusal(stub, request)
    assert_is(error, S.INVALID_ARGUMENT, "INVALID_FIELD", "stage_params[0].stage")
    assert trailers_size(error) < 8 << 10


async def test_trailers_are_small_with_1000_violations(faulty: Any) -> None:
    does = script("faulty", does="find 1000 violations")
    error = await refusal(faulty.stub, request_id="你" * 256, stage_params=[does])
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert next(iter(error.violations)) == "stage_params[0].custom.field_0"
    assert trailers_size(error) < 8 << 10


@pytest.mark.parametrize("length", [257, 3000, 20_000, 200_000])
async def test_an_id_that_is_too_long_is_refused_with_its_path(stub: Any, length: int) -> None:
    error = await refusal(stub, request_id="i" * length)
    assert_is(error, S.INVALID_ARGUMENT, "INVALID_FIELD", "request_id")
    assert trailers_size(error) < 8 << 10


# ---------------------------------------------------------------- bytes


def raw(channel: grpc.aio.Channel, method: str) -> Any:
    """A method that takes and gives bytes."""
    return channel.unary_stream(f"/omni_grpc.v1.OmniService/{method}")


NOT_UTF8 = b"\x0a\x02\xff\xfe"
TRUNCATED = (b"\xff", b"\x0a\xff", b"\x1a" * 1000)
METHODS = ("AddRequest", "Abort", "GetServerInfo", "GetLoad", "WatchLoad")


@pytest.mark.parametrize(
    ("method", "data"),
    [
        *((method, data) for method in METHODS for data in TRUNCATED),
        ("AddRequest", NOT_UTF8),
        ("Abort", NOT_UTF8),
    ],
)
async def test_bytes_that_do_not_parse(
    stub: Any, echo_server: Server, method: str, data: bytes
) -> None:
    async with client(echo_server) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [part async for part in raw(channel, method)(data)]
    error = rich_error(caught.value)
    assert (error.code, error.reason) == (S.INVALID_ARGUMENT, "INVALID_FIELD")
    assert len(error.violations) == 1
    assert "proto" not in error.message.lower()
    assert (await collect(stub))[-1].HasField("finished")


async def test_a_request_over_the_limit(serve: Serve) -> None:
    served = await serve(echo(), max_receive_bytes=1 << 16)
    error = await refusal(served.stub, text="x" * (1 << 16))
    assert error.code is S.RESOURCE_EXHAUSTED
    # gRPC's own refusal: no details.
    assert error.reason == "" and "grpc-status-details-bin" not in error.trailers
    assert texts(await collect(served.stub, ask("y" * 60_000, output_modalities=[TEXT])))


async def test_an_unknown_method_is_unimplemented(echo_server: Server) -> None:
    async with client(echo_server) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [part async for part in raw(channel, "Nope")(b"")]
    assert caught.value.code() is S.UNIMPLEMENTED


async def test_a_refused_request_leaves_no_count(stub: Any, echo_server: Server) -> None:
    for _ in range(50):
        await refusal(stub, stage_params=[script(prepare_fail=True)])
    assert in_flight(echo_server) == 0
    assert len(echo_server.engine.orchestrator) == 0
