"""Spans: one per call, one per task of a stage, one per hop; and none of the SDK where nobody asked
for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from omni_grpc import tracing
from omni_grpc.errors import ConfigError
from omni_grpc.ipc import Task
from omni_grpc.otlp import ENDPOINT_VARIABLES, start
from omni_grpc.server import Server
from omni_grpc.types import RequestOptions
from omni_grpc.v1 import service_pb2, service_pb2_grpc
from tests.guided import guided, listed
from tests.running import ServerProcess, replicas, serving, text_pipeline
from tests.support import ROOT, ask, collect, eventually, freed, refusal, script, started

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
HEADERS = (("traceparent", f"00-{TRACE}-{CALLER}-01"),)
ADD_REQUEST = "omni_grpc.v1.OmniService/AddRequest"


class Spans(InMemorySpanExporter):
    """The spans that ended."""

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of this name."""
        return [span for span in self.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only one of this name."""
        (span,) = self.named(name)
        return span

    def tree(self) -> dict[str, list[str]]:
        """The names of each span's children, by its name, all sorted; a span whose parent is not
        here is under its parent's id."""
        spans = self.get_finished_spans()
        names = {span.context.span_id: span.name for span in spans}
        children: dict[str, list[str]] = {}
        for span in spans:
            above = span.parent.span_id if span.parent is not None else 0
            children.setdefault(names.get(above, f"{above:016x}"), []).append(span.name)
        return {name: sorted(below) for name, below in children.items()}


@pytest.fixture
def spans() -> Iterator[Spans]:
    """What spans of this process go to, while a test runs."""
    memory, provider = Spans(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracing.use(provider)
    yield memory
    tracing.use(None)
    provider.shutdown()


def expected_tree(*stages: str) -> dict[str, list[str]]:
    """Of one request."""
    return {
        CALLER: [ADD_REQUEST],
        ADD_REQUEST: sorted(f"stage {stage}" for stage in stages),
        **{f"stage {stage}": [f"hop {stage}"] for stage in stages},
    }


# ---------------------------------------------------------------- the tree


async def test_a_request_of_three_stages_is_one_tree(
    stub: Any, echo_server: Server, spans: Spans
) -> None:
    call = stub.AddRequest(ask(request_id="traced"), metadata=HEADERS)
    assert [_ async for _ in call]
    await freed(echo_server)
    assert spans.tree() == expected_tree("text", "audio", "image")
    for span in spans.get_finished_spans():
        assert f"{span.context.trace_id:032x}" == TRACE
    rpc = spans.one(ADD_REQUEST)
    assert rpc.kind is SpanKind.SERVER and rpc.status.is_ok
    assert dict(rpc.attributes or {}) == {
        "rpc.system": "grpc",
        "rpc.service": "omni_grpc.v1.OmniService",
        "rpc.method": "AddRequest",
        "rpc.grpc.status_code": 0,
        "omni_grpc.request_id": "traced",
        "omni_grpc.pipeline": "echo",
    }
    for stage, sources in (("text", ("request",)), ("audio", ("text",)), ("image", ("text",))):
        task, hop = spans.one(f"stage {stage}"), spans.one(f"hop {stage}")
        assert dict(task.attributes or {}) == {
            "omni_grpc.request_id": "traced",
            "omni_grpc.pipeline": "echo",
            "omni_grpc.stage": stage,
            "omni_grpc.replica": 0,
            "omni_grpc.device": "cpu",
        }
        assert [event.name for event in task.events] == ["admitted"]
        assert (hop.attributes or {})["omni_grpc.from"] == sources
        assert _within(hop, task) and _starts_within(task, rpc)


def _within(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    return _starts_within(inner, outer) and (inner.end_time or 0) <= (outer.end_time or 0)


def _starts_within(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    return (outer.start_time or 0) <= (inner.start_time or 0) <= (outer.end_time or 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_spoken_answer_is_one_tree(voice: Any, voice_server: Server, spans: Spans) -> None:
    request = ask("Say hello.", pipeline="smol-voice")
    call = voice.AddRequest(request, metadata=HEADERS, timeout=120)
    assert [_ async for _ in call]
    await freed(voice_server, within=10)
    assert spans.tree() == expected_tree("thinker", "talker", "code2wav")
    assert (spans.one("hop talker").attributes or {})["omni_grpc.from"] == ("thinker",)


async def test_a_call_without_a_caller_begins_a_trace_of_its_own(stub: Any, spans: Spans) -> None:
    await stub.GetLoad(service_pb2.GetLoadRequest())
    rpc = spans.one("omni_grpc.v1.OmniService/GetLoad")
    assert rpc.parent is None


async def test_requests_of_one_trace_do_not_meet(stub: Any, spans: Spans) -> None:
    calls = [stub.AddRequest(ask(request_id=f"twin-{n}"), metadata=HEADERS) for n in range(2)]
    for call in calls:
        assert [_ async for _ in call]
    await eventually(lambda: len(spans.named("stage image")) == 2)
    parents = {span.parent.span_id for span in spans.named("stage text") if span.parent}
    assert parents == {span.context.span_id for span in spans.named(ADD_REQUEST)}
    assert len(parents) == 2


# ---------------------------------------------------------------- how things end


async def test_a_refusal_is_an_error_with_its_reason(stub: Any, spans: Spans) -> None:
    await refusal(stub, pipeline="none-of-these")
    rpc = spans.one(ADD_REQUEST)
    assert rpc.status.status_code is StatusCode.ERROR
    assert rpc.status.description == "PIPELINE_NOT_FOUND"
    assert (rpc.attributes or {})["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert not rpc.events, "no exception's text in it"


async def test_a_stage_that_fails_says_so(stub: Any, echo_server: Server, spans: Spans) -> None:
    await refusal(stub, stage_params=[script("audio", outputs=2, fail_at=0)])
    await freed(echo_server)
    assert spans.one("stage audio").status.description == "STAGE_ERROR"
    assert spans.one("stage text").status.is_ok
    assert spans.one(ADD_REQUEST).status.description == "STAGE_ERROR"


async def test_a_cancelled_request_ends_all_its_spans(
    stub: Any, echo_server: Server, spans: Spans
) -> None:
    call = await started(stub, stage_params=[script("text", outputs=1000, interval_ms=10)])
    call.cancel()
    await freed(echo_server)
    await eventually(lambda: spans.named(ADD_REQUEST))
    assert spans.one(ADD_REQUEST).status.description == "CANCELLED"
    assert "stage text" in spans.tree()[ADD_REQUEST]


async def test_a_lost_replica_ends_its_span_and_the_retry_has_one(spans: Spans) -> None:
    config = text_pipeline("lossy", replicas=2)
    async with serving(config) as running:
        call = running.omni.AddRequest(
            ask(stage_params=[script("text", outputs=1, first_ms=700)]), timeout=20
        )
        await eventually(lambda: _held(running.server) == 1)
        number = next(slot.replica for slot in _slots(running.server) if slot.load.running)
        replicas("lossy", "text")[number].kill()
        assert [_ async for _ in call]
        await eventually(lambda: len(spans.named("stage text")) == 2)
        lost, again = spans.named("stage text")
        assert lost.status.description == "REPLICA_LOST" and again.status.is_ok
        assert (lost.attributes or {})["omni_grpc.replica"] == number
        assert (again.attributes or {})["omni_grpc.replica"] == 1 - number


def _slots(server: Server) -> Sequence[Any]:
    return server.engine.pools[0].statistics()


def _held(server: Server) -> int:
    return sum(slot.load.running for slot in _slots(server))


# ---------------------------------------------------------------- what engines get


def sent(options: RequestOptions) -> Task:
    """A task as a replica gets it."""
    task = Task(1, "r", None, 1.0, options=options)
    return tracing.RequestTrace("r", "p").task("thinker").sent(task, 0, "cpu")


def test_an_engine_gets_its_stages_span(spans: Spans) -> None:
    with tracing.rpc_span("/s/M", dict(HEADERS)):
        headers = sent(RequestOptions(trace_headers=dict(HEADERS))).options.trace_headers
    assert headers is not None
    _, found, parent, flags = headers["traceparent"].split("-")
    assert (found, flags) == (TRACE, "01")
    assert parent != CALLER


def test_without_an_sdk_the_callers_context_passes_through() -> None:
    headers = {**dict(HEADERS), "tracestate": "vendor=1"}
    with tracing.rpc_span("/s/M", headers):
        assert sent(RequestOptions()).options.trace_headers == headers
    with tracing.rpc_span("/s/M", {}):
        assert sent(RequestOptions()).options.trace_headers is None


async def test_companions_have_spans_too(spans: Spans) -> None:
    async with serving(guided("pair")) as running:
        prompt = {"text": "a ring", "negative_text": listed(("cfg", "dull", {}))}
        await collect(running.omni, prompt=prompt)
        await freed(running.server)
    roles = sorted(
        str((s.attributes or {}).get("omni_grpc.role", "")) for s in spans.named("stage thinker")
    )
    assert roles == ["", "cfg"]


# ---------------------------------------------------------------- where spans go


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.services |= {
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its URL."""
    received = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield received, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.mark.parametrize("variable", [None, "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_spans_reach_a_collector_before_the_server_ends(
    collector: tuple[Collector, str], variable: str | None
) -> None:
    received, url = collector
    arguments = ("--port", "0", *(() if variable else ("--otlp-endpoint", url)))
    environment = {variable: url} if variable else {}
    with ServerProcess("echo", arguments=arguments, environment=environment) as server:
        port = server.await_serving()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.OmniServiceStub(channel)
            assert list(stub.AddRequest(ask(), timeout=10))
        assert server.end() == 0
    assert received.services == {"omni-grpc"}
    assert set(received.names) >= {ADD_REQUEST, "stage text", "hop audio", "stage image"}


def test_a_collector_that_does_not_answer_does_not_keep_the_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ServerProcess("echo", arguments=("--port", "0", "--otlp-endpoint", url)) as server:
            port = server.await_serving()
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = service_pb2_grpc.OmniServiceStub(channel)
                assert list(stub.AddRequest(ask(), timeout=10))
            # An export alone would take ten seconds.
            assert server.end(seconds=9) == 0
            assert "the last spans were not sent" in server.log


def test_an_endpoint_that_is_no_url_fails_the_start() -> None:
    with pytest.raises(ConfigError, match="'localhost:4317' is no http"):
        start("localhost:4317")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, without the variables that turn tracing on."""
    kept = {k: v for k, v in os.environ.items() if k not in ENDPOINT_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


SERVE = """
import asyncio, sys
from omni_grpc import otlp
from omni_grpc.config import ServerConfig, load_pipeline
from omni_grpc.server import Server
import omni_grpc.cli.serve

async def main():
    server = Server(ServerConfig(port=0, metrics_port=0), [load_pipeline("echo")])
    await server.start()
    await server.stop(0)

assert not otlp.configured(None)
asyncio.run(main())
heavy = ("opentelemetry.sdk", "opentelemetry.exporter")
print([name for name in sys.modules if name.startswith(heavy)])
"""


def test_nothing_of_the_sdk_is_imported_where_not_configured() -> None:
    done = python(SERVE)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_missing_sdk_fails_the_start_and_names_the_extra() -> None:
    code = """
import sys
sys.modules["opentelemetry.sdk"] = None
from omni_grpc.cli import main
sys.argv = ["omni-grpc", "serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:1"]
main()
"""
    done = python(code)
    assert done.returncode == 2
    assert "omni-grpc[tracing]" in done.stderr and "Traceback" not in done.stderr
