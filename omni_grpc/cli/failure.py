"""How a command ends that could not do its work: one line on stderr, and an exit code."""

from __future__ import annotations

from enum import IntEnum

import typer


class ExitCode(IntEnum):
    """Exit codes of all commands; 0 is success."""

    OTHER = 1
    INVALID = 2
    NOT_FOUND = 3
    UNAVAILABLE = 4
    DEADLINE = 5
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done · 1 failed · 2 wrong usage, or the request is invalid · "
    "3 no such pipeline · 4 server not reachable, not ready or full · 5 deadline passed · "
    "130 Ctrl-C."
)
"""For the help texts of the commands that call a server."""


def fail(message: object, code: ExitCode = ExitCode.INVALID, hint: str = "") -> typer.Exit:
    """Says why on stderr; gives the exception to raise."""
    typer.secho(f"omni-grpc: {message}", fg=typer.colors.RED, err=True)
    if hint:
        typer.echo(f"  {hint}", err=True)
    return typer.Exit(code)
