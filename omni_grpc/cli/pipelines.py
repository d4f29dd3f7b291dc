"""`omni-grpc check` and `omni-grpc prepare`: pipelines, before anything serves them."""

from __future__ import annotations

from typing import Annotated

import typer

from omni_grpc.cli.failure import ExitCode, fail
from omni_grpc.config import builtin_pipelines, load_pipeline
from omni_grpc.embedded import EmbeddedModelError, prepare
from omni_grpc.errors import ConfigError
from omni_grpc.topology import check_pipeline


def check(
    file: Annotated[list[str], typer.Argument(help="Pipeline files, or names of built-in ones.")],
) -> None:
    """Checks pipeline files without starting anything. Exit status 2 if one is wrong."""
    wrong = False
    for reference in file:
        try:
            config = load_pipeline(reference)
            check_pipeline(config, reference)
        except ConfigError as error:
            typer.secho(str(error), fg=typer.colors.RED, err=True)
            wrong = True
        else:
            stages = " → ".join(stage.name for stage in config.stages)
            typer.echo(f"{reference}: ok, pipeline {config.name!r}: {stages}")
    if wrong:
        raise typer.Exit(ExitCode.INVALID)


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
        raise fail(error) from None
