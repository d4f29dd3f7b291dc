"""How the commands that call a server reach it: the options that they share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

DEFAULT_TARGET = "localhost:50051"
TOKEN_VARIABLE = "OMNI_GRPC_TOKEN"


@dataclass(frozen=True, slots=True)
class Connection:
    """A server, and what it asks of its clients."""

    target: str
    tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    retries: int = 0

    @property
    def secure(self) -> bool:
        """Whether TLS is wanted."""
        return bool(self.tls or self.tls_ca or self.tls_cert or self.tls_key)


def options(
    target: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the server listens.")
    ] = DEFAULT_TARGET,
    tls: Annotated[
        bool, typer.Option("--tls", help="Use TLS; --tls-ca and --tls-cert do too.")
    ] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Roots that the server's certificate may have."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Our own certificate, for mTLS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="Bearer token; others may read a command line."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Send the token to another machine without TLS.")
    ] = False,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tries again so often, where the server is not reached or says that it helps; "
            "only before anything came.",
        ),
    ] = 0,
) -> Connection:
    """The connection that these options describe."""
    return Connection(target, tls, tls_ca, tls_cert, tls_key, token, insecure, retries)


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `options` in place of its parameter `connection`."""
    shared = inspect.signature(options, eval_str=True).parameters
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["connection"]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        connection = options(**{name: given.pop(name) for name in shared})
        command(**given, connection=connection)

    # What typer reads.
    parameters = [*own.values(), *shared.values()]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
