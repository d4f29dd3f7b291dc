"""The log for machines: every line an object, one line per call, no secret and no prompt."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from omni_grpc.logs import JsonFormatter
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from tests.running import ServerProcess, text_pipeline
from tests.support import ask, script

TRACE = "0af7651916cd43dd8448eb211c80319c"
METADATA = (
    ("omni-tenant", "acme"),
    ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),
    ("authorization", "Bearer s3cret-token"),
)


@pytest.fixture(scope="module")
def log() -> Iterator[list[dict[str, Any]]]:
    """The lines of a server that answered, refused, failed and was left."""
    arguments = ("--port", "0", "--log-format", "json")
    raising = text_pipeline("raising", engine="python", model="tests.failing_stages:Failing")
    with ServerProcess("echo", raising, arguments=arguments) as server:
        port = server.await_serving()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = service_pb2_grpc.OmniServiceStub(channel)
            fine = ask("a very private prompt", request_id="fine")
            assert list(stub.AddRequest(fine, timeout=10, metadata=METADATA))
            stub.GetLoad(service_pb2.GetLoadRequest(), timeout=10)
            for request in (
                ask("private too", request_id="refused", pipeline="nowhere"),
                ask("raise", request_id="failed", pipeline="raising"),
            ):
                with pytest.raises(grpc.RpcError):
                    list(stub.AddRequest(request, timeout=10, metadata=METADATA))
            slow = [script("text", outputs=1000, interval_ms=10)]
            call = stub.AddRequest(ask(request_id="left", stage_params=slow), timeout=10)
            next(call)
            call.cancel()
            server.await_log('"request_id": "left"')
        assert server.end() == 0
        yield [json.loads(line) for line in server.log.splitlines()]


def line_of(log: list[dict[str, Any]], request_id: str) -> dict[str, Any]:
    """The line at the end of the call with this request."""
    (line,) = [entry for entry in log if entry.get("request_id") == request_id]
    return line


def test_every_line_is_an_object_with_time_level_logger_and_message(
    log: list[dict[str, Any]],
) -> None:
    for line in log:
        assert {"time", "level", "logger", "message"} <= set(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert any("Serving echo, raising on" in line["message"] for line in log)


def test_a_call_ends_with_one_line_that_tells_all_of_it(log: list[dict[str, Any]]) -> None:
    line = line_of(log, "fine")
    assert line["logger"] == "omni_grpc.rpc" and line["level"] == "INFO"
    told = {name: line[name] for name in ("method", "code", "tenant", "pipeline", "trace_id")}
    assert told == {
        "method": "AddRequest",
        "code": "OK",
        "tenant": "acme",
        "pipeline": "echo",
        "trace_id": TRACE,
    }
    assert "reason" not in line
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert 0 < line["first_output_ms"] < line["duration_ms"]
    assert line["messages_in"] == 1 and line["bytes_in"] > 20
    assert line["messages_out"] >= 5 and line["bytes_out"] > 2400


def test_a_unary_answer_is_counted_in_its_line(log: list[dict[str, Any]]) -> None:
    (line,) = [entry for entry in log if entry.get("method") == "GetLoad"]
    assert line["code"] == "OK"
    assert line["messages_out"] == 1 and line["bytes_out"] > 10
    assert not {"trace_id", "first_output_ms", "request_id"} & set(line)


@pytest.mark.parametrize(
    ("request_id", "code", "reason"),
    [
        ("refused", "NOT_FOUND", "PIPELINE_NOT_FOUND"),
        ("failed", "INTERNAL", "STAGE_ERROR"),
        ("left", "CANCELLED", None),
    ],
)
def test_how_a_call_ended_is_said(
    log: list[dict[str, Any]], request_id: str, code: str, reason: str | None
) -> None:
    line = line_of(log, request_id)
    assert (line["code"], line.get("reason")) == (code, reason)


def test_no_secret_and_no_prompt_is_in_it(log: list[dict[str, Any]]) -> None:
    text = json.dumps(log)
    for word in ("s3cret", "Bearer", "private"):
        assert word not in text


def test_what_replicas_print_comes_through(log: list[dict[str, Any]]) -> None:
    lines = [line["message"] for line in log if line["logger"] == "omni_grpc.stage.text"]
    assert any("RuntimeError: 4711" in line for line in lines)


def test_an_exception_stays_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("x", 40, "f", 1, "it %s", ("failed",), None)
        record.exc_info = (ValueError, error, error.__traceback__)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "it failed" and "ValueError: two\nlines" in entry["exception"]


def test_text_is_the_default() -> None:
    with ServerProcess("echo") as server:
        server.await_serving()
        assert re.search(r"^\d{4}-\d\d-\d\d \S+ INFO listening on", server.log, re.MULTILINE)


def test_another_format_is_refused() -> None:
    with ServerProcess("echo", arguments=("--log-format", "xml")) as server:
        assert server.await_exit() == 2
        assert "xml" in server.log
