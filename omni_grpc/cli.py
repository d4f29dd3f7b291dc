"""The command line: serve · generate · describe · check · prepare."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import Annotated

import typer
import uvloop

from omni_grpc import __version__
from omni_grpc.config import PipelineConfig, ServerConfig, builtin_pipelines, load_pipeline
from omni_grpc.embedded import EmbeddedModelError, missing, prepare
from omni_grpc.errors import ConfigError, StartError
from omni_grpc.topology import check_pipeline

app = typer.Typer(no_args_is_help=True, add_completion=True, help="Omni-modal inference over gRPC.")
log = logging.getLogger("omni_grpc")


def _fail(message: object) -> typer.Exit:
    typer.secho(f"omni-grpc: {message}", fg=typer.colors.RED, err=True)
    return typer.Exit(2)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Omni-modal inference over gRPC."""
    if version:
        typer.echo(f"omni-grpc {__version__}")
        raise typer.Exit


@app.command()
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
) -> None:
    """Serves pipelines until SIGTERM or Ctrl-C."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        settings = ServerConfig(
            host=host, port=port, max_requests=max_requests, drain_timeout=drain_timeout
        )
        configs = [load_pipeline(reference) for reference in pipeline]
        for config in configs:
            check_pipeline(config)
        _prepare(configs)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, configs))
    except (ConfigError, StartError, EmbeddedModelError, ValueError) as error:
        raise _fail(error) from None


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
    call = '{"prompt": {"text": "What is the capital of France?"}, "output_modalities": ["MODALITY_TEXT"]}'
    names = ", ".join(config.name for config in configs)
    typer.echo(
        f"Serving {names} on {host}:{port}. Try: "
        f"grpcurl -plaintext -d '{call}' {host}:{port} omni_grpc.v1.OmniService/AddRequest"
    )


@app.command()
def check(
    file: Annotated[list[str], typer.Argument(help="Pipeline files, or names of built-in ones.")],
) -> None:
    """Checks pipeline files without starting anything. Exit status 2 if one is wrong."""
    wrong = False
    for reference in file:
        try:
            config = load_pipeline(reference)
            check_pipeline(config)
        except ConfigError as error:
            typer.secho(str(error), fg=typer.colors.RED, err=True)
            wrong = True
        else:
            stages = " → ".join(stage.name for stage in config.stages)
            typer.echo(f"{reference}: ok, pipeline {config.name!r}: {stages}")
    if wrong:
        raise typer.Exit(2)


@app.command(name="prepare")
def prepare_command(
    pipeline: Annotated[
        list[str] | None, typer.Argument(help="Pipelines; all built-in ones if none is named.")
    ] = None,
) -> None:
    """Downloads and builds the models that pipelines need, once; what is there stays."""
    try:
        configs = [load_pipeline(reference) for reference in pipeline or builtin_pipelines()]
        references = {stage.model for config in configs for stage in config.stages}
        prepare(references, typer.echo)
    except (ConfigError, EmbeddedModelError) as error:
        raise _fail(error) from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
