"""Spans by OpenTelemetry's API alone. Where nobody configured an SDK (see otlp.py), they cost a
microsecond and go nowhere, and a client's trace context passes through to the engines all the same.

    omni_grpc.v1.OmniService/AddRequest         one per call, child of the client's `traceparent`
    └── stage thinker                           one per task of a stage, with its replica
        └── hop thinker                         until the replica began to prepare the task
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import Token

import msgspec
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_grpc import __version__
from omni_grpc.errors import Code, OmniError
from omni_grpc.ipc import Task

_tracer = trace.get_tracer("omni_grpc", __version__)
_propagator = TraceContextTextMapPropagator()
_NO_PARENT = contexts.Context()


def use(provider: trace.TracerProvider | None) -> None:
    """From now on spans are made by this provider; None: by OpenTelemetry's global one."""
    global _tracer
    _tracer = trace.get_tracer("omni_grpc", __version__, provider)


def rpc_span(method: str, headers: Mapping[str, str]) -> RpcSpan:
    """The span of a call, to be used in a `with`; `headers` are the call's metadata. Its status is
    the caller's to set: exceptions are control flow here."""
    service, _, name = method.strip("/").partition("/")
    span = _tracer.start_span(
        f"{service}/{name}",
        _propagator.extract(headers) if headers else _NO_PARENT,
        SpanKind.SERVER,
        {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name},
    )
    return RpcSpan(span)


class RpcSpan:
    """A call's span: the current one inside its `with`, and over with it. Without a trace there is
    nothing to make current."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._token: Token[contexts.Context] | None = None

    def __enter__(self) -> Span:
        if self._span is not trace.INVALID_SPAN:
            self._token = contexts.attach(trace.set_span_in_context(self._span))
        return self._span

    def __exit__(self, *exception: object) -> None:
        if self._token is not None:
            contexts.detach(self._token)
            self._span.end()


def end_rpc(span: Span, code: str, reason: str, about: Mapping[str, str]) -> None:
    """Notes how a call ended: its status by name, the error's reason, and what it was about; empty
    values are left out."""
    if not span.is_recording():
        return
    failed = code != "OK"
    span.set_attribute("rpc.grpc.status_code", Code[code].value if failed else 0)
    span.set_attributes({f"omni_grpc.{name}": value for name, value in about.items() if value})
    if failed:
        span.set_status(Status(StatusCode.ERROR, reason or code))


def trace_id(span: Span) -> str:
    """The trace's id in hexadecimal; "" where there is no trace."""
    found = span.get_span_context()
    return trace.format_trace_id(found.trace_id) if found.is_valid else ""


class RequestTrace:
    """What the spans of one request's stages hang from: the context in which it is made."""

    def __init__(self, request_id: str, pipeline: str) -> None:
        self.request_id = request_id
        self.pipeline = pipeline
        self.context = contexts.get_current()

    def task(self, stage: str, sources: Iterable[str] = (), role: str = "") -> TaskTrace:
        """Spans for one task of a stage. `role`: of a companion."""
        return TaskTrace(self, stage, sources, role)


class TaskTrace:
    """The spans of one task: begun when it is sent, ended with the replica's last word."""

    def __init__(self, of: RequestTrace, stage: str, sources: Iterable[str], role: str) -> None:
        self._of = of
        self._stage = stage
        self._sources = sources
        self._role = role
        self._span: Span = trace.INVALID_SPAN
        self._hop: Span = trace.INVALID_SPAN

    def sent(self, task: Task, replica: int, device: str) -> Task:
        """Begins; gives the task with the trace context that its engine hangs its own spans
        from."""
        of = self._of
        self._span = _tracer.start_span(f"stage {self._stage}", of.context)
        if not self._span.get_span_context().is_valid:
            return task
        within = trace.set_span_in_context(self._span, of.context)
        if self._span.is_recording():
            self._describe(replica, device)
            self._hop = _tracer.start_span(f"hop {self._stage}", within)
            self._hop.set_attribute("omni_grpc.from", tuple(self._sources) or ("request",))
        headers: dict[str, str] = {}
        _propagator.inject(headers, within)
        options = msgspec.structs.replace(task.options, trace_headers=headers)
        return msgspec.structs.replace(task, options=options)

    def _describe(self, replica: int, device: str) -> None:
        names = {
            "omni_grpc.request_id": self._of.request_id,
            "omni_grpc.pipeline": self._of.pipeline,
            "omni_grpc.stage": self._stage,
            "omni_grpc.device": device,
            "omni_grpc.role": self._role,
        }
        self._span.set_attributes({name: value for name, value in names.items() if value})
        self._span.set_attribute("omni_grpc.replica", replica)

    def admitted(self, prepare_ms: float) -> None:
        """The replica took the task, which it had begun to prepare `prepare_ms` ago."""
        if self._span.is_recording():
            self._span.add_event("admitted", {"omni_grpc.prepare_ms": prepare_ms})
            self._hop.end(time.time_ns() - int(prepare_ms * 1e6))

    def ended(self, error: OmniError | None = None, *, lost: bool = False) -> None:
        """The last word on the task. Where it was not admitted, its hop ends here too."""
        if not self._span.is_recording():
            return
        if lost:
            self._span.set_status(Status(StatusCode.ERROR, "REPLICA_LOST"))
        elif error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error.reason))
        if self._hop.is_recording():
            self._hop.end()
        self._span.end()
