"""One call as operators see it: what it was about, how it ended, how much went over the line."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from omni_grpc.run import Run
from omni_grpc.types import Request


@dataclass(slots=True)
class Rpc:
    """One call. Counted in plain attributes; told once, at its end."""

    method: str
    """Its name without the service."""
    started: float = field(default_factory=time.perf_counter)
    peer: str = ""
    code: str = ""
    """The status that was sent, by name; CANCELLED where the client left."""
    reason: str = ""
    """Of an error of this server."""
    request_id: str = ""
    tenant: str = ""
    pipeline: str = ""
    trace_id: str = ""
    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    run: Run | None = None
    """The request that it opened or attached to."""

    def reading(self, deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """The deserializer, counting."""

        def parse(data: bytes) -> Any:
            self.messages_in += 1
            self.bytes_in += len(data)
            return deserialize(data)

        return parse

    def writing(self, serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
        """The serializer, counting."""

        def encode(message: Any) -> bytes:
            data = serialize(message)
            self.messages_out += 1
            self.bytes_out += len(data)
            return data

        return encode

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.perf_counter() - self.started

    def fields(self) -> dict[str, object]:
        """What a log says of it, by name; what is not known is not in it. No secret, and nothing
        that a model reads or writes."""
        first = self.run.first_output_ms if self.run is not None else None
        named = {
            "method": self.method,
            "code": self.code,
            "reason": self.reason,
            "request_id": self.request_id,
            "tenant": self.tenant,
            "pipeline": self.pipeline,
            "peer": self.peer,
            "trace_id": self.trace_id,
        }
        return {
            **{name: value for name, value in named.items() if value},
            "duration_ms": round(self.seconds * 1e3, 3),
            **({} if first is None else {"first_output_ms": round(first, 3)}),
            "messages_in": self.messages_in,
            "bytes_in": self.bytes_in,
            "messages_out": self.messages_out,
            "bytes_out": self.bytes_out,
        }


current: ContextVar[Rpc | None] = ContextVar("rpc", default=None)
"""The call that is being answered."""


def asks(request: Request) -> None:
    """The present call asks for this."""
    if (rpc := current.get()) is not None:
        rpc.tenant, rpc.pipeline = request.options.tenant, request.pipeline[:64]


def opened(run: Run) -> None:
    """The present call is about this request."""
    if (rpc := current.get()) is not None:
        rpc.run, rpc.pipeline = run, run.plan.pipeline.name
        rpc.tenant = run.plan.request.options.tenant
