"""The command line: serve · generate · speak · live · describe · load · check · prepare · token.

The commands that call a server know nothing but `omni_grpc_client`."""

from __future__ import annotations

from typing import Annotated

import typer

from omni_grpc import __version__
from omni_grpc.cli.describe import describe
from omni_grpc.cli.failure import EXIT_CODES
from omni_grpc.cli.generate import EPILOG, generate
from omni_grpc.cli.live import LIVE_EPILOG, live
from omni_grpc.cli.load import load
from omni_grpc.cli.pipelines import check, prepare_command
from omni_grpc.cli.serve import serve
from omni_grpc.cli.speak import SPEAK_EPILOG, speak
from omni_grpc.cli.streams import prepare_streams
from omni_grpc.cli.token import token

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    help="Omni-modal inference over gRPC.",
    # A traceback must not show a token: typer's default, but not in every version that we take.
    pretty_exceptions_show_locals=False,
)
app.command()(serve)
app.command(epilog=EPILOG)(generate)
app.command(epilog=SPEAK_EPILOG)(speak)
app.command(epilog=LIVE_EPILOG)(live)
app.command(epilog=EXIT_CODES)(describe)
app.command(epilog=EXIT_CODES)(load)
app.command()(check)
app.command(name="prepare")(prepare_command)
app.command()(token)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Omni-modal inference over gRPC."""
    if version:
        typer.echo(f"omni-grpc {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    prepare_streams()
    app()
