"""`omni-grpc serve`."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from omni_grpc import logs, otlp
from omni_grpc.cli.failure import fail
from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline, load_settings
from omni_grpc.config.listening import address
from omni_grpc.embedded import EmbeddedModelError, missing, prepare
from omni_grpc.errors import ConfigError, StartError
from omni_grpc.logs import LogFormat
from omni_grpc.topology import check_pipeline
from omni_grpc.types import Modality

log = logging.getLogger("omni_grpc")

YOUNG_OBJECTS = 10_000
"""How many objects are made before the garbage collector looks at them. It takes about a
millisecond then."""


Pipelines = Annotated[
    list[str], typer.Option(help="Name of a built-in pipeline, or a YAML file. Repeatable.")
]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="YAML of settings; options are over what it says."),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
AdminHost = Annotated[
    str | None,
    typer.Option(
        help="Address of AdminService. Another one than loopback needs tokens or client "
        "certificates.",
        show_default="127.0.0.1",
    ),
]
AdminPort = Annotated[
    int | None,
    typer.Option(help="Port of AdminService and channelz.", show_default="they are not served"),
]
HealthPort = Annotated[
    int | None,
    typer.Option(help="Port of health alone, in plain text, for probes.", show_default="none"),
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Serve plain text on an address that others can reach."),
]
TlsCert = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Certificate chain (PEM). Read again when it changes."),
]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="Its private key (PEM).")]
TlsClientCa = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Roots of client certificates: only clients with one enter."),
]
Tokens = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Bearer tokens that may call; see omni-grpc token."),
]
DrainDelay = Annotated[
    float | None,
    typer.Option(help="Seconds after SIGTERM until new requests are refused.", show_default="0"),
]
MergeWindow = Annotated[
    float | None,
    typer.Option(
        help="Seconds that text waits for more to join it in one message.", show_default="0"
    ),
]
BusyMergeWindow = Annotated[
    float | None,
    typer.Option(help="The same at most, while the server is busy.", show_default="0.1"),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(help="Port of Prometheus metrics; 0 picks a free one.", show_default="none"),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Where spans are sent, over OTLP.",
        show_default="OTEL_EXPORTER_OTLP_ENDPOINT, if that is set",
    ),
]


def serve(
    pipeline: Pipelines = ["echo"],  # noqa: B006 - typer reads it, nobody changes it
    config: Config = None,
    host: Host = None,
    port: Annotated[
        int | None, typer.Option(help="Port; 0 picks a free one.", show_default="50051")
    ] = None,
    admin_host: AdminHost = None,
    admin_port: AdminPort = None,
    health_port: HealthPort = None,
    insecure: Insecure = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientCa = None,
    tokens: Tokens = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Requests at once.", show_default="1024")
    ] = None,
    drain_delay: DrainDelay = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds for running requests after that.", show_default="30"),
    ] = None,
    merge_window: MergeWindow = None,
    busy_merge_window: BusyMergeWindow = None,
    metrics_port: MetricsPort = None,
    log_format: Annotated[LogFormat, typer.Option(help="Form of the log.")] = "text",
    otlp_endpoint: OtlpEndpoint = None,
) -> None:
    """Serves pipelines until SIGTERM or Ctrl-C. The first one named is the default."""
    options = {
        "host": host,
        "port": port,
        "admin_host": admin_host,
        "admin_port": admin_port,
        "health_port": health_port,
        "metrics_port": metrics_port,
        "insecure": insecure,
        "tls.cert": tls_cert,
        "tls.key": tls_key,
        "tls.client_ca": tls_client_ca,
        "auth.tokens": tokens,
        "max_requests": max_requests,
        "drain_delay": drain_delay,
        "drain_timeout": drain_timeout,
        "merge_window": merge_window,
        "busy_merge_window": busy_merge_window,
    }
    logs.set_up(log_format)
    given = {name: value for name, value in options.items() if value is not None}
    _run(config, given, pipeline, otlp_endpoint)


def _run(
    file: Path | None, options: dict[str, Any], pipelines: list[str], otlp_endpoint: str | None
) -> None:
    try:
        flush_spans = otlp.start(otlp_endpoint) if otlp.configured(otlp_endpoint) else _nothing
        settings = load_settings(file, options)
        configs = [load_pipeline(reference) for reference in pipelines]
        for reference, config in zip(pipelines, configs, strict=True):
            check_pipeline(config, reference)
        _prepare(configs)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, configs))
            flush_spans()
            # Everything is stopped. A thread of a transform that hangs must not keep the process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except (ConfigError, StartError, EmbeddedModelError, ValueError) as error:
        raise fail(error) from None


def _nothing() -> None:
    """Where no spans are sent, there are none to flush."""


def _prepare(configs: list[PipelineConfig]) -> None:
    references = {
        stage.model for config in configs for stage in config.stages if stage.engine != "python"
    }
    if missing(references):
        prepare(references, log.info)


async def _serve(settings: ServerConfig, configs: list[PipelineConfig]) -> None:
    # Imported here: the other commands do without gRPC's server side. Replicas are spawned, never
    # forked, so gRPC's fork handlers would only add noise to the log.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from omni_grpc.server import Server

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = Server(settings, configs)
    try:
        await server.start()
        log.info("listening on %s, loading", address(settings.host, server.port))
        if settings.admin_port is not None:
            log.info("AdminService on %s", address(settings.admin_host, server.admin_port))
        if settings.health_port is not None:
            log.info("health alone on %s", address(settings.host, server.health_port))
        if settings.metrics_port is not None:
            where = address(settings.host, server.metrics_port)
            log.info("metrics on http://%s/metrics", where)
        warming, stop = asyncio.create_task(server.warm()), asyncio.create_task(stopping.wait())
        await asyncio.wait((warming, stop), return_when=asyncio.FIRST_COMPLETED)
        if not warming.done():
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
            return
        await warming
        _spare_collector()
        _announce(settings, address(settings.host, server.port), configs)
        await stop
        log.info("stopping: running requests get %g s", settings.drain_timeout)
    finally:
        await server.stop()


def _spare_collector() -> None:
    """What is here now lives as long as the server: the garbage collector need not look at it again
    and again, for 20 ms at a time. And a request makes a hundred objects, of which none is garbage
    before it ends: looked at only when some dozens of requests have come."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)


def _announce(settings: ServerConfig, where: str, configs: list[PipelineConfig]) -> None:
    names = ", ".join(config.name for config in configs)
    logs.announce(f"Serving {names} on {where}. Try: {_example_call(settings, where, configs[0])}")


def _example_call(settings: ServerConfig, where: str, config: PipelineConfig) -> str:
    """A call of grpcurl that the default pipeline answers."""
    command = ["grpcurl"]
    if settings.tls is None:
        command.append("-plaintext")
    else:
        command.append("-cacert ROOTS")
        if settings.tls.client_ca:
            command.append("-cert YOURS -key ITS-KEY")
    if settings.auth is not None:
        command.append("-H 'authorization: Bearer TOKEN'")
    if "text" not in config.prompts:
        return " ".join([*command, where, "omni_grpc.v1.OmniService/GetServerInfo"])
    request: dict[str, object] = {"prompt": {"text": config.example}}
    if any(stage.output is Modality.TEXT for stage in config.stages):
        request["output_modalities"] = ["MODALITY_TEXT"]
    body = json.dumps(request).replace("'", "\\u0027")
    return " ".join([*command, f"-d '{body}'", where, "omni_grpc.v1.OmniService/AddRequest"])
