"""`omni-grpc serve`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Annotated

import typer
import uvloop

from omni_grpc.cli.failure import fail
from omni_grpc.config import PipelineConfig, ServerConfig, load_pipeline
from omni_grpc.embedded import EmbeddedModelError, missing, prepare
from omni_grpc.errors import ConfigError, StartError
from omni_grpc.topology import check_pipeline
from omni_grpc.types import Modality

log = logging.getLogger("omni_grpc")


def serve(
    pipeline: Annotated[
        list[str], typer.Option(help="Name of a built-in pipeline, or a YAML file. Repeatable.")
    ] = ["echo"],  # noqa: B006 - typer reads it, nobody changes it
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.")] = 50051,
    max_requests: Annotated[int, typer.Option(help="Requests at once.")] = 1024,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for running requests after SIGTERM.")
    ] = 30.0,
    merge_window: Annotated[
        float, typer.Option(help="Seconds that text waits for more to join it in one message.")
    ] = 0.0,
) -> None:
    """Serves pipelines until SIGTERM or Ctrl-C. The first one named is the default."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        settings = ServerConfig(
            host=host,
            port=port,
            max_requests=max_requests,
            drain_timeout=drain_timeout,
            merge_window=merge_window,
        )
        configs = [load_pipeline(reference) for reference in pipeline]
        for reference, config in zip(pipeline, configs, strict=True):
            check_pipeline(config, reference)
        _prepare(configs)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, configs))
            # Everything is stopped. A thread of a transform that hangs must not keep the process.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except (ConfigError, StartError, EmbeddedModelError, ValueError) as error:
        raise fail(error) from None


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
        log.info("listening on %s:%d, loading", settings.host, server.port)
        warming, stop = asyncio.create_task(server.warm()), asyncio.create_task(stopping.wait())
        await asyncio.wait((warming, stop), return_when=asyncio.FIRST_COMPLETED)
        if not warming.done():
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
            return
        await warming
        _announce(settings.host, server.port, configs)
        await stop
        log.info("stopping: running requests get %g s", settings.drain_timeout)
    finally:
        await server.stop()


def _announce(host: str, port: int, configs: list[PipelineConfig]) -> None:
    names = ", ".join(config.name for config in configs)
    typer.echo(f"Serving {names} on {host}:{port}. Try: {_example_call(configs[0], host, port)}")


def _example_call(config: PipelineConfig, host: str, port: int) -> str:
    """A call of grpcurl that the default pipeline answers."""
    if "text" not in config.prompts:
        return f"grpcurl -plaintext {host}:{port} omni_grpc.v1.OmniService/GetServerInfo"
    request: dict[str, object] = {"prompt": {"text": config.example}}
    if any(stage.output is Modality.TEXT for stage in config.stages):
        request["output_modalities"] = ["MODALITY_TEXT"]
    body = json.dumps(request).replace("'", "\\u0027")
    return f"grpcurl -plaintext -d '{body}' {host}:{port} omni_grpc.v1.OmniService/AddRequest"
