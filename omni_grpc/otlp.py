"""Sends spans to a collector. The only file that imports OpenTelemetry's SDK, and only when it is
asked to: the extra `tracing`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from threading import Thread

from omni_grpc import tracing
from omni_grpc.errors import ConfigError

log = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FLUSH_S = 2.0
"""Longest wait for the last spans to be sent."""


def configured(endpoint: str | None) -> bool:
    """Whether spans have somewhere to go: to `endpoint`, or where the standard variables say."""
    return bool(endpoint) or any(os.environ.get(name) for name in ENDPOINT_VARIABLES)


def start(endpoint: str | None) -> Callable[[], None]:
    """From now on, this process's spans are sent to `endpoint` (a URL; None: the standard
    variables'), over gRPC unless OTEL_EXPORTER_OTLP_PROTOCOL says `http/protobuf`. Returns what
    sends the last of them. Raises ConfigError."""
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"the OTLP endpoint {endpoint!r} is no http:// or https:// URL")
    protocol = next((v for name in PROTOCOL_VARIABLES if (v := os.environ.get(name))), "grpc")
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

        exporter: SpanExporter
        match protocol:
            case "grpc":
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
            case "http/protobuf":
                from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

                path = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
                exporter = http.OTLPSpanExporter(endpoint=path)
            case _:
                raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not supported")
    except ImportError as error:
        raise ConfigError(
            f"an OTLP endpoint is set, but {error.name} is not installed: "
            "pip install 'omni-grpc[tracing]'"
        ) from None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "omni-grpc"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracing.use(provider)
    log.info("spans are sent over %s", protocol)
    return lambda: _flush(provider.force_flush)


def _flush(flush: Callable[[], bool]) -> None:
    # In a thread: an exporter goes on trying for as long as its own timeouts say.
    flushing = Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        log.warning("the last spans were not sent within %g s", FLUSH_S)
